//! Weights in the form that the kernels want, in one block that all ranks of a host share.
//!
//! The block is a header and then each weight on a 64-byte boundary: f32 in panels ([`crate::gemm`]), as 36 Winograd matrices
//! ([`crate::winograd`]), or as it is. The header says for which specs, instruction set and options it was made.
//!
//! R1. The layout follows from the specs, the instruction set and the options alone, so that whoever takes the block finds everything
//!     without reading an offset from it.
//! R2. Everything is checked before the block exists: all tensors are there and have their shape, and the memory is available.
//! R3. The block is written once, by the process that builds it, and then sealed: no process can write it any more.
//! R4. A weight handle is used only if its set is ours, its index is inside and its kind and shape are those of its spec.

use crate::{
    Context, Isa,
    gemm::Panels,
    memory::ALIGN,
    operand::Ptr,
    simd::{Kernel, Simd, with_isa},
    winograd,
};
use denoised_os::memfd::{FrozenMapping, FrozenMemory, MemoryBuilder, MemoryError};
use denoised_tensor::{
    Buffer, PrepareInput, Prepared, Result, SourceDType, SourceTensor, TensorError, Weight, WeightKind,
    WeightSet, WeightSource, WeightSpec,
};
use std::{any::Any, os::fd::OwnedFd, sync::Arc};

/// First bytes of a block.
const MAGIC: [u8; 8] = *b"dnsd-cpu";

/// Counts the changes of the layout; blocks of another version are refused.
const LAYOUT_VERSION: u32 = 1;

/// Bytes of the header: magic, version, instruction set, options, total length, fingerprint; zeros up to a cache line.
const HEADER_BYTES: usize = 64;

/// Most elements of one weight: with the padding of a panel and 36 matrices its bytes still fit in 64 bits many times over.
const MAX_ELEMENTS: usize = 1 << 40;

/// Offenders named in an error; the rest is counted.
const MAX_NAMED: usize = 10;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// f32 in row-major order.
    Plain,
    /// Panels of `n` columns of depth `k`.
    Packed { n: usize, k: usize },
    /// 36 times panels.
    Winograd { n: usize, k: usize },
}

#[derive(Clone, Debug)]
struct Entry {
    kind: WeightKind,
    shape: Arc<[usize]>,
    form: Form,
    /// In bytes from the start of the block.
    offset: usize,
    len_bytes: usize,
}

/// Where everything lies (R1).
#[derive(Debug)]
struct Layout {
    entries: Vec<Entry>,
    total_bytes: usize,
    header: [u8; HEADER_BYTES],
}

impl Layout {
    fn new(specs: &[WeightSpec], isa: Isa, use_winograd: bool) -> Result<Self> {
        let (nr, lanes) = with_isa!(isa, S => (S::NR, S::LANES));
        let mut end = HEADER_BYTES;
        let mut entries = Vec::with_capacity(specs.len());
        for spec in specs {
            let form = form_of(spec, use_winograd)?;
            let n_elements = match form {
                Form::Plain => spec.shape.iter().product(),
                Form::Packed { n, k } => Panels::n_elements(n, k, nr, lanes),
                Form::Winograd { n, k } => winograd::N_POSITIONS * Panels::n_elements(n, k, nr, lanes),
            };
            let offset = end.next_multiple_of(ALIGN);
            let len_bytes = n_elements * 4;
            end = offset
                .checked_add(len_bytes)
                .filter(|end| *end <= isize::MAX as usize)
                .ok_or_else(|| TensorError::OutOfMemory {
                    what: "the weights".to_owned(),
                    needed_bytes: u64::MAX,
                    available_bytes: 0,
                })?;
            entries.push(Entry {
                kind: spec.kind,
                shape: spec.shape.as_slice().into(),
                form,
                offset,
                len_bytes,
            });
        }
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&isa_id(isa).to_le_bytes());
        header[16..20].copy_from_slice(&u32::from(use_winograd).to_le_bytes());
        header[24..32].copy_from_slice(&(end as u64).to_le_bytes());
        header[32..48].copy_from_slice(&fingerprint(specs).to_le_bytes());
        Ok(Self {
            entries,
            total_bytes: end,
            header,
        })
    }
}

/// Stable numbers: they are in the header.
fn isa_id(isa: Isa) -> u32 {
    match isa {
        Isa::Portable => 0,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => 1,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => 2,
    }
}

/// FNV-1a of 128 bits over all that a spec says.
fn fingerprint(specs: &[WeightSpec]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut eat = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    };
    for spec in specs {
        let (kind, stride) = match spec.kind {
            WeightKind::Matrix => (0u64, 0),
            WeightKind::Conv { stride } => (1, stride as u64),
            WeightKind::Vector => (2, 0),
            WeightKind::Table => (3, 0),
        };
        for number in [kind, stride, spec.shape.len() as u64, spec.sources.len() as u64] {
            eat(&number.to_le_bytes());
        }
        for &extent in &spec.shape {
            eat(&(extent as u64).to_le_bytes());
        }
        for source in &spec.sources {
            eat(&(source.len() as u64).to_le_bytes());
            eat(source.as_bytes());
        }
    }
    hash
}

fn spec_name(spec: &WeightSpec) -> String {
    spec.sources.join(" + ")
}

fn form_of(spec: &WeightSpec, use_winograd: bool) -> Result<Form> {
    let n_elements = spec
        .shape
        .iter()
        .try_fold(1usize, |n, &extent| n.checked_mul(extent));
    let is_sound = n_elements.is_some_and(|n| n > 0 && n <= MAX_ELEMENTS) && !spec.sources.is_empty();
    let form = match (spec.kind, &*spec.shape) {
        _ if !is_sound => None,
        (WeightKind::Matrix, &[n, k]) => Some(Form::Packed { n, k }),
        (WeightKind::Conv { stride }, &[n, c_in, ..]) if spec.shape.len() == 4 && stride > 0 => {
            if use_winograd && winograd::pays(&spec.shape, stride) {
                Some(Form::Winograd { n, k: c_in })
            } else {
                Some(Form::Packed {
                    n,
                    k: spec.shape[1..].iter().product(),
                })
            }
        }
        (WeightKind::Vector, _) | (WeightKind::Table, &[_, _]) => Some(Form::Plain),
        _ => None,
    };
    form.ok_or_else(|| TensorError::Weight {
        name: spec_name(spec),
        detail: format!("{:?} is no shape of a {:?}", spec.shape, spec.kind),
    })
}

/// All weights of one `prepare`.
#[derive(Debug)]
pub(crate) struct CpuWeights {
    isa: Isa,
    entries: Vec<Entry>,
    block: FrozenMapping,
}

impl WeightSet for CpuWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A matrix or the kernel of a convolution as the kernels take it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operator {
    /// One product.
    Packed(Panels),
    /// One of the 36 matrices; the others follow.
    Winograd(Panels),
}

/// Prepared f32 in row-major order as memory of a tensor.
#[derive(Debug)]
pub(crate) struct WeightBuffer {
    set: Arc<dyn WeightSet>,
    offset: usize,
    len_bytes: usize,
}

impl WeightBuffer {
    /// First byte. Valid for reads of the buffer's length while the buffer lives.
    pub(crate) fn start(&self) -> *mut u8 {
        let set = self.set.as_any().downcast_ref::<CpuWeights>();
        set.map_or(std::ptr::null_mut(), |set| set.at(self.offset))
    }
}

impl Buffer for WeightBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
    fn is_writable(&self) -> bool {
        false
    }
}

impl CpuWeights {
    /// Never written through.
    fn at(&self, offset: usize) -> *mut u8 {
        self.block[offset..].as_ptr().cast_mut()
    }

    /// The entry behind a handle (R4).
    fn entry<'a>(op: &'static str, weight: &'a Weight, isa: Isa) -> Result<(&'a Self, &'a Entry)> {
        let set = weight
            .set
            .as_any()
            .downcast_ref::<Self>()
            .filter(|set| set.isa == isa);
        let entry = set.and_then(|set| set.entries.get(weight.spec_idx).map(|entry| (set, entry)));
        match entry {
            Some((set, entry)) if entry.kind == weight.kind && entry.shape == weight.shape => {
                Ok((set, entry))
            }
            _ => {
                let detail = format!(
                    "weight {:?} {:?} was not prepared by this backend",
                    weight.kind, weight.shape
                );
                Err(TensorError::Operand { op, detail })
            }
        }
    }
}

/// A matrix or the kernel of a convolution.
pub(crate) fn packed(op: &'static str, weight: &Weight, isa: Isa) -> Result<Operator> {
    let (set, entry) = CpuWeights::entry(op, weight, isa)?;
    let start = Ptr(set.at(entry.offset).cast::<f32>());
    match entry.form {
        Form::Packed { n, k } => Ok(Operator::Packed(Panels { start, n, k })),
        Form::Winograd { n, k } => Ok(Operator::Winograd(Panels { start, n, k })),
        Form::Plain => {
            let detail = format!("a {:?} is no right-hand side", weight.kind);
            Err(TensorError::Operand { op, detail })
        }
    }
}

/// A vector of `n_elements` f32.
pub(crate) fn vector(
    op: &'static str,
    name: &str,
    weight: &Weight,
    n_elements: usize,
    isa: Isa,
) -> Result<Ptr<f32>> {
    let (set, entry) = CpuWeights::entry(op, weight, isa)?;
    if weight.kind != WeightKind::Vector {
        let detail = format!("{name} is a {:?}, expected a vector", weight.kind);
        return Err(TensorError::Operand { op, detail });
    }
    if entry.shape.iter().product::<usize>() != n_elements {
        let detail = format!("{name} is {:?}, expected {n_elements} elements", entry.shape);
        return Err(TensorError::Shape { op, detail });
    }
    Ok(Ptr(set.at(entry.offset).cast()))
}

/// Rows of a table.
pub(crate) fn table(op: &'static str, weight: &Weight, isa: Isa) -> Result<Ptr<f32>> {
    let (set, entry) = CpuWeights::entry(op, weight, isa)?;
    if weight.kind != WeightKind::Table {
        let detail = format!("a {:?} is no table", weight.kind);
        return Err(TensorError::Operand { op, detail });
    }
    Ok(Ptr(set.at(entry.offset).cast()))
}

/// A vector or table as read-only memory.
pub(crate) fn plain(op: &'static str, weight: &Weight, isa: Isa) -> Result<WeightBuffer> {
    let (_, entry) = CpuWeights::entry(op, weight, isa)?;
    if entry.form != Form::Plain {
        let detail = format!("a {:?} cannot be read as a tensor", weight.kind);
        return Err(TensorError::Operand { op, detail });
    }
    Ok(WeightBuffer {
        set: Arc::clone(&weight.set),
        offset: entry.offset,
        len_bytes: entry.len_bytes,
    })
}

/// See [`denoised_tensor::Backend::prepare`].
pub(crate) fn prepare(
    context: &Context<'_>,
    isa: Isa,
    use_winograd: bool,
    specs: &[WeightSpec],
    input: PrepareInput<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Prepared> {
    let layout = Layout::new(specs, isa, use_winograd)?;
    let memory = match input {
        PrepareInput::Build(source) => build(context, isa, specs, &layout, source, progress)?,
        PrepareInput::Shared(fd) => take_over(fd, &layout)?,
    };
    let block = memory
        .map()
        .map_err(|error| memory_error(error, layout.total_bytes))?;
    check_header(&block, &layout)?;
    let fd = std::os::fd::AsFd::as_fd(&memory).try_clone_to_owned();
    let fd = fd.map_err(|error| TensorError::Device(format!("cannot copy a descriptor: {error}")))?;
    let set = Arc::new(CpuWeights {
        isa,
        entries: layout.entries,
        block,
    });
    let handle = |(spec_idx, entry): (usize, &Entry)| Weight {
        set: set.clone(),
        spec_idx,
        kind: entry.kind,
        shape: Arc::clone(&entry.shape),
    };
    let weights = set.entries.iter().enumerate().map(handle).collect();
    Ok(Prepared {
        weights,
        shared: Some(fd),
        n_bytes: layout.total_bytes as u64,
    })
}

fn memory_error(error: MemoryError, needed_bytes: usize) -> TensorError {
    match error {
        MemoryError::NoSpace { .. } | MemoryError::BadSize { .. } => TensorError::OutOfMemory {
            what: "the weights".to_owned(),
            needed_bytes: needed_bytes as u64,
            available_bytes: denoised_os::memory_budget::available().map_or(0, |available| available.bytes),
        },
        error => TensorError::Device(error.to_string()),
    }
}

fn take_over(fd: OwnedFd, layout: &Layout) -> Result<FrozenMemory> {
    let memory = FrozenMemory::from_fd(fd).map_err(|error| TensorError::SharedWeights(error.to_string()))?;
    if memory.bytes() != layout.total_bytes {
        let text = format!("{} bytes, expected {}", memory.bytes(), layout.total_bytes);
        return Err(TensorError::SharedWeights(text));
    }
    Ok(memory)
}

fn check_header(block: &[u8], layout: &Layout) -> Result<()> {
    let differs = |range: std::ops::Range<usize>| block.get(range.clone()) != Some(&layout.header[range]);
    let refuse = |text: &str| Err(TensorError::SharedWeights(text.to_owned()));
    if differs(0..8) {
        return refuse("not a block of CPU weights");
    }
    if differs(8..12) {
        return refuse("made by another version");
    }
    if differs(12..16) {
        return refuse("made for another instruction set");
    }
    if differs(16..24) {
        return refuse("made with other options");
    }
    if differs(24..HEADER_BYTES) {
        return refuse("made from other specifications");
    }
    Ok(())
}

fn build(
    context: &Context<'_>,
    isa: Isa,
    specs: &[WeightSpec],
    layout: &Layout,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<FrozenMemory> {
    check_sources(specs, source)?;
    let total_bytes = layout.total_bytes;
    denoised_os::memory_budget::check("the weights", total_bytes as u64).map_err(|error| {
        TensorError::OutOfMemory {
            what: error.what,
            needed_bytes: error.needed_bytes,
            available_bytes: error.available_bytes,
        }
    })?;
    let memory = MemoryBuilder::create("cpu weights", total_bytes);
    let mut memory = memory.map_err(|error| memory_error(error, total_bytes))?;
    let block = Ptr(memory.bytes_mut().as_mut_ptr());
    // SAFETY: the header is shorter than the block.
    unsafe {
        block
            .get()
            .copy_from_nonoverlapping(layout.header.as_ptr(), HEADER_BYTES)
    };
    progress(0, total_bytes as u64);
    for (spec, entry) in specs.iter().zip(&layout.entries) {
        let mut first_row = 0;
        for name in &spec.sources {
            let tensor = source.tensor(name).map_err(|error| missing(name, error.0))?;
            let n_rows = tensor.shape.first().copied().unwrap_or(1);
            let piece = Piece::new(name, entry, &tensor, first_row, n_rows)?;
            let to = Ptr(block.at(entry.offset).cast::<f32>());
            context.run(piece.n_tasks(), &|task_idx, _| {
                // SAFETY: the entry's room is as long as its layout says, and tasks have disjoint rows (R3: no other writer).
                with_isa!(isa, S => unsafe { piece.write::<S>(task_idx, to) });
            })?;
            first_row += n_rows;
        }
        progress((entry.offset + entry.len_bytes) as u64, total_bytes as u64);
    }
    memory.freeze().map_err(|error| memory_error(error, total_bytes))
}

fn missing(name: &str, detail: String) -> TensorError {
    TensorError::Weight {
        name: name.to_owned(),
        detail,
    }
}

/// Whether all tensors are there with their shapes (R2); names all that are not, up to a limit.
fn check_sources(specs: &[WeightSpec], source: &dyn WeightSource) -> Result<()> {
    let mut offenders: Vec<(String, String)> = Vec::new();
    for spec in specs {
        let mut n_rows = 0usize;
        let mut are_sound = true;
        for name in &spec.sources {
            let tensor = match source.tensor(name) {
                Ok(tensor) => tensor,
                Err(error) => {
                    offenders.push((name.clone(), error.0));
                    are_sound = false;
                    continue;
                }
            };
            let shape = as_spec_shape(&tensor, spec);
            if shape.len() != spec.shape.len() || shape.get(1..) != spec.shape.get(1..) {
                let expected = if spec.sources.len() == 1 {
                    format!("{:?}", spec.shape)
                } else {
                    format!("a part of {:?} along dimension 0", spec.shape)
                };
                offenders.push((
                    name.clone(),
                    format!("shape {:?}, expected {expected}", tensor.shape),
                ));
                are_sound = false;
                continue;
            }
            let n_elements = tensor.shape.iter().product::<usize>();
            if tensor.bytes.len() != n_elements.saturating_mul(source_bytes(tensor.dtype)) {
                let detail = format!("{} bytes for shape {:?}", tensor.bytes.len(), tensor.shape);
                offenders.push((name.clone(), detail));
                are_sound = false;
                continue;
            }
            n_rows = n_rows.saturating_add(shape.first().copied().unwrap_or(1));
        }
        let expected = spec.shape.first().copied().unwrap_or(1);
        if are_sound && n_rows != expected {
            let mut shape = spec.shape.clone();
            if let Some(first) = shape.first_mut() {
                *first = n_rows;
            }
            offenders.push((
                spec_name(spec),
                format!("shape {shape:?}, expected {:?}", spec.shape),
            ));
        }
    }
    let mut offenders = offenders.into_iter();
    let Some((name, mut detail)) = offenders.next() else {
        return Ok(());
    };
    for (name, other) in offenders.by_ref().take(MAX_NAMED - 1) {
        detail.push_str(&format!("; {name}: {other}"));
    }
    match offenders.count() {
        0 => {}
        n_more => detail.push_str(&format!("; and {n_more} more")),
    }
    Err(TensorError::Weight { name, detail })
}

/// The tensor's shape as its spec sees it: a pointwise convolution is a matrix.
fn as_spec_shape<'a>(tensor: &'a SourceTensor<'_>, spec: &WeightSpec) -> &'a [usize] {
    match (spec.kind, &*tensor.shape) {
        (WeightKind::Matrix, [shape @ .., 1, 1]) if shape.len() == 2 => shape,
        (_, shape) => shape,
    }
}

fn source_bytes(dtype: SourceDType) -> usize {
    match dtype {
        SourceDType::F64 => 8,
        SourceDType::F32 => 4,
        SourceDType::F16 | SourceDType::BF16 => 2,
    }
}

/// One tensor of a checkpoint on its way into an entry's room: rows `first_row ..` of the entry.
struct Piece<'a> {
    form: Form,
    /// `[c_in, taps]` of a convolution, `[1, k]` otherwise: how a row of the source is ordered.
    n_taps: usize,
    dtype: SourceDType,
    bytes: &'a [u8],
    first_row: usize,
    n_rows: usize,
    row_len: usize,
}

impl<'a> Piece<'a> {
    /// Rows of a task: few enough to spread, many enough to fill panels.
    const TASK_ROWS: usize = 32;

    fn new(
        name: &str,
        entry: &Entry,
        tensor: &'a SourceTensor<'_>,
        first_row: usize,
        n_rows: usize,
    ) -> Result<Self> {
        let row_len: usize = entry.shape.iter().skip(1).product();
        let has_room = first_row
            .checked_add(n_rows)
            .is_some_and(|end| end <= entry.shape.first().copied().unwrap_or(1));
        let n_bytes = n_rows
            .checked_mul(row_len)
            .and_then(|n| n.checked_mul(source_bytes(tensor.dtype)));
        if !has_room || n_bytes != Some(tensor.bytes.len()) {
            return Err(missing(name, "changed while it was read".to_owned()));
        }
        let n_taps = match entry.kind {
            WeightKind::Conv { .. } => entry.shape[2..].iter().product(),
            WeightKind::Matrix | WeightKind::Vector | WeightKind::Table => 1,
        };
        Ok(Self {
            form: entry.form,
            n_taps,
            dtype: tensor.dtype,
            bytes: &tensor.bytes,
            first_row,
            n_rows,
            row_len,
        })
    }

    fn n_tasks(&self) -> usize {
        self.n_rows.div_ceil(Self::TASK_ROWS)
    }

    /// Writes the rows of a task, in groups of consecutive columns of a panel.
    ///
    /// # Safety
    /// `to` is the entry's room; nobody else writes these rows; the processor has the instruction set.
    unsafe fn write<S: Simd>(&self, task_idx: usize, to: Ptr<f32>) {
        let end = ((task_idx + 1) * Self::TASK_ROWS).min(self.n_rows);
        let mut rows = vec![0.0; S::LANES * self.row_len];
        let mut row_idx = task_idx * Self::TASK_ROWS;
        while row_idx < end {
            let entry_row = self.first_row + row_idx;
            let n = (S::LANES - entry_row % S::LANES).min(end - row_idx);
            for (i, row) in rows.chunks_exact_mut(self.row_len).take(n).enumerate() {
                self.read(row_idx + i, row);
            }
            match self.form {
                Form::Plain => {
                    let to = to.at(entry_row * self.row_len);
                    // SAFETY: the rows lie in the room.
                    unsafe { to.copy_from_nonoverlapping(rows.as_ptr(), n * self.row_len) };
                }
                Form::Packed { n: n_cols, k } => {
                    let (to, step) = column::<S>(to, n_cols, k, entry_row);
                    let group = PackGroup {
                        rows: &rows,
                        n,
                        k,
                        n_taps: self.n_taps,
                        to,
                        step,
                    };
                    // SAFETY: `n` columns from `entry_row` on lie in one panel of the room; the set is there.
                    unsafe { S::vectorize(group) };
                }
                Form::Winograd { n: n_cols, k } => {
                    let (to, step) = column::<S>(to, n_cols, k, entry_row);
                    let matrix_len = Panels::n_elements(n_cols, k, S::NR, S::LANES);
                    let group = TransformGroup {
                        rows: &rows,
                        n,
                        k,
                        to,
                        step,
                        matrix_len,
                    };
                    // SAFETY: as above, in each of the 36 matrices.
                    unsafe { S::vectorize(group) };
                }
            }
            row_idx += n;
        }
    }

    /// Row `row_idx` of the source as f32.
    fn read(&self, row_idx: usize, row: &mut [f32]) {
        let row_bytes = self.row_len * source_bytes(self.dtype);
        let bytes = &self.bytes[row_idx * row_bytes..][..row_bytes];
        match self.dtype {
            SourceDType::F64 => {
                for (value, bytes) in row.iter_mut().zip(bytes.as_chunks::<8>().0) {
                    *value = f64::from_le_bytes(*bytes) as f32;
                }
            }
            SourceDType::F32 => {
                for (value, bytes) in row.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            SourceDType::F16 => {
                for (value, bytes) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = half::f16::from_le_bytes(*bytes).to_f32();
                }
            }
            SourceDType::BF16 => {
                for (value, bytes) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = half::bf16::from_le_bytes(*bytes).to_f32();
                }
            }
        }
    }
}

/// Writes `n` rows of `n_taps * c_in` elements, ordered `(c, tap)`, as consecutive columns of a panel, ordered `(tap, c)`.
#[derive(Clone, Copy)]
struct PackGroup<'a> {
    rows: &'a [f32],
    n: usize,
    k: usize,
    n_taps: usize,
    to: *mut f32,
    step: usize,
}

impl Kernel for PackGroup<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            rows,
            n,
            k,
            n_taps,
            to,
            step,
        } = self;
        let mut done = 0;
        if n == S::LANES && n_taps == 1 {
            let mut starts = [rows.as_ptr(); 16];
            for lane in 0..S::LANES {
                starts[lane] = rows.as_ptr().wrapping_add(lane * k);
            }
            while done + S::LANES <= k {
                // SAFETY: whole rows of whole vectors, and a panel is at least one vector wide.
                unsafe { S::transpose(starts.as_ptr(), S::LANES, done, to.add(done * step), step) };
                done += S::LANES;
            }
        }
        let c_in = k / n_taps;
        for depth_idx in done..k {
            let source_idx = depth_idx % c_in * n_taps + depth_idx / c_in;
            for lane in 0..n {
                // SAFETY: the caller vouches for the columns.
                unsafe { *to.add(depth_idx * step + lane) = rows[lane * k + source_idx] };
            }
        }
    }
}

/// Writes `n` rows of `k` 3x3 kernels as consecutive columns of 36 matrices.
#[derive(Clone, Copy)]
struct TransformGroup<'a> {
    rows: &'a [f32],
    n: usize,
    k: usize,
    to: *mut f32,
    step: usize,
    matrix_len: usize,
}

impl Kernel for TransformGroup<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            rows,
            n,
            k,
            to,
            step,
            matrix_len,
        } = self;
        for channel in 0..k {
            let mut taps = [[0.0; winograd::GROUP]; 9];
            for lane in 0..n {
                let kernel = &rows[(lane * k + channel) * 9..][..9];
                for tap in 0..9 {
                    taps[tap][lane] = f64::from(kernel[tap]);
                }
            }
            let positions = winograd::transform_kernels(&taps);
            for (position, values) in positions.iter().enumerate() {
                let to = to.wrapping_add(position * matrix_len + channel * step);
                // SAFETY: the caller vouches for `n` columns, at most as many as the group.
                unsafe { to.copy_from_nonoverlapping(values.as_ptr(), n) };
            }
        }
    }
}

/// First element of column `col_idx` of packed weights, and the distance to the next deeper one.
fn column<S: Simd>(start: Ptr<f32>, n: usize, k: usize, col_idx: usize) -> (*mut f32, usize) {
    let panel_idx = col_idx / S::NR;
    let width = Panels::width(n, panel_idx, S::NR, S::LANES);
    (start.at(panel_idx * k * S::NR + col_idx % S::NR), width)
}
