//! The host's side of the device on the stand-in: recordings, memory, weights, faults and kernel images.

mod devices;
mod faults;
mod images;
mod memory;
mod recordings;
mod weights;

use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType, Tensor};
use denoised_testkit::{
    standin::{Standin, under_standin},
    suites::backend::fetch,
};

/// Runs `body` where the devices of `standin` are found; `name` is the test's path with this crate's name in front.
fn under(name: &str, standin: &Standin, body: fn()) {
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    under_standin(name, standin, body);
}

/// The path of the test that calls it.
macro_rules! name_of {
    ($test:ident) => {
        concat!(module_path!(), "::", stringify!($test))
    };
}
use name_of;

fn open(options: CudaOptions) -> CudaBackend {
    CudaBackend::open(options).unwrap_or_else(|error| panic!("{error}"))
}

fn exact() -> CudaOptions {
    CudaOptions {
        dtype: DType::F32,
        ..CudaOptions::default()
    }
}

fn put(backend: &dyn Backend, dims: &[usize], values: &[f32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    backend.upload(&bytes, dims, DType::F32).expect("memory")
}

fn bits(backend: &dyn Backend, x: &Tensor) -> Vec<u32> {
    fetch(backend, x)
        .expect("the device works")
        .iter()
        .map(|x| x.to_bits())
        .collect()
}
