//! One safetensors file: 8 bytes of header length, a JSON header, the elements.
//!
//! The header is parsed here and not by the `safetensors` crate, because that crate keeps the last of duplicate names,
//! refuses a whole file for one tensor of an unknown dtype, and says neither which tensors overlap nor how many bytes a
//! truncated download lacks. Tests hold the two against each other.
//!
//! The file is mapped and must not change meanwhile; [`denoised_os::mapfile::MappedFile`] says what happens if it does.
//! What is done about it: the length is compared with the header when the file is opened, and the pages of a tensor are
//! read before its bytes are handed out, so that a file cut in between is an error and no SIGBUS. Pages handed out long
//! ago are taken out of memory again, so that loading does not hold the file beside what is made of it.

use crate::{CheckpointError, error::shown, json};
use denoised_os::mapfile::MappedFile;
use denoised_tensor::{SourceDType, SourceError, SourceTensor, WeightSource};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    fmt,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// Bytes before the header.
const LENGTH_BYTES: u64 = 8;
/// Longest header that is read: 300 000 tensors; the format itself allows 100 MB.
const HEADER_LIMIT_BYTES: u64 = 32 << 20;
/// Most extents of one tensor; torch allows 64, weights have at most 5.
const RANK_LIMIT: usize = 16;
/// The name that stands for no tensor but for an object of strings.
const METADATA: &str = "__metadata__";
/// How many bytes of tensors handed out stay mapped to memory, besides the latest one.
const RESIDENT_BYTES: usize = 64 << 20;

/// Element type as a file spells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileDType {
    /// One that weights can have.
    Float(SourceDType),
    /// Any other: `I64`, `BOOL`, `F8_E4M3`, or one that is not known at all.
    Other(String),
}

impl FileDType {
    /// Bits of one element; `None` for a dtype that is not known.
    pub fn bits(&self) -> Option<u32> {
        match self {
            Self::Float(SourceDType::F64) => Some(64),
            Self::Float(SourceDType::F32) => Some(32),
            Self::Float(SourceDType::F16 | SourceDType::BF16) => Some(16),
            Self::Other(name) => OTHER_BITS
                .iter()
                .find(|(known, _)| known == name)
                .map(|(_, bits)| *bits),
        }
    }
}

impl From<&str> for FileDType {
    fn from(name: &str) -> Self {
        match name {
            "F64" => Self::Float(SourceDType::F64),
            "F32" => Self::Float(SourceDType::F32),
            "F16" => Self::Float(SourceDType::F16),
            "BF16" => Self::Float(SourceDType::BF16),
            other => Self::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for FileDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(float) => write!(f, "{float:?}"),
            Self::Other(name) => f.write_str(&shown(name)),
        }
    }
}

/// The format's other dtypes and their bits, as in version 0.8 of the `safetensors` crate.
const OTHER_BITS: [(&str, u32); 18] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("I32", 32),
    ("U32", 32),
    ("C64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// What the header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: FileDType,
    /// Extents.
    pub shape: Vec<usize>,
    /// Where its bytes are, counted from the end of the header.
    pub range: Range<usize>,
}

/// A tensor of any dtype that is known: dense, row-major, little-endian, not aligned.
#[derive(Clone, Debug)]
pub struct RawTensor<'a> {
    /// Element type.
    pub dtype: FileDType,
    /// Extents.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: &'a [u8],
}

/// In what way a file is no safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// Not even the header's length is there.
    #[error("it has {size_bytes} bytes and is truncated: {} bytes are missing before the header", LENGTH_BYTES - size_bytes)]
    NoLength {
        /// The file's size.
        size_bytes: u64,
    },
    /// The header's length is absurd.
    #[error("its header would have {header_bytes} bytes (1 to {HEADER_LIMIT_BYTES} are read)")]
    HeaderLength {
        /// As the file says.
        header_bytes: u64,
    },
    /// The file ends within the header.
    #[error(
        "it is truncated: {missing_bytes} bytes are missing at the end of its header of {header_bytes} bytes"
    )]
    HeaderTruncated {
        /// As the file says.
        header_bytes: u64,
        /// What is not there.
        missing_bytes: u64,
    },
    /// The header is no JSON object of tensors.
    #[error("its header is not valid")]
    Header(#[source] serde_json::Error),
    /// A tensor has too many extents.
    #[error("tensor `{name}` has {n_dims} dimensions (at most {RANK_LIMIT} are read)")]
    Rank {
        /// The tensor.
        name: String,
        /// Their number.
        n_dims: usize,
    },
    /// A tensor ends before it begins, or so far away that no file reaches there.
    #[error("tensor `{name}` has impossible offsets {begin}..{end}")]
    Offsets {
        /// The tensor.
        name: String,
        /// First byte.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// Shape and dtype need another number of bytes than there are between the offsets.
    #[error(
        "tensor `{name}` of shape {shape:?} and dtype {dtype} does not take the {range_bytes} bytes of its offsets"
    )]
    Size {
        /// The tensor.
        name: String,
        /// Its extents.
        shape: Vec<u64>,
        /// Its dtype.
        dtype: FileDType,
        /// Bytes between its offsets.
        range_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor `{name}` overlaps the one before it by {overlap_bytes} bytes")]
    Overlap {
        /// The later tensor.
        name: String,
        /// Shared bytes.
        overlap_bytes: u64,
    },
    /// Bytes that belong to no tensor.
    #[error("{hole_bytes} bytes before tensor `{name}` belong to no tensor")]
    Hole {
        /// The tensor after the hole.
        name: String,
        /// Its size.
        hole_bytes: u64,
    },
    /// The file ends within the elements.
    #[error("it is truncated: {missing_bytes} of {expected_bytes} bytes are missing at its end")]
    Truncated {
        /// What is not there.
        missing_bytes: u64,
        /// The size that the header asks for.
        expected_bytes: u64,
    },
    /// The file goes on after the last tensor.
    #[error("{extra_bytes} bytes follow its last tensor")]
    Trailing {
        /// Their number.
        extra_bytes: u64,
    },
}

/// A mapped file and what its header says.
#[derive(Debug)]
pub struct SafeTensors {
    path: PathBuf,
    map: MappedFile,
    data_start: usize,
    tensors: BTreeMap<String, TensorInfo>,
    resident: Mutex<Resident>,
}

/// Ranges of the file that were handed out and are still mapped to memory, the oldest first.
#[derive(Debug, Default)]
struct Resident {
    ranges: VecDeque<Range<usize>>,
    n_bytes: usize,
}

/// A tensor as the header writes it.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// All tensors of a header, each name once.
struct Header(BTreeMap<String, HeaderTensor>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Header, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut has_metadata = false;
                while let Some(name) = entries.next_key::<String>()? {
                    let within = |error: A::Error| A::Error::custom(format!("`{}`: {error}", shown(&name)));
                    let is_metadata = name == METADATA;
                    if tensors.contains_key(&name) || (is_metadata && has_metadata) {
                        return Err(A::Error::custom(format!("`{}` stands there twice", shown(&name))));
                    }
                    if is_metadata {
                        has_metadata = true;
                        entries
                            .next_value::<Option<BTreeMap<String, String>>>()
                            .map_err(within)?;
                    } else {
                        let tensor = entries.next_value::<HeaderTensor>().map_err(within)?;
                        tensors.insert(name, tensor);
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl SafeTensors {
    /// Maps the file at `path` and checks its whole header against its size; no element is read.
    ///
    /// # Errors
    /// The file is absent or unreadable, not a safetensors file (pickles and git-lfs pointers under a wrong name are told
    /// apart), truncated or otherwise damaged.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        json::require_regular(path)?;
        let map = MappedFile::open(path).map_err(|source| CheckpointError::Map {
            path: path.to_owned(),
            source,
        })?;
        if map.starts_with(json::LFS_START) {
            return Err(CheckpointError::LfsPointer {
                path: path.to_owned(),
            });
        }
        if looks_like_pickle(&map) {
            return Err(CheckpointError::Pickle {
                path: path.to_owned(),
            });
        }
        let (data_start, tensors) = read_header(&map).map_err(|source| CheckpointError::Format {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            map,
            data_start,
            tensors,
            resident: Mutex::default(),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors by name, sorted.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Bytes of all elements.
    pub fn data_bytes(&self) -> u64 {
        (self.map.len() - self.data_start) as u64
    }

    /// The tensor called `name`, whatever its dtype.
    ///
    /// # Errors
    /// There is none, its dtype is not known, or its bytes cannot be read any more.
    pub fn raw(&self, name: &str) -> Result<RawTensor<'_>, CheckpointError> {
        let info = self.info(name)?;
        if info.dtype.bits().is_none() {
            return Err(self.dtype_error(name, info));
        }
        Ok(RawTensor {
            dtype: info.dtype.clone(),
            shape: info.shape.clone(),
            bytes: self.bytes(name, info)?,
        })
    }

    /// The tensor called `name`, as a weight.
    ///
    /// # Errors
    /// There is none, its dtype is no float, or its bytes cannot be read any more.
    pub fn weight(&self, name: &str) -> Result<SourceTensor<'_>, CheckpointError> {
        let (dtype, info) = self.float_info(name)?;
        Ok(SourceTensor {
            dtype,
            shape: info.shape.clone(),
            bytes: Cow::Borrowed(self.bytes(name, info)?),
        })
    }

    /// Element type and extents of the tensor called `name`, without reading it.
    ///
    /// # Errors
    /// There is none, or its dtype is no float.
    pub fn weight_layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), CheckpointError> {
        let (dtype, info) = self.float_info(name)?;
        Ok((dtype, info.shape.clone()))
    }

    fn float_info(&self, name: &str) -> Result<(SourceDType, &TensorInfo), CheckpointError> {
        let info = self.info(name)?;
        match info.dtype {
            FileDType::Float(dtype) => Ok((dtype, info)),
            FileDType::Other(_) => Err(self.dtype_error(name, info)),
        }
    }

    pub(crate) fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        let absent = || CheckpointError::NoTensor {
            path: self.path.clone(),
            name: shown(name),
        };
        self.tensors.get(name).ok_or_else(absent)
    }

    pub(crate) fn dtype_error(&self, name: &str, info: &TensorInfo) -> CheckpointError {
        CheckpointError::DType {
            path: self.path.clone(),
            name: shown(name),
            dtype: info.dtype.to_string(),
        }
    }

    fn bytes(&self, name: &str, info: &TensorInfo) -> Result<&[u8], CheckpointError> {
        let range = self.data_start + info.range.start..self.data_start + info.range.end;
        self.map.will_need(range.clone());
        self.map
            .populate(range.clone())
            .map_err(|source| CheckpointError::Unreadable {
                path: self.path.clone(),
                name: shown(name),
                source,
            })?;
        self.note_resident(range.clone());
        Ok(&self.map[range])
    }

    /// Lets go of the oldest ranges. Who still reads them reads them again from the page cache, so this costs time at
    /// worst.
    fn note_resident(&self, range: Range<usize>) {
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        while resident.n_bytes > RESIDENT_BYTES {
            let Some(oldest) = resident.ranges.pop_front() else {
                break;
            };
            resident.n_bytes -= oldest.len();
            self.map.evict(oldest);
        }
        resident.n_bytes += range.len();
        resident.ranges.push_back(range);
    }
}

impl WeightSource for SafeTensors {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        Ok(self.weight_layout(name)?)
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        Ok(self.weight(name)?)
    }
}

/// A zip archive (torch since 1.6) or a bare pickle stream of protocol 2 to 5 (torch before that). A header of 8 MB could
/// have the same length bytes, but begins with a brace.
fn looks_like_pickle(bytes: &[u8]) -> bool {
    let is_zip = bytes.starts_with(b"PK\x03\x04");
    let is_stream = matches!(bytes, [0x80, 2..=5, b'\x8a' | b'\x95' | b'}' | b'c', ..]);
    is_zip || (is_stream && bytes.get(8) != Some(&b'{'))
}

/// The position of the first element and all tensors of a file whose content is `bytes`.
fn read_header(bytes: &[u8]) -> Result<(usize, BTreeMap<String, TensorInfo>), FormatError> {
    let size_bytes = bytes.len() as u64;
    let Some((length, rest)) = bytes.split_first_chunk::<{ LENGTH_BYTES as usize }>() else {
        return Err(FormatError::NoLength { size_bytes });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if !(1..=HEADER_LIMIT_BYTES).contains(&header_bytes) {
        return Err(FormatError::HeaderLength { header_bytes });
    }
    let data_start = LENGTH_BYTES + header_bytes;
    let Some(header) = rest.get(..header_bytes as usize) else {
        return Err(FormatError::HeaderTruncated {
            header_bytes,
            missing_bytes: data_start - size_bytes,
        });
    };
    let Header(tensors) = serde_json::from_slice(header).map_err(FormatError::Header)?;
    let mut tensors: Vec<(String, HeaderTensor)> = tensors.into_iter().collect();
    let data_end = check_coverage(&mut tensors)?;
    let expected_bytes = data_start.saturating_add(data_end);
    if size_bytes < expected_bytes {
        return Err(FormatError::Truncated {
            missing_bytes: expected_bytes - size_bytes,
            expected_bytes,
        });
    }
    if size_bytes > expected_bytes {
        return Err(FormatError::Trailing {
            extra_bytes: size_bytes - expected_bytes,
        });
    }
    // All offsets lie in a file that is mapped and no product of extents overflows, so everything fits `usize`.
    let tensors = tensors.into_iter().map(|(name, tensor)| {
        let (begin, end) = tensor.data_offsets;
        let info = TensorInfo {
            dtype: FileDType::from(tensor.dtype.as_str()),
            shape: tensor.shape.iter().map(|&extent| extent as usize).collect(),
            range: begin as usize..end as usize,
        };
        (name, info)
    });
    Ok((data_start as usize, tensors.collect()))
}

/// Sorts tensors by offset and checks that each has the bytes it needs and that together they cover `0..result`.
fn check_coverage(tensors: &mut [(String, HeaderTensor)]) -> Result<u64, FormatError> {
    tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
    let mut covered_end = 0;
    for (name, tensor) in tensors {
        let name = || shown(name);
        let (begin, end) = tensor.data_offsets;
        if tensor.shape.len() > RANK_LIMIT {
            return Err(FormatError::Rank {
                name: name(),
                n_dims: tensor.shape.len(),
            });
        }
        if begin > end || end > i64::MAX as u64 {
            return Err(FormatError::Offsets {
                name: name(),
                begin,
                end,
            });
        }
        let dtype = FileDType::from(tensor.dtype.as_str());
        if !takes_bytes(&dtype, &tensor.shape, end - begin) {
            let shape = tensor.shape.clone();
            return Err(FormatError::Size {
                name: name(),
                shape,
                dtype,
                range_bytes: end - begin,
            });
        }
        if begin < covered_end {
            return Err(FormatError::Overlap {
                name: name(),
                overlap_bytes: covered_end.min(end) - begin,
            });
        }
        if begin > covered_end {
            return Err(FormatError::Hole {
                name: name(),
                hole_bytes: begin - covered_end,
            });
        }
        covered_end = end;
    }
    Ok(covered_end)
}

/// Whether `dtype` and `shape` need exactly `n_bytes`, and no product of extents overflows even without those that are 0.
fn takes_bytes(dtype: &FileDType, shape: &[u64], n_bytes: u64) -> bool {
    let product = shape
        .iter()
        .try_fold(1u64, |product, &extent| product.checked_mul(extent.max(1)));
    let Some(product) = product.filter(|&product| product <= i64::MAX as u64) else {
        return false;
    };
    let n_elements = if shape.contains(&0) { 0 } else { product };
    match dtype.bits() {
        Some(bits) => n_elements.checked_mul(u64::from(bits)) == n_bytes.checked_mul(8),
        // The size of an unknown dtype cannot be judged; such a tensor is never handed out.
        None => true,
    }
}
