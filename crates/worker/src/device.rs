//! Names of devices and dtypes to an open backend.
//!
//! R1. All ranks decide alike: a choice follows from the configuration, the number of workers and what this host has.
//! R2. Whoever only wants to know whether a name makes sense opens nothing ([`check_device`]).

use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType, TensorError};
use denoised_types::{Failure, FailureCode, Rank, WorkerConfig, WorkerDevice};
use std::rc::Rc;

/// Set to 1, every launch on a CUDA device is waited for: slow, and nothing is recorded, but a fault names its kernel in every step.
const CHECK_LAUNCHES: &str = "DENOISED_CUDA_CHECK";

/// A device that was opened.
#[derive(Debug)]
pub struct Opened {
    /// The device.
    pub backend: Rc<dyn Backend>,
    /// Whether the ranks of a host can use the weights that one of them prepared.
    pub shares_weights: bool,
    /// Where the choice was free: why it is not a GPU.
    reason: Option<String>,
}

impl Opened {
    /// What it is, for those who only hear of it.
    pub fn device(&self) -> WorkerDevice {
        let info = self.backend.info();
        WorkerDevice {
            name: info.name,
            description: info.description,
            dtype: self.backend.dtype().to_string(),
            reason: self.reason.clone(),
        }
    }
}

/// Opens the device that `config` names for rank `place.0` of `place.1` workers of this host.
///
/// # Errors
/// `NoDevice` for a device that is not there, or cannot be used because a library is missing (the text says which, and the way out);
/// `InvalidRequest` for a name that is no device, or a dtype that the device does not compute in; `OutOfMemory` if it has no room.
pub fn open_device(config: &WorkerConfig, place: (Rank, u16)) -> Result<Opened, Failure> {
    let (rank, world_size) = place;
    let asked = Device::parse(&config.device)?;
    let (device, reason) = match asked {
        Device::Cpu | Device::CudaOfRank | Device::Cuda(_) => (asked, None),
        Device::Auto => match cuda_is_enough(world_size) {
            Ok(()) => (Device::CudaOfRank, None),
            Err(reason) => (Device::Cpu, Some(reason)),
        },
    };
    match device {
        Device::Auto | Device::Cpu => open_cpu_as_asked(config, world_size, reason),
        Device::CudaOfRank => {
            let n_devices =
                denoised_cuda::device_count().map_err(|error| no_device(&config.device, &error))?;
            check_enough(world_size, n_devices)?;
            match open_cuda(usize::from(rank.0), &config.dtype) {
                // The devices are there and their kernels do not get ready, say because the compiler does not know them.
                Err(failure) if asked == Device::Auto && failure.code == FailureCode::NoDevice => {
                    open_cpu_as_asked(config, world_size, Some(failure.message))
                }
                opened => opened,
            }
        }
        Device::Cuda(device_idx) => {
            if rank == Rank(0) && world_size > 1 {
                tracing::warn!(
                    "{world_size} workers share device cuda:{device_idx} and take turns, each with weights of its own"
                );
            }
            open_cuda(device_idx.into(), &config.dtype)
        }
    }
}

/// Checks device and dtype without opening anything, so that a program can refuse them before it starts workers. Of CUDA it looks
/// whether the libraries are there; how many devices, and whether they work, is for the workers to say.
///
/// # Errors
/// As [`open_device`], but for what only opening shows.
pub fn check_device(device: &str, dtype: &str) -> Result<(), Failure> {
    match Device::parse(device)? {
        Device::Cpu => cpu_dtype(dtype),
        // Whichever it will be takes f32 and its own.
        Device::Auto => gpu_dtype(dtype).map(drop),
        Device::CudaOfRank | Device::Cuda(_) => {
            gpu_dtype(dtype)?;
            denoised_cuda::libraries_are_present().map_err(|error| no_device(device, &error))
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Auto,
    Cpu,
    /// Device r of rank r.
    CudaOfRank,
    /// The same device for every rank.
    Cuda(u16),
}

impl Device {
    fn parse(name: &str) -> Result<Self, Failure> {
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match name.split_once(':') {
            None if name == "auto" => Ok(Self::Auto),
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::CudaOfRank),
            Some(("cuda", number)) if is_number(number) => {
                let device_idx = number.parse().map_err(|_| {
                    let text = format!("there is no device `{name}`: N of cuda:N is at most {}", u16::MAX);
                    Failure::new(FailureCode::NoDevice, text)
                })?;
                Ok(Self::Cuda(device_idx))
            }
            _ => Err(Failure::new(
                FailureCode::InvalidRequest,
                format!("unknown device `{name}`; known: auto, cpu, cuda, cuda:N"),
            )),
        }
    }
}

/// Whether each worker can have a CUDA device of its own; if not, why.
fn cuda_is_enough(world_size: u16) -> Result<(), String> {
    match denoised_cuda::device_count() {
        Ok(n_devices) if n_devices >= usize::from(world_size) => (0..world_size)
            .try_for_each(|device_idx| denoised_cuda::device_is_supported(device_idx.into()))
            .map_err(|error| error.to_string()),
        Ok(n_devices) => Err(format!(
            "there are {n_devices} CUDA devices for {world_size} workers"
        )),
        Err(error) => Err(error.to_string()),
    }
}

fn check_enough(world_size: u16, n_devices: usize) -> Result<(), Failure> {
    if n_devices >= usize::from(world_size) {
        return Ok(());
    }
    let text = format!(
        "{world_size} workers need {world_size} CUDA devices, there are {n_devices}; use --workers {n_devices}, or --device cuda:0 to \
         share one"
    );
    Err(Failure::new(FailureCode::NoDevice, text))
}

/// The CPU, because it was asked for or for `reason`.
fn open_cpu_as_asked(
    config: &WorkerConfig,
    world_size: u16,
    reason: Option<String>,
) -> Result<Opened, Failure> {
    if let Some(reason) = &reason {
        tracing::info!("device auto is cpu, since {reason}");
    }
    cpu_dtype(&config.dtype).map_err(|mut failure| {
        if let Some(reason) = &reason {
            failure.message = format!("device auto is cpu, since {reason}; {}", failure.message);
        }
        failure
    })?;
    Ok(Opened {
        backend: open_cpu(config, world_size)?,
        shares_weights: true,
        reason,
    })
}

fn open_cpu(config: &WorkerConfig, world_size: u16) -> Result<Rc<dyn Backend>, Failure> {
    let n_cores = denoised_os::cpu::usable_cores();
    let n_threads = match config.n_threads {
        Some(n_threads) => n_threads.max(1) as usize,
        None => (n_cores / usize::from(world_size.max(1))).max(1),
    };
    if n_threads > n_cores {
        tracing::warn!("{n_threads} threads on {n_cores} cores take turns: fewer are faster");
    }
    let options = CpuOptions {
        n_threads,
        ..CpuOptions::default()
    };
    let backend = CpuBackend::new(options).map_err(|error| no_device("cpu", &error))?;
    Ok(Rc::new(backend))
}

fn open_cuda(device_idx: usize, dtype: &str) -> Result<Opened, Failure> {
    let options = CudaOptions {
        device_idx,
        dtype: gpu_dtype(dtype)?,
        check_launches: std::env::var_os(CHECK_LAUNCHES).is_some_and(|value| value == "1"),
        ..CudaOptions::default()
    };
    match CudaBackend::open(options) {
        Ok(backend) => Ok(Opened {
            backend: Rc::new(backend),
            shares_weights: false,
            reason: None,
        }),
        Err(error @ TensorError::OutOfMemory { .. }) => Err(denoised_models::tensor_failure(&error)),
        Err(error) => Err(no_device(&format!("cuda:{device_idx}"), &error)),
    }
}

fn no_device(device: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(
        FailureCode::NoDevice,
        format!("cannot open device {device}: {error}"),
    )
}

fn cpu_dtype(dtype: &str) -> Result<(), Failure> {
    let message = match dtype {
        "f32" | "auto" => return Ok(()),
        "bf16" | "f16" => format!("device cpu computes in f32 only, not in {dtype}; use --dtype f32"),
        _ => unknown_dtype(dtype),
    };
    Err(Failure::new(FailureCode::InvalidRequest, message))
}

fn gpu_dtype(dtype: &str) -> Result<DType, Failure> {
    match dtype {
        "auto" => gpu_dtype(WorkerConfig::default_dtype(true)),
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err(Failure::new(FailureCode::InvalidRequest, unknown_dtype(dtype))),
    }
}

fn unknown_dtype(dtype: &str) -> String {
    format!("unknown dtype `{dtype}`; known: f32, bf16, f16 (device cpu: f32), auto")
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_testkit::standin::{Schedule, Standin, under_standin};

    #[test]
    fn devices_and_dtypes_that_make_no_sense_are_refused_by_name() {
        let code_of = |device, dtype| check_device(device, dtype).map_err(|failure| failure.code);
        assert_eq!(code_of("cpu", "f32"), Ok(()));
        assert_eq!(code_of("cpu", "auto"), Ok(()));
        assert_eq!(code_of("auto", "bf16"), Ok(()));
        assert_eq!(code_of("cuda:65536", "bf16"), Err(FailureCode::NoDevice));
        for device in [
            "", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "gpu", "auto:0",
        ] {
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
        for device in ["auto", "cuda", "cuda:0"] {
            let failure = check_device(device, "f64").unwrap_err();
            assert_eq!(failure.code, FailureCode::InvalidRequest);
        }
    }

    #[test]
    fn more_workers_than_devices_are_refused_with_both_numbers_and_the_way_out() {
        assert!(check_enough(2, 2).is_ok());
        let failure = check_enough(3, 2).unwrap_err();
        assert_eq!(failure.code, FailureCode::NoDevice);
        for word in ["3 workers", "there are 2", "--workers 2", "--device cuda:0"] {
            assert!(failure.message.contains(word), "{failure}");
        }
    }

    fn config(device: &str, dtype: &str) -> WorkerConfig {
        WorkerConfig {
            device: device.to_owned(),
            dtype: dtype.to_owned(),
            n_threads: Some(1),
            ..WorkerConfig::new("none")
        }
    }

    #[test]
    fn each_rank_opens_the_device_of_its_number_in_the_dtype_of_the_device() {
        let test_name = "device::tests::each_rank_opens_the_device_of_its_number_in_the_dtype_of_the_device";
        under_standin(test_name, &Standin::new(Schedule::LateForward), || {
            check_device("cuda", "auto").unwrap();
            for device in ["cuda", "auto"] {
                let opened = open_device(&config(device, "auto"), (Rank(1), 2)).unwrap();
                let device = opened.device();
                assert_eq!((device.name.as_str(), device.dtype.as_str()), ("cuda:1", "bf16"));
                assert!(!opened.shares_weights && device.reason.is_none());
            }
            let shared = open_device(&config("cuda:0", "f32"), (Rank(1), 2))
                .unwrap()
                .device();
            assert_eq!((shared.name.as_str(), shared.dtype.as_str()), ("cuda:0", "f32"));
            let failure = open_device(&config("cuda", "f32"), (Rank(0), 3)).unwrap_err();
            assert_eq!(failure.code, FailureCode::NoDevice);
            let failure = open_device(&config("cuda:2", "f32"), (Rank(0), 1)).unwrap_err();
            assert_eq!(failure.code, FailureCode::NoDevice);
            let opened = open_device(&config("auto", "auto"), (Rank(2), 3)).unwrap();
            let device = opened.device();
            assert_eq!((device.name.as_str(), device.dtype.as_str()), ("cpu", "f32"));
            let reason = device.reason.expect("it was a choice");
            assert!(reason.contains("2 CUDA devices for 3 workers"), "{reason}");
        });
    }
    fn auto_is_the_cpu(words: &[&str]) {
        let opened = open_device(&config("auto", "auto"), (Rank(0), 1)).unwrap();
        let device = opened.device();
        assert_eq!((device.name.as_str(), device.dtype.as_str()), ("cpu", "f32"));
        let reason = device.reason.expect("it was a choice");
        let failure = open_device(&config("cuda", "auto"), (Rank(0), 1)).unwrap_err();
        assert_eq!(failure.code, FailureCode::NoDevice);
        let impossible = open_device(&config("auto", "bf16"), (Rank(0), 1)).unwrap_err();
        for word in words {
            for text in [&reason, &failure.message, &impossible.message] {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
        assert!(impossible.message.contains("--dtype f32"), "{impossible}");
    }

    fn with(name: &'static str, value: &str) -> Standin {
        Standin {
            more: vec![
                (name, value.to_owned()),
                ("XDG_CACHE_HOME", "/dev/null/nowhere".to_owned()),
            ],
            ..Standin::default()
        }
    }

    #[test]
    fn auto_takes_the_cpu_where_the_driver_is_old() {
        under_standin(
            "device::tests::auto_takes_the_cpu_where_the_driver_is_old",
            &with("FAKECUDA_DRIVER", "12030"),
            || auto_is_the_cpu(&["12.3", "12.4", "update the driver"]),
        );
    }

    #[test]
    fn auto_takes_the_cpu_where_the_device_is_old() {
        under_standin(
            "device::tests::auto_takes_the_cpu_where_the_device_is_old",
            &with("FAKECUDA_CC", "70"),
            || auto_is_the_cpu(&["cuda:0", "7.0", "8.0"]),
        );
    }

    #[test]
    fn auto_takes_the_cpu_where_kernels_do_not_compile() {
        under_standin(
            "device::tests::auto_takes_the_cpu_where_kernels_do_not_compile",
            &with("FAKECUDA_CXXFLAGS", "-include no-such-file.h"),
            || auto_is_the_cpu(&["compiling ", ".cu", "NVRTC"]),
        );
    }
}
