//! Stand-in `libcuda.so`: devices, streams, memory, modules and graphs on the CPU, for programs that know nothing of it.
//!
//! R1. What a driver does at some later time is done at some later time here: each stream is a thread, and only waits wait.
//! R2. What a driver refuses is refused here with the same code; where this is stricter it says so.
//! R3. What hardware leaves undefined is made to hurt: fresh memory is NaN, freed memory is unmapped, allocations end at a guard page.
//!
//! Not modelled: time, registers, occupancy, peer access, virtual memory management, graph updates, child graphs; blocks of a grid run one
//! after another, so kernels that need them at once (cooperative launches) cannot run.
#![allow(non_snake_case)]

mod device;
mod env;
mod error;
mod event;
mod graph;
mod memory;
mod module;
mod stream;

/// Declares entry points of the driver. `FAKECUDA_TRACE` makes each first use visible on stderr.
macro_rules! api {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident : $type:ty),* $(,)?) $body:block)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// Pointers are valid for what the driver's documentation says of them.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
            $crate::env::trace(stringify!($name));
            if let Some(code) = $crate::env::call_fault(stringify!($name)) { return code }
            #[allow(unused_mut)]
            let mut call = move || -> $crate::error::Outcome { $body };
            match call() { Ok(()) => $crate::error::SUCCESS, Err(code) => code }
        }
    )* };
}
pub(crate) use api;
