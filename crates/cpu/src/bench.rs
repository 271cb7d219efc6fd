//! How fast the kernels are beside what the processor could do, measured in one process: figures for people, not for tests.

use crate::{
    Context, CpuBackend, Isa,
    gemm::{Finish, MatrixRows, Panels, multiply},
    memory::Memory,
    operand::{Ptr, RowMap},
    simd::{Kernel, Simd, with_isa},
    threads::Pool,
};
use denoised_tensor::{Result, TensorError};
use std::time::Instant;

/// Chains of fused multiply-adds that depend on nothing but themselves.
#[derive(Clone, Copy)]
struct Chains {
    n_rounds: usize,
}

/// As many as a micro-tile has sums, which is enough to hide the latency of four cycles on two units.
const fn n_chains<S: Simd>() -> usize {
    2 * S::MR
}

impl Kernel for Chains {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let hide = std::hint::black_box::<f32>;
        // SAFETY: inside a kernel.
        let (factor, summand) = unsafe { (S::splat(hide(0.999)), S::splat(hide(0.001_3))) };
        // SAFETY: as above.
        let mut chains = [unsafe { S::splat(hide(0.5)) }; 28];
        for (i, chain) in chains[..n_chains::<S>()].iter_mut().enumerate() {
            // SAFETY: as above.
            *chain = unsafe { S::splat(hide(i as f32)) };
        }
        for _ in 0..self.n_rounds {
            for chain in &mut chains[..n_chains::<S>()] {
                // SAFETY: as above.
                *chain = unsafe { S::mul_add(*chain, factor, summand) };
            }
        }
        let mut total = 0.0;
        for chain in &chains[..n_chains::<S>()] {
            // SAFETY: as above.
            total += unsafe { S::sum(*chain) };
        }
        total
    }
}

fn check(isa: Isa) -> Result<()> {
    if isa.is_available() {
        Ok(())
    } else {
        Err(TensorError::Device(format!("this processor lacks {isa}")))
    }
}

/// The best of three runs, in seconds, after one that warms up.
fn best_seconds(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// GFLOP/s of independent multiply-adds on `n_threads` threads: the limit of every product.
///
/// # Errors
/// The processor lacks `isa`, or threads cannot be started.
pub fn fma_peak(isa: Isa, n_threads: usize) -> Result<f64> {
    check(isa)?;
    let pool = new_pool(n_threads)?;
    let memory = Memory::default();
    let context = Context {
        pool: &pool,
        memory: &memory,
    };
    let n_rounds = 2_000_000;
    let seconds = best_seconds(|| {
        context.run(n_threads, &|_, _| {
            // SAFETY: the processor has the set, checked above.
            let sum = with_isa!(isa, S => unsafe { S::vectorize(Chains { n_rounds }) });
            std::hint::black_box(sum);
        })
    })?;
    let per_round = with_isa!(isa, S => n_chains::<S>() * S::LANES * 2);
    Ok((n_threads * n_rounds * per_round) as f64 / seconds / 1e9)
}

fn new_pool(n_threads: usize) -> Result<Pool> {
    Pool::new(n_threads)
        .map_err(|error| TensorError::Device(format!("cannot start {n_threads} threads: {error}")))
}

/// GFLOP/s of an `m x k` by `k x n` product with packed weights, packing of the activations included.
///
/// # Errors
/// As [`fma_peak`], or memory is missing.
pub fn gemm_rate(isa: Isa, n_threads: usize, m: usize, n: usize, k: usize) -> Result<f64> {
    check(isa)?;
    let pool = new_pool(n_threads)?;
    let memory = Memory::default();
    let context = Context {
        pool: &pool,
        memory: &memory,
    };
    let (nr, lanes) = with_isa!(isa, S => (S::NR, S::LANES));
    let filled = |n_elements: usize| -> Result<_> {
        let region = memory.take("a benchmark", n_elements * 4)?;
        let start = Ptr(region.start().cast::<f32>());
        for i in 0..n_elements {
            // SAFETY: the region has `n_elements` f32.
            unsafe { *start.at(i) = (i % 17) as f32 - 8.0 };
        }
        Ok((region, start))
    };
    let (_x_region, x) = filled(m * k)?;
    let (_w_region, w) = filled(Panels::n_elements(n, k, nr, lanes))?;
    let (_out_region, out) = filled(m * n)?;
    let source = MatrixRows {
        rows: RowMap::dense(x, k),
        k,
    };
    let finish = Finish::plain(RowMap::dense(out, n));
    let flops = 2.0 * m as f64 * n as f64 * k as f64;
    let n_repeats = (2e10 / flops).ceil().min(1000.0) as usize;
    let seconds = best_seconds(|| {
        for _ in 0..n_repeats {
            let weights = Panels { start: w, n, k };
            // SAFETY: the regions have the sizes of the operands and do not overlap; the set is there, checked above.
            with_isa!(isa, S => unsafe { multiply::<S, _>(&context, source, m, weights, finish) })?;
        }
        Ok(())
    })?;
    Ok(flops * n_repeats as f64 / seconds / 1e9)
}

/// Seconds of the best of three calls of `op` on `backend`, after one that warms up.
///
/// # Errors
/// Those of `op`.
pub fn op_seconds(backend: &CpuBackend, op: impl Fn(&CpuBackend) -> Result<()>) -> Result<f64> {
    best_seconds(|| op(backend))
}
