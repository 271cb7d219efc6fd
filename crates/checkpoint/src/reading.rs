//! Ways of reading a tensor that are chosen by a suffix of its name.
//!
//! Kernels of convolutions in time are stored `[c_out, c_in, frames, height, width]`; two-dimensional convolutions use them in parts.

use denoised_tensor::SourceTensor;
use std::borrow::Cow;

/// What is made of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// It stays as it is.
    Whole,
    /// `@last`: of a kernel over frames the part for the last one, `[c_out, c_in, height, width]`.
    LastFrame,
    /// `@frames`: of a kernel over frames all parts side by side, `[c_out, frames c_in, height, width]`, the earliest first.
    Frames,
}

impl Reading {
    /// A name without its suffix, and what that asks for.
    pub fn of(name: &str) -> (&str, Self) {
        if let Some(name) = name.strip_suffix("@last") {
            (name, Self::LastFrame)
        } else if let Some(name) = name.strip_suffix("@frames") {
            (name, Self::Frames)
        } else {
            (name, Self::Whole)
        }
    }

    /// Extents of what is read of a tensor of `shape`; unchanged where that is no kernel over frames.
    pub fn shape(self, shape: &[usize]) -> Vec<usize> {
        match (self, shape) {
            (Self::LastFrame, &[c_out, c_in, _, height, width]) => vec![c_out, c_in, height, width],
            (Self::Frames, &[c_out, c_in, n_frames, height, width]) => {
                vec![c_out, n_frames.saturating_mul(c_in), height, width]
            }
            _ => shape.to_vec(),
        }
    }

    /// What is read of `tensor`; unchanged where that is no kernel over frames.
    pub fn tensor(self, tensor: SourceTensor<'_>) -> SourceTensor<'_> {
        let &[_, c_in, n_frames, height, width] = &*tensor.shape else {
            return tensor;
        };
        let part = height * width * tensor.dtype.size_bytes();
        if self == Self::Whole || part == 0 || n_frames == 0 || c_in == 0 {
            return tensor;
        }
        // Pieces of `part` bytes are ordered (output, input, frame).
        let mut bytes = Vec::with_capacity(tensor.bytes.len());
        for output in tensor.bytes.chunks_exact(c_in * n_frames * part) {
            let first = if self == Self::LastFrame { n_frames - 1 } else { 0 };
            for frame in first..n_frames {
                let pieces = output.chunks_exact(part).skip(frame).step_by(n_frames);
                pieces.for_each(|piece| bytes.extend_from_slice(piece));
            }
        }
        SourceTensor {
            dtype: tensor.dtype,
            shape: self.shape(&tensor.shape),
            bytes: Cow::Owned(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_tensor::SourceDType;

    #[test]
    fn kernels_over_frames_are_read_in_parts() {
        // Two outputs, two inputs, three frames, 1x2: element `100 output + 10 input + frame` and half of that.
        let mut bytes = Vec::new();
        for output in 0..2u8 {
            for input in 0..2u8 {
                for frame in 0..3u8 {
                    let value = f32::from(100 * output + 10 * input + frame);
                    bytes.extend(value.to_le_bytes());
                    bytes.extend((value / 2.0).to_le_bytes());
                }
            }
        }
        let read = |name: &str| {
            let (name, reading) = Reading::of(name);
            assert_eq!(name, "a.weight");
            let tensor = SourceTensor {
                dtype: SourceDType::F32,
                shape: vec![2, 2, 3, 1, 2],
                bytes: Cow::Borrowed(&bytes),
            };
            let read = reading.tensor(tensor);
            assert_eq!(read.shape, reading.shape(&[2, 2, 3, 1, 2]));
            let values = read.bytes.chunks_exact(8).map(|b| [b[0], b[1], b[2], b[3]]);
            let values: Vec<f32> = values.map(f32::from_le_bytes).collect();
            (read.shape.clone(), values)
        };
        assert_eq!(
            read("a.weight@last"),
            (vec![2, 2, 1, 2], vec![2.0, 12.0, 102.0, 112.0])
        );
        let all = [0.0, 10.0, 1.0, 11.0, 2.0, 12.0];
        let all = all.iter().copied().chain(all.map(|x| x + 100.0)).collect();
        assert_eq!(read("a.weight@frames"), (vec![2, 6, 1, 2], all));
        assert_eq!(read("a.weight").0, [2, 2, 3, 1, 2]);
    }

    #[test]
    fn other_tensors_stay_as_they_are() {
        let tensor = SourceTensor {
            dtype: SourceDType::F32,
            shape: vec![1, 1, 1],
            bytes: Cow::Borrowed(&[0, 0, 0, 0]),
        };
        let read = Reading::LastFrame.tensor(tensor);
        assert_eq!((&*read.shape, read.bytes.len()), (&[1, 1, 1][..], 4));
        assert_eq!(Reading::Frames.shape(&[4, 2]), [4, 2]);
    }
}
