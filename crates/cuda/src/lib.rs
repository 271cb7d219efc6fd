//! CUDA devices as a [`Backend`](denoised_tensor::Backend): kernels of our own launched through cudarc, matrix products by cuBLASLt.
//!
//! R1. The libraries of CUDA are opened at run time: one build serves machines with and without a GPU. Nothing here is called before
//!     [`device_count`] or [`CudaBackend::open`] has looked whether the library is there.
//! R2. One backend is one device, one stream and one thread. Ops are enqueued in order; only what the contract says waits.
//! R3. Checks (`operand`, `denoised_tensor::check`) come first, kernels trust what they are given.
//! R4. An error of the device that lasts (an illegal address, say) is latched: every later op returns it, with the kernel that caused it.
//!
//! | where | what |
//! |---|---|
//! | `kernels/*.cu` | the kernels, and `portable.cuh` that all of them are written with |
//! | `library` | which libraries are there |
//! | `device` | context, stream, the log of launches, the latched error |
//! | `memory` | stream-ordered memory, and what recordings keep |
//! | `image`, `module` | from sources to loaded functions: embedded fatbin, or NVRTC with a cache on disk |
//! | `operand` | from tensors to what kernels are given |
//! | `ops/` | one file per group of ops: the launches |
//! | `products` | matrix products by cuBLASLt |
//! | `report` | what kernels find wrong with numbers they are given |
//! | `weights`, `staging` | weights on the device, and their way there |
//! | `repeat` | recordings (CUDA graphs) |
//! | `backend` | the contract, each op in a line |
//! | `standin/` | a workspace of its own: CUDA's libraries played by the CPU, for tests |

mod backend;
mod device;
mod image;
mod library;
mod memory;
mod module;
mod operand;
mod ops;
mod products;
mod repeat;
mod report;
mod staging;
mod weights;

pub use backend::{CudaBackend, CudaOptions};
pub use library::{Unavailable, device_count, device_is_supported, libraries_are_present};
