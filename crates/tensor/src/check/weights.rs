//! Whether a checkpoint has what a model asks for.

use crate::{Result, SourceTensor, TensorError, WeightKind, WeightSource, WeightSpec};

/// Offenders named in an error; the rest is counted.
const MAX_NAMED: usize = 10;

/// What errors call a spec: the names of its tensors.
pub fn spec_name(spec: &WeightSpec) -> String {
    spec.sources.join(" + ")
}

/// Checks that all tensors are there with their shapes; names all that are not, up to a limit.
///
/// # Errors
/// [`TensorError::Weight`].
pub fn sources(specs: &[WeightSpec], source: &dyn WeightSource) -> Result<()> {
    let mut offenders: Vec<(String, String)> = Vec::new();
    for spec in specs {
        let mut n_rows = 0usize;
        let mut are_sound = true;
        for name in &spec.sources {
            let rows = source.layout(name).map_err(|error| error.0);
            match rows.and_then(|(_, shape)| rows_of(spec, &shape)) {
                Ok(rows) => n_rows = n_rows.saturating_add(rows),
                Err(problem) => {
                    offenders.push((name.clone(), problem));
                    are_sound = false;
                }
            }
        }
        let expected = spec.shape.first().copied().unwrap_or(1);
        if are_sound && n_rows != expected {
            let mut shape = spec.shape.clone();
            if let Some(first) = shape.first_mut() {
                *first = n_rows;
            }
            let problem = format!("shape {shape:?}, expected {:?}", spec.shape);
            offenders.push((spec_name(spec), problem));
        }
    }
    let mut offenders = offenders.into_iter();
    let Some((name, mut detail)) = offenders.next() else {
        return Ok(());
    };
    for (name, other) in offenders.by_ref().take(MAX_NAMED - 1) {
        detail.push_str(&format!("; {name}: {other}"));
    }
    match offenders.count() {
        0 => {}
        n_more => detail.push_str(&format!("; and {n_more} more")),
    }
    Err(TensorError::Weight { name, detail })
}

/// Rows of `spec` that the tensor called `name` fills from `first_row` on. What [`sources`] was told need not be what is there now, so
/// shape, room and length are checked once more.
///
/// # Errors
/// [`TensorError::Weight`].
pub fn piece(spec: &WeightSpec, name: &str, tensor: &SourceTensor<'_>, first_row: usize) -> Result<usize> {
    let refuse = |detail| TensorError::Weight {
        name: name.to_owned(),
        detail,
    };
    let n_rows = rows_of(spec, &tensor.shape).map_err(refuse)?;
    let row_len: usize = spec.shape.iter().skip(1).product();
    let expected = spec.shape.first().copied().unwrap_or(1);
    let has_room = first_row.checked_add(n_rows).is_some_and(|end| end <= expected);
    let n_elements = n_rows.checked_mul(row_len);
    let n_bytes = n_elements.and_then(|n| n.checked_mul(tensor.dtype.size_bytes()));
    if !has_room || n_bytes != Some(tensor.bytes.len()) {
        let detail = format!("{} bytes for shape {:?}", tensor.bytes.len(), tensor.shape);
        return Err(refuse(detail));
    }
    Ok(n_rows)
}

/// Rows of `spec` that a tensor of `shape` fills. The kernel of a convolution whose patches do not overlap is a matrix, and a
/// factor per channel that broadcasts over positions a vector.
///
/// # Errors
/// In words, why it cannot be a part of it.
pub fn rows_of(spec: &WeightSpec, shape: &[usize]) -> Result<usize, String> {
    let row_len = |extents: &[usize]| {
        extents
            .iter()
            .try_fold(1usize, |n, extent| n.checked_mul(*extent))
    };
    let fits = match (spec.kind, shape, &spec.shape[..]) {
        (WeightKind::Matrix, [_, of_row @ ..], [_, k]) if of_row.len() > 1 => row_len(of_row) == Some(*k),
        (WeightKind::Vector, [_, of_row @ ..], [_]) => of_row.iter().all(|extent| *extent == 1),
        _ => shape.len() == spec.shape.len() && shape.get(1..) == spec.shape.get(1..),
    };
    if fits {
        return Ok(shape.first().copied().unwrap_or(1));
    }
    let part = match spec.sources.len() {
        1 => "",
        _ => "a part along dimension 0 of ",
    };
    Err(format!("shape {shape:?}, expected {part}{:?}", spec.shape))
}
