//! Norms, and what ops have in common whose output has the shape of their input.

use super::{
    Case, ELEMENT_LIMIT,
    functions::{ACTIVATIONS, activate},
    operands::*,
};
use denoised_tensor::{Backend, Modulation, Result, Tensor, WeightKind};

/// A case of one input `[elements, dims..]` and an output of the same shape that may be the input.
pub(super) fn same_shape(
    random: &mut Random,
    feed: Feed,
    name: String,
    limit: f64,
    dims: Vec<usize>,
    run: impl Fn(&dyn Backend, &[u64], &Tensor, &Tensor) -> Result<()> + 'static,
    reference: impl Fn(u64, Vec<f64>) -> Vec<f64> + 'static,
) -> Case {
    const OUT: u64 = 20;
    let is_in_place = random.coin();
    let n: usize = dims.iter().product();
    Case {
        name,
        limit,
        run: Box::new(move |backend, elements| {
            let whole = with_batch(elements, &dims);
            let out = if is_in_place {
                let data: Vec<f32> = elements
                    .iter()
                    .flat_map(|element| feed.values(0, *element, n))
                    .collect();
                let out = Output::holding(backend, feed.dtype, feed.place(OUT), &whole, &data)?;
                run(backend, elements, &out.view.clone(), &out.view)?;
                out
            } else {
                let x = feed.put(backend, 0, elements, &dims)?;
                let out = Output::new(backend, feed.dtype, feed.place(OUT), &whole)?;
                run(backend, elements, &x, &out.view)?;
                out
            };
            out.results(backend)
        }),
        reference: Box::new(move |element| reference(element, wide(&feed.values(0, element, n)))),
    }
}

pub(super) fn random_dims(random: &mut Random, n_leading: usize, last: usize) -> Vec<usize> {
    let mut dims: Vec<usize> = (0..n_leading).map(|_| random.within(1, 12)).collect();
    dims.push(last);
    dims
}

pub(super) fn some_width(random: &mut Random) -> usize {
    random.pick(&[1, 2, 6, 16, 30, 64, 65, 100, 128, 320, 771])
}

pub(super) fn layer_norm(random: &mut Random) -> Case {
    let feed = random.feed();
    let n = some_width(random);
    let n_leading = random.within(0, 2);
    let dims = random_dims(random, n_leading, n);
    let (has_affine, has_bias, has_modulation) = (random.coin(), random.coin(), random.coin());
    let (weight, bias) = (feed.values(1, 0, n), feed.values(2, 0, n));
    let eps = random.pick(&[1e-6, 1e-5]);
    let (run_weight, run_bias) = (weight.clone(), bias.clone());
    let name = format!("layer_norm {dims:?}, affine {has_affine}, modulation {has_modulation}");
    let run = move |backend: &dyn Backend, elements: &[u64], x: &Tensor, out: &Tensor| {
        let weights = prepare(
            backend,
            &[
                (WeightKind::Vector, &[n], &run_weight),
                (WeightKind::Vector, &[n], &run_bias),
            ],
        )?;
        let affine = has_affine.then(|| (&weights[0], has_bias.then(|| &weights[1])));
        let scale = feed.put(backend, 3, elements, &[n])?;
        let shift = feed.put(backend, 4, elements, &[n])?;
        let modulation = has_modulation.then_some(Modulation {
            scale: &scale,
            shift: &shift,
        });
        backend.layer_norm(x, affine, eps, modulation, out)
    };
    let reference = move |element: u64, mut x: Vec<f64>| {
        let (scale, shift) = (
            wide(&feed.values(3, element, n)),
            wide(&feed.values(4, element, n)),
        );
        for row in x.chunks_exact_mut(n) {
            let mean = row.iter().sum::<f64>() / n as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            for (i, value) in row.iter_mut().enumerate() {
                *value = (*value - mean) / (variance + f64::from(eps)).sqrt();
                if has_affine {
                    *value = *value * f64::from(weight[i]) + if has_bias { f64::from(bias[i]) } else { 0.0 };
                }
                if has_modulation {
                    *value = *value * (1.0 + scale[i]) + shift[i];
                }
            }
        }
        x
    };
    same_shape(random, feed, name, 4.0 * ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn rms_norm(random: &mut Random) -> Case {
    let feed = random.feed();
    let group_len = some_width(random);
    let n = group_len * random.within(1, 3);
    let n_leading = random.within(0, 2);
    let dims = random_dims(random, n_leading, n);
    let has_weight = random.coin();
    let weight = feed.values(1, 0, group_len);
    let eps = 1e-6;
    let run_weight = weight.clone();
    let name = format!("rms_norm {dims:?} in groups of {group_len}, weight {has_weight}");
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        let weights = prepare(backend, &[(WeightKind::Vector, &[group_len], &run_weight)])?;
        backend.rms_norm(x, has_weight.then(|| &weights[0]), group_len, eps, out)
    };
    let reference = move |_: u64, mut x: Vec<f64>| {
        for group in x.chunks_exact_mut(group_len) {
            let mean_square = group.iter().map(|x| x * x).sum::<f64>() / group_len as f64;
            for (value, weight) in group.iter_mut().zip(&weight) {
                *value /= (mean_square + f64::from(eps)).sqrt();
                *value *= if has_weight { f64::from(*weight) } else { 1.0 };
            }
        }
        x
    };
    same_shape(random, feed, name, 4.0 * ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn match_norm(random: &mut Random) -> Case {
    let feed = random.feed();
    let group_len = some_width(random);
    let n = group_len * random.within(1, 3);
    let n_leading = random.within(0, 2);
    let dims = random_dims(random, n_leading, n);
    let name = format!("match_norm {dims:?} in groups of {group_len}");
    let like_dims = dims.clone();
    let run = move |backend: &dyn Backend, elements: &[u64], x: &Tensor, out: &Tensor| {
        let like = feed.put(backend, 1, elements, &like_dims)?;
        backend.match_norm(x, &like, group_len, out)
    };
    let reference = move |element: u64, mut x: Vec<f64>| {
        let like = wide(&feed.values(1, element, x.len()));
        let norm = |group: &[f64]| group.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (x, like) in x.chunks_exact_mut(group_len).zip(like.chunks_exact(group_len)) {
            let own = norm(x);
            let factor = if own == 0.0 { 0.0 } else { norm(like) / own };
            x.iter_mut().for_each(|x| *x *= factor);
        }
        x
    };
    same_shape(random, feed, name, 4.0 * ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn group_norm(random: &mut Random) -> Case {
    let feed = random.feed();
    let (n_groups, group_len) = (random.pick(&[1, 2, 8, 32]), random.pick(&[1, 2, 3, 10, 20]));
    let n = n_groups * group_len;
    let n_leading = random.within(1, 2);
    let mut dims = random_dims(random, n_leading, n);
    // Sometimes more than one block of statistics.
    dims[0] *= random.pick(&[1, 1, 30]);
    let activation = random.pick(&ACTIVATIONS);
    let (weight, bias) = (feed.values(1, 0, n), feed.values(2, 0, n));
    let eps = 1e-5;
    let (run_weight, run_bias) = (weight.clone(), bias.clone());
    let name = format!("group_norm {dims:?} in {n_groups} groups, {activation:?}");
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        let weights = prepare(
            backend,
            &[
                (WeightKind::Vector, &[n], &run_weight),
                (WeightKind::Vector, &[n], &run_bias),
            ],
        )?;
        backend.group_norm(x, (&weights[0], &weights[1]), n_groups, eps, activation, out)
    };
    let reference = move |_: u64, mut x: Vec<f64>| {
        for group_idx in 0..n_groups {
            let own = |i: &usize| i % n / group_len == group_idx;
            let elements: Vec<f64> = (0..x.len()).filter(own).map(|i| x[i]).collect();
            let mean = elements.iter().sum::<f64>() / elements.len() as f64;
            let variance = elements.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / elements.len() as f64;
            for i in (0..x.len()).filter(own) {
                let normal = (x[i] - mean) / (variance + f64::from(eps)).sqrt();
                x[i] = activate(
                    activation,
                    normal * f64::from(weight[i % n]) + f64::from(bias[i % n]),
                );
            }
        }
        x
    };
    same_shape(random, feed, name, 4.0 * ELEMENT_LIMIT, dims, run, reference)
}
