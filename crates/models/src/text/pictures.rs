//! Pictures as the vision networks take them: what transformers' `Qwen2VLImageProcessor` and `CLIPImageProcessor` do, in Pillow's version.

use crate::{
    ModelError,
    pixels::{Filter, resized_image},
};
use denoised_checkpoint::{Config, Folder};
use denoised_types::Image;
use serde_json::{Map, Value};

const FILE: &str = "preprocessor_config.json";
/// The file that holds the former under `image_processor` where a processor was saved as a whole.
const JOINT_FILE: &str = "processor_config.json";
const FILE_LIMIT_BYTES: u64 = 1 << 20;
const BICUBIC: u64 = 3;
/// Means and deviations of CLIP's pictures, which both processors have by default.
const MEANS: [f64; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const DEVIATIONS: [f64; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];
/// Longest side over shortest that Qwen2-VL takes.
const MAX_ASPECT: f64 = 200.0;

/// A picture in the numbers of a network.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pixels {
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// `[height, width, 3]`.
    pub(crate) values: Vec<f32>,
}

/// From bytes to numbers.
#[derive(Clone, Debug)]
struct Range {
    /// `None`: bytes as they are.
    factor: Option<f64>,
    /// Means and deviations; `None`: not normalized.
    normal: Option<[[f32; 3]; 2]>,
}

impl Range {
    fn read(config: &Config) -> Result<Self, ModelError> {
        config.only("resample", &[BICUBIC.into()])?;
        config.only("do_resize", &[true.into()])?;
        let factor = config.f64_or("rescale_factor", 1.0 / 255.0)?;
        let three = |key: &str, default: [f64; 3]| match config.value(key) {
            None | Some(Value::Null) => Ok(default.map(|x| x as f32)),
            Some(value) => {
                let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
                let list: Vec<f32> = list.iter().filter_map(Value::as_f64).map(|x| x as f32).collect();
                <[f32; 3]>::try_from(list).map_err(|_| config.wrong(key, "three numbers"))
            }
        };
        let normal = [three("image_mean", MEANS)?, three("image_std", DEVIATIONS)?];
        if normal[1]
            .iter()
            .any(|deviation| !(deviation.is_finite() && *deviation > 0.0))
        {
            return Err(config.wrong("image_std", "three numbers above 0").into());
        }
        Ok(Self {
            factor: config.bool_or("do_rescale", true)?.then_some(factor),
            normal: config.bool_or("do_normalize", true)?.then_some(normal),
        })
    }

    fn apply(&self, width: usize, height: usize, rgb: &[u8]) -> Pixels {
        // One table of 256 numbers per channel.
        let tables: Vec<Vec<f32>> = (0..3)
            .map(|channel| {
                let number = |byte: u8| {
                    let value = self
                        .factor
                        .map_or(f32::from(byte), |f| (f64::from(byte) * f) as f32);
                    let normal = self
                        .normal
                        .map(|[mean, deviation]| (value - mean[channel]) / deviation[channel]);
                    normal.unwrap_or(value)
                };
                (0..=255).map(number).collect()
            })
            .collect();
        let of_pixel = |pixel: &[u8]| [0, 1, 2].map(|channel| tables[channel][usize::from(pixel[channel])]);
        Pixels {
            width,
            height,
            values: rgb.chunks_exact(3).flat_map(of_pixel).collect(),
        }
    }
}

/// The settings of the processor `component`.
fn settings(folder: &Folder, component: &str, classes: &[&str]) -> Result<Config, ModelError> {
    let path = |file: &str| folder.path().join(component).join(file);
    let read = |file: &str| -> Result<Value, ModelError> {
        let bytes = folder.read(component, file, FILE_LIMIT_BYTES)?;
        serde_json::from_slice(&bytes).map_err(|error| ModelError::Unfit {
            path: path(file),
            problem: format!("is not valid JSON: {error}"),
        })
    };
    // Where both are there, the joint one counts if it speaks of pictures.
    let joint = match folder.file(component, JOINT_FILE) {
        Some(_) => read(JOINT_FILE)?["image_processor"].take(),
        None => Value::Null,
    };
    let (file, value) = match joint {
        Value::Null => (FILE, read(FILE)?),
        joint => (JOINT_FILE, joint),
    };
    let Value::Object(map) = value else {
        return Err(ModelError::Unfit {
            path: path(file),
            problem: "is no JSON object".to_owned(),
        });
    };
    let config = Config::new(&path(file), map);
    let names: Vec<Value> = classes
        .iter()
        .flat_map(|class| ["", "Fast", "Pil"].map(|end| Value::from(format!("{class}{end}"))))
        .collect();
    config.only("image_processor_type", &names)?;
    Ok(config)
}

/// Keys that change nothing of what is computed here.
const KEYS_WITHOUT_EFFECT: &[&str] = &[
    "crop_size",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_center_crop",
    "do_convert_rgb",
    "do_pad",
    "feature_extractor_type",
    "image_processor_type",
    "image_seq_length",
    "input_data_format",
    "pad_size",
    "processor_class",
    "return_tensors",
    "size_divisor",
    "use_square_size",
];

/// `Qwen2VLImageProcessor`.
#[derive(Clone, Debug)]
pub(crate) struct QwenPictures {
    min_pixels: usize,
    max_pixels: usize,
    pub(super) patch: usize,
    pub(super) merge: usize,
    pub(super) n_times: usize,
    range: Range,
}

impl QwenPictures {
    /// Reads the settings of the processor `component`.
    ///
    /// # Errors
    /// No file, or a setting that is not carried out here.
    pub(crate) fn open(folder: &Folder, component: &str) -> Result<Self, ModelError> {
        Self::read(&settings(folder, component, &["Qwen2VLImageProcessor"])?)
    }

    fn read(config: &Config) -> Result<Self, ModelError> {
        let size = match config.value("size") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(size)) => size.clone(),
            Some(_) => return Err(config.wrong("size", "an object").into()),
        };
        let size = Config::new(config.path(), size);
        let side = |key: &str, old_key: &str, default: usize| -> Result<usize, ModelError> {
            let n = match config.opt_usize(old_key)? {
                Some(n) => n,
                None => size.usize_or(key, default)?,
            };
            config.within(old_key, n, 1..=1 << 28)?;
            Ok(n)
        };
        let min_pixels = side("shortest_edge", "min_pixels", 56 * 56)?;
        let max_pixels = side("longest_edge", "max_pixels", 28 * 28 * 1280)?;
        for key in ["min_pixels", "max_pixels"] {
            // Written into the size by old versions, and the same.
            size.value(key);
        }
        size.deny_unread(&[])?;
        let read = Self {
            min_pixels,
            max_pixels,
            patch: config.usize_or("patch_size", 14)?,
            merge: config.usize_or("merge_size", 2)?,
            n_times: config.usize_or("temporal_patch_size", 2)?,
            range: Range::read(config)?,
        };
        config.within("patch_size", read.patch, 1..=256)?;
        config.within("merge_size", read.merge, 1..=16)?;
        config.within("temporal_patch_size", read.n_times, 1..=16)?;
        config.deny_unread(KEYS_WITHOUT_EFFECT)?;
        Ok(read)
    }

    /// Width and height to which a picture of another size is brought: multiples of a token's side, about the same number of pixels
    /// within the limits.
    ///
    /// # Errors
    /// In words, of a picture that is too narrow.
    pub(crate) fn size(&self, width: u32, height: u32) -> Result<(usize, usize), String> {
        let (w, h) = (f64::from(width.max(1)), f64::from(height.max(1)));
        if w.max(h) / w.min(h) > MAX_ASPECT {
            return Err(format!(
                "a picture of {width} x {height} pixels is too narrow; the longer side may be {MAX_ASPECT} times the shorter"
            ));
        }
        let factor = (self.patch * self.merge) as f64;
        let (min, max) = (self.min_pixels as f64, self.max_pixels as f64);
        let rounded = [w, h].map(|side| (side / factor).round_ties_even() * factor);
        let area = rounded[0] * rounded[1];
        let sides = if area > max {
            let shrink = (h * w / max).sqrt();
            [w, h].map(|side| ((side / shrink / factor).floor() * factor).max(factor))
        } else if area < min {
            let grow = (min / (h * w)).sqrt();
            [w, h].map(|side| (side * grow / factor).ceil() * factor)
        } else {
            rounded
        };
        Ok((sides[0] as usize, sides[1] as usize))
    }

    /// How many tokens of the language model a picture becomes.
    ///
    /// # Errors
    /// As [`QwenPictures::size`].
    pub(crate) fn n_tokens(&self, width: u32, height: u32) -> Result<usize, String> {
        let (width, height) = self.size(width, height)?;
        let side = self.patch * self.merge;
        Ok((width / side) * (height / side))
    }

    /// The numbers of a picture.
    ///
    /// # Errors
    /// As [`QwenPictures::size`].
    pub(crate) fn apply(&self, image: &Image) -> Result<Pixels, String> {
        let (width, height) = self.size(image.width, image.height)?;
        let image = resized_image(image, width as u32, height as u32, Filter::Bicubic);
        Ok(self.range.apply(width, height, &image.rgb))
    }
}

/// `CLIPImageProcessor`.
#[derive(Clone, Debug)]
pub(crate) struct ClipPictures {
    /// The shorter side, or width and height.
    size: ClipSize,
    /// Width and height of the middle that is kept.
    crop: Option<(usize, usize)>,
    range: Range,
}

#[derive(Clone, Copy, Debug)]
enum ClipSize {
    Shortest(usize),
    Both(usize, usize),
}

impl ClipPictures {
    /// Reads the settings of the processor `component`.
    ///
    /// # Errors
    /// No file, or a setting that is not carried out here.
    pub(crate) fn open(folder: &Folder, component: &str) -> Result<Self, ModelError> {
        Self::read(&settings(
            folder,
            component,
            &["CLIPImageProcessor", "CLIPFeatureExtractor"],
        )?)
    }

    fn read(config: &Config) -> Result<Self, ModelError> {
        let both = |key: &str, side: usize| match config.value(key) {
            None | Some(Value::Null) => Ok(ClipSize::Both(side, side)),
            Some(Value::Number(_)) => {
                let side = config.usize(key)?;
                Ok(ClipSize::Both(side, side))
            }
            Some(Value::Object(map)) => {
                let inner = Config::new(config.path(), map.clone());
                let shortest = inner.opt_usize("shortest_edge")?;
                let sides = (inner.opt_usize("width")?, inner.opt_usize("height")?);
                inner.deny_unread(&[])?;
                match (shortest, sides) {
                    (Some(side), (None, None)) => Ok(ClipSize::Shortest(side)),
                    (None, (Some(width), Some(height))) => Ok(ClipSize::Both(width, height)),
                    _ => Err(config.wrong(key, "shortest_edge, or width and height")),
                }
            }
            Some(_) => Err(config.wrong(key, "a number or an object")),
        };
        let size = match (both("size", 0)?, config.value("size")) {
            (_, None | Some(Value::Null)) => ClipSize::Shortest(224),
            // A number is the shorter side here.
            (ClipSize::Both(side, _), Some(Value::Number(_))) => ClipSize::Shortest(side),
            (size, _) => size,
        };
        let crop = match both("crop_size", 224)? {
            ClipSize::Both(width, height) => (width, height),
            ClipSize::Shortest(_) => return Err(config.wrong("crop_size", "width and height").into()),
        };
        let read = Self {
            size,
            crop: config.bool_or("do_center_crop", true)?.then_some(crop),
            range: Range::read(config)?,
        };
        let (sides, key) = match size {
            ClipSize::Shortest(side) => ([side, side], "size"),
            ClipSize::Both(width, height) => ([width, height], "size"),
        };
        for (side, key) in sides
            .into_iter()
            .map(|side| (side, key))
            .chain([(crop.0, "crop_size"), (crop.1, "crop_size")])
        {
            config.within(key, side, 1..=4096)?;
        }
        if read.crop.is_some() && (crop.0 > sides[0] || crop.1 > sides[1]) {
            return Err(config.wrong("crop_size", "no larger than size").into());
        }
        config.deny_unread(KEYS_WITHOUT_EFFECT)?;
        Ok(read)
    }

    /// Width and height of what comes out, if that is always the same.
    pub(crate) fn out_size(&self) -> Option<(usize, usize)> {
        self.crop.or(match self.size {
            ClipSize::Both(width, height) => Some((width, height)),
            ClipSize::Shortest(_) => None,
        })
    }

    /// Width and height before the cut; `None` if it is so narrow that no picture of a sensible size comes out.
    fn resized_size(&self, image: &Image) -> Option<(u64, u64)> {
        const MAX_SIDE: u64 = 1 << 16;
        let (width, height) = match self.size {
            ClipSize::Both(width, height) => (width as u64, height as u64),
            ClipSize::Shortest(side) => {
                let (w, h, side) = (
                    u64::from(image.width.max(1)),
                    u64::from(image.height.max(1)),
                    side as u64,
                );
                let longer = |long: u64, short: u64| (side as f64 * long as f64 / short as f64) as u64;
                if w <= h {
                    (side, longer(h, w))
                } else {
                    (longer(w, h), side)
                }
            }
        };
        (width.max(height) <= MAX_SIDE).then_some((width, height))
    }

    /// Whether there are numbers of a picture.
    pub(crate) fn takes(&self, image: &Image) -> bool {
        self.resized_size(image).is_some()
    }

    /// The numbers of a picture; `None` if it is so narrow that no picture of a sensible size comes out.
    pub(crate) fn apply(&self, image: &Image) -> Option<Pixels> {
        let (width, height) = self.resized_size(image)?;
        let image = resized_image(image, width as u32, height as u32, Filter::Bicubic);
        let (width, height) = (width as usize, height as usize);
        let Some((crop_width, crop_height)) = self.crop else {
            return Some(self.range.apply(width, height, &image.rgb));
        };
        let (left, top) = ((width - crop_width) / 2, (height - crop_height) / 2);
        let rows = image.rgb.chunks_exact(width * 3).skip(top).take(crop_height);
        let kept: Vec<u8> = rows
            .flat_map(|row| row[left * 3..][..crop_width * 3].iter().copied())
            .collect();
        Some(self.range.apply(crop_width, crop_height, &kept))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tables::{config_of, numbers, relative_error, table};

    // `tests/tables/make_pictures.py`.
    const TABLE: &str = "pictures.json";

    /// A picture with edges and gradients: byte `i` is `(i * i / 7 + 31 i) mod 256`.
    fn picture(width: u32, height: u32) -> Image {
        let n = width as usize * height as usize * 3;
        Image::picture(
            width,
            height,
            (0..n).map(|i| ((i * i / 7 + 31 * i) % 256) as u8).collect(),
        )
    }

    #[test]
    fn pictures_become_transformers_numbers() {
        let mut worst: f64 = 0.0;
        for case in table(TABLE)["cases"].as_array().expect("cases") {
            let config = config_of(&case["config"]);
            let [width, height] = ["width", "height"].map(|key| case[key].as_u64().expect("a number") as u32);
            let image = picture(width, height);
            let pixels = match case["kind"].as_str() {
                Some("clip") => ClipPictures::read(&config)
                    .expect("it is read")
                    .apply(&image)
                    .expect("pixels"),
                _ => QwenPictures::read(&config)
                    .expect("it is read")
                    .apply(&image)
                    .expect("pixels"),
            };
            assert_eq!(
                [pixels.height as f64, pixels.width as f64],
                numbers(&case["size"])[..]
            );
            worst = worst.max(relative_error(&pixels.values, &numbers(&case["values"])));
        }
        assert!(worst < 1e-7, "{worst:e}");
    }

    #[test]
    fn sizes_are_transformers_sizes() {
        let table = table(TABLE);
        let pictures = QwenPictures::read(&config_of(&table["sizes_config"])).expect("it is read");
        for row in table["sizes"].as_array().expect("a list") {
            let row = numbers(row);
            let (width, height) = pictures.size(row[0] as u32, row[1] as u32).expect("a size");
            assert_eq!([width as f64, height as f64], row[2..], "{row:?}");
            assert_eq!(
                pictures.n_tokens(row[0] as u32, row[1] as u32),
                Ok(width * height / 784)
            );
        }
        assert!(
            pictures
                .size(201, 1)
                .expect_err("it is narrow")
                .contains("too narrow")
        );
    }

    #[test]
    fn settings_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (r#"{"image_std": [0, 1, 1]}"#, "image_std"),
            (r#"{"image_mean": [0, 1]}"#, "image_mean"),
            (r#"{"patch_size": 0}"#, "patch_size"),
            (r#"{"crop_pct": 0.9}"#, "crop_pct"),
            (r#"{"size": {"height": 3}}"#, "height"),
        ] {
            let value = serde_json::from_str(config).expect("JSON");
            let error = QwenPictures::read(&config_of(&value)).expect_err("it is refused");
            assert!(error.to_string().contains(word), "{error}");
        }
        for (config, word) in [
            (r#"{"size": {"height": 3}}"#, "size"),
            (r#"{"size": 100, "crop_size": 101}"#, "crop_size"),
            (r#"{"crop_size": {"shortest_edge": 3}}"#, "crop_size"),
        ] {
            let value = serde_json::from_str(config).expect("JSON");
            let error = ClipPictures::read(&config_of(&value)).expect_err("it is refused");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
