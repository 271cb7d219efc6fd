//! Rules of the contract beside the values.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Backend, DType};
use denoised_testkit::suites::backend as suite;

in_both_schedules!(rules_hold, results_depend_on_their_batch_element_only);

fn rules_hold() {
    let f32_backend = backend(DType::F32);
    suite::norms_hold_with_a_large_mean(&f32_backend);
    suite::activations_hold_in_the_tails(&f32_backend);
    suite::copies_convert_dtypes(&f32_backend);
    suite::wrong_operands_are_refused(&f32_backend);
    suite::weights_come_from_any_float(&f32_backend);
    suite::memory_is_counted(&f32_backend);
    for dtype in FLOATS {
        suite::nan_passes_through(&backend(dtype));
        suite::precisions_hold(&backend(dtype));
    }
}

fn results_depend_on_their_batch_element_only() {
    for dtype in [DType::F32, DType::BF16] {
        suite::results_depend_on_their_batch_element_only(
            &|_| Box::new(backend(dtype)) as Box<dyn Backend>,
            1,
        );
    }
}
