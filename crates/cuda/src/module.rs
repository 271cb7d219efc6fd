//! Loaded kernels, found by file, name and element type.

use crate::{
    device::Device,
    image::{self, Compiler, SOURCES},
};
use cudarc::driver::{
    DriverError,
    result::{function, module},
    sys,
};
use denoised_tensor::{DType, Result, TensorError};
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    ffi::c_void,
    path::Path,
    rc::Rc,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Dynamic shared memory that every block may have.
const SHARED_BYTES: u32 = 48 << 10;

/// A kernel as launches name it: `layer_norm` of `norm.cu`, of which there is `layer_norm_f32`, `layer_norm_bf16` and `layer_norm_f16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    /// File without its ending.
    pub(crate) file: &'static str,
    /// Name without the element type.
    pub(crate) name: &'static str,
}

/// A kernel for one element type, ready to be launched.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) raw: sys::CUfunction,
    /// With its element type.
    pub(crate) name: Rc<str>,
    /// Dynamic shared memory that it was opted in for.
    granted_bytes: Rc<Cell<u32>>,
}

/// All kernels of one device.
#[derive(Debug)]
pub(crate) struct Modules {
    device: Rc<Device>,
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: RefCell<HashMap<(Kernel, DType), Function>>,
}

impl Modules {
    /// Loads every file of kernels: this build's images, those of the cache, and what has to be compiled. With `folder` the sources there
    /// take the place of this build's own.
    pub(crate) fn load(device: Rc<Device>, folder: Option<&Path>, cache: Option<&Path>) -> Result<Self> {
        let (major, minor) = device.compute_capability();
        let mut loaded = Self {
            device,
            modules: HashMap::new(),
            functions: RefCell::default(),
        };
        let mut sources = Vec::new();
        for source in SOURCES {
            let image = image::prebuilt(source.name).filter(|_| folder.is_none());
            if !image.map_or(Ok(false), |image| loaded.try_load(source.name, image))? {
                sources.push((source.name, image::text(source, folder)?));
            }
        }
        let n_prebuilt = loaded.modules.len();
        if sources.is_empty() {
            tracing::debug!("kernels: {n_prebuilt} files of this build");
            return Ok(loaded);
        }
        let compiler = Compiler::new(10 * major + minor, cache)?;
        let mut missing = Vec::new();
        for (name, text) in sources {
            let image = compiler.cached(name, &text);
            if !image.map_or(Ok(false), |image| loaded.try_load(name, &image))? {
                missing.push((name, text));
            }
        }
        let n_cached = loaded.modules.len() - n_prebuilt;
        for (name, image) in compile_all(&compiler, &missing)? {
            // SAFETY: the image is a whole one, as the compiler made it.
            let answer = unsafe { module::load_data(image.as_ptr().cast::<c_void>()) };
            let module = loaded.device.check(&format!("loading {name}.cu"), answer)?;
            loaded.modules.insert(name, module);
        }
        tracing::debug!(
            "kernels: {n_prebuilt} files of this build, {n_cached} of the cache, {} compiled",
            missing.len()
        );
        Ok(loaded)
    }

    /// Loads `image`, if the driver takes it.
    fn try_load(&mut self, name: &'static str, image: &[u8]) -> Result<bool> {
        use sys::CUresult as E;
        // SAFETY: the image is a whole one: embedded, or with the digest that it was written with.
        match unsafe { module::load_data(image.as_ptr().cast::<c_void>()) } {
            Err(DriverError(
                E::CUDA_ERROR_INVALID_IMAGE
                | E::CUDA_ERROR_INVALID_PTX
                | E::CUDA_ERROR_NO_BINARY_FOR_GPU
                | E::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                | E::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
            )) => Ok(false),
            answer => {
                let module = self.device.check(&format!("loading {name}.cu"), answer)?;
                self.modules.insert(name, module);
                Ok(true)
            }
        }
    }

    /// The kernel for `dtype`, which takes one argument of `args_bytes` and is about to be launched with `shared_bytes`.
    pub(crate) fn function(
        &self,
        kernel: Kernel,
        dtype: DType,
        args_bytes: usize,
        shared_bytes: u32,
    ) -> Result<Function> {
        let known = self.functions.borrow().get(&(kernel, dtype)).cloned();
        let function = match known {
            Some(function) => function,
            None => self.look_up(kernel, dtype, args_bytes)?,
        };
        if shared_bytes > function.granted_bytes.get() {
            self.grant(&function, shared_bytes)?;
        }
        Ok(function)
    }

    /// Opts in for more shared memory than every block may have.
    fn grant(&self, function: &Function, shared_bytes: u32) -> Result<()> {
        let name = &function.name;
        let most = self.device.max_shared_bytes();
        if shared_bytes > most {
            return Err(TensorError::Device(format!(
                "{name} needs {shared_bytes} bytes of shared memory for these extents, a block of this device has at most {most}"
            )));
        }
        // SAFETY: the function was looked up in a module that is still loaded.
        let answer = unsafe {
            function::set_function_attribute(
                function.raw,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared_bytes as i32,
            )
        };
        self.device.check(name, answer)?;
        function.granted_bytes.set(shared_bytes);
        Ok(())
    }

    fn look_up(&self, kernel: Kernel, dtype: DType, args_bytes: usize) -> Result<Function> {
        self.device.enter()?;
        let name = format!("{}_{dtype}", kernel.name);
        let module = *self
            .modules
            .get(kernel.file)
            .ok_or_else(|| TensorError::Operand {
                op: kernel.name,
                detail: format!("{}.cu is not among the kernels", kernel.file),
            })?;
        // SAFETY: the module stays loaded as long as `self`.
        let raw = self.device.check(&name, unsafe {
            module::get_function(module, image::c_name(&name)?)
        })?;
        self.check_argument(raw, &name, args_bytes)?;
        let function = Function {
            raw,
            name: name.into(),
            granted_bytes: Rc::new(Cell::new(SHARED_BYTES)),
        };
        self.functions
            .borrow_mut()
            .insert((kernel, dtype), function.clone());
        Ok(function)
    }

    /// A launch copies as many bytes as the kernel declares: it must declare exactly what it is given.
    fn check_argument(&self, raw: sys::CUfunction, name: &str, args_bytes: usize) -> Result<()> {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: both are written; the driver has this function since 12.4.
        let first = unsafe { sys::cuFuncGetParamInfo(raw, 0, &raw mut offset, &raw mut size) }.result();
        self.device.check(name, first)?;
        if size != args_bytes {
            return Err(TensorError::Device(format!(
                "{name} takes an argument of {size} bytes, {args_bytes} would be passed: kernels and program are of different versions"
            )));
        }
        Ok(())
    }
}

/// Compiles `sources`, several at a time.
fn compile_all(
    compiler: &Compiler<'_>,
    sources: &[(&'static str, String)],
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let compile_some = || -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut images = Vec::new();
        while let Some((name, text)) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            images.push((*name, compiler.compile(name, text)?));
        }
        Ok(images)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (1..n_threads.min(sources.len()))
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, compile_some).ok())
            .collect();
        let mut images = compile_some()?;
        for thread in threads {
            let compiled = thread.join();
            images.extend(
                compiled.map_err(|_| TensorError::Device("a thread that compiles failed".to_owned()))??,
            );
        }
        Ok(images)
    })
}

impl Drop for Modules {
    fn drop(&mut self) {
        self.device.enter_to_free();
        // Kernels that are under way are still read. A device that failed runs none.
        let _ = self.device.synchronize("unloading kernels");
        for module in self.modules.values() {
            // SAFETY: loaded once, unloaded once; nothing is launched after this.
            let _ = unsafe { module::unload(*module) };
        }
    }
}
