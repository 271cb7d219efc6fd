//! Pictures and masks that the user names, as a request takes them.

use crate::error::Error;
use denoised_types::{Image, Mask};
use image::{DynamicImage, ImageDecoder, ImageReader, Limits};
use std::path::Path;

/// Largest side, and most bytes that decoding may take: a small file can unfold into a huge picture.
const MAX_SIDE_PX: u32 = 8192;
const MAX_DECODED_BYTES: u64 = 1 << 30;

/// Reads a PNG, JPEG or WebP file, turned as its camera says. Transparent parts are laid over white.
///
/// # Errors
/// `InvalidRequest` naming the file and what is wrong with it.
pub(crate) fn read_image(path: &Path) -> Result<Image, Error> {
    let picture = read(path)?;
    let mut rgba = picture.into_rgba8();
    for pixel in rgba.pixels_mut() {
        let alpha = u16::from(pixel.0[3]);
        for channel in &mut pixel.0[..3] {
            *channel = ((u16::from(*channel) * alpha + 255 * (255 - alpha) + 127) / 255) as u8;
        }
    }
    let (width, height) = rgba.dimensions();
    let rgb = rgba
        .pixels()
        .flat_map(|pixel| [pixel.0[0], pixel.0[1], pixel.0[2]]);
    Ok(Image::picture(width, height, rgb.collect()))
}

/// Reads a mask: bright where to repaint, transparent parts being dark.
///
/// # Errors
/// As [`read_image`].
pub(crate) fn read_mask(path: &Path) -> Result<Mask, Error> {
    let rgba = read(path)?.into_rgba8();
    let (width, height) = rgba.dimensions();
    let luma = rgba.pixels().map(|pixel| {
        let [r, g, b, alpha] = pixel.0.map(u32::from);
        // ITU-R 601 with the factors and the rounding of Pillow's conversion to grey.
        let luma = (19_595 * r + 38_470 * g + 7_471 * b + 0x8000) >> 16;
        ((luma * alpha + 127) / 255) as u8
    });
    Ok(Mask {
        width,
        height,
        luma: luma.collect(),
    })
}

fn read(path: &Path) -> Result<DynamicImage, Error> {
    let wrong = |cause: &dyn std::fmt::Display| {
        Error::usage(format!(
            "cannot read {}: {cause}; a PNG, JPEG or WebP file is expected",
            path.display()
        ))
    };
    let reader = ImageReader::open(path).map_err(|cause| wrong(&cause))?;
    let mut reader = reader.with_guessed_format().map_err(|cause| wrong(&cause))?;
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE_PX);
    limits.max_image_height = Some(MAX_SIDE_PX);
    limits.max_alloc = Some(MAX_DECODED_BYTES);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|cause| wrong(&cause))?;
    let orientation = decoder.orientation().map_err(|cause| wrong(&cause))?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(|cause| wrong(&cause))?;
    picture.apply_orientation(orientation);
    Ok(picture)
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{GrayImage, RgbaImage};

    #[test]
    fn transparent_parts_are_white_and_masks_are_grey() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        let pixels = vec![10, 20, 30, 255, 10, 20, 30, 0, 10, 20, 30, 51];
        RgbaImage::from_raw(3, 1, pixels).unwrap().save(&path).unwrap();
        // The last by hand: (10 * 51 + 255 * 204) / 255 = 206, and 208, 210.
        let rgb = vec![10, 20, 30, 255, 255, 255, 206, 208, 210];
        assert_eq!(read_image(&path).unwrap(), Image::picture(3, 1, rgb));
        let path = folder.path().join("m.png");
        GrayImage::from_raw(2, 1, vec![0, 255])
            .unwrap()
            .save(&path)
            .unwrap();
        let mask = read_mask(&path).unwrap();
        assert_eq!((mask.width, mask.height, mask.luma), (2, 1, vec![0, 255]));
        // Pillow 12: Image.new("RGB", (1, 1), (255, 100, 0)).convert("L") is 135, above the threshold of 128.
        let path = folder.path().join("c.png");
        let pixels = vec![255, 100, 0, 255, 255, 255, 255, 0];
        RgbaImage::from_raw(2, 1, pixels).unwrap().save(&path).unwrap();
        assert_eq!(read_mask(&path).unwrap().luma, [135, 0]);
    }

    #[test]
    fn what_is_no_picture_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        std::fs::write(&path, "no picture").unwrap();
        for path in [path, folder.path().join("absent.png")] {
            let error = read_image(&path).unwrap_err();
            assert_eq!(error.code(), "invalid_request");
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
    }
}
