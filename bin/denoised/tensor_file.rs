//! Host tensors in safetensors files: a case's reference in, our tensors out.

use crate::compare::Tensors;
use crate::error::Error;
use crate::output;
use denoised_checkpoint::{FileDType, RawTensor, SafeTensors};
use denoised_tensor::SourceDType;
use denoised_types::{NamedTensor, TensorDType};
use serde_json::{Map, json};
use std::io::Write;
use std::path::Path;

/// Reads all tensors of the file at `path`.
///
/// # Errors
/// The file is absent or damaged, or holds a dtype that no reference uses.
pub(crate) fn read(path: &Path) -> Result<Tensors, Error> {
    let file = SafeTensors::open(path).map_err(|error| Error::usage(with_sources(&error)))?;
    let mut tensors = Tensors::new();
    for name in file.tensors().keys() {
        let raw = file
            .raw(name)
            .map_err(|error| Error::usage(with_sources(&error)))?;
        let tensor = named(name, &raw).ok_or_else(|| {
            Error::usage(format!(
                "{}: tensor {name} is {}; a reference holds F32, I64, I32, U8 and BOOL",
                path.display(),
                raw.dtype
            ))
        })?;
        tensors.insert(name.clone(), tensor);
    }
    Ok(tensors)
}

fn named(name: &str, raw: &RawTensor<'_>) -> Option<NamedTensor> {
    let (dtype, data) = match &raw.dtype {
        FileDType::Float(SourceDType::F32) => (TensorDType::F32, raw.bytes.to_vec()),
        FileDType::Float(SourceDType::F64 | SourceDType::F16 | SourceDType::BF16) => return None,
        FileDType::Other(other) => match other.as_str() {
            "I64" => (TensorDType::I64, raw.bytes.to_vec()),
            "I32" => {
                let (values, _) = raw.bytes.as_chunks::<4>();
                let wide = values
                    .iter()
                    .flat_map(|&value| i64::from(i32::from_le_bytes(value)).to_le_bytes());
                (TensorDType::I64, wide.collect())
            }
            "U8" | "BOOL" => (TensorDType::U8, raw.bytes.to_vec()),
            _ => return None,
        },
    };
    Some(NamedTensor {
        name: name.to_owned(),
        dtype,
        shape: raw.shape.iter().map(|&extent| extent as u64).collect(),
        data,
    })
}

/// Writes `tensors` to the file at `path`, whole or not at all.
///
/// # Errors
/// [`Error::Output`] naming the file.
pub(crate) fn write(path: &Path, tensors: &Tensors) -> Result<(), Error> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, tensor) in tensors {
        let dtype = match tensor.dtype {
            TensorDType::F32 => "F32",
            TensorDType::I64 => "I64",
            TensorDType::U8 => "U8",
        };
        let begin = end;
        end += tensor.data.len();
        let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // The format pads the header with spaces so that the elements are aligned.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    output::write_file(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        tensors
            .values()
            .try_for_each(|tensor| file.write_all(&tensor.data))
    })
}

/// An error and everything that caused it, in one line.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump.safetensors");
        let list = [
            NamedTensor::from_f32("image", &[1, 3], &[0.0, -1.5, 1e-30]),
            NamedTensor::from_i64("token_ids", &[1, 2], &[49406, -1]),
            NamedTensor {
                name: "odd".to_owned(),
                dtype: TensorDType::U8,
                shape: vec![3],
                data: vec![1, 2, 3],
            },
            NamedTensor::from_f32("empty", &[0, 3], &[]),
        ];
        let tensors: Tensors = list
            .into_iter()
            .map(|tensor| (tensor.name.clone(), tensor))
            .collect();
        write(&path, &tensors).unwrap();
        assert_eq!(read(&path).unwrap(), tensors);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reference.safetensors");
        assert!(
            read(&path)
                .unwrap_err()
                .to_string()
                .contains("reference.safetensors")
        );
        std::fs::write(&path, [9, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap();
        let message = read(&path).unwrap_err().to_string();
        assert!(message.contains("truncated"), "{message}");
    }
}
