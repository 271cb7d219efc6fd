//! What a request's pictures are for, and what they become before the first step.
//!
//! R1. Draws come from the request's generator in the order of diffusers' pipelines: the encoding of the picture, the noise of the
//!     latents, the encoding of what a mask leaves; then what the sampler adds.
//! R2. Pictures are brought to the size of the result (pictures to edit: to the size that their family names).

use super::{DiffusionPipeline, Generation, Known, device, internal, invalid};
use crate::{
    layout::{LatentsShape, TensorLayout},
    parts::{Channels, References},
    pixels::{Filter, resized_image, resized_mask, signed},
};
use denoised_nn::Ctx;
use denoised_sampler::{Schedule, TorchGenerator};
use denoised_tensor::{DType, Tensor, TensorError};
use denoised_types::{Failure, GenerateRequest, Image, Mask, Resolved};

/// Strengths when none are given, without and with a mask, of diffusers' pipelines for Stable Diffusion.
const DEFAULT_STRENGTHS: (f32, f32) = (0.8, 1.0);

/// What a request wants done with its pictures.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task<'a> {
    /// It has none.
    FromText,
    /// The result starts from the picture; with a mask only there.
    FromPicture {
        image: &'a Image,
        mask: Option<&'a Mask>,
        strength: f32,
    },
    /// The result is told by the pictures and the text.
    Edit {
        images: &'a [Image],
        references: References,
    },
    /// The picture is the first frame.
    Animate { image: &'a Image },
}

impl Task<'_> {
    /// Whether the latents of the beginning are noise and nothing else.
    pub(super) fn is_noise_scaled(&self) -> bool {
        match self {
            Self::FromPicture { mask, strength, .. } => mask.is_some() && *strength >= 1.0,
            _ => true,
        }
    }

    /// Share of the steps that is done, of pictures made from pictures.
    pub(super) fn strength(&self) -> Option<f32> {
        match self {
            Self::FromPicture { strength, .. } => Some(*strength),
            _ => None,
        }
    }
}

/// What a generation begins with.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// The latents before the first step.
    pub(super) start: Vec<f32>,
    /// The unit normal noise in them.
    pub(super) noise: Vec<f32>,
    pub(super) channels: Option<Tensor>,
    pub(super) references: Vec<Tensor>,
    pub(super) known: Option<Known>,
    pub(super) is_first_frame_given: bool,
}

impl DiffusionPipeline {
    /// What the pictures of a request are for.
    pub(super) fn task<'a>(&self, request: &'a GenerateRequest) -> Result<Task<'a>, Failure> {
        let tasks = &self.parts.tasks;
        let images = &request.images[..];
        let takes_start = tasks.image_to_image || tasks.channels == Channels::Inpaint;
        let Some(first) = images.first() else {
            if request.mask.is_some() || request.strength.is_some() {
                return Err(invalid(
                    "a mask or a strength was given without a picture".to_owned(),
                ));
            }
            return match (tasks.needs_image, tasks.channels) {
                (false, _) => Ok(Task::FromText),
                (true, Channels::Inpaint) => Err(invalid(
                    "this model repaints a part of a picture: give it a picture and a mask".to_owned(),
                )),
                (true, _) => Err(invalid(
                    "this model starts from a picture: give it one".to_owned(),
                )),
            };
        };
        let one = |what: &str| match images.len() {
            1 => Ok(()),
            n => Err(invalid(format!("{n} pictures were given, {what} takes one"))),
        };
        if let Some(text) = request.inconsistency() {
            return Err(invalid(text));
        }
        if images
            .iter()
            .any(|image| image.width == 0 || image.height == 0 || image.n_frames != 1)
        {
            return Err(invalid(
                "a picture without pixels, or of several frames, was given".to_owned(),
            ));
        }
        if request.mask.is_some() || request.strength.is_some() {
            let what = if request.mask.is_some() {
                "a mask"
            } else {
                "a strength"
            };
            if !takes_start {
                return Err(invalid(format!("{what} was given, this model does not take one")));
            }
        } else if tasks.is_first_frame_kept || tasks.channels == Channels::FirstFrame {
            one("a video")?;
            return Ok(Task::Animate { image: first });
        } else if let Some(references) = tasks.references {
            if images.len() > references.most {
                let (n, most) = (images.len(), references.most);
                return Err(invalid(format!(
                    "{n} pictures were given, this model takes at most {most}"
                )));
            }
            for image in images {
                self.reference_size(references, image)?;
            }
            return Ok(Task::Edit { images, references });
        }
        if !takes_start {
            return Err(invalid("a picture was given, this model takes none".to_owned()));
        }
        one("a start")?;
        let mask = request.mask.as_ref();
        if tasks.channels == Channels::Inpaint && mask.is_none() {
            return Err(invalid(
                "this model repaints a part of a picture: give it a mask, too".to_owned(),
            ));
        }
        if let Some(mask) = mask.filter(|mask| (mask.width, mask.height) != (first.width, first.height)) {
            return Err(invalid(format!(
                "the mask is {}x{}, its picture is {}x{}: they must be of one size",
                mask.width, mask.height, first.width, first.height
            )));
        }
        let (unmasked, masked) = tasks.default_strengths.unwrap_or(DEFAULT_STRENGTHS);
        let default = if mask.is_some() { masked } else { unmasked };
        let strength = request.strength.unwrap_or(default);
        if !(strength > 0.0 && strength <= 1.0) {
            return Err(invalid(format!(
                "strength is {strength}, it must be above 0 and at most 1"
            )));
        }
        Ok(Task::FromPicture {
            image: first,
            mask,
            strength,
        })
    }

    /// Width and height when none are asked for: those of the picture, on the grid; of a video its shape and the model's area.
    pub(super) fn default_size(&self, task: &Task<'_>) -> (u32, u32) {
        let info = &self.parts.info;
        let on_grid = |(width, height): (u32, u32)| {
            let side = |px: u32| (px / info.grid_px.max(1) * info.grid_px).max(info.grid_px);
            (side(width), side(height))
        };
        match task {
            Task::FromText => info.default_size,
            Task::FromPicture { image, .. } => on_grid((image.width, image.height)),
            Task::Edit { images, references } => match references.last_gives_size {
                true => images.last(),
                false => images.first(),
            }
            .and_then(|image| self.reference_size(*references, image).ok())
            .map_or(info.default_size, |[_, cut]| cut),
            Task::Animate { image } => {
                let area = f64::from(info.default_size.0) * f64::from(info.default_size.1);
                let aspect = f64::from(image.width) / f64::from(image.height);
                on_grid(((area * aspect).sqrt() as u32, (area / aspect).sqrt() as u32))
            }
        }
    }

    /// The size to which a picture to edit is brought, and what of it is on the grid.
    fn reference_size(&self, references: References, image: &Image) -> Result<[(u32, u32); 2], Failure> {
        let grid = self.parts.info.grid_px.max(1);
        let size = (references.size)(image.width, image.height, grid);
        let (width, height) = size.map_err(invalid)?;
        let cut = (width / grid * grid, height / grid * grid);
        if cut.0 == 0 || cut.1 == 0 {
            return Err(invalid(format!(
                "a picture of {width}x{height} was given, the sides must be at least {grid}"
            )));
        }
        Ok([(width, height), cut])
    }

    /// Encodes the pictures and makes the latents of the beginning, from `noise` if the request brought some.
    pub(super) fn prepare(
        &self,
        ctx: &Ctx<'_>,
        task: &Task<'_>,
        resolved: &Resolved,
        schedule: &Schedule,
        generator: &mut TorchGenerator,
        noise: Option<Vec<f32>>,
    ) -> Result<Given, Failure> {
        let shape = self.latents_shape(resolved);
        let draw = |generator: &mut TorchGenerator| noise.unwrap_or_else(|| self.noise(generator, &shape));
        let scaled = |noise: Vec<f32>| Given {
            start: noise.iter().map(|x| x * schedule.init_noise_scale).collect(),
            noise,
            ..Given::default()
        };
        match *task {
            Task::FromText => Ok(scaled(draw(generator))),
            Task::Edit { images, references } => {
                let mut given = scaled(draw(generator));
                for image in images {
                    let [resized, cut] = self.reference_size(references, image)?;
                    let image = resized_image(image, resized.0, resized.1, Filter::Lanczos);
                    let pixels = signed(&middle(&image, cut).rgb);
                    let latents = self.encode_pixels(ctx, &pixels, cut, 1, None)?;
                    given.references.push(ctx.cast(&latents).map_err(device)?);
                }
                Ok(given)
            }
            Task::Animate { image } => {
                let Given { start, noise, .. } = scaled(draw(generator));
                let given = match self.parts.tasks.channels {
                    Channels::FirstFrame => self.first_frame_channels(ctx, image, resolved, &shape)?,
                    _ => self.first_frame_latents(ctx, image, resolved, &shape)?,
                };
                Ok(Given {
                    start,
                    noise,
                    ..given
                })
            }
            Task::FromPicture { image, mask, .. } => {
                let size = (resolved.width, resolved.height);
                let pixels = signed(&resized_image(image, size.0, size.1, Filter::Lanczos).rgb);
                let is_full = task.is_noise_scaled();
                let has_channels = self.parts.tasks.channels == Channels::Inpaint;
                let latents = if is_full && has_channels {
                    None
                } else {
                    let sample = posterior_noise(generator, &shape);
                    Some(self.encode_pixels(ctx, &pixels, size, 1, Some(&sample))?)
                };
                let noise = draw(generator);
                let mut given = match &latents {
                    Some(latents) if !is_full => {
                        let latents = ctx.download_f32(latents).map_err(device)?;
                        let [of_latents, of_noise] = schedule.start;
                        let pairs = latents.iter().zip(&noise);
                        let start: Vec<f32> = pairs
                            .map(|(x, noise)| of_latents * x + of_noise * noise)
                            .collect();
                        Given {
                            start,
                            noise: noise.clone(),
                            ..Given::default()
                        }
                    }
                    _ => scaled(noise.clone()),
                };
                let Some(mask) = mask else {
                    return Ok(given);
                };
                let repaint = resized_mask(mask, size.0, size.1);
                let small = nearest(&repaint, size, &shape);
                // What the mask leaves is encoded in either case: its draw comes before those of the sampler.
                let sample = posterior_noise(generator, &shape);
                if has_channels {
                    let left: Vec<f32> = pixels
                        .chunks_exact(3)
                        .zip(&repaint)
                        .flat_map(|(pixel, mask)| pixel.iter().map(move |x| x * (1.0 - mask)))
                        .collect();
                    let left = self.encode_pixels(ctx, &left, size, 1, Some(&sample))?;
                    let small = ctx.upload_f32(&small, &mask_dims(&shape)).map_err(device)?;
                    given.channels = Some(beside(ctx, &small, &left).map_err(device)?);
                } else if let Some(image) = latents {
                    let noise = ctx.upload_f32(&noise, &shape.dims()).map_err(device)?;
                    given.known = Some(known(ctx, image, noise, &small, &shape).map_err(device)?);
                }
                Ok(given)
            }
        }
    }

    /// Channels that say which frames are given, then the latents of a clip of the picture and empty frames.
    fn first_frame_channels(
        &self,
        ctx: &Ctx<'_>,
        image: &Image,
        resolved: &Resolved,
        shape: &LatentsShape,
    ) -> Result<Given, Failure> {
        let size = (resolved.width, resolved.height);
        let mut clip = signed(&resized_image(image, size.0, size.1, Filter::Lanczos).rgb);
        clip.resize(clip.len() * resolved.n_frames as usize, 0.0);
        let latents = self.encode_pixels(ctx, &clip, size, resolved.n_frames as usize, None)?;
        // One channel per frame of a latent frame; the first latent frame stands for the first frame alone.
        let n_marks = self.parts.latents.temporal.map_or(1, |temporal| temporal.step);
        let n_latents = shape.h * shape.w * n_marks;
        let mut marks = vec![1.0; n_latents];
        marks.resize(n_latents * shape.n_frames, 0.0);
        let dims = [1, shape.n_frames * shape.h, shape.w, n_marks];
        let marks = ctx.upload_f32(&marks, &dims).map_err(device)?;
        Ok(Given {
            channels: Some(beside(ctx, &marks, &latents).map_err(device)?),
            ..Given::default()
        })
    }

    /// The picture's latents as the first frame of the latents.
    fn first_frame_latents(
        &self,
        ctx: &Ctx<'_>,
        image: &Image,
        resolved: &Resolved,
        shape: &LatentsShape,
    ) -> Result<Given, Failure> {
        let size = (resolved.width, resolved.height);
        let pixels = signed(&resized_image(image, size.0, size.1, Filter::Lanczos).rgb);
        let latents = self.encode_pixels(ctx, &pixels, size, 1, None)?;
        let frames = ctx.backend.alloc(&shape.dims(), DType::F32).map_err(device)?;
        ctx.backend.fill(&frames, 0.0).map_err(device)?;
        let first = frames.narrow(1, 0, shape.h).map_err(device)?;
        ctx.backend.copy(&latents, &first).map_err(device)?;
        let noise = ctx.backend.alloc(&shape.dims(), DType::F32).map_err(device)?;
        ctx.backend.fill(&noise, 0.0).map_err(device)?;
        let n_first = shape.h * shape.w;
        let mut mask = vec![0.0; n_first];
        mask.resize(n_first * shape.n_frames, 1.0);
        Ok(Given {
            known: Some(known(ctx, frames, noise, &mask, shape).map_err(device)?),
            is_first_frame_given: true,
            ..Given::default()
        })
    }

    /// Latents of `n_frames` frames of pixels in `[-1, 1]`, f32; sampled with `noise`, else the most likely ones.
    fn encode_pixels(
        &self,
        ctx: &Ctx<'_>,
        pixels: &[f32],
        (width, height): (u32, u32),
        n_frames: usize,
        noise: Option<&[f32]>,
    ) -> Result<Tensor, Failure> {
        let encoder = self.parts.encoder.as_deref();
        let encoder = encoder.ok_or_else(|| internal("a task that needs an encoder, and there is none"))?;
        let (rows, columns) = (n_frames * height as usize, width as usize);
        let pixels = ctx.upload_f32(pixels, &[1, rows, columns, 3]).map_err(device)?;
        let factor = self.parts.latents.factor;
        let dims = [1, rows / factor, columns / factor, self.parts.latents.n_channels];
        let noise = noise
            .map(|noise| ctx.upload_f32(noise, &dims))
            .transpose()
            .map_err(device)?;
        let latents = self.autoencoder.run(ctx, "encoding", |ctx| {
            encoder.encode(ctx, &pixels, n_frames, noise.as_ref())
        });
        let latents = latents.map_err(device)?;
        latents.ok_or_else(|| super::non_finite("latents of a given picture are", "encoding"))
    }
}

impl Generation {
    /// Puts what is known of a result into it, once all steps are done.
    pub(super) fn finished(&self, ctx: &Ctx<'_>) -> Result<Tensor, TensorError> {
        match (&self.known, self.is_first_frame_given) {
            (Some(known), true) => known.blended(ctx, &self.state[0], [1.0, 0.0]),
            _ => Ok(self.state[0].clone()),
        }
    }
}

impl Known {
    /// `mask latents + (1 - mask) (factors[0] image + factors[1] noise)` of one member.
    fn blended(&self, ctx: &Ctx<'_>, latents: &Tensor, factors: [f32; 2]) -> Result<Tensor, TensorError> {
        let factors = ctx.upload_f32(&[factors[0], factors[1], 0.0], &[1, 3])?;
        let masks = (&self.mask, &self.inverse);
        super::step::blended(ctx, latents, &self.image, &self.noise, &factors, masks)
    }
}

/// The middle of a picture, where an odd rest is cut off more at the right and the bottom.
fn middle(image: &Image, (width, height): (u32, u32)) -> Image {
    let (left, top) = ((image.width - width) / 2, (image.height - height) / 2);
    let (stride, first, len) = (3 * image.width as usize, 3 * left as usize, 3 * width as usize);
    let rows = image.rgb.chunks_exact(stride);
    let rows = rows.skip(top as usize).take(height as usize);
    let rgb = rows.flat_map(|row| &row[first..first + len]).copied().collect();
    Image::picture(width, height, rgb)
}

/// What samples the encoding of one picture, drawn as diffusers draws it.
fn posterior_noise(generator: &mut TorchGenerator, shape: &LatentsShape) -> Vec<f32> {
    let mut values = vec![0.0; shape.n_elements()];
    generator.fill_normal(&mut values);
    TensorLayout::Nchw.to_loop(&values, shape)
}

fn mask_dims(shape: &LatentsShape) -> [usize; 4] {
    [1, shape.n_frames * shape.h, shape.w, 1]
}

/// A mask of pixels at the size of latents: the pixel at the top left of each.
fn nearest(mask: &[f32], (width, height): (u32, u32), shape: &LatentsShape) -> Vec<f32> {
    let (width, height) = (width as usize, height as usize);
    let mut small = Vec::with_capacity(shape.h * shape.w);
    for y in 0..shape.h {
        for x in 0..shape.w {
            small.push(mask[y * height / shape.h * width + x * width / shape.w]);
        }
    }
    small
}

fn known(
    ctx: &Ctx<'_>,
    image: Tensor,
    noise: Tensor,
    mask: &[f32],
    shape: &LatentsShape,
) -> Result<Known, TensorError> {
    let inverse: Vec<f32> = mask.iter().map(|x| 1.0 - x).collect();
    Ok(Known {
        image,
        noise,
        mask: ctx.upload_f32(mask, &mask_dims(shape))?,
        inverse: ctx.upload_f32(&inverse, &mask_dims(shape))?,
    })
}

/// Channels of `a`, then those of `b`.
fn beside(ctx: &Ctx<'_>, a: &Tensor, b: &Tensor) -> Result<Tensor, TensorError> {
    let mut dims = a.dims().to_vec();
    dims[3] += b.dim(3);
    let out = ctx.backend.alloc(&dims, DType::F32)?;
    ctx.backend.copy(a, &out.narrow(3, 0, a.dim(3))?)?;
    ctx.backend.copy(b, &out.narrow(3, a.dim(3), b.dim(3))?)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_picture_leaves_out_its_edges() {
        let rgb: Vec<u8> = (0..12).flat_map(|pixel| [pixel, 100, 200]).collect();
        let middle = middle(&Image::picture(4, 3, rgb), (1, 1));
        // (4 - 1) / 2 = 1 column and (3 - 1) / 2 = 1 row are left out before it.
        assert_eq!(
            (middle.width, middle.height, &middle.rgb[..]),
            (1, 1, &[5, 100, 200][..])
        );
    }

    #[test]
    fn a_mask_shrinks_to_the_pixel_at_the_top_left() {
        // torch.nn.functional.interpolate's nearest: source index floor(i * in / out).
        let shape = LatentsShape {
            n_frames: 1,
            h: 2,
            w: 2,
            c: 4,
        };
        let mask: Vec<f32> = (0..16u8).map(f32::from).collect();
        assert_eq!(nearest(&mask, (4, 4), &shape), [0.0, 2.0, 8.0, 10.0]);
    }
}
