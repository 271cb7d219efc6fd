//! The suite of `denoised_tensor::Backend`: every op against its formula in f64, and the rules that hold for all ops.
//!
//! A [`Case`] is one op with random shapes, operands and layout: columns or tokens of larger tensors as well as dense ones, always
//! ragged. It runs on any list of batch elements, so that the same case serves for the values ([`values_match_the_formulas`]) and for
//! independence of batch and threads ([`results_depend_on_their_batch_element_only`]).
//!
//! Around every operand lies NaN, around every output a mark that must survive. NaN anywhere is a failure.

mod operands;

mod elementwise;
mod lookups;
mod norms;
mod products;

mod refusals;
mod rules;

mod functions;

pub use operands::{MemorySource, Random, fetch};
pub use refusals::wrong_operands_are_refused;
pub use rules::{
    activations_hold_in_the_tails, copies_convert_dtypes, memory_is_counted, nan_passes_through,
    norms_hold_with_a_large_mean, precisions_hold, shared_weights_are_the_same, weights_come_from_any_float,
};

use denoised_tensor::{Backend, DType, Result};

/// Relative L2 error that f32 arithmetic may make in a long sum.
const SUM_LIMIT: f64 = 2e-6;

/// The same for Winograd's transforms, which a backend may use for 3x3 convolutions.
const CONV_LIMIT: f64 = 2e-5;

/// The same for a few operations in a row.
const ELEMENT_LIMIT: f64 = 5e-7;

type Run = Box<dyn Fn(&dyn Backend, &[u64]) -> Result<Vec<Vec<f32>>>>;
type Reference = Box<dyn Fn(u64) -> Vec<f64>>;

/// One op with its shapes, operands and layout fixed. Batch elements are numbers; each has its own data.
pub struct Case {
    /// The op and its shapes.
    pub name: String,
    /// Largest relative L2 error; 0 for bit-exact ops.
    pub limit: f64,
    run: Run,
    reference: Reference,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Case {
    /// The results for `elements`, run as one batch.
    ///
    /// # Panics
    /// The op fails, or writes outside its output.
    pub fn run(&self, backend: &dyn Backend, elements: &[u64]) -> Vec<Vec<f32>> {
        (self.run)(backend, elements).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

/// One op's maker of cases.
pub type Op = fn(&mut Random) -> Case;

/// Every op that computes tensors.
pub const OPS: &[(&str, Op)] = &[
    ("linear", products::linear),
    ("conv2d", products::conv2d),
    ("attention", products::attention),
    ("layer_norm", norms::layer_norm),
    ("rms_norm", norms::rms_norm),
    ("match_norm", norms::match_norm),
    ("group_norm", norms::group_norm),
    ("add", elementwise::add),
    ("mul", elementwise::mul),
    ("gated_add", elementwise::gated_add),
    ("affine", elementwise::affine),
    ("activation", elementwise::activation),
    ("gated", elementwise::gated),
    ("rope", elementwise::rope),
    ("embedding", lookups::embedding),
    ("gather_rows", lookups::gather_rows),
    ("timestep_embedding", lookups::timestep_embedding),
    ("patchify", lookups::patchify),
    ("unpatchify", lookups::unpatchify),
    ("permute", lookups::permute),
    ("upsample_nearest", lookups::upsample_nearest),
    ("copy", lookups::copy),
    ("fill", lookups::fill),
    ("step", lookups::step),
    ("to_pixels", lookups::to_pixels),
];

/// Runs `n_rounds` random cases of every op against its formula.
///
/// # Panics
/// A result is further from the formula than its limit.
pub fn values_match_the_formulas(backend: &dyn Backend, n_rounds: u64) {
    for (name, _) in OPS {
        values_match_the_formula_of(backend, name, n_rounds);
    }
}

/// As [`values_match_the_formulas`], of the op called `name`.
///
/// # Panics
/// There is no such op, or a result is further from the formula than its limit.
pub fn values_match_the_formula_of(backend: &dyn Backend, name: &str, n_rounds: u64) {
    let op = OPS.iter().find(|(own, _)| *own == name);
    let (_, op) = op.unwrap_or_else(|| panic!("no op is called {name}"));
    for round in 0..n_rounds {
        let mut random = Random::of(round * 7919 + name.len() as u64, backend.dtype());
        let mut case = op(&mut random);
        case.limit = in_dtype(case.limit, backend.dtype());
        let elements: Vec<u64> = (0..random.within(1, 3) as u64).collect();
        for (element, got) in elements.iter().zip(case.run(backend, &elements)) {
            check(&case, backend.dtype(), &got, &(case.reference)(*element));
        }
    }
}

/// What a limit for f32 becomes where operands are exact and results, and what lies between, are rounded to `dtype`: one and a half
/// times its largest relative error of rounding. Moves and conversions stay exact.
fn in_dtype(limit: f64, dtype: DType) -> f64 {
    let rounding = match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 0.0,
    };
    if limit == 0.0 { 0.0 } else { limit + 1.5 * rounding }
}

fn check(case: &Case, dtype: DType, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{}", case.name);
    let square = |(a, b): (&f32, &f64)| (f64::from(*a) - b).powi(2);
    let distance = got.iter().zip(expected).map(square).sum::<f64>().sqrt();
    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
    // Operands are around one half: what cancels to less than that has lost digits on the way, which short types have few of.
    let least = match dtype {
        DType::F32 => 1e-30,
        _ => 0.5 * (got.len() as f64).sqrt(),
    };
    let is_close = distance <= case.limit * norm.max(least);
    assert!(
        is_close,
        "{}: relative L2 error {:.2e}, limit {:.0e}",
        case.name,
        distance / norm,
        case.limit
    );
}

/// Runs cases of every op on backends of 1, 2 and 3 threads, alone and inside a batch of three: all bits must agree.
///
/// # Panics
/// They do not.
pub fn results_depend_on_their_batch_element_only(make: &dyn Fn(usize) -> Box<dyn Backend>, n_rounds: u64) {
    let backends: Vec<_> = (1..=3).map(make).collect();
    for (name, op) in OPS {
        for round in 0..n_rounds {
            let mut random = Random::of(round * 104_729 + name.len() as u64, backends[0].dtype());
            let case = op(&mut random);
            let alone: Vec<_> = (0..3)
                .map(|element| case.run(&*backends[0], &[element])[0].clone())
                .collect();
            for backend in &backends {
                for elements in [&[0, 1, 2][..], &[2, 0, 1], &[1, 1], &[2]] {
                    for (element, got) in elements.iter().zip(case.run(&**backend, elements)) {
                        let are_equal = got
                            .iter()
                            .zip(&alone[*element as usize])
                            .all(|(a, b)| a.to_bits() == b.to_bits());
                        let n_threads = backend.info().n_threads;
                        assert!(
                            are_equal,
                            "{}: element {element} of {elements:?}, {n_threads} threads",
                            case.name
                        );
                    }
                }
            }
        }
    }
}
