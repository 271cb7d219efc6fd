//! Which of CUDA's libraries are there. cudarc panics where one is missing, so this is asked first.

use crate::image;
use cudarc::{cublaslt, driver, nvrtc};

/// Why there is no CUDA device to use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// A library that the loader does not find.
    #[error("{name} was not found ({purpose}); {hint}")]
    Library {
        /// File name without version.
        name: &'static str,
        /// What it is for.
        purpose: &'static str,
        /// The way out.
        hint: &'static str,
    },
    /// The driver is there and refuses.
    #[error("the CUDA driver answers {name} ({text})")]
    Driver {
        /// CUDA's name of the error.
        name: String,
        /// CUDA's text.
        text: String,
    },
    /// The driver lacks functions that are called here.
    #[error("the GPU's driver is for CUDA {}, at least {} is needed; update the driver, or use --device cpu", version(*.driver), version(MIN_DRIVER))]
    OldDriver {
        /// As the driver tells it: 12.4 is 12040.
        driver: i32,
    },
    /// A device that lacks instructions that kernels are written with.
    #[error("{name} has compute capability {}.{}, at least {}.{} is needed; use --device cpu", .capability.0, .capability.1, MIN_CAPABILITY.0, MIN_CAPABILITY.1)]
    OldDevice {
        /// `cuda:N` and its model.
        name: String,
        /// Major and minor number.
        capability: (u32, u32),
    },
    /// The driver works and knows no device.
    #[error("the CUDA driver finds no device")]
    NoDevice,
}

/// The first driver that has every function that is called here (12.4).
const MIN_DRIVER: i32 = 12_040;

/// The first devices with all instructions of the kernels: asynchronous copies and products in bf16.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Number of CUDA devices that this process may use (`CUDA_VISIBLE_DEVICES` counts), at least one. Whether kernels run on each of them is
/// for [`device_is_supported`] to say.
///
/// # Errors
/// [`Unavailable`]: no driver or an old one, no device, or another library that is missing.
pub fn device_count() -> Result<usize, Unavailable> {
    libraries_are_present()?;
    let mut driver = 0;
    // SAFETY: `driver` is written; every driver has this function, also before it is initialised.
    let answer = unsafe { driver::sys::cuDriverGetVersion(&raw mut driver) }.result();
    answer.map_err(driver_error)?;
    if driver < MIN_DRIVER {
        return Err(Unavailable::OldDriver { driver });
    }
    let count = driver::result::init().and_then(|()| driver::result::device::get_count());
    match count {
        Ok(count) if count > 0 => Ok(count as usize),
        Ok(_) => Err(Unavailable::NoDevice),
        Err(driver::DriverError(driver::sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(Unavailable::NoDevice),
        Err(error) => Err(driver_error(error)),
    }
}

/// Whether device `device_idx`, one of [`device_count`], has what kernels need. Opens nothing.
///
/// # Errors
/// [`Unavailable::OldDevice`], or the driver's own.
pub fn device_is_supported(device_idx: usize) -> Result<(), Unavailable> {
    use driver::{result::device, sys::CUdevice_attribute as Attribute};
    let asked = || {
        let own = device::get(device_idx as i32)?;
        // SAFETY: the device is there.
        let number = |attribute| unsafe { device::get_attribute(own, attribute) }.map(|n| n as u32);
        let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((device::get_name(own)?, (major, minor)))
    };
    let (model, capability) = asked().map_err(driver_error)?;
    if capability >= MIN_CAPABILITY {
        return Ok(());
    }
    Err(Unavailable::OldDevice {
        name: format!("cuda:{device_idx} ({model})"),
        capability,
    })
}

/// Whether the libraries that a device needs are there. Opens them and calls nothing, so it is cheap and says nothing of devices.
///
/// # Errors
/// [`Unavailable::Library`], the first that is missing.
pub fn libraries_are_present() -> Result<(), Unavailable> {
    driver_is_present()?;
    products_are_present()?;
    if image::are_all_prebuilt() {
        return Ok(());
    }
    compiler_is_present()
}

/// Whether `libcuda`, which comes with the driver, is there.
pub(crate) fn driver_is_present() -> Result<(), Unavailable> {
    // SAFETY: only asks the loader; the library's initialisers are the driver's own.
    present(unsafe { driver::sys::is_culib_present() }, || {
        Unavailable::Library {
            name: "libcuda.so",
            purpose: "the CUDA driver",
            hint: "install the GPU's driver, or use --device cpu",
        }
    })
}

/// Whether `libcublasLt` is there.
pub(crate) fn products_are_present() -> Result<(), Unavailable> {
    // SAFETY: as above.
    present(unsafe { cublaslt::sys::is_culib_present() }, || {
        Unavailable::Library {
            name: "libcublasLt.so",
            purpose: "matrix products",
            hint: "install cuBLAS of CUDA 12 or 13 where the loader finds it (LD_LIBRARY_PATH), or use --device cpu",
        }
    })
}

/// Whether `libnvrtc` is there, which only builds without embedded kernels need.
pub(crate) fn compiler_is_present() -> Result<(), Unavailable> {
    // SAFETY: as above.
    present(unsafe { nvrtc::sys::is_culib_present() }, || {
        Unavailable::Library {
            name: "libnvrtc.so",
            purpose: "compiles the kernels, which this build does not hold for this device",
            hint: "install NVRTC of CUDA 12 or 13 where the loader finds it (LD_LIBRARY_PATH), or use --device cpu",
        }
    })
}

fn present(is_present: bool, missing: impl FnOnce() -> Unavailable) -> Result<(), Unavailable> {
    if is_present { Ok(()) } else { Err(missing()) }
}

/// An error that the driver names itself.
fn driver_error(error: driver::DriverError) -> Unavailable {
    let (name, text) = error_texts(error);
    Unavailable::Driver { name, text }
}

/// CUDA's name and text of an error.
pub(crate) fn error_texts(error: driver::DriverError) -> (String, String) {
    let owned = |text: Result<&std::ffi::CStr, _>| match text {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(driver::DriverError(_)) => format!("error {}", error.0 as u32),
    };
    (owned(error.error_name()), owned(error.error_string()))
}
