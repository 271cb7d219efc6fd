// What every kernel is written with: element types, and wrappers of the few constructs that need PTX.
//
// R1. One source serves the GPU's compilers (nvcc, NVRTC) and the CPU stand-in, whose shim defines CPUCUDA and brings its own side of
//     everything below "device side". Nothing here needs a header of the toolkit, so that driver and NVRTC suffice.
// R2. A kernel is defined by DEFINE_KERNEL, once per element type, and takes one struct by value. The struct mirrors one in Rust.
// R3. Statistics and accumulations are float, whatever the element type.
#pragma once

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

#ifndef CPUCUDA
// ---- device side ----

#define DEVICE __device__ __forceinline__
#ifndef INFINITY // nvcc brings its own, NVRTC none.
#define INFINITY __int_as_float(0x7f800000)
#endif

#define DEFINE_KERNEL(name, max_threads, body, Args)                                           \
    extern "C" __global__ void __launch_bounds__(max_threads, 1) name(const __grid_constant__ Args args) { \
        body(args);                                                                            \
    }

// Dynamic shared memory as an array of T called `name`, aligned to 16 bytes.
#define DYN_SHARED(T, name)                                     \
    extern __shared__ __align__(16) unsigned char shared_raw[]; \
    T* name = reinterpret_cast<T*>(shared_raw)

DEVICE float f16_to_f32(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
DEVICE unsigned short f32_to_f16(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE unsigned short f32_to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// 2^x and 1/x to about 2 units in the last place.
DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float fast_rcp(float x) { return __frcp_rn(x); }

// Copies 16 bytes, both sides aligned to 16, some time before the wait for its group.
DEVICE void cp_async16(void* smem, const void* gmem) {
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(gmem) : "memory");
}
// As cp_async16; writes zeros and reads nothing unless `valid`.
DEVICE void cp_async16_if(void* smem, const void* gmem, bool valid) {
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
    int n_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(gmem), "r"(n_bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's latest groups are under way.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(unsigned r[4], const void* row) {
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void ldmatrix_x4_trans(unsigned r[4], const void* row) {
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// d (16x8, float) += a (16x16, row) b (16x8, column), fragments as the PTX ISA lays them out for m16n8k16.
#define DENOISED_MMA(type)                                                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
DEVICE void mma_16816_bf16(float d[4], const unsigned a[4], const unsigned b[2]) { DENOISED_MMA("bf16"); }
DEVICE void mma_16816_f16(float d[4], const unsigned a[4], const unsigned b[2]) { DENOISED_MMA("f16"); }
#undef DENOISED_MMA

#endif  // CPUCUDA
// ---- both sides ----

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
DEVICE float to_f32(f16 x) { return f16_to_f32(x.bits); }

// Rounds to nearest, ties to even.
template <class T> DEVICE T from_f32(float x);
template <> DEVICE float from_f32<float>(float x) { return x; }
template <> DEVICE bf16 from_f32<bf16>(float x) { return bf16{f32_to_bf16(x)}; }
template <> DEVICE f16 from_f32<f16>(float x) { return f16{f32_to_f16(x)}; }

// Two 16-bit elements in a register, the first in the low half.
template <class T> DEVICE unsigned pack2(float low, float high) {
    return static_cast<unsigned>(from_f32<T>(low).bits) | static_cast<unsigned>(from_f32<T>(high).bits) << 16;
}
#ifndef CPUCUDA
template <> DEVICE unsigned pack2<bf16>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> DEVICE unsigned pack2<f16>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif
template <class T> DEVICE float low_of(unsigned pair) { return to_f32(T{static_cast<unsigned short>(pair & 0xffff)}); }
template <class T> DEVICE float high_of(unsigned pair) { return to_f32(T{static_cast<unsigned short>(pair >> 16)}); }

template <class T> struct Mma;
template <> struct Mma<bf16> {
    static DEVICE void run(float d[4], const unsigned a[4], const unsigned b[2]) { mma_16816_bf16(d, a, b); }
};
template <> struct Mma<f16> {
    static DEVICE void run(float d[4], const unsigned a[4], const unsigned b[2]) { mma_16816_f16(d, a, b); }
};

typedef long long i64;
typedef unsigned long long u64;

// Where the rows of a view start, innermost level first; mirrors `operand::Rows`. Strides count elements.
struct Rows {
    void* start;
    int n_levels;
    int extents[5];
    i64 strides[5];
};

// First element of row `row`, which exists.
template <class T> DEVICE T* row_of(const Rows& rows, i64 row) {
    i64 offset = 0;
    int level = 0;
    // The outermost level takes what is left, so the usual single level divides nothing.
    for (; level + 1 < rows.n_levels; level++) {
        int extent = rows.extents[level];
        offset += (row % extent) * rows.strides[level];
        row /= extent;
    }
    return static_cast<T*>(rows.start) + offset + row * rows.strides[level];
}

// What `Activation` of the contract does; the numbers mirror `operand::activation_code`.
enum ActivationCode { ACT_NONE = 0, ACT_SILU = 1, ACT_GELU_TANH = 2, ACT_GELU_ERF = 3, ACT_QUICK_GELU = 4, ACT_RELU = 5, ACT_TANH = 6 };

DEVICE float activate(int code, float x) {
    switch (code) {
        case ACT_SILU: return x / (1.0f + expf(-x));
        case ACT_GELU_TANH: return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        case ACT_GELU_ERF: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case ACT_QUICK_GELU: return x / (1.0f + expf(-1.702f * x));
        // NaN stays NaN.
        case ACT_RELU: return x < 0.0f ? 0.0f : x;
        case ACT_TANH: return tanhf(x);
        default: return x;
    }
}

// Sum over the 32 lanes of a warp, the same in all of them.
DEVICE float warp_sum(float x) {
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// V elements side by side, which are moved at once where they lie on their boundary.
template <class T, int V> struct alignas(sizeof(T) * V) Vec { T at[V]; };

template <class T, int V> DEVICE void load(float (&x)[V], const T* from) {
    Vec<T, V> vec = *reinterpret_cast<const Vec<T, V>*>(from);
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = to_f32(vec.at[i]);
}
template <class T, int V> DEVICE void store(T* to, const float (&x)[V]) {
    Vec<T, V> vec;
#pragma unroll
    for (int i = 0; i < V; i++) vec.at[i] = from_f32<T>(x[i]);
    *reinterpret_cast<Vec<T, V>*>(to) = vec;
}

// Where a thread of a grid in one dimension begins, and how far on its next item is.
DEVICE i64 first_item() { return blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; }
DEVICE i64 item_stride() { return static_cast<i64>(gridDim.x) * blockDim.x; }

// A kernel of blocks of 256 threads for each element type.
#define FOR_EACH_TYPE(name, Args)                     \
    DEFINE_KERNEL(name##_f32, 256, name<float>, Args) \
    DEFINE_KERNEL(name##_bf16, 256, name<bf16>, Args) \
    DEFINE_KERNEL(name##_f16, 256, name<f16>, Args)
