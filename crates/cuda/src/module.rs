//! Loaded kernels, found by file, name and element type.

use crate::{
    device::Device,
    image::{self, SOURCES},
};
use cudarc::driver::{
    result::{function, module},
    sys,
};
use denoised_tensor::{DType, Result, TensorError};
use std::{cell::RefCell, collections::HashMap, ffi::c_void, path::Path, rc::Rc};

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
}

/// All kernels of one device.
#[derive(Debug)]
pub(crate) struct Modules {
    device: Rc<Device>,
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: RefCell<HashMap<(Kernel, DType), Function>>,
}

impl Modules {
    /// Compiles and loads every file of kernels.
    pub(crate) fn load(device: Rc<Device>, folder: Option<&Path>, cache: Option<&Path>) -> Result<Self> {
        let (major, minor) = device.compute_capability();
        let mut modules = HashMap::new();
        for source in SOURCES {
            let text = image::text(source, folder)?;
            let image = image::compile(source.name, &text, 10 * major + minor, cache)?;
            // SAFETY: the image is a whole one, as the compiler made it.
            let answer = unsafe { module::load_data(image.as_ptr().cast::<c_void>()) };
            modules.insert(
                source.name,
                device.check(&format!("loading {}.cu", source.name), answer)?,
            );
        }
        Ok(Self {
            device,
            modules,
            functions: RefCell::default(),
        })
    }

    /// The kernel for `dtype`, which takes one argument of `args_bytes`. `shared_bytes` is the most that it will be launched with.
    pub(crate) fn function(
        &self,
        kernel: Kernel,
        dtype: DType,
        args_bytes: usize,
        shared_bytes: u32,
    ) -> Result<Function> {
        if let Some(function) = self.functions.borrow().get(&(kernel, dtype)) {
            return Ok(function.clone());
        }
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
        if shared_bytes > 48 << 10 {
            // SAFETY: `raw` was found above.
            let answer = unsafe {
                function::set_function_attribute(
                    raw,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes as i32,
                )
            };
            self.device.check(&name, answer)?;
        }
        let function = Function {
            raw,
            name: name.into(),
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

impl Drop for Modules {
    fn drop(&mut self) {
        for module in self.modules.values() {
            // SAFETY: loaded once, unloaded once; nothing is launched after this.
            let _ = unsafe { module::unload(*module) };
        }
    }
}
