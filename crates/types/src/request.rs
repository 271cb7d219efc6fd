//! What was asked for, before anybody has checked it.

use crate::Image;
use serde::{Deserialize, Serialize};

/// One picture to make. `None` means the family's (or checkpoint's) default.
///
/// Several pictures of one prompt are several requests with seeds `seed`, `seed + 1`, …: each is then independent of its
/// siblings, runs on any replica and can be repeated alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// What to draw. May be empty. At most [`GenerateRequest::MAX_PROMPT_BYTES`] bytes (checked by the engine).
    pub prompt: String,
    /// What to stay away from. `None` is what the family does without one: an empty prompt, zeros (SDXL), or no guidance (Qwen-Image).
    /// Unused, with a warning, when guidance is off.
    pub negative_prompt: Option<String>,
    /// Width of the picture in pixels; must be a multiple of the family's grid (checked by the worker, which knows the model).
    pub width: Option<u32>,
    /// Height of the picture in pixels; as `width`.
    pub height: Option<u32>,
    /// Frames of the video; must be one more than a multiple of what the family makes at a time. 1 for pictures.
    pub n_frames: Option<u32>,
    /// Denoiser steps, `1..=GenerateRequest::MAX_STEPS` (checked by the engine).
    pub n_steps: Option<u32>,
    /// Guidance scale as the family's reference pipeline has it: classifier-free guidance is on above 1 (Z-Image: above 0; Qwen-Image: with
    /// a negative prompt), FLUX.1 dev takes the scale as an input. Finite (checked by the engine).
    pub guidance: Option<f32>,
    /// Guidance scale of the second, low-noise denoiser, where the model has two; the first one's if not given.
    pub guidance_2: Option<f32>,
    /// Classifier-free guidance scale beside `guidance`, for models that take that one as an input (FLUX.1): on above 1 with a negative
    /// prompt, which costs twice the time.
    pub true_guidance: Option<f32>,
    /// Seed of the initial noise, as `torch.Generator("cpu").manual_seed(seed)` would take it.
    #[serde(default)]
    pub seed: u64,
    /// Name of the sampler, e.g. `flow-euler`; unknown names are refused with the known ones listed.
    pub sampler: Option<String>,
    /// Noise levels in place of the sampler's own, falling, one per step; empty for its own.
    #[serde(default)]
    pub sigmas: Vec<f32>,
    /// Longest text in tokens, where the family has such a limit (SD3: 256).
    pub max_sequence_length: Option<u32>,
    /// CLIP layers of the prompt that are left out beyond the family's own choice, as diffusers' `clip_skip` counts them; the
    /// negative prompt keeps all of them, as there.
    pub clip_skip: Option<u32>,
    /// Hidden layers whose states the text encoder gives, where the family takes several (FLUX.2); empty for the family's own.
    #[serde(default)]
    pub text_layers: Vec<u32>,
    /// Pictures to start from, to edit or to animate. At most [`GenerateRequest::MAX_IMAGES`].
    #[serde(default)]
    pub images: Vec<Image>,
    /// Where to repaint the first of `images`; the rest stays. Its size is that of the picture.
    pub mask: Option<Mask>,
    /// How much of a picture is given up when another is made from it: 1 starts from noise alone, 0.3 keeps most. Above 0, at most 1.
    pub strength: Option<f32>,
    /// Adapters that change the model for this request, each with its strength. Unknown names are refused.
    #[serde(default)]
    pub adapters: Vec<Adapter>,
    /// Initial latents in the family's reference layout, instead of noise drawn from `seed`.
    pub latents: Option<NamedTensor>,
    /// What to return beside, or instead of, the 8-bit picture.
    #[serde(default)]
    pub capture: Capture,
}

impl GenerateRequest {
    /// Longest prompt that is accepted, in bytes.
    pub const MAX_PROMPT_BYTES: usize = 128 * 1024;
    /// Most denoiser steps of one request.
    pub const MAX_STEPS: u32 = 1000;
    /// Most pictures that one request brings.
    pub const MAX_IMAGES: usize = 16;

    /// A request for `prompt` with every default and seed 0.
    pub fn new(prompt: impl Into<String>) -> Self {
        Self {
            prompt: prompt.into(),
            negative_prompt: None,
            width: None,
            height: None,
            n_frames: None,
            n_steps: None,
            guidance: None,
            guidance_2: None,
            true_guidance: None,
            seed: 0,
            sampler: None,
            sigmas: Vec::new(),
            max_sequence_length: None,
            clip_skip: None,
            text_layers: Vec::new(),
            images: Vec::new(),
            mask: None,
            strength: None,
            adapters: Vec::new(),
            latents: None,
            capture: Capture::Image,
        }
    }

    /// Everything in it that may be large, always in the same order, so that it can travel beside the rest: latents, pictures, mask.
    pub fn large_parts(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        let latents = self.latents.iter_mut().map(|tensor| &mut tensor.data);
        let images = self.images.iter_mut().map(|image| &mut image.rgb);
        let mask = self.mask.iter_mut().map(|mask| &mut mask.luma);
        latents.chain(images).chain(mask)
    }

    /// What is wrong with the sizes of latents, pictures and mask, if anything is: each must have the bytes that its shape says.
    pub fn inconsistency(&self) -> Option<String> {
        if let Some(latents) = self.latents.as_ref().filter(|latents| !latents.is_consistent()) {
            let (shape, n_bytes) = (&latents.shape, latents.data.len());
            return Some(format!("latents of shape {shape:?} do not have {n_bytes} bytes"));
        }
        if let Some(image) = self.images.iter().find(|image| !image.is_consistent()) {
            let n_bytes = image.rgb.len();
            return Some(format!("{image:?} does not have {n_bytes} bytes"));
        }
        let mask = self.mask.as_ref().filter(|mask| !mask.is_consistent())?;
        let Mask { width, height, luma } = mask;
        let n_bytes = luma.len();
        Some(format!(
            "a mask of {width}x{height} does not have {n_bytes} bytes"
        ))
    }
}

/// An adapter that workers have been given, as a request uses it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapter {
    /// The name it was given.
    pub name: String,
    /// Its strength; 1 as it was trained. Finite (checked by the engine).
    pub scale: f32,
}

/// Where a picture is repainted.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mask {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// `height * width` bytes, rows from the top: from 128 on the pixel is repainted, below it is kept.
    pub luma: Vec<u8>,
}

impl Mask {
    /// Whether there is a byte for every pixel.
    pub fn is_consistent(&self) -> bool {
        u64::from(self.width) * u64::from(self.height) == self.luma.len() as u64
    }
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mask({}x{})", self.width, self.height)
    }
}

/// What a request returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Capture {
    /// The 8-bit picture.
    #[default]
    Image,
    /// The 8-bit picture and every intermediate tensor that a reference case names: token ids, prompt encodings, initial latents,
    /// each step's prediction and latents, and the picture as f32 before rounding.
    Trace,
}

/// How a wave runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// A wave runs whole generations.
    #[default]
    Request,
    /// A wave runs one denoiser step of each member.
    Step,
}

/// Element type of a [`NamedTensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorDType {
    /// 32-bit float.
    F32,
    /// 64-bit signed integer.
    I64,
    /// 8-bit unsigned integer.
    U8,
}

impl TensorDType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::I64 => 8,
            Self::U8 => 1,
        }
    }
}

/// A host tensor with a name, row-major, little-endian, dense.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct NamedTensor {
    /// Its name, in reference cases' words (`latents.step_3`).
    pub name: String,
    /// Element type.
    pub dtype: TensorDType,
    /// Extent of each dimension, outermost first.
    pub shape: Vec<u64>,
    /// `product(shape) * dtype.size_bytes()` bytes.
    pub data: Vec<u8>,
}

impl NamedTensor {
    /// An f32 tensor. The caller vouches that `values.len()` is the product of `shape`; [`NamedTensor::is_consistent`] checks it.
    pub fn from_f32(name: impl Into<String>, shape: &[u64], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self {
            name: name.into(),
            dtype: TensorDType::F32,
            shape: shape.to_vec(),
            data,
        }
    }

    /// An i64 tensor; as [`NamedTensor::from_f32`].
    pub fn from_i64(name: impl Into<String>, shape: &[u64], values: &[i64]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self {
            name: name.into(),
            dtype: TensorDType::I64,
            shape: shape.to_vec(),
            data,
        }
    }

    /// Whether the number of bytes agrees with shape and dtype (no overflow, no remainder).
    pub fn is_consistent(&self) -> bool {
        let n = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        n.and_then(|n| n.checked_mul(self.dtype.size_bytes() as u64)) == Some(self.data.len() as u64)
    }

    /// The values of an f32 tensor, or `None` for another dtype.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        (self.dtype == TensorDType::F32).then(|| self.data.chunks_exact(4).map(value).collect())
    }
}

impl std::fmt::Debug for NamedTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "NamedTensor({} {:?} {:?}, {} bytes)",
            self.name,
            self.dtype,
            self.shape,
            self.data.len()
        )
    }
}
