//! How much memory a link takes, and how its ends wait.

use crate::SetupError;
use denoised_os::cpu;
use denoised_ring::{ArenaSpec, INLINE_LIMIT_BYTES, RegionSpec, RingSpec, Wait, total_bytes};

/// Most workers of one world.
pub const MAX_WORLD_SIZE: u16 = 64;

/// Unit in which arenas are given out.
const GRANULE_BYTES: usize = 64 * 1024;

/// Whether waiting ends spin before they sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpinPolicy {
    /// For 50 microseconds if the executor and every worker can each own a core, else not at all.
    #[default]
    Auto,
    /// Not at all.
    Never,
    /// For so many nanoseconds, whatever the machine.
    ForNs(u64),
}

impl SpinPolicy {
    /// Nanoseconds to spin in a world of this size.
    pub fn spin_ns(self, world_size: u16) -> u64 {
        match self {
            Self::Never => 0,
            Self::ForNs(spin_ns) => spin_ns,
            Self::Auto if usize::from(world_size) < cpu::usable_cores() => Wait::SPIN_NS,
            Self::Auto => 0,
        }
    }
}

/// Sizes of a link. One value for all of a world's memory; see [`LinkSpec::total_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpec {
    /// The ring of commands, shared by all ranks; a power of two.
    pub command_ring_bytes: usize,
    /// The arena of large command bodies, shared by all ranks; a multiple of 64 KiB, and the largest message with its blobs.
    pub command_arena_bytes: usize,
    /// Each rank's ring of events; a power of two.
    pub event_ring_bytes: usize,
    /// Each rank's arena of large event bodies; a multiple of 64 KiB. Results and replies of any size travel through it in pieces.
    pub event_arena_bytes: usize,
    /// Blobs up to this size travel inside the record, larger ones in the arena; at most 16 KiB.
    pub inline_limit_bytes: usize,
    /// How waiting ends behave.
    pub spin: SpinPolicy,
    /// How long an event may wait for a full ring or arena before the worker takes the executor for hung and ends.
    pub event_send_limit_ms: u64,
    /// Most shared memory that the world may take, for machines whose limit cannot be read from `/proc` or cgroups. A world that needs
    /// more is refused before it takes any.
    pub memory_limit_bytes: u64,
}

impl Default for LinkSpec {
    fn default() -> Self {
        Self {
            command_ring_bytes: 4 << 20,
            command_arena_bytes: 32 << 20,
            event_ring_bytes: 1 << 20,
            event_arena_bytes: 32 << 20,
            inline_limit_bytes: 4 << 10,
            spin: SpinPolicy::Auto,
            event_send_limit_ms: 600_000,
            memory_limit_bytes: u64::MAX,
        }
    }
}

impl LinkSpec {
    /// Largest allowed [`LinkSpec::inline_limit_bytes`].
    pub const MAX_INLINE_LIMIT_BYTES: usize = 16 << 10;

    /// Bytes of shared memory of a world of `world_size` ranks, all of it:
    ///
    /// `ring(command_ring) + arena(command_arena) + board + world_size * (ring(event_ring) + arena(event_arena))`
    ///
    /// where `ring(b) = b + 12 288`, `board = 8 448` and `arena(b) = b + 64 * (b / 65 536) + 256`, the latter's extra rounded up to
    /// 64 KiB; each piece is rounded up to whole pages by the kernel. The default makes 36 + 33 MiB per rank.
    pub fn total_bytes(&self, world_size: u16) -> u64 {
        let shared = [
            RegionSpec::Ring(self.command_ring()),
            RegionSpec::Arena(self.command_arena()),
            RegionSpec::Board,
        ];
        let per_rank = [
            RegionSpec::Ring(self.event_ring()),
            RegionSpec::Arena(self.event_arena()),
        ];
        total_bytes(&shared).saturating_add(total_bytes(&per_rank).saturating_mul(u64::from(world_size)))
    }

    /// Checks the sizes and the number of ranks.
    ///
    /// # Errors
    /// [`SetupError::BadSpec`] with the name of the setting.
    pub fn check(&self, world_size: u16) -> Result<(), SetupError> {
        if world_size == 0 || world_size > MAX_WORLD_SIZE {
            let limits = "1 to 64";
            return Err(SetupError::BadSpec {
                what: "number of workers",
                value: world_size.into(),
                limits,
            });
        }
        let rings = [
            ("command_ring_bytes", self.command_ring_bytes),
            ("event_ring_bytes", self.event_ring_bytes),
        ];
        for (what, bytes) in rings {
            if !bytes.is_power_of_two() || !(8 << 10..=1 << 30).contains(&bytes) {
                let limits = "a power of two from 8 KiB to 1 GiB";
                return Err(SetupError::BadSpec {
                    what,
                    value: bytes as u64,
                    limits,
                });
            }
        }
        let arenas = [
            ("command_arena_bytes", self.command_arena_bytes),
            ("event_arena_bytes", self.event_arena_bytes),
        ];
        for (what, bytes) in arenas {
            if bytes == 0 || !bytes.is_multiple_of(GRANULE_BYTES) || bytes > 64 << 30 {
                let limits = "a multiple of 64 KiB up to 64 GiB";
                return Err(SetupError::BadSpec {
                    what,
                    value: bytes as u64,
                    limits,
                });
            }
        }
        if self.inline_limit_bytes > Self::MAX_INLINE_LIMIT_BYTES {
            let what = "inline_limit_bytes";
            return Err(SetupError::BadSpec {
                what,
                value: self.inline_limit_bytes as u64,
                limits: "0 to 16 KiB",
            });
        }
        Ok(())
    }

    pub(crate) fn command_ring(&self) -> RingSpec {
        RingSpec {
            capacity_bytes: self.command_ring_bytes,
        }
    }

    pub(crate) fn event_ring(&self) -> RingSpec {
        RingSpec {
            capacity_bytes: self.event_ring_bytes,
        }
    }

    pub(crate) fn command_arena(&self) -> ArenaSpec {
        arena(self.command_arena_bytes)
    }

    pub(crate) fn event_arena(&self) -> ArenaSpec {
        arena(self.event_arena_bytes)
    }
}

fn arena(bytes: usize) -> ArenaSpec {
    ArenaSpec {
        granule_bytes: GRANULE_BYTES,
        n_granules: bytes / GRANULE_BYTES,
    }
}

/// Bytes of a record that a message and its inline blobs may use.
pub(crate) const RECORD_LIMIT_BYTES: usize = INLINE_LIMIT_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_the_documented_formula() {
        let spec = LinkSpec {
            command_ring_bytes: 1 << 20,
            command_arena_bytes: 1 << 21,
            event_ring_bytes: 1 << 16,
            event_arena_bytes: 1 << 20,
            ..LinkSpec::default()
        };
        // By hand; the extra of these arenas, 64 * 32 + 256 and 64 * 16 + 256, rounds up to 65 536.
        let shared = (1_048_576 + 12_288) + (2_097_152 + 65_536) + 8_448;
        let per_rank = (65_536 + 12_288) + (1_048_576 + 65_536);
        assert_eq!(spec.total_bytes(3), shared + 3 * per_rank);
    }

    #[test]
    fn wrong_sizes_are_named() {
        let name = |spec: LinkSpec, world_size| match spec.check(world_size) {
            Err(SetupError::BadSpec { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let ok = LinkSpec::default();
        ok.check(64).unwrap();
        assert_eq!(name(ok, 0), "number of workers");
        assert_eq!(name(ok, 65), "number of workers");
        assert_eq!(
            name(
                LinkSpec {
                    command_ring_bytes: 3 << 20,
                    ..ok
                },
                1
            ),
            "command_ring_bytes"
        );
        assert_eq!(
            name(
                LinkSpec {
                    event_ring_bytes: 512,
                    ..ok
                },
                1
            ),
            "event_ring_bytes"
        );
        assert_eq!(
            name(
                LinkSpec {
                    event_arena_bytes: 1000,
                    ..ok
                },
                1
            ),
            "event_arena_bytes"
        );
        assert_eq!(
            name(
                LinkSpec {
                    command_arena_bytes: 0,
                    ..ok
                },
                1
            ),
            "command_arena_bytes"
        );
        assert_eq!(
            name(
                LinkSpec {
                    inline_limit_bytes: 1 << 20,
                    ..ok
                },
                1
            ),
            "inline_limit_bytes"
        );
    }

    #[test]
    fn spinning_follows_the_policy() {
        assert_eq!(SpinPolicy::Never.spin_ns(1), 0);
        assert_eq!(SpinPolicy::ForNs(7).spin_ns(64), 7);
        assert_eq!(SpinPolicy::Auto.spin_ns(u16::MAX), 0);
    }
}
