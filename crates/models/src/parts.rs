//! What a family is made of, as the one loop wants it.

use crate::{
    conditioning::Conditioner,
    denoiser::Denoiser,
    layout::TensorLayout,
    vae::{Decoder, Encoder},
};
use denoised_checkpoint::Weights;
use denoised_sampler::Sampler;
use denoised_tensor::WeightSpec;
use denoised_types::{ModelInfo, Task};

/// What every family calls its autoencoder.
pub(crate) const AUTOENCODER: &str = "vae";

/// Whether a weight is one of the autoencoder's.
pub(crate) fn is_of_autoencoder(spec: &WeightSpec) -> bool {
    let component = spec.sources.first().and_then(|name| name.split_once('/'));
    component.is_some_and(|(component, _)| component == AUTOENCODER)
}

/// A checkpoint whose structure is known, and its open files.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) parts: Parts,
    pub(crate) specs: Vec<WeightSpec>,
    pub(crate) weights: Weights,
}

/// What the one loop needs of a family.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) info: ModelInfo,
    pub(crate) latents: LatentsLayout,
    /// Longest text of encoders whose length the request chooses: the default and the most. `None` if there is no such encoder.
    pub(crate) max_sequence_length: Option<(u32, u32)>,
    pub(crate) conditioner: Box<dyn Conditioner>,
    pub(crate) denoisers: Experts,
    pub(crate) guidance: GuidanceRule,
    pub(crate) decoder: Box<dyn Decoder>,
    /// Pictures to latents, for the tasks that take pictures.
    pub(crate) encoder: Option<Box<dyn Encoder>>,
    pub(crate) tasks: Tasks,
    /// As many as `info.samplers`, in the same order.
    pub(crate) samplers: Vec<Box<dyn Sampler>>,
    /// Class of the checkpoint's own scheduler, if nothing here carries it out: every request must then name its sampler.
    pub(crate) foreign_scheduler: Option<String>,
}

/// The denoisers of a family.
#[derive(Debug)]
pub(crate) struct Experts {
    pub(crate) first: Box<dyn Denoiser>,
    /// Another one for timesteps below a boundary.
    pub(crate) low_noise: Option<(f32, Box<dyn Denoiser>)>,
}

impl Experts {
    /// One for all timesteps.
    pub(crate) fn one(denoiser: impl Denoiser + 'static) -> Self {
        Self {
            first: Box::new(denoiser),
            low_noise: None,
        }
    }

    /// Which one computes at `timestep`: 0 for the first.
    pub(crate) fn idx(&self, timestep: f32) -> usize {
        match &self.low_noise {
            Some((boundary, _)) if timestep < *boundary => 1,
            _ => 0,
        }
    }

    pub(crate) fn get(&self, idx: usize) -> &dyn Denoiser {
        match (&self.low_noise, idx) {
            (Some((_, low_noise)), 1) => &**low_noise,
            _ => &*self.first,
        }
    }
}

/// How the predictions for prompt (`c`) and negative prompt (`u`) become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GuidanceRule {
    /// `u + s (c - u)`, on above 1.
    Classic,
    /// `c + s (c - u)`, on above 0.
    Offset,
    /// The scale is an input of the denoiser. With a negative prompt and a second scale above 1, `true_guidance`, classic with that one.
    Embedded,
    /// Classic, then scaled to the norm of `c` in every patch of this side; on above 1 where there is a negative prompt.
    NormPreserving {
        /// Latents each way that a patch has.
        patch: usize,
    },
    /// There is none, whatever the request says.
    None,
}

/// What a model does beside text to picture.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tasks {
    /// Starts from a picture instead of noise (strength), and repaints under a mask.
    pub(crate) image_to_image: bool,
    /// Strengths when none are asked for: without and with a mask. `None` for those of Stable Diffusion.
    pub(crate) default_strengths: Option<(f32, f32)>,
    /// Pictures that it edits by instruction.
    pub(crate) references: Option<References>,
    /// Channels beside the latents that the denoiser takes.
    pub(crate) channels: Channels,
    /// Whether a picture can be the first frame of a video, its latents taking the place of the first ones in every step.
    pub(crate) is_first_frame_kept: bool,
    /// Whether a request must bring a picture.
    pub(crate) needs_image: bool,
}

impl Tasks {
    /// As users are told.
    pub(crate) fn list(&self, is_video: bool) -> Vec<Task> {
        let of_text = match is_video {
            true => Task::TextToVideo,
            false => Task::TextToImage,
        };
        let animates = self.is_first_frame_kept || self.channels == Channels::FirstFrame;
        [
            (!self.needs_image, of_text),
            (
                self.image_to_image && self.channels != Channels::Inpaint,
                Task::ImageToImage,
            ),
            (
                self.image_to_image || self.channels == Channels::Inpaint,
                Task::Inpaint,
            ),
            (self.references.is_some(), Task::Edit),
            (animates, Task::ImageToVideo),
        ]
        .into_iter()
        .filter_map(|(is_done, task)| is_done.then_some(task))
        .collect()
    }
}

/// How pictures are edited by instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct References {
    /// Most pictures of one request.
    pub(crate) most: usize,
    pub(crate) size: SizeRule,
    /// Whether the result is, if nobody says otherwise, of the size of the last picture and not of the first.
    pub(crate) last_gives_size: bool,
}

/// Width and height to which a picture of this width and height is brought, before what is beyond the grid (the third number) is cut off
/// at its edges; or why it is not taken.
pub(crate) type SizeRule = fn(u32, u32, u32) -> Result<(u32, u32), String>;

/// What the channels beside the latents hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Channels {
    /// There are none.
    #[default]
    None,
    /// A mask (1 where to repaint), then the latents of the picture without what is under it.
    Inpaint,
    /// Four channels that say which frames are given, then the latents of the clip that holds the given frame and zeros.
    FirstFrame,
}

/// Latents of a picture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentsLayout {
    pub(crate) n_channels: usize,
    /// Pixels per latent, each way.
    pub(crate) factor: usize,
    /// Fewest latents each way that the denoiser can compute.
    pub(crate) min_side: usize,
    /// Layout in which noise is drawn.
    pub(crate) noise: TensorLayout,
    /// Layout of latents that a request brings.
    pub(crate) given: TensorLayout,
    /// Layout of predictions and latents between steps.
    pub(crate) steps: TensorLayout,
    /// Latents each way that make one token of the denoiser: what some schedules depend on.
    pub(crate) patch: usize,
    /// `None` where pictures are made.
    pub(crate) temporal: Option<Temporal>,
}

/// Frames of a video.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Temporal {
    /// Frames per latent frame after the first, which is one frame.
    pub(crate) step: usize,
    /// Most frames that the denoiser can compute.
    pub(crate) most: usize,
}

impl LatentsLayout {
    /// Latents that make one token.
    pub(crate) fn patch_area(&self) -> usize {
        (self.patch * self.patch).max(1)
    }

    /// Of pictures whose latents diffusers holds as they are, `[1, c, h, w]`.
    pub(crate) fn picture(n_channels: usize, factor: usize, min_side: usize) -> Self {
        Self {
            n_channels,
            factor,
            min_side,
            noise: TensorLayout::Nchw,
            given: TensorLayout::Nchw,
            steps: TensorLayout::Nchw,
            patch: 1,
            temporal: None,
        }
    }
}
