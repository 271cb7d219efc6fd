//! Matrix products by cuBLASLt, through cudarc's result layer.
//!
//! R1. Descriptors and the algorithm are made once per [`Shape`] and kept; a product in a steady step costs one call. When there are
//!     [`MAX_PLANS`] all are forgotten: shapes of requests come and go, a step has a few dozen.
//! R2. The algorithm is chosen for the alignment that the operands really have. The library assumes 256 bytes unless it is told.
//! R3. One workspace, owned here: products of one stream run one after another.
//! R4. f32 means f32: never TF32. 16-bit types are accumulated in f32.

use crate::{
    device::{Device, Launch},
    memory::{Memory, Region},
};
use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};
use denoised_tensor::{DType, Result};
use std::{cell::RefCell, collections::HashMap, ffi::c_void, fmt, rc::Rc};

/// Workspace that the fastest algorithms of Hopper ask for, and of what came before.
const HOPPER_WORKSPACE_BYTES: usize = 32 << 20;
const WORKSPACE_BYTES: usize = 4 << 20;

/// Plans that are kept at most.
const MAX_PLANS: usize = 2048;

/// `CUBLAS_OP_T`, whose type is that of another library.
const TRANSPOSED: i32 = 1;

/// A matrix of rows, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stride {
    /// Between rows.
    pub(crate) row: usize,
    /// Between the matrices of a batch.
    pub(crate) batch: usize,
}

/// `out[b] = x[b] wᵀ (+ residual[b]) (+ bias)`: all that decides which algorithm is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) n_batch: usize,
    /// Rows of `x` and `out`.
    pub(crate) m: usize,
    /// Rows of `w`, columns of `out`.
    pub(crate) n: usize,
    /// Columns of `x` and `w`.
    pub(crate) k: usize,
    pub(crate) x: Stride,
    pub(crate) w: Stride,
    pub(crate) residual: Option<Stride>,
    pub(crate) out: Stride,
    pub(crate) has_bias: bool,
    /// Of all operands.
    pub(crate) dtype: DType,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "product {}x{}x{} {}", self.m, self.n, self.k, self.dtype)?;
        if self.n_batch > 1 {
            write!(f, " times {}", self.n_batch)
        } else {
            Ok(())
        }
    }
}

/// Device addresses of the operands of a [`Shape`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) x: u64,
    pub(crate) w: u64,
    /// Of the output's dtype; not read unless the shape has one.
    pub(crate) bias: u64,
    /// Not read unless the shape has one.
    pub(crate) residual: u64,
    pub(crate) out: u64,
}

/// A shape and how well its operands lie: w, x, residual, out, as powers of two up to 256 bytes.
type Key = (Shape, [u32; 4]);

/// The library's handle, workspace and plans for one device.
pub(crate) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: Region,
    workspace_bytes: usize,
    plans: RefCell<HashMap<Key, Rc<Plan>>>,
}

impl fmt::Debug for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Products({} plans)", self.plans.borrow().len())
    }
}

impl Products {
    pub(crate) fn new(device: &Device, memory: &Memory) -> Result<Self> {
        let workspace_bytes = match device.compute_capability() {
            (9.., _) => HOPPER_WORKSPACE_BYTES,
            _ => WORKSPACE_BYTES,
        };
        let workspace = memory.take(|| "the workspace of products".to_owned(), workspace_bytes)?;
        let handle = device.check_product("opening cuBLASLt", result::create_handle())?;
        Ok(Self {
            handle,
            workspace,
            workspace_bytes,
            plans: RefCell::default(),
        })
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The operands are on `device`, lie as `shape` says, and the output overlaps no other but the residual, which may be the same.
    pub(crate) unsafe fn run(&self, device: &Device, shape: &Shape, operands: &Operands) -> Result<()> {
        device.enter()?;
        let residual = if shape.residual.is_some() {
            operands.residual
        } else {
            operands.out
        };
        let alignments = [operands.w, operands.x, residual, operands.out].map(alignment);
        let key = (*shape, alignments);
        let known = self.plans.borrow().get(&key).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => {
                let planned = self.plan(&key, operands.bias);
                let plan = Rc::new(device.check_product(&shape.to_string(), planned)?);
                let mut plans = self.plans.borrow_mut();
                if plans.len() >= MAX_PLANS {
                    plans.clear();
                }
                plans.insert(key, Rc::clone(&plan));
                plan
            }
        };
        let launch = Launch::named(shape.to_string());
        let (alpha, beta) = (1.0f32, if shape.residual.is_some() { 1.0f32 } else { 0.0 });
        let address = |start: u64| start as *const c_void;
        // SAFETY: the plan's descriptors live as long as it; the caller vouches for the operands; alpha and beta are read at once.
        device.enqueue(launch, || unsafe {
            if shape.has_bias {
                let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                let set = set_desc(plan.desc.0, attribute, &operands.bias);
                device.check_product(&shape.to_string(), set)?;
            }
            let answer = result::matmul(
                self.handle,
                plan.desc.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                address(operands.w),
                plan.w.0,
                address(operands.x),
                plan.x.0,
                address(residual),
                plan.residual.0,
                operands.out as *mut c_void,
                plan.out.0,
                &raw const plan.algorithm,
                self.workspace.start() as *mut c_void,
                self.workspace_bytes,
                device.stream().cast(),
            );
            device.check_product(&shape.to_string(), answer)
        })
    }

    /// In the library's terms matrices are columns: `outᵀ = w xᵀ`, with `w` transposed.
    fn plan(&self, (shape, alignments): &Key, bias: u64) -> std::result::Result<Plan, CublasError> {
        use sys::{cublasLtMatmulDescAttributes_t as Desc, cublasLtMatmulPreferenceAttributes_t as Pref};
        let data_type = data_type(shape.dtype);
        let desc = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        );
        let desc = MatmulDesc(desc?);
        let epilogue = if shape.has_bias {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS
        } else {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT
        };
        // SAFETY: the descriptor was made above, and each value has the type of its attribute.
        unsafe {
            set_desc(desc.0, Desc::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
            set_desc(desc.0, Desc::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if shape.has_bias {
                // The library wants to see one before it chooses.
                set_desc(desc.0, Desc::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
                set_desc(desc.0, Desc::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &data_type)?;
            }
        }
        let layout = |rows, cols, stride: Stride| Layout::new(shape, rows, cols, stride);
        let w = layout(shape.k, shape.n, shape.w)?;
        let x = layout(shape.k, shape.m, shape.x)?;
        let residual = layout(shape.n, shape.m, shape.residual.unwrap_or(shape.out))?;
        let out = layout(shape.n, shape.m, shape.out)?;
        let preference = Preference(result::create_matmul_pref()?);
        let [w_alignment, x_alignment, residual_alignment, out_alignment] = alignments;
        // SAFETY: as above.
        let chosen = unsafe {
            let set = |attribute, value: *const c_void, len| {
                result::set_matmul_pref_attribute(preference.0, attribute, value, len)
            };
            let bytes: *const usize = &raw const self.workspace_bytes;
            set(
                Pref::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                bytes.cast(),
                size_of::<usize>(),
            )?;
            for (attribute, alignment) in [
                (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w_alignment),
                (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x_alignment),
                (
                    Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                    residual_alignment,
                ),
                (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment),
            ] {
                set(attribute, std::ptr::from_ref(alignment).cast(), size_of::<u32>())?;
            }
            result::get_matmul_algo_heuristic(self.handle, desc.0, w.0, x.0, residual.0, out.0, preference.0)
        };
        Ok(Plan {
            algorithm: chosen?.algo,
            desc,
            w,
            x,
            residual,
            out,
        })
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        // SAFETY: made in `new`, given back once; nothing is enqueued after this.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Largest power of two, up to 256, that the address is a multiple of.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

/// # Safety
/// `T` is the attribute's type.
unsafe fn set_desc<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}

/// Descriptors and algorithm of one key.
struct Plan {
    algorithm: sys::cublasLtMatmulAlgo_t,
    desc: MatmulDesc,
    w: Layout,
    x: Layout,
    residual: Layout,
    out: Layout,
}

struct MatmulDesc(sys::cublasLtMatmulDesc_t);

impl Drop for MatmulDesc {
    fn drop(&mut self) {
        // SAFETY: made by the library, given back once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// `cols` columns of `rows` elements.
    fn new(
        shape: &Shape,
        rows: usize,
        cols: usize,
        stride: Stride,
    ) -> std::result::Result<Self, CublasError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let layout = Self(result::create_matrix_layout(
            data_type(shape.dtype),
            rows as u64,
            cols as u64,
            stride.row as i64,
        )?);
        if shape.n_batch > 1 {
            let (count, offset) = (shape.n_batch as i32, stride.batch as i64);
            // SAFETY: the layout was made above; the types are those of the attributes.
            unsafe {
                let set = |attribute, value: *const c_void, len| {
                    result::set_matrix_layout_attribute(layout.0, attribute, value, len)
                };
                set(
                    Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                    (&raw const count).cast(),
                    size_of::<i32>(),
                )?;
                set(
                    Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    (&raw const offset).cast(),
                    size_of::<i64>(),
                )?;
            }
        }
        Ok(layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by the library, given back once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}
