// The input of a convolution as rows that a matrix product takes: for each output pixel the channels of all its taps, side by side.
#include "portable.cuh"

struct ColumnArgs {
    // [batch, height, width, c_in], strides in elements.
    const void* x;
    void* columns;
    i64 strides[3];
    // Output pixels before the first of this launch, and how many there are in it.
    i64 first;
    i64 n_pixels;
    int height;
    int width;
    int c_in;
    int kernel_height;
    int kernel_width;
    int out_height;
    int out_width;
    int stride;
    int top;
    int left;
    int upsample;
    int is_vector;
};

template <class T, int V> DEVICE void column_items(const ColumnArgs& args) {
    int n_vecs = args.c_in / V;
    int per_row = args.kernel_width * n_vecs, per_pixel = args.kernel_height * per_row;
    i64 n_items = args.n_pixels * per_pixel;
    for (i64 item = first_item(); item < n_items; item += item_stride()) {
        i64 own = item / per_pixel;
        int rest = static_cast<int>(item - own * per_pixel);
        int tap_y = rest / per_row;
        rest -= tap_y * per_row;
        int tap_x = rest / n_vecs, channel = (rest - tap_x * n_vecs) * V;
        i64 pixel = args.first + own;
        i64 image_row = pixel / args.out_width;
        int out_x = static_cast<int>(pixel - image_row * args.out_width);
        i64 batch = image_row / args.out_height;
        int out_y = static_cast<int>(image_row - batch * args.out_height);
        int y = out_y * args.stride + tap_y - args.top, x = out_x * args.stride + tap_x - args.left;
        Vec<T, V> vec;
        if (y < 0 || x < 0 || y >= args.height * args.upsample || x >= args.width * args.upsample) {
#pragma unroll
            for (int i = 0; i < V; i++) vec.at[i] = from_f32<T>(0.0f);
        } else {
            i64 offset = batch * args.strides[0] + y / args.upsample * args.strides[1] + x / args.upsample * args.strides[2] + channel;
            vec = *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(args.x) + offset);
        }
        // Items lie in the columns in their own order.
        reinterpret_cast<Vec<T, V>*>(args.columns)[item] = vec;
    }
}
template <class T> DEVICE void im2col(const ColumnArgs& args) {
    if (args.is_vector) column_items<T, 16 / sizeof(T)>(args);
    else column_items<T, 1>(args);
}

FOR_EACH_TYPE(im2col, ColumnArgs)
