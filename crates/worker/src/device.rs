//! Names of devices and dtypes to an open backend.

use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_tensor::Backend;
use denoised_types::{Failure, FailureCode, WorkerConfig};
use std::rc::Rc;

/// Opens the device that `config` names for one of `world_size` workers of this host.
///
/// # Errors
/// `NoDevice` for a device that this version cannot use; `InvalidRequest` for a name that is no device, or a dtype that the device
/// does not compute in; the device's own error if it cannot be opened.
pub fn open_device(config: &WorkerConfig, world_size: u16) -> Result<Rc<dyn Backend>, Failure> {
    match Device::parse(&config.device)? {
        Device::Cpu => {
            check_cpu_dtype(&config.dtype)?;
            let n_threads = match config.n_threads {
                Some(n_threads) => n_threads.max(1) as usize,
                None => (denoised_os::cpu::usable_cores() / usize::from(world_size.max(1))).max(1),
            };
            let n_cores = denoised_os::cpu::usable_cores();
            if n_threads > n_cores {
                tracing::warn!("{n_threads} threads on {n_cores} cores take turns: fewer are faster");
            }
            let options = CpuOptions {
                n_threads,
                ..CpuOptions::default()
            };
            let backend = CpuBackend::new(options).map_err(|error| {
                Failure::new(FailureCode::NoDevice, format!("cannot open device cpu: {error}"))
            })?;
            Ok(Rc::new(backend))
        }
        Device::Cuda => Err(not_built_in(&config.device)),
    }
}

/// Checks device and dtype without opening anything, so that a program can refuse them before it starts workers.
///
/// # Errors
/// As [`open_device`], but for what only opening shows.
pub fn check_device(device: &str, dtype: &str) -> Result<(), Failure> {
    match Device::parse(device)? {
        Device::Cpu => check_cpu_dtype(dtype),
        Device::Cuda => Err(not_built_in(device)),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Cpu,
    Cuda,
}

impl Device {
    fn parse(name: &str) -> Result<Self, Failure> {
        let (kind, index) = match name.split_once(':') {
            Some((kind, index)) => (kind, Some(index)),
            None => (name, None),
        };
        match (kind, index) {
            ("cpu", None) => Ok(Self::Cpu),
            ("cuda", None) => Ok(Self::Cuda),
            ("cuda", Some(index)) if index.parse::<u16>().is_ok() => Ok(Self::Cuda),
            _ => Err(Failure::new(
                FailureCode::InvalidRequest,
                format!("unknown device `{name}`; known: cpu, cuda, cuda:N"),
            )),
        }
    }
}

fn not_built_in(device: &str) -> Failure {
    Failure::new(
        FailureCode::NoDevice,
        format!("device {device} is not built in this version; use --device cpu"),
    )
}

fn check_cpu_dtype(dtype: &str) -> Result<(), Failure> {
    let message = match dtype {
        "f32" => return Ok(()),
        "bf16" | "f16" => format!("device cpu computes in f32 only, not in {dtype}; use --dtype f32"),
        _ => format!("unknown dtype `{dtype}`; known: f32, bf16, f16 (device cpu: f32)"),
    };
    Err(Failure::new(FailureCode::InvalidRequest, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_dtypes_that_are_not_there_are_refused_by_name() {
        let code_of = |device, dtype| check_device(device, dtype).map_err(|failure| failure.code);
        assert_eq!(code_of("cpu", "f32"), Ok(()));
        assert_eq!(code_of("cuda", "f32"), Err(FailureCode::NoDevice));
        assert_eq!(code_of("cuda:1", "bf16"), Err(FailureCode::NoDevice));
        for device in ["", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "gpu"] {
            assert_eq!(
                code_of(device, "f32"),
                Err(FailureCode::InvalidRequest),
                "{device}"
            );
        }
        for dtype in ["bf16", "f16", "f64", ""] {
            let failure = check_device("cpu", dtype).unwrap_err();
            assert_eq!(failure.code, FailureCode::InvalidRequest);
            assert!(failure.message.contains(dtype), "{failure}");
        }
    }
}
