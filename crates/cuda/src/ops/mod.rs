//! The ops: checks first, then the launch. One file per group.

pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod elementwise;
pub(crate) mod layout;
pub(crate) mod linear;
pub(crate) mod lookup;
pub(crate) mod norm;
pub(crate) mod sample;
mod walk;

use crate::{
    device::{Device, Launch},
    memory::Memory,
    module::{Kernel, Modules},
    operand::{self, View},
    products::Products,
    report::Reports,
};
use denoised_tensor::{DType, Result, Tensor, TensorError};

/// Most blocks of a grid in its second and third dimension.
pub(crate) const MAX_GRID: u32 = 65_535;

/// What launches need of a backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ops<'a> {
    pub(crate) device: &'a Device,
    pub(crate) memory: &'a Memory,
    pub(crate) modules: &'a Modules,
    pub(crate) products: &'a Products,
    pub(crate) reports: &'a Reports,
}

/// Extents of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub(crate) grid: [u32; 3],
    /// Threads of a block, in one dimension.
    pub(crate) block: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

impl Extents {
    /// Enough blocks of 256 threads for `n` items, or as many as the device keeps busy where a loop takes several items per thread.
    pub(crate) fn looping(n: usize, device: &Device) -> Self {
        let most = 32 * device.n_multiprocessors() as usize;
        Self {
            grid: [n.div_ceil(256).clamp(1, most) as u32, 1, 1],
            block: 256,
            shared_bytes: 0,
        }
    }
}

impl Ops<'_> {
    /// The operand behind `tensor`.
    pub(crate) fn view(&self, op: &'static str, name: &str, tensor: &Tensor) -> Result<View> {
        operand::view(op, name, tensor, self.memory)
    }

    /// Enqueues `kernel` for elements of `dtype`.
    ///
    /// # Safety
    /// `A` mirrors the kernel's struct, and `args` holds what the kernel trusts: addresses of views that were checked, extents that fit.
    pub(crate) unsafe fn launch<A: Copy>(
        &self,
        kernel: Kernel,
        dtype: DType,
        extents: Extents,
        args: &A,
    ) -> Result<()> {
        let [_, y, z] = extents.grid;
        if y.max(z) > MAX_GRID {
            let detail = format!(
                "a grid of {:?} blocks, the last two can be {MAX_GRID}",
                extents.grid
            );
            return Err(TensorError::Shape {
                op: kernel.name,
                detail,
            });
        }
        let function = self
            .modules
            .function(kernel, dtype, size_of::<A>(), extents.shared_bytes)?;
        let launch = Launch {
            name: function.name.to_string(),
            grid: extents.grid,
            block: [extents.block, 1, 1],
            shared_bytes: extents.shared_bytes,
        };
        // SAFETY: the caller's promise; the size of `A` was compared with what the kernel declares.
        unsafe { self.device.launch(function.raw, launch, args) }
    }
}
