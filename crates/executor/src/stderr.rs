//! What a worker writes to standard error: passed on line by line, the last lines kept for errors.

use crate::StderrSink;
use denoised_os::{Deadline, poll::wait_readable};
use denoised_types::Rank;
use std::{
    collections::VecDeque,
    fs::File,
    io::Read,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// Lines that are kept.
const MAX_LINES: usize = 20;
/// Longer lines are passed on in pieces of this size.
const MAX_LINE_BYTES: usize = 4096;
/// What is read at most once a worker is gone, in case its own children keep writing.
const MAX_REST_BYTES: usize = 1 << 20;

/// One worker's standard error.
#[derive(Debug)]
pub(crate) struct StderrTail {
    rank: Rank,
    pipe: Option<File>,
    partial: Vec<u8>,
    last: VecDeque<String>,
    sink: StderrSink,
}

impl StderrTail {
    pub(crate) fn new(rank: Rank, pipe: Option<OwnedFd>, sink: StderrSink) -> Self {
        Self {
            rank,
            pipe: pipe.map(File::from),
            partial: Vec::new(),
            last: VecDeque::new(),
            sink,
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
        (self.sink.0)(self.rank, &line);
        if !line.is_empty() {
            self.last.push_back(line);
        }
        if self.last.len() > MAX_LINES {
            self.last.pop_front();
        }
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
        let mut tail = StderrTail::new(Rank(3), Some(reader.into()), sink);
        for line in 0..30 {
            writeln!(writer, "line {line}").unwrap();
        }
        write!(writer, "\n{}half", "x".repeat(MAX_LINE_BYTES)).unwrap();
        drop(writer);
        tail.read_rest();
        assert!(tail.fd().is_none());
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 33);
        assert_eq!(seen[0], (Rank(3), "line 0".to_owned()));
        let kept: Vec<&str> = tail.lines().collect();
        assert_eq!((kept.len(), kept[0], kept[19]), (MAX_LINES, "line 12", "half"));
    }
}
