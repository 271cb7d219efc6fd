//! Weights on the device: one block for all of them, freed with the last handle.
//!
//! | kind | kept as |
//! |---|---|
//! | matrix | `[n, k]` in the backend's dtype |
//! | convolution | `[c_out, height, width, c_in]` in the backend's dtype, so that a tap's channels lie side by side |
//! | vector | f32, and beside it in the backend's dtype, which products add it in |
//! | table | f32 |
//!
//! Every one of them starts on [`ALIGN`] bytes.

use crate::{
    device::{Device, driver_failure},
    memory::Memory,
};
use cudarc::driver::{
    result::{self, ctx, primary_ctx},
    sys,
};
use denoised_tensor::{
    Buffer, DType, PrepareInput, Prepared, Result, SourceDType, SourceTensor, TensorError, Weight,
    WeightKind, WeightSet, WeightSource, WeightSpec,
};
use half::{bf16, f16};
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
    dtype: DType,
    /// Of each weight: offset of its main form, and of its form in the backend's dtype.
    places: Vec<(usize, usize)>,
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
    /// As the table in the module's head says; f32 of a vector.
    Main,
    /// A vector in the backend's dtype.
    InDType,
}

/// Address of `weight`, which must be of this device and of `kind`.
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
    let (main, in_dtype) = set.places[weight.spec_idx];
    Ok(set.start + if form == Form::Main { main } else { in_dtype } as u64)
}

/// A vector or table as a read-only f32 tensor's memory.
pub(crate) fn buffer(op: &'static str, weight: &Weight, device: &Device) -> Result<WeightBuffer> {
    if !matches!(weight.kind, WeightKind::Vector | WeightKind::Table) {
        let detail = format!("weight is a {:?}, expected a vector or table", weight.kind);
        return Err(TensorError::Operand { op, detail });
    }
    Ok(WeightBuffer {
        start: start(op, "weight", weight, Form::Main, device)?,
        set: Arc::clone(&weight.set),
        len_bytes: weight.shape.iter().product::<usize>() * 4,
    })
}

/// Reads, converts and uploads all weights.
pub(crate) fn prepare(
    device: &Device,
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
    let mut n_bytes = 0;
    let mut place = |len_bytes: usize| {
        let offset = n_bytes;
        n_bytes = (offset + len_bytes).next_multiple_of(ALIGN);
        offset
    };
    let places: Vec<(usize, usize)> = specs
        .iter()
        .map(|spec| {
            let n_elements = spec.shape.iter().product::<usize>();
            match spec.kind {
                WeightKind::Matrix | WeightKind::Conv { .. } => {
                    let offset = place(n_elements * dtype.size_bytes());
                    (offset, offset)
                }
                WeightKind::Table => {
                    let offset = place(n_elements * 4);
                    (offset, offset)
                }
                WeightKind::Vector => {
                    let offset = place(n_elements * 4);
                    (
                        offset,
                        if dtype == DType::F32 {
                            offset
                        } else {
                            place(n_elements * dtype.size_bytes())
                        },
                    )
                }
            }
        })
        .collect();
    let (available_bytes, _) =
        result::mem_get_info().map_err(|error| driver_failure("asking for memory", error))?;
    let out_of_memory = || TensorError::OutOfMemory {
        what: "the weights".to_owned(),
        needed_bytes: n_bytes as u64,
        available_bytes: available_bytes as u64,
    };
    if n_bytes > available_bytes {
        return Err(out_of_memory());
    }
    // SAFETY: the device is open on this thread.
    let context = unsafe { primary_ctx::retain(device.raw()) }
        .map_err(|error| driver_failure("preparing weights", error))?;
    // SAFETY: as above.
    let start = match unsafe { result::malloc_sync(n_bytes.max(1)) } {
        Ok(start) => start,
        Err(_) => {
            // SAFETY: retained above.
            let _ = unsafe { primary_ctx::release(device.raw()) };
            return Err(out_of_memory());
        }
    };
    let set = Arc::new(DeviceWeights {
        start,
        device: device.raw(),
        context: context as usize,
        dtype,
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

fn fill(
    set: &DeviceWeights,
    specs: &[WeightSpec],
    source: &dyn WeightSource,
    device: &Device,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let total_bytes: u64 = specs
        .iter()
        .map(|spec| 4 * spec.shape.iter().product::<usize>() as u64)
        .sum();
    let mut done_bytes = 0;
    for (spec, (main, in_dtype)) in specs.iter().zip(&set.places) {
        let values = read(spec, source)?;
        let upload = |offset: usize, dtype: DType, values: &[f32]| {
            let bytes = encode(values, dtype);
            // SAFETY: the place has this length.
            let answer = unsafe { result::memcpy_htod_sync(set.start + offset as u64, &bytes) };
            device.check("uploading weights", answer)
        };
        match spec.kind {
            WeightKind::Matrix => upload(*main, set.dtype, &values)?,
            WeightKind::Conv { .. } => upload(*main, set.dtype, &channels_last(&values, &spec.shape))?,
            WeightKind::Table => upload(*main, DType::F32, &values)?,
            WeightKind::Vector => {
                upload(*main, DType::F32, &values)?;
                if in_dtype != main {
                    upload(*in_dtype, set.dtype, &values)?;
                }
            }
        }
        done_bytes += 4 * values.len() as u64;
        progress(done_bytes, total_bytes);
    }
    Ok(())
}

/// The concatenation of a spec's sources as f32.
fn read(spec: &WeightSpec, source: &dyn WeightSource) -> Result<Vec<f32>> {
    let mut values = Vec::with_capacity(spec.shape.iter().product());
    for name in &spec.sources {
        let tensor = source.tensor(name).map_err(|error| TensorError::Weight {
            name: name.clone(),
            detail: error.to_string(),
        })?;
        decode(&tensor, &mut values);
    }
    if values.len() != spec.shape.iter().product::<usize>() {
        return Err(TensorError::Weight {
            name: spec.sources.join(" + "),
            detail: format!("{} elements, expected {:?}", values.len(), spec.shape),
        });
    }
    Ok(values)
}

fn decode(tensor: &SourceTensor<'_>, values: &mut Vec<f32>) {
    let bytes = &tensor.bytes;
    match tensor.dtype {
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
        SourceDType::F16 => values.extend(
            bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()),
        ),
        SourceDType::BF16 => values.extend(
            bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        ),
    }
}

fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
        DType::F16 => values
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// `[c_out, c_in, height, width]` to `[c_out, height, width, c_in]`.
fn channels_last(values: &[f32], shape: &[usize]) -> Vec<f32> {
    let (c_in, n_taps) = (shape[1], shape[2] * shape[3]);
    let mut out = Vec::with_capacity(values.len());
    for kernel in values.chunks_exact(c_in * n_taps) {
        for tap in 0..n_taps {
            out.extend(kernel[tap..].iter().step_by(n_taps));
        }
    }
    out
}
