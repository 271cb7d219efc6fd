//! Weights in the form that the kernels want, in one block that all ranks of a host share.
//!
//! The block is a header and then each weight on a 64-byte boundary: f32 in panels ([`crate::gemm`]), as 36 Winograd matrices
//! ([`crate::winograd`]), or as it is. The header says for which specs, instruction set and options it was made.
//!
//! R1. A block is used only if its header is the one that this backend would have written (`layout`), and it is sealed (`build`).
//! R2. A weight handle is used only if its set is ours, its index is inside and its kind and shape are those of its spec.

mod layout;

mod build;

use crate::{Context, Isa, gemm::Panels, operand::Ptr};
use denoised_os::memfd::{FrozenMapping, FrozenMemory, MemoryError};
use denoised_tensor::{
    Buffer, PrepareInput, Prepared, Result, TensorError, Weight, WeightKind, WeightSet, WeightSpec,
};
use layout::{Entry, Form, HEADER_BYTES, Layout};
use std::{any::Any, os::fd::OwnedFd, sync::Arc};

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

    /// The entry behind a handle (R2).
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
        PrepareInput::Build(source) => build::build(context, isa, specs, &layout, source, progress)?,
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
