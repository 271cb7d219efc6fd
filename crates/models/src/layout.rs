//! Layouts of latents: what the loop holds, and what diffusers draws noise in, is given and returns.
//!
//! The loop holds latents channels last, frames one above the other. The other layouts only matter for noise (which is drawn in their
//! order), latents that a request brings, and traces.

/// A layout of latents of `n_frames` frames of `h` by `w` with `c` channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorLayout {
    /// `[1, c, h, w]`
    Nchw,
    /// `[2, c, h, w]`, both the same: guidance that doubles the latents themselves.
    Doubled,
    /// `[1, c, n_frames, h, w]`
    Ncfhw,
    /// `[1, (h/2) (w/2), 4c]`: patches of 2x2 latents row by row, features `(c, dy, dx)`.
    Packed2x2,
    /// `[1, h w, c]`
    Tokens,
}

/// Extents of latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LatentsShape {
    pub(crate) n_frames: usize,
    pub(crate) h: usize,
    pub(crate) w: usize,
    pub(crate) c: usize,
}

impl LatentsShape {
    /// As the loop holds them, `[1, n_frames h, w, c]`.
    pub(crate) fn dims(&self) -> [usize; 4] {
        [1, self.n_frames * self.h, self.w, self.c]
    }

    pub(crate) fn n_elements(&self) -> usize {
        self.dims().iter().product()
    }
}

impl TensorLayout {
    /// Extents in this layout.
    pub(crate) fn dims(self, shape: &LatentsShape) -> Vec<u64> {
        let LatentsShape { n_frames, h, w, c } = *shape;
        let dims: &[usize] = match self {
            Self::Nchw => &[1, c, h, w],
            Self::Doubled => &[2, c, h, w],
            Self::Ncfhw => &[1, c, n_frames, h, w],
            Self::Packed2x2 => &[1, (h / 2) * (w / 2), 4 * c],
            Self::Tokens => &[1, h * w, c],
        };
        dims.iter().map(|extent| *extent as u64).collect()
    }

    /// Doubled latents are plain ones where nothing is guided.
    pub(crate) fn without_doubling(self, is_plain: bool) -> Self {
        match self {
            Self::Doubled if is_plain => Self::Nchw,
            layout => layout,
        }
    }

    /// From this layout to the loop's; of doubled latents the first half.
    pub(crate) fn to_loop(self, values: &[f32], shape: &LatentsShape) -> Vec<f32> {
        let mut out = vec![0.0; shape.n_elements()];
        self.pair(shape, |place, position| out[place] = values[position]);
        out
    }

    /// From the loop's layout to this one.
    pub(crate) fn of_loop(self, values: &[f32], shape: &LatentsShape) -> Vec<f32> {
        let mut out = vec![0.0; shape.n_elements()];
        self.pair(shape, |place, position| out[position] = values[place]);
        if self == Self::Doubled {
            out.extend_from_within(..);
        }
        out
    }

    /// Calls `visit(index in the loop's layout, index in this layout)` for every element.
    fn pair(self, shape: &LatentsShape, mut visit: impl FnMut(usize, usize)) {
        let LatentsShape { n_frames, h, w, c } = *shape;
        let mut place = 0;
        for frame in 0..n_frames {
            for y in 0..h {
                for x in 0..w {
                    for channel in 0..c {
                        let position = match self {
                            Self::Nchw | Self::Doubled => (channel * h + y) * w + x,
                            Self::Ncfhw => ((channel * n_frames + frame) * h + y) * w + x,
                            Self::Packed2x2 => {
                                let token = (y / 2) * (w / 2) + x / 2;
                                (token * c + channel) * 4 + (y % 2) * 2 + x % 2
                            }
                            Self::Tokens => place,
                        };
                        visit(place, position);
                        place += 1;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_are_packed_by_channel_then_row_then_column() {
        // One patch of two channels: pixel (y, x) of channel c is 100 c + 10 y + x.
        let shape = LatentsShape {
            n_frames: 1,
            h: 2,
            w: 2,
            c: 2,
        };
        let held = [0.0, 100.0, 1.0, 101.0, 10.0, 110.0, 11.0, 111.0];
        let packed = [0.0, 1.0, 10.0, 11.0, 100.0, 101.0, 110.0, 111.0];
        assert_eq!(TensorLayout::Packed2x2.of_loop(&held, &shape), packed);
        assert_eq!(TensorLayout::Packed2x2.to_loop(&packed, &shape), held);
        assert_eq!(TensorLayout::Nchw.of_loop(&held, &shape), packed);
        assert_eq!(TensorLayout::Tokens.of_loop(&held, &shape), held);
    }

    #[test]
    fn every_layout_is_undone() {
        let shape = LatentsShape {
            n_frames: 3,
            h: 4,
            w: 6,
            c: 5,
        };
        let held: Vec<f32> = (0..shape.n_elements()).map(|i| i as f32).collect();
        let one = LatentsShape {
            n_frames: 1,
            h: 12,
            ..shape
        };
        for (layout, shape) in [
            (TensorLayout::Ncfhw, shape),
            (TensorLayout::Nchw, one),
            (TensorLayout::Doubled, one),
            (TensorLayout::Packed2x2, one),
        ] {
            let there = layout.of_loop(&held, &shape);
            assert_eq!(there.len() as u64, layout.dims(&shape).iter().product::<u64>());
            assert_eq!(layout.to_loop(&there, &shape), held, "{layout:?}");
        }
    }
}
