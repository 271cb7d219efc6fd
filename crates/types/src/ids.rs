//! Newtypes for everything that is counted, so that one id is never taken for another.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// One client call for one result set, for life. Given by the engine, starting at 1.
    RequestId(u64)
);
id!(
    /// A command that awaits replies; every reply carries it. Given by the executor, starting at 1, never reused in an epoch.
    CallId(u64)
);
id!(
    /// What one dispatch carries to the world. Given by the scheduler, growing.
    WaveId(u64)
);
id!(
    /// Incarnation of a world. Messages of another epoch are dropped.
    Epoch(u32)
);
id!(
    /// A worker's index in its world, `0..world_size`.
    Rank(u16)
);
