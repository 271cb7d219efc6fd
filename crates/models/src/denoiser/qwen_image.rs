//! diffusers' `QwenImageTransformer2DModel`: picture and text tokens attend jointly, each with weights of its own.
//!
//! Positions have three axes: which picture (0 what is made, then those that are edited), row and column, in patches of 2x2 latents and
//! from the middle of the picture; text goes on along the diagonal behind the largest of them.

use super::{
    Denoiser, DenoiserInput,
    flux::expect_axes,
    flux_blocks::{BlockSpec, DoubleBlock, Kind, Modulated, Part},
    rope::{Angles, Rope, RopeAxes},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Ctx, Linear, Result, RmsNorm, Scope, TimestepEmbedding, modulated_norm, split};
use denoised_tensor::{Activation, PatchOrder, Tensor, TimestepSpec};

/// Constants of diffusers' class that no configuration changes.
const EPS: f32 = 1e-6;
const N_SINUSOIDS: usize = 256;
const MLP_RATIO: usize = 4;
const THETA: f64 = 10_000.0;
/// Latents each way that make a token.
const PATCH: usize = 2;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct QwenImageConfig {
    /// Of a patch.
    c_in: usize,
    n_layers: usize,
    head_dim: usize,
    n_heads: usize,
    pub(crate) n_joint: usize,
    axes: Vec<usize>,
    /// Whether pictures to edit are told a timestep of 0.
    has_clean_references: bool,
}

impl QwenImageConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let read = Self {
            c_in: config.usize_or("in_channels", 64)?,
            n_layers: config.usize_or("num_layers", 60)?,
            head_dim: config.usize_or("attention_head_dim", 128)?,
            n_heads: config.usize_or("num_attention_heads", 24)?,
            n_joint: config.usize_or("joint_attention_dim", 3584)?,
            axes: config
                .usizes("axes_dims_rope")?
                .unwrap_or_else(|| vec![16, 56, 56]),
            has_clean_references: config.bool_or("zero_cond_t", false)?,
        };
        config.only("patch_size", &[PATCH.into()])?;
        config.within("in_channels", read.c_in, 1..=1 << 12)?;
        config.within("num_layers", read.n_layers, 1..=512)?;
        config.within("attention_head_dim", read.head_dim, 1..=1 << 10)?;
        config.within("num_attention_heads", read.n_heads, 1..=1 << 10)?;
        config.within("joint_attention_dim", read.n_joint, 1..=1 << 16)?;
        if !read.c_in.is_multiple_of(PATCH * PATCH) {
            return Err(config.wrong("in_channels", "a multiple of 4").into());
        }
        if config.usize_or("out_channels", 16)? != read.n_latent() {
            let expected = format!("in_channels / 4 = {}", read.n_latent());
            return Err(config.wrong("out_channels", &expected).into());
        }
        // diffusers itself cannot run with the first; the others belong to pictures in layers.
        for key in ["guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"] {
            config.only(key, &[false.into()])?;
        }
        expect_axes(config, &read.axes, 3, read.head_dim)?;
        config.deny_unread(&[])?;
        Ok(read)
    }

    /// Channels of latents.
    pub(crate) fn n_latent(&self) -> usize {
        self.c_in / (PATCH * PATCH)
    }

    fn block(&self) -> BlockSpec {
        BlockSpec {
            n_heads: self.n_heads,
            head_dim: self.head_dim,
            n_inner: MLP_RATIO * self.n_heads * self.head_dim,
            kind: Kind::Gelu,
            eps: EPS,
        }
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct QwenImage {
    time: TimestepEmbedding,
    norm_context: RmsNorm,
    context: Linear,
    latents: Linear,
    /// Each with what modulates text and picture.
    blocks: Vec<(DoubleBlock, [Linear; 2])>,
    norm_out: Linear,
    proj_out: Linear,
    axes: RopeAxes,
    n: usize,
    has_clean_references: bool,
}

/// The tokens of everything in one buffer: text, the picture that is made, pictures to edit.
struct Sequence {
    all: Tensor,
    n_text: usize,
    n_made: usize,
    rope: Rope,
}

impl QwenImage {
    pub(crate) fn new(root: &mut Scope<'_>, config: &QwenImageConfig) -> Self {
        let block = config.block();
        let n = block.n_channels();
        let mut embed = root.at("time_text_embed");
        let time = TimestepEmbedding::new(
            &mut embed.at("timestep_embedder"),
            TimestepSpec::COSINES_FIRST,
            N_SINUSOIDS,
            n,
        );
        let blocks = (0..config.n_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("transformer_blocks.{layer_idx}"));
                let modulations =
                    ["txt_mod.1", "img_mod.1"].map(|name| Linear::new(&mut scope.at(name), n, 6 * n));
                let block = DoubleBlock::named(&mut scope, block, ["txt_mlp", "img_mlp"]);
                (block, modulations)
            })
            .collect();
        Self {
            time,
            norm_context: RmsNorm::new(&mut root.at("txt_norm"), config.n_joint, EPS),
            context: Linear::new(&mut root.at("txt_in"), config.n_joint, n),
            latents: Linear::new(&mut root.at("img_in"), config.c_in, n),
            blocks,
            norm_out: Linear::new(&mut root.at("norm_out.linear"), n, 2 * n),
            proj_out: Linear::new(&mut root.at("proj_out"), n, config.c_in),
            axes: RopeAxes::new(THETA, &config.axes, Angles::F32),
            n,
            has_clean_references: config.has_clean_references,
        }
    }

    /// What modulates all blocks, `[batch, n]`.
    fn vector(&self, ctx: &Ctx<'_>, timesteps: &Tensor) -> Result<Tensor> {
        let vector = self.time.forward(ctx, timesteps, After::default())?;
        ctx.backend.activation(&vector, Activation::Silu, &vector)?;
        Ok(vector)
    }

    fn sequence(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Sequence> {
        let given = &input.conditioning.tokens;
        let n_text = given.dim(1);
        let pictures: Vec<&Tensor> = std::iter::once(input.latents).chain(input.references).collect();
        let sides = |picture: &Tensor| [1, 2].map(|dim| picture.dim(dim) / PATCH);
        let farthest = pictures.iter().flat_map(|picture| sides(picture)).max();
        let after = farthest.unwrap_or(0) / 2;
        let mut positions = self.axes.positions();
        positions.push(n_text, |idx| [(after + idx) as f32; 3]);
        for (idx, picture) in pictures.iter().enumerate() {
            let [h, w] = sides(picture);
            let before = [h, w].map(|side| side.div_ceil(2) as f32);
            positions.push_grid((h, w), |y, x| [idx as f32, y - before[0], x - before[1]]);
        }
        let all = ctx.alloc(&[input.latents.dim(0), positions.len(), self.n])?;
        let normed = ctx.alloc(given.dims())?;
        self.norm_context.forward_into(ctx, given, &normed)?;
        let text = all.narrow(1, 0, n_text)?;
        self.context.forward_into(ctx, &normed, After::default(), &text)?;
        drop(normed);
        let mut first = n_text;
        for picture in pictures {
            let n_tokens = sides(picture).iter().product();
            let dims = [picture.dim(0), n_tokens, PATCH * PATCH * picture.dim(3)];
            let patches = ctx.alloc(&dims)?;
            ctx.backend
                .patchify(picture, PATCH, PatchOrder::ChannelFirst, &patches)?;
            let out = all.narrow(1, first, n_tokens)?;
            self.latents.forward_into(ctx, &patches, After::default(), &out)?;
            first += n_tokens;
        }
        Ok(Sequence {
            all,
            n_text,
            n_made: sides(input.latents).iter().product(),
            rope: self.axes.tables(ctx, &positions)?,
        })
    }
}

impl Denoiser for QwenImage {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let vector = self.vector(ctx, input.timesteps)?;
        let Sequence {
            all,
            n_text,
            n_made,
            rope,
        } = self.sequence(ctx, input)?;
        let n_pictures = all.dim(1) - n_text;
        let clean = match self.has_clean_references && n_pictures > n_made {
            true => {
                let zeros = ctx.upload_f32(&vec![0.0; vector.dim(0)], &[vector.dim(0)])?;
                Some(self.vector(ctx, &zeros)?)
            }
            false => None,
        };
        // Which tokens of pictures the picture's modulation is for.
        let n_noisy = if clean.is_some() { n_made } else { n_pictures };
        for (block, [of_text, of_picture]) in &self.blocks {
            let modulated = |linear: &Linear, vector: &Tensor| {
                Modulated::cut::<2>(&linear.forward(ctx, vector, After::default())?)
            };
            let (text, picture) = (modulated(of_text, &vector)?, modulated(of_picture, &vector)?);
            let clean = clean.as_ref().map(|vector| modulated(of_picture, vector));
            let clean = clean.transpose()?;
            let mut parts = vec![
                Part {
                    is_text: true,
                    n_tokens: n_text,
                    modulated: &text,
                },
                Part {
                    is_text: false,
                    n_tokens: n_noisy,
                    modulated: &picture,
                },
            ];
            parts.extend(clean.as_ref().map(|modulated| Part {
                is_text: false,
                n_tokens: n_pictures - n_noisy,
                modulated,
            }));
            block.forward_parts(ctx, &all, &parts, &rope)?;
        }
        let made = all.narrow(1, n_text, n_made)?;
        let [scale, shift] = split(&self.norm_out.forward(ctx, &vector, After::default())?)?;
        let made = modulated_norm(ctx, &made, &shift, &scale, EPS)?;
        let made = self.proj_out.forward(ctx, &made, After::default())?;
        let out = ctx.alloc(input.latents.dims())?;
        ctx.backend
            .unpatchify(&made, PATCH, PatchOrder::ChannelFirst, &out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conditioning::Conditioning,
        drawn::{Drawn, normal, relative_error},
    };
    use denoised_cpu::{CpuBackend, CpuOptions};
    use denoised_nn::Declare;
    use denoised_tensor::{Backend, DType, PrepareInput};
    use serde_json::{Value, json};
    use std::path::Path;

    fn config_of(value: &Value) -> Config {
        let map = value.as_object().expect("an object").clone();
        Config::new(Path::new("config.json"), map)
    }

    #[test]
    fn predictions_are_those_of_diffusers() {
        let table = include_str!("../../tests/tables/qwen_image.json");
        let table: Value = serde_json::from_str(table).expect("JSON");
        let stride = table["stride"].as_u64().expect("a number") as usize;
        for case in table["cases"].as_array().expect("cases") {
            let source = Drawn(serde_json::from_value(case["weights"].clone()).expect("shapes by name"));
            let mut declare = Declare::new(source.0.keys().cloned());
            let config = QwenImageConfig::read(&config_of(&case["config"])).expect("a configuration");
            let network = QwenImage::new(&mut declare.at(""), &config);
            let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
            let input = PrepareInput::Build(&source);
            let prepared = backend.prepare(&declare.finish(), input, &mut |_, _| {});
            let ctx = Ctx {
                backend: &backend,
                weights: &prepared.expect("the shapes are diffusers'").weights,
                dtype: DType::F32,
            };
            let number = |key: &str| case[key].as_u64().expect("a number") as usize;
            let batch = number("batch");
            let drawn = |dims: &[usize], seed: u64| {
                let values = normal(dims.iter().product(), seed);
                ctx.upload_f32(&values, dims).expect("uploaded")
            };
            let sides: Vec<[usize; 2]> = serde_json::from_value(case["sides"].clone()).expect("sides");
            let pictures: Vec<Tensor> = sides
                .iter()
                .zip(1..)
                .map(|([h, w], seed)| drawn(&[batch, *h, *w, config.n_latent()], seed))
                .collect();
            let timesteps: Vec<f32> = serde_json::from_value(case["timesteps"].clone()).expect("numbers");
            let conditioning =
                Conditioning::of_tokens(drawn(&[batch, number("n_text"), config.n_joint], 100));
            let input = DenoiserInput {
                latents: &pictures[0],
                n_frames: 1,
                timesteps: &ctx.upload_f32(&timesteps, &[batch]).expect("uploaded"),
                conditioning: &conditioning,
                references: &pictures[1..],
            };
            let ours = network.forward(&ctx, &input).expect("it runs");
            let ours = ctx.download_f32(&ours).expect("downloaded");
            let ours = ours.iter().step_by(stride).map(|x| f64::from(*x));
            let theirs: Vec<f64> = serde_json::from_value(case["values"].clone()).expect("numbers");
            let error = relative_error(ours, &theirs);
            assert!(error <= 1e-5, "{}: {error:e}", case["config"]);
        }
    }

    #[test]
    fn configurations_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (json!({"guidance_embeds": true}), "guidance_embeds"),
            (json!({"use_layer3d_rope": true}), "use_layer3d_rope"),
            (json!({"use_additional_t_cond": true}), "use_additional_t_cond"),
            (json!({"patch_size": 1}), "patch_size"),
            (json!({"in_channels": 63}), "in_channels"),
            (json!({"out_channels": 4}), "out_channels"),
            (json!({"axes_dims_rope": [16, 56]}), "axes_dims_rope"),
            (json!({"attention_head_dim": 64}), "axes_dims_rope"),
            (json!({"num_layers": 0}), "num_layers"),
            (json!({"window": 3}), "window"),
        ] {
            let error = QwenImageConfig::read(&config_of(&config)).expect_err("it is refused");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
