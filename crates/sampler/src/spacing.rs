//! Evenly spaced numbers as numpy and torch round them.

/// `torch.linspace` in float32: from both ends to the middle, with fused multiply-adds.
pub(crate) fn torch_linspace(first: f32, last: f32, n: usize) -> Vec<f32> {
    let step = (last - first) / (n.max(2) - 1) as f32;
    let value = |i| {
        if n == 1 || i < n / 2 {
            step.mul_add(i as f32, first)
        } else {
            (-step).mul_add((n - 1 - i) as f32, last)
        }
    };
    (0..n).map(value).collect()
}

/// `numpy.linspace` in float64: `i step + first`, the last one exact.
pub(crate) fn linspace(first: f64, last: f64, n: usize) -> Vec<f64> {
    let step = (last - first) / n.saturating_sub(1).max(1) as f64;
    let value = |i| {
        if i > 0 && i + 1 == n {
            last
        } else {
            i as f64 * step + first
        }
    };
    (0..n).map(value).collect()
}
