//! Running the programs from tests: always with a limit, always with what they said.

use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A run that takes longer is killed and fails its test; many times what the slowest one needs.
const LIMIT: Duration = Duration::from_secs(300);

/// The shipped demo checkpoint.
pub(crate) fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/models/demo/emoji-dit")
}

/// A reference case of this repository.
pub(crate) fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// The `denoised` program in a folder of its own, with the variables that change its behaviour removed.
pub(crate) fn denoised(folder: &Path) -> Command {
    #[expect(
        clippy::disallowed_methods,
        reason = "tests start the programs as a person does"
    )]
    let mut command = Command::new(env!("CARGO_BIN_EXE_denoised"));
    command
        .current_dir(folder)
        .env_remove("DENOISED_MODEL")
        .env_remove("DENOISED_LOG")
        .stdin(Stdio::null());
    command
}

/// What a finished program left.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The objects on stdout, one a line.
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        let text = self.text();
        text.lines()
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}\n{}", self.stderr))
            })
            .collect()
    }

    /// Panics with everything that was said unless the exit code is `code`; a panic of the program itself never is right.
    #[track_caller]
    pub(crate) fn expect_code(self, code: i32) -> Self {
        assert!(!self.stderr.contains("panicked"), "it panicked:\n{}", self.stderr);
        assert_eq!(
            self.code(),
            Some(code),
            "{}\nstdout: {}\nstderr: {}",
            self.status,
            self.text(),
            self.stderr
        );
        self
    }
}

/// A program that runs, its output collected by threads so that no pipe fills up. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    stdout: Option<thread::JoinHandle<Vec<u8>>>,
    stderr: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
    stderr_end: Option<thread::JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(mut command: Command, input: &[u8]) -> Self {
        if !input.is_empty() {
            command.stdin(Stdio::piped());
        }
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        if let Some(mut stdin) = child.stdin.take() {
            let input = input.to_vec();
            thread::spawn(move || {
                let _ = stdin.write_all(&input);
            });
        }
        let mut stdout = child.stdout.take().expect("it was piped");
        let mut stderr = child.stderr.take().expect("it was piped");
        let collected = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let for_thread = std::sync::Arc::clone(&collected);
        Self {
            stdout: Some(thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = stdout.read_to_end(&mut bytes);
                bytes
            })),
            stderr: collected,
            stderr_end: Some(thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n_bytes @ 1..) = stderr.read(&mut buffer) {
                    for_thread.lock().unwrap().extend_from_slice(&buffer[..n_bytes]);
                }
            })),
            child,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.stderr.lock().unwrap()).into_owned()
    }

    /// Waits until stderr contains `text`.
    #[track_caller]
    pub(crate) fn wait_for_stderr(&mut self, text: &str) {
        let until = Instant::now() + LIMIT;
        while !self.stderr().contains(text) {
            let status = self.child.try_wait().expect("it is our child");
            assert!(
                status.is_none() && Instant::now() < until,
                "{status:?} before it said `{text}`:\n{}",
                self.stderr()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn finish(self) -> Outcome {
        self.finish_within(LIMIT)
    }

    /// As [`Running::finish`], with a limit of its own.
    #[track_caller]
    pub(crate) fn finish_within(mut self, limit: Duration) -> Outcome {
        let until = Instant::now() + limit;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                break status;
            }
            assert!(
                Instant::now() < until,
                "no end after {limit:?}; stderr: {}",
                self.stderr()
            );
            thread::sleep(Duration::from_millis(2));
        };
        let stdout = self
            .stdout
            .take()
            .expect("taken once")
            .join()
            .expect("the reader does not panic");
        self.stderr_end
            .take()
            .expect("taken once")
            .join()
            .expect("the reader does not panic");
        Outcome {
            status,
            stdout,
            stderr: self.stderr(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `denoised` with `args` in `folder` to its end.
#[track_caller]
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(folder: &Path, args: &[S]) -> Outcome {
    let mut command = denoised(folder);
    command.args(args);
    Running::start(command, b"").finish()
}

/// Processes whose parent is `pid`.
pub(crate) fn children_of(pid: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc is there");
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|&child| parent_of(child) == Some(pid)).collect()
}

/// The parent of a process that is no zombie.
fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (state != "Z").then_some(parent)
}

/// Whether the process is there and no zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    parent_of(pid).is_some()
}

/// Sends a signal to a process.
#[track_caller]
pub(crate) fn send(signal: Signal, pid: u32) {
    rustix::process::kill_process(raw(pid), signal)
        .unwrap_or_else(|error| panic!("{signal:?} to {pid}: {error}"));
}

/// Sends a signal to a process and all others of its group, as a terminal does.
#[track_caller]
pub(crate) fn send_to_group(signal: Signal, leader: u32) {
    rustix::process::kill_process_group(raw(leader), signal)
        .unwrap_or_else(|error| panic!("{signal:?} to the group of {leader}: {error}"));
}

fn raw(pid: u32) -> Pid {
    Pid::from_raw(pid.cast_signed()).expect("a process id is not 0")
}

/// Waits until `is_so` or `limit` has passed; says whether it became so.
pub(crate) fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + limit;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A writable copy of a checkpoint folder, to be damaged.
pub(crate) fn copy_of(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder can be made");
    for entry in fs::read_dir(from).expect("the checkpoint is there") {
        let entry = entry.expect("a readable entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_of(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).expect("a file can be copied");
        }
    }
}

/// Width, height, pixels and text chunks of a PNG.
#[derive(Debug, PartialEq)]
pub(crate) struct Picture {
    pub(crate) size: (u32, u32),
    pub(crate) rgb: Vec<u8>,
    pub(crate) texts: Vec<(String, String)>,
}

/// Decodes a PNG.
#[track_caller]
pub(crate) fn decode(bytes: &[u8]) -> Picture {
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes))
        .read_info()
        .expect("a PNG");
    let mut rgb = vec![0; reader.output_buffer_size().expect("a sane size")];
    reader.next_frame(&mut rgb).expect("whole pixel data");
    reader.finish().expect("a whole file");
    let info = reader.info();
    let mut texts: Vec<(String, String)> = Vec::new();
    for chunk in &info.uncompressed_latin1_text {
        texts.push((chunk.keyword.clone(), chunk.text.clone()));
    }
    for chunk in &info.utf8_text {
        texts.push((chunk.keyword.clone(), chunk.get_text().expect("readable text")));
    }
    Picture {
        size: (info.width, info.height),
        rgb,
        texts,
    }
}
