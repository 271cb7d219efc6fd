//! What was asked for, before anybody has checked it.

use serde::{Deserialize, Serialize};

/// One picture to make. `None` means the family's (or checkpoint's) default.
///
/// Several pictures of one prompt are several requests with seeds `seed`, `seed + 1`, …: each is then independent of its
/// siblings, runs on any replica and can be repeated alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// What to draw. May be empty. At most [`GenerateRequest::MAX_PROMPT_BYTES`] bytes (checked by the engine).
    pub prompt: String,
    /// What to stay away from; `None` is the empty prompt. Unused when guidance is off.
    pub negative_prompt: Option<String>,
    /// Width of the picture in pixels; must be a multiple of the family's grid (checked by the worker, which knows the model).
    pub width: Option<u32>,
    /// Height of the picture in pixels; as `width`.
    pub height: Option<u32>,
    /// Denoiser steps, `1..=GenerateRequest::MAX_STEPS` (checked by the engine).
    pub n_steps: Option<u32>,
    /// Classifier-free guidance scale; at or below 1 the unconditional half is not computed. Finite (checked by the engine).
    pub guidance: Option<f32>,
    /// Seed of the initial noise, as `torch.Generator("cpu").manual_seed(seed)` would take it.
    #[serde(default)]
    pub seed: u64,
    /// Name of the sampler, e.g. `flow-euler`; unknown names are refused with the known ones listed.
    pub sampler: Option<String>,
    /// Longest T5 text in tokens, where the family has such a limit (SD3: 256).
    pub max_sequence_length: Option<u32>,
    /// CLIP layers of the prompt that are left out beyond the family's own choice, as diffusers' `clip_skip` counts them; the
    /// negative prompt keeps all of them, as there.
    pub clip_skip: Option<u32>,
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

    /// A request for `prompt` with every default and seed 0.
    pub fn new(prompt: impl Into<String>) -> Self {
        Self {
            prompt: prompt.into(),
            negative_prompt: None,
            width: None,
            height: None,
            n_steps: None,
            guidance: None,
            seed: 0,
            sampler: None,
            max_sequence_length: None,
            clip_skip: None,
            adapters: Vec::new(),
            latents: None,
            capture: Capture::Image,
        }
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
