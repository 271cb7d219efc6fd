//! The family table: which pipeline class is made of which components, with which defaults.

mod sd3;

use crate::{
    ModelError, conditioning::Conditioner, denoiser::Denoiser, diffusion::DiffusionModel, pipeline::Model,
    vae::Decoder,
};
use denoised_checkpoint::{Config, Folder, Weights};
use denoised_sampler::Sampler;
use denoised_tensor::WeightSpec;
use denoised_types::ModelInfo;
use std::{ops::RangeInclusive, path::Path};

/// One row of the table.
struct Family {
    /// `_class_name` in `model_index.json`.
    pipeline_class: &'static str,
    /// Reads configs and declares weights.
    open: fn(&Folder) -> Result<Parts, ModelError>,
}

const FAMILIES: [Family; 1] = [Family {
    pipeline_class: "StableDiffusion3Pipeline",
    open: sd3::open,
}];

/// What the one loop needs of a family.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) info: ModelInfo,
    pub(crate) latents: LatentsLayout,
    /// Longest text of encoders whose length the request chooses: the default and the most.
    pub(crate) max_sequence_length: (u32, u32),
    pub(crate) conditioner: Box<dyn Conditioner>,
    pub(crate) denoiser: Box<dyn Denoiser>,
    pub(crate) decoder: Box<dyn Decoder>,
    /// The default first; as many as `info.samplers`.
    pub(crate) samplers: Vec<Box<dyn Sampler>>,
    pub(crate) specs: Vec<WeightSpec>,
    pub(crate) weights: Weights,
}

/// Latents of a picture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentsLayout {
    pub(crate) n_channels: usize,
    /// Pixels per latent, each way.
    pub(crate) factor: usize,
}

/// Reads a checkpoint's configs and index; touches no weight and needs no device.
///
/// # Errors
/// [`ModelError`] naming the file: not a checkpoint, an unknown class, a setting or a tensor that nothing here understands, or one that
/// is missing.
pub fn open(path: &Path) -> Result<Box<dyn Model>, ModelError> {
    let folder = Folder::open(path)?;
    let class = folder.pipeline_class();
    let Some(family) = FAMILIES.iter().find(|family| family.pipeline_class == class) else {
        return Err(ModelError::UnknownPipeline {
            path: path.join("model_index.json"),
            class: class.to_owned(),
            known: FAMILIES.iter().map(|family| family.pipeline_class).collect(),
        });
    };
    Ok(Box::new(DiffusionModel::new((family.open)(&folder)?)))
}

/// Keys that transformers writes into every `config.json` and that change nothing of what a text encoder computes.
pub(crate) const TRANSFORMERS_KEYS_WITHOUT_EFFECT: &[&str] = &[
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dropout",
    "dtype",
    "gradient_checkpointing",
    "initializer_factor",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
];

/// Refuses a component whose class is not one of `known`.
fn expect_class(
    folder: &Folder,
    component: &str,
    role: &'static str,
    known: &[&str],
) -> Result<(), ModelError> {
    match folder.class(component) {
        Some(class) if !known.contains(&class.class.as_str()) => Err(ModelError::UnsupportedComponent {
            path: folder.path().join(component),
            role,
            class: class.class.clone(),
            expected: format!("{} is", known.join(" or ")),
        }),
        // A missing component is reported by whoever reads its config.
        _ => Ok(()),
    }
}

/// Refuses a number outside of what makes sense, so that no product of several can overflow and nothing absurd is allocated.
pub(crate) fn within(
    config: &Config,
    key: &str,
    value: usize,
    range: RangeInclusive<usize>,
) -> Result<(), ModelError> {
    if range.contains(&value) {
        return Ok(());
    }
    let expected = format!("a number of {} to {}", range.start(), range.end());
    Err(config.wrong(key, &expected).into())
}
