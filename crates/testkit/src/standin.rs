//! Fake CUDA devices for tests: the stand-in for CUDA's libraries (`crates/cuda/standin`), and processes that run on it.
//!
//! R1. The libraries are chosen by the loader's path, which a process has from its start: whoever wants them is a child of the test,
//!     a worker or the test program once more ([`under_standin`]).
//! R2. Kernels run in two opposite schedules, which notice different mistakes: tests of results run in both.
//! R3. A test that needs the stand-in never skips: what keeps it from being built fails the test.

use crate::watchdog::Watchdog;
use std::{
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::Duration,
};

/// Set in the child that runs a test's body: the test's name.
const BODY_OF: &str = "DENOISED_TEST_UNDER_STANDIN";
/// Most that a test's body may take; many times what the slowest takes on a busy machine.
const BODY_LIMIT: Duration = Duration::from_secs(900);

/// In which order the stand-in does what a GPU does at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Blocks and threads in order; asynchronous copies land as late as they may.
    #[default]
    LateForward,
    /// Blocks and threads from the last to the first; asynchronous copies land at once, and streams start late.
    EarlyReverse,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::LateForward, Self::EarlyReverse];

    fn env(self) -> [(&'static str, &'static str); 3] {
        let [order, copies, delay_us] = match self {
            Self::LateForward => ["fwd", "late", "0"],
            Self::EarlyReverse => ["rev", "early", "20"],
        };
        [
            ("CPUCUDA_ORDER", order),
            ("CPUCUDA_ASYNC", copies),
            ("FAKECUDA_DELAY_US", delay_us),
        ]
    }
}

/// A machine with fake devices.
#[derive(Clone, Debug)]
pub struct Standin {
    /// See [`Schedule`].
    pub schedule: Schedule,
    /// How many devices there are.
    pub n_devices: usize,
    /// Memory of each, in bytes; the stand-in's own choice (2 GiB) if `None`.
    pub memory_bytes: Option<u64>,
    /// `<kernel>:<nth>:<code>`: the nth launch of the kernel fails with this `CUresult`, for good.
    pub fault: Option<String>,
    /// Further variables of the stand-in.
    pub more: Vec<(&'static str, String)>,
}

impl Default for Standin {
    fn default() -> Self {
        Self::new(Schedule::default())
    }
}

impl Standin {
    /// Two devices.
    pub fn new(schedule: Schedule) -> Self {
        Self {
            schedule,
            n_devices: 2,
            memory_bytes: None,
            fault: None,
            more: Vec::new(),
        }
    }

    /// The variables of a process that is to see this machine. Builds the stand-in if nobody did.
    pub fn env(&self) -> Vec<(OsString, OsString)> {
        let folder = library_folder();
        let mut path = OsString::from(folder);
        if let Some(before) = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) {
            path.push(":");
            path.push(before);
        }
        let cache = folder.with_file_name("cache");
        let mut env: Vec<(OsString, OsString)> = vec![
            ("LD_LIBRARY_PATH".into(), path),
            ("FAKECUDA_CACHE".into(), cache.join("objects").into()),
            // Compiled kernels that name objects of this very stand-in.
            ("XDG_CACHE_HOME".into(), cache.join(version(folder)).into()),
            ("FAKECUDA_DEVICES".into(), self.n_devices.to_string().into()),
        ];
        let mut set = |name: &str, value: &str| env.push((name.into(), value.into()));
        for (name, value) in self.schedule.env() {
            set(name, value);
        }
        if let Some(memory_bytes) = self.memory_bytes {
            set("FAKECUDA_MEM", &memory_bytes.to_string());
        }
        if let Some(fault) = &self.fault {
            set("FAKECUDA_FAULT", fault);
        }
        for (name, value) in &self.more {
            set(name, value);
        }
        env
    }
}

/// The folder with the stand-in's libraries, built by `scripts/standin` once per process (and by nobody if nothing changed).
pub fn library_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let script = root.join("scripts/standin");
        let output = output_of(command(&script)).unwrap_or_else(|error| {
            panic!("{} cannot be run: {error}", script.display());
        });
        assert!(
            output.status.success(),
            "the stand-in is not built, scripts/standin says:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        assert!(
            folder.join("libcuda.so").is_file(),
            "{} has no libcuda.so",
            folder.display()
        );
        folder
    })
}

/// Differs whenever what compiled kernels depend on does.
fn version(folder: &Path) -> String {
    static VERSION: OnceLock<String> = OnceLock::new();
    let version = VERSION.get_or_init(|| {
        let mut hasher = DefaultHasher::new();
        for name in ["shim/cpucuda.h", "libnvrtc.so"] {
            let bytes = fs::read(folder.join(name));
            bytes
                .unwrap_or_else(|error| panic!("{name} of the stand-in: {error}"))
                .hash(&mut hasher);
        }
        format!("kernels-{:016x}", hasher.finish())
    });
    version.clone()
}

/// Runs `body` in a process that finds the fake devices of `standin`: this test program once more, for the test `test_name` alone (its
/// full path below the crate, as the harness names it). The test consists of this call and nothing else.
///
/// # Panics
/// If the child's test fails; the text holds what it said.
#[track_caller]
pub fn under_standin(test_name: &str, standin: &Standin, body: impl FnOnce()) {
    if std::env::var_os(BODY_OF).is_some_and(|name| name == test_name) {
        let _watchdog = Watchdog::new(test_name, BODY_LIMIT);
        return body();
    }
    let program = std::env::current_exe().expect("a test program has a path");
    let mut command = command(&program);
    command
        .args([test_name, "--exact", "--nocapture", "--test-threads=1"])
        .envs(standin.env())
        .env(BODY_OF, test_name);
    let output = output_of(command).expect("the test program starts once more");
    let text = String::from_utf8_lossy(&output.stdout);
    let has_passed = output.status.success() && text.contains("1 passed");
    assert!(
        has_passed,
        "`{test_name}` under {standin:?}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

#[expect(
    clippy::disallowed_methods,
    reason = "a build script and the test program itself, not processes of the product"
)]
fn command(program: &Path) -> Command {
    Command::new(program)
}

fn output_of(mut command: Command) -> std::io::Result<Output> {
    command.stdin(std::process::Stdio::null()).output()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_runs_in_a_process_of_its_own_with_the_stand_in_first_on_the_path() {
        let standin = Standin {
            memory_bytes: Some(1 << 20),
            ..Standin::new(Schedule::EarlyReverse)
        };
        let test_name =
            "standin::tests::a_body_runs_in_a_process_of_its_own_with_the_stand_in_first_on_the_path";
        under_standin(test_name, &standin, || {
            let var = |name: &str| std::env::var(name).expect("it is set");
            assert!(var("LD_LIBRARY_PATH").starts_with(&*library_folder().to_string_lossy()));
            assert_eq!(var("CPUCUDA_ORDER"), "rev");
            assert_eq!(var("FAKECUDA_MEM"), "1048576");
        });
    }

    #[test]
    #[should_panic(expected = "under Standin")]
    fn a_test_that_is_not_there_does_not_pass() {
        under_standin("standin::tests::nobody", &Standin::default(), || {});
    }
}
