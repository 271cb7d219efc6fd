// Convolution as one matrix product on tensor cores, whose left operand is gathered from the picture on the way (implicit GEMM).
//
// A block makes 128 output pixels times 128 channels with 8 warps (2 x 4, each 64 x 32). The reduction runs over (tap, channel) in
// slices of 32, which arrive through a pipeline of STAGES copies. Rows of a slice are 64 bytes; their four pieces of 16 bytes are
// permuted by the row, so that ldmatrix meets no bank twice. Where a picture has too few tiles for the device, the reduction is split;
// the parts are summed in order by a second kernel, so that nothing depends on timing.
#include "portable.cuh"

constexpr int TILE_M = 128, TILE_N = 128, TILE_K = 32, STAGES = 4, THREADS = 256;
constexpr int STAGE_ELEMENTS = (TILE_M + TILE_N) * TILE_K;

struct ConvArgs {
    // [batch, height, width, c_in], strides in elements.
    const void* x;
    // [c_out, taps, c_in]
    const void* w;
    i64 strides[3];
    Rows out;
    // Null where there is none.
    const float* bias;
    const void* gate;
    i64 gate_stride;
    Rows residual;
    // [splits, n_pixels, c_out] where the reduction is split; null otherwise.
    float* partials;
    i64 n_pixels;
    i64 pixels_per_batch;
    int height;
    int width;
    int c_in;
    int c_out;
    int kernel_width;
    int n_taps;
    int out_height;
    int out_width;
    int stride;
    int top;
    int left;
    int upsample;
    int activation;
    // Slices of TILE_K that one block of a split takes.
    int slices_per_split;
    int n_splits;
};

// Where piece `piece` (16 bytes) of row `row` lies in a slice, in elements.
DEVICE int place(int row, int piece) { return row * TILE_K + ((piece ^ (row >> 1)) & 3) * 8; }

// What follows the sum: bias, activation, gate, residual.
template <class T> DEVICE void finish(const ConvArgs& args, i64 pixel, int channel, float sum) {
    if (args.bias) sum += args.bias[channel];
    sum = activate(args.activation, sum);
    if (args.gate) sum *= to_f32(static_cast<const T*>(args.gate)[pixel / args.pixels_per_batch * args.gate_stride + channel]);
    if (args.residual.start) sum += to_f32(row_of<T>(args.residual, pixel)[channel]);
    row_of<T>(args.out, pixel)[channel] = from_f32<T>(sum);
}

template <class T> DEVICE void conv(const ConvArgs& args) {
    DYN_SHARED(T, shared);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
    const i64 first_pixel = static_cast<i64>(blockIdx.x) * TILE_M;
    const int first_channel = blockIdx.y * TILE_N;

    // A thread copies piece `piece` of two rows of either operand.
    const int piece = tid % 4;
    const T* pictures[2];
    int ys[2], xs[2];
    const T* kernels[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        i64 pixel = first_pixel + tid / 4 + 64 * i;
        i64 image_row = pixel / args.out_width;
        int out_x = static_cast<int>(pixel - image_row * args.out_width);
        i64 batch = image_row / args.out_height;
        int out_y = static_cast<int>(image_row - batch * args.out_height);
        pictures[i] = static_cast<const T*>(args.x) + batch * args.strides[0];
        // A pixel beyond the last lies outside every picture.
        ys[i] = pixel < args.n_pixels ? out_y * args.stride - args.top : -(1 << 30);
        xs[i] = out_x * args.stride - args.left;
        int channel = first_channel + tid / 4 + 64 * i;
        kernels[i] = channel < args.c_out ? static_cast<const T*>(args.w) + static_cast<i64>(channel) * args.n_taps * args.c_in : nullptr;
    }
    const int pieces_per_tap = args.c_in / 8, n_pieces = args.n_taps * pieces_per_tap;
    const int full_height = args.height * args.upsample, full_width = args.width * args.upsample;
    const int first_slice = blockIdx.z * args.slices_per_split;
    const int n_slices = min((n_pieces + 3) / 4 - first_slice, args.slices_per_split);
    // The piece of the reduction that this thread copies next.
    int next = first_slice * 4 + piece;
    int tap = next / pieces_per_tap, rest = next - tap * pieces_per_tap;
    // Kept beside the tap, and the picture's magnification (1 or 2) as a shift: divisions would take as long as the products.
    int tap_y = tap / args.kernel_width, tap_x = tap - tap_y * args.kernel_width;
    const int shift = args.upsample - 1;

    auto copy_slice = [&](int stage) {
        T* a = shared + stage * STAGE_ELEMENTS;
        T* b = a + TILE_M * TILE_K;
        bool is_inside = tap < args.n_taps;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = tid / 4 + 64 * i;
            int y = ys[i] + tap_y, x = xs[i] + tap_x;
            bool is_seen = is_inside && y >= 0 && x >= 0 && y < full_height && x < full_width;
            const T* from = pictures[i] + (y >> shift) * args.strides[1] + (x >> shift) * args.strides[2] + rest * 8;
            cp_async16_if(a + place(row, piece), is_seen ? from : args.x, is_seen);
            bool is_kernel = is_inside && kernels[i] != nullptr;
            cp_async16_if(b + place(row, piece), is_kernel ? kernels[i] + tap * args.c_in + rest * 8 : args.w, is_kernel);
        }
        cp_async_commit();
        for (rest += 4; rest >= pieces_per_tap; rest -= pieces_per_tap) {
            tap++;
            if (++tap_x == args.kernel_width) {
                tap_x = 0;
                tap_y++;
            }
        }
    };

    float sums[4][4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

    // Groups are committed for slices that do not exist too, so that the count of groups tells which slice has arrived.
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage < n_slices) copy_slice(stage);
        else cp_async_commit();
    }
    for (int slice = 0; slice < n_slices; slice++) {
        cp_async_wait<STAGES - 2>();
        // The slice has arrived for all, and all are done with the one whose place is filled next.
        __syncthreads();
        if (slice + STAGES - 1 < n_slices) copy_slice((slice + STAGES - 1) % STAGES);
        else cp_async_commit();
        const T* a = shared + slice % STAGES * STAGE_ELEMENTS;
        const T* b = a + TILE_M * TILE_K;
        // A warp whose pixels or channels all lie beyond the ends only helps to copy.
        if (first_pixel + warp_m >= args.n_pixels || first_channel + warp_n >= args.c_out) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned left[4][4], right[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) ldmatrix_x4(left[i], a + place(warp_m + 16 * i + lane % 16, 2 * half + lane / 16));
            // Two blocks of eight channels at once: channels 0-7 and 8-15, each with both halves of the reduction.
#pragma unroll
            for (int j = 0; j < 2; j++)
                ldmatrix_x4(right[j], b + place(warp_n + 16 * j + lane % 8 + lane / 16 * 8, 2 * half + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) Mma<T>::run(sums[i][j], left[i], &right[j / 2][j % 2 * 2]);
        }
    }

    // The sums go through shared memory, where only empty groups are still under way: so neighbouring threads store neighbouring channels, and what
    // follows the sum is one loop rather than 64 copies of it. Columns are permuted by the row, so that no bank is met twice.
    __syncthreads();
    float* tile = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = warp_m + 16 * i + lane / 4 + e / 2 * 8;
#pragma unroll
            for (int j = 0; j < 4; j++) tile[row * TILE_N + ((warp_n + 8 * j + lane % 4 * 2 + e % 2) ^ row % 8 * 8)] = sums[i][j][e];
        }
    __syncthreads();
    const int own = tid % TILE_N, channel = first_channel + own;
    if (channel >= args.c_out) return;
#pragma unroll 1
    for (int row = tid / TILE_N; row < TILE_M; row += THREADS / TILE_N) {
        i64 pixel = first_pixel + row;
        if (pixel >= args.n_pixels) break;
        float sum = tile[row * TILE_N + (own ^ row % 8 * 8)];
        if (args.partials) args.partials[(blockIdx.z * args.n_pixels + pixel) * args.c_out + channel] = sum;
        else finish<T>(args, pixel, channel, sum);
    }
}
static_assert(TILE_M * TILE_N * 4 <= STAGES * STAGE_ELEMENTS * 2, "the sums of a block fit into its stages");

// Sums the parts of a split reduction in order.
template <class T> DEVICE void conv_sum(const ConvArgs& args) {
    i64 n_items = args.n_pixels * args.c_out;
    for (i64 item = first_item(); item < n_items; item += item_stride()) {
        float sum = 0.0f;
        for (int split = 0; split < args.n_splits; split++) sum += args.partials[split * n_items + item];
        i64 pixel = item / args.c_out;
        finish<T>(args, pixel, static_cast<int>(item - pixel * args.c_out), sum);
    }
}

DEFINE_KERNEL(conv_bf16, THREADS, conv<bf16>, ConvArgs)
DEFINE_KERNEL(conv_f16, THREADS, conv<f16>, ConvArgs)
DEFINE_KERNEL(conv_sum_bf16, 256, conv_sum<bf16>, ConvArgs)
DEFINE_KERNEL(conv_sum_f16, 256, conv_sum<f16>, ConvArgs)
