//! What a worker is told to load, and what it says it has loaded.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What every worker of a world is started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerConfig {
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// `cpu`; `cuda` for the device of each worker's rank; `cuda:N` for device N in every worker; `auto` for `cuda` where there are as
    /// many devices as workers, else `cpu`.
    pub device: String,
    /// Dtype of the computation: `f32`, `bf16`, `f16`, or `auto` for the device's own ([`WorkerConfig::default_dtype`]).
    pub dtype: String,
    /// Threads of a CPU worker; `None` means this machine's cores divided by the number of workers, at least one.
    pub n_threads: Option<u32>,
    /// Whether the worker computes one small picture before it says that it is ready, so that the first request finds everything in
    /// place and a model that cannot compute fails the start.
    pub warm_up: bool,
}

impl WorkerConfig {
    /// The checkpoint in this folder in f32 on the CPU, on as many threads as there is room for, warmed up.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            device: "cpu".to_owned(),
            dtype: "f32".to_owned(),
            n_threads: None,
            warm_up: true,
        }
    }

    /// What the dtype `auto` stands for on a device: f32 on the CPU, bf16 on a GPU.
    pub fn default_dtype(is_gpu: bool) -> &'static str {
        if is_gpu { "bf16" } else { "f32" }
    }
}

/// What a worker computes with, as it says when it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerDevice {
    /// As users name it: `cpu`, `cuda:0`.
    pub name: String,
    /// Processor or GPU model and the instruction set in use.
    pub description: String,
    /// Dtype of the computation.
    pub dtype: String,
    /// Where the device was `auto`: why it is none of the other kind.
    pub reason: Option<String>,
}

/// What a checkpoint is, as its files say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Family name, e.g. `sd3`.
    pub family: String,
    /// Width and height must be multiples of this many pixels.
    pub grid_px: u32,
    /// Size when none is asked for, `(width, height)` in pixels.
    pub default_size: (u32, u32),
    /// Largest width or height in pixels.
    pub max_side_px: u32,
    /// Steps when none are asked for.
    pub default_n_steps: u32,
    /// Guidance when none is asked for.
    pub default_guidance: f32,
    /// Sampler names this model takes. The first is what it uses when none is asked for, unless the checkpoint was made for a scheduler
    /// that this version does not have: a request must name a sampler then, and is refused with that scheduler's class otherwise.
    pub samplers: Vec<String>,
    /// Bytes of all weights in the files.
    pub checkpoint_bytes: u64,
    /// Of models that make videos.
    pub video: Option<VideoInfo>,
    /// What it can be asked for.
    pub tasks: Vec<Task>,
}

/// What a model of videos makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VideoInfo {
    /// Frames when none are asked for.
    pub default_n_frames: u32,
    /// Frames come in this number, after the first one.
    pub frame_step: u32,
    /// Frames per second that it was trained with.
    pub fps: u32,
}

/// What a model can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// A picture from a text.
    TextToImage,
    /// A picture from the name of a class.
    ClassToImage,
    /// A picture from a picture and a text.
    ImageToImage,
    /// A picture with a part of it painted anew.
    Inpaint,
    /// A picture changed as a text says.
    Edit,
    /// A video from a text.
    TextToVideo,
    /// A video from its first frame and a text.
    ImageToVideo,
}
