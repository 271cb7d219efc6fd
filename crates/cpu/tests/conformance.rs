//! The suite of the contract on every instruction set that this processor has.

use denoised_cpu::{CpuBackend, CpuOptions, Isa};
use denoised_tensor::Backend;
use denoised_testkit::suites::backend as suite;

fn backend(isa: Isa, n_threads: usize, winograd: bool) -> Box<dyn Backend> {
    Box::new(
        CpuBackend::new(CpuOptions {
            n_threads,
            isa: Some(isa),
            winograd,
        })
        .expect("an available set"),
    )
}

/// Instantiates the suite for one instruction set.
macro_rules! conformance {
    ($name:ident, $isa:expr) => {
        mod $name {
            use super::*;

            /// Tests on a processor without the set have nothing to run, and say so.
            fn is_available() -> bool {
                let is_available = $isa.is_available();
                if !is_available {
                    eprintln!("{} is not available here: not run", $isa);
                }
                is_available
            }

            #[test]
            fn values_match_the_formulas() {
                if is_available() {
                    suite::values_match_the_formulas(&*backend($isa, 2, true), 40);
                    suite::values_match_the_formulas(&*backend($isa, 1, false), 10);
                }
            }

            #[test]
            fn results_depend_on_their_batch_element_only() {
                if is_available() {
                    suite::results_depend_on_their_batch_element_only(
                        &|n_threads| backend($isa, n_threads, true),
                        8,
                    );
                }
            }

            #[test]
            fn rules_beside_the_values_hold() {
                if is_available() {
                    let backend = backend($isa, 2, true);
                    suite::nan_passes_through(&*backend);
                    suite::norms_hold_with_a_large_mean(&*backend);
                    suite::activations_hold_in_the_tails(&*backend);
                    suite::copies_convert_dtypes(&*backend);
                    suite::wrong_operands_are_refused(&*backend);
                    suite::weights_come_from_any_float(&*backend);
                    suite::precisions_hold(&*backend);
                    suite::memory_is_counted(&*backend);
                }
            }

            #[test]
            fn shared_weights_are_the_same() {
                if is_available() {
                    suite::shared_weights_are_the_same(&|| backend($isa, 2, true));
                }
            }
        }
    };
}

conformance!(portable, Isa::Portable);
#[cfg(target_arch = "x86_64")]
conformance!(avx2, Isa::Avx2);
#[cfg(target_arch = "x86_64")]
conformance!(avx512, Isa::Avx512);
