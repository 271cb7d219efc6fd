//! Every kernel on the stand-in, in both schedules: the formulas of the contract in every dtype, and the edges that random shapes miss.
//!
//! A test is named after the file of kernels that it is about, so that a change of one file is tried by its own tests alone.
//! `DENOISED_KERNEL_FOLDER` names a folder whose kernels are tested in place of this build's own.

mod attention;
mod conv;
mod elementwise;
mod linear;
mod lookup;
mod norm;
mod operands;
mod rules;
mod sample;

/// One test per body and schedule.
macro_rules! in_both_schedules {
    ($($body:ident),* $(,)?) => {
        mod late {
            $(#[test]
            fn $body() {
                let name = concat!(module_path!(), "::", stringify!($body));
                $crate::operands::under(name, denoised_testkit::standin::Schedule::LateForward, super::$body);
            })*
        }
        mod early {
            $(#[test]
            fn $body() {
                let name = concat!(module_path!(), "::", stringify!($body));
                $crate::operands::under(name, denoised_testkit::standin::Schedule::EarlyReverse, super::$body);
            })*
        }
    };
}
use in_both_schedules;
