//! The folder that diffusers' `save_pretrained` writes: `model_index.json` and one sub-folder per component.

use crate::{
    CheckpointError, Component, Config, NameList, Weights,
    component::{is_pickle, list},
    error::shown,
    json,
};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// What a component is, as `model_index.json` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentClass {
    /// `diffusers`, `transformers`, or the module of a pipeline.
    pub library: String,
    /// Name of the Python class.
    pub class: String,
}

/// A checkpoint folder whose `model_index.json` was read. Weight files are opened by [`Folder::weights`], and unmapped when
/// what that returns is dropped.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    pipeline_class: String,
    components: BTreeMap<String, ComponentClass>,
    options: Config,
}

impl Folder {
    /// Reads `model_index.json` in the folder at `path`.
    ///
    /// # Errors
    /// The path is nowhere, a file, or another kind of folder (the error says what to give instead), or the JSON is wrong.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = path.metadata().map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::NoFolder {
                path: path.to_owned(),
            },
            _ => CheckpointError::Io {
                path: path.to_owned(),
                source,
            },
        })?;
        if !metadata.is_dir() {
            return Err(not_a_folder(path));
        }
        let index = path.join("model_index.json");
        if index.symlink_metadata().is_err() {
            return Err(no_model_index(path));
        }
        let map = json::read_object(&index, json::CONFIG_LIMIT_BYTES)?;
        Self::from_index(path, &index, map)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The class of the pipeline, e.g. `StableDiffusion3Pipeline`; which family that is, the family table says.
    pub fn pipeline_class(&self) -> &str {
        &self.pipeline_class
    }

    /// The components that are there, by name; those listed as `[null, null]` are not.
    pub fn components(&self) -> &BTreeMap<String, ComponentClass> {
        &self.components
    }

    /// The class of `component`, if it is there.
    pub fn class(&self, component: &str) -> Option<&ComponentClass> {
        self.components.get(component)
    }

    /// What else stands in `model_index.json`: switches of the pipeline.
    pub fn options(&self) -> &Config {
        &self.options
    }

    /// The config of `component`: `scheduler_config.json` for a scheduler, `tokenizer_config.json` for a tokenizer,
    /// `preprocessor_config.json` for a feature extractor or image processor, else `config.json`.
    ///
    /// # Errors
    /// The component or its file is not there, the file is no JSON object, or it says that the weights are quantized.
    pub fn config(&self, component: &str) -> Result<Config, CheckpointError> {
        let folder = self.component_folder(component)?;
        let starts = |prefix| component.starts_with(prefix);
        let name = if starts("scheduler") {
            "scheduler_config.json"
        } else if starts("tokenizer") {
            "tokenizer_config.json"
        } else if starts("feature_extractor") || starts("image_processor") {
            "preprocessor_config.json"
        } else {
            "config.json"
        };
        let path = folder.join(name);
        let map = json::read_object(&path, json::CONFIG_LIMIT_BYTES)?;
        if let Some(quantization) = map.get("quantization_config").filter(|value| !value.is_null()) {
            let method = quantization
                .get("quant_method")
                .and_then(Value::as_str)
                .unwrap_or("unknown method");
            return Err(CheckpointError::Quantized {
                path,
                method: shown(method),
            });
        }
        Ok(Config::new(&path, map))
    }

    /// The path of `file` in the folder of `component`, if it is there.
    pub fn file(&self, component: &str, file: &str) -> Option<PathBuf> {
        self.components.get(component)?;
        Some(self.path.join(component).join(file)).filter(|path| path.symlink_metadata().is_ok())
    }

    /// The content of `file` in the folder of `component` (vocabularies and the like).
    ///
    /// # Errors
    /// The component or the file is not there, or it has more than `limit_bytes`.
    pub fn read(&self, component: &str, file: &str, limit_bytes: u64) -> Result<Vec<u8>, CheckpointError> {
        json::read_bytes(&self.component_folder(component)?.join(file), limit_bytes)
    }

    /// Maps and checks the weight files of `component`.
    ///
    /// # Errors
    /// The component is not listed, or as [`Component::open`].
    pub fn component(&self, component: &str) -> Result<Component, CheckpointError> {
        let folder = self.component_folder(component)?;
        // Diffusers and transformers name their files differently; classes of other libraries follow either.
        let stems = match self.components.get(component) {
            Some(class) if class.library == "transformers" => ["model", "diffusion_pytorch_model"],
            _ => ["diffusion_pytorch_model", "model"],
        };
        Component::open(component, &folder, &stems)
    }

    /// Maps and checks the weight files of several components, as one view.
    ///
    /// # Errors
    /// As [`Folder::component`].
    pub fn weights(&self, components: &[&str]) -> Result<Weights, CheckpointError> {
        let opened: Result<Vec<Component>, CheckpointError> = components
            .iter()
            .map(|component| self.component(component))
            .collect();
        Ok(Weights::new(&self.path, opened?))
    }

    fn from_index(path: &Path, index: &Path, map: Map<String, Value>) -> Result<Self, CheckpointError> {
        let all = Config::new(index, map.clone());
        let pipeline_class = all.str("_class_name")?.to_owned();
        let mut components = BTreeMap::new();
        let mut options = Map::new();
        for (key, value) in map {
            let pair = value
                .as_array()
                .and_then(|items| <&[Value; 2]>::try_from(items.as_slice()).ok());
            match pair {
                _ if key.starts_with('_') => {}
                Some([Value::Null, Value::Null]) => {}
                Some([Value::String(library), Value::String(class)]) => {
                    if key.is_empty() || key.starts_with('.') || key.contains(['/', '\\', '\0']) {
                        return Err(all.wrong(&key, "named like a folder beside it"));
                    }
                    components.insert(
                        key,
                        ComponentClass {
                            library: library.clone(),
                            class: class.clone(),
                        },
                    );
                }
                Some([Value::Null, Value::String(_)] | [Value::String(_), Value::Null]) => {
                    return Err(all.wrong(&key, "a library and a class, or two nulls"));
                }
                _ => {
                    options.insert(key, value);
                }
            }
        }
        let options = Config::new(index, options);
        Ok(Self {
            path: path.to_owned(),
            pipeline_class,
            components,
            options,
        })
    }

    fn component_folder(&self, component: &str) -> Result<PathBuf, CheckpointError> {
        if self.components.contains_key(component) {
            return Ok(self.path.join(component));
        }
        let listed: NameList = self.components.keys().cloned().collect();
        let path = self.path.join("model_index.json");
        Err(CheckpointError::NoComponent {
            path,
            component: shown(component),
            listed,
        })
    }
}

fn not_a_folder(path: &Path) -> CheckpointError {
    if is_pickle(path) {
        return CheckpointError::Pickle {
            path: path.to_owned(),
        };
    }
    let hint = match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => {
            "single-file checkpoints are not read: load it in diffusers with from_single_file and call \
             save_pretrained(folder), then give that folder"
        }
        Some("gguf") => "GGUF files are not read: give the folder of the diffusers checkpoint",
        _ if path.ends_with("model_index.json") => "give the folder that contains it",
        _ => "give a folder as diffusers' save_pretrained writes it",
    };
    CheckpointError::NotAFolder {
        path: path.to_owned(),
        hint: hint.to_owned(),
    }
}

fn no_model_index(path: &Path) -> CheckpointError {
    let entries = match list(path) {
        Ok(entries) => entries,
        Err(error) => return error,
    };
    let has = |name: &str| entries.iter().any(|entry| entry == name);
    let parent_has_index = path.join("..").join("model_index.json").exists();
    let hint = if parent_has_index {
        "it is one component of a checkpoint: give the folder above it".to_owned()
    } else if has("snapshots") {
        match list(&path.join("snapshots")).unwrap_or_default().first() {
            Some(commit) => format!("it is a hub cache: give its folder snapshots/{}", shown(commit)),
            None => "it is a hub cache without a snapshot: the download is incomplete".to_owned(),
        }
    } else if let Some(pickle) = entries.iter().find(|name| is_pickle(Path::new(name))) {
        return CheckpointError::Pickle {
            path: path.join(pickle),
        };
    } else if entries.iter().any(|name| name.ends_with(".safetensors")) {
        "single-file checkpoints are not read: load the file in diffusers with from_single_file and call \
         save_pretrained(folder), then give that folder"
            .to_owned()
    } else {
        format!(
            "give a folder as diffusers' save_pretrained writes it (found {})",
            NameList(entries)
        )
    };
    CheckpointError::NoModelIndex {
        path: path.to_owned(),
        hint,
    }
}
