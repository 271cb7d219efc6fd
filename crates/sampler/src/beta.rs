//! Quantiles of the beta distribution with both parameters 0.6, by which "Beta Sampling is All You Need" (Lee et al., 2024) spaces
//! noise levels.

const SHAPE: f64 = 0.6;
/// `B(0.6, 0.6) = Gamma(0.6)^2 / Gamma(1.2)`.
const BETA_FUNCTION: f64 = 1.489_192_248_812_817 * 1.489_192_248_812_817 / 0.918_168_742_399_760_7;
/// Halvings of `0..=1/2`, after which nothing is left to halve.
const N_HALVINGS: usize = 80;

/// The value below which the share `q` of the distribution lies.
pub(crate) fn quantile(q: f64) -> f64 {
    if q <= 0.0 {
        return 0.0;
    }
    if q > 0.5 {
        return 1.0 - quantile(1.0 - q);
    }
    let (mut low, mut high) = (0.0, 0.5);
    for _ in 0..N_HALVINGS {
        let middle = 0.5 * (low + high);
        if share_below(middle) < q {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// The regularised incomplete beta function for `x <= 1/2`, by its continued fraction (DLMF 8.17.22), evaluated from behind.
fn share_below(x: f64) -> f64 {
    const N_TERMS: usize = 60;
    let mut fraction = 1.0;
    for term in (1..=N_TERMS).rev() {
        let m = (term / 2) as f64;
        let numerator = match term % 2 {
            0 => m * (SHAPE - m) * x / ((SHAPE + 2.0 * m - 1.0) * (SHAPE + 2.0 * m)),
            _ => -(SHAPE + m) * (2.0 * SHAPE + m) * x / ((SHAPE + 2.0 * m) * (SHAPE + 2.0 * m + 1.0)),
        };
        fraction = 1.0 + numerator / fraction;
    }
    (x * (1.0 - x)).powf(SHAPE) / (SHAPE * BETA_FUNCTION) / fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `scipy.stats.beta.ppf(q, 0.6, 0.6)`, scipy 1.17.1.
    #[test]
    fn quantiles_are_scipys() {
        for (q, x) in QUANTILES {
            let found = quantile(q);
            assert!((found - x).abs() < 1e-12, "{q}: {found}, not {x}");
        }
    }

    const QUANTILES: [(f64, f64); 8] = [
        (0.0, 0.0),
        (1e-06, 1.8558824624053043e-10),
        (0.01, 0.0008612388215429059),
        (0.1, 0.03958440558878085),
        (0.3, 0.23401700387523572),
        (0.5, 0.5000000000000001),
        (0.875, 0.942843636377586),
        (1.0, 1.0),
    ];
}
