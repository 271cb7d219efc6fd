//! What a worker writes to standard error: passed on line by line, the last lines kept for errors.
//!
//! The sink is called on a thread of its own. One that blocks (a terminal that is held, a pipe that nobody reads) costs lines, and
//! neither the worker nor whoever watches over it waits.

use crate::StderrSink;
use denoised_os::{Deadline, poll::wait_readable};
use denoised_types::Rank;
use std::{
    collections::VecDeque,
    fs::File,
    io::{self, ErrorKind, Read},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::mpsc,
    time::Duration,
};

/// Lines that are kept.
const MAX_LINES: usize = 20;
/// Longer lines are passed on in pieces of this size.
const MAX_LINE_BYTES: usize = 4096;
/// What is read at most once a worker is gone, in case its own children keep writing.
const MAX_REST_BYTES: usize = 1 << 20;

/// Lines that wait for the sink; more are left out.
const MAX_WAITING_LINES: usize = 1024;
/// How long the sink may take for what waits when the world has ended.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The thread that calls the sink.
#[derive(Debug)]
pub(crate) struct StderrThread {
    lines: mpsc::SyncSender<(Rank, String)>,
    ended: mpsc::Receiver<()>,
}

impl StderrThread {
    /// # Errors
    /// No thread could be had.
    pub(crate) fn start(sink: StderrSink) -> io::Result<Self> {
        let (lines, waiting) = mpsc::sync_channel::<(Rank, String)>(MAX_WAITING_LINES);
        let (ends, ended) = mpsc::channel::<()>();
        std::thread::Builder::new()
            .name("workers' stderr".to_owned())
            .spawn(move || {
                for (rank, line) in waiting {
                    (sink.0)(rank, &line);
                }
                drop(ends);
            })?;
        Ok(Self { lines, ended })
    }

    /// Waits for a moment until the sink has got all lines. The tails are to be gone by now.
    pub(crate) fn finish(self) {
        drop(self.lines);
        // Whether it ended or its time is over, nobody waits for it any more.
        let _ = self.ended.recv_timeout(FLUSH_LIMIT);
    }
}

/// One worker's standard error.
#[derive(Debug)]
pub(crate) struct StderrTail {
    rank: Rank,
    pipe: Option<File>,
    partial: Vec<u8>,
    last: VecDeque<String>,
    lines: mpsc::SyncSender<(Rank, String)>,
    n_left_out: u64,
}

impl StderrTail {
    pub(crate) fn new(rank: Rank, pipe: Option<OwnedFd>, thread: &StderrThread) -> Self {
        Self {
            rank,
            pipe: pipe.map(File::from),
            partial: Vec::new(),
            last: VecDeque::new(),
            lines: thread.lines.clone(),
            n_left_out: 0,
        }
    }

    /// What to wait for, until the end of file.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads once, when [`StderrTail::fd`] is readable. Returns the bytes read.
    pub(crate) fn read(&mut self) -> usize {
        let Some(pipe) = &mut self.pipe else { return 0 };
        let mut bytes = [0; 4096];
        match pipe.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => 0,
            Ok(0) | Err(_) => {
                self.pipe = None;
                self.flush();
                0
            }
            Ok(n_bytes) => {
                self.take(&bytes[..n_bytes]);
                n_bytes
            }
        }
    }

    /// Reads what is left, once the worker is gone.
    pub(crate) fn read_rest(&mut self) {
        let mut n_bytes = 0;
        while let Some(fd) = self.fd()
            && n_bytes < MAX_REST_BYTES
            && wait_readable(&[fd], Deadline::PASSED).is_ok_and(|ready| ready[0])
        {
            n_bytes += self.read();
        }
        self.flush();
    }

    /// The last lines, oldest first.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        self.last.iter().map(String::as_str)
    }

    fn take(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' {
                self.line();
                continue;
            }
            self.partial.push(byte);
            if self.partial.len() >= MAX_LINE_BYTES {
                self.line();
            }
        }
    }

    fn flush(&mut self) {
        if !self.partial.is_empty() {
            self.line();
        }
    }

    fn line(&mut self) {
        let line = String::from_utf8_lossy(&self.partial).trim_end().to_owned();
        self.partial.clear();
        self.pass_on(&line);
        if !line.is_empty() {
            self.last.push_back(line);
        }
        if self.last.len() > MAX_LINES {
            self.last.pop_front();
        }
    }

    fn pass_on(&mut self, line: &str) {
        if self.n_left_out > 0 {
            let text = format!("({} lines are left out)", self.n_left_out);
            if self.lines.try_send((self.rank, text)).is_ok() {
                self.n_left_out = 0;
            }
        }
        let sent = self.lines.try_send((self.rank, line.to_owned()));
        self.n_left_out += u64::from(sent.is_err());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Write,
        sync::{Arc, Mutex},
    };

    #[test]
    fn lines_are_passed_on_and_the_last_ones_kept() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = {
            let seen = Arc::clone(&seen);
            StderrSink(Arc::new(move |rank, line: &str| {
                seen.lock().unwrap().push((rank, line.to_owned()))
            }))
        };
        let thread = StderrThread::start(sink).unwrap();
        let mut tail = StderrTail::new(Rank(3), Some(reader.into()), &thread);
        for line in 0..30 {
            writeln!(writer, "line {line}").unwrap();
        }
        write!(writer, "\n{}half", "x".repeat(MAX_LINE_BYTES)).unwrap();
        drop(writer);
        tail.read_rest();
        assert!(tail.fd().is_none());
        let kept: Vec<&str> = tail.lines().collect();
        assert_eq!((kept.len(), kept[0], kept[19]), (MAX_LINES, "line 12", "half"));
        drop(tail);
        thread.finish();
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 33);
        assert_eq!(seen[0], (Rank(3), "line 0".to_owned()));
    }

    #[test]
    fn what_the_sink_cannot_take_is_left_out_and_counted() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (seen, lines) = std::sync::mpsc::channel();
        let held = Mutex::new(held);
        let (takes, taken) = std::sync::mpsc::channel();
        let sink = StderrSink(Arc::new(move |_, line: &str| {
            takes.send(()).unwrap();
            // Blocks until the other end is gone.
            let _ = held.lock().unwrap().recv();
            seen.send(line.to_owned()).unwrap();
        }));
        let thread = StderrThread::start(sink).unwrap();
        let mut tail = StderrTail::new(Rank(0), Some(reader.into()), &thread);
        let n_lines = 3 * MAX_WAITING_LINES;
        for line in 0..n_lines {
            writeln!(writer, "{line}").unwrap();
            tail.read();
            if line == 0 {
                // From here on the sink holds one line, and the rest waits: no room opens by chance.
                taken.recv().unwrap();
            }
        }
        drop(release);
        // Room again: the next line says what is missing.
        let mut seen: Vec<String> = (0..MAX_WAITING_LINES).map(|_| lines.recv().unwrap()).collect();
        writeln!(writer, "the last").unwrap();
        tail.read();
        drop(tail);
        thread.finish();
        seen.extend(lines);
        let number = |line: &String| line.parse::<usize>().ok();
        let n_seen = seen.iter().filter_map(number).count();
        let left_out = |line: &String| line.strip_prefix('(')?.split_once(' ')?.0.parse::<usize>().ok();
        let n_left_out: usize = seen.iter().filter_map(left_out).sum();
        assert!(n_seen > 0 && n_left_out > 0);
        assert_eq!(n_seen + n_left_out, n_lines);
        assert_eq!(seen[seen.len() - 1], "the last");
    }
}
