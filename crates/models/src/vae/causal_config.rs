//! Settings of `AutoencoderKLWan` and `AutoencoderKLQwenImage`, which are one network.

use super::causal::{Shortcut, Time};
use crate::ModelError;
use denoised_checkpoint::Config;
use serde_json::Value;

/// Frames that the encoder takes at a time, after the first.
pub(super) const CHUNK: usize = 4;

/// What both classes assume of the latents where nothing is said: means, standard deviations.
const MEANS: [f64; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
    -0.1922, -0.9497, 0.2503, -0.2921,
];
const DEVIATIONS: [f64; 16] = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
    1.1253, 2.8251, 1.9160,
];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct CausalConfig {
    pub(super) time: Time,
    /// Channels of the latents.
    pub(crate) n_latent: usize,
    /// Mean and standard deviation of each of them.
    pub(super) means: Vec<f32>,
    pub(super) deviations: Vec<f32>,
    /// Widths of the encoder: before the first size, then of each, finest first.
    pub(super) encoder_widths: Vec<usize>,
    /// Of the decoder: before the first size, then of each, coarsest first.
    pub(super) decoder_widths: Vec<usize>,
    pub(super) n_resnets: usize,
    /// Whether the frames are halved too behind a size of the encoder, finest first; one less than there are sizes.
    pub(super) is_temporal: Vec<bool>,
    pub(super) is_residual: bool,
    /// Pixels each way that are channels of one position of the network.
    pub(super) patch: usize,
}

impl CausalConfig {
    /// Reads the configuration of `AutoencoderKLWan`; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read_wan(config: &Config) -> Result<Self, ModelError> {
        let mut read = Self::read(config, Time::Moving)?;
        if let Some(base) = config.opt_usize("decoder_base_dim")? {
            config.within("decoder_base_dim", base, 1..=1 << 12)?;
            read.set_decoder_widths(config, base)?;
        }
        read.is_residual = config.bool_or("is_residual", false)?;
        read.patch = config.opt_usize("patch_size")?.unwrap_or(1);
        config.within("patch_size", read.patch, 1..=8)?;
        let n_pixels = 3 * read.patch * read.patch;
        for key in ["in_channels", "out_channels"] {
            if config.usize_or(key, 3)? != n_pixels {
                return Err(config.wrong(key, &format!("3 patch_size^2 = {n_pixels}")).into());
            }
        }
        for (key, default, factor) in [
            ("scale_factor_spatial", 8, read.factor()),
            ("scale_factor_temporal", 4, read.temporal_factor()),
        ] {
            if config.usize_or(key, default)? != factor {
                let expected = format!("{factor}, as dim_mult, temperal_downsample and patch_size say");
                return Err(config.wrong(key, &expected).into());
            }
        }
        if read.temporal_factor() > CHUNK {
            return Err(config.wrong("temperal_downsample", "true twice at most").into());
        }
        if read.is_residual && !read.has_fitting_shortcuts() {
            let expected = "widths whose ratios shortcuts can average or repeat";
            return Err(config.wrong("dim_mult", expected).into());
        }
        // An early version of diffusers had a switch for what is now always done.
        config.deny_unread(&["dropout", "clip_output"])?;
        Ok(read)
    }

    /// Reads the configuration of `AutoencoderKLQwenImage` for pictures.
    ///
    /// # Errors
    /// As [`CausalConfig::read_wan`].
    pub(crate) fn read_qwen_image(config: &Config) -> Result<Self, ModelError> {
        let read = Self::read(config, Time::Still)?;
        config.only("input_channels", &[3.into()])?;
        config.deny_unread(&["dropout"])?;
        Ok(read)
    }

    /// What both classes have in common.
    fn read(config: &Config, time: Time) -> Result<Self, ModelError> {
        let base = config.usize_or("base_dim", 96)?;
        config.within("base_dim", base, 1..=1 << 12)?;
        let factors = config.usizes("dim_mult")?.unwrap_or_else(|| vec![1, 2, 4, 4]);
        let are_sound = (1..=6).contains(&factors.len()) && factors.iter().all(|n| (1..=64).contains(n));
        if !are_sound {
            return Err(config.wrong("dim_mult", "1 to 6 numbers of 1 to 64").into());
        }
        let n_latent = config.usize_or("z_dim", 16)?;
        config.within("z_dim", n_latent, 1..=1 << 10)?;
        let n_resnets = config.usize_or("num_res_blocks", 2)?;
        config.within("num_res_blocks", n_resnets, 1..=64)?;
        config.only("attn_scales", &[Value::Array(Vec::new())])?;
        let expected = format!("{} of true and false, one less than dim_mult", factors.len() - 1);
        let is_temporal = list(
            config,
            "temperal_downsample",
            &[false, true, true],
            &expected,
            |value| value.as_bool(),
        )?;
        if is_temporal.len() + 1 != factors.len() {
            return Err(config.wrong("temperal_downsample", &expected).into());
        }
        let numbers = |key, default: &[f64], is_sound: fn(f64) -> bool| {
            let expected = format!("{n_latent} numbers, one for each of z_dim");
            let of = |value: &Value| value.as_f64().filter(|x| is_sound(*x)).map(|x| x as f32);
            let default: Vec<f32> = default.iter().map(|x| *x as f32).collect();
            let read = list(config, key, &default, &expected, of)?;
            if read.len() == n_latent {
                Ok(read)
            } else {
                Err(ModelError::from(config.wrong(key, &expected)))
            }
        };
        let widths = |factors: &mut dyn Iterator<Item = &usize>| factors.map(|n| n * base).collect();
        let mut read = Self {
            time,
            n_latent,
            means: numbers("latents_mean", &MEANS, |_| true)?,
            deviations: numbers("latents_std", &DEVIATIONS, |x| x > 0.0)?,
            encoder_widths: widths(&mut [1].iter().chain(&factors)),
            decoder_widths: Vec::new(),
            n_resnets,
            is_temporal,
            is_residual: false,
            patch: 1,
        };
        read.set_decoder_widths(config, base)?;
        Ok(read)
    }

    fn set_decoder_widths(&mut self, config: &Config, base: usize) -> Result<(), ModelError> {
        let factors = config.usizes("dim_mult")?.unwrap_or_else(|| vec![1, 2, 4, 4]);
        let deepest = factors.last();
        self.decoder_widths = deepest
            .into_iter()
            .chain(factors.iter().rev())
            .map(|n| n * base)
            .collect();
        Ok(())
    }

    /// Sizes of the network.
    pub(super) fn n_sizes(&self) -> usize {
        self.is_temporal.len() + 1
    }

    /// Pixels per latent, each way.
    pub(crate) fn factor(&self) -> usize {
        self.patch << self.is_temporal.len()
    }

    /// Frames per latent frame after the first.
    pub(crate) fn temporal_factor(&self) -> usize {
        1 << self
            .is_temporal
            .iter()
            .filter(|is_temporal| **is_temporal)
            .count()
    }

    /// The shortcut around size `idx` of the encoder, finest first.
    pub(super) fn reducing(&self, idx: usize) -> Shortcut {
        let is_last = idx + 1 == self.n_sizes();
        Shortcut {
            c_in: self.encoder_widths[idx],
            c_out: self.encoder_widths[idx + 1],
            n_frames: if !is_last && self.is_temporal[idx] { 2 } else { 1 },
            side: if is_last { 1 } else { 2 },
        }
    }

    /// The shortcut around size `idx` of the decoder, coarsest first; there is none around the last.
    pub(super) fn enlarging(&self, idx: usize) -> Option<Shortcut> {
        (idx + 1 < self.n_sizes()).then(|| Shortcut {
            c_in: self.decoder_widths[idx],
            c_out: self.decoder_widths[idx + 1],
            n_frames: if self.is_temporal_up(idx) { 2 } else { 1 },
            side: 2,
        })
    }

    /// Whether the frames are doubled too behind size `idx` of the decoder, coarsest first.
    pub(super) fn is_temporal_up(&self, idx: usize) -> bool {
        self.is_temporal.iter().rev().nth(idx).copied().unwrap_or(false)
    }

    fn has_fitting_shortcuts(&self) -> bool {
        (0..self.n_sizes()).all(|idx| {
            let enlarging = self.enlarging(idx);
            self.reducing(idx).can_reduce() && enlarging.is_none_or(|shortcut| shortcut.can_enlarge())
        })
    }
}

/// A list, each element of which `of` takes; `default` if there is none.
fn list<T: Clone>(
    config: &Config,
    key: &str,
    default: &[T],
    expected: &str,
    of: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<T>, ModelError> {
    let Some(value) = config.value(key) else {
        return Ok(default.to_vec());
    };
    let elements = value
        .as_array()
        .and_then(|values| values.iter().map(of).collect());
    elements.ok_or_else(|| config.wrong(key, expected).into())
}
