//! Pictures and masks that a request brings, at the size and in the range that an encoder wants.
//!
//! Sizes change as Pillow changes them (8 bits per channel between its two passes and after them, the support of the filter widened
//! where a side shrinks), for that is what the reference pipelines call.

use denoised_types::{Image, Mask};
use std::f64::consts::PI;

/// How the pixels of another size are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Windowed sinc of three lobes: what diffusers' picture processors use.
    Lanczos,
    /// Cubic convolution, a = -0.5: what the processors of CLIP and Qwen2-VL use.
    Bicubic,
}

impl Filter {
    /// Where it becomes zero.
    fn support(self) -> f64 {
        match self {
            Self::Lanczos => 3.0,
            Self::Bicubic => 2.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
        match (self, x.abs()) {
            (Self::Lanczos, x) if x < 3.0 => sinc(x) * sinc(x / 3.0),
            (Self::Bicubic, x) if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            (Self::Bicubic, x) if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5,
            _ => 0.0,
        }
    }
}

/// Fractional bits of a factor.
const FACTOR_BITS: u32 = 22;

/// For every place of the new side: the first place of the old one that counts, and the factors from there on.
fn factors(from: usize, to: usize, filter: Filter) -> Vec<(usize, Vec<i32>)> {
    let scale = from as f64 / to as f64;
    let widening = scale.max(1.0);
    let support = filter.support() * widening;
    let of_place = |place: usize| {
        let center = (place as f64 + 0.5) * scale;
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(from);
        let weight = |old: usize| filter.at((old as f64 - center + 0.5) / widening);
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| (weight / sum * f64::from(1u32 << FACTOR_BITS)).round() as i32;
        (first, weights.iter().map(fixed).collect())
    };
    (0..to).map(of_place).collect()
}

/// Rows of `n_channels` bytes per pixel at another size. `pixels` has `width * height * n_channels` bytes, and all sides are above 0.
///
/// Bytes are rounded between the two passes, so their order shows. Pillow 13 begins with the height where that loses more than twice
/// what the width does.
fn resized(
    pixels: &[u8],
    n_channels: usize,
    (width, height): (u32, u32),
    (to_width, to_height): (u32, u32),
    filter: Filter,
) -> Vec<u8> {
    let lost = |from: u32, to: u32| i64::from(from) - i64::from(to);
    let is_height_first = lost(height, to_height) > (2 * lost(width, to_width)).max(0);
    let [width, height, to_width, to_height] = [width, height, to_width, to_height].map(|side| side as usize);
    if is_height_first {
        let low = high(pixels, width * n_channels, (height, to_height), filter);
        wide(&low, n_channels, (width, to_width), filter)
    } else {
        let narrow = wide(pixels, n_channels, (width, to_width), filter);
        high(&narrow, to_width * n_channels, (height, to_height), filter)
    }
}

/// Rows at another width.
fn wide(pixels: &[u8], n_channels: usize, (width, to_width): (usize, usize), filter: Filter) -> Vec<u8> {
    if width == to_width {
        return pixels.to_vec();
    }
    let factors = factors(width, to_width, filter);
    let mut out = Vec::with_capacity(pixels.len() / width * to_width);
    for row in pixels.chunks_exact(width * n_channels) {
        for (first, factors) in &factors {
            for channel in 0..n_channels {
                let old = row[first * n_channels + channel..].iter().step_by(n_channels);
                out.push(weighted(old, factors));
            }
        }
    }
    out
}

/// Rows of `stride` bytes at another height.
fn high(pixels: &[u8], stride: usize, (height, to_height): (usize, usize), filter: Filter) -> Vec<u8> {
    if height == to_height {
        return pixels.to_vec();
    }
    let mut out = Vec::with_capacity(to_height * stride);
    for (first, factors) in &factors(height, to_height, filter) {
        for place in 0..stride {
            let old = pixels[first * stride + place..].iter().step_by(stride);
            out.push(weighted(old, factors));
        }
    }
    out
}

/// The sum of `bytes` times `factors`, rounded to a byte.
fn weighted<'a>(bytes: impl Iterator<Item = &'a u8>, factors: &[i32]) -> u8 {
    let half = 1i64 << (FACTOR_BITS - 1);
    let sum: i64 = bytes
        .zip(factors)
        .map(|(byte, factor)| i64::from(*byte) * i64::from(*factor))
        .sum();
    ((sum + half) >> FACTOR_BITS).clamp(0, 255) as u8
}

/// A picture at another size. The picture and all sides must be as [`Image::is_consistent`] and above 0 have them.
pub(crate) fn resized_image(image: &Image, width: u32, height: u32, filter: Filter) -> Image {
    let from = (image.width, image.height);
    Image::picture(
        width,
        height,
        resized(&image.rgb, 3, from, (width, height), filter),
    )
}

/// Where a mask says to repaint (1) and to keep (0), at another size.
pub(crate) fn resized_mask(mask: &Mask, width: u32, height: u32) -> Vec<f32> {
    let from = (mask.width, mask.height);
    let luma = resized(&mask.luma, 1, from, (width, height), Filter::Lanczos);
    luma.iter()
        .map(|value| if *value >= 128 { 1.0 } else { 0.0 })
        .collect()
}

/// Bytes as numbers in `[-1, 1]`, computed as numpy does it in float32.
pub(crate) fn signed(rgb: &[u8]) -> Vec<f32> {
    rgb.iter()
        .map(|byte| 2.0 * (f32::from(*byte) / 255.0) - 1.0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture with edges and gradients: byte `i` is `(i * i / 7 + 31 i) mod 256`.
    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| ((i * i / 7 + 31 * i) % 256) as u8).collect()
    }

    #[test]
    fn sizes_change_as_in_pillow() {
        // Pillow 13: `Image.frombytes("RGB", (w, h), bytes).resize((to_w, to_h), filter)`, by tests/tables/make_resized.py.
        let table: serde_json::Value =
            serde_json::from_str(include_str!("../tests/tables/resized.json")).expect("JSON");
        for case in table.as_array().expect("cases") {
            let number = |key: &str| case[key].as_u64().expect("a number") as u32;
            let n_channels = number("n_channels") as usize;
            let (from, to) = (
                (number("width"), number("height")),
                (number("to_width"), number("to_height")),
            );
            let filter = match case["filter"].as_str() {
                Some("lanczos") => Filter::Lanczos,
                _ => Filter::Bicubic,
            };
            let pixels = bytes((from.0 * from.1) as usize * n_channels);
            let ours = resized(&pixels, n_channels, from, to, filter);
            let theirs: Vec<u8> = case["bytes"]
                .as_array()
                .expect("bytes")
                .iter()
                .map(|byte| byte.as_u64().expect("a byte") as u8)
                .collect();
            assert_eq!(ours.len(), theirs.len());
            let worst = ours.iter().zip(&theirs).map(|(a, b)| a.abs_diff(*b)).max();
            assert_eq!(worst, Some(0), "{from:?} to {to:?} {filter:?} {n_channels}");
        }
    }

    #[test]
    fn a_mask_is_repainted_from_128_on() {
        let mask = Mask {
            width: 4,
            height: 1,
            luma: vec![0, 127, 128, 255],
        };
        assert_eq!(resized_mask(&mask, 4, 1), [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(signed(&[0, 255]), [-1.0, 1.0]);
    }
}
