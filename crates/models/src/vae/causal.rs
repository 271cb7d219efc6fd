//! Layers of autoencoders for videos: convolutions in space and time that look at the past only.
//!
//! R1. A clip is `[n_frames, h, w, c]`. It comes in chunks; what a layer must remember of the chunks before is in [`History`], and layers
//!     are called in the same order for each chunk.
//! R2. Frames before the first are zeros. So of a single picture only the last frame of a kernel ever meets anything, and
//!     [`Time::Still`] has no other.
//! R3. A convolution over three frames is one in the plane over three times the channels: frames lie side by side in their pixels, and a
//!     window of them is a view.

use denoised_nn::{After, Attend, Conv2d, Ctx, Linear, Result, RmsNorm, Scope, attend, split};
use denoised_tensor::{Activation, PatchOrder, Tensor};

/// Frames of a kernel.
const N_WINDOW: usize = 3;

/// Frames before the first that a window holds.
const N_BEFORE: usize = N_WINDOW - 1;

/// Whether there is a past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// Every frame is a picture of its own.
    Still,
    /// Frames follow each other.
    Moving,
}

/// What the layers of a network remember of earlier chunks of one clip.
#[derive(Debug, Default)]
pub(super) struct History {
    kept: Vec<Kept>,
    next: usize,
}

/// What one layer remembers.
#[derive(Clone, Debug, Default)]
enum Kept {
    #[default]
    Nothing,
    /// That there was a first chunk, which does not count.
    Begun,
    /// Frames side by side, `[1, h, w, n c]`.
    Frames(Tensor),
}

impl History {
    /// To be called before each chunk.
    pub(super) fn rewind(&mut self) {
        self.next = 0;
    }

    /// What the layer whose turn it is remembers.
    fn turn(&mut self) -> &mut Kept {
        let idx = self.next;
        self.next += 1;
        if self.kept.len() <= idx {
            self.kept.resize(idx + 1, Kept::Nothing);
        }
        &mut self.kept[idx]
    }
}

/// Frames side by side, behind those that came before them.
struct Strip {
    /// `[1, h, w, (n_before + n_frames) c]`
    pixels: Tensor,
    n_before: usize,
    c: usize,
}

impl Strip {
    /// Room for `n_frames`, and what is kept before them.
    fn new(ctx: &Ctx<'_>, kept: &Kept, n_before: usize, [n_frames, h, w, c]: [usize; 4]) -> Result<Self> {
        let pixels = ctx.alloc(&[1, h, w, (n_before + n_frames) * c])?;
        let before = pixels.narrow(3, 0, n_before * c)?;
        match kept {
            Kept::Frames(frames) => ctx.backend.copy(frames, &before)?,
            Kept::Nothing | Kept::Begun => ctx.backend.fill(&before, 0.0)?,
        }
        Ok(Self { pixels, n_before, c })
    }

    /// Frames `first ..`, the earliest of those before being 0.
    fn frames(&self, first: usize, n_frames: usize) -> Result<Tensor> {
        self.pixels.narrow(3, first * self.c, n_frames * self.c)
    }

    /// Where frame `idx` belongs.
    fn frame(&self, idx: usize) -> Result<Tensor> {
        self.frames(self.n_before + idx, 1)
    }

    /// A copy of the last frames, as many as there are before the first.
    fn last(&self, ctx: &Ctx<'_>) -> Result<Kept> {
        let n_frames = self.pixels.dim(3) / self.c;
        let last = self.frames(n_frames - self.n_before, self.n_before)?;
        let copy = ctx.alloc(last.dims())?;
        ctx.backend.copy(&last, &copy)?;
        Ok(Kept::Frames(copy))
    }
}

fn after(residual: Option<&Tensor>) -> After<'_> {
    After {
        residual,
        ..After::default()
    }
}

fn extents(x: &Tensor) -> [usize; 4] {
    [0, 1, 2, 3].map(|dim| x.dim(dim))
}

/// Norm of each pixel: `x / max(|x|, 1e-12) sqrt(c) gamma`.
#[derive(Debug)]
pub(super) struct PixelNorm(RmsNorm);

impl PixelNorm {
    pub(super) fn new(scope: &mut Scope<'_>, c: usize) -> Self {
        // `mean(x^2) + eps` is nowhere below what the bound on the norm allows, and above it the same in f32.
        let eps = (1e-24 / c as f64) as f32;
        Self(RmsNorm::named(scope, "gamma", c, eps))
    }

    fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        self.0.forward_into(ctx, x, out)
    }
}

/// A convolution of side 3 over the frame and the two before it.
#[derive(Debug)]
pub(super) struct CausalConv {
    conv: Conv2d,
    time: Time,
}

impl CausalConv {
    pub(super) fn new(scope: &mut Scope<'_>, time: Time, c_in: usize, c_out: usize) -> Self {
        let conv = match time {
            Time::Still => Conv2d::same3_of_frames(scope, "@last", c_in, c_out),
            Time::Moving => Conv2d::same3_of_frames(scope, "@frames", N_WINDOW * c_in, c_out),
        };
        Self { conv, time }
    }

    /// Of `x` or, with a norm, of SiLU of the norm of `x`; plus `residual`. Lets go of `x` as soon as it can.
    pub(super) fn forward(
        &self,
        ctx: &Ctx<'_>,
        history: &mut History,
        x: Tensor,
        norm: Option<&PixelNorm>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        if self.time == Time::Still {
            let x = match norm {
                None => x,
                Some(norm) => {
                    let normed = ctx.alloc(x.dims())?;
                    norm.forward_into(ctx, &x, &normed)?;
                    ctx.backend.activation(&normed, Activation::Silu, &normed)?;
                    normed
                }
            };
            return self.conv.forward(ctx, &x, after(residual));
        }
        let n_frames = x.dim(0);
        let kept = history.turn();
        let strip = Strip::new(ctx, kept, N_BEFORE, extents(&x))?;
        for idx in 0..n_frames {
            let frame = x.narrow(0, idx, 1)?;
            match norm {
                None => ctx.backend.copy(&frame, &strip.frame(idx)?)?,
                Some(norm) => norm.forward_into(ctx, &frame, &strip.frame(idx)?)?,
            }
        }
        drop(x);
        if norm.is_some() {
            let all = strip.frames(N_BEFORE, n_frames)?;
            ctx.backend.activation(&all, Activation::Silu, &all)?;
        }
        *kept = strip.last(ctx)?;
        let mut dims = self.conv.out_dims(&strip.pixels);
        dims[0] = n_frames;
        let out = ctx.alloc(&dims)?;
        for idx in 0..n_frames {
            let residual = residual.map(|x| x.narrow(0, idx, 1)).transpose()?;
            let window = strip.frames(idx, N_WINDOW)?;
            let out = out.narrow(0, idx, 1)?;
            self.conv
                .forward_into(ctx, &window, after(residual.as_ref()), &out)?;
        }
        Ok(out)
    }
}

/// Norm, SiLU, convolution, twice; plus the input.
#[derive(Debug)]
pub(super) struct ResidualBlock {
    norm1: PixelNorm,
    conv1: CausalConv,
    norm2: PixelNorm,
    conv2: CausalConv,
    /// Where the number of channels changes.
    shortcut: Option<Linear>,
}

impl ResidualBlock {
    pub(super) fn new(scope: &mut Scope<'_>, time: Time, c_in: usize, c_out: usize) -> Self {
        Self {
            norm1: PixelNorm::new(&mut scope.at("norm1"), c_in),
            conv1: CausalConv::new(&mut scope.at("conv1"), time, c_in, c_out),
            norm2: PixelNorm::new(&mut scope.at("norm2"), c_out),
            conv2: CausalConv::new(&mut scope.at("conv2"), time, c_out, c_out),
            shortcut: (c_in != c_out).then(|| Linear::new(&mut scope.at("conv_shortcut"), c_in, c_out)),
        }
    }

    pub(super) fn forward(&self, ctx: &Ctx<'_>, history: &mut History, x: Tensor) -> Result<Tensor> {
        let residual = match &self.shortcut {
            None => x.clone(),
            Some(shortcut) => shortcut.forward(ctx, &x, After::default())?,
        };
        let x = self.conv1.forward(ctx, history, x, Some(&self.norm1), None)?;
        self.conv2
            .forward(ctx, history, x, Some(&self.norm2), Some(&residual))
    }
}

/// Attention of one head over all positions of a frame, added to its input.
#[derive(Debug)]
struct FrameAttention {
    norm: PixelNorm,
    qkv: Linear,
    out: Linear,
}

impl FrameAttention {
    fn new(scope: &mut Scope<'_>, c: usize) -> Self {
        Self {
            norm: PixelNorm::new(&mut scope.at("norm"), c),
            qkv: Linear::new(&mut scope.at("to_qkv"), c, 3 * c),
            out: Linear::new(&mut scope.at("proj"), c, c),
        }
    }

    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        let [n_frames, h, w, c] = extents(x);
        let x_tokens = x.reshape(&[n_frames, h * w, c])?;
        let normed = ctx.alloc(x_tokens.dims())?;
        self.norm.forward_into(ctx, &x_tokens, &normed)?;
        let [q, k, v] = split(&self.qkv.forward(ctx, &normed, After::default())?)?;
        drop(normed);
        let how = Attend::all(1);
        let attended = attend(ctx, &q, &k, &v, how)?;
        self.out
            .forward(ctx, &attended, After::residual(&x_tokens))?
            .reshape(x.dims())
    }
}

/// The middle of encoder and decoder.
#[derive(Debug)]
pub(super) struct MidBlock {
    first: ResidualBlock,
    attention: FrameAttention,
    last: ResidualBlock,
}

impl MidBlock {
    pub(super) fn new(scope: &mut Scope<'_>, time: Time, c: usize) -> Self {
        Self {
            first: ResidualBlock::new(&mut scope.at("resnets.0"), time, c, c),
            attention: FrameAttention::new(&mut scope.at("attentions.0"), c),
            last: ResidualBlock::new(&mut scope.at("resnets.1"), time, c, c),
        }
    }

    pub(super) fn forward(&self, ctx: &Ctx<'_>, history: &mut History, x: Tensor) -> Result<Tensor> {
        let x = self.first.forward(ctx, history, x)?;
        let x = self.attention.forward(ctx, &x)?;
        self.last.forward(ctx, history, x)
    }
}

/// Twice the size; with a convolution in time twice the frames too, except those of the first chunk.
#[derive(Debug)]
pub(super) struct Enlarge {
    /// Makes two frames of one, side by side.
    time_conv: Option<Linear>,
    conv: Conv2d,
}

impl Enlarge {
    pub(super) fn new(scope: &mut Scope<'_>, is_temporal: bool, c_in: usize, c_out: usize) -> Self {
        let time_conv = is_temporal.then(|| {
            let mut scope = scope.at("time_conv");
            Linear::of_frames(&mut scope, "@frames", N_WINDOW * c_in, 2 * c_in)
        });
        Self {
            time_conv,
            conv: Conv2d::upsampled3(&mut scope.at("resample.1"), c_in, c_out),
        }
    }

    pub(super) fn forward(&self, ctx: &Ctx<'_>, history: &mut History, x: Tensor) -> Result<Tensor> {
        let Some(time_conv) = &self.time_conv else {
            return self.conv.forward(ctx, &x, After::default());
        };
        let kept = history.turn();
        if matches!(kept, Kept::Nothing) {
            *kept = Kept::Begun;
            return self.conv.forward(ctx, &x, After::default());
        }
        let n_frames = x.dim(0);
        let c = x.dim(3);
        let strip = Strip::new(ctx, kept, N_BEFORE, extents(&x))?;
        for idx in 0..n_frames {
            ctx.backend.copy(&x.narrow(0, idx, 1)?, &strip.frame(idx)?)?;
        }
        let mut dims = self.conv.out_dims(&x);
        dims[0] = 2 * n_frames;
        drop(x);
        *kept = strip.last(ctx)?;
        let out = ctx.alloc(&dims)?;
        for idx in 0..n_frames {
            let two = time_conv.forward(ctx, &strip.frames(idx, N_WINDOW)?, After::default())?;
            for half in 0..2 {
                let out = out.narrow(0, 2 * idx + half, 1)?;
                let frame = two.narrow(3, half * c, c)?;
                self.conv.forward_into(ctx, &frame, After::default(), &out)?;
            }
        }
        Ok(out)
    }
}

/// Half the size; with a convolution in time half the frames too, except those of the first chunk.
#[derive(Debug)]
pub(super) struct Reduce {
    /// Makes one frame of three.
    time_conv: Option<Linear>,
    conv: Conv2d,
}

impl Reduce {
    pub(super) fn new(scope: &mut Scope<'_>, is_temporal: bool, c: usize) -> Self {
        let time_conv = is_temporal.then(|| {
            let mut scope = scope.at("time_conv");
            Linear::of_frames(&mut scope, "@frames", N_WINDOW * c, c)
        });
        Self {
            time_conv,
            conv: Conv2d::halved3(&mut scope.at("resample.1"), c, c, [0, 0, 1, 1]),
        }
    }

    /// Of an even number of frames, where there is a convolution in time and this is not the first chunk.
    pub(super) fn forward(&self, ctx: &Ctx<'_>, history: &mut History, x: Tensor) -> Result<Tensor> {
        let Some(time_conv) = &self.time_conv else {
            return self.conv.forward(ctx, &x, After::default());
        };
        let kept = history.turn();
        if matches!(kept, Kept::Nothing) {
            let out = self.conv.forward(ctx, &x, After::default())?;
            // A copy, since a shortcut is added to what is returned.
            let last = out.narrow(0, out.dim(0) - 1, 1)?;
            let copy = ctx.alloc(last.dims())?;
            ctx.backend.copy(&last, &copy)?;
            *kept = Kept::Frames(copy);
            return Ok(out);
        }
        let n_frames = x.dim(0);
        let mut dims = self.conv.out_dims(&x);
        dims[0] = n_frames;
        let strip = Strip::new(ctx, kept, 1, dims)?;
        for idx in 0..n_frames {
            let frame = x.narrow(0, idx, 1)?;
            self.conv
                .forward_into(ctx, &frame, After::default(), &strip.frame(idx)?)?;
        }
        drop(x);
        *kept = strip.last(ctx)?;
        dims[0] = n_frames / 2;
        let out = ctx.alloc(&dims)?;
        for idx in 0..n_frames / 2 {
            let out = out.narrow(0, idx, 1)?;
            let window = strip.frames(2 * idx, N_WINDOW)?;
            time_conv.forward_into(ctx, &window, After::default(), &out)?;
        }
        Ok(out)
    }
}

/// How a shortcut without weights goes from one size to another: a pixel of `n_frames` frames of `side` by `side` pixels becomes one (or
/// the other way round), and channels are averaged or repeated to fit. Fine channels are ordered (coarse channel, frame, row, column).
#[derive(Clone, Copy, Debug)]
pub(super) struct Shortcut {
    pub(super) c_in: usize,
    pub(super) c_out: usize,
    pub(super) n_frames: usize,
    pub(super) side: usize,
}

impl Shortcut {
    fn n_pixels(&self) -> usize {
        self.n_frames * self.side * self.side
    }

    /// Whether [`Shortcut::add_reduced`] can be.
    pub(super) fn can_reduce(&self) -> bool {
        (self.c_in * self.n_pixels()).is_multiple_of(self.c_out)
    }

    /// Whether [`Shortcut::add_enlarged`] can be.
    pub(super) fn can_enlarge(&self) -> bool {
        (self.c_out * self.n_pixels()).is_multiple_of(self.c_in)
    }

    /// Adds means of the pixels and channels of `x` to `out`, which is smaller. Zeros come before the first frame where it takes more.
    pub(super) fn add_reduced(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        let (area, n_group) = (self.side * self.side, self.c_in * self.n_pixels() / self.c_out);
        let n_positions = out.dim(1) * out.dim(2);
        let n_missing = (out.dim(0) * self.n_frames).saturating_sub(x.dim(0));
        for frame_idx in 0..out.dim(0) {
            let patches = ctx.alloc(&[n_positions, self.c_in, self.n_frames, area])?;
            for idx in 0..self.n_frames {
                let of_frame = patches.narrow(2, idx, 1)?;
                let Some(x_idx) = (frame_idx * self.n_frames + idx).checked_sub(n_missing) else {
                    ctx.backend.fill(&of_frame, 0.0)?;
                    continue;
                };
                let cut = ctx.alloc(&[1, n_positions, self.c_in * area])?;
                let frame = x.narrow(0, x_idx, 1)?;
                ctx.backend
                    .patchify(&frame, self.side, PatchOrder::ChannelFirst, &cut)?;
                let cut = cut.reshape(of_frame.dims())?;
                ctx.backend.copy(&cut, &of_frame)?;
            }
            let groups = ctx.alloc(&[n_group, n_positions, self.c_out])?;
            let patches = patches.reshape(&[n_positions, self.c_out, n_group])?;
            ctx.backend.permute(&patches, &[2, 0, 1], &groups)?;
            drop(patches);
            let sum = groups.narrow(0, 0, 1)?;
            for idx in 1..n_group {
                ctx.backend.add(&sum, &groups.narrow(0, idx, 1)?, &sum)?;
            }
            ctx.backend.affine(&sum, 1.0 / n_group as f32, 0.0, &sum)?;
            let out = out.narrow(0, frame_idx, 1)?;
            let mean = sum.reshape(out.dims())?;
            ctx.backend.add(&out, &mean, &out)?;
        }
        Ok(())
    }

    /// Adds copies of the pixels and channels of `x` to `out`, which is larger. Of the first frames of a clip the last copies count.
    pub(super) fn add_enlarged(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        let (area, n_repeats) = (self.side * self.side, self.c_out * self.n_pixels() / self.c_in);
        let [n_frames, h, w, _] = extents(x);
        let n_left_out = (n_frames * self.n_frames).saturating_sub(out.dim(0));
        for frame_idx in 0..n_frames {
            let repeated = ctx.alloc(&[h * w, self.c_in, n_repeats])?;
            let frame = x.narrow(0, frame_idx, 1)?.reshape(&[h * w, self.c_in, 1])?;
            ctx.backend.copy(&frame, &repeated)?;
            let repeated = repeated.reshape(&[h * w, self.c_out, self.n_frames, area])?;
            for idx in 0..self.n_frames {
                let Some(out_idx) = (frame_idx * self.n_frames + idx).checked_sub(n_left_out) else {
                    continue;
                };
                let of_frame = repeated.narrow(2, idx, 1)?;
                let patches = ctx.alloc(of_frame.dims())?;
                ctx.backend.copy(&of_frame, &patches)?;
                let patches = patches.reshape(&[1, h * w, self.c_out * area])?;
                let out = out.narrow(0, out_idx, 1)?;
                let whole = ctx.alloc(out.dims())?;
                ctx.backend
                    .unpatchify(&patches, self.side, PatchOrder::ChannelFirst, &whole)?;
                ctx.backend.add(&out, &whole, &out)?;
            }
        }
        Ok(())
    }
}
