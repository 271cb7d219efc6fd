//! Rotary positions of several axes: channel pairs `2i`, `2i + 1` of a head are shared out among the axes in order, and each pair turns by
//! its token's position on its axis times the pair's frequency `theta^(-2i / n)`, `n` being the channels of the axis.
//!
//! Tables are constants of the shapes, computed on the host. Knows nothing of what tokens are.

use denoised_nn::{Ctx, Result};
use denoised_tensor::{RopeStyle, Tensor};

/// How the reference rounds on the way to an angle. Matters for far positions only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Angles {
    /// Frequencies and angles in float64 (FLUX, Wan).
    F64,
    /// Frequencies and angles in float64, angles then rounded to float32 (Z-Image).
    Rounded,
    /// Frequencies and angles in float32 (Qwen-Image).
    F32,
}

/// The axes and their channels.
#[derive(Clone, Debug)]
pub(crate) struct RopeAxes {
    theta: f64,
    /// Channels per axis, even.
    widths: Vec<usize>,
    angles: Angles,
}

impl RopeAxes {
    pub(crate) fn new(theta: f64, widths: &[usize], angles: Angles) -> Self {
        Self {
            theta,
            widths: widths.to_vec(),
            angles,
        }
    }

    /// No tokens yet.
    pub(crate) fn positions(&self) -> Positions {
        Positions {
            n_axes: self.widths.len(),
            values: Vec::new(),
        }
    }

    /// The tables of these tokens.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn tables(&self, ctx: &Ctx<'_>, positions: &Positions) -> Result<Rope> {
        let [cos, sin] = self.values(positions);
        let dims = [positions.len(), self.n_pairs()];
        Ok(Rope {
            cos: ctx.upload_f32(&cos, &dims)?,
            sin: ctx.upload_f32(&sin, &dims)?,
        })
    }

    fn n_pairs(&self) -> usize {
        self.widths.iter().map(|width| width / 2).sum()
    }

    /// Cosines and sines `[tokens, pairs]`.
    fn values(&self, positions: &Positions) -> [Vec<f32>; 2] {
        let n_pairs = self.n_pairs();
        let mut tables = [(); 2].map(|()| vec![0f32; positions.len() * n_pairs]);
        let mut first = 0;
        for (axis, width) in self.widths.iter().enumerate() {
            let on_axis = || {
                positions
                    .values
                    .chunks_exact(positions.n_axes)
                    .map(|row| row[axis])
            };
            // Tokens share their positions with many others on the same axis.
            let mut distinct: Vec<f32> = on_axis().collect();
            distinct.sort_unstable_by(f32::total_cmp);
            distinct.dedup_by(|a, b| a.total_cmp(b).is_eq());
            let rows: Vec<Vec<[f32; 2]>> = distinct.iter().map(|at| self.turns(*width, *at)).collect();
            for (token, at) in on_axis().enumerate() {
                let found = distinct.binary_search_by(|one| one.total_cmp(&at));
                let row = &rows[found.expect("every position is among the distinct ones")];
                for (pair, [cos, sin]) in row.iter().enumerate() {
                    tables[0][token * n_pairs + first + pair] = *cos;
                    tables[1][token * n_pairs + first + pair] = *sin;
                }
            }
            first += width / 2;
        }
        tables
    }

    /// Cosine and sine of every pair of an axis of `width` channels at one position.
    fn turns(&self, width: usize, at: f32) -> Vec<[f32; 2]> {
        (0..width / 2)
            .map(|pair| match self.angles {
                Angles::F64 | Angles::Rounded => {
                    let frequency = 1.0 / self.theta.powf((2 * pair) as f64 / width as f64);
                    let angle = f64::from(at) * frequency;
                    let angle = match self.angles {
                        Angles::Rounded => f64::from(angle as f32),
                        _ => angle,
                    };
                    [angle.cos() as f32, angle.sin() as f32]
                }
                Angles::F32 => {
                    let exponent = (2 * pair) as f32 / width as f32;
                    let frequency = 1.0 / self.theta.powf(f64::from(exponent)) as f32;
                    let angle = f64::from(at * frequency);
                    [angle.cos() as f32, angle.sin() as f32]
                }
            })
            .collect()
    }
}

/// Where tokens are, on every axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Positions {
    n_axes: usize,
    /// `[tokens, axes]`
    values: Vec<f32>,
}

impl Positions {
    /// Tokens so far.
    pub(crate) fn len(&self) -> usize {
        self.values.len() / self.n_axes.max(1)
    }

    /// Behind the others, `n_tokens` tokens; the one at `idx` is where `at(idx)` says, which has a number per axis.
    pub(crate) fn push<const N: usize>(&mut self, n_tokens: usize, at: impl Fn(usize) -> [f32; N]) {
        debug_assert_eq!(N, self.n_axes);
        self.values.extend((0..n_tokens).flat_map(at));
    }

    /// Behind the others, a grid row by row; the token of row `y` and column `x` is where `at(y, x)` says.
    pub(crate) fn push_grid<const N: usize>(
        &mut self,
        (h, w): (usize, usize),
        at: impl Fn(f32, f32) -> [f32; N],
    ) {
        self.push(h * w, |idx| at((idx / w) as f32, (idx % w) as f32));
    }
}

/// Tables of cosines and sines, f32 `[tokens, head_dim / 2]`.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Turns every head of `x` `[batch, tokens, n_heads * head_dim]`, in place.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn apply(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<()> {
        ctx.backend
            .rope(x, &self.cos, &self.sin, RopeStyle::Interleaved, x)
    }

    /// The tables of `len` tokens from `start` on.
    ///
    /// # Errors
    /// Tokens that there are not.
    pub(crate) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        Ok(Self {
            cos: self.cos.narrow(0, start, len)?,
            sin: self.sin.narrow(0, start, len)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(axes: &RopeAxes, at: [f32; 3], cos: [f32; 8], sin: [f32; 8]) {
        let mut positions = axes.positions();
        positions.push_grid((1, 1), |_, _| [0.0, 0.0, 0.0]);
        positions.push(1, |_| at);
        let tables = axes.values(&positions);
        assert!(tables[0][..8].iter().all(|cos| *cos == 1.0));
        assert!(tables[1][..8].iter().all(|sin| *sin == 0.0));
        for (ours, theirs) in tables.iter().zip([cos, sin]) {
            for (ours, theirs) in ours[8..].iter().zip(theirs) {
                assert!((ours - theirs).abs() < 2e-7, "{ours} and {theirs}");
            }
        }
    }

    /// What diffusers 0.42.1 computes for axes of 4, 6 and 6 channels.
    #[test]
    fn tables_are_those_of_diffusers() {
        // FluxPosEmbed(10000, [4, 6, 6])
        check(
            &RopeAxes::new(10_000.0, &[4, 6, 6], Angles::F64),
            [0.0, 7.0, 300.0],
            [
                1.0,
                1.0,
                0.753_902_26,
                0.947_679_04,
                0.999_886_3,
                -0.022_096_619,
                0.210_807,
                0.798_299_2,
            ],
            [
                0.0,
                0.0,
                0.656_986_6,
                0.319_224_66,
                0.015_080_472,
                -0.999_755_86,
                0.977_527_7,
                0.602_261,
            ],
        );
        // RopeEmbedder(256, [4, 6, 6], [1536, 512, 512]) of Z-Image
        check(
            &RopeAxes::new(256.0, &[4, 6, 6], Angles::Rounded),
            [1000.0, 7.0, 300.0],
            [
                0.562_379_06,
                0.945_440_23,
                0.753_902_26,
                0.451_428_32,
                0.984_965_5,
                -0.022_096_619,
                -0.992_426_63,
                0.401_394_93,
            ],
            [
                0.826_879_56,
                -0.325_795_56,
                0.656_986_6,
                0.892_307_4,
                0.172_751_02,
                -0.999_755_86,
                -0.122_838_944,
                0.915_905_06,
            ],
        );
        // The table of positions of QwenEmbedRope(10000, [4, 6, 6]) at 4000, and its angles of -2.
        check(
            &RopeAxes::new(10_000.0, &[4, 6, 6], Angles::F32),
            [4000.0, 4000.0, -2.0],
            [
                -0.729_947,
                -0.666_938_07,
                -0.729_947,
                -0.952_462_5,
                -0.691_639_2,
                -0.416_146_84,
                0.995_694_2,
                0.999_990_7,
            ],
            [
                -0.683_503_8,
                0.745_113_13,
                -0.683_503_8,
                -0.304_655_9,
                0.722_243_25,
                -0.909_297_4,
                -0.092_698_49,
                -0.004_308_855,
            ],
        );
    }

    #[test]
    fn grids_are_walked_row_by_row_behind_the_text() {
        let axes = RopeAxes::new(10_000.0, &[2, 2, 2], Angles::F64);
        let mut positions = axes.positions();
        positions.push(2, |idx| [idx as f32, 0.0, 0.0]);
        positions.push_grid((2, 2), |y, x| [9.0, y, x]);
        let rows = [
            [0.0, 0.0, 0.0],
            [1.0, 0.0, 0.0],
            [9.0, 0.0, 0.0],
            [9.0, 0.0, 1.0],
            [9.0, 1.0, 0.0],
            [9.0, 1.0, 1.0],
        ];
        assert_eq!(positions.values, rows.concat());
        assert_eq!(positions.len(), 6);
    }
}
