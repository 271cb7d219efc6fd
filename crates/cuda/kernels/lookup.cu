// Rotations, tables, rows by number and embeddings of timesteps.
#include "portable.cuh"

struct RopeArgs {
    Rows x;
    Rows out;
    const float* cos;
    const float* sin;
    // Elements between tokens of cos and sin.
    i64 cos_stride;
    i64 sin_stride;
    i64 n_rows;
    i64 n_tokens;
    int n_heads;
    int half;
    // Pairs are channels 2i and 2i + 1; otherwise i and i + half.
    int is_interleaved;
    int is_vector;
};

template <class T> DEVICE void rotate(T p, T q, float cos, float sin, T& p_out, T& q_out) {
    float low = to_f32(p), high = to_f32(q);
    p_out = from_f32<T>(low * cos - high * sin);
    q_out = from_f32<T>(high * cos + low * sin);
}

// V pairs of a head at once.
template <class T, int V> DEVICE void rope_items(const RopeArgs& args) {
    int per_head = args.half / V, per_row = args.n_heads * per_head;
    for (i64 item = first_item(); item < args.n_rows * per_row; item += item_stride()) {
        i64 row = item / per_row;
        int rest = static_cast<int>(item - row * per_row);
        int head = rest / per_head, pair = (rest - head * per_head) * V;
        i64 token = row % args.n_tokens;
        const float* cos = args.cos + token * args.cos_stride + pair;
        const float* sin = args.sin + token * args.sin_stride + pair;
        i64 first = static_cast<i64>(head) * 2 * args.half + (args.is_interleaved ? 2 * pair : pair);
        i64 second = args.is_interleaved ? first + V : first + args.half;
        // Two vectors of V: the halves' own, or one run of V pairs.
        const T* x = row_of<T>(args.x, row);
        Vec<T, V> in[2] = {*reinterpret_cast<const Vec<T, V>*>(x + first), *reinterpret_cast<const Vec<T, V>*>(x + second)};
        Vec<T, V> rotated[2];
#pragma unroll
        for (int i = 0; i < V; i++) {
            if (args.is_interleaved) rotate(in[2 * i / V].at[2 * i % V], in[(2 * i + 1) / V].at[(2 * i + 1) % V], cos[i], sin[i],
                                            rotated[2 * i / V].at[2 * i % V], rotated[(2 * i + 1) / V].at[(2 * i + 1) % V]);
            else rotate(in[0].at[i], in[1].at[i], cos[i], sin[i], rotated[0].at[i], rotated[1].at[i]);
        }
        T* out = row_of<T>(args.out, row);
        *reinterpret_cast<Vec<T, V>*>(out + first) = rotated[0];
        *reinterpret_cast<Vec<T, V>*>(out + second) = rotated[1];
    }
}
template <class T> DEVICE void rope(const RopeArgs& args) {
    if (args.is_vector) rope_items<T, 16 / sizeof(T)>(args);
    else rope_items<T, 1>(args);
}

// Tells the host once that a number is out of range: flag[0] says which op, flag[1] the number.
DEVICE void report(int* flag, int op, int number) {
    if (atomicCAS(flag, 0, op) == 0) flag[1] = number;
}

struct GatherArgs {
    // Where row `r` of batch element `b` starts: start + b * batch_stride + r * row_stride.
    const void* start;
    i64 batch_stride;
    i64 row_stride;
    Rows numbers;
    Rows out;
    int* flag;
    i64 n_out_rows;
    int n_numbers_per_row;
    int n_cols;
    int n_rows;
    // What `report` calls this op.
    int op;
};

// Row `numbers[i]` to row i. A number out of range leaves its row as it is and is reported.
template <class From, class To> DEVICE void gather(const GatherArgs& args) {
    for (i64 item = first_item(); item < args.n_out_rows * args.n_cols; item += item_stride()) {
        i64 i = item / args.n_cols;
        int col = static_cast<int>(item - i * args.n_cols);
        i64 number_row = i / args.n_numbers_per_row;
        int number = row_of<int>(args.numbers, number_row)[i - number_row * args.n_numbers_per_row];
        if (number < 0 || number >= args.n_rows) {
            report(args.flag, args.op, number);
            continue;
        }
        const From* from = static_cast<const From*>(args.start) + i * args.batch_stride + number * args.row_stride;
        row_of<To>(args.out, i)[col] = from_f32<To>(to_f32(from[col]));
    }
}
template <class T> DEVICE void embedding(const GatherArgs& args) { gather<float, T>(args); }
template <class T> DEVICE void gather_rows(const GatherArgs& args) { gather<T, T>(args); }

struct TimestepArgs {
    Rows out;
    const float* timesteps;
    i64 timestep_stride;
    int n_batch;
    int half;
    float log_period;
    float n_steps;
    float scale;
    int cos_first;
};

// Every intermediate result is rounded as torch's float32 rounds it, which matters at angles of a thousand radians.
template <class T> DEVICE void timestep_embedding(const TimestepArgs& args) {
    for (i64 item = first_item(); item < static_cast<i64>(args.n_batch) * args.half; item += item_stride()) {
        int batch = static_cast<int>(item / args.half), i = static_cast<int>(item - static_cast<i64>(batch) * args.half);
        float exponent = args.log_period * i / args.n_steps;
        float frequency = static_cast<float>(exp(static_cast<double>(exponent)));
        float angle = args.scale * (args.timesteps[batch * args.timestep_stride] * frequency);
        // Whole turns are taken off in double; what is left is exact enough in float.
        double half_turns = static_cast<double>(angle) * 0.31830988618379067154;
        float rest = static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns));
        float sin = sinpif(rest), cos = cospif(rest);
        T* out = row_of<T>(args.out, batch);
        out[i] = from_f32<T>(args.cos_first ? cos : sin);
        out[args.half + i] = from_f32<T>(args.cos_first ? sin : cos);
    }
}

FOR_EACH_TYPE(rope, RopeArgs)
FOR_EACH_TYPE(embedding, GatherArgs)
FOR_EACH_TYPE(gather_rows, GatherArgs)
FOR_EACH_TYPE(timestep_embedding, TimestepArgs)
