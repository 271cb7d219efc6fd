//! Fragments as the PTX ISA lays them out (tables of `mma.m16n8k16` with 16-bit elements and of `ldmatrix`), and conversions.

use standin_check::*;

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Fragments {
    a: [u32; 4],
    b: [u32; 2],
    d: [f32; 4],
}

/// Bits of an integer of few bits: both formats hold it exactly.
fn bits(value: f32, is_bf16: bool) -> u32 {
    if is_bf16 {
        return value.to_bits() >> 16;
    }
    if value == 0.0 {
        return 0;
    }
    let wide = value.to_bits();
    (wide >> 16 & 0x8000) | ((wide >> 23 & 0xff) - 127 + 15) << 10 | (wide >> 13 & 0x3ff)
}

/// Some integer from -8 to 8, different for different places.
fn integer(row: usize, col: usize, seed: usize) -> f32 {
    ((row * 31 + col * 17 + seed * 7 + row * col) % 17) as f32 - 8.0
}

/// The product that the PTX ISA defines, by its index arithmetic.
fn mma(name: &str, is_bf16: bool, n_times: i32) {
    use_device();
    let (a, b, c) = (
        |r, c| integer(r, c, 1),
        |r, c| integer(r, c, 2),
        |r, c| integer(r, c, 3),
    );
    let pair = |low, high| bits(low, is_bf16) | bits(high, is_bf16) << 16;
    let mut fragments = vec![Fragments::default(); 64];
    for (thread, own) in fragments.iter_mut().enumerate() {
        let (group, in_group) = (thread % 32 >> 2, thread % 4);
        for i in 0..8 {
            // "row = groupID for ai where 0 <= i < 2 || 4 <= i < 6, groupID + 8 otherwise; col = threadID_in_group * 2 + (i & 1), and
            // + 8 for i >= 4".
            let row = |i: usize| {
                if i < 2 || (4..6).contains(&i) {
                    group
                } else {
                    group + 8
                }
            };
            let col = |i: usize| in_group * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
            if i % 2 == 0 {
                own.a[i / 2] = pair(a(row(i), col(i)), a(row(i + 1), col(i + 1)));
            }
        }
        for i in [0, 2] {
            let row = |i: usize| in_group * 2 + (i & 1) + if i >= 2 { 8 } else { 0 };
            own.b[i / 2] = pair(b(row(i), group), b(row(i + 1), group));
        }
        for i in 0..4 {
            own.d[i] = c(group + if i < 2 { 0 } else { 8 }, in_group * 2 + (i & 1));
        }
    }
    let (input, out) = (device_copy(&fragments), device_copy(&[0.0f32; 256]));
    ok(launch(
        name,
        [1, 64, 0],
        0,
        Args {
            out,
            input,
            n: n_times,
        },
    ));
    let seen = host_copy::<f32>(out, 256);
    for thread in 0..64 {
        for i in 0..4 {
            let (row, col) = (
                (thread % 32 >> 2) + if i < 2 { 0 } else { 8 },
                thread % 4 * 2 + (i & 1),
            );
            let product: f32 = (0..16).map(|k| a(row, k) * b(k, col)).sum();
            assert_eq!(
                seen[thread * 4 + i],
                c(row, col) + n_times as f32 * product,
                "row {row}, column {col}"
            );
        }
    }
}

#[test]
fn mma_of_bf16_multiplies_the_documented_fragments() {
    for schedule in [LATE_FORWARD, EARLY_REVERSE] {
        passes(
            "mma_of_bf16_multiplies_the_documented_fragments",
            &schedule,
            || {
                mma("mma_bf16", true, 1);
                mma("mma_bf16", true, 3);
            },
        );
    }
}

#[test]
fn mma_of_f16_multiplies_the_documented_fragments() {
    for schedule in [LATE_FORWARD, EARLY_REVERSE] {
        passes(
            "mma_of_f16_multiplies_the_documented_fragments",
            &schedule,
            || {
                mma("mma_f16", false, 1);
                mma("mma_f16", false, 3);
            },
        );
    }
}

#[test]
fn ldmatrix_loads_four_matrices_and_transposes() {
    for schedule in [LATE_FORWARD, EARLY_REVERSE] {
        passes("ldmatrix_loads_four_matrices_and_transposes", &schedule, || {
            use_device();
            // Element (matrix, row, col) holds its own place.
            let elements: Vec<u16> = (0..256).collect();
            let input = device_copy(&elements);
            for (name, is_transposed) in [("matrices", false), ("matrices_transposed", true)] {
                let out = device_copy(&[0u32; 128]);
                ok(launch(name, [1, 32, 512], 0, Args { out, input, n: 0 }));
                let seen = host_copy::<u32>(out, 128);
                for lane in 0..32 {
                    for matrix in 0..4 {
                        let place = |h: u32| {
                            let (row, col) = (lane / 4, lane % 4 * 2 + h);
                            matrix * 64
                                + if is_transposed {
                                    col * 8 + row
                                } else {
                                    row * 8 + col
                                }
                        };
                        assert_eq!(seen[(lane * 4 + matrix) as usize], place(0) | place(1) << 16);
                    }
                }
            }
        });
    }
}

#[test]
fn ldmatrix_refuses_rows_off_their_boundary() {
    passes("ldmatrix_refuses_rows_off_their_boundary", &[], || {
        use_device();
        let (input, out) = (device_copy(&[0u16; 256]), device_copy(&[0u32; 128]));
        ok(launch("matrices", [1, 32, 528], 0, Args { out, input, n: 8 }));
        assert_eq!(cuCtxSynchronize(), 716);
    });
}

/// A 16-bit float: what its fields say.
#[derive(Clone, Copy)]
struct Format {
    mantissa_bits: i32,
    bias: i32,
    largest: u16,
}

const F16: Format = Format {
    mantissa_bits: 10,
    bias: 15,
    largest: 0x7bff,
};
const BF16: Format = Format {
    mantissa_bits: 7,
    bias: 127,
    largest: 0x7f7f,
};

impl Format {
    /// The value of a finite, positive one, or what would come after the largest.
    fn value(self, bits: u16) -> f64 {
        let (exponent, mantissa) = (
            i32::from(bits) >> self.mantissa_bits,
            i32::from(bits) & ((1 << self.mantissa_bits) - 1),
        );
        let unit = (2.0f64).powi(exponent.max(1) - self.bias - self.mantissa_bits);
        unit * f64::from(mantissa + if exponent > 0 { 1 << self.mantissa_bits } else { 0 })
    }
}

/// Narrowing rounds to nearest, ties to even, everywhere; widening is exact.
fn convert(to: &str, of: &str, format: Format) {
    use_device();
    let (mut inputs, mut expected) = (Vec::new(), Vec::new());
    for bits in 0..=format.largest {
        let (own, next) = (format.value(bits), format.value(bits + 1));
        let middle = ((own + next) / 2.0) as f32;
        // Exactly between two f32 even where they are subnormal, but for bf16's own subnormals, whose middles f32 holds too.
        assert_eq!(f64::from(middle), (own + next) / 2.0);
        let even = if bits % 2 == 0 { bits } else { bits + 1 };
        for (input, output) in [
            (own as f32, bits),
            (middle.next_down(), bits),
            (middle, even),
            (middle.next_up(), bits + 1),
        ] {
            inputs.extend([input, -input]);
            expected.extend([output, output | 0x8000]);
        }
    }
    let infinity = format.largest + 1;
    inputs.extend([f32::MAX, f32::INFINITY, f32::NEG_INFINITY]);
    expected.extend([infinity, infinity, infinity | 0x8000]);
    let n_exact = inputs.len();
    inputs.extend([
        f32::NAN,
        -f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffff_ffff),
    ]);
    let run = |name: &str, n: usize, out: usize, input: usize| {
        ok(launch(
            name,
            [n.div_ceil(256) as u32, 256, 0],
            0,
            Args {
                out,
                input,
                n: n as i32,
            },
        ));
        ok(cuCtxSynchronize());
    };
    let out = device_copy(&vec![0u16; inputs.len()]);
    run(to, inputs.len(), out, device_copy(&inputs));
    let seen = host_copy::<u16>(out, inputs.len());
    for i in 0..n_exact {
        assert_eq!(
            seen[i],
            expected[i],
            "{to} of {:?} ({:#x})",
            inputs[i],
            inputs[i].to_bits()
        );
    }
    for (bits, input) in seen[n_exact..].iter().zip(&inputs[n_exact..]) {
        assert!(
            bits & 0x7fff > infinity,
            "{to} of NaN {:#x} is {bits:#x}",
            input.to_bits()
        );
    }

    let all: Vec<u16> = (0..=u16::MAX).collect();
    let out = device_copy(&vec![0.0f32; all.len()]);
    run(of, all.len(), out, device_copy(&all));
    for (bits, value) in all.iter().zip(host_copy::<f32>(out, all.len())) {
        let magnitude = bits & 0x7fff;
        if magnitude > infinity {
            assert!(value.is_nan());
            continue;
        }
        let expected = if magnitude == infinity {
            f64::INFINITY
        } else {
            format.value(magnitude)
        };
        assert_eq!(f64::from(value.abs()), expected, "{of} of {bits:#x}");
        assert_eq!(value.is_sign_negative(), bits >> 15 == 1);
    }
}

#[test]
fn f16_is_rounded_to_nearest_even_and_widened_exactly() {
    passes("f16_is_rounded_to_nearest_even_and_widened_exactly", &[], || {
        convert("to_f16", "of_f16", F16)
    });
}

#[test]
fn bf16_is_rounded_to_nearest_even_and_widened_exactly() {
    passes("bf16_is_rounded_to_nearest_even_and_widened_exactly", &[], || {
        convert("to_bf16", "of_bf16", BF16)
    });
}
