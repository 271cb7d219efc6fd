// Kernels that the stand-in's own tests launch: right ones, and ones with a planted mistake.

struct Args {
    void* out;
    const void* in;
    int n;
};

DEVICE void set(const Args& args) {
    if (threadIdx.x == 0) static_cast<int*>(args.out)[blockIdx.x] = args.n;
}
DEFINE_KERNEL(set_n, 64, set, Args)

// Copies one int per thread.
DEVICE void copy(const Args& args) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.n) static_cast<int*>(args.out)[i] = static_cast<const int*>(args.in)[i];
}
DEFINE_KERNEL(copy_ints, 256, copy, Args)

// Reverses a block's floats by way of shared memory.
template <bool HAS_BARRIER> DEVICE void reverse(const Args& args) {
    DYN_SHARED(float, shared);
    shared[threadIdx.x] = static_cast<const float*>(args.in)[threadIdx.x];
    if (HAS_BARRIER) __syncthreads();
    static_cast<float*>(args.out)[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}
DEFINE_KERNEL(reverse_right, 256, reverse<true>, Args)
DEFINE_KERNEL(reverse_without_barrier, 256, reverse<false>, Args)

// Neighbours of a warp exchange while the others are at the barrier.
DEVICE void diverge(const Args& args) {
    float x = threadIdx.x;
    if (threadIdx.x % 32 < 16) x += __shfl_xor_sync(0xffffffffu, x, 1);
    else __syncthreads();
    static_cast<float*>(args.out)[threadIdx.x] = x;
}
DEFINE_KERNEL(divergent_shuffle, 256, diverge, Args)

// Half a warp exchanges, the other half multiplies.
DEVICE void mix(const Args& args) {
    float d[4] = {};
    unsigned a[4] = {}, b[2] = {};
    if (threadIdx.x % 2) d[0] = __shfl_xor_sync(0xffffffffu, d[0], 1);
    else mma_16816_bf16(d, a, b);
    static_cast<float*>(args.out)[threadIdx.x] = d[0];
}
DEFINE_KERNEL(mixed_collectives, 256, mix, Args)

DEVICE void overrun(const Args& args) { static_cast<int*>(args.out)[args.n] = 1; }
DEFINE_KERNEL(overrun_device, 256, overrun, Args)

DEVICE void overrun_block(const Args& args) {
    DYN_SHARED(int, shared);
    shared[threadIdx.x] = 1;
    shared[args.n] = 2;
    static_cast<int*>(args.out)[threadIdx.x] = shared[threadIdx.x];
}
DEFINE_KERNEL(overrun_shared, 256, overrun_block, Args)

struct alignas(16) Vector { int x, y, z, w; };
DEVICE void load_vector(const Args& args) {
    const int* from = static_cast<const int*>(args.in) + args.n;
    Vector v = *reinterpret_cast<const Vector*>(from);
    static_cast<int*>(args.out)[0] = v.x + v.w;
}
DEFINE_KERNEL(vector_load, 256, load_vector, Args)

// Copies 16 bytes per thread through shared memory. 0: waits; 1: does not; 2: waits for all but the latest group.
template <int MISTAKE> DEVICE void through(const Args& args) {
    DYN_SHARED(float, shared);
    cp_async16(shared + 4 * threadIdx.x, static_cast<const float*>(args.in) + 4 * threadIdx.x);
    cp_async_commit();
    if (MISTAKE == 0) cp_async_wait<0>();
    if (MISTAKE == 2) cp_async_wait<1>();
    for (int i = 0; i < 4; i++) static_cast<float*>(args.out)[4 * threadIdx.x + i] = shared[4 * threadIdx.x + i];
}
DEFINE_KERNEL(async_right, 256, through<0>, Args)
DEFINE_KERNEL(async_without_wait, 256, through<1>, Args)
DEFINE_KERNEL(async_weak_wait, 256, through<2>, Args)

// Ends with a copy that may still be under way.
DEVICE void load_misaligned(const Args& args) {
    DYN_SHARED(float, shared);
    cp_async16(shared + args.n, args.in);
    cp_async_wait<0>();
    static_cast<float*>(args.out)[0] = shared[args.n];
}
DEFINE_KERNEL(async_misaligned, 256, load_misaligned, Args)

// Each block shows what static shared memory held before it, and leaves something there.
DEVICE void look(const Args& args) {
    __shared__ float shared[64];
    static_cast<float*>(args.out)[blockIdx.x * blockDim.x + threadIdx.x] = shared[threadIdx.x];
    shared[threadIdx.x] = 1.0f;
}
DEFINE_KERNEL(static_shared, 64, look, Args)

// Sums over a warp, and whether all see the same.
DEVICE void sum(const Args& args) {
    static_cast<float*>(args.out)[threadIdx.x] = warp_sum(static_cast<const float*>(args.in)[threadIdx.x]);
}
DEFINE_KERNEL(warp_sums, 256, sum, Args)

struct Fragments { unsigned a[4], b[2]; float d[4]; };
template <class T> DEVICE void multiply(const Args& args) {
    Fragments own = static_cast<const Fragments*>(args.in)[threadIdx.x];
    for (int i = 0; i < args.n; i++) Mma<T>::run(own.d, own.a, own.b);
    for (int i = 0; i < 4; i++) static_cast<float*>(args.out)[4 * threadIdx.x + i] = own.d[i];
}
DEFINE_KERNEL(mma_bf16, 64, multiply<bf16>, Args)
DEFINE_KERNEL(mma_f16, 64, multiply<f16>, Args)

// Lane l gives row l; `n` is the offset of the rows in bytes.
template <bool IS_TRANSPOSED> DEVICE void load_matrices(const Args& args) {
    DYN_SHARED(unsigned short, shared);
    for (int i = 0; i < 8; i++) shared[8 * threadIdx.x + i] = static_cast<const unsigned short*>(args.in)[8 * threadIdx.x + i];
    __syncthreads();
    unsigned r[4];
    const unsigned short* row = shared + 8 * threadIdx.x + args.n / 2;
    if (IS_TRANSPOSED) ldmatrix_x4_trans(r, row);
    else ldmatrix_x4(r, row);
    // What was loaded stays what it was.
    shared[8 * threadIdx.x] = 0xffff;
    for (int i = 0; i < 4; i++) static_cast<unsigned*>(args.out)[4 * threadIdx.x + i] = r[i];
}
DEFINE_KERNEL(matrices, 32, load_matrices<false>, Args)
DEFINE_KERNEL(matrices_transposed, 32, load_matrices<true>, Args)

template <class T> DEVICE void narrow(const Args& args) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.n) static_cast<T*>(args.out)[i] = from_f32<T>(static_cast<const float*>(args.in)[i]);
}
DEFINE_KERNEL(to_bf16, 256, narrow<bf16>, Args)
DEFINE_KERNEL(to_f16, 256, narrow<f16>, Args)

template <class T> DEVICE void widen(const Args& args) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.n) static_cast<float*>(args.out)[i] = to_f32(static_cast<const T*>(args.in)[i]);
}
DEFINE_KERNEL(of_bf16, 256, widen<bf16>, Args)
DEFINE_KERNEL(of_f16, 256, widen<f16>, Args)
