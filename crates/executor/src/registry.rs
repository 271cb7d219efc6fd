//! Executors by name: those of this crate, and those that an embedder adds.
//!
//! Knows nothing of what a worker runs: a worker process is a program ([`MpOptions::program`]), a worker on a thread is a function
//! that whoever makes the registry brings along.

use crate::{Executor, ExecutorError, MpExecutor, MpOptions, Progress, UniExecutor, UniOptions};
use denoised_link::WorkerEnd;
use denoised_types::{Failure, FailureCode};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// What an unset choice means.
pub const DEFAULT_EXECUTOR: &str = "mp";
/// Names that mean something, but not in this version.
const ABSENT: [&str; 2] = ["external_launcher", "ray"];

/// What a worker on a thread of this process runs, usually `denoised_worker::serve`.
pub type ServeFn = dyn Fn(WorkerEnd) + Send + Sync;

/// Starts one kind of executor. The options are in the words of `mp`; a kind without processes has no use for `program` and `stderr`.
pub type Factory = dyn Fn(MpOptions, Progress<'_>) -> Result<Arc<dyn Executor>, ExecutorError> + Send + Sync;

/// Which executor to use.
#[derive(Clone, Debug, Default)]
pub enum ExecutorChoice {
    /// [`DEFAULT_EXECUTOR`].
    #[default]
    Unset,
    /// The one that is registered under this name.
    Name(String),
    /// This one, which runs already; options are not for it.
    Object(Arc<dyn Executor>),
}

impl From<String> for ExecutorChoice {
    fn from(name: String) -> Self {
        Self::Name(name)
    }
}

impl From<Arc<dyn Executor>> for ExecutorChoice {
    fn from(executor: Arc<dyn Executor>) -> Self {
        Self::Object(executor)
    }
}

impl From<&str> for ExecutorChoice {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

/// Why an executor was not registered or started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// Nobody registered this name.
    #[error("unknown executor `{name}`; there are: {}", .known.join(", "))]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The name is known, its executor is not there.
    #[error("executor `{name}` is known, but not in this version; there are: {}", .known.join(", "))]
    Absent {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The name is taken.
    #[error("an executor `{name}` is registered already; replacing it must be asked for")]
    Clash {
        /// The name.
        name: String,
    },
    /// The executor was not started.
    #[error(transparent)]
    Start(#[from] ExecutorError),
}

impl From<RegistryError> for Failure {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Start(error) => error.into(),
            error => Failure::new(FailureCode::InvalidRequest, error.to_string()),
        }
    }
}

/// The executors that can be started by name.
///
/// ```
/// use denoised_executor::{ExecutorRegistry, RegistryError};
/// # use denoised_executor::MpOptions;
/// # use denoised_types::WorkerConfig;
/// # let config = WorkerConfig { model: "m".into(), device: "cpu".into(), dtype: "f32".into(), n_threads: None, warm_up: false };
/// // In a program with a pipeline: `|end| { denoised_worker::serve(end, Registry::pipeline()); }`.
/// let registry = ExecutorRegistry::new(|end| drop(end));
/// assert_eq!(registry.names(), ["mp", "uni"]);
/// let error = registry.start(&"gpu farm".into(), MpOptions::new(1, config), &mut |_, _| {}).unwrap_err();
/// assert_eq!(error.to_string(), "unknown executor `gpu farm`; there are: mp, uni");
/// ```
#[derive(Clone)]
pub struct ExecutorRegistry {
    factories: BTreeMap<String, Arc<Factory>>,
}

impl ExecutorRegistry {
    /// Knows `mp`, which starts [`MpOptions::program`] as processes, and `uni`, whose one worker runs `serve` on a thread.
    pub fn new(serve: impl Fn(WorkerEnd) + Send + Sync + 'static) -> Self {
        let mut registry = Self {
            factories: BTreeMap::new(),
        };
        let serve: Arc<ServeFn> = Arc::new(serve);
        registry.replace("mp", |options, progress| {
            Ok(Arc::new(MpExecutor::start(options, progress)?))
        });
        registry.replace("uni", move |options, progress| {
            start_uni(&serve, options, progress)
        });
        registry
    }

    /// Adds an executor.
    ///
    /// # Errors
    /// [`RegistryError::Clash`]: the name is taken. Names that are known but not there ([`RegistryError::Absent`]) are free.
    pub fn register(
        &mut self,
        name: &str,
        factory: impl Fn(MpOptions, Progress<'_>) -> Result<Arc<dyn Executor>, ExecutorError>
        + Send
        + Sync
        + 'static,
    ) -> Result<(), RegistryError> {
        if self.factories.contains_key(name) {
            return Err(RegistryError::Clash {
                name: name.to_owned(),
            });
        }
        self.replace(name, factory);
        Ok(())
    }

    /// Adds an executor, in place of one with the same name if there is one.
    pub fn replace(
        &mut self,
        name: &str,
        factory: impl Fn(MpOptions, Progress<'_>) -> Result<Arc<dyn Executor>, ExecutorError>
        + Send
        + Sync
        + 'static,
    ) {
        self.factories.insert(name.to_owned(), Arc::new(factory));
    }

    /// The names there are, sorted.
    pub fn names(&self) -> Vec<&str> {
        self.factories.keys().map(String::as_str).collect()
    }

    /// Checks a name without starting anything.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`], [`RegistryError::Absent`].
    pub fn check(&self, name: &str) -> Result<(), RegistryError> {
        self.factory(name).map(|_| ())
    }

    /// Starts the executor that was chosen, waits until its workers are ready and tells `progress` how far they are. One that runs
    /// already is returned as it is.
    ///
    /// # Errors
    /// As [`ExecutorRegistry::check`], or [`RegistryError::Start`].
    pub fn start(
        &self,
        choice: &ExecutorChoice,
        options: MpOptions,
        progress: Progress<'_>,
    ) -> Result<Arc<dyn Executor>, RegistryError> {
        let name = match choice {
            ExecutorChoice::Unset => DEFAULT_EXECUTOR,
            ExecutorChoice::Name(name) => name,
            ExecutorChoice::Object(executor) => return Ok(Arc::clone(executor)),
        };
        Ok(self.factory(name)?(options, progress)?)
    }

    fn factory(&self, name: &str) -> Result<&Factory, RegistryError> {
        let known = || self.factories.keys().cloned().collect();
        match self.factories.get(name) {
            Some(factory) => Ok(&**factory),
            None if ABSENT.contains(&name) => Err(RegistryError::Absent {
                name: name.to_owned(),
                known: known(),
            }),
            None => Err(RegistryError::Unknown {
                name: name.to_owned(),
                known: known(),
            }),
        }
    }
}

impl fmt::Debug for ExecutorRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExecutorRegistry").field(&self.names()).finish()
    }
}

fn start_uni(
    serve: &Arc<ServeFn>,
    options: MpOptions,
    progress: Progress<'_>,
) -> Result<Arc<dyn Executor>, ExecutorError> {
    let MpOptions {
        n_workers,
        worker,
        link,
        start_limit,
        limits,
        ..
    } = options;
    if n_workers != 1 {
        let text =
            format!("executor `uni` has one worker, not {n_workers}; `mp` has as many as are asked for");
        return Err(ExecutorError::Start {
            kind: "uni",
            world_size: n_workers,
            cause: Failure::new(FailureCode::InvalidRequest, text),
            ranks: Vec::new(),
        });
    }
    let options = UniOptions {
        worker,
        link,
        start_limit,
        limits,
    };
    let serve = Arc::clone(serve);
    Ok(Arc::new(UniExecutor::start(
        options,
        Box::new(move |end| serve(end)),
        progress,
    )?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::WorkerConfig;

    fn options(n_workers: u16) -> MpOptions {
        let worker = WorkerConfig {
            model: "none".into(),
            device: "none".into(),
            dtype: "none".into(),
            n_threads: None,
            warm_up: false,
        };
        MpOptions::new(n_workers, worker)
    }

    fn never() -> ExecutorRegistry {
        ExecutorRegistry::new(drop)
    }

    /// Fault case I1, and the same for names of a later version.
    #[test]
    fn names_that_are_not_there_are_refused_with_those_that_are() {
        let refused = |name: &str| {
            let started = never().start(&name.into(), options(1), &mut |_, _| {});
            started.unwrap_err().to_string()
        };
        assert_eq!(refused("none"), "unknown executor `none`; there are: mp, uni");
        assert_eq!(refused(""), "unknown executor ``; there are: mp, uni");
        for name in ["ray", "external_launcher"] {
            let text = format!("executor `{name}` is known, but not in this version; there are: mp, uni");
            assert_eq!(refused(name), text);
        }
    }

    #[test]
    fn an_unset_choice_is_the_documented_default() {
        let mut registry = never();
        // What it starts is seen by whom it asks.
        registry.replace(DEFAULT_EXECUTOR, |options, _| {
            Err(ExecutorError::Start {
                kind: "asked",
                world_size: options.n_workers,
                cause: Failure::new(FailureCode::Closed, "nothing"),
                ranks: Vec::new(),
            })
        });
        let started = registry.start(&ExecutorChoice::default(), options(7), &mut |_, _| {});
        match started.unwrap_err() {
            RegistryError::Start(ExecutorError::Start { kind, world_size, .. }) => {
                assert_eq!((kind, world_size), ("asked", 7));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_name_that_is_taken_is_replaced_only_when_asked() {
        let mut registry = never();
        let factory = |_: MpOptions, _: Progress<'_>| Err(ExecutorError::Closed);
        let clash = registry.register("uni", factory).unwrap_err();
        assert_eq!(clash, RegistryError::Clash { name: "uni".into() });
        registry.replace("uni", factory);
        let started = registry.start(&"uni".into(), options(1), &mut |_, _| {});
        assert_eq!(started.unwrap_err(), RegistryError::Start(ExecutorError::Closed));
        registry.register("mine", factory).unwrap();
        // Its embedder has one.
        registry.register("ray", factory).unwrap();
        assert_eq!(registry.names(), ["mine", "mp", "ray", "uni"]);
        registry.check("ray").unwrap();
    }

    #[test]
    fn uni_has_one_worker() {
        let started = never().start(&"uni".into(), options(3), &mut |_, _| {});
        let failure = Failure::from(started.unwrap_err());
        assert_eq!(failure.code, FailureCode::InvalidRequest);
        assert!(failure.message.contains("one worker, not 3"), "{failure}");
    }
}
