//! `conv.cu` and `im2col.cu`.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Activation, Backend, ConvSpec, DType, Epilogue, WeightKind};

in_both_schedules!(
    im2col_formulas_hold,
    conv_formulas_hold,
    conv_edges_hold,
    im2col_edges_hold,
);

fn im2col_formulas_hold() {
    formulas(&[DType::F32], &["conv2d"], 24);
}

fn conv_formulas_hold() {
    formulas(&SHORT, &["conv2d"], 40);
}

#[derive(Clone, Copy, Debug)]
struct Case {
    n_batch: usize,
    height: usize,
    width: usize,
    c_in: usize,
    c_out: usize,
    kernel: [usize; 2],
    spec: ConvSpec,
    offset: usize,
}

const SAME: ConvSpec = ConvSpec {
    stride: 1,
    padding: [1; 4],
    upsample: 1,
};

const CASE: Case = Case {
    n_batch: 2,
    height: 5,
    width: 7,
    c_in: 16,
    c_out: 8,
    kernel: [3, 3],
    spec: SAME,
    offset: 0,
};

fn run(dtype: DType, case: Case) {
    let backend = backend(dtype);
    let Case {
        n_batch,
        height,
        width,
        c_in,
        c_out,
        kernel: [kernel_height, kernel_width],
        spec,
        offset,
    } = case;
    let [top, left, bottom, right] = spec.padding;
    let (full_height, full_width) = (height * spec.upsample, width * spec.upsample);
    let out_height = (full_height + top + bottom - kernel_height) / spec.stride + 1;
    let out_width = (full_width + left + right - kernel_width) / spec.stride + 1;
    let x = values(dtype, 1, n_batch * height * width * c_in);
    let w = values(dtype, 2, c_out * c_in * kernel_height * kernel_width);
    let bias = values(dtype, 3, c_out);
    let gate = values(dtype, 4, n_batch * c_out);
    let n_out = n_batch * out_height * out_width * c_out;
    let residual = values(dtype, 5, n_out);
    let weights = weights(
        &backend,
        &[
            (
                WeightKind::Conv { stride: spec.stride },
                &[c_out, c_in, kernel_height, kernel_width],
                &w,
            ),
            (WeightKind::Vector, &[c_out], &bias),
        ],
    );
    let dims = [n_batch, out_height, out_width, c_out];
    let view = put_apart(
        &backend,
        dtype,
        &[n_batch, height, width, c_in],
        &x,
        offset,
        if offset == 0 { 0 } else { 8 },
    );
    let gate_view = put(&backend, dtype, &[n_batch, c_out], &gate);
    let residual_view = put_apart(&backend, dtype, &dims, &residual, 1, 1);
    // Into columns of a larger tensor: what lies beside them must stay, and each of them must be written.
    let mut pixel = vec![f32::NAN; c_out + 3];
    for beside in [0, c_out + 1, c_out + 2] {
        pixel[beside] = 2.0;
    }
    let whole = put(
        &backend,
        dtype,
        &[n_batch, out_height, out_width, c_out + 3],
        &pixel.repeat(n_out / c_out),
    );
    let out = whole.narrow(3, 1, c_out).expect("inside");
    let epilogue = Epilogue {
        bias: Some(&weights[1]),
        activation: Activation::Silu,
        gate: Some(&gate_view),
        residual: Some(&residual_view),
    };
    backend
        .conv2d(&view, &weights[0], &spec, &epilogue, &out)
        .expect("shapes that fit");
    let mut expected = Vec::with_capacity(n_out);
    for (flat, residual) in residual.iter().enumerate() {
        let (o, col) = (flat % c_out, flat / c_out % out_width);
        let (row, batch) = (
            flat / c_out / out_width % out_height,
            flat / c_out / out_width / out_height,
        );
        let mut sum = f64::from(bias[o]);
        for (i, j) in (0..kernel_height).flat_map(|i| (0..kernel_width).map(move |j| (i, j))) {
            let (y, x_col) = (
                (row * spec.stride + i).checked_sub(top),
                (col * spec.stride + j).checked_sub(left),
            );
            let (Some(y), Some(x_col)) = (y, x_col) else {
                continue;
            };
            if y >= full_height || x_col >= full_width {
                continue;
            }
            let pixel = (batch * height + y / spec.upsample) * width + x_col / spec.upsample;
            for c in 0..c_in {
                let tap = ((o * c_in + c) * kernel_height + i) * kernel_width + j;
                sum += f64::from(x[pixel * c_in + c]) * f64::from(w[tap]);
            }
        }
        let active = sum / (1.0 + (-sum).exp());
        expected.push(active * f64::from(gate[batch * c_out + o]) + f64::from(*residual));
    }
    let what = format!("{dtype} {case:?}");
    assert_close(&what, &get(&backend, &out), &expected, limit(dtype));
    let beside = |start, len| get(&backend, &whole.narrow(3, start, len).expect("inside"));
    assert!(
        beside(0, 1)
            .iter()
            .chain(&beside(c_out + 1, 2))
            .all(|x| *x == 2.0),
        "{what}: written beside the output"
    );
}

fn edges() -> Vec<Case> {
    let padded = |padding| ConvSpec { padding, ..SAME };
    vec![
        Case {
            n_batch: 1,
            height: 1,
            width: 1,
            c_in: 8,
            c_out: 1,
            ..CASE
        },
        CASE,
        // More pixels, and more channels, than a block takes.
        Case {
            n_batch: 1,
            height: 11,
            width: 12,
            c_in: 8,
            c_out: 130,
            ..CASE
        },
        // A reduction that is split: 9 taps of 128 channels are 36 slices.
        Case {
            height: 4,
            width: 4,
            c_in: 128,
            c_out: 16,
            ..CASE
        },
        Case {
            n_batch: 3,
            height: 3,
            width: 3,
            c_in: 232,
            c_out: 12,
            ..CASE
        },
        Case {
            c_in: 24,
            spec: ConvSpec {
                stride: 2,
                padding: [0, 0, 1, 1],
                upsample: 1,
            },
            height: 8,
            width: 6,
            ..CASE
        },
        Case {
            c_in: 8,
            spec: ConvSpec { upsample: 2, ..SAME },
            height: 3,
            width: 4,
            ..CASE
        },
        Case {
            kernel: [1, 3],
            spec: padded([0, 1, 0, 1]),
            c_in: 40,
            ..CASE
        },
        Case {
            kernel: [5, 2],
            spec: padded([2, 1, 2, 0]),
            c_in: 8,
            ..CASE
        },
        Case {
            kernel: [2, 2],
            spec: ConvSpec {
                stride: 2,
                padding: [0; 4],
                upsample: 1,
            },
            height: 6,
            width: 6,
            ..CASE
        },
        Case {
            kernel: [3, 3],
            spec: padded([0, 2, 1, 0]),
            c_in: 8,
            height: 4,
            width: 2,
            ..CASE
        },
    ]
}

fn conv_edges_hold() {
    for dtype in SHORT {
        for case in edges() {
            run(dtype, case);
        }
    }
    // A split reduction with more sums than one round of threads takes (4 multiprocessors, 32 blocks, 256 threads).
    run(
        DType::BF16,
        Case {
            n_batch: 3,
            height: 8,
            width: 16,
            c_in: 128,
            c_out: 128,
            ..CASE
        },
    );
}

/// The same by gathered rows: f32, and 16-bit types whose channels are no whole vectors.
fn im2col_edges_hold() {
    for case in edges() {
        run(DType::F32, case);
        run(DType::F32, Case { offset: 1, ..case });
    }
    for c_in in [3, 4, 20] {
        run(DType::BF16, Case { c_in, ..CASE });
    }
    run(
        DType::F16,
        Case {
            c_in: 8,
            offset: 8,
            spec: ConvSpec { upsample: 2, ..SAME },
            ..CASE
        },
    );
}
