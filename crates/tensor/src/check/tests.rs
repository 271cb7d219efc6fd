//! The contract's rules, op by op. Expected extents are worked out by hand from the formulas of [`crate::Backend`].

use super::*;
use crate::{
    AttentionSpec, Buffer, ConvSpec, DType::*, Epilogue, Modulation, StepArgs, Weight, WeightKind, WeightSet,
};
use std::{any::Any, rc::Rc, sync::Arc};

#[derive(Debug)]
struct Bytes {
    is_writable: bool,
}

impl Buffer for Bytes {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn len_bytes(&self) -> usize {
        1 << 16
    }
    fn is_writable(&self) -> bool {
        self.is_writable
    }
}

#[derive(Debug)]
struct NoWeights;

impl WeightSet for NoWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn new(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::from_buffer(Rc::new(Bytes { is_writable: true }), dims, dtype).expect("fits")
}

fn weight(kind: WeightKind, shape: &[usize]) -> Weight {
    Weight {
        set: Arc::new(NoWeights),
        spec_idx: 0,
        kind,
        shape: shape.into(),
    }
}

fn is_dtype<T: std::fmt::Debug>(outcome: Result<T>) {
    assert!(matches!(outcome, Err(TensorError::DType { .. })), "{outcome:?}");
}

fn is_alias<T: std::fmt::Debug>(outcome: Result<T>) {
    assert!(matches!(outcome, Err(TensorError::Alias { .. })), "{outcome:?}");
}

fn is_shape<T: std::fmt::Debug>(outcome: Result<T>) {
    assert!(matches!(outcome, Err(TensorError::Shape { .. })), "{outcome:?}");
}

fn is_operand<T: std::fmt::Debug>(outcome: Result<T>) {
    assert!(matches!(outcome, Err(TensorError::Operand { .. })), "{outcome:?}");
}

#[test]
fn float_operands_have_the_dtype_of_the_output() -> Result<()> {
    let dims = [2, 3, 4];
    for dtype in [F32, BF16, F16] {
        let other = if dtype == F32 { BF16 } else { F32 };
        let (x, y, out, odd) = (
            new(&dims, dtype),
            new(&dims, dtype),
            new(&dims, dtype),
            new(&dims, other),
        );
        binary("add", &x, &y, &out)?;
        is_dtype(binary("add", &odd, &y, &out));
        is_dtype(binary("add", &x, &odd, &out));
        unary("affine", &x, &out)?;
        is_dtype(unary("affine", &odd, &out));
        gated_add(&x, &y, &y, &out)?;
        is_dtype(gated_add(&odd, &y, &y, &out));
        is_dtype(gated_add(&x, &odd, &y, &out));
        is_dtype(gated_add(&x, &y, &odd, &out));
        is_dtype(gated(&odd, &new(&[2, 3, 2], dtype)));
        is_dtype(permute(&odd, &[0, 1, 2], &out));
        is_dtype(rms_norm(&odd, None, 4, &out));
        is_dtype(match_norm(&odd, &y, 4, &out));
        is_dtype(match_norm(&x, &odd, 4, &out));
        let vector = weight(WeightKind::Vector, &[4]);
        is_dtype(group_norm(&odd, (&vector, &vector), 2, &out));
        let (image, odd_image) = (new(&[1, 2, 2, 4], dtype), new(&[1, 2, 2, 4], other));
        is_dtype(upsample_nearest(&odd_image, &new(&[1, 4, 4, 4], dtype)));
        is_dtype(patchify(&odd_image, 2, &new(&[1, 1, 16], dtype)));
        is_dtype(unpatchify(&new(&[1, 1, 16], other), 2, &image));
        is_dtype(gather_rows(&odd, &new(&[2], I32), &new(&[2, 4], dtype)));

        let (row, odd_row) = (new(&[2, 4], dtype), new(&[2, 4], other));
        for (scale, shift, fits) in [
            (&row, &row, true),
            (&odd_row, &row, false),
            (&row, &odd_row, false),
        ] {
            let outcome = layer_norm(&x, None, Some(&Modulation { scale, shift }), &out);
            assert!(!fits || outcome.is_ok(), "{outcome:?}");
            if !fits {
                is_dtype(outcome)
            }
        }
        let matrix = weight(WeightKind::Matrix, &[4, 4]);
        for (gate, residual, fits) in [(&row, &y, true), (&odd_row, &y, false), (&row, &odd, false)] {
            let epilogue = Epilogue {
                gate: Some(gate),
                residual: Some(residual),
                ..Epilogue::default()
            };
            let outcome = linear(&x, &matrix, &epilogue, &out);
            assert!(!fits || outcome.is_ok(), "{outcome:?}");
            if !fits {
                is_dtype(outcome)
            }
        }
        is_dtype(linear(&odd, &matrix, &Epilogue::default(), &out));
    }
    for dtype in [I32, U8] {
        is_dtype(unary("affine", &new(&dims, dtype), &new(&dims, dtype)));
        is_dtype(fill(&new(&dims, dtype)));
    }
    Ok(())
}

#[test]
fn tables_and_scalars_are_f32_whatever_the_output_is() -> Result<()> {
    for dtype in [F32, BF16, F16] {
        let x = new(&[2, 3, 8], dtype);
        let (angles, odd_angles) = (new(&[3, 2], F32), new(&[3, 2], BF16));
        let rotated = rope(&x, &angles, &angles, &x)?;
        let expected = Rotated {
            n_tokens: 3,
            n_heads: 2,
            half: 2,
        };
        assert_eq!(rotated, expected);
        is_dtype(rope(&x, &odd_angles, &angles, &x));
        is_dtype(rope(&x, &angles, &odd_angles, &x));

        let embedded = new(&[2, 8], dtype);
        timestep_embedding(&new(&[2], F32), &embedded)?;
        is_dtype(timestep_embedding(&new(&[2], BF16), &embedded));

        let table = weight(WeightKind::Table, &[6, 8]);
        assert_eq!(embedding(&new(&[2], I32), &table, &embedded)?, [6, 8]);
        is_dtype(embedding(&new(&[2], F32), &table, &embedded));
        is_dtype(gather_rows(&x, &new(&[2], F32), &embedded));
        is_operand(embedding(
            &new(&[2], I32),
            &weight(WeightKind::Matrix, &[6, 8]),
            &embedded,
        ));
    }
    is_dtype(embedding(
        &new(&[2], I32),
        &weight(WeightKind::Table, &[6, 8]),
        &new(&[2, 8], I32),
    ));
    Ok(())
}

#[test]
fn the_sampler_keeps_its_state_in_f32() -> Result<()> {
    let state = || new(&[2, 3, 4], F32);
    let (latents, noise, guided_out, out) = (state(), state(), state(), state());
    let (guidance, coefficients) = (new(&[2], F32), new(&[2, 3], F32));
    let odd = new(&[2, 3, 4], F16);
    for dtype in [F32, BF16, F16] {
        let (conditional, unconditional) = (new(&[2, 3, 4], dtype), new(&[2, 3, 4], dtype));
        let args = StepArgs {
            latents: &latents,
            conditional: &conditional,
            unconditional: Some((&unconditional, &guidance)),
            coefficients: &coefficients,
            noise: Some(&noise),
            guided_out: Some(&guided_out),
        };
        let expected = StepExtents {
            n_batch: 2,
            n_elements: 12,
            prediction: dtype,
        };
        assert_eq!(step(&args, &out)?, expected);
        assert_eq!(step(&args, &latents)?, expected, "in place");
        is_dtype(step(&args, &odd));
        is_dtype(step(
            &StepArgs {
                latents: &odd,
                ..args
            },
            &out,
        ));
        is_dtype(step(
            &StepArgs {
                noise: Some(&odd),
                ..args
            },
            &out,
        ));
        is_dtype(step(
            &StepArgs {
                guided_out: Some(&odd),
                ..args
            },
            &out,
        ));
        let half_guidance = new(&[2], F16);
        is_dtype(step(
            &StepArgs {
                unconditional: Some((&unconditional, &half_guidance)),
                ..args
            },
            &out,
        ));
        let half_coefficients = new(&[2, 3], F16);
        is_dtype(step(
            &StepArgs {
                coefficients: &half_coefficients,
                ..args
            },
            &out,
        ));
        let other = new(&[2, 3, 4], if dtype == F32 { BF16 } else { F32 });
        is_dtype(step(
            &StepArgs {
                unconditional: Some((&other, &guidance)),
                ..args
            },
            &out,
        ));
        // Both outputs are written while everything else is read; only `out` may be the latents.
        is_alias(step(&args, &noise));
        is_alias(step(&args, &guided_out));
        for read in [&latents, &noise, &out] {
            is_alias(step(
                &StepArgs {
                    guided_out: Some(read),
                    ..args
                },
                &out,
            ));
        }
    }
    let ids = new(&[2, 3, 4], I32);
    let args = StepArgs {
        latents: &latents,
        conditional: &ids,
        unconditional: None,
        coefficients: &coefficients,
        noise: None,
        guided_out: None,
    };
    is_dtype(step(&args, &out));
    Ok(())
}

#[test]
fn copies_convert_to_floats_and_pixels_are_f32_or_bytes() -> Result<()> {
    let dims = [2, 3];
    for from in [F32, BF16, F16, I32, U8] {
        for to in [F32, BF16, F16, I32, U8] {
            let outcome = copy(&new(&dims, from), &new(&dims, to));
            if to.is_float() || to == from {
                outcome?;
            } else {
                is_dtype(outcome);
            }
            let outcome = to_pixels(&new(&dims, from), &new(&dims, to));
            if from.is_float() && matches!(to, F32 | U8) {
                outcome?;
            } else {
                is_dtype(outcome);
            }
        }
    }
    copy(&new(&[3], F32), &new(&[2, 3], F32))?;
    copy(&new(&[2, 1], F32), &new(&[2, 3], F32))?;
    is_shape(copy(&new(&[2], F32), &new(&[2, 3], F32)));
    is_shape(copy(&new(&[1, 2, 3], F32), &new(&[2, 3], F32)));
    Ok(())
}

#[test]
fn only_the_named_operand_may_be_the_output() -> Result<()> {
    let (x, y) = (new(&[2, 3, 4], F32), new(&[2, 3, 4], F32));
    binary("add", &x, &y, &x)?;
    is_alias(binary("add", &y, &x, &x));
    gated_add(&x, &y, &y, &x)?;
    is_alias(gated_add(&y, &x, &y, &x));
    is_alias(gated_add(&y, &y, &x, &x));
    unary("affine", &x, &x)?;
    layer_norm(&x, None, None, &x)?;
    rms_norm(&x, None, 2, &x)?;
    match_norm(&x, &y, 2, &x)?;
    is_alias(match_norm(&y, &x, 2, &x));
    is_alias(copy(&x, &x));
    is_alias(permute(&x, &[0, 1, 2], &x));
    let matrix = weight(WeightKind::Matrix, &[4, 4]);
    is_alias(linear(&x, &matrix, &Epilogue::default(), &x));
    let epilogue = Epilogue {
        residual: Some(&x),
        ..Epilogue::default()
    };
    linear(&y, &matrix, &epilogue, &x)?;
    let row = x.narrow(1, 0, 1)?.reshape(&[2, 4])?;
    let modulation = Modulation {
        scale: &y.narrow(1, 0, 1)?.reshape(&[2, 4])?,
        shift: &row,
    };
    is_alias(layer_norm(&y, None, Some(&modulation), &x));
    // The same memory under another dtype is not the same view.
    let bytes: Rc<dyn Buffer> = Rc::new(Bytes { is_writable: true });
    let floats = Tensor::from_buffer(bytes.clone(), &[2, 3], F32)?;
    to_pixels(&floats, &floats)?;
    is_alias(to_pixels(&floats, &Tensor::from_buffer(bytes, &[2, 3], U8)?));
    let frozen = Tensor::from_buffer(Rc::new(Bytes { is_writable: false }), &[2], F32)?;
    is_alias(fill(&frozen));
    is_alias(unary("affine", &frozen, &frozen));
    Ok(())
}

#[test]
fn rows_of_products_and_norms_are_counted_per_batch_element() -> Result<()> {
    let matrix = weight(WeightKind::Matrix, &[5, 4]);
    let extents = linear(
        &new(&[2, 3, 7, 4], BF16),
        &matrix,
        &Epilogue::default(),
        &new(&[2, 3, 7, 5], BF16),
    )?;
    let expected = ProductExtents {
        n_rows: 42,
        k: 4,
        n: 5,
        rows_per_batch: 21,
    };
    assert_eq!(extents, expected);
    // Without a batch dimension there is one row, so the gate has one too.
    let (x, out) = (new(&[4], F32), new(&[5], F32));
    let gate = new(&[1, 5], F32);
    let epilogue = Epilogue {
        gate: Some(&gate),
        ..Epilogue::default()
    };
    assert_eq!(linear(&x, &matrix, &epilogue, &out)?.rows_per_batch, 1);

    let x = new(&[2, 3, 7, 4], F32);
    let (scale, shift) = (new(&[2, 4], F32), new(&[1, 4], F32));
    let modulation = Modulation {
        scale: &scale,
        shift: &shift,
    };
    let vector = weight(WeightKind::Vector, &[4]);
    let extents = layer_norm(&x, Some((&vector, Some(&vector))), Some(&modulation), &x)?;
    let expected = RowExtents {
        n_rows: 42,
        n_cols: 4,
        rows_per_batch: 21,
    };
    assert_eq!(extents, expected);
    let extents = group_norm(&x, (&vector, &vector), 2, &x)?;
    let expected = GroupExtents {
        n_batch: 2,
        n_positions: 21,
        n_channels: 4,
    };
    assert_eq!(extents, expected);
    is_shape(group_norm(&x, (&vector, &vector), 0, &x));
    is_shape(rms_norm(&x, None, 0, &x));
    is_shape(match_norm(&x, &x.narrow(1, 0, 1)?, 2, &new(x.dims(), F32)));
    is_shape(match_norm(&x, &new(x.dims(), F32), 3, &x));
    is_operand(layer_norm(&x, Some((&matrix, None)), None, &x));
    Ok(())
}

#[test]
fn a_convolution_walks_padded_and_enlarged_inputs() -> Result<()> {
    let conv = |stride| weight(WeightKind::Conv { stride }, &[5, 4, 3, 2]);
    let check = |stride, padding, upsample, out: [usize; 2]| {
        let spec = ConvSpec {
            stride,
            padding,
            upsample,
        };
        let (x, out) = (new(&[2, 6, 7, 4], F16), new(&[2, out[0], out[1], 5], F16));
        conv2d(&x, &conv(stride), &spec, &Epilogue::default(), &out)
    };
    // (6 + 1 + 1 - 3) / 1 + 1 rows, (7 + 0 + 1 - 2) / 1 + 1 columns.
    let extents = check(1, [1, 0, 1, 1], 1, [6, 7])?;
    let expected = ConvExtents {
        n_batch: 2,
        height: 6,
        width: 7,
        c_in: 4,
        c_out: 5,
        kernel_height: 3,
        kernel_width: 2,
        out_height: 6,
        out_width: 7,
    };
    assert_eq!(extents, expected);
    // (6 + 0 + 1 - 3) / 2 + 1 rows, (7 + 0 + 1 - 2) / 2 + 1 columns.
    check(2, [0, 0, 1, 1], 1, [3, 4])?;
    // (12 - 3) / 1 + 1 rows, (14 - 2) / 1 + 1 columns.
    check(1, [0; 4], 2, [10, 13])?;
    is_shape(check(1, [0; 4], 1, [4, 7]));
    is_shape(check(1, [usize::MAX; 4], 1, [4, 6]));
    is_shape(check(1, [0; 4], 0, [4, 6]));
    is_shape(check(0, [0; 4], 1, [4, 6]));
    // A kernel without taps.
    let (none, x) = (
        weight(WeightKind::Conv { stride: 1 }, &[5, 4, 0, 3]),
        new(&[2, 6, 7, 4], F16),
    );
    let spec = ConvSpec {
        stride: 1,
        padding: [0; 4],
        upsample: 1,
    };
    is_shape(conv2d(
        &x,
        &none,
        &spec,
        &Epilogue::default(),
        &new(&[2, 7, 5, 5], F16),
    ));
    Ok(())
}

#[test]
fn the_bias_of_attention_is_f32_and_broadcasts_by_strides_of_zero() -> Result<()> {
    let (q, kv, out) = (
        new(&[2, 3, 8], BF16),
        new(&[2, 5, 4], BF16),
        new(&[2, 3, 8], BF16),
    );
    let attend = |bias: Option<&Tensor>| {
        let spec = AttentionSpec {
            n_heads: 2,
            n_kv_heads: 1,
            scale: 0.5,
            is_causal: false,
            bias,
        };
        attention(&q, &kv, &kv, &spec, &out)
    };
    let plain = AttentionExtents {
        n_batch: 2,
        n_queries: 3,
        n_keys: 5,
        head_dim: 4,
        bias_strides: [0; 4],
    };
    assert_eq!(attend(None)?, plain);
    assert_eq!(
        attend(Some(&new(&[2, 2, 3, 5], F32)))?.bias_strides,
        [30, 15, 5, 1]
    );
    assert_eq!(attend(Some(&new(&[2, 1, 1, 5], F32)))?.bias_strides, [5, 0, 0, 1]);
    assert_eq!(attend(Some(&new(&[1, 1, 3, 1], F32)))?.bias_strides, [0, 0, 1, 0]);
    is_dtype(attend(Some(&new(&[2, 1, 1, 5], BF16))));
    is_shape(attend(Some(&new(&[1, 5], F32))));
    is_shape(attend(Some(&new(&[3, 1, 1, 5], F32))));
    Ok(())
}

#[test]
fn patches_halves_and_permutations_fit() -> Result<()> {
    let (image, tokens) = (new(&[2, 4, 6, 3], F32), new(&[2, 6, 12], F32));
    let expected = Pixels {
        n_batch: 2,
        height: 4,
        width: 6,
        n_channels: 3,
    };
    assert_eq!(patchify(&image, 2, &tokens)?, expected);
    assert_eq!(unpatchify(&tokens, 2, &image)?, expected);
    is_shape(patchify(&image, 0, &tokens));
    is_shape(patchify(&image, 4, &tokens));
    let [first, second] = gated(&new(&[2, 3, 8], F32), &new(&[2, 3, 4], F32))?;
    assert_eq!((first.offset(), first.dims()), (0, &[2, 3, 4][..]));
    assert_eq!((second.offset(), second.strides()), (4, &[24, 8, 1][..]));
    is_shape(gated(&new(&[2, 3, 8], F32), &new(&[2, 3, 8], F32)));
    permute(&image, &[0, 3, 1, 2], &new(&[2, 3, 4, 6], F32))?;
    is_shape(permute(&image, &[0, 1, 1, 2], &new(&[2, 4, 4, 6], F32)));
    is_shape(permute(&image, &[0, 1, 2, 4], &new(&[2, 4, 6, 3], F32)));
    is_shape(permute(&image, &[0, 1, 2], &new(&[2, 4, 6], F32)));
    Ok(())
}
