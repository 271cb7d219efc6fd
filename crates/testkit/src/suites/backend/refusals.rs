//! Operands that no op may take.

use super::operands::*;
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, Epilogue, GateOrder, PatchOrder, Result, RopeStyle,
    TensorError, TimestepSpec, WeightKind,
};

/// Wrong operands are typed errors: shapes, dtypes, aliases, kinds of weights.
///
/// # Panics
/// One of them is accepted, or refused with another error.
pub fn wrong_operands_are_refused(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        let new = |dims: &[usize]| backend.alloc(dims, DType::F32);
        let weights = prepare(
            backend,
            &[
                (WeightKind::Matrix, &[5, 4], &[0.5; 20]),
                (WeightKind::Vector, &[5], &[0.5; 5]),
                (WeightKind::Conv { stride: 1 }, &[5, 4, 3, 3], &[0.5; 180]),
                (WeightKind::Table, &[6, 4], &[0.5; 24]),
            ],
        )?;
        let [matrix, vector, conv, table] = &weights[..] else {
            unreachable!("four specs")
        };
        let plain = Epilogue::default();
        let (x, out) = (new(&[2, 3, 4])?, new(&[2, 3, 5])?);
        backend.fill(&x, 0.5)?;
        backend.fill(&out, 0.5)?;
        let same = ConvSpec {
            stride: 1,
            padding: [1; 4],
            upsample: 1,
        };
        let (image, image_out) = (new(&[1, 3, 3, 4])?, new(&[1, 3, 3, 5])?);
        let half = backend.alloc(&[2, 3, 5], DType::BF16)?;
        let read_only = backend.weight_tensor(vector)?;
        let attention = AttentionSpec {
            n_heads: 2,
            n_kv_heads: 1,
            scale: 1.0,
            is_causal: false,
            bias: None,
        };
        let (q, kv) = (new(&[1, 3, 8])?, new(&[1, 5, 4])?);
        let ids = put_ints(backend, &[2], &[0, 6])?;

        use Refusal::*;
        let refusals: Vec<(&str, Refusal, Result<()>)> = vec![
            (
                "linear, k",
                Shape,
                backend.linear(&new(&[2, 3, 6])?, matrix, &plain, &out),
            ),
            (
                "linear, rows",
                Shape,
                backend.linear(&x, matrix, &plain, &new(&[2, 2, 5])?),
            ),
            (
                "linear, n",
                Shape,
                backend.linear(&x, matrix, &plain, &new(&[2, 3, 6])?),
            ),
            ("linear, kind", Operand, backend.linear(&x, conv, &plain, &out)),
            ("linear, dtype", DTyped, backend.linear(&x, matrix, &plain, &half)),
            (
                "linear, read-only",
                Alias,
                backend.linear(&new(&[4])?, matrix, &plain, &read_only),
            ),
            (
                "linear, gate",
                Shape,
                backend.linear(
                    &x,
                    matrix,
                    &Epilogue {
                        gate: Some(&new(&[3, 5])?),
                        ..plain
                    },
                    &out,
                ),
            ),
            (
                "linear, gate is out",
                Alias,
                backend.linear(
                    &x,
                    matrix,
                    &Epilogue {
                        gate: Some(&out.narrow(0, 0, 1)?.reshape(&[3, 5])?.narrow(0, 0, 1)?),
                        ..plain
                    },
                    &out,
                ),
            ),
            (
                "linear, bias",
                Operand,
                backend.linear(
                    &x,
                    matrix,
                    &Epilogue {
                        bias: Some(matrix),
                        ..plain
                    },
                    &out,
                ),
            ),
            ("linear, residual beside out", Alias, {
                let rows = new(&[2, 4, 5])?;
                let epilogue = Epilogue {
                    residual: Some(&rows.narrow(1, 0, 3)?),
                    ..plain
                };
                backend.linear(&x, matrix, &epilogue, &rows.narrow(1, 1, 3)?)
            }),
            (
                "conv2d, channels",
                Shape,
                backend.conv2d(&new(&[1, 3, 3, 5])?, conv, &same, &plain, &image_out),
            ),
            (
                "conv2d, out",
                Shape,
                backend.conv2d(&image, conv, &same, &plain, &new(&[1, 3, 4, 5])?),
            ),
            (
                "conv2d, stride",
                Operand,
                backend.conv2d(&image, conv, &ConvSpec { stride: 2, ..same }, &plain, &image_out),
            ),
            (
                "conv2d, upsample",
                Shape,
                backend.conv2d(
                    &image,
                    conv,
                    &ConvSpec { upsample: 3, ..same },
                    &plain,
                    &image_out,
                ),
            ),
            (
                "conv2d, too small",
                Shape,
                backend.conv2d(
                    &new(&[1, 2, 2, 4])?,
                    conv,
                    &ConvSpec {
                        padding: [0; 4],
                        ..same
                    },
                    &plain,
                    &image_out,
                ),
            ),
            (
                "conv2d, kind",
                Operand,
                backend.conv2d(&image, vector, &same, &plain, &image_out),
            ),
            (
                "attention, heads",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        n_heads: 3,
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "attention, no heads",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        n_heads: 0,
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "attention, causal",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        is_causal: true,
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "attention, values",
                Shape,
                backend.attention(&q, &kv, &new(&[1, 4, 4])?, &attention, &new(&[1, 3, 8])?),
            ),
            (
                "attention, in place",
                Alias,
                backend.attention(&q, &kv, &kv, &attention, &q),
            ),
            (
                "attention, bias",
                Shape,
                backend.attention(
                    &q,
                    &kv,
                    &kv,
                    &AttentionSpec {
                        bias: Some(&new(&[1, 2, 3, 4])?),
                        ..attention
                    },
                    &new(&[1, 3, 8])?,
                ),
            ),
            (
                "layer_norm, out",
                Shape,
                backend.layer_norm(&x, None, 1e-5, None, &new(&[2, 4, 3])?),
            ),
            (
                "layer_norm, weight",
                Shape,
                backend.layer_norm(&x, Some((vector, None)), 1e-5, None, &new(&[2, 3, 4])?),
            ),
            ("rms_norm, group", Shape, backend.rms_norm(&x, None, 3, 1e-5, &x)),
            (
                "rms_norm, empty group",
                Shape,
                backend.rms_norm(&x, None, 0, 1e-5, &x),
            ),
            ("match_norm, group", Shape, backend.match_norm(&x, &out, 3, &x)),
            (
                "match_norm, other in place",
                Alias,
                backend.match_norm(&out, &x, 1, &x),
            ),
            (
                "group_norm, groups",
                Shape,
                backend.group_norm(&out, (vector, vector), 2, 1e-5, Activation::None, &out),
            ),
            (
                "add, broadcast",
                Shape,
                backend.add(&x, &new(&[2])?, &new(&[2, 3, 4])?),
            ),
            (
                "add, second in place",
                Alias,
                backend.add(&new(&[2, 3, 4])?, &x, &x),
            ),
            (
                "gated, odd",
                Shape,
                backend.gated(
                    &out,
                    Activation::Silu,
                    GateOrder::FirstActivated,
                    &new(&[2, 3, 2])?,
                ),
            ),
            (
                "rope, angles",
                Shape,
                backend.rope(&x, &new(&[3, 3])?, &new(&[3, 3])?, RopeStyle::Halves, &x),
            ),
            (
                "rope, tokens",
                Shape,
                backend.rope(&x, &new(&[2, 2])?, &new(&[2, 2])?, RopeStyle::Halves, &x),
            ),
            (
                "embedding, id",
                Shape,
                backend
                    .embedding(&ids, table, &new(&[2, 4])?)
                    .and_then(|()| backend.synchronize()),
            ),
            (
                "embedding, negative id",
                Shape,
                backend
                    .embedding(&put_ints(backend, &[1], &[-1])?, table, &new(&[1, 4])?)
                    .and_then(|()| backend.synchronize()),
            ),
            (
                "embedding, kind",
                Operand,
                backend.embedding(&ids, matrix, &new(&[2, 4])?),
            ),
            (
                "embedding, ids",
                DTyped,
                backend.embedding(&new(&[2])?, table, &new(&[2, 4])?),
            ),
            (
                "gather_rows, row",
                Shape,
                backend
                    .gather_rows(&x, &put_ints(backend, &[2], &[0, 3])?, &new(&[2, 4])?)
                    .and_then(|()| backend.synchronize()),
            ),
            (
                "patchify, sides",
                Shape,
                backend.patchify(&image, 2, PatchOrder::SpatialFirst, &new(&[1, 1, 16])?),
            ),
            (
                "permute, axes",
                Shape,
                backend.permute(&x, &[0, 1, 1], &new(&[2, 3, 3])?),
            ),
            (
                "permute, out",
                Shape,
                backend.permute(&x, &[0, 2, 1], &new(&[2, 3, 4])?),
            ),
            (
                "upsample_nearest, out",
                Shape,
                backend.upsample_nearest(&image, &new(&[1, 6, 5, 4])?),
            ),
            ("copy, shape", Shape, backend.copy(&x, &new(&[2, 3, 5])?)),
            (
                "copy, to integers",
                DTyped,
                backend.copy(&x, &backend.alloc(&[2, 3, 4], DType::I32)?),
            ),
            ("copy, overlap", Alias, {
                let rows = new(&[4, 5])?;
                backend.copy(&rows.narrow(0, 0, 2)?, &rows.narrow(0, 1, 2)?)
            }),
            ("fill, read-only", Alias, backend.fill(&read_only, 1.0)),
            ("all_finite, dtype", DTyped, backend.all_finite(&ids).map(|_| ())),
            (
                "timestep_embedding, odd",
                Shape,
                backend.timestep_embedding(
                    &new(&[2])?,
                    &TimestepSpec {
                        flip_sin_to_cos: true,
                        downscale_freq_shift: 0.0,
                        scale: 1.0,
                        max_period: 1e4,
                    },
                    &new(&[2, 5])?,
                ),
            ),
            (
                "upload, length",
                Shape,
                backend.upload(&[0; 7], &[2], DType::F32).map(|_| ()),
            ),
            ("download, length", Shape, backend.download(&x, &mut [0; 7])),
            (
                "weight_tensor, kind",
                Operand,
                backend.weight_tensor(matrix).map(|_| ()),
            ),
            (
                "alloc, zero",
                Shape,
                backend.alloc(&[2, 0], DType::F32).map(|_| ()),
            ),
        ];
        for (what, expected, outcome) in refusals {
            let got = match &outcome {
                Err(TensorError::Shape { .. }) => Some(Shape),
                Err(TensorError::DType { .. }) => Some(DTyped),
                Err(TensorError::Alias { .. }) => Some(Alias),
                Err(TensorError::Operand { .. }) => Some(Operand),
                Err(_) | Ok(()) => None,
            };
            assert_eq!(got, Some(expected), "{what}: {outcome:?}");
        }
        Ok(())
    })();
    outcome.expect("sound operands around the wrong ones");
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    Shape,
    DTyped,
    Alias,
    Operand,
}
