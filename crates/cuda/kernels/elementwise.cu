// Element-wise ops.
#include "portable.cuh"

struct FillArgs {
    Rows out;
    i64 n_rows;
    i64 n_cols;
    float value;
};

template <class T> DEVICE void fill(const FillArgs& args) {
    i64 n = args.n_rows * args.n_cols;
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < n; i += static_cast<i64>(gridDim.x) * blockDim.x)
        row_of<T>(args.out, i / args.n_cols)[i % args.n_cols] = from_f32<T>(args.value);
}

DEFINE_KERNEL(fill_f32, 256, fill<float>, FillArgs)
DEFINE_KERNEL(fill_bf16, 256, fill<bf16>, FillArgs)
DEFINE_KERNEL(fill_f16, 256, fill<f16>, FillArgs)
