//! A finished request's result, owned by whoever holds it.

use denoised_link::{Blob, Received};
use denoised_types::{Failure, FailureCode, Generated, Image, NamedTensor, PhaseTimes, Rank, Resolved};
use denoised_wire::GeneratedMeta;

/// A result where the worker left it. There is one owner; dropping it frees the memory, wherever that is.
///
/// A picture lies in its worker's event arena until then, provided it lies in the arena's first half: what is held never takes the
/// second half, which is as much as a worker sends at once, so no number of held results can hold a worker up. Other pictures are
/// copied when they arrive, as are traced tensors.
#[derive(Debug)]
pub struct Output {
    parts: Box<Parts>,
}

#[derive(Debug)]
struct Parts {
    width: u32,
    height: u32,
    n_frames: u32,
    rgb: Blob,
    tensors: Vec<NamedTensor>,
    resolved: Resolved,
    rank: Rank,
    times: PhaseTimes,
}

impl Output {
    /// The arguments as they were resolved.
    pub fn resolved(&self) -> &Resolved {
        &self.parts.resolved
    }

    /// Which rank computed it.
    pub fn rank(&self) -> Rank {
        self.parts.rank
    }

    /// Where the time went, in the worker.
    pub fn times(&self) -> PhaseTimes {
        self.parts.times
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (u32, u32) {
        (self.parts.width, self.parts.height)
    }

    /// Frames; 1 for a picture.
    pub fn n_frames(&self) -> u32 {
        self.parts.n_frames
    }

    /// `n_frames * height * width * 3` bytes, frame by frame, rows from the top, red first; not copied.
    pub fn rgb(&self) -> &[u8] {
        &self.parts.rgb
    }

    /// What [`denoised_types::Capture::Trace`] asked for.
    pub fn tensors(&self) -> &[NamedTensor] {
        &self.parts.tensors
    }

    /// Bytes of the worker's arena that this keeps from being used again; 0 for a result that was copied.
    pub fn held_bytes(&self) -> usize {
        self.parts.rgb.held_bytes()
    }

    /// The result as plain data of one's own; the worker's memory is free then.
    pub fn into_generated(self) -> Generated {
        let Parts {
            width,
            height,
            n_frames,
            rgb,
            tensors,
            resolved,
            rank,
            times,
        } = *self.parts;
        let rgb = rgb.into_vec();
        Generated {
            image: Image {
                width,
                height,
                n_frames,
                rgb,
            },
            tensors,
            resolved,
            rank,
            times,
        }
    }

    /// Takes the result out of `rank`'s message.
    ///
    /// # Errors
    /// The picture does not have the bytes of its size.
    pub(crate) fn receive(meta: GeneratedMeta, rank: Rank, received: &mut Received) -> Result<Self, Failure> {
        let GeneratedMeta {
            width,
            height,
            n_frames,
            rgb,
            resolved,
            times,
        } = meta;
        let rgb = received.take(rgb).unwrap_or_default();
        // Any numbers may come from a worker.
        let wanted = u128::from(width) * u128::from(height) * u128::from(n_frames) * 3;
        if rgb.len() as u128 != wanted {
            let text = format!(
                "{n_frames} pictures of {width}x{height} came with {} bytes instead of {wanted}",
                rgb.len()
            );
            return Err(Failure::new(FailureCode::Protocol, text).on_rank(rank));
        }
        let rgb = if rgb.is_in_first_half() {
            rgb
        } else {
            rgb.into_vec().into()
        };
        Ok(Self {
            parts: Box::new(Parts {
                width,
                height,
                n_frames,
                rgb,
                tensors: Vec::new(),
                resolved,
                rank,
                times,
            }),
        })
    }

    /// The same, with what was traced.
    pub(crate) fn with_tensors(mut self, tensors: Vec<NamedTensor>) -> Self {
        self.parts.tensors = tensors;
        self
    }
}

impl PartialEq for Output {
    /// Whether both are the same result, wherever they lie.
    fn eq(&self, other: &Self) -> bool {
        let Parts {
            width,
            height,
            n_frames,
            rgb,
            tensors,
            resolved,
            rank,
            times,
        } = &*self.parts;
        let other = &*other.parts;
        (*width, *height, *n_frames) == (other.width, other.height, other.n_frames)
            && (rank, times) == (&other.rank, &other.times)
            && **rgb == *other.rgb
            && *tensors == other.tensors
            && *resolved == other.resolved
    }
}

impl From<Generated> for Output {
    fn from(generated: Generated) -> Self {
        let Generated {
            image,
            tensors,
            resolved,
            rank,
            times,
        } = generated;
        let Image {
            width,
            height,
            n_frames,
            rgb,
        } = image;
        Self {
            parts: Box::new(Parts {
                width,
                height,
                n_frames,
                rgb: rgb.into(),
                tensors,
                resolved,
                rank,
                times,
            }),
        }
    }
}
