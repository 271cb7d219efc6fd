//! The suite of `denoised_tensor::Backend`: every op against its formula in f64, and the rules that hold for all ops.
//!
//! A [`Case`] is one op with random shapes, operands and layout: columns or tokens of larger tensors as well as dense ones, always
//! ragged. It runs on any list of batch elements, so that the same case serves for the values ([`values_match_the_formulas`]) and for
//! independence of batch and threads ([`results_depend_on_their_batch_element_only`]).
//!
//! Around every operand lies NaN, around every output a mark that must survive. NaN anywhere is a failure.

use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, Epilogue, GateOrder, Modulation, PatchOrder,
    PrepareInput, Prepared, Result, RopeStyle, SourceDType, SourceError, SourceTensor, StepArgs, Tensor,
    TensorError, TimestepSpec, Weight, WeightKind, WeightSource, WeightSpec,
};
use std::{borrow::Cow, collections::HashMap};

/// Relative L2 error that f32 arithmetic may make in a long sum.
const SUM_LIMIT: f64 = 2e-6;

/// The same for Winograd's transforms, which a backend may use for 3x3 convolutions.
const CONV_LIMIT: f64 = 2e-5;

/// The same for a few operations in a row.
const ELEMENT_LIMIT: f64 = 5e-7;

/// What lies around outputs.
const MARK: f32 = 12_345.5;

/// Random numbers from a seed (splitmix64; Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between `low` and `high`, both included.
    fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0, choices.len() - 1)]
    }

    fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Between -1 and 1.
    fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

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
    ("linear", linear),
    ("conv2d", conv2d),
    ("attention", attention),
    ("layer_norm", layer_norm),
    ("rms_norm", rms_norm),
    ("group_norm", group_norm),
    ("add", add),
    ("mul", mul),
    ("gated_add", gated_add),
    ("affine", affine),
    ("activation", activation),
    ("gated", gated),
    ("rope", rope),
    ("embedding", embedding),
    ("gather_rows", gather_rows),
    ("timestep_embedding", timestep_embedding),
    ("patchify", patchify),
    ("unpatchify", unpatchify),
    ("permute", permute),
    ("upsample_nearest", upsample_nearest),
    ("copy", copy),
    ("fill", fill),
    ("step", step),
    ("to_pixels", to_pixels),
];

/// Runs `n_rounds` random cases of every op against its formula.
///
/// # Panics
/// A result is further from the formula than its limit.
pub fn values_match_the_formulas(backend: &dyn Backend, n_rounds: u64) {
    for (name, op) in OPS {
        for round in 0..n_rounds {
            let mut random = Random::new(round * 7919 + name.len() as u64);
            let case = op(&mut random);
            let elements: Vec<u64> = (0..random.within(1, 3) as u64).collect();
            for (element, got) in elements.iter().zip(case.run(backend, &elements)) {
                check(&case, &got, &(case.reference)(*element));
            }
        }
    }
}

fn check(case: &Case, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{}", case.name);
    let square = |(a, b): (&f32, &f64)| (f64::from(*a) - b).powi(2);
    let distance = got.iter().zip(expected).map(square).sum::<f64>().sqrt();
    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
    let is_close = distance <= case.limit * norm.max(1e-30);
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
            let case = op(&mut Random::new(round * 104_729 + name.len() as u64));
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

// ---- operands ----

/// Where a case's numbers come from: a sequence per operand and batch element.
#[derive(Clone, Copy, Debug)]
struct Feed(u64);

impl Feed {
    fn random(self, operand: u64, element: u64) -> Random {
        let mut random = Random::new(self.0 ^ operand.wrapping_mul(0x51_7cc1_b727_220b) ^ (element << 32));
        random.next();
        random
    }

    fn values(self, operand: u64, element: u64, n: usize) -> Vec<f32> {
        let mut random = self.random(operand, element);
        (0..n).map(|_| random.value()).collect()
    }

    /// The layout of an operand; the same for every batch.
    fn place(self, operand: u64) -> Place {
        self.random(operand, u64::from(u32::MAX)).pick(&[
            Place::Dense,
            Place::Columns,
            Place::Tokens,
            Place::Both,
        ])
    }

    /// An operand `[elements, dims..]`.
    fn put(self, backend: &dyn Backend, operand: u64, elements: &[u64], dims: &[usize]) -> Result<Tensor> {
        let n = dims.iter().product();
        let data: Vec<f32> = elements
            .iter()
            .flat_map(|element| self.values(operand, *element, n))
            .collect();
        put(backend, self.place(operand), &with_batch(elements, dims), &data)
    }
}

fn with_batch(elements: &[u64], dims: &[usize]) -> Vec<usize> {
    [&[elements.len()], dims].concat()
}

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Dense,
    /// Columns of longer rows.
    Columns,
    /// A range of dimension 1.
    Tokens,
    Both,
}

/// Around the operand: columns before and behind, tokens before and behind.
const MARGINS: [usize; 4] = [2, 3, 1, 2];

impl Place {
    fn whole(self, dims: &[usize]) -> Vec<usize> {
        let mut whole = dims.to_vec();
        let last = dims.len() - 1;
        if matches!(self, Self::Columns | Self::Both) {
            whole[last] += MARGINS[0] + MARGINS[1];
        }
        if matches!(self, Self::Tokens | Self::Both) && last >= 2 {
            whole[1] += MARGINS[2] + MARGINS[3];
        }
        whole
    }

    fn narrow(self, whole: &Tensor, dims: &[usize]) -> Result<Tensor> {
        let last = dims.len() - 1;
        let mut view = whole.clone();
        if matches!(self, Self::Columns | Self::Both) {
            view = view.narrow(last, MARGINS[0], dims[last])?;
        }
        if matches!(self, Self::Tokens | Self::Both) && last >= 2 {
            view = view.narrow(1, MARGINS[2], dims[1])?;
        }
        Ok(view)
    }

    /// The data inside its surroundings.
    fn surround(self, dims: &[usize], data: &[f32], around: f32) -> Vec<f32> {
        let whole = self.whole(dims);
        let last = dims.len() - 1;
        let mut out = vec![around; whole.iter().product()];
        for (row_idx, row) in data.chunks_exact(dims[last]).enumerate() {
            let (mut rest, mut start, mut stride) = (row_idx, 0, whole[last]);
            for dim_idx in (0..last).rev() {
                let mut i = rest % dims[dim_idx];
                rest /= dims[dim_idx];
                if dim_idx == 1 && whole[1] != dims[1] && last >= 2 {
                    i += MARGINS[2];
                }
                start += i * stride;
                stride *= whole[dim_idx];
            }
            if whole[last] != dims[last] {
                start += MARGINS[0];
            }
            out[start..start + row.len()].copy_from_slice(row);
        }
        out
    }
}

fn bytes_of(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]))
        .collect()
}

fn put(backend: &dyn Backend, place: Place, dims: &[usize], data: &[f32]) -> Result<Tensor> {
    let whole = place.surround(dims, data, f32::NAN);
    let whole = backend.upload(&bytes_of(&whole), &place.whole(dims), DType::F32)?;
    place.narrow(&whole, dims)
}

fn put_ints(backend: &dyn Backend, dims: &[usize], data: &[i32]) -> Result<Tensor> {
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
    backend.upload(&bytes, dims, DType::I32)
}

/// The elements of an f32 tensor.
pub fn fetch(backend: &dyn Backend, x: &Tensor) -> Result<Vec<f32>> {
    let mut bytes = vec![0; x.shape().n_elements() * 4];
    backend.download(x, &mut bytes)?;
    Ok(floats_of(&bytes))
}

/// An output in its surroundings.
struct Output {
    whole: Tensor,
    view: Tensor,
    place: Place,
}

impl Output {
    fn new(backend: &dyn Backend, place: Place, dims: &[usize]) -> Result<Self> {
        let n = dims.iter().product();
        Self::holding(backend, place, dims, &vec![f32::NAN; n])
    }

    /// For ops in place.
    fn holding(backend: &dyn Backend, place: Place, dims: &[usize], data: &[f32]) -> Result<Self> {
        let whole = place.surround(dims, data, MARK);
        let whole = backend.upload(&bytes_of(&whole), &place.whole(dims), DType::F32)?;
        let view = place.narrow(&whole, dims)?;
        Ok(Self { whole, view, place })
    }

    /// The results per batch element, after a look at the surroundings.
    fn results(&self, backend: &dyn Backend) -> Result<Vec<Vec<f32>>> {
        let data = fetch(backend, &self.view)?;
        let expected = self.place.surround(self.view.dims(), &data, MARK);
        let whole = fetch(backend, &self.whole)?;
        let is_intact = whole
            .iter()
            .zip(&expected)
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(is_intact, "written outside of {:?}", self.view);
        Ok(data
            .chunks_exact(data.len() / self.view.dim(0))
            .map(<[f32]>::to_vec)
            .collect())
    }
}

fn wide(data: &[f32]) -> Vec<f64> {
    data.iter().map(|x| f64::from(*x)).collect()
}

// ---- weights ----

/// A checkpoint in memory.
#[derive(Debug, Default)]
pub struct MemorySource(HashMap<String, (SourceDType, Vec<usize>, Vec<u8>)>);

impl MemorySource {
    /// Adds an f32 tensor.
    pub fn insert(&mut self, name: &str, shape: &[usize], data: &[f32]) {
        self.insert_bytes(name, SourceDType::F32, shape, bytes_of(data));
    }

    /// Adds a tensor of any dtype.
    pub fn insert_bytes(&mut self, name: &str, dtype: SourceDType, shape: &[usize], bytes: Vec<u8>) {
        self.0.insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
    }
}

impl MemorySource {
    fn entry(&self, name: &str) -> Result<&(SourceDType, Vec<usize>, Vec<u8>), SourceError> {
        let entry = self.0.get(name);
        entry.ok_or_else(|| SourceError(format!("no tensor {name}")))
    }
}

impl WeightSource for MemorySource {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        let (dtype, shape, _) = self.entry(name)?;
        Ok((*dtype, shape.clone()))
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        let (dtype, shape, bytes) = self.entry(name)?;
        Ok(SourceTensor {
            dtype: *dtype,
            shape: shape.clone(),
            bytes: Cow::Borrowed(bytes),
        })
    }
}

fn spec(names: &[&str], kind: WeightKind, shape: &[usize]) -> WeightSpec {
    WeightSpec {
        sources: names.iter().map(|name| (*name).to_owned()).collect(),
        kind,
        shape: shape.to_vec(),
    }
}

fn prepare(backend: &dyn Backend, weights: &[(WeightKind, &[usize], &[f32])]) -> Result<Vec<Weight>> {
    let mut source = MemorySource::default();
    let mut specs = Vec::new();
    for (i, (kind, shape, data)) in weights.iter().enumerate() {
        let name = format!("weight.{i}");
        source.insert(&name, shape, data);
        specs.push(spec(&[&name], *kind, shape));
    }
    Ok(backend
        .prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {})?
        .weights)
}

// ---- functions ----

const ACTIVATIONS: [Activation; 5] = [
    Activation::None,
    Activation::Silu,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::QuickGelu,
];

fn activate(activation: Activation, x: f64) -> f64 {
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
    }
}

/// Complementary error function to about 1e-15: the series below 2, Lentz's continued fraction above (Abramowitz and Stegun 7.1.5
/// and 7.1.14).
fn erfc(x: f64) -> f64 {
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

// ---- products ----

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
            (Output::new(backend, place, &whole)?, None)
        } else if self.is_in_place {
            let out = Output::holding(backend, place, &whole, &residual)?;
            let view = out.view.clone();
            (out, Some(view))
        } else {
            let residual = put(backend, self.feed.place(Self::RESIDUAL), &whole, &residual)?;
            (Output::new(backend, place, &whole)?, Some(residual))
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

fn linear(random: &mut Random) -> Case {
    let feed = Feed(random.next());
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

fn conv2d(random: &mut Random) -> Case {
    let feed = Feed(random.next());
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

fn attention(random: &mut Random) -> Case {
    const Q: u64 = 0;
    const K: u64 = 1;
    const V: u64 = 2;
    const BIAS: u64 = 3;
    const OUT: u64 = 4;
    let feed = Feed(random.next());
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
            let out = Output::new(backend, feed.place(OUT), &dims)?;
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

// ---- norms ----

/// A case of one input `[elements, dims..]` and an output of the same shape that may be the input.
fn same_shape(
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
                let out = Output::holding(backend, feed.place(OUT), &whole, &data)?;
                run(backend, elements, &out.view.clone(), &out.view)?;
                out
            } else {
                let x = feed.put(backend, 0, elements, &dims)?;
                let out = Output::new(backend, feed.place(OUT), &whole)?;
                run(backend, elements, &x, &out.view)?;
                out
            };
            out.results(backend)
        }),
        reference: Box::new(move |element| reference(element, wide(&feed.values(0, element, n)))),
    }
}

fn random_dims(random: &mut Random, n_leading: usize, last: usize) -> Vec<usize> {
    let mut dims: Vec<usize> = (0..n_leading).map(|_| random.within(1, 12)).collect();
    dims.push(last);
    dims
}

fn some_width(random: &mut Random) -> usize {
    random.pick(&[1, 2, 6, 16, 30, 64, 65, 100, 128, 320, 771])
}

fn layer_norm(random: &mut Random) -> Case {
    let feed = Feed(random.next());
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

fn rms_norm(random: &mut Random) -> Case {
    let feed = Feed(random.next());
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

fn group_norm(random: &mut Random) -> Case {
    let feed = Feed(random.next());
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

// ---- element-wise ----

/// Which dimensions, the batch first, a broadcast operand has itself.
fn random_broadcast(random: &mut Random, n_dims: usize) -> Vec<bool> {
    (0..n_dims).map(|_| random.coin()).collect()
}

/// Extents of a broadcast operand without the batch.
fn broadcast_dims(dims: &[usize], own: &[bool]) -> Vec<usize> {
    dims.iter()
        .zip(&own[1..])
        .map(|(extent, own)| if *own { *extent } else { 1 })
        .collect()
}

/// The operand as uploaded, and per element as a function of the flat index into `dims`.
fn put_broadcast(
    backend: &dyn Backend,
    feed: Feed,
    operand: u64,
    elements: &[u64],
    dims: &[usize],
    own: &[bool],
) -> Result<Tensor> {
    let elements = if own[0] { elements } else { &[0] };
    feed.put(backend, operand, elements, &broadcast_dims(dims, own))
}

fn broadcast_values(feed: Feed, operand: u64, element: u64, dims: &[usize], own: &[bool]) -> Vec<f64> {
    let small = broadcast_dims(dims, own);
    let data = feed.values(operand, if own[0] { element } else { 0 }, small.iter().product());
    (0..dims.iter().product())
        .map(|flat: usize| {
            let (mut rest, mut offset, mut stride) = (flat, 0, 1);
            for (extent, own_extent) in dims.iter().zip(&small).rev() {
                offset += rest % extent % own_extent * stride;
                rest /= extent;
                stride *= own_extent;
            }
            f64::from(data[offset])
        })
        .collect()
}

fn binary(
    random: &mut Random,
    name: &str,
    op: fn(&dyn Backend, &Tensor, &Tensor, &Tensor) -> Result<()>,
    formula: fn(f64, f64) -> f64,
) -> Case {
    let feed = Feed(random.next());
    let n_leading = random.within(0, 3);
    let last = some_width(random);
    let dims = random_dims(random, n_leading, last);
    let own = random_broadcast(random, dims.len() + 1);
    let name = format!("{name} {dims:?}, second has {own:?}");
    let (run_dims, run_own, ref_dims) = (dims.clone(), own.clone(), dims.clone());
    let run = move |backend: &dyn Backend, elements: &[u64], a: &Tensor, out: &Tensor| {
        let b = put_broadcast(backend, feed, 1, elements, &run_dims, &run_own)?;
        op(backend, a, &b, out)
    };
    let reference = move |element: u64, a: Vec<f64>| {
        let b = broadcast_values(feed, 1, element, &ref_dims, &own);
        a.iter().zip(&b).map(|(a, b)| formula(*a, *b)).collect()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

fn add(random: &mut Random) -> Case {
    binary(
        random,
        "add",
        |backend, a, b, out| backend.add(a, b, out),
        |a, b| a + b,
    )
}

fn mul(random: &mut Random) -> Case {
    binary(
        random,
        "mul",
        |backend, a, b, out| backend.mul(a, b, out),
        |a, b| a * b,
    )
}

fn gated_add(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let n_leading = random.within(0, 2);
    let last = some_width(random);
    let dims = random_dims(random, n_leading, last);
    let own = random_broadcast(random, dims.len() + 1);
    let name = format!("gated_add {dims:?}, gate has {own:?}");
    let (run_dims, run_own, ref_dims) = (dims.clone(), own.clone(), dims.clone());
    let run = move |backend: &dyn Backend, elements: &[u64], residual: &Tensor, out: &Tensor| {
        let gate = put_broadcast(backend, feed, 1, elements, &run_dims, &run_own)?;
        let x = feed.put(backend, 2, elements, &run_dims)?;
        backend.gated_add(residual, &gate, &x, out)
    };
    let reference = move |element: u64, residual: Vec<f64>| {
        let gate = broadcast_values(feed, 1, element, &ref_dims, &own);
        let x = wide(&feed.values(2, element, residual.len()));
        (0..residual.len())
            .map(|i| residual[i] + gate[i] * x[i])
            .collect()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

fn affine(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let last = some_width(random);
    let dims = random_dims(random, 2, last);
    let (scale, shift) = (random.value(), random.value());
    let name = format!("affine {dims:?}");
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        backend.affine(x, scale, shift, out)
    };
    let reference = move |_: u64, x: Vec<f64>| {
        x.iter()
            .map(|x| x * f64::from(scale) + f64::from(shift))
            .collect::<Vec<_>>()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

fn activation(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let last = some_width(random);
    let dims = random_dims(random, 2, last);
    let activation = random.pick(&ACTIVATIONS);
    // Through the transition and both tails.
    let factor = random.pick(&[0.01, 1.0, 6.0, 40.0]);
    let name = format!("activation {activation:?} {dims:?} times {factor}");
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        let scaled = backend.alloc(x.dims(), DType::F32)?;
        backend.affine(x, factor, 0.0, &scaled)?;
        backend.copy(&scaled, out)?;
        backend.activation(out, activation, out)
    };
    let reference = move |_: u64, x: Vec<f64>| {
        // The input is rounded once more, which is not the activation's error.
        x.iter()
            .map(|x| activate(activation, f64::from(*x as f32 * factor)))
            .collect::<Vec<_>>()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

/// A case of one input and an output of another shape.
fn other_shape(
    feed: Feed,
    name: String,
    limit: f64,
    dims: Vec<usize>,
    out_dims: Vec<usize>,
    run: impl Fn(&dyn Backend, &Tensor, &Tensor) -> Result<()> + 'static,
    reference: impl Fn(Vec<f64>) -> Vec<f64> + 'static,
) -> Case {
    let n = dims.iter().product();
    Case {
        name,
        limit,
        run: Box::new(move |backend, elements| {
            let x = feed.put(backend, 0, elements, &dims)?;
            let out = Output::new(backend, feed.place(20), &with_batch(elements, &out_dims))?;
            run(backend, &x, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| reference(wide(&feed.values(0, element, n)))),
    }
}

fn gated(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let half = some_width(random);
    let dims = random_dims(random, 1, 2 * half);
    let out_dims = [&dims[..1], &[half]].concat();
    let activation = random.pick(&ACTIVATIONS);
    let order = random.pick(&[GateOrder::SecondActivated, GateOrder::FirstActivated]);
    let name = format!("gated {dims:?}, {activation:?}, {order:?}");
    let reference = move |x: Vec<f64>| {
        let row = |row: &[f64]| {
            let (first, second) = row.split_at(half);
            let pairs = first.iter().zip(second);
            match order {
                GateOrder::SecondActivated => pairs
                    .map(|(a, b)| a * activate(activation, *b))
                    .collect::<Vec<_>>(),
                GateOrder::FirstActivated => pairs.map(|(a, b)| activate(activation, *a) * b).collect(),
            }
        };
        x.chunks_exact(2 * half).flat_map(row).collect()
    };
    let run = move |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.gated(x, activation, order, out);
    other_shape(feed, name, ELEMENT_LIMIT, dims, out_dims, run, reference)
}

fn rope(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let (n_tokens, n_heads, half) = (random.within(1, 20), random.within(1, 3), random.within(1, 40));
    let style = random.pick(&[RopeStyle::Interleaved, RopeStyle::Halves]);
    let (cos, sin) = (
        feed.values(1, 0, n_tokens * half),
        feed.values(2, 0, n_tokens * half),
    );
    let (run_cos, run_sin) = (cos.clone(), sin.clone());
    let name = format!(
        "rope {n_tokens} tokens, {n_heads} heads of {}, {style:?}",
        2 * half
    );
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        let cos = put(backend, feed.place(1), &[n_tokens, half], &run_cos)?;
        let sin = put(backend, feed.place(2), &[n_tokens, half], &run_sin)?;
        backend.rope(x, &cos, &sin, style, out)
    };
    let reference = move |_: u64, x: Vec<f64>| {
        let mut out = x.clone();
        for (head, start) in (0..n_tokens * n_heads).map(|head| (head, head * 2 * half)) {
            for i in 0..half {
                let (p, q) = match style {
                    RopeStyle::Interleaved => (start + 2 * i, start + 2 * i + 1),
                    RopeStyle::Halves => (start + i, start + half + i),
                };
                let angle = head / n_heads * half + i;
                let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                (out[p], out[q]) = (x[p] * c - x[q] * s, x[q] * c + x[p] * s);
            }
        }
        out
    };
    same_shape(
        random,
        feed,
        name,
        ELEMENT_LIMIT,
        vec![n_tokens, 2 * half * n_heads],
        run,
        reference,
    )
}

// ---- lookups and layout ----

fn embedding(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let (n_rows, n, n_ids) = (random.within(1, 40), some_width(random), random.within(1, 20));
    let table = feed.values(1, 0, n_rows * n);
    let ids_of = move |element: u64| {
        let mut random = feed.random(0, element);
        (0..n_ids)
            .map(|_| random.within(0, n_rows - 1) as i32)
            .collect::<Vec<_>>()
    };
    let run_table = table.clone();
    Case {
        name: format!("embedding of {n_ids} ids in {n_rows}x{n}"),
        limit: 0.0,
        run: Box::new(move |backend, elements| {
            let weight = prepare(backend, &[(WeightKind::Table, &[n_rows, n], &run_table)])?.remove(0);
            let ids: Vec<i32> = elements.iter().flat_map(|element| ids_of(*element)).collect();
            let ids = put_ints(backend, &[elements.len(), n_ids], &ids)?;
            let out = Output::new(backend, feed.place(20), &with_batch(elements, &[n_ids, n]))?;
            backend.embedding(&ids, &weight, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            ids_of(element)
                .iter()
                .flat_map(|id| wide(&table[*id as usize * n..][..n]))
                .collect()
        }),
    }
}

fn gather_rows(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let (n_rows, n) = (random.within(1, 30), some_width(random));
    let row_of = move |element: u64| feed.random(1, element).within(0, n_rows - 1);
    Case {
        name: format!("gather_rows of {n_rows}x{n}"),
        limit: 0.0,
        run: Box::new(move |backend, elements| {
            let x = feed.put(backend, 0, elements, &[n_rows, n])?;
            let rows: Vec<i32> = elements.iter().map(|element| row_of(*element) as i32).collect();
            let rows = put_ints(backend, &[elements.len()], &rows)?;
            let out = Output::new(backend, feed.place(20), &with_batch(elements, &[n]))?;
            backend.gather_rows(&x, &rows, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            wide(&feed.values(0, element, n_rows * n)[row_of(element) * n..][..n])
        }),
    }
}

fn timestep_embedding(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let dim = 2 * random.within(2, 160);
    let spec = TimestepSpec {
        flip_sin_to_cos: random.coin(),
        downscale_freq_shift: random.pick(&[0.0, 1.0]),
        scale: random.pick(&[1.0, 4.0]),
        max_period: 10_000.0,
    };
    let timestep_of = move |element: u64| (feed.random(0, element).value() + 1.0) * 500.0;
    Case {
        name: format!("timestep_embedding to {dim}, {spec:?}"),
        // Angles reach 4000 radians, whose rounding to f32 is 1.2e-4.
        limit: 2e-4,
        run: Box::new(move |backend, elements| {
            let timesteps: Vec<f32> = elements.iter().map(|element| timestep_of(*element)).collect();
            let timesteps = put(backend, Place::Dense, &[elements.len()], &timesteps)?;
            let out = Output::new(backend, feed.place(20), &with_batch(elements, &[dim]))?;
            backend.timestep_embedding(&timesteps, &spec, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            let half = dim / 2;
            let angle = |i: usize| {
                let n_steps = half as f64 - f64::from(spec.downscale_freq_shift);
                let frequency = (-f64::from(spec.max_period).ln() * i as f64 / n_steps).exp();
                f64::from(spec.scale) * f64::from(timestep_of(element)) * frequency
            };
            let sines = (0..half).map(|i| angle(i).sin());
            let cosines = (0..half).map(|i| angle(i).cos());
            if spec.flip_sin_to_cos {
                cosines.chain(sines).collect()
            } else {
                sines.chain(cosines).collect()
            }
        }),
    }
}

/// Sides, channels, patch and order, and for each feature of each token the pixel element it is.
#[derive(Clone, Copy)]
struct Patches {
    high: usize,
    wide: usize,
    n: usize,
    patch: usize,
    order: PatchOrder,
}

impl Patches {
    fn new(random: &mut Random) -> Self {
        Self {
            high: random.within(1, 6),
            wide: random.within(1, 6),
            n: random.pick(&[1, 3, 4, 16, 20]),
            patch: random.within(1, 3),
            order: random.pick(&[PatchOrder::SpatialFirst, PatchOrder::ChannelFirst]),
        }
    }

    fn image(self) -> Vec<usize> {
        vec![self.high * self.patch, self.wide * self.patch, self.n]
    }

    fn tokens(self) -> Vec<usize> {
        vec![self.high * self.wide, self.patch * self.patch * self.n]
    }

    fn pixel_of(self, flat: usize) -> usize {
        let p = self.patch;
        let (token, feature) = (flat / (p * p * self.n), flat % (p * p * self.n));
        let (dy, dx, c) = match self.order {
            PatchOrder::SpatialFirst => (feature / self.n / p, feature / self.n % p, feature % self.n),
            PatchOrder::ChannelFirst => (feature / p % p, feature % p, feature / (p * p)),
        };
        let (y, x) = (token / self.wide * p + dy, token % self.wide * p + dx);
        (y * self.wide * p + x) * self.n + c
    }
}

fn patchify(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let p = Patches::new(random);
    let name = format!("patchify {:?} by {}, {:?}", p.image(), p.patch, p.order);
    let run =
        move |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.patchify(x, p.patch, p.order, out);
    let reference = move |x: Vec<f64>| (0..x.len()).map(|flat| x[p.pixel_of(flat)]).collect();
    other_shape(feed, name, 0.0, p.image(), p.tokens(), run, reference)
}

fn unpatchify(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let p = Patches::new(random);
    let name = format!("unpatchify to {:?} by {}, {:?}", p.image(), p.patch, p.order);
    let run =
        move |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.unpatchify(x, p.patch, p.order, out);
    let reference = move |x: Vec<f64>| {
        let mut out = vec![0.0; x.len()];
        for (flat, value) in x.into_iter().enumerate() {
            out[p.pixel_of(flat)] = value;
        }
        out
    };
    other_shape(feed, name, 0.0, p.tokens(), p.image(), run, reference)
}

fn permute(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let n_leading = random.within(0, 3);
    let last = random.within(1, 20);
    let dims = random_dims(random, n_leading, last);
    // The batch stays in front, as results are per batch element.
    let mut axes: Vec<usize> = (1..=dims.len()).collect();
    for i in (1..axes.len()).rev() {
        axes.swap(i, random.within(0, i));
    }
    let out_dims: Vec<usize> = axes.iter().map(|axis| dims[axis - 1]).collect();
    let name = format!("permute {dims:?} by {axes:?}");
    let (ref_axes, ref_dims, ref_out) = (axes.clone(), dims.clone(), out_dims.clone());
    let run = move |backend: &dyn Backend, x: &Tensor, out: &Tensor| {
        backend.permute(x, &[&[0], &axes[..]].concat(), out)
    };
    let reference = move |x: Vec<f64>| {
        let stride = |dim_idx: usize| ref_dims[dim_idx + 1..].iter().product::<usize>();
        let source = |flat: usize| {
            let (mut rest, mut offset) = (flat, 0);
            for (axis, extent) in ref_axes.iter().zip(&ref_out).rev() {
                offset += rest % extent * stride(axis - 1);
                rest /= extent;
            }
            offset
        };
        (0..x.len()).map(|flat| x[source(flat)]).collect()
    };
    other_shape(feed, name, 0.0, dims, out_dims, run, reference)
}

fn upsample_nearest(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let (height, width, n) = (random.within(1, 9), random.within(1, 9), some_width(random));
    let name = format!("upsample_nearest {height}x{width}x{n}");
    let run = |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.upsample_nearest(x, out);
    let reference = move |x: Vec<f64>| {
        let pixel = |y: usize, col: usize| x[(y / 2 * width + col / 2) * n..][..n].to_vec();
        (0..2 * height)
            .flat_map(|y| (0..2 * width).map(move |col| (y, col)))
            .flat_map(|(y, col)| pixel(y, col))
            .collect()
    };
    other_shape(
        feed,
        name,
        0.0,
        vec![height, width, n],
        vec![2 * height, 2 * width, n],
        run,
        reference,
    )
}

fn copy(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let n_leading = random.within(0, 3);
    let last = some_width(random);
    let dims = random_dims(random, n_leading, last);
    let mut own = random_broadcast(random, dims.len() + 1);
    own[0] = true;
    let small = broadcast_dims(&dims, &own);
    let name = format!("copy {small:?} to {dims:?}");
    let ref_dims = dims.clone();
    let run = |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.copy(x, out);
    let n: usize = small.iter().product();
    let reference = move |x: Vec<f64>| {
        debug_assert_eq!(x.len(), n);
        let index = |flat: usize| {
            let (mut rest, mut offset, mut stride) = (flat, 0, 1);
            for (extent, own_extent) in ref_dims.iter().zip(&small).rev() {
                offset += rest % extent % own_extent * stride;
                rest /= extent;
                stride *= own_extent;
            }
            offset
        };
        (0..ref_dims.iter().product())
            .map(|flat| x[index(flat)])
            .collect()
    };
    let small = broadcast_dims(&dims, &own);
    other_shape(feed, name, 0.0, small, dims, run, reference)
}

fn fill(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let last = some_width(random);
    let dims = random_dims(random, 2, last);
    let value = random.value();
    let name = format!("fill {dims:?}");
    let n = dims.iter().product();
    let run = move |backend: &dyn Backend, _: &Tensor, out: &Tensor| backend.fill(out, value);
    other_shape(feed, name, 0.0, vec![1], dims, run, move |_| {
        vec![f64::from(value); n]
    })
}

// ---- sampling and output ----

fn step(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let last = random.pick(&[1, 4, 16, 33]);
    let dims = random_dims(random, 2, last);
    let (has_guidance, has_noise, wants_guided) = (random.coin(), random.coin(), random.coin());
    let name =
        format!("step {dims:?}, guidance {has_guidance}, noise {has_noise}, guided_out {wants_guided}");
    let run_dims = dims.clone();
    let guide = move |element: u64, n: usize| {
        let conditional = wide(&feed.values(1, element, n));
        let unconditional = wide(&feed.values(2, element, n));
        let guidance = f64::from(feed.values(3, element, 1)[0]);
        let guided = |i: usize| unconditional[i] + guidance * (conditional[i] - unconditional[i]);
        if has_guidance {
            (0..n).map(guided).collect()
        } else {
            conditional
        }
    };
    let run = move |backend: &dyn Backend, elements: &[u64], latents: &Tensor, out: &Tensor| {
        let conditional = feed.put(backend, 1, elements, &run_dims)?;
        let unconditional = feed.put(backend, 2, elements, &run_dims)?;
        let guidance: Vec<f32> = elements
            .iter()
            .map(|element| feed.values(3, *element, 1)[0])
            .collect();
        let guidance = put(backend, Place::Dense, &[elements.len()], &guidance)?;
        let coefficients = feed.put(backend, 4, elements, &[3])?;
        let noise = feed.put(backend, 5, elements, &run_dims)?;
        let guided_out = Output::new(backend, feed.place(6), out.dims())?;
        let args = StepArgs {
            latents,
            conditional: &conditional,
            unconditional: has_guidance.then_some((&unconditional, &guidance)),
            coefficients: &coefficients,
            noise: has_noise.then_some(&noise),
            guided_out: wants_guided.then_some(&guided_out.view),
        };
        backend.step(&args, out)?;
        if wants_guided {
            for (element, got) in elements.iter().zip(guided_out.results(backend)?) {
                let expected = guide(*element, got.len());
                let is_close = got
                    .iter()
                    .zip(&expected)
                    .all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6);
                assert!(is_close, "guided_out of element {element}");
            }
        }
        Ok(())
    };
    let reference = move |element: u64, latents: Vec<f64>| {
        let n = latents.len();
        let guided = guide(element, n);
        let c = wide(&feed.values(4, element, 3));
        let noise = wide(&feed.values(5, element, n));
        (0..n)
            .map(|i| c[0] * latents[i] + c[1] * guided[i] + if has_noise { c[2] * noise[i] } else { 0.0 })
            .collect()
    };
    same_shape(random, feed, name, 2.0 * ELEMENT_LIMIT, dims, run, reference)
}

fn to_pixels(random: &mut Random) -> Case {
    let feed = Feed(random.next());
    let dims = random_dims(random, 2, 3);
    let name = format!("to_pixels {dims:?}");
    let run = |backend: &dyn Backend, x: &Tensor, out: &Tensor| {
        // Through the range and beyond both ends.
        let scaled = backend.alloc(x.dims(), DType::F32)?;
        backend.affine(x, 1.5, 0.0, &scaled)?;
        backend.to_pixels(&scaled, out)?;
        let bytes = backend.alloc(x.dims(), DType::U8)?;
        backend.to_pixels(&scaled, &bytes)?;
        let units = fetch(backend, out)?;
        let mut got = vec![0; units.len()];
        backend.download(&bytes, &mut got)?;
        for (byte, unit) in got.iter().zip(&units) {
            assert_eq!(*byte, (255.0 * unit).round_ties_even() as u8, "byte of {unit}");
        }
        Ok(())
    };
    let reference = |x: Vec<f64>| x.iter().map(|x| (x * 1.5 / 2.0 + 0.5).clamp(0.0, 1.0)).collect();
    other_shape(feed, name, ELEMENT_LIMIT, dims.clone(), dims, run, reference)
}

// ---- rules beside the values ----

/// NaN and infinity in an input reach the output, through clamps, maxima and sums.
///
/// # Panics
/// One of them is swallowed.
pub fn nan_passes_through(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        let n = 70;
        for position in [0, 37, 69] {
            let mut data = vec![0.25; n];
            data[position] = f32::NAN;
            let x = put(backend, Place::Dense, &[1, 1, n], &data)?;
            assert!(!backend.all_finite(&x)?);
            let out = backend.alloc(&[1, 1, n], DType::F32)?;
            let must_be_nan = |what: &str| -> Result<()> {
                let got = fetch(backend, &out)?;
                assert!(got[position].is_nan(), "{what} made {} of NaN", got[position]);
                Ok(())
            };
            for activation in ACTIVATIONS {
                backend.activation(&x, activation, &out)?;
                must_be_nan(&format!("{activation:?}"))?;
            }
            backend.to_pixels(&x, &out)?;
            must_be_nan("to_pixels")?;
            backend.layer_norm(&x, None, 1e-5, None, &out)?;
            must_be_nan("layer_norm")?;
            backend.rms_norm(&x, None, 10, 1e-5, &out)?;
            must_be_nan("rms_norm")?;
            let ones = vec![1.0; n * n];
            let weights = prepare(
                backend,
                &[
                    (WeightKind::Matrix, &[n, n], &ones),
                    (WeightKind::Vector, &[n], &ones[..n]),
                    (
                        WeightKind::Conv { stride: 1 },
                        &[n, n, 3, 3],
                        &vec![1.0; n * n * 9],
                    ),
                ],
            )?;
            backend.linear(&x, &weights[0], &Epilogue::default(), &out)?;
            must_be_nan("linear")?;
            let image = x.reshape(&[1, 1, 1, n])?;
            let image_out = out.reshape(&[1, 1, 1, n])?;
            let conv_spec = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            backend.conv2d(&image, &weights[2], &conv_spec, &Epilogue::default(), &image_out)?;
            must_be_nan("conv2d")?;
            backend.group_norm(&x, (&weights[1], &weights[1]), 10, 1e-5, Activation::Silu, &out)?;
            must_be_nan("group_norm")?;
            // The NaN as the query, a key and a value, among keys that are not.
            let rows = |nan_row: usize| -> Result<Tensor> {
                let mut rows = vec![0.5; 3 * n];
                rows[nan_row * n + position] = f32::NAN;
                put(backend, Place::Dense, &[1, 3, n], &rows)
            };
            let plain = put(backend, Place::Dense, &[1, 3, n], &vec![0.5; 3 * n])?;
            let spec = AttentionSpec {
                n_heads: 1,
                n_kv_heads: 1,
                scale: 0.1,
                is_causal: false,
                bias: None,
            };
            for nan_row in 0..3 {
                backend.attention(&x, &plain, &plain, &spec, &out)?;
                must_be_nan("attention, query")?;
                let query = put(backend, Place::Dense, &[1, 1, n], &vec![0.5; n])?;
                backend.attention(&query, &rows(nan_row)?, &plain, &spec, &out)?;
                must_be_nan("attention, key")?;
                backend.attention(&query, &plain, &rows(nan_row)?, &spec, &out)?;
                must_be_nan("attention, value")?;
            }
        }
        for bad in [f32::INFINITY, f32::NEG_INFINITY] {
            let x = put(backend, Place::Columns, &[2, 3], &[1.0, 2.0, 3.0, 4.0, bad, 5.0])?;
            assert!(!backend.all_finite(&x)?);
        }
        let largest = put(
            backend,
            Place::Both,
            &[1, 2, 3],
            &[f32::MAX, f32::MIN, 0.0, 1e-40, -0.0, 1.0],
        )?;
        assert!(backend.all_finite(&largest)?);
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Variances of data whose mean is 200 times its spread come out right: a difference of squares would lose four more digits.
///
/// # Panics
/// They do not.
pub fn norms_hold_with_a_large_mean(backend: &dyn Backend) {
    let (rows, n, n_groups) = (300, 96, 8);
    let data: Vec<f32> = Feed(9).values(0, 0, rows * n).iter().map(|x| 100.0 + x).collect();
    let normal = |group: &dyn Fn(usize) -> usize| -> Vec<f64> {
        let mut sums: HashMap<usize, [f64; 3]> = HashMap::new();
        for (i, x) in data.iter().enumerate() {
            let sum = sums.entry(group(i)).or_default();
            *sum = [
                sum[0] + 1.0,
                sum[1] + f64::from(*x),
                sum[2] + f64::from(*x - 100.0).powi(2),
            ];
        }
        let value = |(i, x): (usize, &f32)| {
            let [count, sum, squares] = sums[&group(i)];
            let mean = sum / count;
            (f64::from(*x) - mean) / (squares / count - (mean - 100.0).powi(2) + 1e-5).sqrt()
        };
        data.iter().enumerate().map(value).collect()
    };
    let outcome = (|| -> Result<()> {
        let x = put(backend, Place::Dense, &[1, rows, n], &data)?;
        let out = backend.alloc(&[1, rows, n], DType::F32)?;
        let ones = vec![1.0; n];
        let weights = prepare(
            backend,
            &[
                (WeightKind::Vector, &[n], &ones),
                (WeightKind::Vector, &[n], &vec![0.0; n]),
            ],
        )?;
        let compare = |what: &str, expected: &[f64]| -> Result<()> {
            let got = fetch(backend, &out)?;
            let distance: f64 = got
                .iter()
                .zip(expected)
                .map(|(a, b)| (f64::from(*a) - b).powi(2))
                .sum();
            let error = (distance / expected.iter().map(|x| x * x).sum::<f64>()).sqrt();
            // The mean itself is rounded to 4e-6.
            assert!(error < 3e-5, "{what}: {error:.1e}");
            Ok(())
        };
        backend.layer_norm(&x, None, 1e-5, None, &out)?;
        compare("layer_norm", &normal(&|i| i / n))?;
        backend.group_norm(
            &x,
            (&weights[0], &weights[1]),
            n_groups,
            1e-5,
            Activation::None,
            &out,
        )?;
        compare("group_norm", &normal(&|i| i % n / (n / n_groups)))
    })();
    outcome.expect("sound operands");
}

/// Activations stay defined far out.
///
/// # Panics
/// One of them is not.
pub fn activations_hold_in_the_tails(backend: &dyn Backend) {
    let inputs = [
        -3e38, -1e30, -1000.0, -200.0, -90.0, -50.0, 50.0, 90.0, 200.0, 1000.0, 1e30, 3e38f32,
    ];
    let outcome = (|| -> Result<()> {
        let x = put(backend, Place::Dense, &[1, inputs.len()], &inputs)?;
        let out = backend.alloc(&[1, inputs.len()], DType::F32)?;
        for activation in ACTIVATIONS {
            backend.activation(&x, activation, &out)?;
            for (x, y) in inputs.iter().zip(fetch(backend, &out)?) {
                let expected = if activation == Activation::None || *x > 0.0 {
                    *x
                } else {
                    0.0
                };
                // The true value in the lower tail is below 1e-18 for all of these.
                let is_close = (y - expected).abs() <= expected.abs() * 1e-6 + 1e-18;
                assert!(is_close, "{activation:?} of {x} is {y}");
            }
        }
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Conversions of dtypes round to nearest even, and float bits survive a copy of the same dtype.
///
/// # Panics
/// They do not.
pub fn copies_convert_dtypes(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        // 1 + 2^-8 lies between the bf16 neighbours 1 and 1 + 2^-7 and goes to the even one; likewise 1 + 3 * 2^-8. For f16 the unit
        // is 2^-10.
        let values = [
            1.0,
            1.0 + 2f32.powi(-8),
            1.0 + 3.0 * 2f32.powi(-8),
            1.0 + 2f32.powi(-11),
            1.0 + 3.0 * 2f32.powi(-11),
            -0.0,
        ];
        let bf16 = [0x3f80u16, 0x3f80, 0x3f82, 0x3f80, 0x3f80, 0x8000];
        let f16 = [0x3c00u16, 0x3c04, 0x3c0c, 0x3c00, 0x3c02, 0x8000];
        let x = put(backend, Place::Columns, &[2, 3], &values)?;
        for (dtype, expected) in [(DType::BF16, bf16), (DType::F16, f16)] {
            let narrow = backend.alloc(&[2, 3], dtype)?;
            backend.copy(&x, &narrow)?;
            let mut bytes = [0; 12];
            backend.download(&narrow, &mut bytes)?;
            let got: Vec<u16> = bytes
                .chunks_exact(2)
                .map(|x| u16::from_le_bytes([x[0], x[1]]))
                .collect();
            assert_eq!(got, expected, "{dtype}");
            let back = backend.alloc(&[2, 3], DType::F32)?;
            backend.copy(&narrow, &back)?;
            let other = backend.alloc(&[2, 3], dtype)?;
            backend.copy(&back, &other)?;
            let mut again = [0; 12];
            backend.download(&other, &mut again)?;
            assert_eq!(again, bytes, "{dtype} there and back");
        }
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Wrong operands are typed errors: shapes, dtypes, aliases, kinds of weights.
///
/// # Panics
/// One of them is accepted, or refused with another error.
pub fn wrong_operands_are_refused(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        let new = |dims: &[usize]| backend.alloc(dims, DType::F32);
        let weights = prepare(
            backend,
            &[
                (WeightKind::Matrix, &[5, 4], &[0.5; 20]),
                (WeightKind::Vector, &[5], &[0.5; 5]),
                (WeightKind::Conv { stride: 1 }, &[5, 4, 3, 3], &[0.5; 180]),
                (WeightKind::Table, &[6, 4], &[0.5; 24]),
            ],
        )?;
        let [matrix, vector, conv, table] = &weights[..] else {
            unreachable!("four specs")
        };
        let plain = Epilogue::default();
        let (x, out) = (new(&[2, 3, 4])?, new(&[2, 3, 5])?);
        backend.fill(&x, 0.5)?;
        backend.fill(&out, 0.5)?;
        let same = ConvSpec {
            stride: 1,
            padding: [1; 4],
            upsample: 1,
        };
        let (image, image_out) = (new(&[1, 3, 3, 4])?, new(&[1, 3, 3, 5])?);
        let half = backend.alloc(&[2, 3, 5], DType::BF16)?;
        let read_only = backend.weight_tensor(vector)?;
        let attention = AttentionSpec {
            n_heads: 2,
            n_kv_heads: 1,
            scale: 1.0,
            is_causal: false,
            bias: None,
        };
        let (q, kv) = (new(&[1, 3, 8])?, new(&[1, 5, 4])?);
        let ids = put_ints(backend, &[2], &[0, 6])?;

        use Refusal::*;
        let refusals: Vec<(&str, Refusal, Result<()>)> = vec![
            (
                "linear, k",
                Shape,
                backend.linear(&new(&[2, 3, 6])?, matrix, &plain, &out),
            ),
            (
                "linear, rows",
                Shape,
                backend.linear(&x, matrix, &plain, &new(&[2, 2, 5])?),
            ),
            (
                "linear, n",
                Shape,
                backend.linear(&x, matrix, &plain, &new(&[2, 3, 6])?),
            ),
            ("linear, kind", Operand, backend.linear(&x, conv, &plain, &out)),
            ("linear, dtype", DTyped, backend.linear(&x, matrix, &plain, &half)),
            (
                "linear, read-only",
                Alias,
                backend.linear(&new(&[4])?, matrix, &plain, &read_only),
            ),
            (
                "linear, gate",
                Shape,
                backend.linear(
                    &x,
                    matrix,
                    &Epilogue {
                        gate: Some(&new(&[3, 5])?),
                        ..plain
                    },
                    &out,
                ),
            ),
            (
                "linear, gate is out",
                Alias,
                backend.linear(
                    &x,
                    matrix,
                    &Epilogue {
                        gate: Some(&out.narrow(0, 0, 1)?.reshape(&[3, 5])?.narrow(0, 0, 1)?),
                        ..plain
                    },
                    &out,
                ),
            ),
            (
                "linear, bias",
                Operand,
                backend.linear(
                    &x,
                    matrix,
                    &Epilogue {
                        bias: Some(matrix),
                        ..plain
                    },
                    &out,
                ),
            ),
            ("linear, residual beside out", Alias, {
                let rows = new(&[2, 4, 5])?;
                let epilogue = Epilogue {
                    residual: Some(&rows.narrow(1, 0, 3)?),
                    ..plain
                };
                backend.linear(&x, matrix, &epilogue, &rows.narrow(1, 1, 3)?)
            }),
            (
                "conv2d, channels",
                Shape,
                backend.conv2d(&new(&[1, 3, 3, 5])?, conv, &same, &plain, &image_out),
            ),
            (
                "conv2d, out",
                Shape,
                backend.conv2d(&image, conv, &same, &plain, &new(&[1, 3, 4, 5])?),
            ),
            (
                "conv2d, stride",
                Operand,
                backend.conv2d(&image, conv, &ConvSpec { stride: 2, ..same }, &plain, &image_out),
            ),
            (
                "conv2d, upsample",
                Shape,
                backend.conv2d(
                    &image,
                    conv,
                    &ConvSpec { upsample: 3, ..same },
                    &plain,
                    &image_out,
                ),
            ),
            (
                "conv2d, too small",
                Shape,
                backend.conv2d(
                    &new(&[1, 2, 2, 4])?,
                    conv,
                    &ConvSpec {
                        padding: [0; 4],
                        ..same
                    },
                    &plain,
                    &image_out,
                ),
            ),
            (
                "conv2d, kind",
                Operand,
                backend.conv2d(&image, vector, &same, &plain, &image_out),
            ),
            (
                "attention, heads",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        n_heads: 3,
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "attention, no heads",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        n_heads: 0,
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "attention, causal",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        is_causal: true,
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "attention, values",
                Shape,
                backend.attention(&q, &kv, &new(&[1, 4, 4])?, &attention, &new(&[1, 3, 8])?),
            ),
            (
                "attention, in place",
                Alias,
                backend.attention(&q, &kv, &kv, &attention, &q),
            ),
            (
                "attention, bias",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        bias: Some(&new(&[1, 2, 3, 4])?),
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "layer_norm, out",
                Shape,
                backend.layer_norm(&x, None, 1e-5, None, &new(&[2, 4, 3])?),
            ),
            (
                "layer_norm, weight",
                Shape,
                backend.layer_norm(&x, Some((vector, None)), 1e-5, None, &new(&[2, 3, 4])?),
            ),
            ("rms_norm, group", Shape, backend.rms_norm(&x, None, 3, 1e-5, &x)),
            (
                "rms_norm, empty group",
                Shape,
                backend.rms_norm(&x, None, 0, 1e-5, &x),
            ),
            (
                "group_norm, groups",
                Shape,
                backend.group_norm(&out, (vector, vector), 2, 1e-5, Activation::None, &out),
            ),
            (
                "add, broadcast",
                Shape,
                backend.add(&x, &new(&[2])?, &new(&[2, 3, 4])?),
            ),
            (
                "add, second in place",
                Alias,
                backend.add(&new(&[2, 3, 4])?, &x, &x),
            ),
            (
                "gated, odd",
                Shape,
                backend.gated(
                    &out,
                    Activation::Silu,
                    GateOrder::FirstActivated,
                    &new(&[2, 3, 2])?,
                ),
            ),
            (
                "rope, angles",
                Shape,
                backend.rope(&x, &new(&[3, 3])?, &new(&[3, 3])?, RopeStyle::Halves, &x),
            ),
            (
                "rope, tokens",
                Shape,
                backend.rope(&x, &new(&[2, 2])?, &new(&[2, 2])?, RopeStyle::Halves, &x),
            ),
            (
                "embedding, id",
                Shape,
                backend.embedding(&ids, table, &new(&[2, 4])?),
            ),
            (
                "embedding, negative id",
                Shape,
                backend.embedding(&put_ints(backend, &[1], &[-1])?, table, &new(&[1, 4])?),
            ),
            (
                "embedding, kind",
                Operand,
                backend.embedding(&ids, matrix, &new(&[2, 4])?),
            ),
            (
                "embedding, ids",
                DTyped,
                backend.embedding(&new(&[2])?, table, &new(&[2, 4])?),
            ),
            (
                "gather_rows, row",
                Shape,
                backend.gather_rows(&x, &put_ints(backend, &[2], &[0, 3])?, &new(&[2, 4])?),
            ),
            (
                "patchify, sides",
                Shape,
                backend.patchify(&image, 2, PatchOrder::SpatialFirst, &new(&[1, 1, 16])?),
            ),
            (
                "permute, axes",
                Shape,
                backend.permute(&x, &[0, 1, 1], &new(&[2, 3, 3])?),
            ),
            (
                "permute, out",
                Shape,
                backend.permute(&x, &[0, 2, 1], &new(&[2, 3, 4])?),
            ),
            (
                "upsample_nearest, out",
                Shape,
                backend.upsample_nearest(&image, &new(&[1, 6, 5, 4])?),
            ),
            ("copy, shape", Shape, backend.copy(&x, &new(&[2, 3, 5])?)),
            (
                "copy, to integers",
                DTyped,
                backend.copy(&x, &backend.alloc(&[2, 3, 4], DType::I32)?),
            ),
            ("copy, overlap", Alias, {
                let rows = new(&[4, 5])?;
                backend.copy(&rows.narrow(0, 0, 2)?, &rows.narrow(0, 1, 2)?)
            }),
            ("fill, read-only", Alias, backend.fill(&read_only, 1.0)),
            ("all_finite, dtype", DTyped, backend.all_finite(&ids).map(|_| ())),
            (
                "timestep_embedding, odd",
                Shape,
                backend.timestep_embedding(
                    &new(&[2])?,
                    &TimestepSpec {
                        flip_sin_to_cos: true,
                        downscale_freq_shift: 0.0,
                        scale: 1.0,
                        max_period: 1e4,
                    },
                    &new(&[2, 5])?,
                ),
            ),
            (
                "upload, length",
                Shape,
                backend.upload(&[0; 7], &[2], DType::F32).map(|_| ()),
            ),
            ("download, length", Shape, backend.download(&x, &mut [0; 7])),
            (
                "weight_tensor, kind",
                Operand,
                backend.weight_tensor(matrix).map(|_| ()),
            ),
            (
                "alloc, zero",
                Shape,
                backend.alloc(&[2, 0], DType::F32).map(|_| ()),
            ),
        ];
        for (what, expected, outcome) in refusals {
            let got = match &outcome {
                Err(TensorError::Shape { .. }) => Some(Shape),
                Err(TensorError::DType { .. }) => Some(DTyped),
                Err(TensorError::Alias { .. }) => Some(Alias),
                Err(TensorError::Operand { .. }) => Some(Operand),
                Err(_) | Ok(()) => None,
            };
            assert_eq!(got, Some(expected), "{what}: {outcome:?}");
        }
        Ok(())
    })();
    outcome.expect("sound operands around the wrong ones");
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    Shape,
    DTyped,
    Alias,
    Operand,
}

/// Weights of every source dtype arrive, concatenations too, and what is wrong with a checkpoint is said in full.
///
/// # Panics
/// They do not, or it is not.
pub fn weights_come_from_any_float(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        // Numbers that all four dtypes hold: n / 8 for |n| <= 64.
        let mut random = Random::new(3);
        let (rows, k) = ([3, 40, 2, 33], 37);
        let n: usize = rows.iter().sum();
        let data: Vec<f32> = (0..n * k)
            .map(|_| random.within(0, 128) as f32 / 8.0 - 8.0)
            .collect();
        let mut source = MemorySource::default();
        let mut start = 0;
        let dtypes = [
            SourceDType::F32,
            SourceDType::F64,
            SourceDType::BF16,
            SourceDType::F16,
        ];
        for (i, (n_rows, dtype)) in rows.into_iter().zip(dtypes).enumerate() {
            let part = &data[start * k..(start + n_rows) * k];
            let bytes = part.iter().flat_map(|x| encode(dtype, *x)).collect();
            // A pointwise convolution counts as a matrix.
            let shape = if i % 2 == 0 {
                vec![n_rows, k]
            } else {
                vec![n_rows, k, 1, 1]
            };
            source.insert_bytes(&format!("part.{i}"), dtype, &shape, bytes);
            start += n_rows;
        }
        let names = ["part.0", "part.1", "part.2", "part.3"];
        let specs = [spec(&names, WeightKind::Matrix, &[n, k])];
        let mut last = (0, 0);
        let mut progress = |done: u64, total: u64| {
            assert!(done >= last.0 && done <= total, "{done} of {total}");
            last = (done, total);
        };
        let prepared = backend.prepare(&specs, PrepareInput::Build(&source), &mut progress)?;
        assert!(last.0 == last.1 && last.1 > 0, "progress ended at {last:?}");
        assert!(prepared.n_bytes >= (n * k) as u64, "{} bytes", prepared.n_bytes);
        let x = put(backend, Place::Dense, &[1, k], &vec![1.0; k])?;
        let out = backend.alloc(&[1, n], DType::F32)?;
        backend.linear(&x, &prepared.weights[0], &Epilogue::default(), &out)?;
        for (row, got) in data.chunks_exact(k).zip(fetch(backend, &out)?) {
            // Sums of eighths are exact.
            assert_eq!(row.iter().sum::<f32>(), got);
        }

        let bad = [
            spec(&["part.0"], WeightKind::Matrix, &[3, k]),
            spec(&["missing.1"], WeightKind::Vector, &[4]),
            spec(&["part.2"], WeightKind::Matrix, &[2, k + 1]),
            spec(&["part.0", "part.2"], WeightKind::Matrix, &[7, k]),
        ];
        match backend.prepare(&bad, PrepareInput::Build(&source), &mut |_, _| {}) {
            Err(error @ TensorError::Weight { .. }) => {
                let text = error.to_string();
                for expected in [
                    "missing.1",
                    "part.2",
                    "part.0 + part.2",
                    "[5, 37]",
                    "[7, 37]",
                    "[2, 38]",
                ] {
                    assert!(text.contains(expected), "{expected} is not in: {text}");
                }
            }
            outcome => panic!("accepted or other error: {outcome:?}"),
        }
        let many: Vec<WeightSpec> = (0..40)
            .map(|i| spec(&[&format!("gone.{i}")], WeightKind::Vector, &[4]))
            .collect();
        let error = backend
            .prepare(&many, PrepareInput::Build(&source), &mut |_, _| {})
            .map(|_| ());
        let text = error.expect_err("nothing is there").to_string();
        assert!(text.contains("and 30 more") && text.len() < 1000, "{text}");
        Ok(())
    })();
    outcome.expect("sound weights");
}

fn encode(dtype: SourceDType, x: f32) -> Vec<u8> {
    match dtype {
        SourceDType::F64 => f64::from(x).to_le_bytes().to_vec(),
        SourceDType::F32 => x.to_le_bytes().to_vec(),
        SourceDType::BF16 => ((x.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        SourceDType::F16 => {
            // Exact for the numbers of the test, which are normal and short.
            if x == 0.0 {
                return vec![0, 0];
            }
            let bits = x.to_bits();
            let exponent = ((bits >> 23) & 0xff) as i32 - 127 + 15;
            let half =
                ((bits >> 16) & 0x8000) as u16 | ((exponent as u16) << 10) | ((bits >> 13) & 0x3ff) as u16;
            half.to_le_bytes().to_vec()
        }
    }
}

/// What one rank built, another takes over with bit-identical results; anything else is refused. Does nothing for a backend whose
/// weights are not shared.
///
/// # Panics
/// Results differ, or a wrong block is taken.
pub fn shared_weights_are_the_same(make: &dyn Fn() -> Box<dyn Backend>) {
    let (first, second) = (make(), make());
    let outcome = (|| -> Result<()> {
        let mut random = Random::new(11);
        let mut source = MemorySource::default();
        let shapes: [(&str, WeightKind, &[usize]); 4] = [
            ("m", WeightKind::Matrix, &[40, 64]),
            ("c", WeightKind::Conv { stride: 1 }, &[48, 64, 3, 3]),
            ("v", WeightKind::Vector, &[48]),
            ("t", WeightKind::Table, &[9, 5]),
        ];
        for (name, _, shape) in shapes {
            let data: Vec<f32> = (0..shape.iter().product()).map(|_| random.value()).collect();
            source.insert(name, shape, &data);
        }
        let specs = shapes.map(|(name, kind, shape)| spec(&[name], kind, shape));
        let built = first.prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {})?;
        let Some(fd) = &built.shared else { return Ok(()) };
        let copy = || fd.try_clone().expect("a descriptor");
        let taken = second.prepare(&specs, PrepareInput::Shared(copy()), &mut |_, _| {})?;
        let results = |backend: &dyn Backend, prepared: &Prepared| -> Result<Vec<f32>> {
            let [m, c, v, t] = &prepared.weights[..] else {
                unreachable!("four specs")
            };
            let data = Feed(5).values(0, 0, 2 * 6 * 7 * 64);
            let x = put(backend, Place::Dense, &[2, 6, 7, 64], &data)?;
            let out = backend.alloc(&[2, 6, 7, 48], DType::F32)?;
            let conv_spec = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            backend.conv2d(
                &x,
                c,
                &conv_spec,
                &Epilogue {
                    bias: Some(v),
                    ..Epilogue::default()
                },
                &out,
            )?;
            let product = backend.alloc(&[2, 6, 7, 40], DType::F32)?;
            backend.linear(&x, m, &Epilogue::default(), &product)?;
            let table = backend.weight_tensor(t)?;
            Ok([
                fetch(backend, &out)?,
                fetch(backend, &product)?,
                fetch(backend, &table)?,
            ]
            .concat())
        };
        assert_eq!(results(&*first, &built)?, results(&*second, &taken)?);

        let mut other = specs.clone();
        other[3].shape = vec![5, 9];
        let mut renamed = specs.clone();
        renamed[0].sources[0].push('x');
        for wrong in [&other[..], &renamed, &specs[..3]] {
            let outcome = second.prepare(wrong, PrepareInput::Shared(copy()), &mut |_, _| {});
            assert!(
                matches!(outcome, Err(TensorError::SharedWeights(_))),
                "{outcome:?}"
            );
        }
        let file = std::fs::File::open("/proc/self/exe").expect("this program");
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().expect("sockets");
        for hostile in [file.into(), std::os::fd::OwnedFd::from(socket)] {
            let outcome = second.prepare(&specs, PrepareInput::Shared(hostile), &mut |_, _| {});
            assert!(
                matches!(outcome, Err(TensorError::SharedWeights(_))),
                "{outcome:?}"
            );
        }
        // The other holder's weights outlive the builder.
        let expected = results(&*second, &taken)?;
        drop(built);
        assert_eq!(results(&*second, &taken)?, expected);
        Ok(())
    })();
    outcome.expect("sound weights");
}

/// Steady use takes no more memory, and what is freed is counted as free.
///
/// # Panics
/// It does, or is not.
pub fn memory_is_counted(backend: &dyn Backend) {
    let before = backend.memory().used_bytes;
    let x = backend.alloc(&[3, 1000], DType::F32).expect("12 kB");
    let used = backend.memory();
    assert!(
        used.used_bytes >= before + 12_000 && used.peak_bytes >= used.used_bytes,
        "{used:?}"
    );
    let view = x.narrow(0, 1, 1).expect("inside");
    drop(x);
    assert_eq!(
        backend.memory().used_bytes,
        used.used_bytes,
        "a view keeps the memory"
    );
    drop(view);
    assert_eq!(backend.memory().used_bytes, before);
    let outcome = backend.alloc(&[1 << 30, 1 << 20], DType::F32);
    assert!(
        matches!(outcome, Err(TensorError::OutOfMemory { .. })),
        "{outcome:?}"
    );
}
