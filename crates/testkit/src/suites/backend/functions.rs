//! Activations in f64.

use denoised_tensor::Activation;

pub(super) const ACTIVATIONS: [Activation; 7] = [
    Activation::None,
    Activation::Silu,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::QuickGelu,
    Activation::Relu,
    Activation::Tanh,
];

pub(super) fn activate(activation: Activation, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::None => x,
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::GeluErf => 0.5 * x * erfc(-x / 2f64.sqrt()),
        Activation::QuickGelu => x * sigmoid(1.702 * x),
        Activation::Relu => x.max(0.0),
        Activation::Tanh => x.tanh(),
    }
}

/// Complementary error function to about 1e-15: the series below 2, Lentz's continued fraction above (Abramowitz and Stegun 7.1.5
/// and 7.1.14).
pub(super) fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return 1.0 - sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let mut fraction = 0.0;
    for n in (1..200).rev() {
        fraction = f64::from(n) / 2.0 / (x + fraction);
    }
    (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
}
