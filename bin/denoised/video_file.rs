//! Videos as animated WebP.

use webp::{AnimEncoder, AnimFrame, WebPConfig};

/// Quality of the frames, 0 to 100: the eye finds no difference, and a file is a tenth of a lossless one.
const QUALITY: f32 = 90.0;

/// A video of `n_frames` frames of `width` by `height`, `rgb` frame by frame, shown `fps` per second over and over.
///
/// # Errors
/// In words: bytes and sizes do not agree, or the encoder refuses.
pub(crate) fn encode(
    (width, height): (u32, u32),
    n_frames: u32,
    fps: u32,
    rgb: &[u8],
) -> Result<Vec<u8>, String> {
    let frame_bytes = width as usize * height as usize * 3;
    if frame_bytes == 0 || rgb.len() != frame_bytes * n_frames as usize {
        return Err(format!(
            "{n_frames} frames of {width}x{height} do not have {} bytes",
            rgb.len()
        ));
    }
    let mut config = WebPConfig::new().map_err(|()| "the encoder has no configuration".to_owned())?;
    config.quality = QUALITY;
    let mut encoder = AnimEncoder::new(width, height, &config);
    encoder.set_loop_count(0);
    for (frame, frame_idx) in rgb.chunks_exact(frame_bytes).zip(0i64..) {
        let milliseconds = i32::try_from(frame_idx * 1000 / i64::from(fps.max(1))).unwrap_or(i32::MAX);
        encoder.add_frame(AnimFrame::from_rgb(frame, width, height, milliseconds));
    }
    let encoded = encoder.try_encode().map_err(|error| format!("{error:?}"))?;
    Ok(encoded.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{AnimationDecoder, codecs::webp::WebPDecoder};
    use std::io::Cursor;

    #[test]
    fn another_decoder_finds_the_frames_and_their_time() {
        let (width, height, n_frames) = (16, 8, 5u32);
        // Frames of one grey each, which any quality keeps.
        let grey = |frame: u32| (40 * frame + 20) as u8;
        let rgb: Vec<u8> = (0..n_frames)
            .flat_map(|frame| vec![grey(frame); (width * height * 3) as usize])
            .collect();
        let file = encode((width, height), n_frames, 16, &rgb).unwrap();
        let frames = WebPDecoder::new(Cursor::new(file)).unwrap().into_frames();
        let frames = frames.collect_frames().unwrap();
        assert_eq!(frames.len(), n_frames as usize);
        let mut begins_ms = 0;
        for (frame, idx) in frames.iter().zip(0u32..) {
            assert_eq!(begins_ms, idx * 1000 / 16);
            begins_ms += frame.delay().numer_denom_ms().0;
            let pixel = frame.buffer().get_pixel(3, 3);
            assert!(pixel.0[0].abs_diff(grey(idx)) <= 3, "frame {idx}: {pixel:?}");
        }
    }

    #[test]
    fn bytes_that_are_not_the_frames_are_refused() {
        assert!(encode((2, 2), 2, 16, &[0; 12]).is_err());
        assert!(encode((0, 2), 1, 16, &[]).is_err());
    }
}
