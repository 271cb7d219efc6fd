//! From tensors to what kernels are given: device addresses, extents and strides.

use crate::{
    memory::{CudaBuffer, Memory},
    weights::WeightBuffer,
};
use cudarc::driver::sys::CUdeviceptr;
use denoised_tensor::{Activation, DType, MAX_DIMS, Result, Shape, Tensor, TensorError};

/// A checked operand: address of the first element, extents and strides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) start: CUdeviceptr,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    /// In elements.
    pub(crate) strides: [usize; MAX_DIMS],
}

/// Where the rows of a view start, innermost level first; mirrors `Rows` of `portable.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    start: CUdeviceptr,
    n_levels: i32,
    extents: [i32; 5],
    strides: [i64; 5],
}

impl Rows {
    /// For an operand that is not there.
    pub(crate) const NONE: Self = Self {
        start: 0,
        n_levels: 0,
        extents: [1; 5],
        strides: [0; 5],
    };
}

impl View {
    pub(crate) fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    pub(crate) fn dim(&self, dim_idx: usize) -> usize {
        self.shape[dim_idx]
    }

    pub(crate) fn n_dims(&self) -> usize {
        self.shape.n_dims()
    }

    /// Columns of a row.
    pub(crate) fn n_cols(&self) -> usize {
        self.shape.last()
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.shape.n_elements() / self.n_cols()
    }

    /// All rows, with neighbouring levels merged where possible.
    ///
    /// # Errors
    /// [`TensorError::Shape`] for an extent beyond 2^31.
    pub(crate) fn rows(&self, op: &'static str) -> Result<Rows> {
        let mut rows = Rows {
            start: self.start,
            n_levels: 0,
            extents: [1; 5],
            strides: [0; 5],
        };
        let mut n_levels = 0;
        for dim_idx in (0..self.n_dims() - 1).rev() {
            let (extent, stride) = (self.dim(dim_idx), self.strides[dim_idx] as i64);
            if extent == 1 {
                continue;
            }
            let extent = small(op, extent)?;
            if n_levels > 0 && rows.strides[n_levels - 1] * i64::from(rows.extents[n_levels - 1]) == stride {
                let merged = rows.extents[n_levels - 1] as usize * extent as usize;
                rows.extents[n_levels - 1] = small(op, merged)?;
            } else {
                (rows.extents[n_levels], rows.strides[n_levels]) = (extent, stride);
                n_levels += 1;
            }
        }
        rows.n_levels = n_levels as i32;
        Ok(rows)
    }
}

/// A number that kernels take as `int`.
pub(crate) fn small(op: &'static str, n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| TensorError::Shape {
        op,
        detail: format!("{n} is more than a kernel can count"),
    })
}

/// The number by which kernels know an activation; mirrors `ActivationCode` of `portable.cuh`.
pub(crate) fn activation_code(activation: Activation) -> i32 {
    match activation {
        Activation::None => 0,
        Activation::Silu => 1,
        Activation::GeluTanh => 2,
        Activation::GeluErf => 3,
        Activation::QuickGelu => 4,
        Activation::Relu => 5,
        Activation::Tanh => 6,
    }
}

/// The operand behind `tensor`, which must belong to this backend.
pub(crate) fn view(op: &'static str, name: &str, tensor: &Tensor, memory: &Memory) -> Result<View> {
    let buffer = tensor.buffer().as_any();
    let start = if let Some(buffer) = buffer.downcast_ref::<CudaBuffer>() {
        let is_own = buffer.0.memory().is_same(memory);
        if is_own {
            memory.check_recordable(op, name, &buffer.0)?;
        }
        is_own.then(|| buffer.0.start())
    } else {
        buffer
            .downcast_ref::<WeightBuffer>()
            .and_then(|buffer| buffer.start_in(memory))
    };
    let Some(start) = start else {
        let detail = format!("{name} {tensor:?} does not belong to this backend");
        return Err(TensorError::Operand { op, detail });
    };
    let mut strides = [1; MAX_DIMS];
    strides[..tensor.strides().len()].copy_from_slice(tensor.strides());
    Ok(View {
        start: start + (tensor.offset() * tensor.dtype().size_bytes()) as u64,
        dtype: tensor.dtype(),
        shape: *tensor.shape(),
        strides,
    })
}
