// Attention of 16-bit types on tensor cores: blocks of keys stream through shared memory, softmax is online, scores are never stored
// (Dao 2023, FlashAttention-2).
//
// A block has 4 warps, each with one or two tiles of 16 queries: two make twice as much of every key that is read from shared memory,
// one keeps more blocks busy where queries are few. Both compute a query in the same order, so that results do not depend on the choice.
// While scores are made the tile's values arrive, while values are summed the next tile's keys do. Rows in shared memory are 8 elements
// longer than they need be, so that ldmatrix meets no bank twice. Heads are padded to D with zeros; a block makes DV channels of them, and
// wide heads take several blocks, each of which computes the scores for itself. Scores are in units of log2, so that the exponential is
// one instruction.
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
    // Whether all rows of heads of q, k and v are whole pieces of 16 bytes on their boundaries, and those of out.
    int is_vector;
    int out_is_vector;
};

constexpr int GROUP = 64, THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;

// N_ROWS rows from `first` on into shared memory, zeros beyond `n_valid` rows and `head_dim` columns.
template <class T, int D, int N_ROWS>
DEVICE void load_rows(T* to, const T* from, int stride, int first, int n_valid, int head_dim, bool is_vector) {
    constexpr int LD = D + 8;
    if (is_vector) {
        // So many threads side by side that all rows of a pass are taken alike.
        constexpr int PIECES = D / 8, SIDE = PIECES & -PIECES, PASS = THREADS / SIDE;
        const int first_row = threadIdx.x / SIDE, first_col = threadIdx.x % SIDE * 8;
        const T* at = from + static_cast<i64>(first + first_row) * stride;
#pragma unroll
        for (int row = first_row; row < first_row + N_ROWS; row += PASS) {
#pragma unroll
            for (int col = first_col; col < first_col + D; col += SIDE * 8) {
                bool is_inside = first + row < n_valid && col < head_dim;
                cp_async16_if(to + row * LD + col, at + col, is_inside);
            }
            at += static_cast<i64>(PASS) * stride;
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < N_ROWS * D; i += THREADS) {
            int row = i / D, col = i % D;
            bool is_inside = first + row < n_valid && col < head_dim;
            to[row * LD + col] = is_inside ? from[static_cast<i64>(first + row) * stride + col] : T{0};
        }
    }
}

// The `N` tiles of a warp are GROUP queries apart.
template <class T, int D, int DV, int KEYS, int N> DEVICE void flash(const AttentionArgs& args) {
    constexpr int LD = D + 8, LDV = DV + 8, QUERIES = N * GROUP, STEPS = D / 16;
    // Longer rows of queries would not leave room for the sums.
    constexpr bool Q_STAYS_SHARED = N * D > 128;
    // Nor would many of them at a time.
    constexpr int AT_ONCE = !Q_STAYS_SHARED ? STEPS : N == 2 ? 1 : 4;
    DYN_SHARED(T, shared);
    T* queries = shared;
    T* keys = Q_STAYS_SHARED ? shared + QUERIES * LD : shared;
    T* values = keys + KEYS * LD;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.y / (D / DV), first_col = blockIdx.y % (D / DV) * DV, batch = blockIdx.z;
    const int n_cols = D == DV ? args.head_dim : min(DV, args.head_dim - first_col);
    const int kv_head = static_cast<int>(static_cast<i64>(head) * args.n_kv_heads / args.n_heads);
    const int first_query = blockIdx.x * QUERIES;
    // Two tiles are not for others.
    const bool is_vector = N == 2 || args.is_vector;
    const T* q = static_cast<const T*>(args.q) + batch * args.q_strides[0] + head * args.head_dim;
    const T* k = static_cast<const T*>(args.k) + batch * args.k_strides[0] + kv_head * args.head_dim;
    const T* v = static_cast<const T*>(args.v) + batch * args.v_strides[0] + kv_head * args.head_dim + first_col;
    const int k_stride = static_cast<int>(args.k_strides[1]), v_stride = static_cast<int>(args.v_strides[1]);

    load_rows<T, D, QUERIES>(queries, q, static_cast<int>(args.q_strides[1]), first_query, args.n_queries, args.head_dim, is_vector);
    cp_async_commit();
    unsigned left[Q_STAYS_SHARED ? 1 : N][Q_STAYS_SHARED ? 1 : STEPS][4];
    const T* own_queries = queries + (warp * 16 + lane % 16) * LD + lane / 16 * 8;
    if (!Q_STAYS_SHARED) {
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int t = 0; t < STEPS; t++) ldmatrix_x4(left[Q_STAYS_SHARED ? 0 : i][Q_STAYS_SHARED ? 0 : t], own_queries + i * GROUP * LD + 16 * t);
        // The keys come where the queries were.
        __syncthreads();
    }

    float sums[N][DV / 8][4];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < DV / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;
    // Of this thread's two rows in each tile: the largest score and the sum of the weights so far.
    float largest[N][2], weights[N][2];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[i][r] = -INFINITY;
            weights[i][r] = 0.0f;
        }
    const float unit = args.scale * LOG2_E;

    // Later keys are hidden from all queries of the block.
    const int n_seen = args.is_causal ? min(args.n_keys, first_query + QUERIES) : args.n_keys;
    load_rows<T, D, KEYS>(keys, k, k_stride, 0, args.n_keys, args.head_dim, is_vector);
    cp_async_commit();
    for (int first_key = 0; first_key < n_seen; first_key += KEYS) {
        // The keys are there, and nobody reads the last tile's values any more.
        cp_async_wait<0>();
        __syncthreads();
        load_rows<T, DV, KEYS>(values, v, v_stride, first_key, args.n_keys, n_cols, is_vector);
        cp_async_commit();

        float scores[N][KEYS / 8][4];
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) scores[i][n][e] = 0.0f;
#pragma unroll (AT_ONCE)
        for (int t = 0; t < STEPS; t++) {
            unsigned own[N][4];
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (Q_STAYS_SHARED) ldmatrix_x4(own[i], own_queries + i * GROUP * LD + 16 * t);
                else
                    for (int e = 0; e < 4; e++) own[i][e] = left[Q_STAYS_SHARED ? 0 : i][Q_STAYS_SHARED ? 0 : t][e];
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                unsigned right[4];
                ldmatrix_x4(right, keys + (16 * n + lane % 8 + lane / 16 * 8) * LD + 16 * t + lane / 8 % 2 * 8);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    Mma<T>::run(scores[i][2 * n], own[i], right);
                    Mma<T>::run(scores[i][2 * n + 1], own[i], right + 2);
                }
            }
        }
        // The values are there, and nobody reads the keys any more.
        cp_async_wait<0>();
        __syncthreads();
        if (first_key + KEYS < n_seen) {
            load_rows<T, D, KEYS>(keys, k, k_stride, first_key + KEYS, args.n_keys, args.head_dim, is_vector);
            cp_async_commit();
        }

        unsigned rounded[N][KEYS / 16][4];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int group = first_query + i * GROUP;
            const bool is_hiding = first_key + KEYS > args.n_keys || (args.is_causal && first_key + KEYS > group);
            // Most tiles are whole and seen by all: there the largest score is found before they are scaled.
            float factor = unit;
            if (args.bias || is_hiding || unit < 0.0f) {
                factor = 1.0f;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int row = group + warp * 16 + lane / 4 + 8 * r;
                    const int n_own = (args.is_causal ? min(args.n_keys, row + 1) : args.n_keys) - first_key - lane % 4 * 2;
                    // A row that is not there reads the bias of one that is.
                    const float* bias = args.bias + batch * args.bias_strides[0] + head * args.bias_strides[1] +
                                        min(row, args.n_queries - 1) * args.bias_strides[2] + (first_key + lane % 4 * 2) * args.bias_strides[3];
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            float& score = scores[i][n][2 * r + c];
                            score *= unit;
                            if (8 * n + c >= n_own) score = -INFINITY;
                            else if (args.bias) score += LOG2_E * bias[c * args.bias_strides[3]];
                        }
                        bias += 8 * args.bias_strides[3];
                    }
                }
            }
            float base[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float next = scores[i][0][2 * r];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) next = fmaxf(next, fmaxf(scores[i][n][2 * r], scores[i][n][2 * r + 1]));
                next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
                next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
                next = fmaxf(next * factor, largest[i][r]);
                // A row that has seen no key yet keeps weights of zero.
                base[r] = next == -INFINITY ? 0.0f : next;
                float fading = fast_exp2(largest[i][r] - base[r]);
                largest[i][r] = next;
                weights[i][r] *= fading;
#pragma unroll
                for (int j = 0; j < DV / 8; j++) {
                    sums[i][j][2 * r] *= fading;
                    sums[i][j][2 * r + 1] *= fading;
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    scores[i][n][e] = fast_exp2(scores[i][n][e] * factor - base[e / 2]);
                    weights[i][e / 2] += scores[i][n][e];
                }
#pragma unroll
            for (int t = 0; t < KEYS / 16; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    rounded[i][t][e] = pack2<T>(scores[i][2 * t + e / 2][e % 2 * 2], scores[i][2 * t + e / 2][e % 2 * 2 + 1]);
        }

#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
#pragma unroll
            for (int j = 0; j < DV / 16; j++) {
                unsigned right[4];
                ldmatrix_x4_trans(right, values + (16 * t + lane % 16) * LDV + 16 * j + lane / 16 * 8);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    Mma<T>::run(sums[i][2 * j], rounded[i][t], right);
                    Mma<T>::run(sums[i][2 * j + 1], rounded[i][t], right + 2);
                }
            }
        }
    }

    // Through shared memory, so that rows are written in whole pieces; each warp stores its own. No copy comes into it any more: the last
    // round waited for its values and asked for no keys.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = weights[i][r];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            // Nothing but a row that saw no key has a sum of zero: its largest score has a weight of one.
            float factor = total == 0.0f ? 0.0f : 1.0f / total;
            T* row = shared + (i * GROUP + warp * 16 + lane / 4 + 8 * r) * LDV + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < DV / 8; j++)
                *reinterpret_cast<unsigned*>(row + 8 * j) = pack2<T>(sums[i][j][2 * r] * factor, sums[i][j][2 * r + 1] * factor);
        }
    __syncwarp();
    T* out = static_cast<T*>(args.out) + batch * args.out_strides[0] + head * args.head_dim + first_col;
    const int piece = args.out_is_vector ? 8 : 1, n_pieces = n_cols / piece;
    for (int tile = warp * 16; tile < QUERIES; tile += GROUP) {
        const int n_rows = min(16, args.n_queries - first_query - tile);
        for (int item = lane; item < n_rows * n_pieces; item += 32) {
            int row = item / n_pieces, col = (item - row * n_pieces) * piece;
            const T* from = shared + (tile + row) * LDV + col;
            T* to = out + (first_query + tile + row) * args.out_strides[1] + col;
            if (args.out_is_vector) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            else *to = *from;
        }
    }
}

#define DEFINE_BOTH(name, D, DV, KEYS, N)                                               \
    DEFINE_KERNEL(name##_bf16, THREADS, (flash<bf16, D, DV, KEYS, N>), AttentionArgs)   \
    DEFINE_KERNEL(name##_f16, THREADS, (flash<f16, D, DV, KEYS, N>), AttentionArgs)

DEFINE_BOTH(flash_32, 32, 32, 64, 1)
DEFINE_BOTH(flash_48, 48, 48, 64, 1)
DEFINE_BOTH(flash_48_tall, 48, 48, 64, 2)
DEFINE_BOTH(flash_64, 64, 64, 64, 1)
DEFINE_BOTH(flash_64_tall, 64, 64, 64, 2)
DEFINE_BOTH(flash_80, 80, 80, 64, 1)
DEFINE_BOTH(flash_80_tall, 80, 80, 64, 2)
DEFINE_BOTH(flash_96, 96, 96, 64, 1)
DEFINE_BOTH(flash_128, 128, 128, 48, 1)
DEFINE_BOTH(flash_128_tall, 128, 128, 48, 2)
DEFINE_BOTH(flash_160, 160, 160, 64, 1)
DEFINE_BOTH(flash_256, 256, 256, 32, 1)
DEFINE_BOTH(flash_512, 512, 256, 16, 1)
