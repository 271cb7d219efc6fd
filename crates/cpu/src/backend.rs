//! [`CpuBackend`]: what each op accepts. Checks first, then one call into the kernels.

use crate::{
    Context, Isa,
    attention::{self, Attention, Bias},
    conv::{self, Walk},
    elementwise::{
        self, Activate, Add, Affine, CopyElements, Fill, Gated, GatedAdd, Guide, Loops, Multiply, Step,
        ToUnit,
    },
    gemm::{self, Finish, MatrixRows},
    lookup::{self, Rope},
    memory::{CpuBuffer, Memory},
    norm::{self, GroupNorm, LayerNorm, RmsNorm},
    operand::{Operands, Ptr, View, ensure, shape_error},
    simd::with_isa,
    threads::{MAX_THREADS, Pool},
    weights::{self, Operator},
    winograd,
};
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, DeviceInfo, Epilogue, GateOrder, MemoryStats,
    Modulation, PatchOrder, PrepareInput, Prepared, Result, RopeStyle, StepArgs, Tensor, TensorError,
    TimestepSpec, Weight, WeightKind, WeightSpec,
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
    /// their weights and a larger rounding error (relative L2 4e-6 instead of 8e-7 per layer). All ranks of a host must agree on it.
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
        }
    }

    /// The finish of a product or convolution whose output is `out` (`n` columns, not yet checked against `inputs`).
    fn finish(
        &self,
        operands: Operands<'_>,
        epilogue: &Epilogue<'_>,
        out: &Tensor,
        x: &Tensor,
    ) -> Result<Finish> {
        let op = operands.op;
        let mut inputs = vec![("x", x, false)];
        inputs.extend(epilogue.gate.map(|gate| ("gate", gate, false)));
        inputs.extend(epilogue.residual.map(|residual| ("residual", residual, true)));
        let view = operands.output::<f32>(out, &inputs)?;
        let n = view.n_cols();
        let n_batch = if view.n_dims() > 1 { view.dim(0) } else { 1 };
        let bias = match epilogue.bias {
            Some(bias) => Some(weights::vector(op, "bias", bias, n, self.isa)?),
            None => None,
        };
        let gate = match epilogue.gate {
            Some(gate) => Some(per_batch(operands, "gate", gate, n_batch, n)?),
            None => None,
        };
        let residual = match epilogue.residual {
            Some(residual) => {
                operands.same_dims("residual", residual.dims(), out.dims())?;
                Some(operands.input::<f32>("residual", residual)?.rows())
            }
            None => None,
        };
        Ok(Finish {
            bias,
            activation: epilogue.activation,
            gate,
            rows_per_batch: view.shape.n_elements() / n / n_batch,
            residual,
            out: view.rows(),
        })
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
        let operands = self.operands(op);
        operands.same_dims("a", a.dims(), out.dims())?;
        let (a_view, b_view) = (operands.input("a", a)?, operands.input("b", b)?);
        let out = operands.output(out, &[("a", a, true), ("b", b, false)])?;
        let loops = Loops::new(op, [&out, &a_view, &b_view])?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), run_op) })
    }

    /// An element-wise op on one input, which may be the output.
    fn unary<O: elementwise::RunOp<2>>(
        &self,
        op: &'static str,
        run_op: O,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let operands = self.operands(op);
        operands.same_dims("x", x.dims(), out.dims())?;
        let x_view = operands.input("x", x)?;
        let out = operands.output(out, &[("x", x, true)])?;
        let loops = Loops::new(op, [&out, &x_view])?;
        // SAFETY: both operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), run_op) })
    }
}

/// `[batch, n]` or `[1, n]` as first row and distance of rows.
fn per_batch(
    operands: Operands<'_>,
    name: &str,
    tensor: &Tensor,
    n_batch: usize,
    n: usize,
) -> Result<(Ptr<f32>, usize)> {
    let view = operands.input::<f32>(name, tensor)?;
    let fits = view.n_dims() == 2 && view.dim(1) == n && (view.dim(0) == n_batch || view.dim(0) == 1);
    ensure(operands.op, fits, || {
        format!(
            "{name} is {:?}, expected [{n_batch}, {n}] or [1, {n}]",
            tensor.dims()
        )
    })?;
    Ok((view.start, if view.dim(0) == 1 { 0 } else { view.stride(0) }))
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
        let rows = View {
            start: Ptr(view.start.get()),
            ..view
        }
        .rows();
        let row_bytes = view.n_cols() * size;
        for (row_idx, to) in out.chunks_exact_mut(row_bytes).enumerate() {
            let offset = rows.row(row_idx).addr() - view.start.get().addr();
            let from = view.start.at(offset * size);
            // SAFETY: the row lies in the view; strides counted elements, hence the factor.
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
        let operands = self.operands("linear");
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let panels = match (weights::packed(op, w, self.isa)?, w.kind) {
            (Operator::Packed(panels), WeightKind::Matrix) => panels,
            _ => {
                let detail = format!("weight is a {:?}, expected a matrix", w.kind);
                return Err(TensorError::Operand { op, detail });
            }
        };
        let leading = &x.dims()[..x.dims().len() - 1];
        let fits = view.n_cols() == panels.k
            && out.shape().last() == panels.n
            && out.dims().len() == x.dims().len()
            && &out.dims()[..leading.len()] == leading;
        ensure(op, fits, || {
            format!("x {:?} times {:?} to out {:?}", x.dims(), w.shape, out.dims())
        })?;
        let finish = self.finish(operands, epilogue, out, x)?;
        let n_rows = view.shape.n_elements() / panels.k;
        let source = MatrixRows {
            rows: view.rows(),
            k: panels.k,
        };
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
        let operands = self.operands("conv2d");
        let op = operands.op;
        let image = operands.input::<f32>("x", x)?;
        let operator = weights::packed(op, w, self.isa)?;
        if w.kind != (WeightKind::Conv { stride: spec.stride }) {
            let detail = format!(
                "weight is a {:?}, expected a convolution of stride {}",
                w.kind, spec.stride
            );
            return Err(TensorError::Operand { op, detail });
        }
        let &[c_out, c_in, kernel_height, kernel_width] = &*w.shape else {
            return shape_error(op, format!("weight {:?}", w.shape));
        };
        ensure(op, x.dims().len() == 4 && x.dim(3) == c_in, || {
            format!("x is {:?}, expected [batch, h, w, {c_in}]", x.dims())
        })?;
        ensure(op, matches!(spec.upsample, 1 | 2), || {
            format!("upsample is {}, expected 1 or 2", spec.upsample)
        })?;
        let [top, left, bottom, right] = spec.padding;
        let extent = |side: usize, before: usize, after: usize, taps: usize| {
            let padded = (side * spec.upsample).checked_add(before)?.checked_add(after)?;
            Some(padded.checked_sub(taps)? / spec.stride + 1)
        };
        let out_height = extent(x.dim(1), top, bottom, kernel_height);
        let out_width = extent(x.dim(2), left, right, kernel_width);
        let (Some(out_height), Some(out_width)) = (out_height, out_width) else {
            return shape_error(
                op,
                format!("{spec:?} of x {:?} with weight {:?}", x.dims(), w.shape),
            );
        };
        operands.same_dims("out", out.dims(), &[x.dim(0), out_height, out_width, c_out])?;
        let finish = self.finish(operands, epilogue, out, x)?;
        let walk = Walk {
            image,
            spec: *spec,
            kernel_height,
            kernel_width,
            out_height,
            out_width,
        };
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
        let operands = self.operands("attention");
        let op = operands.op;
        let (q_view, k_view, v_view) = (
            operands.input("q", q)?,
            operands.input("k", k)?,
            operands.input("v", v)?,
        );
        let mut inputs = vec![("q", q, false), ("k", k, false), ("v", v, false)];
        inputs.extend(spec.bias.map(|bias| ("bias", bias, false)));
        let out_view = operands.output(out, &inputs)?;
        operands.same_dims("out", out.dims(), q.dims())?;
        operands.same_dims("v", v.dims(), k.dims())?;
        let (n_heads, n_kv_heads) = (spec.n_heads, spec.n_kv_heads);
        let heads_fit = n_heads > 0 && n_kv_heads > 0 && n_heads.is_multiple_of(n_kv_heads);
        let fits = heads_fit
            && q.dims().len() == 3
            && k.dims().len() == 3
            && q.dim(0) == k.dim(0)
            && q.dim(2).is_multiple_of(n_heads)
            && Some(k.dim(2)) == (q.dim(2) / n_heads).checked_mul(n_kv_heads);
        ensure(op, fits, || {
            format!(
                "q {:?}, k {:?} with {n_heads} heads and {n_kv_heads} of keys",
                q.dims(),
                k.dims()
            )
        })?;
        ensure(op, !spec.is_causal || q.dim(1) == k.dim(1), || {
            format!("causal with {} queries and {} keys", q.dim(1), k.dim(1))
        })?;
        let bias = match spec.bias {
            Some(bias) => {
                let view = operands.input::<f32>("bias", bias)?;
                let whole = [q.dim(0), n_heads, q.dim(1), k.dim(1)];
                let fits = view.n_dims() == 4
                    && view
                        .dims()
                        .iter()
                        .zip(&whole)
                        .all(|(own, whole)| own == whole || *own == 1);
                ensure(op, fits, || {
                    format!("bias {:?} does not broadcast to {whole:?}", bias.dims())
                })?;
                let strides = std::array::from_fn(|i| if view.dim(i) > 1 { view.stride(i) } else { 0 });
                Some(Bias {
                    start: view.start,
                    strides,
                })
            }
            None => None,
        };
        let attention = Attention {
            q: q_view,
            k: k_view,
            v: v_view,
            out: out_view,
            n_heads,
            n_kv_heads,
            scale: spec.scale,
            is_causal: spec.is_causal,
            bias,
        };
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
        let operands = self.operands("layer_norm");
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let mut inputs = vec![("x", x, true)];
        if let Some(modulation) = &modulation {
            inputs.extend([
                ("scale", modulation.scale, false),
                ("shift", modulation.shift, false),
            ]);
        }
        let out_view = operands.output::<f32>(out, &inputs)?;
        operands.same_dims("out", out.dims(), x.dims())?;
        let n_cols = view.n_cols();
        let n_batch = if view.n_dims() > 1 { view.dim(0) } else { 1 };
        let n_rows = view.shape.n_elements() / n_cols;
        let weight = match affine {
            Some((weight, _)) => Some(weights::vector(op, "weight", weight, n_cols, self.isa)?),
            None => None,
        };
        let bias = match affine {
            Some((_, Some(bias))) => Some(weights::vector(op, "bias", bias, n_cols, self.isa)?),
            _ => None,
        };
        let modulation = match modulation {
            Some(modulation) => Some([
                per_batch(operands, "scale", modulation.scale, n_batch, n_cols)?,
                per_batch(operands, "shift", modulation.shift, n_batch, n_cols)?,
            ]),
            None => None,
        };
        let norm = LayerNorm {
            x: view.rows(),
            out: out_view.rows(),
            n_cols,
            eps,
            weight,
            bias,
            modulation,
            rows_per_batch: n_rows / n_batch,
        };
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
        let operands = self.operands("rms_norm");
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.output::<f32>(out, &[("x", x, true)])?;
        operands.same_dims("out", out.dims(), x.dims())?;
        let n_cols = view.n_cols();
        ensure(op, group_len > 0 && n_cols.is_multiple_of(group_len), || {
            format!("groups of {group_len} in rows of {n_cols}")
        })?;
        let weight = match weight {
            Some(weight) => Some(weights::vector(op, "weight", weight, group_len, self.isa)?),
            None => None,
        };
        let norm = RmsNorm {
            x: view.rows(),
            out: out_view.rows(),
            n_cols,
            group_len,
            eps,
            weight,
        };
        let n_rows = view.shape.n_elements() / n_cols;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { norm::rms_norm::<S>(&self.context(), norm, n_rows) })
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
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.output::<f32>(out, &[("x", x, true)])?;
        operands.same_dims("out", out.dims(), x.dims())?;
        let n_cols = view.n_cols();
        let fits = view.n_dims() > 1 && n_groups > 0 && n_cols.is_multiple_of(n_groups);
        ensure(op, fits, || format!("{n_groups} groups of x {:?}", x.dims()))?;
        let norm = GroupNorm {
            x: view,
            out: out_view,
            weight: weights::vector(op, "weight", affine.0, n_cols, self.isa)?,
            bias: weights::vector(op, "bias", affine.1, n_cols, self.isa)?,
            n_groups,
            eps,
            activation,
        };
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
        let operands = self.operands("gated_add");
        operands.same_dims("residual", residual.dims(), out.dims())?;
        operands.same_dims("x", x.dims(), out.dims())?;
        let (r_view, g_view) = (
            operands.input("residual", residual)?,
            operands.input("gate", gate)?,
        );
        let x_view = operands.input("x", x)?;
        let out = operands.output(
            out,
            &[
                ("residual", residual, true),
                ("gate", gate, false),
                ("x", x, false),
            ],
        )?;
        let loops = Loops::new(operands.op, [&out, &r_view, &g_view, &x_view])?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), GatedAdd {}) })
    }

    fn affine(&self, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()> {
        self.unary("affine", Affine { scale, shift }, x, out)
    }

    fn activation(&self, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()> {
        self.unary("activation", Activate(activation), x, out)
    }

    fn gated(&self, x: &Tensor, activation: Activation, order: GateOrder, out: &Tensor) -> Result<()> {
        let operands = self.operands("gated");
        let last = x.dims().len() - 1;
        let half = x.dim(last) / 2;
        let mut expected = x.dims().to_vec();
        expected[last] = half;
        ensure(
            operands.op,
            x.dim(last).is_multiple_of(2) && out.dims() == expected,
            || format!("x {:?} to out {:?}", x.dims(), out.dims()),
        )?;
        let first = operands.input("x", &x.narrow(last, 0, half)?)?;
        let second = operands.input("x", &x.narrow(last, half, half)?)?;
        let out = operands.output(out, &[("x", x, false)])?;
        let loops = Loops::new(operands.op, [&out, &first, &second])?;
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), Gated(activation, order)) })
    }

    fn rope(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, style: RopeStyle, out: &Tensor) -> Result<()> {
        let operands = self.operands("rope");
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let (cos_view, sin_view) = (
            operands.input::<f32>("cos", cos)?,
            operands.input::<f32>("sin", sin)?,
        );
        let out_view =
            operands.output::<f32>(out, &[("x", x, true), ("cos", cos, false), ("sin", sin, false)])?;
        operands.same_dims("out", out.dims(), x.dims())?;
        operands.same_dims("sin", sin.dims(), cos.dims())?;
        let fits = view.n_dims() == 3
            && cos.dims().len() == 2
            && cos.dim(0) == view.dim(1)
            && view.n_cols().is_multiple_of(2 * cos.dim(1));
        ensure(op, fits, || {
            format!("x {:?} with angles {:?}", x.dims(), cos.dims())
        })?;
        let half = cos.dim(1);
        let rope = Rope {
            x: view.rows(),
            out: out_view.rows(),
            cos: cos_view.rows(),
            sin: sin_view.rows(),
            n_tokens: view.dim(1),
            n_heads: view.n_cols() / (2 * half),
            half,
            style,
        };
        // SAFETY: all operands were checked above.
        with_isa!(self.isa, S => unsafe { lookup::rope::<S>(&self.context(), rope, view.dim(0) * view.dim(1)) })
    }

    fn embedding(&self, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()> {
        let operands = self.operands("embedding");
        let op = operands.op;
        let id_view = operands.input::<i32>("ids", ids)?;
        let table_start = weights::table(op, table, self.isa)?;
        let out_view = operands.output::<f32>(out, &[("ids", ids, false)])?;
        let (n_table_rows, n_cols) = (table.shape[0], table.shape[1]);
        let fits = out.dims().len() == ids.dims().len() + 1
            && &out.dims()[..ids.dims().len()] == ids.dims()
            && out.shape().last() == n_cols;
        ensure(op, fits, || {
            format!(
                "ids {:?} of table {:?} to out {:?}",
                ids.dims(),
                table.shape,
                out.dims()
            )
        })?;
        let (id_rows, per_row) = (id_view.rows(), id_view.n_cols());
        let n_ids = id_view.shape.n_elements();
        // SAFETY: the view was checked; `i` is below its number of elements.
        let id = |i: usize| unsafe { *id_rows.row(i / per_row).add(i % per_row) };
        if let Some(id) = (0..n_ids)
            .map(id)
            .find(|id| usize::try_from(*id).map_or(true, |id| id >= n_table_rows))
        {
            return shape_error(op, format!("id {id} in a table of {n_table_rows} rows"));
        }
        let row_of = |i: usize| table_start.at(id(i) as usize * n_cols).cast_const();
        // SAFETY: all ids are rows of the table, which is memory that nothing writes.
        unsafe { lookup::gather(&self.context(), out_view.rows(), n_ids, n_cols, &row_of) }
    }

    fn gather_rows(&self, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
        let operands = self.operands("gather_rows");
        let op = operands.op;
        let view = operands.input::<f32>("x", x)?;
        let row_view = operands.input::<i32>("rows", rows)?;
        let out_view = operands.output::<f32>(out, &[("x", x, false), ("rows", rows, false)])?;
        let fits =
            view.n_dims() == 3 && rows.dims() == [view.dim(0)] && out.dims() == [view.dim(0), view.dim(2)];
        ensure(op, fits, || {
            format!(
                "rows {:?} of x {:?} to out {:?}",
                rows.dims(),
                x.dims(),
                out.dims()
            )
        })?;
        // SAFETY: the view was checked, and `i` is below its length.
        let row = |i: usize| unsafe { *row_view.start.at(i) };
        let n_rows = view.dim(1);
        if let Some(row) = (0..view.dim(0))
            .map(row)
            .find(|row| usize::try_from(*row).map_or(true, |row| row >= n_rows))
        {
            return shape_error(op, format!("row {row} of {n_rows}"));
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
        let operands = self.operands("timestep_embedding");
        let view = operands.input::<f32>("timesteps", timesteps)?;
        let out_view = operands.output::<f32>(out, &[("timesteps", timesteps, false)])?;
        let fits = view.n_dims() == 1
            && out_view.n_dims() == 2
            && out.dim(0) == view.dim(0)
            && out.dim(1).is_multiple_of(2);
        ensure(operands.op, fits, || {
            format!("timesteps {:?} to out {:?}", timesteps.dims(), out.dims())
        })?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::timestep_embedding(&view, spec, &out_view) };
        Ok(())
    }

    fn patchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        let operands = self.operands("patchify");
        let image = operands.input::<f32>("x", x)?;
        let tokens = operands.output::<f32>(out, &[("x", x, false)])?;
        check_patches(operands.op, &image, &tokens, patch)?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::patches(&self.context(), &image, &tokens, patch, order, true) }
    }

    fn unpatchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        let operands = self.operands("unpatchify");
        let tokens = operands.input::<f32>("x", x)?;
        let image = operands.output::<f32>(out, &[("x", x, false)])?;
        check_patches(operands.op, &image, &tokens, patch)?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::patches(&self.context(), &image, &tokens, patch, order, false) }
    }

    fn permute(&self, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
        let operands = self.operands("permute");
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.output::<f32>(out, &[("x", x, false)])?;
        let n_dims = view.n_dims();
        let is_permutation = axes.len() == n_dims && (0..n_dims).all(|dim_idx| axes.contains(&dim_idx));
        let fits = is_permutation
            && out_view.n_dims() == n_dims
            && axes
                .iter()
                .enumerate()
                .all(|(dim_idx, &axis)| out.dim(dim_idx) == x.dim(axis));
        ensure(operands.op, fits, || {
            format!("axes {axes:?} of x {:?} to out {:?}", x.dims(), out.dims())
        })?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::permute(&self.context(), &view, axes, &out_view) }
    }

    fn upsample_nearest(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        let operands = self.operands("upsample_nearest");
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.output::<f32>(out, &[("x", x, false)])?;
        let fits = view.n_dims() == 4 && out.dims() == [x.dim(0), x.dim(1) * 2, x.dim(2) * 2, x.dim(3)];
        ensure(operands.op, fits, || {
            format!("x {:?} to out {:?}", x.dims(), out.dims())
        })?;
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
        let operands = self.operands("copy");
        let op = operands.op;
        let (from, to) = (x.dtype(), out.dtype());
        if !lookup::converts(from, to) {
            return Err(TensorError::DType {
                op,
                dtype: to,
                expected: "a float, or the dtype of x",
            });
        }
        if (from, to) == (DType::F32, DType::F32) {
            let view = operands.input("x", x)?;
            let out = operands.output(out, &[("x", x, false)])?;
            let loops = Loops::new(op, [&out, &view])?;
            // SAFETY: both operands were checked above.
            return with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), CopyElements {}) });
        }
        let (view, out_view) = (operands.untyped("x", x)?, operands.untyped("out", out)?);
        operands.writable(out, &[("x", x, false)])?;
        let n_missing = out_view.n_dims().checked_sub(view.n_dims());
        let fits = n_missing.is_some_and(|n_missing| {
            let mut pairs = view.dims().iter().zip(&out_view.dims()[n_missing..]);
            pairs.all(|(own, whole)| own == whole || *own == 1)
        });
        ensure(op, fits, || {
            format!("x {:?} does not broadcast to out {:?}", x.dims(), out.dims())
        })?;
        // SAFETY: both operands were checked above.
        unsafe { lookup::convert(&self.context(), &view, from, &out_view, to) }
    }

    fn fill(&self, out: &Tensor, value: f32) -> Result<()> {
        let out = self.operands("fill").output(out, &[])?;
        let loops = Loops::new("fill", [&out])?;
        // SAFETY: the output was checked.
        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&self.context(), Fill { value }) })
    }

    fn step(&self, args: &StepArgs<'_>, out: &Tensor) -> Result<()> {
        let operands = self.operands("step");
        let op = operands.op;
        let mut inputs = vec![
            ("conditional", args.conditional, false),
            ("coefficients", args.coefficients, false),
        ];
        if let Some((unconditional, guidance)) = args.unconditional {
            inputs.extend([
                ("unconditional", unconditional, false),
                ("guidance", guidance, false),
            ]);
        }
        inputs.extend(args.noise.map(|noise| ("noise", noise, false)));
        let view = |name, tensor: &Tensor| {
            operands.same_dims(name, tensor.dims(), out.dims())?;
            operands.input::<f32>(name, tensor)
        };
        let latents = view("latents", args.latents)?;
        let conditional = view("conditional", args.conditional)?;
        let unconditional = match args.unconditional {
            Some((unconditional, _)) => view("unconditional", unconditional)?,
            None => conditional,
        };
        let noise = match args.noise {
            Some(noise) => view("noise", noise)?,
            None => conditional,
        };
        let n_batch = out.dim(0);
        let coefficients = operands.input::<f32>("coefficients", args.coefficients)?;
        operands.same_dims("coefficients", args.coefficients.dims(), &[n_batch, 3])?;
        let guidance = match args.unconditional {
            Some((_, guidance)) => {
                operands.same_dims("guidance", guidance.dims(), &[n_batch])?;
                Some(operands.input::<f32>("guidance", guidance)?)
            }
            None => None,
        };
        let guided_out = match args.guided_out {
            Some(guided_out) => {
                operands.same_dims("guided_out", guided_out.dims(), out.dims())?;
                let mut all = inputs.clone();
                all.extend([("latents", args.latents, false), ("out", out, false)]);
                Some(operands.output::<f32>(guided_out, &all)?)
            }
            None => None,
        };
        inputs.push(("latents", args.latents, true));
        let out = operands.output::<f32>(out, &inputs)?;
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
                        let loops = Loops::new(op, [&guided_out, &cond, &uncond])?;
                        // SAFETY: all operands were checked above.
                        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&context, Guide { guidance }) })?;
                    }
                    None => {
                        let loops = Loops::new(op, [&guided_out, &cond])?;
                        // SAFETY: as above.
                        with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&context, CopyElements {}) })?;
                    }
                }
            }
            let loops = Loops::new(
                op,
                [
                    &element(&out),
                    &element(&latents),
                    &cond,
                    &uncond,
                    &element(&noise),
                ],
            )?;
            // SAFETY: as above.
            with_isa!(self.isa, S => unsafe { loops.run::<S, _>(&context, step) })?;
        }
        Ok(())
    }

    fn to_pixels(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        if out.dtype() == DType::F32 {
            return self.unary("to_pixels", ToUnit {}, x, out);
        }
        let operands = self.operands("to_pixels");
        let view = operands.input::<f32>("x", x)?;
        let out_view = operands.output::<u8>(out, &[("x", x, false)])?;
        operands.same_dims("out", out.dims(), x.dims())?;
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

/// Whether an image `[batch, h, w, c]` and tokens fit each other.
fn check_patches(op: &'static str, image: &View<f32>, tokens: &View<f32>, patch: usize) -> Result<()> {
    let fits = image.n_dims() == 4
        && tokens.n_dims() == 3
        && patch > 0
        && image.dim(1).is_multiple_of(patch)
        && image.dim(2).is_multiple_of(patch)
        && tokens.dim(0) == image.dim(0)
        && tokens.dim(1) == (image.dim(1) / patch) * (image.dim(2) / patch)
        && Some(tokens.dim(2)) == patch.checked_mul(patch).and_then(|n| n.checked_mul(image.dim(3)));
    ensure(op, fits, || {
        format!(
            "image {:?} in patches of {patch} and tokens {:?}",
            image.dims(),
            tokens.dims()
        )
    })
}
