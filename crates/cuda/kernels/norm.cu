// Layer norm, RMS norm, group norm, and norms taken over from other rows. Statistics are float and come in two passes, so that a large mean costs no digits.
//
// Rows are read once per pass; all passes but the first find them in a cache. A thread reads the same elements in every pass, so the
// output may be the input.
#include "portable.cuh"

// Sum over the threads of a group: a warp, or all 256 threads of a block. The same bits in all of them.
template <int GROUP> DEVICE float group_sum(float x, float* shared) {
    x = warp_sum(x);
    if (GROUP == 32) return x;
    // The sums of the last call may still be read.
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < GROUP / 32; warp++) sum += shared[warp];
    return sum;
}

struct LayerNormArgs {
    Rows x;
    Rows out;
    // Null where there is none.
    const float* weight;
    const float* bias;
    const void* scale;
    const void* shift;
    // Elements between the rows of scale and shift; 0 for one row for all.
    i64 scale_stride;
    i64 shift_stride;
    i64 n_rows;
    i64 rows_per_batch;
    int n_cols;
    float eps;
    int is_vector;
};

template <class T, int GROUP, int V> DEVICE void layer_norm_row(const LayerNormArgs& args, i64 row, int lane, float* shared) {
    const T* x = row_of<T>(args.x, row);
    T* out = row_of<T>(args.out, row);
    int n = args.n_cols;
    float sum = 0.0f;
    for (int col = lane * V; col < n; col += GROUP * V) {
        float v[V];
        load<T, V>(v, x + col);
#pragma unroll
        for (int i = 0; i < V; i++) sum += v[i];
    }
    float mean = group_sum<GROUP>(sum, shared) / n;
    float squares = 0.0f;
    for (int col = lane * V; col < n; col += GROUP * V) {
        float v[V];
        load<T, V>(v, x + col);
#pragma unroll
        for (int i = 0; i < V; i++) squares += (v[i] - mean) * (v[i] - mean);
    }
    float variance = group_sum<GROUP>(squares, shared) / n;
    float factor = 1.0f / sqrtf(variance + args.eps);
    i64 batch = row / args.rows_per_batch;
    const T* scale = static_cast<const T*>(args.scale) + batch * args.scale_stride;
    const T* shift = static_cast<const T*>(args.shift) + batch * args.shift_stride;
    for (int col = lane * V; col < n; col += GROUP * V) {
        float v[V];
        load<T, V>(v, x + col);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = (v[i] - mean) * factor;
        if (args.weight) {
#pragma unroll
            for (int i = 0; i < V; i++) v[i] *= args.weight[col + i];
        }
        if (args.bias) {
#pragma unroll
            for (int i = 0; i < V; i++) v[i] += args.bias[col + i];
        }
        if (args.scale) {
            float by[V], more[V];
            load<T, V>(by, scale + col);
            load<T, V>(more, shift + col);
#pragma unroll
            for (int i = 0; i < V; i++) v[i] = v[i] * (1.0f + by[i]) + more[i];
        }
        store<T, V>(out + col, v);
    }
}

template <class T, int GROUP> DEVICE void layer_norm_rows(const LayerNormArgs& args) {
    __shared__ float shared[8];
    constexpr int V = 16 / sizeof(T);
    int lane = threadIdx.x % GROUP;
    // All threads of a group have the same row, so that they meet in the sums.
    for (i64 row = blockIdx.x * static_cast<i64>(256 / GROUP) + threadIdx.x / GROUP; row < args.n_rows;
         row += gridDim.x * static_cast<i64>(256 / GROUP)) {
        if (args.is_vector) layer_norm_row<T, GROUP, V>(args, row, lane, shared);
        else layer_norm_row<T, GROUP, 1>(args, row, lane, shared);
    }
}
template <class T> DEVICE void layer_norm_narrow(const LayerNormArgs& args) { layer_norm_rows<T, 32>(args); }
template <class T> DEVICE void layer_norm_wide(const LayerNormArgs& args) { layer_norm_rows<T, 256>(args); }

struct RmsNormArgs {
    Rows x;
    Rows out;
    // Null where there is none.
    const float* weight;
    i64 n_units;
    int units_per_row;
    int group_len;
    float eps;
    int is_vector;
};

template <class T, int GROUP, int V> DEVICE void rms_norm_unit(const RmsNormArgs& args, i64 unit, int lane, float* shared) {
    i64 row = unit / args.units_per_row;
    int first = static_cast<int>(unit - row * args.units_per_row) * args.group_len;
    const T* x = row_of<T>(args.x, row) + first;
    T* out = row_of<T>(args.out, row) + first;
    int n = args.group_len;
    float squares = 0.0f;
    for (int col = lane * V; col < n; col += GROUP * V) {
        float v[V];
        load<T, V>(v, x + col);
#pragma unroll
        for (int i = 0; i < V; i++) squares += v[i] * v[i];
    }
    float factor = 1.0f / sqrtf(group_sum<GROUP>(squares, shared) / n + args.eps);
    for (int col = lane * V; col < n; col += GROUP * V) {
        float v[V];
        load<T, V>(v, x + col);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] *= factor;
        if (args.weight) {
#pragma unroll
            for (int i = 0; i < V; i++) v[i] *= args.weight[col + i];
        }
        store<T, V>(out + col, v);
    }
}

template <class T, int GROUP> DEVICE void rms_norm_units(const RmsNormArgs& args) {
    __shared__ float shared[8];
    constexpr int V = 16 / sizeof(T);
    int lane = threadIdx.x % GROUP;
    for (i64 unit = blockIdx.x * static_cast<i64>(256 / GROUP) + threadIdx.x / GROUP; unit < args.n_units;
         unit += gridDim.x * static_cast<i64>(256 / GROUP)) {
        if (args.is_vector) rms_norm_unit<T, GROUP, V>(args, unit, lane, shared);
        else rms_norm_unit<T, GROUP, 1>(args, unit, lane, shared);
    }
}
template <class T> DEVICE void rms_norm_narrow(const RmsNormArgs& args) { rms_norm_units<T, 32>(args); }
template <class T> DEVICE void rms_norm_wide(const RmsNormArgs& args) { rms_norm_units<T, 256>(args); }

struct MatchNormArgs {
    Rows x;
    Rows like;
    Rows out;
    i64 n_units;
    int units_per_row;
    int group_len;
    int is_vector;
};

template <class T, int V> DEVICE void match_norm_unit(const MatchNormArgs& args, i64 unit, int lane) {
    i64 row = unit / args.units_per_row;
    int first = static_cast<int>(unit - row * args.units_per_row) * args.group_len;
    const T* x = row_of<T>(args.x, row) + first;
    const T* like = row_of<T>(args.like, row) + first;
    T* out = row_of<T>(args.out, row) + first;
    int n = args.group_len;
    float own = 0.0f, wanted = 0.0f;
    for (int col = lane * V; col < n; col += 32 * V) {
        float v[V], w[V];
        load<T, V>(v, x + col);
        load<T, V>(w, like + col);
#pragma unroll
        for (int i = 0; i < V; i++) {
            own += v[i] * v[i];
            wanted += w[i] * w[i];
        }
    }
    own = sqrtf(warp_sum(own));
    // By zero where there is nothing to enlarge; a NaN in `like` comes through.
    float factor = sqrtf(warp_sum(wanted)) * (own == 0.0f ? 0.0f : 1.0f / own);
    for (int col = lane * V; col < n; col += 32 * V) {
        float v[V];
        load<T, V>(v, x + col);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] *= factor;
        store<T, V>(out + col, v);
    }
}

// A warp for each group.
template <class T> DEVICE void match_norm(const MatchNormArgs& args) {
    constexpr int V = 16 / sizeof(T);
    int lane = threadIdx.x % 32;
    for (i64 unit = blockIdx.x * 8ll + threadIdx.x / 32; unit < args.n_units; unit += gridDim.x * 8ll) {
        if (args.is_vector) match_norm_unit<T, V>(args, unit, lane);
        else match_norm_unit<T, 1>(args, unit, lane);
    }
}

// Group norm in three launches: statistics of chunks of positions, their combination, and the application.
struct GroupNormArgs {
    Rows x;
    Rows out;
    const float* weight;
    const float* bias;
    // [batch, chunks, groups, (mean, sum of squared distances from it)]
    float* partials;
    // [batch, channels, (mean, factor)]
    float* normals;
    i64 n_positions;
    i64 chunk_len;
    int n_chunks;
    int n_channels;
    int n_groups;
    int n_batch;
    float eps;
    int activation;
    int is_vector;
};

// Sums a value per channel over the positions of a chunk, then over the channels of each group: `sums[group]`, of which a thread may read
// those that it wrote (every 256th from its number on) until the block meets again.
// `value(x, i)` is what element i of a thread's channels counts for.
template <class T, int V, class Value>
DEVICE void chunk_sums(const GroupNormArgs& args, i64 first_row, i64 n_rows, float* lanes, float* sums, Value value) {
    int n_vecs = args.n_channels / V;
    // As many positions at once as there are threads for; one where a row has more vectors than the block threads.
    int n_lanes = max(256 / n_vecs, 1);
    for (int vec = threadIdx.x; vec < n_lanes * n_vecs; vec += 256) {
        int lane = vec / n_vecs, channel = (vec - lane * n_vecs) * V;
        float sum[V];
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] = 0.0f;
        for (i64 row = lane; row < n_rows; row += n_lanes) {
            float x[V];
            load<T, V>(x, row_of<T>(args.x, first_row + row) + channel);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += value(x[i], channel + i);
        }
#pragma unroll
        for (int i = 0; i < V; i++) lanes[lane * args.n_channels + channel + i] = sum[i];
    }
    __syncthreads();
    int group_len = args.n_channels / args.n_groups;
    for (int group = threadIdx.x; group < args.n_groups; group += 256) {
        float sum = 0.0f;
        for (int lane = 0; lane < n_lanes; lane++)
            for (int i = 0; i < group_len; i++) sum += lanes[lane * args.n_channels + group * group_len + i];
        sums[group] = sum;
    }
}

template <class T, int V> DEVICE void group_norm_chunk(const GroupNormArgs& args) {
    DYN_SHARED(float, shared);
    float* sums = shared;
    float* lanes = shared + args.n_groups;
    int batch = blockIdx.x / args.n_chunks, chunk = blockIdx.x - batch * args.n_chunks;
    i64 start = chunk * args.chunk_len;
    i64 n_rows = min(args.chunk_len, args.n_positions - start);
    i64 first_row = batch * args.n_positions + start;
    int group_len = args.n_channels / args.n_groups;
    float count = static_cast<float>(n_rows) * group_len;
    chunk_sums<T, V>(args, first_row, n_rows, lanes, sums, [](float x, int) { return x; });
    for (int group = threadIdx.x; group < args.n_groups; group += 256) sums[group] /= count;
    __syncthreads();
    float* partials = args.partials + static_cast<i64>(blockIdx.x) * args.n_groups * 2;
    for (int group = threadIdx.x; group < args.n_groups; group += 256) partials[2 * group] = sums[group];
    // The means are read by all threads while the squares are summed into other places.
    float* squares = lanes + max(256 / (args.n_channels / V), 1) * args.n_channels;
    chunk_sums<T, V>(args, first_row, n_rows, lanes, squares, [&](float x, int channel) {
        float distance = x - sums[channel / group_len];
        return distance * distance;
    });
    for (int group = threadIdx.x; group < args.n_groups; group += 256) partials[2 * group + 1] = squares[group];
}
template <class T> DEVICE void group_norm_statistics(const GroupNormArgs& args) {
    if (args.is_vector) group_norm_chunk<T, 16 / sizeof(T)>(args);
    else group_norm_chunk<T, 1>(args);
}

// Combines chunks in order (Chan, Golub, LeVeque 1979) and spreads what a group has over its channels; a thread per group.
DEVICE void group_norm_combine(const GroupNormArgs& args) {
    int unit = blockIdx.x * 256 + threadIdx.x;
    if (unit >= args.n_batch * args.n_groups) return;
    int batch = unit / args.n_groups, group = unit - batch * args.n_groups;
    int group_len = args.n_channels / args.n_groups;
    float mean = 0.0f, squares = 0.0f, count = 0.0f;
    for (int chunk = 0; chunk < args.n_chunks; chunk++) {
        const float* partial = args.partials + ((static_cast<i64>(batch) * args.n_chunks + chunk) * args.n_groups + group) * 2;
        float own = static_cast<float>(min(args.chunk_len, args.n_positions - chunk * args.chunk_len)) * group_len;
        float distance = partial[0] - mean, total = count + own;
        mean += distance * (own / total);
        squares += partial[1] + distance * distance * (count * (own / total));
        count = total;
    }
    float factor = 1.0f / sqrtf(squares / count + args.eps);
    for (int i = 0; i < group_len; i++) {
        int channel = group * group_len + i;
        float* normal = args.normals + (static_cast<i64>(batch) * args.n_channels + channel) * 2;
        normal[0] = mean;
        normal[1] = factor * args.weight[channel];
    }
}

template <class T, int V> DEVICE void group_norm_apply_items(const GroupNormArgs& args) {
    int n_vecs = args.n_channels / V;
    i64 n_items = args.n_batch * args.n_positions * n_vecs;
    for (i64 item = first_item(); item < n_items; item += item_stride()) {
        i64 row = item / n_vecs;
        int channel = static_cast<int>(item - row * n_vecs) * V;
        const float* normal = args.normals + (row / args.n_positions * args.n_channels + channel) * 2;
        float x[V];
        load<T, V>(x, row_of<T>(args.x, row) + channel);
#pragma unroll
        for (int i = 0; i < V; i++)
            x[i] = activate(args.activation, (x[i] - normal[2 * i]) * normal[2 * i + 1] + args.bias[channel + i]);
        store<T, V>(row_of<T>(args.out, row) + channel, x);
    }
}
template <class T> DEVICE void group_norm_apply(const GroupNormArgs& args) {
    if (args.is_vector) group_norm_apply_items<T, 16 / sizeof(T)>(args);
    else group_norm_apply_items<T, 1>(args);
}

FOR_EACH_TYPE(layer_norm_narrow, LayerNormArgs)
FOR_EACH_TYPE(layer_norm_wide, LayerNormArgs)
FOR_EACH_TYPE(rms_norm_narrow, RmsNormArgs)
FOR_EACH_TYPE(rms_norm_wide, RmsNormArgs)
FOR_EACH_TYPE(match_norm, MatchNormArgs)
FOR_EACH_TYPE(group_norm_statistics, GroupNormArgs)
DEFINE_KERNEL(group_norm_combine_f32, 256, group_norm_combine, GroupNormArgs)
FOR_EACH_TYPE(group_norm_apply, GroupNormArgs)
