//! The weights of one component, and of several together.
//!
//! Knows which files a component may consist of (one, shards, precision variants), not what its tensors mean.

use crate::{
    CheckpointError, NameList, Reading, SafeTensors, TensorInfo,
    error::shown,
    json::{self, UniqueMap},
    safetensors::FileDType,
};
use denoised_tensor::{
    SourceDType, SourceError, SourceTensor, WeightSource, WeightSpec, check::weights::rows_of,
};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::{Component as PathComponent, Path, PathBuf},
};

/// Most files of one component; the largest models have about a hundred.
const SHARD_LIMIT: usize = 1024;
/// Most entries of a folder that are looked at to say what is there.
const LISTED_ENTRIES: usize = 1000;
/// How many tensors of another shape a message shows.
const SHOWN_MISFITS: usize = 4;
/// Precisions that are taken when the plain files are missing, in this order.
const VARIANTS: [&str; 2] = ["fp16", "bf16"];
/// Extensions of pickle files.
const PICKLES: [&str; 4] = ["bin", "ckpt", "pt", "pth"];

/// The weight files of one component as one view, names as in the files.
#[derive(Debug)]
pub struct Component {
    name: String,
    folder: PathBuf,
    variant: Option<&'static str>,
    files: Vec<SafeTensors>,
}

impl Component {
    /// Finds and checks the weight files in `folder`: `<stem>.safetensors`, else the shards of
    /// `<stem>.safetensors.index.json`, for each of `stems` in order; where all of these are missing, the same with the
    /// variant `fp16`, then `bf16`. The choice is per component, as diffusers allows.
    ///
    /// # Errors
    /// There are none (a pickle in their place is told apart), the index contradicts its shards or leads out of the
    /// folder, or a file is damaged.
    pub fn open(name: &str, folder: &Path, stems: &[&str]) -> Result<Self, CheckpointError> {
        let found = |variant, files| Self {
            name: name.to_owned(),
            folder: folder.to_owned(),
            variant,
            files,
        };
        for variant in [None].into_iter().chain(VARIANTS.map(Some)) {
            for stem in stems {
                let infix = variant.map_or(String::new(), |variant| format!(".{variant}"));
                let single = folder.join(format!("{stem}{infix}.safetensors"));
                if exists(&single) {
                    return Ok(found(variant, vec![SafeTensors::open(&single)?]));
                }
                let index = folder.join(format!("{stem}.safetensors.index{infix}.json"));
                if exists(&index) {
                    return Ok(found(variant, open_shards(folder, &index)?));
                }
            }
        }
        Err(no_weights(folder, stems))
    }

    /// What `model_index.json` calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where its files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The precision infix of the files that were taken, if the plain ones are missing.
    pub fn variant(&self) -> Option<&'static str> {
        self.variant
    }

    /// The files that were taken.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(SafeTensors::path)
    }

    /// All tensor names, sorted within each file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files
            .iter()
            .flat_map(|file| file.tensors().keys().map(String::as_str))
    }

    /// What is known of the tensor called `name`.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.files.iter().find_map(|file| file.tensors().get(name))
    }

    /// Extents of the tensor called `name`.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.info(name).map(|info| info.shape.as_slice())
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(SafeTensors::data_bytes).sum()
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// There is none, its dtype is no float, or its bytes cannot be read any more.
    pub fn weight(&self, name: &str) -> Result<SourceTensor<'_>, CheckpointError> {
        self.file_of(name)?.weight(name)
    }

    /// Element type and extents of the tensor called `name`, without reading it.
    ///
    /// # Errors
    /// There is none, or its dtype is no float.
    pub fn weight_layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), CheckpointError> {
        self.file_of(name)?.weight_layout(name)
    }

    fn file_of(&self, name: &str) -> Result<&SafeTensors, CheckpointError> {
        let file = self.files.iter().find(|file| file.tensors().contains_key(name));
        file.ok_or_else(|| CheckpointError::NoTensor {
            path: self.folder.clone(),
            name: shown(name),
        })
    }

    /// Tensors of the files that are not in `used`.
    pub fn unused_names(&self, used: &HashSet<&str>) -> Vec<&str> {
        self.names().filter(|name| !used.contains(name)).collect()
    }
}

impl WeightSource for Component {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        Ok(self.weight_layout(name)?)
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        Ok(self.weight(name)?)
    }
}

/// Several components as one view, in which a tensor is called `<component>/<name in the file>`. As a source of weights it knows the
/// suffixes of [`Reading`].
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    components: Vec<Component>,
}

impl Weights {
    /// Joins `components`, whose names differ; `path` is for messages.
    pub fn new(path: &Path, components: Vec<Component>) -> Self {
        Self {
            path: path.to_owned(),
            components,
        }
    }

    /// The parts.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// All tensor names.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let full = |component: &Component, name: &str| format!("{}/{name}", component.name);
        self.components
            .iter()
            .flat_map(move |component| component.names().map(move |name| full(component, name)))
    }

    /// What is known of the tensor called `name`.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        let (component, name) = self.find(name)?;
        component.info(name)
    }

    /// Extents of the tensor called `name`.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.info(name).map(|info| info.shape.as_slice())
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.components.iter().map(Component::total_bytes).sum()
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// There is none, its dtype is no float, or its bytes cannot be read any more.
    pub fn weight(&self, name: &str) -> Result<SourceTensor<'_>, CheckpointError> {
        let (name, reading) = Reading::of(name);
        let (component, name) = self.find_or_refuse(name)?;
        Ok(reading.tensor(component.weight(name)?))
    }

    /// Element type and extents of the tensor called `name`, without reading it.
    ///
    /// # Errors
    /// There is none, or its dtype is no float.
    pub fn weight_layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), CheckpointError> {
        let (name, reading) = Reading::of(name);
        let (component, name) = self.find_or_refuse(name)?;
        let (dtype, shape) = component.weight_layout(name)?;
        Ok((dtype, reading.shape(&shape)))
    }

    /// Tensors of the files that are not in `used`.
    pub fn unused_names(&self, used: &HashSet<&str>) -> Vec<String> {
        self.names()
            .filter(|name| !used.contains(name.as_str()))
            .collect()
    }

    /// Compares the files with what a model declares, without reading an element: every source is there, is a float and
    /// has the shape asked for, and every tensor is asked for.
    ///
    /// `may_be_unused` excuses tensors that no spec names. An entry is a whole name, or begins or ends with `*` for
    /// "any text".
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] with everything that does not fit, not only the first.
    pub fn check(&self, specs: &[WeightSpec], may_be_unused: &[&str]) -> Result<(), CheckpointError> {
        let mut missing = BTreeSet::new();
        let mut misfits = Vec::new();
        for spec in specs {
            let mut shapes = Vec::new();
            for name in &spec.sources {
                let (name, reading) = Reading::of(name);
                match self.info(name) {
                    None => {
                        missing.insert(name);
                    }
                    Some(info) if !matches!(info.dtype, FileDType::Float(_)) => {
                        misfits.push(format!("`{name}` has dtype {}, which is no float", info.dtype));
                    }
                    Some(info) => shapes.push(reading.shape(&info.shape)),
                }
            }
            if shapes.len() == spec.sources.len() && !fits(spec, &shapes) {
                let found: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
                let sources = spec.sources.join("` + `");
                misfits.push(format!(
                    "`{sources}` has shape {}, the model needs {:?}",
                    found.join(" + "),
                    spec.shape
                ));
            }
        }
        let used = specs
            .iter()
            .flat_map(|spec| &spec.sources)
            .map(|name| Reading::of(name).0)
            .collect();
        let mut unused = self.unused_names(&used);
        unused.retain(|name| !may_be_unused.iter().any(|pattern| matches(pattern, name)));

        let mut problems = Vec::new();
        let missing: NameList = missing.into_iter().collect();
        if !missing.0.is_empty() {
            problems.push(format!("missing ({}): {missing}", missing.0.len()));
        }
        if !misfits.is_empty() {
            let first = misfits
                .iter()
                .take(SHOWN_MISFITS)
                .map(String::as_str)
                .collect::<Vec<_>>();
            problems.push(format!("not fitting ({}): {}", misfits.len(), first.join(", ")));
        }
        let unused: NameList = unused.into_iter().collect();
        if !unused.0.is_empty() {
            problems.push(format!(
                "in the files but not in the model ({}): {unused}",
                unused.0.len()
            ));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Mismatch {
            path: self.path.clone(),
            problems: problems.join("; "),
        })
    }

    fn find_or_refuse<'a>(&self, name: &'a str) -> Result<(&Component, &'a str), CheckpointError> {
        self.find(name).ok_or_else(|| CheckpointError::NoTensor {
            path: self.path.clone(),
            name: shown(name),
        })
    }

    fn find<'a>(&self, name: &'a str) -> Option<(&Component, &'a str)> {
        let (component, name) = name.split_once('/')?;
        Some((
            self.components
                .iter()
                .find(|candidate| candidate.name == component)?,
            name,
        ))
    }
}

impl WeightSource for Weights {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        Ok(self.weight_layout(name)?)
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        Ok(self.weight(name)?)
    }
}

/// Whether sources of `shapes`, concatenated along dimension 0, are what `spec` asks for, by the rules of [`WeightSpec`].
fn fits(spec: &WeightSpec, shapes: &[Vec<usize>]) -> bool {
    let mut n_rows = 0usize;
    for shape in shapes {
        match rows_of(spec, shape) {
            Ok(rows) => n_rows = n_rows.saturating_add(rows),
            Err(_) => return false,
        }
    }
    n_rows == spec.shape.first().copied().unwrap_or(1)
}

fn matches(pattern: &str, name: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(end), _) => name.ends_with(end),
        (None, Some(start)) => name.starts_with(start),
        (None, None) => name == pattern,
    }
}

/// Whether the name is taken, even by a symbolic link to nowhere: that is reported when it is opened, and not passed over.
fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: UniqueMap<String>,
}

fn open_shards(folder: &Path, index: &Path) -> Result<Vec<SafeTensors>, CheckpointError> {
    let wrong = |problem| CheckpointError::Index {
        path: index.to_owned(),
        problem,
    };
    let bytes = json::read_bytes(index, json::INDEX_LIMIT_BYTES)?;
    let parsed: ShardIndex = serde_json::from_slice(&bytes).map_err(|source| CheckpointError::Json {
        path: index.to_owned(),
        source,
    })?;
    let mut names_by_file: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, file) in &parsed.weight_map.0 {
        names_by_file.entry(file).or_default().insert(name);
    }
    if names_by_file.is_empty() {
        return Err(wrong("it lists no tensor".to_owned()));
    }
    if names_by_file.len() > SHARD_LIMIT {
        return Err(wrong(format!(
            "it lists {} files (at most {SHARD_LIMIT} are read)",
            names_by_file.len()
        )));
    }
    for file in names_by_file.keys() {
        let mut parts = Path::new(file).components();
        if !matches!(
            (parts.next(), parts.next()),
            (Some(PathComponent::Normal(_)), None)
        ) {
            return Err(wrong(format!(
                "`{}` is not the name of a file beside it",
                shown(file)
            )));
        }
        if is_pickle(Path::new(file)) {
            return Err(CheckpointError::Pickle {
                path: folder.join(file),
            });
        }
        if !file.ends_with(".safetensors") {
            return Err(wrong(format!(
                "`{}` is not the name of a safetensors file",
                shown(file)
            )));
        }
    }
    let absent: NameList = names_by_file
        .keys()
        .copied()
        .filter(|file| !exists(&folder.join(file)))
        .collect();
    if !absent.0.is_empty() {
        let n_files = names_by_file.len();
        return Err(wrong(format!(
            "{} of its {n_files} files are missing: {absent}",
            absent.0.len()
        )));
    }
    let mut files = Vec::with_capacity(names_by_file.len());
    for (file, names) in names_by_file {
        let tensors = SafeTensors::open(&folder.join(file))?;
        let present: BTreeSet<&str> = tensors.tensors().keys().map(String::as_str).collect();
        let lacking: NameList = names.difference(&present).copied().collect();
        if !lacking.0.is_empty() {
            let n = lacking.0.len();
            return Err(wrong(format!(
                "tensors missing in `{}` ({n}): {lacking}",
                shown(file)
            )));
        }
        let unlisted: NameList = present.difference(&names).copied().collect();
        if !unlisted.0.is_empty() {
            let n = unlisted.0.len();
            return Err(wrong(format!(
                "tensors in `{}` that the index does not place there ({n}): {unlisted}",
                shown(file)
            )));
        }
        files.push(tensors);
    }
    Ok(files)
}

fn no_weights(folder: &Path, stems: &[&str]) -> CheckpointError {
    let entries = match list(folder) {
        Ok(entries) => entries,
        Err(error) => return error,
    };
    if let Some(pickle) = entries.iter().find(|name| is_pickle(Path::new(name))) {
        return CheckpointError::Pickle {
            path: folder.join(pickle),
        };
    }
    let names: Vec<String> = stems.iter().map(|stem| format!("{stem}.safetensors")).collect();
    let expected = format!(
        "{} (or with .fp16 or .bf16, or an index of shards)",
        names.join(" or ")
    );
    CheckpointError::NoWeights {
        folder: folder.to_owned(),
        expected,
        found: NameList(entries),
    }
}

/// Whether the name is that of a pickle, or of an index of pickles.
pub(crate) fn is_pickle(path: &Path) -> bool {
    let has_extension = |path: &Path| {
        path.extension()
            .is_some_and(|ext| PICKLES.iter().any(|pickle| ext == *pickle))
    };
    let is_index = path
        .to_str()
        .and_then(|name| name.strip_suffix(".index.json"))
        .map(Path::new);
    has_extension(path) || is_index.is_some_and(has_extension)
}

/// Sorted names in `folder`, for messages and for finding pickles.
pub(crate) fn list(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let error = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::Missing {
            path: folder.to_owned(),
        },
        _ => CheckpointError::Io {
            path: folder.to_owned(),
            source,
        },
    };
    let mut names = Vec::new();
    for entry in folder.read_dir().map_err(error)?.take(LISTED_ENTRIES) {
        names.push(entry.map_err(error)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
