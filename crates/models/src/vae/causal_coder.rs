//! Decoder and encoder of `AutoencoderKLWan` and `AutoencoderKLQwenImage`.
//!
//! A clip goes through a latent frame at a time, so that memory does not depend on its length; clips of a batch one after the other. The
//! pictures of [`Time::Still`] have no past and go through together.

use super::{
    Decoder, Encoder,
    causal::{CausalConv, Enlarge, History, MidBlock, PixelNorm, Reduce, ResidualBlock, Shortcut, Time},
    causal_config::{CHUNK, CausalConfig},
    latents_of,
};
use denoised_nn::{After, Ctx, Linear, Result, Scope};
use denoised_tensor::Tensor;

/// Tensors of the encoder half.
pub(crate) const ENCODER_NAMES: [&str; 2] = ["encoder.*", "quant_conv.*"];

/// Tensors of frames that follow each other, which single pictures do not need. Ends of names.
pub(crate) const TIME_NAMES: [&str; 2] = ["*.time_conv.weight", "*.time_conv.bias"];

/// Latents to pixels.
#[derive(Debug)]
pub(crate) struct CausalDecoder {
    config: CausalConfig,
    post_quant: Linear,
    conv_in: CausalConv,
    mid: MidBlock,
    sizes: Vec<Size<Enlarge>>,
    norm_out: PixelNorm,
    conv_out: CausalConv,
}

/// Pixels to latents.
#[derive(Debug)]
pub(crate) struct CausalEncoder {
    config: CausalConfig,
    conv_in: CausalConv,
    sizes: Vec<Size<Reduce>>,
    mid: MidBlock,
    norm_out: PixelNorm,
    conv_out: CausalConv,
    quant: Linear,
}

/// What happens at one size, and how the next is reached.
#[derive(Debug)]
struct Size<T> {
    resnets: Vec<ResidualBlock>,
    resize: Option<T>,
    shortcut: Option<Shortcut>,
}

impl CausalDecoder {
    pub(crate) fn new(root: &mut Scope<'_>, config: &CausalConfig) -> Self {
        let (time, n_latent) = (config.time, config.n_latent);
        let post_quant = Linear::new(&mut root.at("post_quant_conv"), n_latent, n_latent);
        let mut root = root.at("decoder");
        let widths = &config.decoder_widths;
        let conv_in = CausalConv::new(&mut root.at("conv_in"), time, n_latent, widths[0]);
        let mid = MidBlock::new(&mut root.at("mid_block"), time, widths[0]);
        let mut sizes = Vec::with_capacity(config.n_sizes());
        let mut width = widths[0];
        for (idx, &size_width) in widths[1..].iter().enumerate() {
            let mut scope = root.at(format_args!("up_blocks.{idx}"));
            let mut resnets = Vec::with_capacity(config.n_resnets + 1);
            for resnet_idx in 0..=config.n_resnets {
                let mut scope = scope.at(format_args!("resnets.{resnet_idx}"));
                resnets.push(ResidualBlock::new(&mut scope, time, width, size_width));
                width = size_width;
            }
            let is_last = idx + 1 == config.n_sizes();
            let name = if config.is_residual {
                "upsampler"
            } else {
                "upsamplers.0"
            };
            let resize = (!is_last).then(|| {
                width = if config.is_residual { width } else { width / 2 };
                let is_temporal = time == Time::Moving && config.is_temporal_up(idx);
                Enlarge::new(&mut scope.at(name), is_temporal, size_width, width)
            });
            let shortcut = config.enlarging(idx).filter(|_| config.is_residual);
            sizes.push(Size {
                resnets,
                resize,
                shortcut,
            });
        }
        let c_out = 3 * config.patch * config.patch;
        Self {
            post_quant,
            conv_in,
            mid,
            sizes,
            norm_out: PixelNorm::new(&mut root.at("norm_out"), width),
            conv_out: CausalConv::new(&mut root.at("conv_out"), time, width, c_out),
            config: config.clone(),
        }
    }

    /// The next frames `[n_frames, h, w, c]` of a clip as pixels, `patch^2` of them in the channels of each.
    fn chunk(&self, ctx: &Ctx<'_>, history: &mut History, x: Tensor) -> Result<Tensor> {
        history.rewind();
        let mut x = self.conv_in.forward(ctx, history, x, None, None)?;
        x = self.mid.forward(ctx, history, x)?;
        for size in &self.sizes {
            let before = size.shortcut.map(|shortcut| (shortcut, x.clone()));
            for resnet in &size.resnets {
                x = resnet.forward(ctx, history, x)?;
            }
            if let Some(enlarge) = &size.resize {
                x = enlarge.forward(ctx, history, x)?;
            }
            if let Some((shortcut, before)) = before {
                shortcut.add_enlarged(ctx, &before, &x)?;
            }
        }
        self.conv_out.forward(ctx, history, x, Some(&self.norm_out), None)
    }
}

impl Decoder for CausalDecoder {
    fn decode(&self, ctx: &Ctx<'_>, latents: &Tensor, n_frames: usize) -> Result<Tensor> {
        let config = &self.config;
        let [n_batch, rows, w, c] = [0, 1, 2, 3].map(|dim| latents.dim(dim));
        let h = rows / n_frames.max(1);
        let scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        let per_channel = |values: &[f32]| ctx.upload_f32(values, &[c]);
        ctx.backend
            .mul(latents, &per_channel(&config.deviations)?, &scaled)?;
        ctx.backend.add(&scaled, &per_channel(&config.means)?, &scaled)?;
        let x = ctx.cast(&scaled)?;
        drop(scaled);
        let x = self.post_quant.forward(ctx, &x, After::default())?;
        let (out_h, out_w) = (config.factor() * h, config.factor() * w);
        if config.time == Time::Still {
            let x = x.reshape(&[n_batch * n_frames, h, w, c])?;
            let pixels = self.chunk(ctx, &mut History::default(), x)?;
            return pixels.reshape(&[n_batch, n_frames * out_h, out_w, 3]);
        }
        let n_frames_out = 1 + (n_frames - 1) * config.temporal_factor();
        let out = ctx.alloc(&[n_batch, n_frames_out * out_h, out_w, 3])?;
        for batch_idx in 0..n_batch {
            let mut history = History::default();
            let mut first_row = 0;
            for frame_idx in 0..n_frames {
                let frame = x.narrow(0, batch_idx, 1)?.narrow(1, frame_idx * h, h)?;
                let pixels = self.chunk(ctx, &mut history, frame)?;
                let n_rows = pixels.dim(0) * out_h;
                let out = out.narrow(0, batch_idx, 1)?.narrow(1, first_row, n_rows)?;
                unfold(ctx, &pixels, config.patch, &out)?;
                first_row += n_rows;
            }
        }
        Ok(out)
    }
}

impl CausalEncoder {
    /// Whether the files have this half.
    pub(crate) fn is_stored(root: &Scope<'_>) -> bool {
        root.is_stored("encoder.conv_in.weight")
    }

    pub(crate) fn new(root: &mut Scope<'_>, config: &CausalConfig) -> Self {
        let (time, n_moments) = (config.time, 2 * config.n_latent);
        let quant = Linear::new(&mut root.at("quant_conv"), n_moments, n_moments);
        let mut root = root.at("encoder");
        let widths = &config.encoder_widths;
        let c_in = 3 * config.patch * config.patch;
        let conv_in = CausalConv::new(&mut root.at("conv_in"), time, c_in, widths[0]);
        let mut sizes = Vec::with_capacity(config.n_sizes());
        let mut width = widths[0];
        // Without shortcuts everything is numbered in one row.
        let mut n_named = 0;
        for (idx, &size_width) in widths[1..].iter().enumerate() {
            let mut name = |of_residual: String| match config.is_residual {
                true => format!("down_blocks.{idx}.{of_residual}"),
                false => {
                    n_named += 1;
                    format!("down_blocks.{}", n_named - 1)
                }
            };
            let mut resnets = Vec::with_capacity(config.n_resnets);
            for resnet_idx in 0..config.n_resnets {
                let name = name(format!("resnets.{resnet_idx}"));
                resnets.push(ResidualBlock::new(&mut root.at(name), time, width, size_width));
                width = size_width;
            }
            let is_last = idx + 1 == config.n_sizes();
            let resize = (!is_last).then(|| {
                let is_temporal = time == Time::Moving && config.is_temporal[idx];
                Reduce::new(&mut root.at(name("downsampler".to_owned())), is_temporal, width)
            });
            sizes.push(Size {
                resnets,
                resize,
                shortcut: config.is_residual.then(|| config.reducing(idx)),
            });
        }
        Self {
            conv_in,
            sizes,
            mid: MidBlock::new(&mut root.at("mid_block"), time, width),
            norm_out: PixelNorm::new(&mut root.at("norm_out"), width),
            conv_out: CausalConv::new(&mut root.at("conv_out"), time, width, n_moments),
            quant,
            config: config.clone(),
        }
    }

    /// The next frames of a clip, `patch^2` pixels in the channels of each, as latents with their variances.
    fn chunk(&self, ctx: &Ctx<'_>, history: &mut History, x: Tensor) -> Result<Tensor> {
        history.rewind();
        let mut x = self.conv_in.forward(ctx, history, x, None, None)?;
        for size in &self.sizes {
            let before = size.shortcut.map(|shortcut| (shortcut, x.clone()));
            for resnet in &size.resnets {
                x = resnet.forward(ctx, history, x)?;
            }
            if let Some(reduce) = &size.resize {
                x = reduce.forward(ctx, history, x)?;
            }
            if let Some((shortcut, before)) = before {
                shortcut.add_reduced(ctx, &before, &x)?;
            }
        }
        x = self.mid.forward(ctx, history, x)?;
        self.conv_out.forward(ctx, history, x, Some(&self.norm_out), None)
    }

    /// Mean and log variance of every latent, `[batch, n_frames_out h, w, 2 c]`.
    fn moments(&self, ctx: &Ctx<'_>, pixels: &Tensor, n_frames: usize) -> Result<Tensor> {
        let config = &self.config;
        let [n_batch, rows, out_w] = [0, 1, 2].map(|dim| pixels.dim(dim));
        let out_h = rows / n_frames.max(1);
        let (h, w) = (out_h / config.factor(), out_w / config.factor());
        let n_moments = 2 * config.n_latent;
        let pixels = ctx.cast(pixels)?;
        if config.time == Time::Still {
            let x = pixels.reshape(&[n_batch * n_frames, out_h, out_w, 3])?;
            let moments = self.chunk(ctx, &mut History::default(), x)?;
            return moments.reshape(&[n_batch, n_frames * h, w, n_moments]);
        }
        let n_chunks = 1 + (n_frames - 1) / CHUNK;
        let n_per_chunk = CHUNK / config.temporal_factor();
        let n_frames_out = 1 + (n_chunks - 1) * n_per_chunk;
        let out = ctx.alloc(&[n_batch, n_frames_out * h, w, n_moments])?;
        for batch_idx in 0..n_batch {
            let mut history = History::default();
            let (mut first_frame, mut first_row) = (0, 0);
            for chunk_idx in 0..n_chunks {
                let n_frames = if chunk_idx == 0 { 1 } else { CHUNK };
                let chunk = pixels.narrow(0, batch_idx, 1)?;
                let chunk = chunk.narrow(1, first_frame * out_h, n_frames * out_h)?;
                let x = fold(ctx, &chunk, n_frames, config.patch)?;
                let moments = self.chunk(ctx, &mut history, x)?;
                let n_rows = moments.dim(0) * h;
                let out = out.narrow(0, batch_idx, 1)?.narrow(1, first_row, n_rows)?;
                ctx.backend.copy(&moments.reshape(out.dims())?, &out)?;
                first_frame += n_frames;
                first_row += n_rows;
            }
        }
        Ok(out)
    }
}

impl Encoder for CausalEncoder {
    /// Frames after the last whole chunk are left out.
    fn encode(
        &self,
        ctx: &Ctx<'_>,
        pixels: &Tensor,
        n_frames: usize,
        noise: Option<&Tensor>,
    ) -> Result<Tensor> {
        let config = &self.config;
        let moments = self.moments(ctx, pixels, n_frames)?;
        let moments = self.quant.forward(ctx, &moments, After::default())?;
        latents_of(ctx, &moments, noise, (&config.deviations, &config.means))
    }
}

/// `[n_frames, h, w, 3 patch^2]`, features `(c, dx, dy)`, to pixels `[1, n_frames h patch, w patch, 3]`.
fn unfold(ctx: &Ctx<'_>, x: &Tensor, patch: usize, out: &Tensor) -> Result<()> {
    let [n_frames, h, w] = [0, 1, 2].map(|dim| x.dim(dim));
    let x = x.reshape(&[n_frames * h, w, 3, patch, patch])?;
    let out = out.reshape(&[n_frames * h, patch, w, patch, 3])?;
    ctx.backend.permute(&x, &[0, 4, 1, 3, 2], &out)
}

/// Inverse of [`unfold`].
fn fold(ctx: &Ctx<'_>, pixels: &Tensor, n_frames: usize, patch: usize) -> Result<Tensor> {
    let (rows, w) = (pixels.dim(1) / patch, pixels.dim(2) / patch);
    let out = ctx.alloc(&[rows, w, 3, patch, patch])?;
    let pixels = pixels.reshape(&[rows, patch, w, patch, 3])?;
    ctx.backend.permute(&pixels, &[0, 2, 4, 3, 1], &out)?;
    out.reshape(&[n_frames, rows / n_frames, w, 3 * patch * patch])
}
