// Element-wise ops on views of any strides, broadcast by strides of zero.
//
// The host merges dimensions where all operands allow it, so dense operands are walked in one dimension without a division. Where
// columns lie side by side and start on a boundary, items are vectors of 16 bytes (of the widest operand).
#include "portable.cuh"

// How N operands, the output first, are walked; innermost dimension first. Mirrors `walk::Walk`.
template <int N> struct Walk {
    void* starts[N];
    i64 n_items;
    i64 strides[N][6];
    int extents[6];
    int n_dims;
    int is_vector;
};

template <int N> DEVICE void locate(const Walk<N>& walk, i64 item, i64 (&offsets)[N]) {
    for (int n = 0; n < N; n++) offsets[n] = 0;
    for (int dim = 0; dim < walk.n_dims; dim++) {
        i64 idx = item;
        // The outermost dimension takes what is left.
        if (dim + 1 < walk.n_dims) {
            i64 rest = item / walk.extents[dim];
            idx = item - rest * walk.extents[dim];
            item = rest;
        }
        for (int n = 0; n < N; n++) offsets[n] += idx * walk.strides[n][dim];
    }
}

// V values of an operand: side by side, or one for all.
template <class T, int V> DEVICE void load_any(float (&x)[V], const void* start, i64 offset, bool is_one) {
    const T* from = static_cast<const T*>(start) + offset;
    if (is_one) {
        float value = to_f32(*from);
        for (int i = 0; i < V; i++) x[i] = value;
    } else {
        load<T, V>(x, from);
    }
}

// out = op(inputs), all of one element type.
template <class T, int V, int N, class Op> DEVICE void walk_items(const Walk<N>& walk, Op op) {
    for (i64 item = first_item(); item < walk.n_items; item += item_stride()) {
        i64 offsets[N];
        locate(walk, item, offsets);
        float in[N - 1][V], out[V];
#pragma unroll
        for (int n = 1; n < N; n++) load_any<T, V>(in[n - 1], walk.starts[n], offsets[n], V > 1 && walk.strides[n][0] == 0);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float x[N - 1];
#pragma unroll
            for (int n = 0; n < N - 1; n++) x[n] = in[n][i];
            out[i] = op(x);
        }
        store<T, V>(static_cast<T*>(walk.starts[0]) + offsets[0], out);
    }
}

template <class T, int N, class Op> DEVICE void walk_all(const Walk<N>& walk, Op op) {
    constexpr int V = 16 / sizeof(T);
    if (walk.is_vector) walk_items<T, V>(walk, op);
    else walk_items<T, 1>(walk, op);
}

typedef Walk<1> Walk1;
typedef Walk<2> Walk2;
typedef Walk<3> Walk3;
typedef Walk<4> Walk4;

struct AddOp { DEVICE float operator()(const float* x) const { return x[0] + x[1]; } };
struct MulOp { DEVICE float operator()(const float* x) const { return x[0] * x[1]; } };
struct GatedAddOp { DEVICE float operator()(const float* x) const { return x[0] + x[1] * x[2]; } };

template <class T> DEVICE void add(const Walk3& walk) { walk_all<T>(walk, AddOp()); }
template <class T> DEVICE void mul(const Walk3& walk) { walk_all<T>(walk, MulOp()); }
template <class T> DEVICE void gated_add(const Walk4& walk) { walk_all<T>(walk, GatedAddOp()); }

struct AffineArgs {
    Walk2 walk;
    float scale;
    float shift;
};
struct AffineOp {
    float scale, shift;
    DEVICE float operator()(const float* x) const { return x[0] * scale + shift; }
};
template <class T> DEVICE void affine(const AffineArgs& args) { walk_all<T>(args.walk, AffineOp{args.scale, args.shift}); }

struct ActivationArgs {
    Walk2 walk;
    int code;
};
struct ActivationOp {
    int code;
    DEVICE float operator()(const float* x) const { return activate(code, x[0]); }
};
template <class T> DEVICE void activation(const ActivationArgs& args) { walk_all<T>(args.walk, ActivationOp{args.code}); }

struct GatedArgs {
    Walk3 walk;
    int code;
    int first_is_activated;
};
struct GatedOp {
    int code, first_is_activated;
    DEVICE float operator()(const float* x) const {
        return first_is_activated ? activate(code, x[0]) * x[1] : x[0] * activate(code, x[1]);
    }
};
template <class T> DEVICE void gated(const GatedArgs& args) {
    walk_all<T>(args.walk, GatedOp{args.code, args.first_is_activated});
}

// What follows a product with its bias: out = residual + gate * activation(x). What is not there counts for nothing.
struct FinishArgs {
    // Output, product, gate, residual; the gate is broadcast over the rows of a batch element.
    Walk<4> walk;
    int code;
    int has_gate;
    int has_residual;
};
struct FinishOp {
    int code, has_gate, has_residual;
    DEVICE float operator()(const float* x) const {
        float y = activate(code, x[0]);
        if (has_gate) y *= x[1];
        return has_residual ? x[2] + y : y;
    }
};
template <class T> DEVICE void finish(const FinishArgs& args) {
    walk_all<T>(args.walk, FinishOp{args.code, args.has_gate, args.has_residual});
}

struct FillArgs {
    Walk1 walk;
    float value;
};
template <class T, int V> DEVICE void fill_items(const FillArgs& args) {
    float out[V];
    for (int i = 0; i < V; i++) out[i] = args.value;
    for (i64 item = first_item(); item < args.walk.n_items; item += item_stride()) {
        i64 offsets[1];
        locate(args.walk, item, offsets);
        store<T, V>(static_cast<T*>(args.walk.starts[0]) + offsets[0], out);
    }
}
template <class T> DEVICE void fill(const FillArgs& args) {
    if (args.walk.is_vector) fill_items<T, 16 / sizeof(T)>(args);
    else fill_items<T, 1>(args);
}

// Integers become floats.
DEVICE float to_f32(int x) { return static_cast<float>(x); }
DEVICE float to_f32(unsigned char x) { return static_cast<float>(x); }

// Copies with conversion; a copy of one type moves bits.
template <class From, class To> struct Convert {
    static DEVICE To run(From x) { return from_f32<To>(to_f32(x)); }
};
template <class T> struct Convert<T, T> {
    static DEVICE T run(T x) { return x; }
};

template <class From, class To, int V> DEVICE void copy_items(const Walk2& walk) {
    for (i64 item = first_item(); item < walk.n_items; item += item_stride()) {
        i64 offsets[2];
        locate(walk, item, offsets);
        const From* from = static_cast<const From*>(walk.starts[1]) + offsets[1];
        Vec<To, V> out;
        if (V > 1 && walk.strides[1][0] == 0) {
            To value = Convert<From, To>::run(*from);
            for (int i = 0; i < V; i++) out.at[i] = value;
        } else {
            Vec<From, V> in = *reinterpret_cast<const Vec<From, V>*>(from);
            for (int i = 0; i < V; i++) out.at[i] = Convert<From, To>::run(in.at[i]);
        }
        *reinterpret_cast<Vec<To, V>*>(static_cast<To*>(walk.starts[0]) + offsets[0]) = out;
    }
}
template <class From, class To> DEVICE void copy(const Walk2& walk) {
    constexpr int WIDEST = sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To);
    if (walk.is_vector) copy_items<From, To, 16 / WIDEST>(walk);
    else copy_items<From, To, 1>(walk);
}

FOR_EACH_TYPE(add, Walk3)
FOR_EACH_TYPE(mul, Walk3)
FOR_EACH_TYPE(gated_add, Walk4)
FOR_EACH_TYPE(affine, AffineArgs)
FOR_EACH_TYPE(activation, ActivationArgs)
FOR_EACH_TYPE(gated, GatedArgs)
FOR_EACH_TYPE(finish, FinishArgs)
FOR_EACH_TYPE(fill, FillArgs)

template <class To> DEVICE void copy_from_f32(const Walk2& walk) { copy<float, To>(walk); }
template <class To> DEVICE void copy_from_bf16(const Walk2& walk) { copy<bf16, To>(walk); }
template <class To> DEVICE void copy_from_f16(const Walk2& walk) { copy<f16, To>(walk); }
FOR_EACH_TYPE(copy_from_f32, Walk2)
FOR_EACH_TYPE(copy_from_bf16, Walk2)
FOR_EACH_TYPE(copy_from_f16, Walk2)
template <class To> DEVICE void copy_from_i32(const Walk2& walk) { copy<int, To>(walk); }
template <class To> DEVICE void copy_from_u8(const Walk2& walk) { copy<unsigned char, To>(walk); }
FOR_EACH_TYPE(copy_from_i32, Walk2)
FOR_EACH_TYPE(copy_from_u8, Walk2)
DEFINE_KERNEL(copy_from_i32_i32, 256, copy_from_i32<int>, Walk2)
DEFINE_KERNEL(copy_from_u8_u8, 256, copy_from_u8<unsigned char>, Walk2)
