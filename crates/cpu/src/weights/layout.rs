//! Where each weight lies in a block, and the header that says for what the block was made.
//!
//! R1. The layout follows from the specs, the instruction set and the options alone, so that whoever takes the block finds everything
//!     without reading an offset from it.

use crate::{
    Isa,
    gemm::Panels,
    memory::ALIGN,
    simd::{Simd, with_isa},
    winograd,
};
use denoised_tensor::{Result, TensorError, WeightKind, WeightSpec, check};
use std::sync::Arc;

/// First bytes of a block.
const MAGIC: [u8; 8] = *b"dnsd-cpu";

/// Counts the changes of the layout; blocks of another version are refused.
const LAYOUT_VERSION: u32 = 1;

/// Bytes of the header: magic, version, instruction set, options, total length, fingerprint; zeros up to a cache line.
pub(super) const HEADER_BYTES: usize = 64;

/// Most elements of one weight: with the padding of a panel and 36 matrices its bytes still fit in 64 bits many times over.
const MAX_ELEMENTS: usize = 1 << 40;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// f32 in row-major order.
    Plain,
    /// Panels of `n` columns of depth `k`.
    Packed { n: usize, k: usize },
    /// 36 times panels.
    Winograd { n: usize, k: usize },
}

/// One weight's place.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) kind: WeightKind,
    pub(super) shape: Arc<[usize]>,
    pub(super) form: Form,
    /// In bytes from the start of the block.
    pub(super) offset: usize,
    pub(super) len_bytes: usize,
}

/// Where everything lies (R1).
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) entries: Vec<Entry>,
    pub(super) total_bytes: usize,
    pub(super) header: [u8; HEADER_BYTES],
}

impl Layout {
    pub(super) fn new(specs: &[WeightSpec], isa: Isa, use_winograd: bool) -> Result<Self> {
        let (nr, lanes) = with_isa!(isa, S => (S::NR, S::LANES));
        let mut end = HEADER_BYTES;
        let mut entries = Vec::with_capacity(specs.len());
        for spec in specs {
            let form = form_of(spec, use_winograd)?;
            let n_elements = match form {
                Form::Plain => spec.shape.iter().product(),
                Form::Packed { n, k } => Panels::n_elements(n, k, nr, lanes),
                Form::Winograd { n, k } => winograd::N_POSITIONS * Panels::n_elements(n, k, nr, lanes),
            };
            let offset = end.next_multiple_of(ALIGN);
            let len_bytes = n_elements * 4;
            end = offset
                .checked_add(len_bytes)
                .filter(|end| *end <= isize::MAX as usize)
                .ok_or_else(|| TensorError::OutOfMemory {
                    what: "the weights".to_owned(),
                    needed_bytes: u64::MAX,
                    available_bytes: 0,
                })?;
            entries.push(Entry {
                kind: spec.kind,
                shape: spec.shape.as_slice().into(),
                form,
                offset,
                len_bytes,
            });
        }
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&isa_id(isa).to_le_bytes());
        header[16..20].copy_from_slice(&u32::from(use_winograd).to_le_bytes());
        header[24..32].copy_from_slice(&(end as u64).to_le_bytes());
        header[32..48].copy_from_slice(&fingerprint(specs).to_le_bytes());
        Ok(Self {
            entries,
            total_bytes: end,
            header,
        })
    }
}

/// Stable numbers: they are in the header.
fn isa_id(isa: Isa) -> u32 {
    match isa {
        Isa::Portable => 0,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => 1,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => 2,
    }
}

/// FNV-1a of 128 bits over all that a spec says.
fn fingerprint(specs: &[WeightSpec]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut eat = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    };
    for spec in specs {
        let (kind, stride) = match spec.kind {
            WeightKind::Matrix => (0u64, 0),
            WeightKind::Conv { stride } => (1, stride as u64),
            WeightKind::Vector => (2, 0),
            WeightKind::Table => (3, 0),
        };
        for number in [kind, stride, spec.shape.len() as u64, spec.sources.len() as u64] {
            eat(&number.to_le_bytes());
        }
        for &extent in &spec.shape {
            eat(&(extent as u64).to_le_bytes());
        }
        for source in &spec.sources {
            eat(&(source.len() as u64).to_le_bytes());
            eat(source.as_bytes());
        }
    }
    hash
}

fn form_of(spec: &WeightSpec, use_winograd: bool) -> Result<Form> {
    let n_elements = spec
        .shape
        .iter()
        .try_fold(1usize, |n, &extent| n.checked_mul(extent));
    let is_sound = n_elements.is_some_and(|n| n > 0 && n <= MAX_ELEMENTS) && !spec.sources.is_empty();
    let form = match (spec.kind, &*spec.shape) {
        _ if !is_sound => None,
        (WeightKind::Matrix, &[n, k]) => Some(Form::Packed { n, k }),
        (WeightKind::Conv { stride }, &[n, c_in, ..]) if spec.shape.len() == 4 && stride > 0 => {
            if use_winograd && winograd::pays(&spec.shape, stride) {
                Some(Form::Winograd { n, k: c_in })
            } else {
                Some(Form::Packed {
                    n,
                    k: spec.shape[1..].iter().product(),
                })
            }
        }
        (WeightKind::Vector, _) | (WeightKind::Table, &[_, _]) => Some(Form::Plain),
        _ => None,
    };
    form.ok_or_else(|| TensorError::Weight {
        name: check::weights::spec_name(spec),
        detail: format!("{:?} is no shape of a {:?}", spec.shape, spec.kind),
    })
}
