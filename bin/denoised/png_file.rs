//! A picture as PNG bytes, with its parameters in text chunks.
//!
//! The bytes depend on the picture and its parameters alone: nothing about workers, time or paths is in them.

use denoised_types::Resolved;

/// What is written beside the pixels.
#[derive(Clone, Debug)]
pub(crate) struct Parameters<'a> {
    /// The prompt.
    pub(crate) prompt: &'a str,
    /// The negative prompt, if one was given.
    pub(crate) negative_prompt: Option<&'a str>,
    /// Everything else that was asked for, defaults filled in.
    pub(crate) resolved: &'a Resolved,
    /// What else of the request is needed to repeat it, by name.
    pub(crate) further: &'a [(&'static str, String)],
    /// Family of the model, e.g. `sd3`.
    pub(crate) family: &'a str,
    /// Name of the checkpoint (the last part of its folder's path).
    pub(crate) model_name: &'a str,
}

impl Parameters<'_> {
    /// Keywords and texts, in the order in which they are written.
    fn texts(&self) -> Vec<(&'static str, String)> {
        let resolved = self.resolved;
        let mut texts = vec![
            ("prompt", self.prompt.to_owned()),
            (
                "negative prompt",
                self.negative_prompt.unwrap_or_default().to_owned(),
            ),
            ("steps", resolved.n_steps.to_string()),
            ("guidance", resolved.guidance.to_string()),
            ("size", format!("{}x{}", resolved.width, resolved.height)),
            ("seed", resolved.seed.to_string()),
            ("sampler", resolved.sampler.clone()),
            ("model", self.model_name.to_owned()),
            ("family", self.family.to_owned()),
            (
                "Software",
                concat!("denoised ", env!("CARGO_PKG_VERSION")).to_owned(),
            ),
        ];
        texts.extend(self.further.iter().cloned());
        texts
    }
}

/// Encodes a picture of `size` (width, height): rows from the top, red first.
///
/// # Errors
/// The picture has no pixels, or not as many as its size says.
pub(crate) fn encode(
    (width, height): (u32, u32),
    rgb: &[u8],
    parameters: &Parameters<'_>,
) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_source_srgb(png::SrgbRenderingIntent::Perceptual);
    for (keyword, text) in parameters.texts() {
        // tEXt is Latin-1 and read by everything; iTXt is UTF-8.
        if text.is_ascii() {
            encoder.add_text_chunk(keyword.to_owned(), text)?;
        } else {
            encoder.add_itxt_chunk(keyword.to_owned(), text)?;
        }
    }
    let mut writer = encoder.write_header()?;
    writer.write_image_data(rgb)?;
    writer.finish()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved() -> Resolved {
        Resolved {
            width: 2,
            height: 1,
            n_frames: 1,
            n_steps: 20,
            guidance: 4.5,
            seed: 7,
            sampler: "flow-euler".to_owned(),
            warnings: Vec::new(),
        }
    }

    #[test]
    fn pixels_and_texts_come_back() {
        let rgb = [255, 0, 0, 0, 0, 255];
        let resolved = resolved();
        let parameters = Parameters {
            prompt: "ein Apfel – «rot» 🍎",
            negative_prompt: Some("blurry"),
            resolved: &resolved,
            further: &[],
            family: "sd3",
            model_name: "emoji-dit",
        };
        let bytes = encode((2, 1), &rgb, &parameters).unwrap();
        assert_eq!(encode((2, 1), &rgb, &parameters).unwrap(), bytes);

        let mut reader = png::Decoder::new(std::io::Cursor::new(&bytes))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!(pixels, rgb);
        let info = reader.info();
        let latin: Vec<_> = info
            .uncompressed_latin1_text
            .iter()
            .map(|chunk| (chunk.keyword.as_str(), chunk.text.as_str()))
            .collect();
        assert_eq!(
            latin,
            [
                ("negative prompt", "blurry"),
                ("steps", "20"),
                ("guidance", "4.5"),
                ("size", "2x1"),
                ("seed", "7"),
                ("sampler", "flow-euler"),
                ("model", "emoji-dit"),
                ("family", "sd3"),
                ("Software", concat!("denoised ", env!("CARGO_PKG_VERSION"))),
            ]
        );
        assert_eq!(info.utf8_text.len(), 1);
        assert_eq!(info.utf8_text[0].get_text().unwrap(), "ein Apfel – «rot» 🍎");
    }

    #[test]
    fn a_picture_that_contradicts_its_size_is_refused() {
        let resolved = resolved();
        let parameters = Parameters {
            prompt: "",
            negative_prompt: None,
            resolved: &resolved,
            further: &[],
            family: "sd3",
            model_name: "m",
        };
        assert!(encode((2, 2), &[0; 3], &parameters).is_err());
    }
}
