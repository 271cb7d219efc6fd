//! [`CpuBackend`]: each op as one check (`check`, or here where it is short) and one call into the kernels.

use crate::{
    Context, Isa, attention, check, conv,
    elementwise::{
        self, Activate, Add, Affine, CopyElements, Fill, Gated, GatedAdd, Guide, Loops, Multiply, Step,
        ToUnit,
    },
    gemm, lookup,
    memory::{CpuBuffer, Memory},
    norm,
    operand::{Operands, View},
    simd::with_isa,
    threads::{MAX_THREADS, Pool},
    weights::{self, Operator},
    winograd,
};
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, DeviceInfo, Epilogue, GateOrder, MemoryStats,
    Modulation, PatchOrder, PrepareInput, Prepared, Result, RopeStyle, StepArgs, Tensor, TensorError,
    TimestepSpec, Weight, WeightSpec,
    check::{self as contract, ensure},
};
use std::rc::Rc;

/// How a [`CpuBackend`] runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, the calling one included; 0 for as many as this process may use cores.
    pub n_threads: usize,
    /// Instruction set; the best one of this processor if `None`.
    pub isa: Option<Isa>,
    /// Whether 3x3 convolutions of stride 1 go through Winograd's transforms: about three times as fast, with four times the memory for
    /// their weights and a larger rounding error (relative L2 8e-7 instead of 2e-7 per layer). All ranks of a host must agree on it.
    pub winograd: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            n_threads: 0,
            isa: None,
            winograd: true,
        }
    }
}

/// The CPU as a device. Belongs to the thread that made it; ops have run when they return.
#[derive(Debug)]
pub struct CpuBackend {
    isa: Isa,
    use_winograd: bool,
    pool: Pool,
    memory: Memory,
    processor: String,
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`TensorError::Device`] if this processor lacks the instruction set, for more than 1024 threads, or if they cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let n_threads = match options.n_threads {
            0 => denoised_os::cpu::usable_cores().min(MAX_THREADS),
            n_threads => n_threads,
        };
        if n_threads > MAX_THREADS {
            return Err(TensorError::Device(format!(
                "{n_threads} threads, at most {MAX_THREADS} are supported"
            )));
        }
        let isa = options.isa.unwrap_or_else(Isa::best);
        if !isa.is_available() {
            return Err(TensorError::Device(format!("this processor lacks {isa}")));
        }
        let pool = Pool::new(n_threads)
            .map_err(|error| TensorError::Device(format!("cannot start {n_threads} threads: {error}")))?;
        Ok(Self {
            isa,
            use_winograd: options.winograd,
            pool,
            memory: Memory::default(),
            processor: processor_name(),
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn context(&self) -> Context<'_> {
        Context {
            pool: &self.pool,
            memory: &self.memory,
        }
    }

    fn operands(&self, op: &'static str) -> Operands<'_> {
        Operands {
            op,
            memory: &self.memory,
            isa: self.isa,
        }
    }

    /// An element-wise op whose inputs have the output's shape or broadcast to it; the first input may be the output.
    fn binary<O: elementwise::RunOp<3>>(
        &self,
        op: &'static str,
        run_op: O,
        a: &Tensor,
        b: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        contract::binary(op, a, b, out)?;
        let operands = self.operands(op);
        let (a_view, b_view) = (operands.input("a", a)?, operands.input("b", b)?);
        let out = operands.input("out", out)?;
        let loops = Loops::new([&out, &a_view, &b_view]);
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), run_op) })
    }

    /// An element-wise op on one checked input, which may be the output.
    fn unary<O: elementwise::RunOp<2>>(
        &self,
        op: &'static str,
        run_op: O,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let operands = self.operands(op);
        let x_view = operands.input("x", x)?;
        let out = operands.input("out", out)?;
        let loops = Loops::new([&out, &x_view]);
        // SAFETY: both operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), run_op) })
    }
}

fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}

impl Backend for CpuBackend {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "cpu".to_owned(),
            description: format!("{}, {}", self.processor, self.isa),
            n_threads: self.pool.n_threads(),
        }
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn repeat(
        &self,
        _key: u64,
        inputs: &[&Tensor],
        body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        // A call costs next to nothing here, so there is nothing to gain from a recording.
        body(inputs)
    }

    fn alloc(&self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        let n_elements = denoised_tensor::Shape::new(dims)?.n_elements();
        let region = self.memory.take("a tensor", n_elements * dtype.size_bytes())?;
        if cfg!(debug_assertions) && matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            // All bits set are a NaN of any float.
            // SAFETY: the region is that long.
            unsafe { region.start().write_bytes(0xff, region.len_bytes()) };
        }
        Tensor::from_buffer(Rc::new(CpuBuffer(region)), dims, dtype)
    }

    fn upload(&self, bytes: &[u8], dims: &[usize], dtype: DType) -> Result<Tensor> {
        let n_bytes = denoised_tensor::Shape::new(dims)?.n_elements() * dtype.size_bytes();
        ensure("upload", bytes.len() == n_bytes, || {
            format!(
                "{} bytes for {dims:?} of {dtype}, expected {n_bytes}",
                bytes.len()
            )
        })?;
        let region = self.memory.take("a tensor", n_bytes)?;
        // SAFETY: both are `n_bytes` long, and the region is new.
        unsafe { region.start().copy_from_nonoverlapping(bytes.as_ptr(), n_bytes) };
        Tensor::from_buffer(Rc::new(CpuBuffer(region)), dims, dtype)
    }

    fn download(&self, x: &Tensor, out: &mut [u8]) -> Result<()> {
        let view = self.operands("download").untyped("x", x)?;
        let size = x.dtype().size_bytes();
        let n_bytes = x.shape().n_elements() * size;
        ensure("download", out.len() == n_bytes, || {
            format!("{} bytes for {x:?}, expected {n_bytes}", out.len())
        })?;
        let rows = view.rows();
        let row_bytes = view.n_cols() * size;
        for (row_idx, to) in out.chunks_exact_mut(row_bytes).enumerate() {
            // Strides count elements, hence the factor.
            let from = view.start.at(rows.offset(row_idx) * size);
            // SAFETY: the row lies in the view, and `to` is as long.
            unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), row_bytes) };
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
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
        weights::prepare(
            &self.context(),
            self.isa,
            self.use_winograd,
            specs,
            input,
            progress,
        )
    }

    fn weight_tensor(&self, weight: &Weight) -> Result<Tensor> {
        let buffer = weights::plain("weight_tensor", weight, self.isa)?;
        Tensor::from_buffer(Rc::new(buffer), &weight.shape, DType::F32)
    }

    fn linear(&self, x: &Tensor, w: &Weight, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<()> {
        let (source, n_rows, panels, finish) = check::linear(self.operands("linear"), x, w, epilogue, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { gemm::multiply::<S, _>(&self.context(), source, n_rows, panels, finish) })
    }

    fn conv2d(
        &self,
        x: &Tensor,
        w: &Weight,
        spec: &ConvSpec,
        epilogue: &Epilogue<'_>,
        out: &Tensor,
    ) -> Result<()> {
        let (walk, operator, finish) = check::conv2d(self.operands("conv2d"), x, w, spec, epilogue, out)?;
        let context = self.context();
        with_isa!(self.isa, S => match operator {
            // SAFETY: all operands were checked above.
            Operator::Packed(panels) => unsafe { conv::convolve::<S>(&context, walk, panels, finish) },
            // SAFETY: as above; only kernels for which it pays are stored so.
            Operator::Winograd(panels) => unsafe { winograd::convolve::<S>(&context, walk, panels, finish) },
        })
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        spec: &AttentionSpec<'_>,
        out: &Tensor,
    ) -> Result<()> {
        let attention = check::attention(self.operands("attention"), q, k, v, spec, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { attention::attend::<S>(&self.context(), attention) })
    }

    fn layer_norm(
        &self,
        x: &Tensor,
        affine: Option<(&Weight, Option<&Weight>)>,
        eps: f32,
        modulation: Option<Modulation<'_>>,
        out: &Tensor,
    ) -> Result<()> {
        let (norm, n_rows) = check::layer_norm(self.operands("layer_norm"), x, affine, eps, modulation, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { norm::layer_norm::<S>(&self.context(), norm, n_rows) })
    }

    fn rms_norm(
        &self,
        x: &Tensor,
        weight: Option<&Weight>,
        group_len: usize,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        let (norm, n_rows) = check::rms_norm(self.operands("rms_norm"), x, weight, group_len, eps, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { norm::rms_norm::<S>(&self.context(), norm, n_rows) })
    }

    fn match_norm(&self, x: &Tensor, like: &Tensor, group_len: usize, out: &Tensor) -> Result<()> {
        let (norm, n_rows) = check::match_norm(self.operands("match_norm"), x, like, group_len, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { norm::match_norm::<S>(&self.context(), norm, n_rows) })
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
        let operands = self.operands("group_norm");
        let norm = check::group_norm(operands, x, affine, n_groups, eps, activation, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { norm::group_norm::<S>(&self.context(), norm) })
    }

    fn add(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        self.binary("add", Add {}, a, b, out)
    }

    fn mul(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        self.binary("mul", Multiply {}, a, b, out)
    }

    fn gated_add(&self, residual: &Tensor, gate: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        contract::gated_add(residual, gate, x, out)?;
        let operands = self.operands("gated_add");
        let (r_view, g_view) = (
            operands.input("residual", residual)?,
            operands.input("gate", gate)?,
        );
        let x_view = operands.input("x", x)?;
        let out = operands.input("out", out)?;
        let loops = Loops::new([&out, &r_view, &g_view, &x_view]);
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), GatedAdd {}) })
    }

    fn affine(&self, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()> {
        contract::unary("affine", x, out)?;
        self.unary("affine", Affine { scale, shift }, x, out)
    }

    fn activation(&self, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()> {
        contract::unary("activation", x, out)?;
        self.unary("activation", Activate(activation), x, out)
    }

    fn gated(&self, x: &Tensor, activation: Activation, order: GateOrder, out: &Tensor) -> Result<()> {
        let [first, second] = contract::gated(x, out)?;
        let operands = self.operands("gated");
        let (first, second) = (operands.input("x", &first)?, operands.input("x", &second)?);
        let out = operands.input("out", out)?;
        let loops = Loops::new([&out, &first, &second]);
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), Gated(activation, order)) })
    }

    fn rope(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, style: RopeStyle, out: &Tensor) -> Result<()> {
        let (rope, n_rows) = check::rope(self.operands("rope"), x, cos, sin, style, out)?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { lookup::rope::<S>(&self.context(), rope, n_rows) })
    }

    fn embedding(&self, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()> {
        let [n_table_rows, n_cols] = contract::embedding(ids, table, out)?;
        let operands = self.operands("embedding");
        let op = operands.op;
        let id_view = operands.input::<i32>("ids", ids)?;
        let table_start = weights::table(op, table, self.isa)?;
        let out_view = operands.input::<f32>("out", out)?;
        let (id_rows, per_row) = (id_view.rows(), id_view.n_cols());
        let n_ids = id_view.shape.n_elements();
        // SAFETY: the view was checked; `i` is below its number of elements.
        let id = |i: usize| unsafe { *id_rows.row(i / per_row).add(i % per_row) };
        if let Some(id) = (0..n_ids)
            .map(id)
            .find(|id| usize::try_from(*id).map_or(true, |id| id >= n_table_rows))
        {
            let detail = format!("id {id} in a table of {n_table_rows} rows");
            return Err(TensorError::Shape { op, detail });
        }
        let row_of = |i: usize| table_start.at(id(i) as usize * n_cols).cast_const();
        // SAFETY: all ids are rows of the table, which is memory that nothing writes.
        unsafe { lookup::gather(&self.context(), out_view.rows(), n_ids, n_cols, &row_of) }
    }

    fn gather_rows(&self, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
        contract::gather_rows(x, rows, out)?;
        let operands = self.operands("gather_rows");
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let row_view = operands.input::<i32>("rows", rows)?;
        let out_view = operands.input::<f32>("out", out)?;
        // SAFETY: the view was checked, and `i` is below its length.
        let row = |i: usize| unsafe { *row_view.start.at(i) };
        let n_rows = view.dim(1);
        if let Some(row) = (0..view.dim(0))
            .map(row)
            .find(|row| usize::try_from(*row).map_or(true, |row| row >= n_rows))
        {
            let detail = format!("row {row} of {n_rows}");
            return Err(TensorError::Shape { op, detail });
        }
        let row_of = |i: usize| {
            view.start
                .at(i * view.stride(0) + row(i) as usize * view.stride(1))
                .cast_const()
        };
        // SAFETY: all rows lie in `x`, which does not overlap the output.
        unsafe {
            lookup::gather(
                &self.context(),
                out_view.rows(),
                view.dim(0),
                view.dim(2),
                &row_of,
            )
        }
    }

    fn timestep_embedding(&self, timesteps: &Tensor, spec: &TimestepSpec, out: &Tensor) -> Result<()> {
        contract::timestep_embedding(timesteps, out)?;
        let operands = self.operands("timestep_embedding");
        let view = operands.input::<f32>("timesteps", timesteps)?;
        let out_view = operands.input::<f32>("out", out)?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::timestep_embedding(&view, spec, &out_view) };
        Ok(())
    }

    fn patchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        contract::patchify(x, patch, out)?;
        let operands = self.operands("patchify");
        let image = operands.input::<f32>("x", x)?;
        let tokens = operands.input::<f32>("out", out)?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::patches(&self.context(), &image, &tokens, patch, order, true) }
    }

    fn unpatchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        contract::unpatchify(x, patch, out)?;
        let operands = self.operands("unpatchify");
        let tokens = operands.input::<f32>("x", x)?;
        let image = operands.input::<f32>("out", out)?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::patches(&self.context(), &image, &tokens, patch, order, false) }
    }

    fn permute(&self, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
        contract::permute(x, axes, out)?;
        let operands = self.operands("permute");
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.input::<f32>("out", out)?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::permute(&self.context(), &view, axes, &out_view) }
    }

    fn upsample_nearest(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        contract::upsample_nearest(x, out)?;
        let operands = self.operands("upsample_nearest");
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.input::<f32>("out", out)?;
        let (height, width, n_cols) = (out.dim(1), out.dim(2), out.dim(3));
        let row_of = |i: usize| {
            let (rest, x_idx) = (i / width, i % width);
            let (batch_idx, y_idx) = (rest / height, rest % height);
            let offset = batch_idx * view.stride(0) + y_idx / 2 * view.stride(1) + x_idx / 2 * view.stride(2);
            view.start.at(offset).cast_const()
        };
        let n_rows = out.dim(0) * height * width;
        // SAFETY: both operands were checked above.
        unsafe { lookup::gather(&self.context(), out_view.rows(), n_rows, n_cols, &row_of) }
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        contract::copy(x, out)?;
        let operands = self.operands("copy");
        let (from, to) = (x.dtype(), out.dtype());
        if (from, to) == (DType::F32, DType::F32) {
            let view = operands.input("x", x)?;
            let out = operands.input("out", out)?;
            let loops = Loops::new([&out, &view]);
            // SAFETY: both operands were checked above.
            return with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), CopyElements {}) });
        }
        let (view, out_view) = (operands.untyped("x", x)?, operands.untyped("out", out)?);
        // SAFETY: both operands were checked above.
        unsafe { lookup::convert(&self.context(), &view, from, &out_view, to) }
    }

    fn fill(&self, out: &Tensor, value: f32) -> Result<()> {
        contract::fill(out)?;
        let out = self.operands("fill").input("out", out)?;
        let loops = Loops::new([&out]);
        // SAFETY: the output was checked.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), Fill { value }) })
    }

    fn step(&self, args: &StepArgs<'_>, out: &Tensor) -> Result<()> {
        let n_batch = contract::step(args, out)?.n_batch;
        let operands = self.operands("step");
        let latents = operands.input::<f32>("latents", args.latents)?;
        let conditional = operands.input::<f32>("conditional", args.conditional)?;
        let (unconditional, guidance) = match args.unconditional {
            Some((unconditional, guidance)) => (
                operands.input("unconditional", unconditional)?,
                Some(operands.input::<f32>("guidance", guidance)?),
            ),
            None => (conditional, None),
        };
        let noise = match args.noise {
            Some(noise) => operands.input("noise", noise)?,
            None => conditional,
        };
        let coefficients = operands.input::<f32>("coefficients", args.coefficients)?;
        let guided_out = match args.guided_out {
            Some(guided_out) => Some(operands.input::<f32>("guided_out", guided_out)?),
            None => None,
        };
        let out = operands.input::<f32>("out", out)?;
        let context = self.context();
        for batch_idx in 0..n_batch {
            let element = |view: &View<f32>| view.batch_element(batch_idx);
            // SAFETY: `[batch, 3]`, checked above.
            let factor = |i: usize| unsafe { *coefficients.start.at(batch_idx * coefficients.stride(0) + i) };
            // SAFETY: `[batch]`, checked above.
            let guidance = guidance.map(|guidance| unsafe { *guidance.start.at(batch_idx) });
            let step = Step {
                factors: [factor(0), factor(1), factor(2)],
                guidance,
                has_noise: args.noise.is_some(),
            };
            let (cond, uncond) = (element(&conditional), element(&unconditional));
            if let Some(guided_out) = &guided_out {
                let guided_out = element(guided_out);
                match guidance {
                    Some(guidance) => {
                        let loops = Loops::new([&guided_out, &cond, &uncond]);
                        // SAFETY: all operands were checked above.
                        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&context, Guide { guidance }) })?;
                    }
                    None => {
                        let loops = Loops::new([&guided_out, &cond]);
                        // SAFETY: as above.
                        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&context, CopyElements {}) })?;
                    }
                }
            }
            let loops = Loops::new([
                &element(&out),
                &element(&latents),
                &cond,
                &uncond,
                &element(&noise),
            ]);
            // SAFETY: as above.
            with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&context, step) })?;
        }
        Ok(())
    }

    fn to_pixels(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        contract::to_pixels(x, out)?;
        if out.dtype() == DType::F32 {
            return self.unary("to_pixels", ToUnit {}, x, out);
        }
        let operands = self.operands("to_pixels");
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.input::<u8>("out", out)?;
        let n_cols = view.n_cols();
        let n_rows = view.shape.n_elements() / n_cols;
        let (rows, out_rows) = (view.rows(), out_view.rows());
        // SAFETY: both operands were checked above.
        with_isa!(self.isa, S => unsafe { elementwise::to_bytes::<S>(&self.context(), rows, out_rows, n_rows, n_cols) })
    }

    fn all_finite(&self, x: &Tensor) -> Result<bool> {
        let view = self.operands("all_finite").input::<f32>("x", x)?;
        // SAFETY: the operand was checked above.
        with_isa!(self.isa, S => unsafe { elementwise::all_finite::<S>(&self.context(), &view) })
    }
}
