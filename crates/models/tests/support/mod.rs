//! Loading cases and running requests, for all tests of this folder.
#![allow(dead_code)] // Each test binary uses its part.

use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_models::{Pipeline, Running};
use denoised_tensor::{Backend, PrepareInput};
use denoised_types::{Failure, GenerateRequest, Image, NamedTensor};
use std::{
    fs,
    path::{Path, PathBuf},
    rc::Rc,
};

/// A case of `tests/data`.
pub(crate) fn data(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data")
        .join(case)
}

/// The model in `folder` on two threads.
pub(crate) fn load(folder: &Path) -> Box<dyn Pipeline> {
    load_on(folder, cpu())
}

/// Two threads.
pub(crate) fn cpu() -> Rc<dyn Backend> {
    let options = CpuOptions {
        n_threads: 2,
        ..CpuOptions::default()
    };
    Rc::new(CpuBackend::new(options).expect("a backend of two threads"))
}

/// The model in `folder` on `backend`.
pub(crate) fn load_on(folder: &Path, backend: Rc<dyn Backend>) -> Box<dyn Pipeline> {
    let model = denoised_models::open(folder).expect("the checkpoint opens");
    let input = PrepareInput::Build(model.weight_source());
    let prepared = backend
        .prepare(model.weight_specs(), input, &mut |_, _| {})
        .expect("the weights are prepared");
    model.load(backend, prepared).expect("the model loads")
}

/// What a request gave.
pub(crate) struct Outcome {
    pub(crate) image: Image,
    pub(crate) trace: Vec<NamedTensor>,
}

/// A whole generation.
pub(crate) fn run(pipeline: &dyn Pipeline, request: &GenerateRequest) -> Result<Outcome, Failure> {
    let mut running = pipeline.begin(request)?;
    while running.step_idx() < running.n_steps() {
        let [outcome] = step(pipeline, [&mut *running])?;
        outcome?;
    }
    let image = pipeline.decode(&mut *running)?;
    let trace = running.take_trace();
    Ok(Outcome { image, trace })
}

/// One step of several members.
pub(crate) fn step<const N: usize>(
    pipeline: &dyn Pipeline,
    mut members: [&mut dyn Running; N],
) -> Result<[Result<(), Failure>; N], Failure> {
    let outcomes = pipeline.step(&mut members)?;
    Ok(outcomes.try_into().expect("one outcome per member"))
}

/// A copy of a case's model that may be changed.
pub(crate) fn copy_of(case: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy_into(&data(case).join("model"), folder.path());
    folder
}

fn copy_into(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("readable") {
        let entry = entry.expect("readable");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            fs::create_dir(&target).expect("fresh");
            copy_into(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).expect("copied");
        }
    }
}

/// Replaces the first `from` in the file by `to`.
pub(crate) fn replace(file: &Path, from: &str, to: &str) {
    let mut bytes = fs::read(file).expect("readable");
    let at = bytes
        .windows(from.len())
        .position(|window| window == from.as_bytes())
        .unwrap_or_else(|| panic!("{} holds {from}", file.display()));
    bytes.splice(at..at + from.len(), to.bytes());
    fs::write(file, bytes).expect("written");
}

/// Shows figures when the tests run with `--nocapture`.
#[allow(clippy::print_stdout)] // The figures are the point.
pub(crate) fn report(line: &str) {
    println!("{line}");
}
