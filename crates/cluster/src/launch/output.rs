//! The ranks' output, line by line: whole lines, none lost, the last ones remembered.
//!
//! A line is passed on when it is complete, so that lines of different ranks never mix. One that is
//! longer than the [limit](longest_line) is passed on in pieces of that size, each a line by itself:
//! a rank that never ends its line must not occupy memory without end.
//!
//! When output cannot be written any more, because its reader has gone or the disk is full, the
//! launcher is told, once, and ends the job. What the ranks write until then is read and dropped:
//! they are told to end in the usual way, and may still clean up.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, mem};

use super::Event;

/// Somewhere to write whole lines, shared by all ranks.
pub type Sink = Arc<Mutex<dyn Write + Send>>;

/// Lines remembered of each rank's stderr: enough for a traceback, few enough to read.
pub(super) const TAIL_LINES: usize = 20;

/// The longest line of a rank that is kept together. A larger limit keeps longer ones whole
/// and lets a rank that never ends a line occupy more memory.
const MAX_LINE: usize = 16 << 20;

/// What unfinished lines may occupy in all. More lets many ranks write long lines; less keeps the
/// memory for the ranks.
const ALL_LINES: usize = 1 << 30;

/// The longest line that is kept together in a job of so many members on this node.
pub(super) fn longest_line(members: usize) -> usize {
    const STREAMS: usize = 2;
    MAX_LINE.min(ALL_LINES / (STREAMS * members.max(1)))
}

/// Bytes remembered of a line of the tail.
pub(super) const MAX_TAIL_LINE: usize = 1000;

/// Locks a sink, whatever happened to its last user.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where lines go, and whom to tell if they cannot.
pub(super) struct Destination {
    pub sink: Sink,
    pub events: Sender<Event>,
    pub longest_line: usize,
}

/// A pipe that is being copied.
pub(super) struct Forwarding {
    /// Disconnects when the pipe is at its end.
    end: Receiver<()>,
    tail: Arc<Mutex<Tail>>,
}

impl Forwarding {
    /// Copies `pipe` to `to` on a thread of its own, every line preceded by `label`.
    pub fn start(
        mut pipe: impl Read + Send + 'static,
        to: Destination,
        label: String,
    ) -> io::Result<Forwarding> {
        let tail = Arc::new(Mutex::new(Tail::default()));
        let remembered = tail.clone();
        let (finished, end) = channel::<()>();
        std::thread::Builder::new().name("unisono-output".into()).spawn(move || {
            // Moved here so that it is dropped, and `end` disconnected, when the thread ends.
            let _finished = finished;
            let mut lost = false;
            let result = copy_lines(&mut pipe, &label, to.longest_line, |lines, text| {
                lines.iter().for_each(|line| lock(&remembered).push(line));
                if lost {
                    return;
                }
                let mut sink = lock(&to.sink);
                if let Err(error) = sink.write_all(text).and_then(|()| sink.flush()) {
                    lost = true;
                    let _ = to.events.send(Event::OutputLost(error));
                }
            });
            if let Err(error) = result {
                log::warn!("cannot read the output of a rank or server: {error}");
            }
        })?;
        Ok(Forwarding { end, tail })
    }

    /// Waits for the end of the pipe; says whether it came in time. A process that a rank left
    /// behind can hold the pipe open for ever.
    pub fn wait_end(&self, patience: Duration) -> bool {
        self.end.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }

    /// The last lines so far.
    pub fn tail(&self) -> Vec<String> {
        lock(&self.tail).lines.iter().cloned().collect()
    }
}

/// Reads `pipe` to its end. `emit` gets the lines that each read completed, one by one and as
/// labelled text.
fn copy_lines(
    pipe: &mut impl Read,
    label: &str,
    longest: usize,
    mut emit: impl FnMut(&[Vec<u8>], &[u8]),
) -> io::Result<()> {
    let mut splitter = LineSplitter::new(longest);
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let received = match pipe.read(&mut buffer) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let lines = match received {
            0 => splitter.finish(),
            _ => splitter.push(&buffer[..received]),
        };
        if !lines.is_empty() {
            let text = lines.iter().flat_map(|line| [label.as_bytes(), line]).collect::<Vec<_>>();
            emit(&lines, &text.concat());
        }
        if received == 0 {
            return Ok(());
        }
    }
}

/// Cuts a stream into lines that end with `\n`, `\r\n`, or a lone `\r` as progress bars write it.
struct LineSplitter {
    partial: Vec<u8>,
    longest: usize,
}

impl LineSplitter {
    fn new(longest: usize) -> LineSplitter {
        LineSplitter { partial: Vec::new(), longest }
    }

    /// The lines that `bytes` completes, with their ends.
    fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        for &byte in bytes {
            // Only now it is known that the carriage return stood alone.
            if self.partial.last() == Some(&b'\r') && byte != b'\n' {
                lines.push(mem::take(&mut self.partial));
            }
            self.partial.push(byte);
            if byte == b'\n' {
                lines.push(mem::take(&mut self.partial));
            } else if self.partial.len() >= self.longest {
                let mut piece = mem::take(&mut self.partial);
                piece.push(b'\n');
                lines.push(piece);
            }
        }
        // A progress bar says nothing more until its next update: show this one.
        if self.partial.last() == Some(&b'\r') && self.partial.len() > 1 {
            lines.push(mem::take(&mut self.partial));
        }
        lines
    }

    /// What is left at the end of the stream, completed so that nothing else joins it.
    fn finish(&mut self) -> Vec<Vec<u8>> {
        if self.partial.is_empty() {
            return Vec::new();
        }
        self.partial.push(b'\n');
        vec![mem::take(&mut self.partial)]
    }
}

/// The last lines of a stream.
#[derive(Default)]
struct Tail {
    lines: VecDeque<String>,
    /// The newest line ended in `\r`: on a terminal, the next takes its place.
    overwrite: bool,
}

impl Tail {
    fn push(&mut self, line: &[u8]) {
        let overwritten = mem::replace(&mut self.overwrite, line.ends_with(b"\r"));
        // The line feed of a pair that was cut after its carriage return.
        if overwritten && line == b"\n" {
            self.overwrite = false;
            return;
        }
        if overwritten || self.lines.len() == TAIL_LINES {
            if overwritten {
                self.lines.pop_back()
            } else {
                self.lines.pop_front()
            };
        }
        let kept = &line[..line.len().min(MAX_TAIL_LINE)];
        self.lines.push_back(String::from_utf8_lossy(kept).trim_end().to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(pieces: &[&[u8]]) -> Vec<String> {
        split_at(MAX_LINE, pieces)
    }

    fn split_at(longest: usize, pieces: &[&[u8]]) -> Vec<String> {
        let mut splitter = LineSplitter::new(longest);
        let mut lines: Vec<Vec<u8>> =
            pieces.iter().flat_map(|piece| splitter.push(piece)).collect();
        lines.extend(splitter.finish());
        lines.into_iter().map(|line| String::from_utf8(line).unwrap()).collect()
    }

    #[test]
    fn lines_end_where_terminals_end_them() {
        assert_eq!(split(&[b"a\nb", b"c\n", b"d"]), ["a\n", "bc\n", "d\n"]);
        assert_eq!(split(&[b"x\r\ny\r\n"]), ["x\r\n", "y\r\n"]);
        assert_eq!(split(&[b"10%\r20%\r", b"30%\rdone\n"]), ["10%\r", "20%\r", "30%\r", "done\n"]);
    }

    #[test]
    fn a_line_without_end_is_bounded() {
        let lines = split_at(1000, &[&[b'x'; 2005]]);
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!(lengths, [1001, 1001, 6]);
    }

    #[test]
    fn unfinished_lines_of_all_members_have_a_bound() {
        for members in [0, 1, 8, 32, 1000, 65_536 + 1024] {
            let longest = longest_line(members);
            assert!((4096..=MAX_LINE).contains(&longest), "{members}: {longest}");
            assert!(2 * members * longest <= ALL_LINES, "{members}: {longest}");
        }
    }

    #[test]
    fn the_tail_is_what_a_terminal_would_show_last() {
        let mut tail = Tail::default();
        (0..30).for_each(|number| tail.push(format!("{number}\n").as_bytes()));
        (0..50).for_each(|percent| tail.push(format!("{percent}%\r").as_bytes()));
        assert_eq!(tail.lines.len(), TAIL_LINES);
        assert_eq!(tail.lines.front().unwrap(), "11");
        assert_eq!(tail.lines.back().unwrap(), "49%");
    }

    proptest! {
        #[test]
        fn no_byte_is_lost(text in "[ab\r\n]{0,200}", cuts in prop::collection::vec(0usize..200, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> =
                cuts.windows(2).map(|pair| &text.as_bytes()[pair[0]..pair[1]]).collect();
            let lines = split(&pieces);
            prop_assert!(lines.iter().all(|line| line.ends_with(['\n', '\r'])));
            let joined = lines.concat();
            prop_assert!(joined == text || joined == format!("{text}\n"), "{joined:?}");
        }
    }
}
