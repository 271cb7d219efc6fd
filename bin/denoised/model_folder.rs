//! Which checkpoint folder to use: the one that is named, or a demo checkpoint.

use crate::error::Error;
use denoised_types::{Failure, FailureCode};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The demo checkpoints; the first is used when none is named.
const DEMOS: [&str; 2] = ["emoji-dit", "emoji-unet"];
/// Where an installed program keeps them: beside the program, or in the share folder next to its folder.
const INSTALLED: [&str; 2] = ["denoised-models", "../share/denoised/models"];
/// Where they lie in the source tree.
const IN_SOURCE: &str = "crates/models/demo";
/// Every checkpoint folder has this file.
const INDEX: &str = "model_index.json";

/// The folder to load: what was asked for, else `DENOISED_MODEL`, else the first demo checkpoint. The name of a demo checkpoint that is
/// no folder here means the one of the installation or the source tree.
///
/// # Errors
/// `InvalidModel` if the folder asked for is not there, or no demo checkpoint is found; lists where was looked.
pub(crate) fn choose(asked: Option<&Path>) -> Result<PathBuf, Error> {
    let exe = env::current_exe().ok();
    let exe_folder = exe.as_deref().and_then(Path::parent);
    let source_tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    choose_from(asked, env::var_os("DENOISED_MODEL"), exe_folder, source_tree)
}

fn choose_from(
    asked: Option<&Path>,
    variable: Option<OsString>,
    exe_folder: Option<&Path>,
    source_tree: &Path,
) -> Result<PathBuf, Error> {
    let invalid = |message: String| Error::from(Failure::new(FailureCode::InvalidModel, message));
    let named = match (asked, &variable) {
        (Some(folder), _) => Some((folder, "--model")),
        (None, Some(folder)) if !folder.is_empty() => Some((Path::new(folder), "DENOISED_MODEL")),
        (None, _) => None,
    };
    let demo = match named {
        None => DEMOS[0],
        // Whether it is a checkpoint is for the loader to say; it knows the formats and their hints.
        Some((folder, _)) if folder.exists() => return Ok(folder.to_owned()),
        Some((folder, origin)) => *DEMOS
            .iter()
            .find(|demo| folder == Path::new(demo))
            .ok_or_else(|| {
                invalid(format!(
                    "{origin} {}: there is no such folder; without one, {} are there to try",
                    folder.display(),
                    DEMOS.join(" and ")
                ))
            })?,
    };
    let installed = exe_folder
        .into_iter()
        .flat_map(|folder| INSTALLED.iter().map(|place| folder.join(place)));
    let places: Vec<PathBuf> = installed
        .chain([source_tree.join(IN_SOURCE)])
        .map(|place| place.join(demo))
        .collect();
    match places.iter().find(|place| place.join(INDEX).is_file()) {
        Some(place) => Ok(place.clone()),
        None => {
            let places: Vec<String> = places
                .iter()
                .map(|place| format!("\n  {}", place.display()))
                .collect();
            Err(invalid(format!(
                "no model: name a checkpoint folder with --model or DENOISED_MODEL; the demo checkpoint {demo} is in none of{}",
                places.concat()
            )))
        }
    }
}

/// The checkpoint's name for people: the last part of its path.
pub(crate) fn name_of(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = full.file_name().map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| "model".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn checkpoint(folder: &Path) -> PathBuf {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(INDEX), "{}").unwrap();
        folder.to_owned()
    }

    #[test]
    fn what_is_asked_for_comes_first_and_the_source_tree_last() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let source = checkpoint(&root.join("tree/crates/models/demo/emoji-dit"));
        let exe_folder = root.join("bin");
        fs::create_dir_all(&exe_folder).unwrap();
        let tree = root.join("tree");
        let found = |asked: Option<&Path>, variable: Option<&Path>| {
            choose_from(
                asked,
                variable.map(|path| path.as_os_str().to_owned()),
                Some(&exe_folder),
                &tree,
            )
            .unwrap()
        };
        assert_eq!(found(None, None), source);

        checkpoint(&root.join("share/denoised/models/emoji-dit"));
        assert_eq!(
            found(None, None),
            exe_folder.join("../share/denoised/models/emoji-dit")
        );
        let beside = checkpoint(&exe_folder.join("denoised-models/emoji-dit"));
        assert_eq!(found(None, None), beside);

        let (a, b) = (checkpoint(&root.join("a")), checkpoint(&root.join("b")));
        assert_eq!(found(None, Some(&b)), b);
        assert_eq!(found(Some(&a), Some(&b)), a);

        let unet = checkpoint(&root.join("tree/crates/models/demo/emoji-unet"));
        assert_eq!(found(Some(Path::new("emoji-unet")), Some(&b)), unet);
    }

    #[test]
    fn a_model_that_is_not_there_is_an_error_that_says_where_was_looked() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let error = choose_from(None, None, Some(&root.join("bin")), &root.join("tree")).unwrap_err();
        assert_eq!(error.code(), "invalid_model");
        assert!(error.to_string().contains(IN_SOURCE), "{error}");
        let absent = root.join("absent");
        let error = choose_from(Some(&absent), None, None, root).unwrap_err();
        assert!(error.to_string().starts_with("--model "), "{error}");
        assert!(error.to_string().contains("emoji-dit and emoji-unet"), "{error}");
    }

    #[test]
    fn a_name_never_contains_a_path() {
        assert_eq!(name_of(Path::new("/some/where/emoji-dit/")), "emoji-dit");
        assert!(!name_of(Path::new(".")).contains('/'));
        assert_eq!(name_of(Path::new("/")), "model");
    }
}
