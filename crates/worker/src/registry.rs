//! The methods of a worker, by name.
//!
//! R1. A name means one thing. A second method of the same name is refused, also beside one that every worker has, unless it is meant to
//!     replace it; and what is meant to replace one must find it.
//! R2. A method of the data lane runs in turn with waves, on the thread that drives the program. A method of the control lane runs at
//!     once, on the thread that also answers pings: it looks or sets flags, and returns within milliseconds.
//! R3. A method that panics ends the rank, on either lane.

use crate::{PipelineStart, Program, Start, control::Shared, methods, sink::Reporter};
use denoised_link::LinkError;
use denoised_types::{CallId, Failure, Rank, RequestId, WorkerConfig};
use denoised_wire::{Event, Hello, Lane, MethodInfo};
use std::{any::Any, collections::BTreeMap, fmt, sync::Arc};

/// Longest name of a method.
const MAX_NAME_BYTES: usize = 128;
/// Most methods of a worker.
const MAX_METHODS: usize = 256;

type DataMethod = dyn FnMut(&mut MethodContext<'_>, &[u8]) -> Result<Vec<u8>, Failure>;
type ControlMethod = dyn Fn(&ControlContext<'_>, &[u8]) -> Result<Vec<u8>, Failure> + Send + Sync;
pub(crate) type DataMethods = BTreeMap<Arc<str>, Box<DataMethod>>;
pub(crate) type ControlMethods = BTreeMap<Arc<str>, Box<ControlMethod>>;

/// What a worker is: how its program starts, and the methods it has beside those of every worker (`echo`, `status`, `memory`,
/// `progress`, `profile_start`, `profile_stop`).
pub struct Registry {
    pub(crate) start: Box<dyn Start>,
    pub(crate) data: DataMethods,
    pub(crate) control: ControlMethods,
}

/// Why a method cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// There is one of this name.
    #[error("there is a method `{name}` already; use `replace` if it is meant to be replaced")]
    Clash {
        /// The name.
        name: String,
    },
    /// There is none of this name.
    #[error("there is no method `{name}` to replace")]
    Absent {
        /// The name.
        name: String,
    },
    /// The one that is to be replaced runs on the other lane, where its callers expect it.
    #[error("method `{name}` is of the {lane:?} lane and can only be replaced there")]
    OtherLane {
        /// The name.
        name: String,
        /// Where it is.
        lane: Lane,
    },
    /// Not a name.
    #[error("a method's name has 1 to {limit_bytes} bytes, this one has {name_bytes}")]
    BadName {
        /// Its length.
        name_bytes: usize,
        /// The longest.
        limit_bytes: usize,
    },
    /// There are too many.
    #[error("a worker has at most {limit} methods; `{name}` is one too many")]
    TooMany {
        /// The name.
        name: String,
        /// How many there may be.
        limit: usize,
    },
}

impl Registry {
    /// A worker whose program `start` starts, with the methods that every worker has.
    pub fn new(start: impl Start + 'static) -> Self {
        let mut registry = Self {
            start: Box::new(start),
            data: DataMethods::new(),
            control: ControlMethods::new(),
        };
        methods::register(&mut registry);
        registry
    }

    /// A worker that draws with the checkpoint of its configuration.
    pub fn pipeline() -> Self {
        Self::new(PipelineStart)
    }

    /// Adds a method of the data lane: it runs in turn with waves and may change what later ones compute.
    ///
    /// # Errors
    /// [`RegistryError::Clash`], [`RegistryError::BadName`], [`RegistryError::TooMany`].
    pub fn method(
        mut self,
        name: &str,
        method: impl FnMut(&mut MethodContext<'_>, &[u8]) -> Result<Vec<u8>, Failure> + 'static,
    ) -> Result<Self, RegistryError> {
        self.check_new(name)?;
        self.data.insert(name.into(), Box::new(method));
        Ok(self)
    }

    /// Adds a method of the control lane: it is answered while a forward runs, on another thread.
    ///
    /// # Errors
    /// As [`Registry::method`].
    pub fn control_method(
        mut self,
        name: &str,
        method: impl Fn(&ControlContext<'_>, &[u8]) -> Result<Vec<u8>, Failure> + Send + Sync + 'static,
    ) -> Result<Self, RegistryError> {
        self.check_new(name)?;
        self.control.insert(name.into(), Box::new(method));
        Ok(self)
    }

    /// Puts a method of the data lane in the place of one of the same name.
    ///
    /// # Errors
    /// [`RegistryError::Absent`], [`RegistryError::OtherLane`].
    pub fn replace(
        mut self,
        name: &str,
        method: impl FnMut(&mut MethodContext<'_>, &[u8]) -> Result<Vec<u8>, Failure> + 'static,
    ) -> Result<Self, RegistryError> {
        self.check_there(name, Lane::Data)?;
        self.data.insert(name.into(), Box::new(method));
        Ok(self)
    }

    /// Puts a method of the control lane in the place of one of the same name.
    ///
    /// # Errors
    /// As [`Registry::replace`].
    pub fn replace_control(
        mut self,
        name: &str,
        method: impl Fn(&ControlContext<'_>, &[u8]) -> Result<Vec<u8>, Failure> + Send + Sync + 'static,
    ) -> Result<Self, RegistryError> {
        self.check_there(name, Lane::Control)?;
        self.control.insert(name.into(), Box::new(method));
        Ok(self)
    }

    /// The methods by name, and where each runs.
    pub fn methods(&self) -> Vec<MethodInfo> {
        let info = |name: &Arc<str>, lane| MethodInfo {
            name: name.to_string(),
            lane,
        };
        let data = self.data.keys().map(|name| info(name, Lane::Data));
        let control = self.control.keys().map(|name| info(name, Lane::Control));
        let mut methods: Vec<MethodInfo> = data.chain(control).collect();
        methods.sort_by(|a, b| a.name.cmp(&b.name));
        methods
    }

    fn lane_of(&self, name: &str) -> Option<Lane> {
        if self.data.contains_key(name) {
            Some(Lane::Data)
        } else if self.control.contains_key(name) {
            Some(Lane::Control)
        } else {
            None
        }
    }

    fn check_new(&self, name: &str) -> Result<(), RegistryError> {
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) {
            return Err(RegistryError::BadName {
                name_bytes: name.len(),
                limit_bytes: MAX_NAME_BYTES,
            });
        }
        let name = name.to_owned();
        if self.lane_of(&name).is_some() {
            return Err(RegistryError::Clash { name });
        }
        if self.data.len() + self.control.len() >= MAX_METHODS {
            return Err(RegistryError::TooMany {
                name,
                limit: MAX_METHODS,
            });
        }
        Ok(())
    }

    fn check_there(&self, name: &str, wanted: Lane) -> Result<(), RegistryError> {
        let name = name.to_owned();
        match self.lane_of(&name) {
            None => Err(RegistryError::Absent { name }),
            Some(lane) if lane != wanted => Err(RegistryError::OtherLane { name, lane }),
            Some(_) => Ok(()),
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("methods", &self.methods())
            .finish_non_exhaustive()
    }
}

/// What a method of the data lane may reach.
pub struct MethodContext<'a> {
    pub(crate) hello: &'a Hello,
    pub(crate) program: &'a mut dyn Program,
    pub(crate) reporter: Reporter<'a>,
    /// The way up is gone.
    pub(crate) lost: Option<LinkError>,
}

impl MethodContext<'_> {
    /// This rank.
    pub fn rank(&self) -> Rank {
        self.hello.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> u16 {
        self.hello.world_size
    }

    /// What the worker was started with.
    pub fn config(&self) -> &WorkerConfig {
        &self.hello.config
    }

    /// The program, if it is a `P`: [`crate::PipelineProgram`] for workers with a checkpoint.
    pub fn program<P: Program>(&mut self) -> Option<&mut P> {
        let program: &mut dyn Any = self.program;
        program.downcast_mut()
    }

    /// Tells that `n_done` of `n_steps` parts of this call are done.
    pub fn progress(&mut self, n_done: u32, n_steps: u32) {
        self.reporter
            .shared
            .activity
            .stepped(RequestId(0), n_done, n_steps);
        if self.lost.is_none() {
            let event = Event::Step {
                request_id: RequestId(0),
                n_done,
                n_steps,
            };
            self.lost = self.reporter.send_quietly(&event).err();
        }
        self.reporter.inbox.take_in(self.reporter.shared);
    }

    /// The call that the method runs for.
    pub fn call_id(&self) -> CallId {
        self.reporter.call_id
    }
}

impl fmt::Debug for MethodContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MethodContext")
            .field("rank", &self.rank())
            .finish_non_exhaustive()
    }
}

/// What a method of the control lane may reach.
pub struct ControlContext<'a> {
    pub(crate) hello: &'a Hello,
    pub(crate) shared: &'a Shared,
}

impl ControlContext<'_> {
    /// This rank.
    pub fn rank(&self) -> Rank {
        self.hello.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> u16 {
        self.hello.world_size
    }

    /// What the worker was started with.
    pub fn config(&self) -> &WorkerConfig {
        &self.hello.config
    }
}

impl fmt::Debug for ControlContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlContext")
            .field("rank", &self.rank())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &mut MethodContext<'_>, _: &[u8]) -> Result<Vec<u8>, Failure> {
        Ok(Vec::new())
    }

    fn nothing_beside(_: &ControlContext<'_>, _: &[u8]) -> Result<Vec<u8>, Failure> {
        Ok(Vec::new())
    }

    fn refused(result: Result<Registry, RegistryError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn every_worker_has_the_same_methods_and_tells_their_lanes() {
        let methods = Registry::pipeline().methods();
        let methods: Vec<(&str, Lane)> = methods
            .iter()
            .map(|info| (info.name.as_str(), info.lane))
            .collect();
        assert_eq!(
            methods,
            [
                ("echo", Lane::Data),
                ("memory", Lane::Control),
                ("profile_start", Lane::Control),
                ("profile_stop", Lane::Control),
                ("progress", Lane::Control),
                ("status", Lane::Control),
            ]
        );
    }

    #[test]
    fn a_taken_name_is_refused_on_either_lane() {
        let registry = || Registry::pipeline().method("own", nothing).unwrap();
        let taken = |name: &str| {
            format!("there is a method `{name}` already; use `replace` if it is meant to be replaced")
        };
        for name in ["own", "echo", "progress"] {
            assert_eq!(refused(registry().method(name, nothing)), taken(name));
            assert_eq!(
                refused(registry().control_method(name, nothing_beside)),
                taken(name)
            );
        }
    }

    #[test]
    fn replacing_is_meant_and_finds_what_it_replaces() {
        let registry = Registry::pipeline();
        let n_methods = registry.methods().len();
        let registry = registry.replace("echo", nothing).unwrap();
        let registry = registry.replace_control("status", nothing_beside).unwrap();
        assert_eq!(registry.methods().len(), n_methods);
        assert_eq!(
            refused(Registry::pipeline().replace("own", nothing)),
            "there is no method `own` to replace"
        );
        assert_eq!(
            refused(Registry::pipeline().replace_control("own", nothing_beside)),
            "there is no method `own` to replace"
        );
        assert_eq!(
            Registry::pipeline().replace("status", nothing).unwrap_err(),
            RegistryError::OtherLane {
                name: "status".to_owned(),
                lane: Lane::Control
            }
        );
        assert_eq!(
            Registry::pipeline()
                .replace_control("echo", nothing_beside)
                .unwrap_err(),
            RegistryError::OtherLane {
                name: "echo".to_owned(),
                lane: Lane::Data
            }
        );
    }

    #[test]
    fn names_and_their_number_are_bounded() {
        assert!(matches!(
            Registry::pipeline().method("", nothing),
            Err(RegistryError::BadName { name_bytes: 0, .. })
        ));
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        assert!(matches!(
            Registry::pipeline().method(&long, nothing),
            Err(RegistryError::BadName { .. })
        ));
        let mut registry = Registry::pipeline();
        for idx in registry.methods().len()..MAX_METHODS {
            registry = registry.method(&format!("method {idx}"), nothing).unwrap();
        }
        assert!(matches!(
            registry.method("one more", nothing),
            Err(RegistryError::TooMany { .. })
        ));
    }
}
