//! What a forward runs on.

use crate::{Result, WeightIdx};
use denoised_tensor::{Backend, DType, Tensor, Weight};

/// A device, the prepared weights, and the element type of activations.
#[derive(Clone, Copy, Debug)]
pub struct Ctx<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
    /// One handle per declared spec, in order.
    pub weights: &'a [Weight],
    /// Element type of activations.
    pub dtype: DType,
}

impl<'a> Ctx<'a> {
    /// The weight at `idx`. Panics if the weights are not those that were declared; whoever builds a context checks their number.
    pub fn weight(&self, idx: WeightIdx) -> &'a Weight {
        &self.weights[idx.get()]
    }

    /// Fresh memory for activations.
    ///
    /// # Errors
    /// Out of memory, or a shape that is none.
    pub fn alloc(&self, dims: &[usize]) -> Result<Tensor> {
        self.backend.alloc(dims, self.dtype)
    }

    /// Fresh memory of the shape of `x` but `n_channels` in the last dimension.
    ///
    /// # Errors
    /// As [`Ctx::alloc`].
    pub fn alloc_like(&self, x: &Tensor, n_channels: usize) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = n_channels;
        }
        self.alloc(&dims)
    }

    /// `a + b`, `b` broadcast to `a`.
    ///
    /// # Errors
    /// The device's.
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let out = self.alloc(a.dims())?;
        self.backend.add(a, b, &out)?;
        Ok(out)
    }

    /// `x` in the element type of activations; shares memory where it has that already.
    ///
    /// # Errors
    /// The device's.
    pub fn cast(&self, x: &Tensor) -> Result<Tensor> {
        if x.dtype() == self.dtype {
            return Ok(x.clone());
        }
        let out = self.alloc(x.dims())?;
        self.backend.copy(x, &out)?;
        Ok(out)
    }

    /// f32 values on the device.
    ///
    /// # Errors
    /// A shape that does not fit the number of values, or the device's.
    pub fn upload_f32(&self, values: &[f32], dims: &[usize]) -> Result<Tensor> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.backend.upload(&bytes, dims, DType::F32)
    }

    /// The elements of `x` as f32, row-major.
    ///
    /// # Errors
    /// The device's.
    pub fn download_f32(&self, x: &Tensor) -> Result<Vec<f32>> {
        let wide;
        let x = if x.dtype() == DType::F32 {
            x
        } else {
            wide = self.backend.alloc(x.dims(), DType::F32)?;
            self.backend.copy(x, &wide)?;
            &wide
        };
        let mut bytes = vec![0; x.shape().n_elements() * DType::F32.size_bytes()];
        self.backend.download(x, &mut bytes)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect())
    }
}
