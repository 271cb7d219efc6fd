//! Operands of cases: random data, how it lies in memory and what lies around it; weights from a checkpoint in memory.

use denoised_tensor::{
    Backend, DType, Precision, PrepareInput, Result, SourceDType, SourceError, SourceTensor, Tensor, Weight,
    WeightKind, WeightSource, WeightSpec,
};
use half::{bf16, f16};
use std::{borrow::Cow, collections::HashMap};

/// What lies around outputs.
pub(super) const MARK: f32 = 12_288.0; // The same number in all float dtypes.

/// Random numbers from a seed (splitmix64; Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
    dtype: DType,
}

impl Random {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Self {
        Self::of(seed, DType::F32)
    }

    /// Starts a sequence for cases whose operands have this dtype.
    pub fn of(seed: u64, dtype: DType) -> Self {
        Self { state: seed, dtype }
    }

    /// Operands for a case.
    pub(super) fn feed(&mut self) -> Feed {
        Feed {
            seed: self.next(),
            dtype: self.dtype,
        }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between `low` and `high`, both included.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0, choices.len() - 1)]
    }

    /// True half of the time.
    pub fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Between -1 and 1.
    pub(super) fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Where a case's numbers come from: a sequence per operand and batch element, of numbers that the dtype holds exactly.
#[derive(Clone, Copy, Debug)]
pub(super) struct Feed {
    pub(super) seed: u64,
    pub(super) dtype: DType,
}

impl Feed {
    /// For operands that are f32 whatever the others are.
    pub(super) fn in_f32(self) -> Self {
        Self {
            dtype: DType::F32,
            ..self
        }
    }

    pub(super) fn random(self, operand: u64, element: u64) -> Random {
        let mut random = Random::new(self.seed ^ operand.wrapping_mul(0x51_7cc1_b727_220b) ^ (element << 32));
        random.next();
        random
    }

    pub(super) fn values(self, operand: u64, element: u64, n: usize) -> Vec<f32> {
        let mut random = self.random(operand, element);
        (0..n).map(|_| rounded(self.dtype, random.value())).collect()
    }

    /// The layout of an operand; the same for every batch.
    pub(super) fn place(self, operand: u64) -> Place {
        self.random(operand, u64::from(u32::MAX)).pick(&[
            Place::Dense,
            Place::Columns,
            Place::Tokens,
            Place::Both,
        ])
    }

    /// An operand `[elements, dims..]`.
    pub(super) fn put(
        self,
        backend: &dyn Backend,
        operand: u64,
        elements: &[u64],
        dims: &[usize],
    ) -> Result<Tensor> {
        let n = dims.iter().product();
        let data: Vec<f32> = elements
            .iter()
            .flat_map(|element| self.values(operand, *element, n))
            .collect();
        let dims = with_batch(elements, dims);
        put_as(backend, self.dtype, self.place(operand), &dims, &data)
    }
}

pub(super) fn with_batch(elements: &[u64], dims: &[usize]) -> Vec<usize> {
    [&[elements.len()], dims].concat()
}

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Dense,
    /// Columns of longer rows.
    Columns,
    /// A range of dimension 1.
    Tokens,
    Both,
}

/// Around the operand: columns before and behind, tokens before and behind.
pub(super) const MARGINS: [usize; 4] = [2, 3, 1, 2];

impl Place {
    pub(super) fn whole(self, dims: &[usize]) -> Vec<usize> {
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

    pub(super) fn narrow(self, whole: &Tensor, dims: &[usize]) -> Result<Tensor> {
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
    pub(super) fn surround(self, dims: &[usize], data: &[f32], around: f32) -> Vec<f32> {
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

pub(super) fn bytes_of(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The nearest number of the dtype, ties to even.
pub(super) fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Elements of a float dtype in memory.
pub(super) fn encoded(dtype: DType, data: &[f32]) -> Vec<u8> {
    match dtype {
        DType::BF16 => data
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
        DType::F16 => data
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect(),
        _ => bytes_of(data),
    }
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pairs = bytes.chunks_exact(2).map(|x| [x[0], x[1]]);
    match dtype {
        DType::BF16 => pairs.map(|x| bf16::from_le_bytes(x).to_f32()).collect(),
        DType::F16 => pairs.map(|x| f16::from_le_bytes(x).to_f32()).collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]))
            .collect(),
    }
}

/// An operand that is f32 whatever the others are.
pub(super) fn put(backend: &dyn Backend, place: Place, dims: &[usize], data: &[f32]) -> Result<Tensor> {
    put_as(backend, DType::F32, place, dims, data)
}

pub(super) fn put_as(
    backend: &dyn Backend,
    dtype: DType,
    place: Place,
    dims: &[usize],
    data: &[f32],
) -> Result<Tensor> {
    let whole = place.surround(dims, data, f32::NAN);
    let whole = backend.upload(&encoded(dtype, &whole), &place.whole(dims), dtype)?;
    place.narrow(&whole, dims)
}

pub(super) fn put_ints(backend: &dyn Backend, dims: &[usize], data: &[i32]) -> Result<Tensor> {
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
    backend.upload(&bytes, dims, DType::I32)
}

/// The elements of a tensor of floats.
pub fn fetch(backend: &dyn Backend, x: &Tensor) -> Result<Vec<f32>> {
    let mut bytes = vec![0; x.shape().n_elements() * x.dtype().size_bytes()];
    backend.download(x, &mut bytes)?;
    Ok(decoded(x.dtype(), &bytes))
}

/// An output in its surroundings.
pub(super) struct Output {
    whole: Tensor,
    pub(super) view: Tensor,
    place: Place,
}

impl Output {
    pub(super) fn new(backend: &dyn Backend, dtype: DType, place: Place, dims: &[usize]) -> Result<Self> {
        let n = dims.iter().product();
        Self::holding(backend, dtype, place, dims, &vec![f32::NAN; n])
    }

    /// For ops in place.
    pub(super) fn holding(
        backend: &dyn Backend,
        dtype: DType,
        place: Place,
        dims: &[usize],
        data: &[f32],
    ) -> Result<Self> {
        let whole = place.surround(dims, data, MARK);
        let whole = backend.upload(&encoded(dtype, &whole), &place.whole(dims), dtype)?;
        let view = place.narrow(&whole, dims)?;
        Ok(Self { whole, view, place })
    }

    /// The results per batch element, after a look at the surroundings.
    pub(super) fn results(&self, backend: &dyn Backend) -> Result<Vec<Vec<f32>>> {
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

pub(super) fn wide(data: &[f32]) -> Vec<f64> {
    data.iter().map(|x| f64::from(*x)).collect()
}

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
    pub(super) fn entry(&self, name: &str) -> Result<&(SourceDType, Vec<usize>, Vec<u8>), SourceError> {
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

pub(super) fn spec(names: &[&str], kind: WeightKind, shape: &[usize]) -> WeightSpec {
    WeightSpec {
        sources: names.iter().map(|name| (*name).to_owned()).collect(),
        kind,
        shape: shape.to_vec(),
        precision: Precision::Device,
    }
}

pub(super) fn prepare(
    backend: &dyn Backend,
    weights: &[(WeightKind, &[usize], &[f32])],
) -> Result<Vec<Weight>> {
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
