use crate::{bits, exact, name_of, put, under};
use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::Backend;
use denoised_testkit::standin::Standin;
use std::{
    fs,
    path::{Path, PathBuf},
};

fn works(cache: &Path) {
    let backend = CudaBackend::open(CudaOptions {
        cache_folder: Some(cache.to_owned()),
        ..exact()
    });
    let backend = backend.unwrap_or_else(|error| panic!("{error}"));
    let x = put(&backend, &[2], &[1.0, 2.0]);
    backend.fill(&x, 3.0).unwrap();
    assert_eq!(bits(&backend, &x), [3f32.to_bits(); 2]);
}

fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

#[test]
fn a_damaged_cache_is_written_anew() {
    let body = || {
        let cache = scratch("damaged-cache");
        works(&cache);
        let whole: Vec<_> = files(&cache).iter().map(|path| fs::read(path).unwrap()).collect();
        assert!(!whole.is_empty());
        for (idx, path) in files(&cache).iter().enumerate() {
            let mut bytes = fs::read(path).unwrap();
            match idx % 3 {
                0 => bytes.truncate(bytes.len() / 2),
                1 => *bytes.last_mut().unwrap() ^= 1,
                _ => bytes.clear(),
            }
            fs::write(path, bytes).unwrap();
        }
        works(&cache);
        let again: Vec<_> = files(&cache).iter().map(|path| fs::read(path).unwrap()).collect();
        assert_eq!(again.len(), whole.len());
        assert!(again.iter().all(|bytes| bytes.len() > 32));
        fs::remove_dir_all(&cache).unwrap();
    };
    under(
        name_of!(a_damaged_cache_is_written_anew),
        &Standin::default(),
        body,
    );
}

#[test]
fn a_cache_that_cannot_be_written_is_done_without() {
    let body = || {
        let folder = scratch("no-cache");
        let file = folder.join("file");
        fs::write(&file, "not a folder").unwrap();
        works(&file.join("below"));
        fs::remove_dir_all(&folder).unwrap();
    };
    under(
        name_of!(a_cache_that_cannot_be_written_is_done_without),
        &Standin::default(),
        body,
    );
}
