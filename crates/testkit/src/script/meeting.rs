//! Ranks that wait for each other, as in a collective operation: none goes on before all have come, and all must have come for the same.
//!
//! Each rank has a file to which it appends what it comes for; the others look there.

use denoised_types::{Failure, FailureCode, Rank};
use std::{
    fs::File,
    io::Write,
    os::unix::fs::FileExt,
    path::Path,
    sync::Mutex,
    time::{Duration, Instant},
};

/// How long a rank waits for the others; a stuck one is a failed test.
const LIMIT: Duration = Duration::from_secs(20);
/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// Bytes of one entry.
const ENTRY_BYTES: u64 = 8;

#[derive(Debug)]
pub(super) struct Meeting {
    rank: Rank,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    n_met: u64,
    /// By rank.
    files: Vec<File>,
}

fn broken(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(FailureCode::Internal, format!("{what}: {error}"))
}

impl Meeting {
    pub(super) fn join(folder: &Path, rank: Rank, world_size: u16) -> Result<Self, Failure> {
        let open = |other: u16| {
            std::fs::create_dir_all(folder)?;
            File::options()
                .read(true)
                .append(true)
                .create(true)
                .open(folder.join(other.to_string()))
        };
        let files = (0..world_size)
            .map(open)
            .collect::<std::io::Result<_>>()
            .map_err(|error| broken("cannot join a meeting", &error))?;
        let inner = Mutex::new(Inner { n_met: 0, files });
        Ok(Self { rank, inner })
    }

    /// Waits until every rank has come.
    ///
    /// # Errors
    /// One came for other steps, or did not come.
    pub(super) fn meet(&self, steps: impl Iterator<Item = (u64, u32)>) -> Result<(), Failure> {
        let entry = steps.fold(0xcbf2_9ce4_8422_2325u64, |hash, (request_id, step_idx)| {
            [request_id, u64::from(step_idx)].iter().fold(hash, |hash, part| {
                (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3)
            })
        });
        let mut inner = self.inner.lock().unwrap_or_else(|error| error.into_inner());
        let at = inner.n_met * ENTRY_BYTES;
        inner.n_met += 1;
        let n_met = inner.n_met;
        let mine = entry.to_le_bytes();
        inner.files[usize::from(self.rank.0)]
            .write_all(&mine)
            .map_err(|error| broken("cannot come to a meeting", &error))?;
        let end = Instant::now() + LIMIT;
        for (rank, file) in inner.files.iter().enumerate() {
            let mut theirs = [0; ENTRY_BYTES as usize];
            while file.read_exact_at(&mut theirs, at).is_err() {
                if Instant::now() >= end {
                    let text = format!("rank {rank} did not come to meeting {n_met}");
                    return Err(Failure::new(FailureCode::WorkerFailed, text));
                }
                std::thread::sleep(LOOK_EVERY);
            }
            if theirs != mine {
                let text = format!("rank {rank} came to meeting {n_met} for another step");
                return Err(Failure::new(FailureCode::WorkerFailed, text));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_goes_on_before_all_have_come_and_all_come_for_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let join = |rank| Meeting::join(folder.path(), Rank(rank), 2).unwrap();
        let (first, second) = (join(0), join(1));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                (0..100)
                    .map(|step| second.meet([(7, step)].into_iter()))
                    .collect::<Result<Vec<()>, Failure>>()
            });
            for step in 0..100 {
                first.meet([(7, step)].into_iter()).unwrap();
            }
            other.join().unwrap().unwrap();
            let other = scope.spawn(|| second.meet([(7, 100)].into_iter()));
            let failure = first.meet([(8, 100)].into_iter()).unwrap_err();
            assert_eq!(failure.message, "rank 1 came to meeting 101 for another step");
            other.join().unwrap().unwrap_err();
        });
    }
}
