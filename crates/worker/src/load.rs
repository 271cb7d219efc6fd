//! A pipeline in the calling process, without commands: for measurements and tools.

use crate::device::open_device;
use denoised_models::Pipeline;
use denoised_tensor::{Backend, PrepareInput};
use denoised_types::{Failure, Rank, WorkerConfig, WorkerDevice};
use std::rc::Rc;

/// A model on a device, and the device.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub pipeline: Box<dyn Pipeline>,
    /// The device.
    pub backend: Rc<dyn Backend>,
    /// What it is.
    pub device: WorkerDevice,
    /// Bytes of the prepared weights.
    pub weight_bytes: u64,
}

/// Opens the device and loads the model that `config` names, as the only worker of this host would.
///
/// # Errors
/// As a worker's start.
pub fn load_pipeline(config: &WorkerConfig) -> Result<Loaded, Failure> {
    let opened = open_device(config, (Rank(0), 1))?;
    let (device, backend) = (opened.device(), opened.backend);
    let model = denoised_models::open(&config.model)?;
    let input = PrepareInput::Build(model.weight_source());
    let prepared = backend
        .prepare(model.weight_specs(), input, &mut |_, _| {})
        .map_err(|error| denoised_models::tensor_failure(&error))?;
    let weight_bytes = prepared.n_bytes;
    let pipeline = model.load(Rc::clone(&backend), prepared)?;
    Ok(Loaded {
        pipeline,
        backend,
        device,
        weight_bytes,
    })
}
