//! How Qwen2.5-VL sees: transformers' `Qwen2_5_VisionTransformerPretrainedModel`, and pictures within a text.
//!
//! R1. A picture is cut into patches, of which `merge²` neighbours become one token; those of a token lie one behind the other.
//! R2. In most blocks a patch sees the patches of its window only. Tokens are therefore kept window by window, equal windows together, so
//!     that an attention over all windows of a kind is one of a batch; where all see all the order is of no matter.

use super::{
    pictures::{Pixels, QwenPictures},
    qwen::{Norm, Position, QwenEncoder},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Attend, Ctx, Linear, Result, Scope, attend, split};
use denoised_tensor::{Activation, GateOrder, RopeStyle, Tensor, TensorError};
use serde_json::Value;

const EPS: f32 = 1e-6;

/// Widths and switches, as `vision_config` says.
#[derive(Clone, Debug)]
pub(crate) struct QwenVisionConfig {
    n_channels: usize,
    n_inner: usize,
    n_blocks: usize,
    n_heads: usize,
    /// Channels of a token of the language model.
    pub(crate) n_out: usize,
    patch: usize,
    n_times: usize,
    /// Patches along the side of a token.
    merge: usize,
    /// Tokens along the side of a window.
    window: usize,
    /// Blocks in which all see all.
    full_blocks: Vec<usize>,
    theta: f64,
}

impl QwenVisionConfig {
    /// Reads `vision_config` of a `Qwen2_5_VLForConditionalGeneration`; missing keys have transformers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let vision = match config.value("vision_config") {
            Some(Value::Object(vision)) => vision.clone(),
            _ => return Err(config.wrong("vision_config", "an object").into()),
        };
        let config = Config::new(config.path(), vision);
        config.only("model_type", &["qwen2_5_vl_vision".into(), "qwen2_5_vl".into()])?;
        config.only("hidden_act", &["silu".into(), "swish".into()])?;
        config.only("in_channels", &[3.into()])?;
        config.only("in_chans", &[3.into()])?;
        let theta = match config.value("rope_parameters") {
            None | Some(Value::Null) => 10_000.0,
            Some(Value::Object(rope)) => {
                let rope = Config::new(config.path(), rope.clone());
                rope.only("rope_type", &["axial".into()])?;
                let theta = rope.f64_or("rope_theta", 10_000.0)?;
                rope.deny_unread(&[])?;
                theta
            }
            Some(_) => return Err(config.wrong("rope_parameters", "an object").into()),
        };
        let (patch, merge) = (
            config.usize_or("patch_size", 14)?,
            config.usize_or("spatial_merge_size", 2)?,
        );
        let window_px = config.usize_or("window_size", 112)?;
        let default_full = || vec![7, 15, 23, 31];
        let read = Self {
            n_channels: config.usize_or("hidden_size", 3584)?,
            n_inner: config.usize_or("intermediate_size", 3420)?,
            n_blocks: config.usize_or("depth", 32)?,
            n_heads: config.usize_or("num_heads", 16)?,
            n_out: config.usize_or("out_hidden_size", 3584)?,
            patch,
            n_times: config.usize_or("temporal_patch_size", 2)?,
            merge,
            window: window_px
                .checked_div(merge)
                .and_then(|n| n.checked_div(patch))
                .unwrap_or(0),
            full_blocks: config
                .usizes("fullatt_block_indexes")?
                .unwrap_or_else(default_full),
            theta,
        };
        config.within("hidden_size", read.n_channels, 1..=1 << 16)?;
        config.within("intermediate_size", read.n_inner, 1..=1 << 18)?;
        config.within("depth", read.n_blocks, 1..=512)?;
        config.within("num_heads", read.n_heads, 1..=1 << 12)?;
        config.within("out_hidden_size", read.n_out, 1..=1 << 16)?;
        config.within("patch_size", read.patch, 1..=256)?;
        config.within("spatial_merge_size", read.merge, 1..=16)?;
        config.within("temporal_patch_size", read.n_times, 1..=16)?;
        if read.window == 0 {
            return Err(config
                .wrong("window_size", "at least patch_size times spatial_merge_size")
                .into());
        }
        // Rows and columns turn one half of a head's channel pairs each.
        if !read.n_channels.is_multiple_of(read.n_heads)
            || !(read.n_channels / read.n_heads).is_multiple_of(4)
        {
            return Err(config
                .wrong(
                    "num_heads",
                    "a divisor of hidden_size whose heads have a multiple of 4 channels",
                )
                .into());
        }
        if !(read.theta.is_finite() && read.theta > 1.0) {
            return Err(config.wrong("rope_parameters", "a rope_theta above 1").into());
        }
        config.deny_unread(&[
            "dtype",
            "initializer_range",
            "spatial_patch_size",
            "tokens_per_second",
            "torch_dtype",
        ])?;
        Ok(read)
    }

    /// What does not fit a processor's settings.
    ///
    /// # Errors
    /// In words.
    pub(crate) fn check_fit(&self, pictures: &QwenPictures) -> std::result::Result<(), String> {
        let own = [self.patch, self.merge, self.n_times];
        let theirs = [pictures.patch, pictures.merge, pictures.n_times];
        if own == theirs {
            return Ok(());
        }
        Err(format!(
            "the processor cuts pictures by patch, token and time of {theirs:?}, the text encoder takes {own:?}"
        ))
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct QwenVision {
    patches: Linear,
    blocks: Vec<Block>,
    merger_norm: Norm,
    merger: [Linear; 2],
    config: QwenVisionConfig,
}

#[derive(Debug)]
struct Block {
    norm1: Norm,
    qkv: Linear,
    out: Linear,
    norm2: Norm,
    gate_up: Linear,
    down: Linear,
}

/// Equal windows of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Windows {
    /// First row and column, in tokens.
    at: [usize; 2],
    /// Windows above and beside each other.
    n: [usize; 2],
    /// Rows and columns of each, in tokens.
    size: [usize; 2],
}

impl Windows {
    /// Windows of `side` tokens over `rows` and `columns`: whole ones, then those that are cut at the right, at the bottom, at both.
    fn of(rows: usize, columns: usize, side: usize) -> Vec<Self> {
        let along = |len: usize| {
            let whole = (0, len / side, side);
            let rest = (
                len / side * side,
                usize::from(!len.is_multiple_of(side)),
                len % side,
            );
            [whole, rest]
        };
        let mut all = Vec::new();
        for (row, n_rows, height) in along(rows) {
            for (column, n_columns, width) in along(columns) {
                if n_rows * n_columns > 0 {
                    all.push(Self {
                        at: [row, column],
                        n: [n_rows, n_columns],
                        size: [height, width],
                    });
                }
            }
        }
        all
    }

    fn n_windows(&self) -> usize {
        self.n[0] * self.n[1]
    }

    /// Tokens of all of them.
    fn n_tokens(&self) -> usize {
        self.n_windows() * self.size[0] * self.size[1]
    }

    /// Row and column of every token.
    fn tokens(&self) -> impl Iterator<Item = [usize; 2]> + '_ {
        let windows = (0..self.n[0]).flat_map(|y| (0..self.n[1]).map(move |x| [y, x]));
        windows.flat_map(move |[y, x]| {
            let (top, left) = (self.at[0] + y * self.size[0], self.at[1] + x * self.size[1]);
            (0..self.size[0]).flat_map(move |dy| (0..self.size[1]).map(move |dx| [top + dy, left + dx]))
        })
    }
}

impl QwenVision {
    /// Below `visual` or, as newer versions of transformers write it, `model.visual`.
    pub(crate) fn new(root: &mut Scope<'_>, config: QwenVisionConfig) -> Self {
        let place = ["model.visual", "visual"];
        let is_stored = |place: &&str| root.is_stored(&format!("{place}.patch_embed.proj.weight"));
        let place = place.into_iter().find(is_stored).unwrap_or("visual");
        let mut root = root.at(place);
        let (n, n_merged) = (config.n_channels, config.n_channels * config.merge * config.merge);
        let n_features = 3 * config.n_times * config.patch * config.patch;
        let patches = Linear::without_bias(&mut root.at("patch_embed.proj"), n_features, n);
        let blocks = (0..config.n_blocks)
            .map(|block_idx| Block::new(&mut root.at(format_args!("blocks.{block_idx}")), &config))
            .collect();
        let mut merger = root.at("merger");
        Self {
            patches,
            blocks,
            merger_norm: Norm::new(&mut merger.at("ln_q"), n, EPS),
            merger: [
                Linear::new(&mut merger.at("mlp.0"), n_merged, n_merged),
                Linear::new(&mut merger.at("mlp.2"), n_merged, config.n_out),
            ],
            config,
        }
    }

    /// Its tensors' names, for a text encoder that is shown no pictures; an entry ends with `*` for any text.
    pub(crate) const NAMES: [&'static str; 2] = ["visual.*", "model.visual.*"];

    /// A picture to be put into a text. Its sides are multiples of a token's.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn see(&self, ctx: &Ctx<'_>, pixels: &Pixels) -> Result<Seen> {
        let side = self.config.patch * self.config.merge;
        Ok(Seen {
            tokens: self.forward(ctx, pixels)?,
            rows: pixels.height / side,
            columns: pixels.width / side,
        })
    }

    /// The tokens of a picture, row by row, as `[1, tokens, n_out]`. Its sides are multiples of a token's.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, pixels: &Pixels) -> Result<Tensor> {
        let config = &self.config;
        let side = config.patch * config.merge;
        let [rows, columns] = [pixels.height / side, pixels.width / side];
        let windows = Windows::of(rows, columns, config.window);
        let features = self.features(pixels, &windows);
        let n_patches = rows * columns * config.merge * config.merge;
        let features = ctx.upload_f32(&features, &[1, n_patches, features.len() / n_patches.max(1)])?;
        let x = self
            .patches
            .forward(ctx, &ctx.cast(&features)?, After::default())?;
        let [cosines, sines] = self.rotary(ctx, &windows)?;
        for (block_idx, block) in self.blocks.iter().enumerate() {
            let is_full = config.full_blocks.contains(&block_idx);
            let windows = (!is_full).then_some(&windows[..]);
            block.forward(ctx, config, &x, [&cosines, &sines], windows)?;
        }
        let x = self.merger_norm.forward(ctx, &x)?;
        let n_merged = config.n_channels * config.merge * config.merge;
        let x = x.reshape(&[1, rows * columns, n_merged])?;
        let x = self.merger[0].forward(ctx, &x, After::activation(Activation::GeluErf))?;
        let x = self.merger[1].forward(ctx, &x, After::default())?;
        by_rows(ctx, &x, &windows, [rows, columns])
    }

    /// The patches that make up each token, in the order of the tokens.
    fn patches_of<'a>(&self, windows: &'a [Windows]) -> impl Iterator<Item = [usize; 2]> + 'a {
        let merge = self.config.merge;
        let tokens = windows.iter().flat_map(Windows::tokens);
        tokens.flat_map(move |[row, column]| {
            (0..merge).flat_map(move |dy| (0..merge).map(move |dx| [row * merge + dy, column * merge + dx]))
        })
    }

    /// Channel by channel, time by time, the pixels of every patch.
    fn features(&self, pixels: &Pixels, windows: &[Windows]) -> Vec<f32> {
        let (patch, n_times) = (self.config.patch, self.config.n_times);
        let mut features = Vec::with_capacity(pixels.values.len() * n_times);
        for [row, column] in self.patches_of(windows) {
            for channel in 0..3 {
                // A picture stands still.
                for _ in 0..n_times {
                    for y in row * patch..(row + 1) * patch {
                        let line = &pixels.values[(y * pixels.width + column * patch) * 3..][..patch * 3];
                        features.extend(line.iter().skip(channel).step_by(3));
                    }
                }
            }
        }
        features
    }

    /// Cosines and sines, f32 `[patches, head_dim / 2]`: rows turn the first half of the pairs, columns the second.
    fn rotary(&self, ctx: &Ctx<'_>, windows: &[Windows]) -> Result<[Tensor; 2]> {
        let n_pairs = self.config.n_channels / self.config.n_heads / 2;
        let n_each = n_pairs / 2;
        let frequencies: Vec<f32> = (0..n_each)
            .map(|pair| {
                let exponent = (2 * pair) as f32 / n_pairs as f32;
                1.0 / self.config.theta.powf(f64::from(exponent)) as f32
            })
            .collect();
        let mut angles = Vec::new();
        for position in self.patches_of(windows) {
            for at in position {
                angles.extend(
                    frequencies
                        .iter()
                        .map(|frequency| f64::from(at as f32 * frequency)),
                );
            }
        }
        let dims = [angles.len() / n_pairs, n_pairs];
        let of = |function: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|angle| function(*angle) as f32).collect();
            ctx.upload_f32(&values, &dims)
        };
        Ok([of(f64::cos)?, of(f64::sin)?])
    }
}

/// Tokens that lie window by window, row by row.
fn by_rows(ctx: &Ctx<'_>, x: &Tensor, windows: &[Windows], [rows, columns]: [usize; 2]) -> Result<Tensor> {
    let n = x.dim(2);
    let out = ctx.alloc(&[rows, columns, n])?;
    let mut done = 0;
    for group in windows {
        let ([n_down, n_across], [height, width]) = (group.n, group.size);
        let tokens = x.narrow(1, done, group.n_tokens())?;
        done += group.n_tokens();
        let tokens = tokens.reshape(&[n_down, n_across, height, width, n])?;
        let lines = ctx.alloc(&[n_down, height, n_across, width, n])?;
        ctx.backend.permute(&tokens, &[0, 2, 1, 3, 4], &lines)?;
        let (height, width) = (n_down * height, n_across * width);
        let place = out
            .narrow(0, group.at[0], height)?
            .narrow(1, group.at[1], width)?;
        ctx.backend.copy(&lines.reshape(&[height, width, n])?, &place)?;
    }
    out.reshape(&[1, rows * columns, n])
}

impl Block {
    fn new(scope: &mut Scope<'_>, config: &QwenVisionConfig) -> Self {
        let n = config.n_channels;
        let norm1 = Norm::new(&mut scope.at("norm1"), n, EPS);
        let mut attention = scope.at("attn");
        let qkv = Linear::new(&mut attention.at("qkv"), n, 3 * n);
        let out = Linear::new(&mut attention.at("proj"), n, n);
        let norm2 = Norm::new(&mut scope.at("norm2"), n, EPS);
        let mut mlp = scope.at("mlp");
        let gate_up = Linear::fused(&mut mlp, &["gate_proj", "up_proj"], n, 2 * config.n_inner, true);
        let down = Linear::new(&mut mlp.at("down_proj"), config.n_inner, n);
        Self {
            norm1,
            qkv,
            out,
            norm2,
            gate_up,
            down,
        }
    }

    /// In place; without `windows` all patches see each other.
    fn forward(
        &self,
        ctx: &Ctx<'_>,
        config: &QwenVisionConfig,
        x: &Tensor,
        [cosines, sines]: [&Tensor; 2],
        windows: Option<&[Windows]>,
    ) -> Result<()> {
        let h = self.norm1.forward(ctx, x)?;
        let qkv = self.qkv.forward(ctx, &h, After::default())?;
        let [q, k, v] = split(&qkv)?;
        for x in [&q, &k] {
            ctx.backend.rope(x, cosines, sines, RopeStyle::Halves, x)?;
        }
        let how = Attend::all(config.n_heads);
        let h = match windows {
            None => attend(ctx, &q, &k, &v, how)?,
            Some(windows) => {
                let h = ctx.alloc(q.dims())?;
                let mut done = 0;
                for group in windows {
                    let n_windows = group.n_windows();
                    let n_patches = group.n_tokens() * config.merge * config.merge;
                    let of_group = |x: &Tensor| {
                        let dims = [n_windows, n_patches / n_windows, config.n_channels];
                        x.narrow(1, done, n_patches)?.reshape(&dims)
                    };
                    let seen = attend(ctx, &of_group(&q)?, &of_group(&k)?, &of_group(&v)?, how)?;
                    ctx.backend.copy(&seen, &of_group(&h)?)?;
                    done += n_patches;
                }
                h
            }
        };
        self.out.forward_into(ctx, &h, After::residual(x), x)?;

        let h = self.norm2.forward(ctx, x)?;
        let halves = self.gate_up.forward(ctx, &h, After::default())?;
        let inner = ctx.alloc_like(&halves, config.n_inner)?;
        ctx.backend
            .gated(&halves, Activation::Silu, GateOrder::FirstActivated, &inner)?;
        self.down.forward_into(ctx, &inner, After::residual(x), x)
    }
}

/// A picture within a text.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// `[1, tokens, n_channels]`, row by row.
    pub(crate) tokens: Tensor,
    /// Rows and columns of tokens.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl QwenEncoder {
    /// As [`QwenEncoder::forward`] without padding, of a text in which runs of the id `pad` stand for `pictures`, in their order.
    ///
    /// Their tokens are at positions of a text: what transformers 5 computes for callers that do not say which tokens are of pictures, as
    /// diffusers' pipelines do not.
    ///
    /// # Errors
    /// The device's, other runs than there are pictures, or a state that is not there.
    pub(crate) fn forward_seeing(
        &self,
        ctx: &Ctx<'_>,
        ids: &[u32],
        pad: u32,
        pictures: &[Seen],
        states: &[usize],
    ) -> Result<Vec<Tensor>> {
        let mismatch = || {
            let n_tokens: Vec<usize> = pictures
                .iter()
                .map(|picture| picture.rows * picture.columns)
                .collect();
            let n_places = ids.iter().filter(|id| **id == pad).count();
            TensorError::Shape {
                op: "pictures in a text",
                detail: format!("tokens {n_tokens:?} in {n_places} places"),
            }
        };
        let x = self.embed(ctx, ids)?;
        let mut positions: Vec<Position> = Vec::with_capacity(ids.len());
        let mut pictures_left = pictures.iter();
        let mut next = 0;
        while positions.len() < ids.len() {
            let at = positions.len();
            if ids[at] != pad {
                positions.push([next; 3]);
                next += 1;
                continue;
            }
            let picture = pictures_left.next().ok_or_else(mismatch)?;
            let n_tokens = picture.rows * picture.columns;
            let places = ids
                .get(at..at + n_tokens)
                .filter(|places| places.iter().all(|id| *id == pad));
            if places.is_none() || n_tokens == 0 {
                return Err(mismatch());
            }
            ctx.backend.copy(&picture.tokens, &x.narrow(1, at, n_tokens)?)?;
            positions.extend((0..n_tokens as u32).map(|token| [next + token; 3]));
            next += n_tokens as u32;
        }
        if pictures_left.next().is_some() {
            return Err(mismatch());
        }
        self.forward_embedded(ctx, x, &positions, ids.len(), states)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{
        qwen::QwenConfig,
        tables::{TestModel, config_of, ids_of, numbers, relative_error, table},
    };

    // `tests/tables/make_qwen_vision.py`.
    const TABLE: &str = "qwen_vision.json";

    fn pixels(value: &Value) -> Pixels {
        let [width, height] = ["width", "height"].map(|key| value[key].as_u64().expect("a number") as usize);
        // Number `i` is `((37 i + i² / 11) mod 101) / 50 - 1`.
        let values = (0..width * height * 3).map(|i| ((37 * i + i * i / 11) % 101) as f32 / 50.0 - 1.0);
        Pixels {
            width,
            height,
            values: values.collect(),
        }
    }

    #[test]
    fn what_is_seen_and_read_is_transformers() {
        let (mut worst, mut worst_read): (f64, f64) = (0.0, 0.0);
        for case in table(TABLE)["cases"].as_array().expect("cases") {
            let config = config_of(&case["config"]);
            let language = QwenConfig::read_qwen2_5_vl(&config).expect("a configuration");
            let vision = QwenVisionConfig::read(&config).expect("a configuration");
            let side = vision.patch * vision.merge;
            let n_layers = language.n_layers;
            let model = TestModel::new(&case["weights"], |scope| {
                let vision = QwenVision::new(scope, vision);
                (vision, QwenEncoder::new(scope, language, n_layers))
            });
            for run in case["runs"].as_array().expect("a list") {
                let pictures: Vec<Pixels> = run["pictures"]
                    .as_array()
                    .expect("a list")
                    .iter()
                    .map(pixels)
                    .collect();
                for (pixels, theirs) in pictures.iter().zip(run["seen"].as_array().expect("a list")) {
                    let ours = model.run(|(vision, _), ctx| vision.forward(ctx, pixels));
                    worst = worst.max(relative_error(&ours, &numbers(theirs)));
                }
                let ids = ids_of(&run["ids"]);
                let pad = run["pad"].as_u64().expect("an id") as u32;
                let ours = model.run(|(vision, language), ctx| {
                    let seen: Vec<Seen> = pictures
                        .iter()
                        .map(|pixels| {
                            Ok(Seen {
                                tokens: vision.forward(ctx, pixels)?,
                                rows: pixels.height / side,
                                columns: pixels.width / side,
                            })
                        })
                        .collect::<Result<_>>()?;
                    let states = language.forward_seeing(ctx, &ids, pad, &seen, &[n_layers]);
                    Ok(states?.swap_remove(0))
                });
                worst_read = worst_read.max(relative_error(&ours, &numbers(&run["as_text"])));
            }
        }
        assert!(worst < 3e-6 && worst_read < 5e-6, "{worst:e} {worst_read:e}");
    }

    #[test]
    fn windows_cover_a_picture_once() {
        for (rows, columns, side) in [(8, 8, 4), (9, 4, 4), (3, 3, 4), (1, 13, 4), (5, 7, 3), (2, 2, 1)] {
            let mut seen = vec![0; rows * columns];
            for group in Windows::of(rows, columns, side) {
                assert_eq!(group.tokens().count(), group.n_tokens());
                for [row, column] in group.tokens() {
                    seen[row * columns + column] += 1;
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{rows} {columns} {side}");
        }
    }

    #[test]
    fn configurations_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (r#"{}"#, "vision_config"),
            (r#"{"vision_config": {"hidden_act": "gelu"}}"#, "hidden_act"),
            (r#"{"vision_config": {"window_size": 27}}"#, "window_size"),
            (r#"{"vision_config": {"num_heads": 0}}"#, "num_heads"),
            (
                r#"{"vision_config": {"hidden_size": 6, "num_heads": 1}}"#,
                "num_heads",
            ),
            (
                r#"{"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}"#,
                "rope_type",
            ),
            (r#"{"vision_config": {"deepstack": 1}}"#, "deepstack"),
        ] {
            let value = serde_json::from_str(config).expect("JSON");
            let error = QwenVisionConfig::read(&config_of(&value)).expect_err("it is refused");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
