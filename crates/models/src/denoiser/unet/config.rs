//! What `config.json` says of a `UNet2DConditionModel`; what cannot be computed is refused by name.

use crate::ModelError;
use denoised_checkpoint::{CheckpointError, Config};
use denoised_nn::{ResnetSpec, Transformer2dSpec};
use denoised_tensor::{Activation, TimestepSpec};
use serde_json::Value;

/// Keys that change nothing of what is computed here: training, half precision, the number of pixels of other classes' blocks, and
/// parameters of embeddings that are refused.
const KEYS_WITHOUT_EFFECT: [&str; 7] = [
    "addition_embed_type_num_heads",
    "cross_attention_norm",
    "dropout",
    "mid_block_only_cross_attention",
    "resnet_out_scale_factor",
    "resnet_skip_time_act",
    "upcast_attention",
];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct UnetConfig {
    /// Height and width of the latents it was trained on.
    pub(crate) sample_size: (usize, usize),
    /// Channels of the latents, and of what may come beside them.
    pub(crate) c_in: usize,
    /// Channels of the latents.
    pub(crate) c_out: usize,
    /// Finest first.
    pub(super) stages: Vec<StageConfig>,
    pub(super) mid: MidConfig,
    /// Of the text.
    pub(super) n_context: Option<usize>,
    pub(super) resnet: ResnetSpec,
    pub(super) mid_divisor: f32,
    pub(super) downsample_padding: usize,
    pub(super) conv_in_side: usize,
    pub(super) conv_out_side: usize,
    pub(super) is_centered: bool,
    pub(super) time_spec: TimestepSpec,
    pub(super) n_time: usize,
    /// Behind the second layer of the time embedding, then behind all of it.
    pub(super) time_activations: [Activation; 2],
    /// What is added to the time embedding.
    pub(crate) addition: Option<AdditionConfig>,
    /// Sinusoids of the guidance scale, of networks that were distilled to take it as an input.
    pub(crate) n_guidance: Option<usize>,
}

/// Pooled text and sinusoids of some numbers, side by side, embedded together (Podell et al. 2023, "SDXL").
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdditionConfig {
    /// Sinusoids of each number.
    pub(crate) n_sinusoids: usize,
    /// Channels of the text and sinusoids of all numbers.
    pub(crate) n_in: usize,
}

impl UnetConfig {
    /// Fewest latents each way: without padding in front, one pixel is too few to be halved.
    pub(crate) fn min_side(&self) -> usize {
        match self.downsample_padding {
            0 => 1 << (self.stages.len() - 1),
            _ => 1,
        }
    }
}

/// One resolution, on the way down and on the way up.
#[derive(Clone, Debug)]
pub(super) struct StageConfig {
    pub(super) n_channels: usize,
    /// Layers on the way down; one more on the way up.
    pub(super) n_layers: usize,
    /// Transformer blocks of each layer on the way down, if it has them.
    pub(super) down: Option<Vec<usize>>,
    pub(super) up: Option<Vec<usize>>,
    pub(super) n_heads: usize,
    pub(super) is_only_cross: bool,
}

/// What is between down and up.
#[derive(Clone, Copy, Debug)]
pub(super) enum MidConfig {
    Absent,
    Resnet,
    /// With so many transformer blocks.
    Transformer(usize),
}

impl UnetConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        refuse_other_networks(config)?;
        let widths = config
            .usizes("block_out_channels")?
            .unwrap_or_else(|| vec![320, 640, 1280, 1280]);
        let n_groups = config.usize_or("norm_num_groups", 32)?;
        config.within("norm_num_groups", n_groups, 1..=1 << 16)?;
        let divides = |width: &usize| (1..=1 << 16).contains(width) && width.is_multiple_of(n_groups);
        if !(1..=8).contains(&widths.len()) || !widths.iter().all(divides) || !widths[0].is_multiple_of(2) {
            let expected = format!("1 to 8 multiples of norm_num_groups = {n_groups}, the first even");
            return Err(config.wrong("block_out_channels", &expected).into());
        }
        let eps = config.f64_or("norm_eps", 1e-5)? as f32;
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(config.wrong("norm_eps", "a finite number of at least 0").into());
        }
        let mid_divisor = config.f64_or("mid_block_scale_factor", 1.0)? as f32;
        if !(mid_divisor.is_finite() && mid_divisor != 0.0) {
            return Err(config
                .wrong("mid_block_scale_factor", "a number other than 0")
                .into());
        }
        let (stages, mid) = read_stages(config, &widths)?;
        let c_in = config.usize_or("in_channels", 4)?;
        config.within("in_channels", c_in, 1..=1 << 12)?;
        let c_out = config.usize_or("out_channels", 4)?;
        config.within("out_channels", c_out, 1..=c_in)?;
        let n_context = match stages
            .iter()
            .any(|stage| stage.down.is_some() || stage.up.is_some())
            || matches!(mid, MidConfig::Transformer(_))
        {
            true => Some(read_context_width(config, widths.len())?),
            false => {
                config.value("cross_attention_dim");
                None
            }
        };
        let freq_shift = config.f64_or("freq_shift", 0.0)? as f32;
        if !(freq_shift.is_finite() && (freq_shift as usize) < widths[0] / 2) {
            return Err(config
                .wrong("freq_shift", "less than half of the first block's channels")
                .into());
        }
        let read = Self {
            sample_size: read_sample_size(config)?,
            c_in,
            c_out,
            stages,
            mid,
            n_context,
            resnet: ResnetSpec {
                n_groups,
                eps,
                activation: activation(config, "act_fn")?.unwrap_or(Activation::Silu),
                divisor: 1.0,
            },
            mid_divisor,
            downsample_padding: config.usize_or("downsample_padding", 1)?,
            conv_in_side: config.usize_or("conv_in_kernel", 3)?,
            conv_out_side: config.usize_or("conv_out_kernel", 3)?,
            is_centered: config.bool_or("center_input_sample", false)?,
            time_spec: TimestepSpec {
                flip_sin_to_cos: config.bool_or("flip_sin_to_cos", true)?,
                downscale_freq_shift: freq_shift,
                scale: 1.0,
                max_period: 10_000.0,
            },
            n_time: match config.opt_usize("time_embedding_dim")? {
                // As Python's `or`.
                None | Some(0) => 4 * widths[0],
                Some(n_time) => n_time,
            },
            time_activations: [
                activation(config, "timestep_post_act")?.unwrap_or(Activation::None),
                activation(config, "time_embedding_act_fn")?.unwrap_or(Activation::None),
            ],
            addition: read_addition(config, freq_shift)?,
            n_guidance: config.opt_usize("time_cond_proj_dim")?,
        };
        let is_fit = |n: usize| n.is_multiple_of(2) && (4..=1 << 16).contains(&n);
        if !read.n_guidance.is_none_or(is_fit) {
            return Err(config
                .wrong("time_cond_proj_dim", "an even number of at least 4, or null")
                .into());
        }
        config.within("time_embedding_dim", read.n_time, 1..=1 << 18)?;
        config.within("downsample_padding", read.downsample_padding, 0..=1)?;
        for (key, side) in [
            ("conv_in_kernel", read.conv_in_side),
            ("conv_out_kernel", read.conv_out_side),
        ] {
            if side > 15 || side.is_multiple_of(2) {
                return Err(config.wrong(key, "an odd number of 1 to 15").into());
            }
        }
        // Whether a projection is a product or a 1x1 convolution in the files does not matter.
        config.bool_or("use_linear_projection", false)?;
        config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
        Ok(read)
    }

    /// Channels that a text must have, if the network reads it.
    pub(crate) fn n_context(&self) -> Option<usize> {
        self.n_context
    }

    pub(super) fn n_channels(&self, stage_idx: usize) -> usize {
        self.stages[stage_idx].n_channels
    }

    pub(super) fn transformer(&self, stage: &StageConfig, n_layers: usize) -> Transformer2dSpec {
        Transformer2dSpec {
            n_channels: stage.n_channels,
            n_heads: stage.n_heads,
            n_layers,
            n_context: self.n_context.unwrap_or_default(),
            n_groups: self.resnet.n_groups,
            is_only_cross: stage.is_only_cross,
        }
    }
}

/// Settings that make another network of it.
fn refuse_other_networks(config: &Config) -> Result<(), ModelError> {
    for key in [
        "class_embed_type",
        "encoder_hid_dim",
        "encoder_hid_dim_type",
        "num_class_embeds",
        // diffusers refuses it too: the number of heads is what `attention_head_dim` says.
        "num_attention_heads",
    ] {
        config.only(key, &[Value::Null])?;
    }
    for key in ["class_embeddings_concat", "dual_cross_attention"] {
        config.only(key, &[false.into()])?;
    }
    config.only("attention_type", &["default".into()])?;
    config.only("resnet_time_scale_shift", &["default".into()])?;
    config.only("time_embedding_type", &["positional".into()])?;
    Ok(())
}

/// Sizes of the embedding that is added to that of the time, if the network has one.
fn read_addition(config: &Config, freq_shift: f32) -> Result<Option<AdditionConfig>, CheckpointError> {
    let (width_key, in_key) = ("addition_time_embed_dim", "projection_class_embeddings_input_dim");
    let (n_sinusoids, n_in) = (config.opt_usize(width_key)?, config.opt_usize(in_key)?);
    match config.opt_str("addition_embed_type")? {
        None => Ok(None),
        Some("text_time") => {
            let n_sinusoids = n_sinusoids.unwrap_or_default();
            let fits = (2..=1 << 16).contains(&n_sinusoids)
                && n_sinusoids.is_multiple_of(2)
                && (freq_shift as usize) < n_sinusoids / 2;
            if !fits {
                return Err(config.wrong(width_key, "an even number of more than twice freq_shift"));
            }
            let n_in = n_in.unwrap_or_default();
            config.within(in_key, n_in, 1..=1 << 18)?;
            Ok(Some(AdditionConfig { n_sinusoids, n_in }))
        }
        Some(_) => Err(config.wrong(
            "addition_embed_type",
            "text_time or null (nothing else is supported)",
        )),
    }
}

fn activation(config: &Config, key: &str) -> Result<Option<Activation>, CheckpointError> {
    let Some(name) = config.opt_str(key)? else {
        return Ok(None);
    };
    match name.to_ascii_lowercase().as_str() {
        "silu" | "swish" => Ok(Some(Activation::Silu)),
        "gelu" => Ok(Some(Activation::GeluErf)),
        _ => Err(config.wrong(key, "silu, swish or gelu")),
    }
}

fn read_stages(config: &Config, widths: &[usize]) -> Result<(Vec<StageConfig>, MidConfig), ModelError> {
    let n_stages = widths.len();
    let attends = |key: &str, defaults: [&str; 4], names: [&str; 2]| -> Result<Vec<bool>, ModelError> {
        let types = config.strs(key)?.unwrap_or_else(|| defaults.to_vec());
        let attends: Option<Vec<bool>> = types
            .iter()
            .map(|name| {
                names
                    .iter()
                    .position(|known| *known == short_name(name))
                    .map(|idx| idx == 1)
            })
            .collect();
        match attends {
            Some(attends) if attends.len() == n_stages => Ok(attends),
            _ => {
                let expected = format!(
                    "{} or {} for each of the {n_stages} block_out_channels (nothing else is supported)",
                    names[0], names[1]
                );
                Err(config.wrong(key, &expected).into())
            }
        }
    };
    let (cross_down, cross_up) = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D");
    let down = attends(
        "down_block_types",
        [cross_down, cross_down, cross_down, "DownBlock2D"],
        ["DownBlock2D", cross_down],
    )?;
    let up = attends(
        "up_block_types",
        ["UpBlock2D", cross_up, cross_up, cross_up],
        ["UpBlock2D", cross_up],
    )?;
    let n_layers = per_stage(config, "layers_per_block", 2, n_stages)?;
    for n_layers in &n_layers {
        config.within("layers_per_block", *n_layers, 1..=64)?;
    }
    let n_heads = per_stage(config, "attention_head_dim", 8, n_stages)?;
    let is_only_cross = match config.value("only_cross_attention") {
        None => vec![false; n_stages],
        Some(Value::Bool(one)) => vec![*one; n_stages],
        Some(Value::Array(all)) if all.len() == n_stages && all.iter().all(Value::is_boolean) => {
            all.iter().map(|one| one == &Value::Bool(true)).collect()
        }
        Some(_) => {
            return Err(config
                .wrong("only_cross_attention", "true, false or a list of one per block")
                .into());
        }
    };
    let depths = Depths::read(config, n_stages)?;
    let mid = match config.value("mid_block_type").map(Value::as_str) {
        Some(None) if config.value("mid_block_type") == Some(&Value::Null) => MidConfig::Absent,
        Some(Some("UNetMidBlock2D")) => MidConfig::Resnet,
        None | Some(Some("UNetMidBlock2DCrossAttn")) => MidConfig::Transformer(depths.mid(config)?),
        Some(_) => {
            let expected = "UNetMidBlock2DCrossAttn, UNetMidBlock2D or null (nothing else is supported)";
            return Err(config.wrong("mid_block_type", expected).into());
        }
    };
    let mut stages = Vec::with_capacity(n_stages);
    for (stage_idx, &n_channels) in widths.iter().enumerate() {
        // Block types and depths of the way up are listed coarsest first.
        let up_idx = n_stages - 1 - stage_idx;
        let is_attending = down[stage_idx] || up[up_idx] || up_idx == 0;
        if is_attending && !(1..=n_channels).contains(&n_heads[stage_idx]) {
            return Err(config
                .wrong(
                    "attention_head_dim",
                    "numbers of heads, at least 1 and at most one per channel",
                )
                .into());
        }
        let n_down = n_layers[stage_idx];
        stages.push(StageConfig {
            n_channels,
            n_layers: n_down,
            down: match down[stage_idx] {
                true => Some(depths.down(config, stage_idx, n_down)?),
                false => None,
            },
            up: match up[up_idx] {
                true => Some(depths.up(config, up_idx, n_down + 1)?),
                false => None,
            },
            n_heads: n_heads[stage_idx],
            is_only_cross: is_only_cross[stage_idx],
        });
    }
    Ok((stages, mid))
}

/// Names from before the blocks of other networks were told apart.
fn short_name(name: &str) -> &str {
    name.strip_prefix("UNetRes").unwrap_or(name)
}

/// One number for all stages or a list.
fn per_stage(
    config: &Config,
    key: &str,
    default: usize,
    n_stages: usize,
) -> Result<Vec<usize>, CheckpointError> {
    if !config.value(key).is_some_and(Value::is_array) {
        return Ok(vec![config.usize_or(key, default)?; n_stages]);
    }
    match config.usizes(key)? {
        Some(all) if all.len() == n_stages => Ok(all),
        _ => Err(config.wrong(key, &format!("a number or a list of {n_stages} of them"))),
    }
}

/// Transformer blocks per stage and layer: numbers, a list of numbers, or a list with lists of one per layer.
struct Depths {
    down: Vec<Value>,
    /// Coarsest first.
    up: Vec<Value>,
    n_stages: usize,
}

const DEPTHS: &str = "transformer_layers_per_block";
const UP_DEPTHS: &str = "reverse_transformer_layers_per_block";

impl Depths {
    fn read(config: &Config, n_stages: usize) -> Result<Self, CheckpointError> {
        let one = Value::from(1);
        let down = match config.value(DEPTHS).unwrap_or(&one) {
            Value::Array(all) => all.clone(),
            number => vec![number.clone(); n_stages],
        };
        let up = match config.value(UP_DEPTHS) {
            None | Some(Value::Null) => {
                if down.iter().any(Value::is_array) {
                    let expected = "given where transformer_layers_per_block has lists in its list";
                    return Err(config.wrong(UP_DEPTHS, expected));
                }
                down.iter().rev().cloned().collect()
            }
            Some(Value::Array(all)) => all.clone(),
            Some(_) => return Err(config.wrong(UP_DEPTHS, "a list or null")),
        };
        for (key, list) in [(DEPTHS, &down), (UP_DEPTHS, &up)] {
            if list.len() != n_stages {
                return Err(config.wrong(key, &format!("as long as block_out_channels, {n_stages}")));
            }
        }
        Ok(Self { down, up, n_stages })
    }

    fn down(
        &self,
        config: &Config,
        stage_idx: usize,
        n_layers: usize,
    ) -> Result<Vec<usize>, CheckpointError> {
        layers(config, DEPTHS, &self.down[stage_idx], n_layers)
    }

    fn up(&self, config: &Config, up_idx: usize, n_layers: usize) -> Result<Vec<usize>, CheckpointError> {
        layers(config, UP_DEPTHS, &self.up[up_idx], n_layers)
    }

    /// The middle has one layer with the first depth of the coarsest stage.
    fn mid(&self, config: &Config) -> Result<usize, CheckpointError> {
        Ok(layers(config, DEPTHS, &self.down[self.n_stages - 1], 1)?[0])
    }
}

/// A depth for each of `n_layers`; of a list that is longer, the beginning counts.
fn layers(config: &Config, key: &str, value: &Value, n_layers: usize) -> Result<Vec<usize>, CheckpointError> {
    let depth = |value: &Value| {
        let number = value.as_u64().filter(|depth| (1..=256).contains(depth));
        number.and_then(|depth| usize::try_from(depth).ok())
    };
    let depths = match value {
        Value::Array(all) if all.len() >= n_layers => all[..n_layers].iter().map(depth).collect(),
        Value::Array(_) => None,
        number => depth(number).map(|depth| vec![depth; n_layers]),
    };
    depths.ok_or_else(|| {
        config.wrong(
            key,
            "numbers of 1 to 256, one for each layer where they are lists",
        )
    })
}

/// Channels of the text; blocks may repeat the number, but there is one text for all.
fn read_context_width(config: &Config, n_stages: usize) -> Result<usize, CheckpointError> {
    let widths = per_stage(config, "cross_attention_dim", 1280, n_stages)?;
    config.within("cross_attention_dim", widths[0], 1..=1 << 16)?;
    if widths.iter().any(|width| *width != widths[0]) {
        return Err(config.wrong("cross_attention_dim", "the same number for every block"));
    }
    Ok(widths[0])
}

/// Height and width; 64 where the file leaves it open, as in Stable Diffusion 1.
fn read_sample_size(config: &Config) -> Result<(usize, usize), CheckpointError> {
    let key = "sample_size";
    let (h, w) = match config.value(key) {
        None | Some(Value::Null) => (64, 64),
        Some(Value::Array(_)) => match config.usizes(key)?.as_deref() {
            Some(&[h, w]) => (h, w),
            _ => return Err(config.wrong(key, "a number or a list of height and width")),
        },
        Some(_) => {
            let side = config.usize_or(key, 64)?;
            (side, side)
        }
    };
    for side in [h, w] {
        config.within(key, side, 1..=1 << 14)?;
    }
    // diffusers' StableDiffusionPipeline does not believe small sizes of files from before 0.9: their default was 32 once.
    let version = config
        .value("_diffusers_version")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    let is_old = matches!((numbers.next(), numbers.next()), (Some(Some(0)), Some(Some(minor))) if minor < 9);
    let is_number = config.value(key).is_some_and(Value::is_number);
    Ok(if is_old && is_number && h < 64 {
        (64, 64)
    } else {
        (h, w)
    })
}

#[cfg(test)]
mod tests {
    use super::{super::Unet, *};
    use serde_json::json;
    use std::path::Path;

    fn read(json: Value) -> UnetConfig {
        let Value::Object(map) = json else {
            panic!("tests give objects")
        };
        UnetConfig::read(&Config::new(Path::new("unet/config.json"), map)).expect("supported")
    }

    /// `unet/config.json` of Stable Diffusion 1.5 as it is published.
    fn sd15() -> Value {
        json!({
            "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6.0", "act_fn": "silu", "attention_head_dim": 8,
            "block_out_channels": [320, 640, 1280, 1280], "center_input_sample": false, "cross_attention_dim": 768,
            "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
            "downsample_padding": 1, "flip_sin_to_cos": true, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
            "mid_block_scale_factor": 1, "norm_eps": 1e-5, "norm_num_groups": 32, "out_channels": 4, "sample_size": 64,
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        })
    }

    /// Of `unet/config.json` of Stable Diffusion XL what is not a default.
    fn sdxl() -> Value {
        json!({
            "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64, "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "projection_class_embeddings_input_dim": 2816, "sample_size": 128, "transformer_layers_per_block": [1, 2, 10],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "use_linear_projection": true,
        })
    }

    /// Names, and how many numbers they stand for in all.
    fn declared(config: &UnetConfig) -> (Vec<String>, usize) {
        let mut declare = denoised_nn::Declare::new([]);
        Unet::new(&mut declare.at(""), config);
        let specs = declare.finish();
        let n = specs
            .iter()
            .map(|spec| spec.shape.iter().product::<usize>())
            .sum();
        (specs.into_iter().flat_map(|spec| spec.sources).collect(), n)
    }

    #[test]
    fn published_configurations_give_networks_of_the_published_sizes() {
        // Numbers of tensors and parameters of diffusers' UNet2DConditionModel with these configurations.
        let (names, n_parameters) = declared(&read(sd15()));
        assert_eq!((names.len(), n_parameters), (686, 859_520_964));
        let mut sd21 = sd15();
        sd21["attention_head_dim"] = json!([5, 10, 20, 20]);
        sd21["cross_attention_dim"] = 1024.into();
        for (key, value) in [
            ("dual_cross_attention", json!(false)),
            ("num_class_embeds", json!(null)),
            ("only_cross_attention", json!(false)),
            ("sample_size", json!(96)),
            ("upcast_attention", json!(true)),
            ("use_linear_projection", json!(true)),
        ] {
            sd21[key] = value;
        }
        let config = read(sd21);
        assert_eq!((config.sample_size, config.n_context()), ((96, 96), Some(1024)));
        let (names, n_parameters) = declared(&config);
        assert_eq!((names.len(), n_parameters), (686, 865_910_724));
        let distinct: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        let config = read(sdxl());
        assert_eq!(config.addition.map(|addition| addition.n_in), Some(2816));
        let (names, n_parameters) = declared(&config);
        assert_eq!((names.len(), n_parameters), (1680, 2_567_463_684));
        let mut refiner = sdxl();
        for (key, value) in [
            ("attention_head_dim", json!([6, 12, 24, 24])),
            ("block_out_channels", json!([384, 768, 1536, 1536])),
            ("cross_attention_dim", json!(1280)),
            (
                "down_block_types",
                json!([
                    "DownBlock2D",
                    "CrossAttnDownBlock2D",
                    "CrossAttnDownBlock2D",
                    "DownBlock2D"
                ]),
            ),
            (
                "up_block_types",
                json!([
                    "UpBlock2D",
                    "CrossAttnUpBlock2D",
                    "CrossAttnUpBlock2D",
                    "UpBlock2D"
                ]),
            ),
            ("projection_class_embeddings_input_dim", json!(2560)),
            ("transformer_layers_per_block", json!(4)),
        ] {
            refiner[key] = value;
        }
        let (names, n_parameters) = declared(&read(refiner));
        assert_eq!((names.len(), n_parameters), (1220, 2_259_526_660));
        // Nothing but diffusers' defaults is that of 1.5 with another text.
        let (names, n_parameters) = declared(&read(json!({})));
        assert_eq!((names.len(), n_parameters), (686, 872_300_484));
    }
}
