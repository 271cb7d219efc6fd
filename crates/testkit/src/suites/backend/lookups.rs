//! Lookups, layout, and the ops of sampling and output.

use super::{
    Case, ELEMENT_LIMIT,
    elementwise::{broadcast_dims, other_shape, random_broadcast},
    norms::{random_dims, same_shape, some_width},
    operands::*,
};
use denoised_tensor::{Backend, DType, PatchOrder, StepArgs, Tensor, TimestepSpec, WeightKind};

pub(super) fn embedding(random: &mut Random) -> Case {
    let feed = random.feed();
    let (n_rows, n, n_ids) = (random.within(1, 40), some_width(random), random.within(1, 20));
    let table = feed.values(1, 0, n_rows * n);
    let ids_of = move |element: u64| {
        let mut random = feed.random(0, element);
        (0..n_ids)
            .map(|_| random.within(0, n_rows - 1) as i32)
            .collect::<Vec<_>>()
    };
    let run_table = table.clone();
    Case {
        name: format!("embedding of {n_ids} ids in {n_rows}x{n}"),
        limit: 0.0,
        run: Box::new(move |backend, elements| {
            let weight = prepare(backend, &[(WeightKind::Table, &[n_rows, n], &run_table)])?.remove(0);
            let ids: Vec<i32> = elements.iter().flat_map(|element| ids_of(*element)).collect();
            let ids = put_ints(backend, &[elements.len(), n_ids], &ids)?;
            let out = Output::new(
                backend,
                feed.dtype,
                feed.place(20),
                &with_batch(elements, &[n_ids, n]),
            )?;
            backend.embedding(&ids, &weight, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            ids_of(element)
                .iter()
                .flat_map(|id| wide(&table[*id as usize * n..][..n]))
                .collect()
        }),
    }
}

pub(super) fn gather_rows(random: &mut Random) -> Case {
    let feed = random.feed();
    let (n_rows, n) = (random.within(1, 30), some_width(random));
    let row_of = move |element: u64| feed.random(1, element).within(0, n_rows - 1);
    Case {
        name: format!("gather_rows of {n_rows}x{n}"),
        limit: 0.0,
        run: Box::new(move |backend, elements| {
            let x = feed.put(backend, 0, elements, &[n_rows, n])?;
            let rows: Vec<i32> = elements.iter().map(|element| row_of(*element) as i32).collect();
            let rows = put_ints(backend, &[elements.len()], &rows)?;
            let out = Output::new(backend, feed.dtype, feed.place(20), &with_batch(elements, &[n]))?;
            backend.gather_rows(&x, &rows, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            wide(&feed.values(0, element, n_rows * n)[row_of(element) * n..][..n])
        }),
    }
}

pub(super) fn timestep_embedding(random: &mut Random) -> Case {
    let feed = random.feed();
    let dim = 2 * random.within(2, 160);
    let spec = TimestepSpec {
        flip_sin_to_cos: random.coin(),
        downscale_freq_shift: random.pick(&[0.0, 1.0]),
        scale: random.pick(&[1.0, 4.0]),
        max_period: 10_000.0,
    };
    let timestep_of = move |element: u64| (feed.random(0, element).value() + 1.0) * 500.0;
    Case {
        name: format!("timestep_embedding to {dim}, {spec:?}"),
        // Angles reach 4000 radians, whose rounding to f32 is 1.2e-4.
        limit: 2e-4,
        run: Box::new(move |backend, elements| {
            let timesteps: Vec<f32> = elements.iter().map(|element| timestep_of(*element)).collect();
            let timesteps = put(backend, Place::Dense, &[elements.len()], &timesteps)?;
            let out = Output::new(backend, feed.dtype, feed.place(20), &with_batch(elements, &[dim]))?;
            backend.timestep_embedding(&timesteps, &spec, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| {
            let half = dim / 2;
            let angle = |i: usize| {
                let n_steps = half as f64 - f64::from(spec.downscale_freq_shift);
                let frequency = (-f64::from(spec.max_period).ln() * i as f64 / n_steps).exp();
                f64::from(spec.scale) * f64::from(timestep_of(element)) * frequency
            };
            let sines = (0..half).map(|i| angle(i).sin());
            let cosines = (0..half).map(|i| angle(i).cos());
            if spec.flip_sin_to_cos {
                cosines.chain(sines).collect()
            } else {
                sines.chain(cosines).collect()
            }
        }),
    }
}

/// Sides, channels, patch and order, and for each feature of each token the pixel element it is.
#[derive(Clone, Copy)]
struct Patches {
    high: usize,
    wide: usize,
    n: usize,
    patch: usize,
    order: PatchOrder,
}

impl Patches {
    fn new(random: &mut Random) -> Self {
        Self {
            high: random.within(1, 6),
            wide: random.within(1, 6),
            n: random.pick(&[1, 3, 4, 16, 20]),
            patch: random.within(1, 3),
            order: random.pick(&[PatchOrder::SpatialFirst, PatchOrder::ChannelFirst]),
        }
    }

    fn image(self) -> Vec<usize> {
        vec![self.high * self.patch, self.wide * self.patch, self.n]
    }

    fn tokens(self) -> Vec<usize> {
        vec![self.high * self.wide, self.patch * self.patch * self.n]
    }

    fn pixel_of(self, flat: usize) -> usize {
        let p = self.patch;
        let (token, feature) = (flat / (p * p * self.n), flat % (p * p * self.n));
        let (dy, dx, c) = match self.order {
            PatchOrder::SpatialFirst => (feature / self.n / p, feature / self.n % p, feature % self.n),
            PatchOrder::ChannelFirst => (feature / p % p, feature % p, feature / (p * p)),
        };
        let (y, x) = (token / self.wide * p + dy, token % self.wide * p + dx);
        (y * self.wide * p + x) * self.n + c
    }
}

pub(super) fn patchify(random: &mut Random) -> Case {
    let feed = random.feed();
    let p = Patches::new(random);
    let name = format!("patchify {:?} by {}, {:?}", p.image(), p.patch, p.order);
    let run =
        move |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.patchify(x, p.patch, p.order, out);
    let reference = move |x: Vec<f64>| (0..x.len()).map(|flat| x[p.pixel_of(flat)]).collect();
    other_shape(
        feed,
        feed.dtype,
        name,
        0.0,
        (p.image(), p.tokens()),
        run,
        reference,
    )
}

pub(super) fn unpatchify(random: &mut Random) -> Case {
    let feed = random.feed();
    let p = Patches::new(random);
    let name = format!("unpatchify to {:?} by {}, {:?}", p.image(), p.patch, p.order);
    let run =
        move |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.unpatchify(x, p.patch, p.order, out);
    let reference = move |x: Vec<f64>| {
        let mut out = vec![0.0; x.len()];
        for (flat, value) in x.into_iter().enumerate() {
            out[p.pixel_of(flat)] = value;
        }
        out
    };
    other_shape(
        feed,
        feed.dtype,
        name,
        0.0,
        (p.tokens(), p.image()),
        run,
        reference,
    )
}

pub(super) fn permute(random: &mut Random) -> Case {
    let feed = random.feed();
    let n_leading = random.within(0, 3);
    let last = random.within(1, 20);
    let dims = random_dims(random, n_leading, last);
    // The batch stays in front, as results are per batch element.
    let mut axes: Vec<usize> = (1..=dims.len()).collect();
    for i in (1..axes.len()).rev() {
        axes.swap(i, random.within(0, i));
    }
    let out_dims: Vec<usize> = axes.iter().map(|axis| dims[axis - 1]).collect();
    let name = format!("permute {dims:?} by {axes:?}");
    let (ref_axes, ref_dims, ref_out) = (axes.clone(), dims.clone(), out_dims.clone());
    let run = move |backend: &dyn Backend, x: &Tensor, out: &Tensor| {
        backend.permute(x, &[&[0], &axes[..]].concat(), out)
    };
    let reference = move |x: Vec<f64>| {
        let stride = |dim_idx: usize| ref_dims[dim_idx + 1..].iter().product::<usize>();
        let source = |flat: usize| {
            let (mut rest, mut offset) = (flat, 0);
            for (axis, extent) in ref_axes.iter().zip(&ref_out).rev() {
                offset += rest % extent * stride(axis - 1);
                rest /= extent;
            }
            offset
        };
        (0..x.len()).map(|flat| x[source(flat)]).collect()
    };
    other_shape(feed, feed.dtype, name, 0.0, (dims, out_dims), run, reference)
}

pub(super) fn upsample_nearest(random: &mut Random) -> Case {
    let feed = random.feed();
    let (height, width, n) = (random.within(1, 9), random.within(1, 9), some_width(random));
    let name = format!("upsample_nearest {height}x{width}x{n}");
    let run = |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.upsample_nearest(x, out);
    let reference = move |x: Vec<f64>| {
        let pixel = |y: usize, col: usize| x[(y / 2 * width + col / 2) * n..][..n].to_vec();
        (0..2 * height)
            .flat_map(|y| (0..2 * width).map(move |col| (y, col)))
            .flat_map(|(y, col)| pixel(y, col))
            .collect()
    };
    other_shape(
        feed,
        feed.dtype,
        name,
        0.0,
        (vec![height, width, n], vec![2 * height, 2 * width, n]),
        run,
        reference,
    )
}

pub(super) fn copy(random: &mut Random) -> Case {
    let feed = random.feed();
    let n_leading = random.within(0, 3);
    let last = some_width(random);
    let dims = random_dims(random, n_leading, last);
    let mut own = random_broadcast(random, dims.len() + 1);
    own[0] = true;
    let small = broadcast_dims(&dims, &own);
    let name = format!("copy {small:?} to {dims:?}");
    let ref_dims = dims.clone();
    let run = |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.copy(x, out);
    let n: usize = small.iter().product();
    let reference = move |x: Vec<f64>| {
        debug_assert_eq!(x.len(), n);
        let index = |flat: usize| {
            let (mut rest, mut offset, mut stride) = (flat, 0, 1);
            for (extent, own_extent) in ref_dims.iter().zip(&small).rev() {
                offset += rest % extent % own_extent * stride;
                rest /= extent;
                stride *= own_extent;
            }
            offset
        };
        (0..ref_dims.iter().product())
            .map(|flat| x[index(flat)])
            .collect()
    };
    let small = broadcast_dims(&dims, &own);
    other_shape(feed, feed.dtype, name, 0.0, (small, dims), run, reference)
}

pub(super) fn fill(random: &mut Random) -> Case {
    let feed = random.feed();
    let last = some_width(random);
    let dims = random_dims(random, 2, last);
    let value = rounded(feed.dtype, random.value());
    let name = format!("fill {dims:?}");
    let n = dims.iter().product();
    let run = move |backend: &dyn Backend, _: &Tensor, out: &Tensor| backend.fill(out, value);
    other_shape(feed, feed.dtype, name, 0.0, (vec![1], dims), run, move |_| {
        vec![f64::from(value); n]
    })
}

pub(super) fn step(random: &mut Random) -> Case {
    let feed = random.feed();
    // The sampler's own state is f32.
    let state = feed.in_f32();
    let last = random.pick(&[1, 4, 16, 33]);
    let dims = random_dims(random, 2, last);
    let (has_guidance, has_noise, wants_guided) = (random.coin(), random.coin(), random.coin());
    let name =
        format!("step {dims:?}, guidance {has_guidance}, noise {has_noise}, guided_out {wants_guided}");
    let run_dims = dims.clone();
    let guide = move |element: u64, n: usize| {
        let conditional = wide(&feed.values(1, element, n));
        let unconditional = wide(&feed.values(2, element, n));
        let guidance = f64::from(state.values(3, element, 1)[0]);
        let guided = |i: usize| unconditional[i] + guidance * (conditional[i] - unconditional[i]);
        if has_guidance {
            (0..n).map(guided).collect()
        } else {
            conditional
        }
    };
    let run = move |backend: &dyn Backend, elements: &[u64], latents: &Tensor, out: &Tensor| {
        let conditional = feed.put(backend, 1, elements, &run_dims)?;
        let unconditional = feed.put(backend, 2, elements, &run_dims)?;
        let guidance: Vec<f32> = elements
            .iter()
            .map(|element| state.values(3, *element, 1)[0])
            .collect();
        let guidance = put(backend, Place::Dense, &[elements.len()], &guidance)?;
        let coefficients = state.put(backend, 4, elements, &[3])?;
        let noise = state.put(backend, 5, elements, &run_dims)?;
        let guided_out = Output::new(backend, DType::F32, feed.place(6), out.dims())?;
        let args = StepArgs {
            latents,
            conditional: &conditional,
            unconditional: has_guidance.then_some((&unconditional, &guidance)),
            coefficients: &coefficients,
            noise: has_noise.then_some(&noise),
            guided_out: wants_guided.then_some(&guided_out.view),
        };
        backend.step(&args, out)?;
        if wants_guided {
            for (element, got) in elements.iter().zip(guided_out.results(backend)?) {
                let expected = guide(*element, got.len());
                let is_close = got
                    .iter()
                    .zip(&expected)
                    .all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6);
                assert!(is_close, "guided_out of element {element}");
            }
        }
        Ok(())
    };
    let reference = move |element: u64, latents: Vec<f64>| {
        let n = latents.len();
        let guided = guide(element, n);
        let c = wide(&state.values(4, element, 3));
        let noise = wide(&state.values(5, element, n));
        (0..n)
            .map(|i| c[0] * latents[i] + c[1] * guided[i] + if has_noise { c[2] * noise[i] } else { 0.0 })
            .collect()
    };
    same_shape(random, state, name, 2.0 * ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn to_pixels(random: &mut Random) -> Case {
    let feed = random.feed();
    let dims = random_dims(random, 2, 3);
    let name = format!("to_pixels {dims:?}");
    let run = |backend: &dyn Backend, x: &Tensor, out: &Tensor| {
        // Through the range and beyond both ends.
        let scaled = backend.alloc(x.dims(), x.dtype())?;
        backend.affine(x, 1.5, 0.0, &scaled)?;
        backend.to_pixels(&scaled, out)?;
        let bytes = backend.alloc(x.dims(), DType::U8)?;
        backend.to_pixels(&scaled, &bytes)?;
        let units = fetch(backend, out)?;
        let mut got = vec![0; units.len()];
        backend.download(&bytes, &mut got)?;
        for (byte, unit) in got.iter().zip(&units) {
            assert_eq!(*byte, (255.0 * unit).round_ties_even() as u8, "byte of {unit}");
        }
        Ok(())
    };
    let reference = |x: Vec<f64>| x.iter().map(|x| (x * 1.5 / 2.0 + 0.5).clamp(0.0, 1.0)).collect();
    other_shape(
        feed,
        DType::F32,
        name,
        ELEMENT_LIMIT,
        (dims.clone(), dims),
        run,
        reference,
    )
}
