//! Weights on the device: one block for all of them, freed with the last handle.
//!
//! | kind | kept as |
//! |---|---|
//! | matrix | `[n, k]` in the dtype of its activations |
//! | convolution | `[c_out, height, width, c_in]` in the dtype of its activations, so that a tap's channels lie side by side |
//! | vector | f32, and beside it in the dtype of its activations, which products add it in |
//! | table | f32 |
//!
//! The dtype of activations is the backend's where a spec does not ask for another. Every one of them starts on [`ALIGN`] bytes.

use crate::{
    device::{Device, driver_failure},
    memory::Memory,
    staging::{BUFFER_BYTES, Staging},
};
use cudarc::driver::{
    result::{self, ctx, primary_ctx},
    sys,
};
use denoised_tensor::{
    Buffer, DType, PrepareInput, Prepared, Result, SourceDType, SourceTensor, TensorError, Weight,
    WeightKind, WeightSet, WeightSource, WeightSpec, check,
};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use std::{any::Any, sync::Arc};

/// What the fastest products want their operands to start on.
pub(crate) const ALIGN: usize = 256;

/// All weights that were prepared together.
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    start: sys::CUdeviceptr,
    device: sys::CUdevice,
    /// Address of the context, which this retains.
    context: usize,
    n_bytes: u64,
    places: Vec<Place>,
}

/// Where a weight lies.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Offset of what the table in the module's head names first.
    main: usize,
    /// Offset of a vector in `dtype`; elsewhere that of the main form.
    in_dtype: usize,
    /// Of the activations that it is used with.
    dtype: DType,
}

impl WeightSet for DeviceWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for DeviceWeights {
    fn drop(&mut self) {
        // SAFETY: allocated and retained in `prepare`, given back once. Waits for what still reads it.
        unsafe {
            let _ = ctx::set_current(self.context as sys::CUcontext);
            let _ = result::free_sync(self.start);
            let _ = primary_ctx::release(self.device);
        }
    }
}

/// A vector or table as a tensor's memory.
#[derive(Debug)]
pub(crate) struct WeightBuffer {
    set: Arc<dyn WeightSet>,
    start: sys::CUdeviceptr,
    len_bytes: usize,
}

impl WeightBuffer {
    /// First byte, if the weights lie on the device of `memory`.
    pub(crate) fn start_in(&self, memory: &Memory) -> Option<sys::CUdeviceptr> {
        let set = self.set.as_any().downcast_ref::<DeviceWeights>()?;
        (set.device == memory.device().raw()).then_some(self.start)
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

/// Which form of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A vector or table in f32.
    Wide,
    /// What products with activations of this dtype take.
    For(DType),
}

/// Address of `weight`, which must be of this device and have the form.
pub(crate) fn start(
    op: &'static str,
    name: &str,
    weight: &Weight,
    form: Form,
    device: &Device,
) -> Result<sys::CUdeviceptr> {
    let set = weight.set.as_any().downcast_ref::<DeviceWeights>();
    let set = set
        .filter(|set| set.device == device.raw())
        .ok_or_else(|| TensorError::Operand {
            op,
            detail: format!("{name} does not belong to this backend"),
        })?;
    device.keep(&weight.set);
    let place = set.places[weight.spec_idx];
    let offset = match form {
        Form::Wide => place.main,
        Form::For(DType::F32) if weight.kind == WeightKind::Vector => place.main,
        Form::For(dtype) if dtype == place.dtype => place.in_dtype,
        Form::For(dtype) => {
            return Err(TensorError::DType {
                op,
                dtype,
                expected: place.dtype.as_str(),
            });
        }
    };
    Ok(set.start + offset as u64)
}

/// A vector or table as a read-only f32 tensor's memory.
pub(crate) fn buffer(op: &'static str, weight: &Weight, device: &Device) -> Result<WeightBuffer> {
    if !matches!(weight.kind, WeightKind::Vector | WeightKind::Table) {
        let detail = format!("weight is a {:?}, expected a vector or table", weight.kind);
        return Err(TensorError::Operand { op, detail });
    }
    Ok(WeightBuffer {
        start: start(op, "weight", weight, Form::Wide, device)?,
        set: Arc::clone(&weight.set),
        len_bytes: weight.shape.iter().product::<usize>() * 4,
    })
}

/// Reads, converts and uploads all weights.
pub(crate) fn prepare(
    memory: &Memory,
    dtype: DType,
    specs: &[WeightSpec],
    input: PrepareInput<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Prepared> {
    let PrepareInput::Build(source) = input else {
        return Err(TensorError::SharedWeights(
            "weights on a device cannot be shared".to_owned(),
        ));
    };
    check::weights::sources(specs, source)?;
    let device = memory.device();
    let mut n_bytes = 0;
    let mut place = |len_bytes: usize| {
        let offset = n_bytes;
        n_bytes = (offset + len_bytes).next_multiple_of(ALIGN);
        offset
    };
    let places: Vec<Place> = specs
        .iter()
        .map(|spec| {
            let n_elements = spec.shape.iter().product::<usize>();
            let dtype = spec.precision.dtype(dtype);
            let main = place(n_elements * main_dtype(spec, dtype).size_bytes());
            let in_dtype = match spec.kind {
                WeightKind::Vector if dtype != DType::F32 => place(n_elements * dtype.size_bytes()),
                _ => main,
            };
            Place {
                main,
                in_dtype,
                dtype,
            }
        })
        .collect();
    let available_bytes = memory.available_to_others(n_bytes as u64)?;
    let out_of_memory = || TensorError::OutOfMemory {
        what: "the weights".to_owned(),
        needed_bytes: n_bytes as u64,
        available_bytes,
    };
    if n_bytes as u64 > available_bytes {
        return Err(out_of_memory());
    }
    // SAFETY: the device is open on this thread.
    let context = unsafe { primary_ctx::retain(device.raw()) }
        .map_err(|error| driver_failure("preparing weights", error))?;
    // SAFETY: as above.
    let start = match unsafe { result::malloc_sync(n_bytes.max(1)) } {
        Ok(start) => start,
        Err(error) => {
            // SAFETY: retained above.
            let _ = unsafe { primary_ctx::release(device.raw()) };
            return match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(out_of_memory()),
                _ => device.check("preparing weights", Err(error)),
            };
        }
    };
    let set = Arc::new(DeviceWeights {
        start,
        device: device.raw(),
        context: context as usize,
        n_bytes: n_bytes as u64,
        places,
    });
    fill(&set, specs, source, device, progress)?;
    let set: Arc<dyn WeightSet> = set;
    let weights = specs
        .iter()
        .enumerate()
        .map(|(spec_idx, spec)| Weight {
            set: Arc::clone(&set),
            spec_idx,
            kind: spec.kind,
            shape: spec.shape.as_slice().into(),
        })
        .collect();
    Ok(Prepared {
        weights,
        shared: None,
        n_bytes: n_bytes as u64,
    })
}

/// Element type of the main form where activations are of `dtype`.
fn main_dtype(spec: &WeightSpec, dtype: DType) -> DType {
    match spec.kind {
        WeightKind::Matrix | WeightKind::Conv { .. } => dtype,
        WeightKind::Vector | WeightKind::Table => DType::F32,
    }
}

fn fill(
    set: &DeviceWeights,
    specs: &[WeightSpec],
    source: &dyn WeightSource,
    device: &Device,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let total = set.n_bytes;
    let mut staging = Staging::new(device)?;
    let mut values = Vec::new();
    progress(0, total);
    for (spec, place) in specs.iter().zip(&set.places) {
        let Place {
            main,
            in_dtype,
            dtype,
        } = *place;
        let main_dtype = main_dtype(spec, dtype);
        let mut first_row = 0;
        for name in &spec.sources {
            let tensor = source.tensor(name).map_err(|error| TensorError::Weight {
                name: name.clone(),
                detail: error.to_string(),
            })?;
            let n_rows = check::weights::piece(spec, name, &tensor, first_row)?;
            let piece = Piece {
                name,
                spec,
                tensor: &tensor,
                first_row,
                n_rows,
            };
            piece.upload(set.start + main as u64, main_dtype, &mut staging, &mut values)?;
            if in_dtype != main {
                piece.upload(set.start + in_dtype as u64, dtype, &mut staging, &mut values)?;
            }
            first_row += n_rows;
        }
        let n_elements = spec.shape.iter().product::<usize>();
        let end = if in_dtype == main {
            main + n_elements * main_dtype.size_bytes()
        } else {
            in_dtype + n_elements * dtype.size_bytes()
        };
        progress(end as u64, total);
    }
    staging.finish()?;
    progress(total, total);
    Ok(())
}

/// One tensor of a checkpoint on its way to rows `first_row ..` of a weight.
struct Piece<'a> {
    name: &'a str,
    spec: &'a WeightSpec,
    tensor: &'a SourceTensor<'a>,
    first_row: usize,
    n_rows: usize,
}

impl Piece<'_> {
    /// Copies it to the weight at `start`, converted where it is not in the right form. `values` is scratch.
    fn upload(
        &self,
        start: sys::CUdeviceptr,
        dtype: DType,
        staging: &mut Staging<'_>,
        values: &mut Vec<f32>,
    ) -> Result<()> {
        let (size, source_size) = (dtype.size_bytes(), self.tensor.dtype.size_bytes());
        let row_len: usize = self.spec.shape.iter().skip(1).product();
        let start = start + (self.first_row * row_len * size) as u64;
        let n_taps: usize = match self.spec.kind {
            WeightKind::Conv { .. } => self.spec.shape[2..].iter().product(),
            _ => 1,
        };
        let is_as_it_is = n_taps == 1
            && matches!(
                (self.tensor.dtype, dtype),
                (SourceDType::F32, DType::F32)
                    | (SourceDType::F16, DType::F16)
                    | (SourceDType::BF16, DType::BF16)
            );
        // The taps of a kernel stay together.
        let unit = if n_taps > 1 { row_len } else { 1 };
        let at_once = BUFFER_BYTES / (size * unit) * unit;
        if at_once == 0 {
            return Err(TensorError::Weight {
                name: self.name.to_owned(),
                detail: format!(
                    "a kernel of {row_len} elements is beyond the {BUFFER_BYTES} bytes of a buffer"
                ),
            });
        }
        let n_all = self.n_rows * row_len;
        for first in (0..n_all).step_by(at_once) {
            let n_elements = at_once.min(n_all - first);
            let source = &self.tensor.bytes[first * source_size..][..n_elements * source_size];
            let to = start + (first * size) as u64;
            let write = |out: &mut [u8]| {
                if is_as_it_is {
                    out.copy_from_slice(source);
                    return Ok(());
                }
                // Pieces that stay in the processor's cache.
                let n_per_block = (BLOCK_ELEMENTS / unit).max(1) * unit;
                let blocks = source.chunks(n_per_block * source_size);
                for (source, out) in blocks.zip(out.chunks_mut(n_per_block * size)) {
                    values.clear();
                    decode(source, self.tensor.dtype, values);
                    self.check_range(values, dtype)?;
                    if n_taps > 1 {
                        *values = channels_last(values, row_len / n_taps, n_taps);
                    }
                    encode(values, dtype, out);
                }
                Ok(())
            };
            // SAFETY: the weight has room for all rows of its pieces, and `fill` waits before the block can be freed.
            unsafe { staging.send(to, n_elements * size, write)? };
        }
        Ok(())
    }

    /// Refuses what a narrower type turns into infinity.
    fn check_range(&self, values: &[f32], dtype: DType) -> Result<()> {
        if dtype != DType::F16 {
            return Ok(());
        }
        match values
            .iter()
            .find(|x| x.is_finite() && f16::from_f32(**x).is_infinite())
        {
            None => Ok(()),
            Some(x) => Err(TensorError::Weight {
                name: self.name.to_owned(),
                detail: format!("{x} is beyond the range of f16; use bf16 or f32"),
            }),
        }
    }
}

/// Elements that are converted at once.
const BLOCK_ELEMENTS: usize = 8 << 10;

fn decode(bytes: &[u8], dtype: SourceDType, values: &mut Vec<f32>) {
    let pairs = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        SourceDType::F64 => values.extend(
            bytes
                .chunks_exact(8)
                .map(|b| f64::from_le_bytes(std::array::from_fn(|i| b[i])) as f32),
        ),
        SourceDType::F32 => values.extend(
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(std::array::from_fn(|i| b[i]))),
        ),
        SourceDType::F16 => {
            let halves: Vec<f16> = pairs.map(f16::from_le_bytes).collect();
            values.resize(halves.len(), 0.0);
            halves.convert_to_f32_slice(values);
        }
        SourceDType::BF16 => values.extend(pairs.map(|pair| bf16::from_le_bytes(pair).to_f32())),
    }
}

fn encode(values: &[f32], dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::BF16 => {
            for (to, x) in out.chunks_exact_mut(2).zip(values) {
                to.copy_from_slice(&bf16::from_f32(*x).to_le_bytes());
            }
        }
        DType::F16 => {
            let mut halves = vec![f16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            for (to, x) in out.chunks_exact_mut(2).zip(&halves) {
                to.copy_from_slice(&x.to_le_bytes());
            }
        }
        _ => {
            for (to, x) in out.chunks_exact_mut(4).zip(values) {
                to.copy_from_slice(&x.to_le_bytes());
            }
        }
    }
}

/// Rows of `[c_in, taps]` to rows of `[taps, c_in]`.
fn channels_last(values: &[f32], c_in: usize, n_taps: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for kernel in values.chunks_exact(c_in * n_taps) {
        for tap in 0..n_taps {
            out.extend(kernel[tap..].iter().step_by(n_taps));
        }
    }
    out
}
