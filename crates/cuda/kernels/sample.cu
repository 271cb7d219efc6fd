// The sampler's update, pixels, and the search for what is not finite.
#include "portable.cuh"

struct StepArgs {
    Rows out;
    Rows latents;
    Rows conditional;
    // These have a null start where there is none.
    Rows unconditional;
    Rows noise;
    Rows guided_out;
    const float* coefficients;
    const float* guidance;
    i64 coefficient_stride;
    i64 guidance_stride;
    i64 n_rows;
    i64 rows_per_batch;
    int n_cols;
};

// Guidance and update in one pass; the state is float, predictions are T.
template <class T> DEVICE void step(const StepArgs& args) {
    for (i64 item = first_item(); item < args.n_rows * args.n_cols; item += item_stride()) {
        i64 row = item / args.n_cols;
        int col = static_cast<int>(item - row * args.n_cols);
        i64 batch = row / args.rows_per_batch;
        const float* c = args.coefficients + batch * args.coefficient_stride;
        float guided = to_f32(row_of<T>(args.conditional, row)[col]);
        if (args.unconditional.start) {
            float unconditional = to_f32(row_of<T>(args.unconditional, row)[col]);
            guided = unconditional + args.guidance[batch * args.guidance_stride] * (guided - unconditional);
        }
        if (args.guided_out.start) row_of<float>(args.guided_out, row)[col] = guided;
        float next = c[0] * row_of<float>(args.latents, row)[col] + c[1] * guided;
        if (args.noise.start) next += c[2] * row_of<float>(args.noise, row)[col];
        row_of<float>(args.out, row)[col] = next;
    }
}

struct PixelArgs {
    Rows x;
    Rows out;
    i64 n_rows;
    int n_cols;
    int is_bytes;
};
template <class T> DEVICE void to_pixels(const PixelArgs& args) {
    for (i64 item = first_item(); item < args.n_rows * args.n_cols; item += item_stride()) {
        i64 row = item / args.n_cols;
        int col = static_cast<int>(item - row * args.n_cols);
        float unit = to_f32(row_of<T>(args.x, row)[col]) * 0.5f + 0.5f;
        // NaN stays NaN.
        unit = unit < 0.0f ? 0.0f : unit > 1.0f ? 1.0f : unit;
        if (args.is_bytes) row_of<unsigned char>(args.out, row)[col] = static_cast<unsigned char>(rintf(255.0f * unit));
        else row_of<float>(args.out, row)[col] = unit;
    }
}

struct FiniteArgs {
    Rows x;
    int* is_bad;
    i64 n_rows;
    int n_cols;
    int is_vector;
};
DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
template <class T, int V> DEVICE void find_bad(const FiniteArgs& args) {
    int n_vecs = args.n_cols / V;
    bool is_bad = false;
    for (i64 item = first_item(); item < args.n_rows * n_vecs; item += item_stride()) {
        i64 row = item / n_vecs;
        int col = static_cast<int>(item - row * n_vecs) * V;
        Vec<T, V> vec = *reinterpret_cast<const Vec<T, V>*>(row_of<T>(args.x, row) + col);
#pragma unroll
        for (int i = 0; i < V; i++) is_bad |= !is_finite(to_f32(vec.at[i]));
    }
    if (is_bad) atomicOr(args.is_bad, 1);
}
template <class T> DEVICE void all_finite(const FiniteArgs& args) {
    if (args.is_vector) find_bad<T, 16 / sizeof(T)>(args);
    else find_bad<T, 1>(args);
}

FOR_EACH_TYPE(step, StepArgs)
FOR_EACH_TYPE(to_pixels, PixelArgs)
FOR_EACH_TYPE(all_finite, FiniteArgs)
