//! Codes of the driver, their names and texts.

use crate::api;
use std::ffi::{CStr, c_char, c_int};

pub(crate) type Outcome<T = ()> = Result<T, c_int>;

pub(crate) const SUCCESS: c_int = 0;

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        $(pub(crate) const $name: c_int = $code;)*
        fn texts(code: c_int) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                SUCCESS => Some((c"CUDA_SUCCESS", c"no error")),
                $($name => Some((
                    // The literal ends with its only zero.
                    CStr::from_bytes_with_nul(concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes()).ok()?,
                    CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()).ok()?,
                )),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_IMAGE = 200, "device kernel image is invalid";
    INVALID_CONTEXT = 201, "invalid device context";
    NO_BINARY_FOR_GPU = 209, "no kernel image is available for execution on the device";
    INVALID_HANDLE = 400, "invalid resource handle";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    ASSERT = 710, "device-side assert triggered";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902, "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
}

api! {
    /// Name of a code.
    fn cuGetErrorName(code: c_int, name: *mut *const c_char) {
        let (text, _) = texts(code).ok_or(INVALID_VALUE)?;
        unsafe { *name = text.as_ptr() };
        Ok(())
    }
    /// Text of a code.
    fn cuGetErrorString(code: c_int, string: *mut *const c_char) {
        let (_, text) = texts(code).ok_or(INVALID_VALUE)?;
        unsafe { *string = text.as_ptr() };
        Ok(())
    }
}
