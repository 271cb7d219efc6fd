//! Matrix products, convolutions, attention.

use super::{
    CONV_LIMIT, Case, SUM_LIMIT,
    functions::{ACTIVATIONS, activate},
    operands::*,
};
use denoised_tensor::{Activation, AttentionSpec, Backend, ConvSpec, Epilogue, Result, Tensor, WeightKind};

/// A random epilogue of `n` columns; operands from 10 on.
#[derive(Clone, Debug)]
struct Finish {
    feed: Feed,
    n: usize,
    bias: Option<Vec<f32>>,
    activation: Activation,
    has_gate: bool,
    has_residual: bool,
    is_in_place: bool,
}

impl Finish {
    const GATE: u64 = 10;
    const RESIDUAL: u64 = 11;
    const OUT: u64 = 12;

    fn new(random: &mut Random, feed: Feed, n: usize) -> Self {
        Self {
            feed,
            n,
            bias: random.coin().then(|| feed.values(13, 0, n)),
            activation: random.pick(&ACTIVATIONS),
            has_gate: random.coin(),
            has_residual: random.coin(),
            is_in_place: random.coin(),
        }
    }

    /// Runs `op` with the epilogue for outputs `[elements, dims..]`.
    fn run(
        &self,
        backend: &dyn Backend,
        elements: &[u64],
        dims: &[usize],
        op: impl Fn(&Epilogue<'_>, &Tensor) -> Result<()>,
    ) -> Result<Vec<Vec<f32>>> {
        let bias = match &self.bias {
            Some(bias) => Some(prepare(backend, &[(WeightKind::Vector, &[self.n], bias)])?.remove(0)),
            None => None,
        };
        let gate = match self.has_gate {
            true => Some(self.feed.put(backend, Self::GATE, elements, &[self.n])?),
            false => None,
        };
        let whole = with_batch(elements, dims);
        let place = self.feed.place(Self::OUT);
        let n = dims.iter().product();
        let residual: Vec<f32> = elements
            .iter()
            .flat_map(|element| self.feed.values(Self::RESIDUAL, *element, n))
            .collect();
        let (out, residual) = if !self.has_residual {
            (Output::new(backend, self.feed.dtype, place, &whole)?, None)
        } else if self.is_in_place {
            let out = Output::holding(backend, self.feed.dtype, place, &whole, &residual)?;
            let view = out.view.clone();
            (out, Some(view))
        } else {
            let residual = put_as(
                backend,
                self.feed.dtype,
                self.feed.place(Self::RESIDUAL),
                &whole,
                &residual,
            )?;
            (
                Output::new(backend, self.feed.dtype, place, &whole)?,
                Some(residual),
            )
        };
        let epilogue = Epilogue {
            bias: bias.as_ref(),
            activation: self.activation,
            gate: gate.as_ref(),
            residual: residual.as_ref(),
        };
        op(&epilogue, &out.view)?;
        out.results(backend)
    }

    fn reference(&self, element: u64, mut products: Vec<f64>) -> Vec<f64> {
        let gate = wide(&self.feed.values(Self::GATE, element, self.n));
        let residual = wide(&self.feed.values(Self::RESIDUAL, element, products.len()));
        for (i, value) in products.iter_mut().enumerate() {
            let col_idx = i % self.n;
            *value += self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[col_idx]));
            *value = activate(self.activation, *value);
            if self.has_gate {
                *value *= gate[col_idx];
            }
            if self.has_residual {
                *value += residual[i];
            }
        }
        products
    }
}

pub(super) fn linear(random: &mut Random) -> Case {
    let feed = random.feed();
    let leading: Vec<usize> = (0..random.within(0, 2)).map(|_| random.within(1, 17)).collect();
    let k = random.pick(&[1, 3, 8, 31, 64, 100, 257, 800, 1100]);
    let n = random.pick(&[1, 4, 7, 16, 31, 33, 48, 70, 129]);
    let w = feed.values(1, 0, n * k);
    let finish = Finish::new(random, feed, n);
    let in_dims = [&leading[..], &[k]].concat();
    let out_dims = [&leading[..], &[n]].concat();
    let name = format!("linear {in_dims:?} to {n}, {:?}", finish.activation);
    let (run_w, run_finish, run_in) = (w.clone(), finish.clone(), in_dims.clone());
    Case {
        name,
        limit: SUM_LIMIT,
        run: Box::new(move |backend, elements| {
            let weight = prepare(backend, &[(WeightKind::Matrix, &[n, k], &run_w)])?.remove(0);
            let x = feed.put(backend, 0, elements, &run_in)?;
            run_finish.run(backend, elements, &out_dims, |epilogue, out| {
                backend.linear(&x, &weight, epilogue, out)
            })
        }),
        reference: Box::new(move |element| {
            let x = wide(&feed.values(0, element, in_dims.iter().product()));
            let row = |x: &[f64], o: usize| (0..k).map(|i| x[i] * f64::from(w[o * k + i])).sum::<f64>();
            let products = x
                .chunks_exact(k)
                .flat_map(|x| (0..n).map(move |o| (x, o)))
                .map(|(x, o)| row(x, o))
                .collect();
            finish.reference(element, products)
        }),
    }
}

pub(super) fn conv2d(random: &mut Random) -> Case {
    let feed = random.feed();
    let (height, width) = (random.within(1, 13), random.within(1, 13));
    let c_in = random.pick(&[1, 3, 4, 16, 17, 32, 40, 67]);
    let c_out = random.pick(&[1, 3, 4, 16, 32, 33, 50, 140]);
    let (kernel, stride) = random.pick(&[(1, 1), (3, 1), (3, 1), (3, 1), (3, 2), (2, 2), (5, 1), (4, 3)]);
    let upsample = random.pick(&[1, 1, 2]);
    let mut padding = [0; 4];
    for pad in &mut padding {
        *pad = random.within(0, 2);
    }
    // The kernel must fit.
    let (full_height, full_width) = (height * upsample, width * upsample);
    padding[2] = padding[2].max(kernel.max(padding[0] + full_height) - padding[0] - full_height);
    padding[3] = padding[3].max(kernel.max(padding[1] + full_width) - padding[1] - full_width);
    let out_height = (full_height + padding[0] + padding[2] - kernel) / stride + 1;
    let out_width = (full_width + padding[1] + padding[3] - kernel) / stride + 1;
    let shape = [c_out, c_in, kernel, kernel];
    let w = feed.values(1, 0, shape.iter().product());
    let finish = Finish::new(random, feed, c_out);
    let conv_spec = ConvSpec {
        stride,
        padding,
        upsample,
    };
    let name = format!(
        "conv2d {height}x{width}x{c_in}, {shape:?}, {conv_spec:?}, {:?}",
        finish.activation
    );
    let (run_w, run_finish) = (w.clone(), finish.clone());
    Case {
        name,
        limit: CONV_LIMIT,
        run: Box::new(move |backend, elements| {
            let weight = prepare(backend, &[(WeightKind::Conv { stride }, &shape, &run_w)])?.remove(0);
            let x = feed.put(backend, 0, elements, &[height, width, c_in])?;
            run_finish.run(
                backend,
                elements,
                &[out_height, out_width, c_out],
                |epilogue, out| backend.conv2d(&x, &weight, &conv_spec, epilogue, out),
            )
        }),
        reference: Box::new(move |element| {
            let x = wide(&feed.values(0, element, height * width * c_in));
            let mut products = Vec::new();
            for (y, x_idx) in (0..out_height).flat_map(|y| (0..out_width).map(move |x| (y, x))) {
                for o in 0..c_out {
                    let mut sum = 0.0;
                    for (i, j) in (0..kernel).flat_map(|i| (0..kernel).map(move |j| (i, j))) {
                        let row = (y * stride + i)
                            .checked_sub(padding[0])
                            .filter(|row| *row < full_height);
                        let col = (x_idx * stride + j)
                            .checked_sub(padding[1])
                            .filter(|col| *col < full_width);
                        let (Some(row), Some(col)) = (row, col) else {
                            continue;
                        };
                        let pixel = (row / upsample * width + col / upsample) * c_in;
                        for c in 0..c_in {
                            let tap = ((o * c_in + c) * kernel + i) * kernel + j;
                            sum += x[pixel + c] * f64::from(w[tap]);
                        }
                    }
                    products.push(sum);
                }
            }
            finish.reference(element, products)
        }),
    }
}

pub(super) fn attention(random: &mut Random) -> Case {
    const Q: u64 = 0;
    const K: u64 = 1;
    const V: u64 = 2;
    const BIAS: u64 = 3;
    const OUT: u64 = 4;
    let feed = random.feed();
    let head_dim = random.pick(&[1, 8, 16, 20, 32, 40, 64, 65, 80, 96, 128, 160, 512]);
    let n_kv_heads = random.within(1, 2);
    let n_heads = n_kv_heads * random.within(1, 2);
    let n_queries = random.pick(&[1, 5, 31, 40, 77, 150, 210]);
    let is_causal = random.within(0, 3) == 0;
    let n_keys = if is_causal {
        n_queries
    } else {
        random.pick(&[1, 5, 13, 77, 200, 330])
    };
    let scale = (1.0 / (head_dim as f32).sqrt()) * random.pick(&[1.0, 8.0]);
    // None, or which dimensions the bias has itself.
    let bias_dims = random
        .coin()
        .then(|| [random.coin(), random.coin(), random.coin(), random.coin()]);
    // Bias of one batch element: the whole `[heads, queries, keys]` before broadcasting is looked up modulo its extents.
    let extents = bias_dims.map(|[_, h, q, k]| {
        [
            if h { n_heads } else { 1 },
            if q { n_queries } else { 1 },
            if k { n_keys } else { 1 },
        ]
    });
    let bias_of = move |element: u64| {
        let n = extents.map_or(0, |extents| extents.iter().product());
        // A bias without a batch dimension is the same for all elements.
        let element = if bias_dims.is_some_and(|dims| dims[0]) {
            element
        } else {
            0
        };
        let mut random = feed.random(BIAS, element);
        let hides = random.coin();
        let mut hidden = move || {
            if hides && random.within(0, 4) == 0 {
                f32::NEG_INFINITY
            } else {
                random.value() * 3.0
            }
        };
        (0..n).map(|_| hidden()).collect::<Vec<f32>>()
    };
    let name = format!(
        "attention {n_queries} x {n_keys}, {n_heads}/{n_kv_heads} heads of {head_dim}, causal {is_causal}, bias {bias_dims:?}"
    );
    Case {
        name,
        limit: 4.0 * SUM_LIMIT,
        run: Box::new(move |backend, elements| {
            let q = feed.put(backend, Q, elements, &[n_queries, n_heads * head_dim])?;
            let k = feed.put(backend, K, elements, &[n_keys, n_kv_heads * head_dim])?;
            let v = feed.put(backend, V, elements, &[n_keys, n_kv_heads * head_dim])?;
            let bias = match (bias_dims, extents) {
                (Some([has_batch, ..]), Some([h, q, k])) => {
                    let elements = if has_batch { elements } else { &[0] };
                    let data: Vec<f32> = elements.iter().flat_map(|element| bias_of(*element)).collect();
                    Some(put(backend, feed.place(BIAS), &[elements.len(), h, q, k], &data)?)
                }
                _ => None,
            };
            let dims = with_batch(elements, &[n_queries, n_heads * head_dim]);
            let out = Output::new(backend, feed.dtype, feed.place(OUT), &dims)?;
            let spec = AttentionSpec {
                n_heads,
                n_kv_heads,
                scale,
                is_causal,
                bias: bias.as_ref(),
            };
            backend.attention(&q, &k, &v, &spec, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            let q = wide(&feed.values(Q, element, n_queries * n_heads * head_dim));
            let k = wide(&feed.values(K, element, n_keys * n_kv_heads * head_dim));
            let v = wide(&feed.values(V, element, n_keys * n_kv_heads * head_dim));
            let bias = bias_of(element);
            let mut out = vec![0.0; n_queries * n_heads * head_dim];
            for (i, h) in (0..n_queries).flat_map(|i| (0..n_heads).map(move |h| (i, h))) {
                let kv = |j: usize, c: usize| (j * n_kv_heads + h * n_kv_heads / n_heads) * head_dim + c;
                let row = (i * n_heads + h) * head_dim;
                let score = |j: usize| {
                    let dot: f64 = (0..head_dim).map(|c| q[row + c] * k[kv(j, c)]).sum();
                    let bias = extents.map_or(0.0, |[eh, eq, ek]| {
                        f64::from(bias[(h % eh * eq + i % eq) * ek + j % ek])
                    });
                    if is_causal && j > i {
                        f64::NEG_INFINITY
                    } else {
                        f64::from(scale) * dot + bias
                    }
                };
                let scores: Vec<f64> = (0..n_keys).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if max == f64::NEG_INFINITY {
                    // No key is visible: zeros.
                    continue;
                }
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for c in 0..head_dim {
                    out[row + c] = (0..n_keys).map(|j| weights[j] * v[kv(j, c)]).sum::<f64>() / sum;
                }
            }
            out
        }),
    }
}
