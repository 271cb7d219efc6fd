//! A backend of 16-bit floats that needs no device: each op is computed in f32 by another backend, and its output rounded.
//!
//! What it is for: the pipeline's rules on dtypes, its accuracy in 16 bits, and what a body for [`Backend::repeat`] may do.
//!
//! R1. Every op's operands pass `denoised_tensor::check`, so a mixture of dtypes that the contract does not take is an error. So are
//!     activations of another dtype than their weight was prepared for.
//! R2. The body of a repetition is run each time, and must enqueue the same ops with the same constants for the same key and inputs, read
//!     nothing that was made outside but its inputs and weights, and not wait. Anything else is an error.

use denoised_tensor::{
    Activation, AttentionSpec, Backend, Buffer, ConvSpec, DType, DeviceInfo, Epilogue, GateOrder,
    MemoryStats, Modulation, PatchOrder, PrepareInput, Prepared, Result, RopeStyle, SourceDType, SourceError,
    SourceTensor, StepArgs, Tensor, TensorError, TimestepSpec, Weight, WeightKind, WeightSource, WeightSpec,
    check,
};
use half::{bf16, f16};
use std::{
    any::Any,
    borrow::Cow,
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    fmt::{Debug, Write},
    rc::Rc,
    sync::Arc,
};

/// Memory of the host, elements as their dtype has them.
#[derive(Debug)]
struct HostBuffer {
    /// Counts up in the order of creation.
    id: u64,
    bytes: RefCell<Vec<u8>>,
    is_writable: bool,
}

impl Buffer for HostBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn len_bytes(&self) -> usize {
        self.bytes.borrow().len()
    }
    fn is_writable(&self) -> bool {
        self.is_writable
    }
}

/// What a body has done so far.
#[derive(Debug)]
struct Body {
    log: String,
    /// Buffers from this id on were made inside.
    first_id: u64,
    inputs: HashSet<u64>,
}

/// See the module's head.
#[derive(Debug)]
pub struct RoundingBackend {
    inner: Rc<dyn Backend>,
    dtype: DType,
    next_id: Cell<u64>,
    body: RefCell<Option<Body>>,
    /// Dtype of the activations of each weight, by its set's address and its place there.
    weight_dtypes: RefCell<HashMap<(usize, usize), DType>>,
    /// What each key with its inputs enqueued when it came first.
    recordings: RefCell<HashMap<(u64, String), String>>,
    n_repeated: Cell<usize>,
}

impl RoundingBackend {
    /// Claims `dtype`, computes on `inner`, a backend of f32.
    pub fn new(inner: Rc<dyn Backend>, dtype: DType) -> Self {
        Self {
            inner,
            dtype,
            next_id: Cell::new(0),
            body: RefCell::new(None),
            weight_dtypes: RefCell::default(),
            recordings: RefCell::default(),
            n_repeated: Cell::new(0),
        }
    }

    /// How many bodies were run of which a recording was there.
    pub fn n_repeated(&self) -> usize {
        self.n_repeated.get()
    }

    fn take(&self, bytes: Vec<u8>, dims: &[usize], dtype: DType, is_writable: bool) -> Result<Tensor> {
        let id = self.next_id.replace(self.next_id.get() + 1);
        let bytes = RefCell::new(bytes);
        let buffer = HostBuffer {
            id,
            bytes,
            is_writable,
        };
        Tensor::from_buffer(Rc::new(buffer), dims, dtype)
    }

    /// Notes an op of a body.
    fn note(&self, what: &dyn Debug) {
        if let Some(body) = &mut *self.body.borrow_mut() {
            let _ = writeln!(body.log, "{what:?}");
        }
    }

    fn wait(&self, op: &'static str) -> Result<()> {
        match &*self.body.borrow() {
            None => Ok(()),
            Some(_) => Err(operand(op, "a body that is repeated must not wait".to_owned())),
        }
    }

    /// The buffer of an operand, if a body may touch it.
    fn host<'a>(&self, x: &'a Tensor) -> Result<&'a HostBuffer> {
        let buffer = x.buffer().as_any().downcast_ref::<HostBuffer>();
        let buffer = buffer.ok_or_else(|| operand("rounding", "a tensor of another backend".to_owned()))?;
        if let Some(body) = &*self.body.borrow()
            && buffer.is_writable
            && buffer.id < body.first_id
            && !body.inputs.contains(&buffer.id)
        {
            let text = format!("a body that is repeated touches {x:?}, which is none of its inputs");
            return Err(operand("repeat", text));
        }
        Ok(buffer)
    }

    /// Refuses a product of `x` with a weight for activations of another dtype.
    fn check_weight(&self, op: &'static str, x: &Tensor, w: &Weight) -> Result<()> {
        let dtypes = self.weight_dtypes.borrow();
        let dtype = dtypes.get(&place_of(w)).copied();
        let dtype = dtype.ok_or_else(|| operand(op, "a weight of another backend".to_owned()))?;
        check::has_dtype(op, x, dtype)
    }

    /// The elements of `x`, row-major.
    fn bytes(&self, x: &Tensor) -> Result<Vec<u8>> {
        let size = x.dtype().size_bytes();
        let bytes = self.host(x)?.bytes.borrow();
        let places = places(x).into_iter();
        Ok(places
            .flat_map(|at| bytes[at * size..][..size].to_vec())
            .collect())
    }

    fn store(&self, bytes: &[u8], out: &Tensor) -> Result<()> {
        let size = out.dtype().size_bytes();
        let mut all = self.host(out)?.bytes.borrow_mut();
        for (element, at) in bytes.chunks_exact(size).zip(places(out)) {
            all[at * size..][..size].copy_from_slice(element);
        }
        Ok(())
    }

    /// `x` on the inner backend, floats as f32.
    fn wide(&self, x: &Tensor) -> Result<Tensor> {
        let bytes = self.bytes(x)?;
        if !x.dtype().is_float() {
            return self.inner.upload(&bytes, x.dims(), x.dtype());
        }
        let values = floats(x.dtype(), &bytes);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.inner.upload(&bytes, x.dims(), DType::F32)
    }

    fn wide_opt(&self, x: Option<&Tensor>) -> Result<Option<Tensor>> {
        x.map(|x| self.wide(x)).transpose()
    }

    /// Rounds f32 `values` of the inner backend into `out`.
    fn round(&self, values: &Tensor, out: &Tensor) -> Result<()> {
        let mut bytes = vec![0; values.shape().n_elements() * values.dtype().size_bytes()];
        self.inner.download(values, &mut bytes)?;
        if out.dtype().is_float() {
            bytes = encoded(out.dtype(), &floats(DType::F32, &bytes));
        }
        self.store(&bytes, out)
    }

    /// Computes an output of `out`'s shape in f32 with `compute`, and rounds it.
    fn compute(&self, out: &Tensor, compute: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        let dtype = if out.dtype().is_float() {
            DType::F32
        } else {
            out.dtype()
        };
        let values = self.inner.alloc(out.dims(), dtype)?;
        compute(&values)?;
        self.round(&values, out)
    }

    /// Computes with what is fused behind a product, all in f32.
    fn with_epilogue(
        &self,
        epilogue: &Epilogue<'_>,
        compute: impl FnOnce(&Epilogue<'_>) -> Result<()>,
    ) -> Result<()> {
        let (gate, residual) = (self.wide_opt(epilogue.gate)?, self.wide_opt(epilogue.residual)?);
        compute(&Epilogue {
            gate: gate.as_ref(),
            residual: residual.as_ref(),
            ..*epilogue
        })
    }
}

/// Positions of the elements of `x` in its buffer, row-major.
fn places(x: &Tensor) -> Vec<usize> {
    let mut all = vec![x.offset()];
    for (&extent, &stride) in x.dims().iter().zip(x.strides()) {
        all = all
            .iter()
            .flat_map(|at| (0..extent).map(move |idx| at + idx * stride))
            .collect();
    }
    all
}

/// Which weight of which set.
fn place_of(w: &Weight) -> (usize, usize) {
    (Arc::as_ptr(&w.set).cast::<()>() as usize, w.spec_idx)
}

fn operand(op: &'static str, detail: String) -> TensorError {
    TensorError::Operand { op, detail }
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let bits = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match dtype {
        DType::BF16 => bytes
            .chunks_exact(2)
            .map(|b| bf16::from_bits(bits(b)).to_f32())
            .collect(),
        DType::F16 => bytes
            .chunks_exact(2)
            .map(|b| f16::from_bits(bits(b)).to_f32())
            .collect(),
        _ => bytes.chunks_exact(4).map(four).collect(),
    }
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let values = values.iter();
    match dtype {
        DType::BF16 => values.flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Weights as the dtype has them: all but vectors, which stay f32 on every device, and those that are used in f32.
struct Rounded<'a> {
    source: &'a dyn WeightSource,
    exact: HashSet<&'a str>,
    dtype: DType,
}

impl WeightSource for Rounded<'_> {
    fn layout(&self, name: &str) -> std::result::Result<(SourceDType, Vec<usize>), SourceError> {
        let (dtype, shape) = self.source.layout(name)?;
        let is_exact = self.exact.contains(name);
        Ok((if is_exact { dtype } else { SourceDType::F32 }, shape))
    }

    fn tensor(&self, name: &str) -> std::result::Result<SourceTensor<'_>, SourceError> {
        let tensor = self.source.tensor(name)?;
        if self.exact.contains(name) {
            return Ok(tensor);
        }
        let values = match tensor.dtype {
            SourceDType::F64 => {
                let eight =
                    |b: &[u8]| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32;
                tensor.bytes.chunks_exact(8).map(eight).collect()
            }
            SourceDType::F32 => floats(DType::F32, &tensor.bytes),
            SourceDType::F16 => floats(DType::F16, &tensor.bytes),
            SourceDType::BF16 => floats(DType::BF16, &tensor.bytes),
        };
        let rounded = floats(self.dtype, &encoded(self.dtype, &values));
        Ok(SourceTensor {
            dtype: SourceDType::F32,
            shape: tensor.shape,
            bytes: Cow::Owned(encoded(DType::F32, &rounded)),
        })
    }
}

impl Backend for RoundingBackend {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "rounding".to_owned(),
            ..self.inner.info()
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
        if self.body.borrow().is_some() {
            return Err(operand("repeat", "a repetition within another".to_owned()));
        }
        // Inputs of a recording are buffers of its own: dense, and none is another's.
        let mut copies = Vec::with_capacity(inputs.len());
        for input in inputs {
            copies.push(self.take(self.bytes(input)?, input.dims(), input.dtype(), true)?);
        }
        let ids = copies.iter().map(|copy| self.host(copy).map(|buffer| buffer.id));
        let ids = ids.collect::<Result<HashSet<u64>>>()?;
        *self.body.borrow_mut() = Some(Body {
            log: String::new(),
            first_id: self.next_id.get(),
            inputs: ids,
        });
        let outputs = body(&copies.iter().collect::<Vec<_>>());
        let log = self
            .body
            .borrow_mut()
            .take()
            .map(|body| body.log)
            .unwrap_or_default();
        let outputs = outputs?;
        let shapes = format!("{inputs:?}");
        match self.recordings.borrow_mut().entry((key, shapes)) {
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(log);
            }
            std::collections::hash_map::Entry::Occupied(entry) if *entry.get() == log => {
                self.n_repeated.set(self.n_repeated.get() + 1);
            }
            std::collections::hash_map::Entry::Occupied(entry) => {
                let mut lines = entry.get().lines().zip(log.lines());
                let first = lines.find(|(before, now)| before != now);
                let text = format!("the body of key {key:#x} enqueues other ops than before: {first:?}");
                return Err(operand("repeat", text));
            }
        }
        Ok(outputs)
    }

    fn alloc(&self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        let n_elements: usize = dims.iter().product();
        let bytes = match dtype.is_float() {
            true => encoded(dtype, &vec![f32::NAN; n_elements]),
            false => vec![0xa5; n_elements * dtype.size_bytes()],
        };
        self.take(bytes, dims, dtype, true)
    }

    fn upload(&self, bytes: &[u8], dims: &[usize], dtype: DType) -> Result<Tensor> {
        self.note(&("upload", dims, dtype, bytes));
        self.take(bytes.to_vec(), dims, dtype, true)
    }

    fn download(&self, x: &Tensor, out: &mut [u8]) -> Result<()> {
        self.wait("download")?;
        out.copy_from_slice(&self.bytes(x)?);
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.wait("synchronize")
    }

    fn memory(&self) -> MemoryStats {
        self.inner.memory()
    }

    fn prepare(
        &self,
        specs: &[WeightSpec],
        input: PrepareInput<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Prepared> {
        let PrepareInput::Build(source) = input else {
            return Err(operand("prepare", "nothing is shared here".to_owned()));
        };
        let dtype = |spec: &WeightSpec| spec.precision.dtype(self.dtype);
        let is_exact = |spec: &&WeightSpec| spec.kind == WeightKind::Vector || dtype(spec) == DType::F32;
        let rounded = Rounded {
            source,
            exact: specs
                .iter()
                .filter(is_exact)
                .flat_map(|spec| spec.sources.iter().map(String::as_str))
                .collect(),
            dtype: self.dtype,
        };
        let mut prepared = self
            .inner
            .prepare(specs, PrepareInput::Build(&rounded), progress)?;
        prepared.shared = None;
        let dtypes = prepared.weights.iter().map(place_of).zip(specs.iter().map(dtype));
        self.weight_dtypes.borrow_mut().extend(dtypes);
        Ok(prepared)
    }

    fn weight_tensor(&self, weight: &Weight) -> Result<Tensor> {
        let tensor = self.inner.weight_tensor(weight)?;
        let mut bytes = vec![0; tensor.shape().n_elements() * DType::F32.size_bytes()];
        self.inner.download(&tensor, &mut bytes)?;
        self.take(bytes, tensor.dims(), DType::F32, false)
    }

    fn linear(&self, x: &Tensor, w: &Weight, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<()> {
        check::linear(x, w, epilogue, out)?;
        self.check_weight("linear", x, w)?;
        self.note(&("linear", x, w.spec_idx, epilogue, out));
        let x = self.wide(x)?;
        self.with_epilogue(epilogue, |epilogue| {
            self.compute(out, |out| self.inner.linear(&x, w, epilogue, out))
        })
    }

    fn conv2d(
        &self,
        x: &Tensor,
        w: &Weight,
        spec: &ConvSpec,
        epilogue: &Epilogue<'_>,
        out: &Tensor,
    ) -> Result<()> {
        check::conv2d(x, w, spec, epilogue, out)?;
        self.check_weight("conv2d", x, w)?;
        self.note(&("conv2d", x, w.spec_idx, spec, epilogue, out));
        let x = self.wide(x)?;
        self.with_epilogue(epilogue, |epilogue| {
            self.compute(out, |out| self.inner.conv2d(&x, w, spec, epilogue, out))
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
        check::attention(q, k, v, spec, out)?;
        self.note(&("attention", q, k, v, spec, out));
        let (q, k, v) = (self.wide(q)?, self.wide(k)?, self.wide(v)?);
        let bias = self.wide_opt(spec.bias)?;
        let spec = AttentionSpec {
            bias: bias.as_ref(),
            ..*spec
        };
        self.compute(out, |out| self.inner.attention(&q, &k, &v, &spec, out))
    }

    fn layer_norm(
        &self,
        x: &Tensor,
        affine: Option<(&Weight, Option<&Weight>)>,
        eps: f32,
        modulation: Option<Modulation<'_>>,
        out: &Tensor,
    ) -> Result<()> {
        check::layer_norm(x, affine, modulation.as_ref(), out)?;
        self.note(&("layer_norm", x, affine.is_some(), eps, modulation, out));
        let x = self.wide(x)?;
        let scale = self.wide_opt(modulation.map(|modulation| modulation.scale))?;
        let shift = self.wide_opt(modulation.map(|modulation| modulation.shift))?;
        let modulation = scale.as_ref().zip(shift.as_ref());
        let modulation = modulation.map(|(scale, shift)| Modulation { scale, shift });
        self.compute(out, |out| self.inner.layer_norm(&x, affine, eps, modulation, out))
    }

    fn rms_norm(
        &self,
        x: &Tensor,
        weight: Option<&Weight>,
        group_len: usize,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        check::rms_norm(x, weight, group_len, out)?;
        self.note(&("rms_norm", x, weight.is_some(), group_len, eps, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.rms_norm(&x, weight, group_len, eps, out))
    }

    fn match_norm(&self, x: &Tensor, like: &Tensor, group_len: usize, out: &Tensor) -> Result<()> {
        check::match_norm(x, like, group_len, out)?;
        self.note(&("match_norm", x, like, group_len, out));
        let (x, like) = (self.wide(x)?, self.wide(like)?);
        self.compute(out, |out| self.inner.match_norm(&x, &like, group_len, out))
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
        check::group_norm(x, affine, n_groups, out)?;
        self.note(&("group_norm", x, n_groups, eps, activation, out));
        let x = self.wide(x)?;
        self.compute(out, |out| {
            self.inner.group_norm(&x, affine, n_groups, eps, activation, out)
        })
    }

    fn add(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        check::binary("add", a, b, out)?;
        self.note(&("add", a, b, out));
        let (a, b) = (self.wide(a)?, self.wide(b)?);
        self.compute(out, |out| self.inner.add(&a, &b, out))
    }

    fn mul(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        check::binary("mul", a, b, out)?;
        self.note(&("mul", a, b, out));
        let (a, b) = (self.wide(a)?, self.wide(b)?);
        self.compute(out, |out| self.inner.mul(&a, &b, out))
    }

    fn gated_add(&self, residual: &Tensor, gate: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        check::gated_add(residual, gate, x, out)?;
        self.note(&("gated_add", residual, gate, x, out));
        let (residual, gate, x) = (self.wide(residual)?, self.wide(gate)?, self.wide(x)?);
        self.compute(out, |out| self.inner.gated_add(&residual, &gate, &x, out))
    }

    fn affine(&self, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()> {
        check::unary("affine", x, out)?;
        self.note(&("affine", x, scale, shift, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.affine(&x, scale, shift, out))
    }

    fn activation(&self, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()> {
        check::unary("activation", x, out)?;
        self.note(&("activation", x, activation, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.activation(&x, activation, out))
    }

    fn gated(&self, x: &Tensor, activation: Activation, order: GateOrder, out: &Tensor) -> Result<()> {
        check::gated(x, out)?;
        self.note(&("gated", x, activation, order, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.gated(&x, activation, order, out))
    }

    fn rope(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, style: RopeStyle, out: &Tensor) -> Result<()> {
        check::rope(x, cos, sin, out)?;
        self.note(&("rope", x, cos, sin, style, out));
        let (x, cos, sin) = (self.wide(x)?, self.wide(cos)?, self.wide(sin)?);
        self.compute(out, |out| self.inner.rope(&x, &cos, &sin, style, out))
    }

    fn embedding(&self, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()> {
        check::embedding(ids, table, out)?;
        self.note(&("embedding", ids, table.spec_idx, out));
        let ids = self.wide(ids)?;
        self.compute(out, |out| self.inner.embedding(&ids, table, out))
    }

    fn gather_rows(&self, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
        check::gather_rows(x, rows, out)?;
        self.note(&("gather_rows", x, rows, out));
        let (x, rows) = (self.wide(x)?, self.wide(rows)?);
        self.compute(out, |out| self.inner.gather_rows(&x, &rows, out))
    }

    fn timestep_embedding(&self, timesteps: &Tensor, spec: &TimestepSpec, out: &Tensor) -> Result<()> {
        check::timestep_embedding(timesteps, out)?;
        self.note(&("timestep_embedding", timesteps, spec, out));
        let timesteps = self.wide(timesteps)?;
        self.compute(out, |out| self.inner.timestep_embedding(&timesteps, spec, out))
    }

    fn patchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        check::patchify(x, patch, out)?;
        self.note(&("patchify", x, patch, order, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.patchify(&x, patch, order, out))
    }

    fn unpatchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()> {
        check::unpatchify(x, patch, out)?;
        self.note(&("unpatchify", x, patch, order, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.unpatchify(&x, patch, order, out))
    }

    fn permute(&self, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
        check::permute(x, axes, out)?;
        self.note(&("permute", x, axes, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.permute(&x, axes, out))
    }

    fn upsample_nearest(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        check::upsample_nearest(x, out)?;
        self.note(&("upsample_nearest", x, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.upsample_nearest(&x, out))
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        check::copy(x, out)?;
        self.note(&("copy", x, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.copy(&x, out))
    }

    fn fill(&self, out: &Tensor, value: f32) -> Result<()> {
        check::fill(out)?;
        self.note(&("fill", out, value));
        self.compute(out, |out| self.inner.fill(out, value))
    }

    fn step(&self, args: &StepArgs<'_>, out: &Tensor) -> Result<()> {
        check::step(args, out)?;
        self.note(&("step", args, out));
        let (latents, conditional) = (self.wide(args.latents)?, self.wide(args.conditional)?);
        let unconditional = self.wide_opt(args.unconditional.map(|(prediction, _)| prediction))?;
        let guidance = self.wide_opt(args.unconditional.map(|(_, guidance)| guidance))?;
        let (coefficients, noise) = (self.wide(args.coefficients)?, self.wide_opt(args.noise)?);
        let guided = args
            .guided_out
            .map(|guided| self.inner.alloc(guided.dims(), DType::F32))
            .transpose()?;
        let wide_args = StepArgs {
            latents: &latents,
            conditional: &conditional,
            unconditional: unconditional.as_ref().zip(guidance.as_ref()),
            coefficients: &coefficients,
            noise: noise.as_ref(),
            guided_out: guided.as_ref(),
        };
        self.compute(out, |out| self.inner.step(&wide_args, out))?;
        match (guided, args.guided_out) {
            (Some(guided), Some(out)) => self.round(&guided, out),
            _ => Ok(()),
        }
    }

    fn to_pixels(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        check::to_pixels(x, out)?;
        self.note(&("to_pixels", x, out));
        let x = self.wide(x)?;
        self.compute(out, |out| self.inner.to_pixels(&x, out))
    }

    fn all_finite(&self, x: &Tensor) -> Result<bool> {
        self.wait("all_finite")?;
        self.inner.all_finite(&self.wide(x)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_cpu::{CpuBackend, CpuOptions};

    fn backend() -> RoundingBackend {
        let options = CpuOptions {
            n_threads: 1,
            ..CpuOptions::default()
        };
        let inner = CpuBackend::new(options).expect("a backend of one thread");
        RoundingBackend::new(Rc::new(inner), DType::BF16)
    }

    #[test]
    fn outputs_are_rounded_and_mixtures_of_dtypes_are_refused() {
        let backend = backend();
        // 1 + 2^-9 is nearer to 1 than to the next bf16, 1 + 2^-7.
        let x = backend.upload(&encoded(DType::F32, &[1.001_953_1]), &[1], DType::F32);
        let x = x.expect("an upload");
        let y = backend.alloc(&[1], DType::BF16).expect("memory");
        backend.copy(&x, &y).expect("a conversion");
        assert_eq!(floats(DType::BF16, &backend.bytes(&y).expect("elements")), [1.0]);
        assert!(matches!(backend.add(&y, &x, &y), Err(TensorError::DType { .. })));
    }

    #[test]
    fn weights_serve_the_dtype_that_their_precision_names() {
        crate::suites::backend::precisions_hold(&backend());
    }

    #[test]
    fn bodies_that_break_a_rule_of_repetition_are_refused() {
        let backend = backend();
        let input = backend.alloc(&[2], DType::BF16).expect("memory");
        let other = backend.alloc(&[2], DType::BF16).expect("memory");
        let repeat = |key, body: &mut dyn FnMut(&Tensor) -> Result<()>| {
            let mut body = |inputs: &[&Tensor]| {
                body(inputs[0])?;
                Ok(Vec::new())
            };
            backend.repeat(key, &[&input], &mut body)
        };
        let scaled = |factor: f32| {
            let backend = &backend;
            move |x: &Tensor| backend.affine(x, factor, 0.0, x)
        };
        assert!(repeat(1, &mut scaled(2.0)).is_ok());
        assert!(repeat(1, &mut scaled(2.0)).is_ok());
        assert_eq!(backend.n_repeated(), 1);
        assert!(
            repeat(1, &mut scaled(3.0)).is_err(),
            "another number under the same key"
        );
        assert!(repeat(2, &mut |x| backend.add(x, &other, x)).is_err(), "no input");
        assert!(
            repeat(3, &mut |x| backend.all_finite(x).map(drop)).is_err(),
            "it waits"
        );
        assert!(repeat(4, &mut |_| backend.synchronize()).is_err(), "it waits");
        assert!(backend.synchronize().is_ok(), "a body that failed has ended");
    }
}
