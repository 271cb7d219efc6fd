//! The op set on CPU threads and SIMD: own kernels, one copy of the weights per host, no framework.
//!
//! Knows nothing of layers, families or processes. [`CpuBackend`] checks operands (`check`, `operand`) and hands pointers to kernels; kernels
//! are written once against `simd::Simd` and exist for every [`Isa`].
//!
//! - Compute is f32. Activations of other dtypes are refused with [`denoised_tensor::TensorError::DType`] by every op except `copy`
//!   (which converts), `upload` and `download`; weights of any float dtype are widened once by `prepare`.
//! - A result depends on the operands, the shape of one batch element and the instruction set: never on the threads, on the batch size
//!   or on what else is in the batch. How work is cut into tasks may depend on anything, because no sum crosses a task.
//! - Memory: freed activations are used again (`memory`); weights lie in one sealed block (`weights`). 3x3 kernels that go through
//!   Winograd's transforms take four times their size; [`CpuOptions::winograd`] switches that off.
//! - NaN and infinity pass through every op as IEEE arithmetic has it, and no clamp swallows a NaN; through Winograd's transforms, which
//!   subtract, both come out as NaN.
#![allow(
    clippy::needless_range_loop,
    reason = "kernels walk registers, lanes and pointers by one index, and closures of iterators would lack the instruction set"
)]

mod backend;

mod check;
mod operand;

mod context;
mod memory;
mod threads;

mod weights;

mod gemm;

mod attention;
mod conv;
mod elementwise;
mod lookup;
mod norm;
mod winograd;

mod isa;
mod simd;

pub mod bench;

pub use backend::{CpuBackend, CpuOptions};
pub(crate) use context::Context;
pub use isa::Isa;

#[cfg(target_endian = "big")]
compile_error!("checkpoints and tensors are little-endian, and so must be the processor");
