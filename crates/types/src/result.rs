//! What came out.

use crate::{NamedTensor, Rank};
use serde::{Deserialize, Serialize};

/// An 8-bit RGB picture, or the frames of a video.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Frames; 1 for a picture.
    pub n_frames: u32,
    /// `n_frames * height * width * 3` bytes, frame by frame, rows from the top, red first.
    pub rgb: Vec<u8>,
}

impl Image {
    /// One picture of `height * width * 3` bytes.
    pub fn picture(width: u32, height: u32, rgb: Vec<u8>) -> Self {
        Self {
            width,
            height,
            n_frames: 1,
            rgb,
        }
    }

    /// Whether there are three bytes for every pixel of every frame.
    pub fn is_consistent(&self) -> bool {
        let sides = u128::from(self.width) * u128::from(self.height);
        sides * u128::from(self.n_frames) * 3 == self.rgb.len() as u128
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.n_frames {
            1 => write!(f, "Image({}x{})", self.width, self.height),
            n => write!(f, "Image({}x{}, {n} frames)", self.width, self.height),
        }
    }
}

/// The result of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generated {
    /// The picture.
    pub image: Image,
    /// What [`crate::Capture::Trace`] asked for, in order of computation; else empty.
    pub tensors: Vec<NamedTensor>,
    /// The arguments as they were resolved: `(name, value)` of every default that the request left open and of those it gave.
    pub resolved: Resolved,
    /// Which rank computed it.
    pub rank: Rank,
    /// Where the time went, in the worker.
    pub times: PhaseTimes,
}

/// A request's arguments with the defaults filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resolved {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Frames; 1 for a picture.
    pub n_frames: u32,
    /// Denoiser steps that were asked for. With a picture to start from fewer are run, with some samplers more.
    pub n_steps: u32,
    /// Guidance scale.
    pub guidance: f32,
    /// Seed of the noise.
    pub seed: u64,
    /// Sampler name.
    pub sampler: String,
    /// Words about the request that its author should see, such as a prompt that was cut.
    pub warnings: Vec<String>,
}

/// Durations inside the worker, in milliseconds, as the request saw them: work that was shared with others counts whole for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Prompt encoding.
    pub encode_ms: f64,
    /// All denoiser steps.
    pub denoise_ms: f64,
    /// Latents to pixels.
    pub decode_ms: f64,
}
