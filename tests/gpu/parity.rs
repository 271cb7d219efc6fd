//! The op suite on the device.

use denoised_tensor::{Backend, DType};
use denoised_testkit::suites::backend::{OPS, values_match_the_formula_of};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `{"ops": [{"op", "dtype", "rounds", "ok", "problem"}]}`
pub(crate) fn run(n_rounds: u64, only: Option<&str>) -> Value {
    let mut ops = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let backend = super::open(dtype);
        for (op, _) in OPS.iter().filter(|(op, _)| only.is_none_or(|only| only == *op)) {
            let problem = problem_of(|| values_match_the_formula_of(&backend, op, n_rounds));
            ops.push(json!({
                "op": op,
                "dtype": dtype.to_string(),
                "rounds": n_rounds,
                "ok": problem.is_none(),
                "problem": problem,
            }));
        }
        // Whatever went wrong asynchronously is told here.
        let after = backend.synchronize().err().map(|error| error.to_string());
        ops.push(json!({"op": "synchronize", "dtype": dtype.to_string(), "rounds": 1, "ok": after.is_none(), "problem": after}));
    }
    json!({"ops": ops})
}

/// What `body` panics with.
fn problem_of(body: impl FnOnce()) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(body)).err()?;
    let text = panic.downcast_ref::<String>().cloned();
    Some(
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default(),
    )
}
