//! A finished request's result, owned by whoever holds it.

use denoised_types::{Generated, NamedTensor, PhaseTimes, Rank, Resolved};

/// A result where the worker left it. There is one owner; dropping it frees the memory, wherever that is.
#[derive(Debug, PartialEq)]
pub struct Output {
    generated: Box<Generated>,
}

impl Output {
    /// The arguments as they were resolved.
    pub fn resolved(&self) -> &Resolved {
        &self.generated.resolved
    }

    /// Which rank computed it.
    pub fn rank(&self) -> Rank {
        self.generated.rank
    }

    /// Where the time went, in the worker.
    pub fn times(&self) -> PhaseTimes {
        self.generated.times
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (u32, u32) {
        (self.generated.image.width, self.generated.image.height)
    }

    /// `height * width * 3` bytes, rows from the top, red first; not copied.
    pub fn rgb(&self) -> &[u8] {
        &self.generated.image.rgb
    }

    /// What [`denoised_types::Capture::Trace`] asked for.
    pub fn tensors(&self) -> &[NamedTensor] {
        &self.generated.tensors
    }

    /// The result as plain data of one's own; the worker's memory is free then.
    pub fn into_generated(self) -> Generated {
        *self.generated
    }
}

impl From<Generated> for Output {
    fn from(generated: Generated) -> Self {
        Self {
            generated: Box::new(generated),
        }
    }
}
