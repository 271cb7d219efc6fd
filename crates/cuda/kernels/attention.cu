// Attention without tensor cores: f32, exact to the rounding of f32, and heads of any width in every type.
//
// A block has 16 queries with 8 threads each and makes up to 256 channels of their output; wider heads take several blocks, each of
// which computes the scores for itself. Keys come in tiles of 32, queries and keys in pieces of 64 channels; softmax is online.
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
    int is_vector;
    int out_is_vector;
};

constexpr int QUERIES = 16, KEYS = 32, PIECE = 64, SLICE = 256, THREADS = 128;
constexpr int PER_QUERY = THREADS / QUERIES, PER_THREAD = KEYS / PER_QUERY;
// Rows of odd length lie in different banks.
constexpr int PIECE_LD = PIECE + 1, SLICE_LD = SLICE + 1, KEYS_LD = KEYS + 1;

// Rows `first ..` and columns `first_col ..` into shared memory, zeros beyond the ends.
template <class T>
DEVICE void load_rows(float* to, int ld, const T* from, i64 stride, int first, int n_rows, int n_valid, int first_col, int n_cols, int n_valid_cols) {
    for (int i = threadIdx.x; i < n_rows * n_cols; i += THREADS) {
        int row = i / n_cols, col = i - row * n_cols;
        bool is_inside = first + row < n_valid && first_col + col < n_valid_cols;
        to[row * ld + col] = is_inside ? to_f32(from[(first + row) * stride + first_col + col]) : 0.0f;
    }
}

template <class T> DEVICE void attention(const AttentionArgs& args) {
    __shared__ float queries[QUERIES * PIECE_LD];
    __shared__ float keys[KEYS * PIECE_LD];
    __shared__ float weights[QUERIES * KEYS_LD];
    DYN_SHARED(float, values);
    const int own = threadIdx.x / PER_QUERY, part = threadIdx.x % PER_QUERY;
    const int n_slices = (args.head_dim + SLICE - 1) / SLICE;
    const int head = blockIdx.y / n_slices, first_col = (blockIdx.y - head * n_slices) * SLICE, batch = blockIdx.z;
    const int n_cols = min(SLICE, args.head_dim - first_col);
    const int kv_head = static_cast<int>(static_cast<i64>(head) * args.n_kv_heads / args.n_heads);
    const int first_query = blockIdx.x * QUERIES, query = first_query + own;
    const T* q = static_cast<const T*>(args.q) + batch * args.q_strides[0] + head * args.head_dim;
    const T* k = static_cast<const T*>(args.k) + batch * args.k_strides[0] + kv_head * args.head_dim;
    const T* v = static_cast<const T*>(args.v) + batch * args.v_strides[0] + kv_head * args.head_dim;

    // Channels part, part + 8, ... of this thread's query.
    float sums[SLICE / PER_QUERY];
#pragma unroll
    for (int i = 0; i < SLICE / PER_QUERY; i++) sums[i] = 0.0f;
    float largest = -INFINITY, total = 0.0f;
    const int n_seen = args.is_causal ? min(args.n_keys, first_query + QUERIES) : args.n_keys;
    for (int first_key = 0; first_key < n_seen; first_key += KEYS) {
        float scores[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) scores[j] = 0.0f;
        for (int col = 0; col < args.head_dim; col += PIECE) {
            // The last piece, weights and values are read no more.
            __syncthreads();
            load_rows(queries, PIECE_LD, q, args.q_strides[1], first_query, QUERIES, args.n_queries, col, PIECE, args.head_dim);
            load_rows(keys, PIECE_LD, k, args.k_strides[1], first_key, KEYS, args.n_keys, col, PIECE, args.head_dim);
            __syncthreads();
            int n = min(PIECE, args.head_dim - col);
            for (int c = 0; c < n; c++)
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++)
                    scores[j] += queries[own * PIECE_LD + c] * keys[(part + PER_QUERY * j) * PIECE_LD + c];
        }
        load_rows(values, SLICE_LD, v + first_col, args.v_strides[1], first_key, KEYS, args.n_keys, 0, n_cols, n_cols);
        float next = largest;
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            int key = first_key + part + PER_QUERY * j;
            bool is_seen = key < args.n_keys && (!args.is_causal || key <= query);
            float score = scores[j] * args.scale;
            if (args.bias && is_seen && query < args.n_queries)
                score += args.bias[batch * args.bias_strides[0] + head * args.bias_strides[1] + query * args.bias_strides[2] +
                                   key * args.bias_strides[3]];
            scores[j] = is_seen ? score : -INFINITY;
            next = fmaxf(next, scores[j]);
        }
        // The eight threads of a query are neighbours.
        for (int lane = 1; lane < PER_QUERY; lane <<= 1) next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, lane));
        // A query that has seen no key yet keeps weights of zero.
        float base = next == -INFINITY ? 0.0f : next;
        float factor = expf(largest - base);
        largest = next;
        total *= factor;
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            float weight = expf(scores[j] - base);
            total += weight;
            weights[own * KEYS_LD + part + PER_QUERY * j] = weight;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SLICE / PER_QUERY; i++) {
            if (part + PER_QUERY * i >= n_cols) break;
            float sum = 0.0f;
            for (int j = 0; j < KEYS; j++) sum += weights[own * KEYS_LD + j] * values[j * SLICE_LD + part + PER_QUERY * i];
            sums[i] = sums[i] * factor + sum;
        }
    }
    for (int lane = 1; lane < PER_QUERY; lane <<= 1) total += __shfl_xor_sync(0xffffffffu, total, lane);
    if (query >= args.n_queries) return;
    // Nothing but a query that saw no key has a sum of zero: its largest score has a weight of one.
    float factor = total == 0.0f ? 0.0f : 1.0f / total;
    T* out = static_cast<T*>(args.out) + batch * args.out_strides[0] + query * args.out_strides[1] + head * args.head_dim + first_col;
#pragma unroll
    for (int i = 0; i < SLICE / PER_QUERY; i++)
        if (part + PER_QUERY * i < n_cols) out[part + PER_QUERY * i] = from_f32<T>(sums[i] * factor);
}

DEFINE_KERNEL(attention_f32, THREADS, attention<float>, AttentionArgs)
DEFINE_KERNEL(attention_bf16, THREADS, attention<bf16>, AttentionArgs)
DEFINE_KERNEL(attention_f16, THREADS, attention<f16>, AttentionArgs)
