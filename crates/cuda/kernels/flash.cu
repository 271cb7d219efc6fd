// Attention of 16-bit types on tensor cores: blocks of keys stream through shared memory, softmax is online, scores are never stored
// (Dao 2023, FlashAttention-2).
//
// A block has 4 warps of 16 queries each. Keys and values arrive in tiles through a pipeline of two stages; rows in shared memory are 8
// elements longer than they need be, so that ldmatrix meets no bank twice. Heads are padded to D with zeros. Scores are in units of
// log2, so that the exponential is one instruction.
#include "portable.cuh"

struct AttentionArgs {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    // f32, or null; broadcast by strides of zero.
    const float* bias;
    // Elements between batch elements and between rows.
    i64 q_strides[2];
    i64 k_strides[2];
    i64 v_strides[2];
    i64 out_strides[2];
    i64 bias_strides[4];
    int n_queries;
    int n_keys;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    float scale;
    int is_causal;
    // Whether all rows of q, k and v are whole pieces of 16 bytes on their boundaries.
    int is_vector;
};

constexpr int QUERIES = 64, THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;

// `n_rows` rows from `first` on into shared memory, zeros beyond `n_valid` rows and `head_dim` columns.
template <class T, int D> DEVICE void load_rows(T* to, const T* from, i64 stride, int first, int n_rows, int n_valid, int head_dim, bool is_vector) {
    constexpr int LD = D + 8;
    if (is_vector) {
        for (int i = threadIdx.x; i < n_rows * (D / 8); i += THREADS) {
            int row = i / (D / 8), col = i % (D / 8) * 8;
            bool is_inside = first + row < n_valid && col < head_dim;
            cp_async16_if(to + row * LD + col, is_inside ? from + (first + row) * stride + col : from, is_inside);
        }
    } else {
        for (int i = threadIdx.x; i < n_rows * D; i += THREADS) {
            int row = i / D, col = i % D;
            bool is_inside = first + row < n_valid && col < head_dim;
            to[row * LD + col] = is_inside ? from[(first + row) * stride + col] : T{0};
        }
    }
}

template <class T, int D, int KEYS> DEVICE void flash(const AttentionArgs& args) {
    constexpr int LD = D + 8;
    // Longer rows of queries would not leave room for the sums.
    constexpr bool Q_STAYS_SHARED = D > 160;
    DYN_SHARED(T, shared);
    T* tiles = shared;
    T* queries = Q_STAYS_SHARED ? shared + 4 * KEYS * LD : shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int kv_head = static_cast<int>(static_cast<i64>(head) * args.n_kv_heads / args.n_heads);
    const int first_query = blockIdx.x * QUERIES;
    const T* q = static_cast<const T*>(args.q) + batch * args.q_strides[0] + head * args.head_dim;
    const T* k = static_cast<const T*>(args.k) + batch * args.k_strides[0] + kv_head * args.head_dim;
    const T* v = static_cast<const T*>(args.v) + batch * args.v_strides[0] + kv_head * args.head_dim;

    load_rows<T, D>(queries, q, args.q_strides[1], first_query, QUERIES, args.n_queries, args.head_dim, args.is_vector);
    cp_async_commit();
    unsigned left[Q_STAYS_SHARED ? 1 : D / 16][4];
    const T* own_queries = queries + (warp * 16 + lane % 16) * LD + lane / 16 * 8;
    if (!Q_STAYS_SHARED) {
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int t = 0; t < D / 16; t++) ldmatrix_x4(left[Q_STAYS_SHARED ? 0 : t], own_queries + 16 * t);
        // The tiles come where the queries were.
        __syncthreads();
    }

    // Later keys are hidden from all queries of the block.
    const int n_seen = args.is_causal ? min(args.n_keys, first_query + QUERIES) : args.n_keys;
    const int n_tiles = (n_seen + KEYS - 1) / KEYS;
    auto load_tile = [&](int tile) {
        T* to = tiles + tile % 2 * 2 * KEYS * LD;
        load_rows<T, D>(to, k, args.k_strides[1], tile * KEYS, KEYS, args.n_keys, args.head_dim, args.is_vector);
        load_rows<T, D>(to + KEYS * LD, v, args.v_strides[1], tile * KEYS, KEYS, args.n_keys, args.head_dim, args.is_vector);
        cp_async_commit();
    };

    float sums[D / 8][4];
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] = 0.0f;
    // Of this thread's two rows: the largest score and the sum of the weights so far.
    float largest[2] = {-INFINITY, -INFINITY}, weights[2] = {0.0f, 0.0f};
    const int query = first_query + warp * 16 + lane / 4;

    load_tile(0);
    for (int tile = 0; tile < n_tiles; tile++) {
        if (tile + 1 < n_tiles) {
            load_tile(tile + 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const T* keys = tiles + tile % 2 * 2 * KEYS * LD;
        const T* values = keys + KEYS * LD;

        float scores[KEYS / 8][4];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[n][e] = 0.0f;
#pragma unroll
        for (int t = 0; t < D / 16; t++) {
            unsigned own[4];
            if (Q_STAYS_SHARED) ldmatrix_x4(own, own_queries + 16 * t);
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                unsigned right[4];
                ldmatrix_x4(right, keys + (16 * n + lane % 8 + lane / 16 * 8) * LD + 16 * t + lane / 8 % 2 * 8);
                Mma<T>::run(scores[2 * n], Q_STAYS_SHARED ? own : left[Q_STAYS_SHARED ? 0 : t], right);
                Mma<T>::run(scores[2 * n + 1], Q_STAYS_SHARED ? own : left[Q_STAYS_SHARED ? 0 : t], right + 2);
            }
        }

        float next[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[n][e] *= args.scale * LOG2_E;
        // Most tiles are whole and seen by all.
        if (args.bias || (tile + 1) * KEYS > args.n_keys || (args.is_causal && (tile + 1) * KEYS > first_query)) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = query + 8 * r;
                // A row that is not there reads the bias of one that is.
                const float* bias = args.bias + batch * args.bias_strides[0] + head * args.bias_strides[1] +
                                    min(row, args.n_queries - 1) * args.bias_strides[2];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        int key = tile * KEYS + 8 * n + lane % 4 * 2 + c;
                        bool is_seen = key < args.n_keys && (!args.is_causal || key <= row);
                        float& score = scores[n][2 * r + c];
                        if (!is_seen) score = -INFINITY;
                        else if (args.bias) score += LOG2_E * bias[key * args.bias_strides[3]];
                    }
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) next[e / 2] = fmaxf(next[e / 2], scores[n][e]);
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            next[r] = fmaxf(next[r], __shfl_xor_sync(0xffffffffu, next[r], 1));
            next[r] = fmaxf(next[r], __shfl_xor_sync(0xffffffffu, next[r], 2));
            // A row that has seen no key yet keeps weights of zero.
            base[r] = next[r] == -INFINITY ? 0.0f : next[r];
            float factor = fast_exp2(largest[r] - base[r]);
            largest[r] = next[r];
            weights[r] *= factor;
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                sums[j][2 * r] *= factor;
                sums[j][2 * r + 1] *= factor;
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                scores[n][e] = fast_exp2(scores[n][e] - base[e / 2]);
                weights[e / 2] += scores[n][e];
            }

#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
            unsigned own[4] = {pack2<T>(scores[2 * t][0], scores[2 * t][1]), pack2<T>(scores[2 * t][2], scores[2 * t][3]),
                               pack2<T>(scores[2 * t + 1][0], scores[2 * t + 1][1]), pack2<T>(scores[2 * t + 1][2], scores[2 * t + 1][3])};
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                unsigned right[4];
                ldmatrix_x4_trans(right, values + (16 * t + lane % 16) * LD + 16 * j + lane / 16 * 8);
                Mma<T>::run(sums[2 * j], own, right);
                Mma<T>::run(sums[2 * j + 1], own, right + 2);
            }
        }
        // The next tile but one comes into this one's place.
        __syncthreads();
    }

    T* out = static_cast<T*>(args.out) + batch * args.out_strides[0] + head * args.head_dim;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        weights[r] += __shfl_xor_sync(0xffffffffu, weights[r], 1);
        weights[r] += __shfl_xor_sync(0xffffffffu, weights[r], 2);
        int row = query + 8 * r;
        if (row >= args.n_queries) continue;
        float factor = largest[r] == -INFINITY && weights[r] == 0.0f ? 0.0f : 1.0f / weights[r];
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int col = 8 * j + lane % 4 * 2 + c;
                if (col < args.head_dim) out[row * args.out_strides[1] + col] = from_f32<T>(sums[j][2 * r + c] * factor);
            }
    }
}

#define FOR_EACH_WIDTH(type, T)                                                    \
    DEFINE_KERNEL(flash_32_##type, THREADS, (flash<T, 32, 64>), AttentionArgs)     \
    DEFINE_KERNEL(flash_64_##type, THREADS, (flash<T, 64, 64>), AttentionArgs)     \
    DEFINE_KERNEL(flash_96_##type, THREADS, (flash<T, 96, 64>), AttentionArgs)     \
    DEFINE_KERNEL(flash_128_##type, THREADS, (flash<T, 128, 64>), AttentionArgs)   \
    DEFINE_KERNEL(flash_160_##type, THREADS, (flash<T, 160, 32>), AttentionArgs)   \
    DEFINE_KERNEL(flash_256_##type, THREADS, (flash<T, 256, 32>), AttentionArgs)

FOR_EACH_WIDTH(bf16, bf16)
FOR_EACH_WIDTH(f16, f16)
