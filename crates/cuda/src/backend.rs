//! [`CudaBackend`]: the contract, each op in one call.

use crate::{
    device::Device,
    image,
    memory::{CudaBuffer, Memory, Region},
    module::Modules,
    ops::{self, Ops},
    products::Products,
    repeat::{self, Recordings},
    report::Reports,
    weights,
};
use cudarc::driver::result;
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, DeviceInfo, Epilogue, GateOrder, MemoryStats,
    Modulation, PatchOrder, PrepareInput, Prepared, Result, RopeStyle, Shape, StepArgs, Tensor, TensorError,
    TimestepSpec, Weight, WeightSpec,
};
use std::{path::PathBuf, rc::Rc};

/// How a [`CudaBackend`] runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which device, as CUDA counts them.
    pub device_idx: usize,
    /// Element type of activations, matrices and kernels whose precision is the device's: f32, bf16 or f16.
    pub dtype: DType,
    /// How many repeated bodies are kept as recordings; none if 0.
    pub max_recordings: usize,
    /// Whether every launch is waited for, so that a fault names the kernel that caused it; slow, and nothing is recorded.
    pub check_launches: bool,
    /// Folder of kernel sources that are used in place of this build's own; for work on kernels.
    pub kernel_folder: Option<PathBuf>,
    /// Folder in which compiled kernels are kept; `None` for the user's cache folder.
    pub cache_folder: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            device_idx: 0,
            dtype: DType::BF16,
            max_recordings: 8,
            check_launches: false,
            kernel_folder: None,
            cache_folder: None,
        }
    }
}

/// A CUDA device. Belongs to the thread that opened it.
#[derive(Debug)]
pub struct CudaBackend {
    // What is recorded goes first; modules are unloaded, and memory is given back, before the device is closed.
    recordings: Recordings,
    modules: Modules,
    products: Products,
    reports: Reports,
    memory: Memory,
    device: Rc<Device>,
    dtype: DType,
}

impl CudaBackend {
    /// Opens the device, and compiles or loads the kernels.
    ///
    /// # Errors
    /// [`TensorError::Device`] if a library or the device is missing (the text names it), or a kernel does not compile;
    /// [`TensorError::DType`] for a dtype that is none of the three.
    pub fn open(options: CudaOptions) -> Result<Self> {
        if !matches!(options.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(TensorError::DType {
                op: "open",
                dtype: options.dtype,
                expected: "f32, bf16 or f16",
            });
        }
        let device = Rc::new(Device::open(options.device_idx, options.check_launches)?);
        let cache = options.cache_folder.or_else(image::default_cache);
        let modules = Modules::load(
            Rc::clone(&device),
            options.kernel_folder.as_deref(),
            cache.as_deref(),
        )?;
        let memory = Memory::new(Rc::clone(&device));
        let reports = Reports::new(&device, &memory)?;
        let products = Products::new(&device, &memory)?;
        let recordings = Recordings::new(options.max_recordings);
        let kept = recordings.clone();
        memory.on_shortage(Box::new(move || kept.clear()));
        Ok(Self {
            recordings,
            modules,
            products,
            reports,
            memory,
            device,
            dtype: options.dtype,
        })
    }

    fn ops(&self) -> Ops<'_> {
        Ops {
            device: &self.device,
            memory: &self.memory,
            modules: &self.modules,
            products: &self.products,
            reports: &self.reports,
        }
    }

    /// What is kept for repetition: how many recordings, and the bytes that they hold beside what [`Backend::memory`] calls used.
    pub fn recordings(&self) -> (usize, usize) {
        (self.recordings.n_recordings(), self.recordings.n_bytes())
    }

    /// A dense tensor and the address of its first byte.
    fn tensor(&self, region: Region, dims: &[usize], dtype: DType) -> Result<(Tensor, u64)> {
        let start = region.start();
        Ok((
            Tensor::from_buffer(Rc::new(CudaBuffer(region)), dims, dtype)?,
            start,
        ))
    }
}

fn n_bytes(dims: &[usize], dtype: DType) -> Result<usize> {
    Ok(Shape::new(dims)?.n_elements() * dtype.size_bytes())
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Recordings hold memory, and memory knows whom to ask to give some up.
        self.recordings.clear();
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> DeviceInfo {
        let (major, minor) = self.device.compute_capability();
        DeviceInfo {
            name: format!("cuda:{}", self.device.device_idx()),
            description: format!("{}, compute capability {major}.{minor}", self.device.name()),
            n_threads: 1,
        }
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn repeat(
        &self,
        key: u64,
        inputs: &[&Tensor],
        body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        repeat::repeat(
            self,
            &self.device,
            &self.memory,
            &self.recordings,
            key,
            inputs,
            body,
        )
    }

    fn alloc(&self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        let region = self
            .memory
            .take(|| format!("a tensor {dims:?} of {dtype}"), n_bytes(dims, dtype)?)?;
        Ok(self.tensor(region, dims, dtype)?.0)
    }

    fn upload(&self, bytes: &[u8], dims: &[usize], dtype: DType) -> Result<Tensor> {
        let expected = n_bytes(dims, dtype)?;
        if bytes.len() != expected {
            return Err(TensorError::Shape {
                op: "upload",
                detail: format!(
                    "{} bytes for {dims:?} of {dtype}, expected {expected}",
                    bytes.len()
                ),
            });
        }
        let region = self
            .memory
            .take_constant(|| format!("a tensor {dims:?} of {dtype}"), expected)?;
        let (tensor, start) = self.tensor(region, dims, dtype)?;
        // In a recording these bytes are a constant: they are there before its first replay, and nothing writes over them.
        let is_recording = self.device.is_recording();
        let stream = if is_recording {
            self.device.side_stream()
        } else {
            self.device.stream()
        };
        // SAFETY: the memory is that long; the driver has read `bytes` when it returns, as they are pageable.
        let answer = unsafe { result::memcpy_htod_async(start, bytes, stream) };
        self.device.check("upload", answer)?;
        if is_recording {
            self.device.synchronize_side("upload")?;
        }
        Ok(tensor)
    }

    fn download(&self, x: &Tensor, out: &mut [u8]) -> Result<()> {
        self.device.refuse_in_recording("download")?;
        let n_bytes = x.shape().n_elements() * x.dtype().size_bytes();
        if out.len() != n_bytes {
            return Err(TensorError::Shape {
                op: "download",
                detail: format!("{} bytes for {x:?}, expected {n_bytes}", out.len()),
            });
        }
        let dense;
        let mut x = x;
        if !x.is_dense() {
            dense = self.alloc(x.dims(), x.dtype())?;
            self.copy(x, &dense)?;
            x = &dense;
        }
        let view = self.ops().view("download", "x", x)?;
        self.device.enter()?;
        // SAFETY: the view holds that many bytes; `out` is not touched until the stream has been waited for.
        let answer = unsafe { result::memcpy_dtoh_async(out, view.start, self.device.stream()) };
        self.device.check("download", answer)?;
        self.device.synchronize("download")?;
        self.reports.look(&self.device)
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize("synchronize")?;
        self.reports.look(&self.device)
    }

    fn memory(&self) -> MemoryStats {
        self.memory.stats()
    }

    fn prepare(
        &self,
        specs: &[WeightSpec],
        input: PrepareInput<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Prepared> {
        self.device.enter()?;
        self.device.refuse_in_recording("prepare")?;
        weights::prepare(&self.memory, self.dtype, specs, input, progress)
    }

    fn weight_tensor(&self, weight: &Weight) -> Result<Tensor> {
        let buffer = weights::buffer("weight_tensor", weight, &self.device)?;
        Tensor::from_buffer(Rc::new(buffer), &weight.shape, DType::F32)
    }

    fn linear(&self, x: &Tensor, w: &Weight, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<()> {
        ops::linear::linear(self.ops(), x, w, epilogue, out)
    }

    fn conv2d(
        &self,
        x: &Tensor,
        w: &Weight,
        spec: &ConvSpec,
        epilogue: &Epilogue<'_>,
        out: &Tensor,
    ) -> Result<()> {
        ops::conv::conv2d(self.ops(), x, w, spec, epilogue, out)
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        spec: &AttentionSpec<'_>,
        out: &Tensor,
    ) -> Result<()> {
        ops::attention::attention(self.ops(), q, k, v, spec, out)
    }

    fn layer_norm(
        &self,
        x: &Tensor,
        affine: Option<(&Weight, Option<&Weight>)>,
        eps: f32,
        modulation: Option<Modulation<'_>>,
        out: &Tensor,
    ) -> Result<()> {
        ops::norm::layer_norm(self.ops(), x, affine, eps, modulation, out)
    }

    fn rms_norm(
        &self,
        x: &Tensor,
        weight: Option<&Weight>,
        group_len: usize,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        ops::norm::rms_norm(self.ops(), x, weight, group_len, eps, out)
    }

    fn match_norm(&self, x: &Tensor, like: &Tensor, group_len: usize, out: &Tensor) -> Result<()> {
        ops::norm::match_norm(self.ops(), x, like, group_len, out)
    }

    fn group_norm(
        &self,
        x: &Tensor,
        affine: (&Weight, &Weight),
        n_groups: usize,
        eps: f32,
        activation: Activation,
        out: &Tensor,
    ) -> Result<()> {
        ops::norm::group_norm(self.ops(), x, affine, n_groups, eps, activation, out)
    }

    fn add(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        ops::elementwise::add(self.ops(), a, b, out)
    }

    fn mul(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        ops::elementwise::mul(self.ops(), a, b, out)
    }

    fn gated_add(&self, residual: &Tensor, gate: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        ops::elementwise::gated_add(self.ops(), residual, gate, x, out)
    }

    fn affine(&self, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()> {
        ops::elementwise::affine(self.ops(), x, scale, shift, out)
    }

    fn activation(&self, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()> {
        ops::elementwise::activation(self.ops(), x, activation, out)
    }

    fn gated(&self, x: &Tensor, activation: Activation, order: GateOrder, out: &Tensor) -> Result<()> {
        ops::elementwise::gated(self.ops(), x, activation, order, out)
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        ops::elementwise::copy(self.ops(), x, out)
    }

    fn fill(&self, out: &Tensor, value: f32) -> Result<()> {
        ops::elementwise::fill(self.ops(), out, value)
    }

    fn patchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        ops::layout::patchify(self.ops(), x, patch, order, out)
    }

    fn unpatchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        ops::layout::unpatchify(self.ops(), x, patch, order, out)
    }

    fn permute(&self, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
        ops::layout::permute(self.ops(), x, axes, out)
    }

    fn upsample_nearest(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        ops::layout::upsample_nearest(self.ops(), x, out)
    }

    fn rope(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, style: RopeStyle, out: &Tensor) -> Result<()> {
        ops::lookup::rope(self.ops(), x, cos, sin, style, out)
    }

    fn embedding(&self, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()> {
        ops::lookup::embedding(self.ops(), ids, table, out)
    }

    fn gather_rows(&self, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
        ops::lookup::gather_rows(self.ops(), x, rows, out)
    }

    fn timestep_embedding(&self, timesteps: &Tensor, spec: &TimestepSpec, out: &Tensor) -> Result<()> {
        ops::lookup::timestep_embedding(self.ops(), timesteps, spec, out)
    }

    fn step(&self, args: &StepArgs<'_>, out: &Tensor) -> Result<()> {
        ops::sample::step(self.ops(), args, out)
    }

    fn to_pixels(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        ops::sample::to_pixels(self.ops(), x, out)
    }

    fn all_finite(&self, x: &Tensor) -> Result<bool> {
        ops::sample::all_finite(self.ops(), x)
    }
}
