//! Control messages on a stream: a length of four bytes, then that many bytes of postcard. A frame of no
//! bytes says that its sender lives; the reader skips it.

use std::io::{self, Read, Write};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::Receiver;

/// Bytes of a length.
pub const HEADER: usize = 4;

/// The frame of no bytes.
pub const SIGN_OF_LIFE: [u8; HEADER] = [0; HEADER];

/// Why no message arrived, or left.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The other side has ended the connection.
    #[error("the connection closed")]
    Closed,
    /// The deadline passed.
    #[error("the time is up")]
    TimedOut,
    /// The other side announces more than the receiver expects.
    #[error("a message of {len} bytes, where {limit} are allowed")]
    TooLong {
        /// Its length.
        len: usize,
        /// The most that is expected.
        limit: usize,
    },
    /// The bytes are no message of the expected type.
    #[error("a message that makes no sense")]
    Malformed,
    /// The socket failed.
    #[error("{0}")]
    Io(io::Error),
}

/// Appends one message to a buffer. It must have bytes: its reader would take `()` for a sign of life.
pub fn append(message: &impl Serialize, into: &mut Vec<u8>) -> Result<(), FrameError> {
    let start = into.len();
    into.extend_from_slice(&SIGN_OF_LIFE);
    *into =
        postcard::to_extend(message, std::mem::take(into)).map_err(|_| FrameError::Malformed)?;
    let len = u32::try_from(into.len() - start - HEADER).map_err(|_| FrameError::Malformed)?;
    debug_assert!(len > 0, "a message of no bytes is a sign of life");
    into[start..start + HEADER].copy_from_slice(&len.to_le_bytes());
    Ok(())
}

/// The bytes of one message.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut bytes = Vec::new();
    append(message, &mut bytes)?;
    Ok(bytes)
}

/// Sends one message.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    stream.write_all(&encode(message)?).map_err(FrameError::from)
}

/// Receives one message of at most `limit` bytes.
pub fn receive<T: DeserializeOwned>(stream: &mut impl Read, limit: usize) -> Result<T, FrameError> {
    read(stream, limit, &mut Vec::new())?.ok_or(FrameError::Closed)
}

/// Receives one message of at most `limit` bytes, which `scratch` holds afterwards; `None` if the other
/// side has ended the connection before one. Errors of the stream are passed on as they are.
pub fn read<T: DeserializeOwned>(
    stream: &mut impl Read,
    limit: usize,
    scratch: &mut Vec<u8>,
) -> io::Result<Option<T>> {
    let mut header = SIGN_OF_LIFE;
    while header == SIGN_OF_LIFE {
        let begun = stream.read(&mut header)?;
        if begun == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut header[begun..])?;
    }
    scratch.resize(checked_len(header, limit)?, 0);
    stream.read_exact(scratch)?;
    let message = postcard::from_bytes(scratch).map_err(|_| FrameError::Malformed)?;
    Ok(Some(message))
}

/// Collects one message after the other from a connection, in pieces of any size.
#[derive(Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
    filled: usize,
}

impl FrameReader {
    /// The next message, if all of it has arrived. Never waits.
    pub fn poll<T: DeserializeOwned>(
        &mut self,
        from: &mut Receiver,
        limit: usize,
    ) -> Result<Option<T>, FrameError> {
        self.advance(from, limit, RecvFlags::DONTWAIT)
    }

    /// The next message. Waits for as long as the socket does, and goes on later where that was too short.
    pub fn next<T: DeserializeOwned>(
        &mut self,
        from: &mut Receiver,
        limit: usize,
    ) -> Result<Option<T>, FrameError> {
        self.advance(from, limit, RecvFlags::empty())
    }

    fn advance<T: DeserializeOwned>(
        &mut self,
        from: &mut Receiver,
        limit: usize,
        flags: RecvFlags,
    ) -> Result<Option<T>, FrameError> {
        loop {
            if self.bytes.len() < HEADER {
                self.bytes.resize(HEADER, 0);
            }
            if self.filled == self.bytes.len() {
                let mut header = [0; HEADER];
                header.copy_from_slice(&self.bytes[..HEADER]);
                let whole = HEADER + checked_len(header, limit)?;
                if whole == HEADER {
                    self.filled = 0;
                } else if self.filled == whole {
                    let message = postcard::from_bytes(&self.bytes[HEADER..]);
                    *self = FrameReader::default();
                    return message.map(Some).map_err(|_| FrameError::Malformed);
                }
                self.bytes.resize(whole, 0);
            }
            match from.receive(&mut self.bytes[self.filled..], flags) {
                Ok(0) => return Err(FrameError::Closed),
                Ok(received) => self.filled += received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}

fn checked_len(header: [u8; HEADER], limit: usize) -> Result<usize, FrameError> {
    match u32::from_le_bytes(header) as usize {
        len if len > limit => Err(FrameError::TooLong { len, limit }),
        len => Ok(len),
    }
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> FrameError {
        use io::ErrorKind::*;
        let error = match error.downcast::<FrameError>() {
            Ok(error) => return error,
            Err(error) => error,
        };
        match error.kind() {
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => FrameError::Closed,
            TimedOut | WouldBlock => FrameError::TimedOut,
            _ => FrameError::Io(error),
        }
    }
}

impl From<FrameError> for io::Error {
    fn from(error: FrameError) -> io::Error {
        match error {
            FrameError::Closed => io::ErrorKind::UnexpectedEof.into(),
            FrameError::TimedOut => io::ErrorKind::TimedOut.into(),
            FrameError::Io(error) => error,
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Connection;
    use proptest::prelude::*;
    use socket2::Socket;
    use std::os::unix::net::UnixStream;

    fn receiver(end: UnixStream) -> Receiver {
        Connection::from(Socket::from(end)).receiver
    }

    #[test]
    fn messages_arrive_in_any_pieces() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = receiver(theirs);
        let mut reader = FrameReader::default();
        let messages = ["one".to_owned(), String::new(), "three".repeat(100)];
        let alive = |frame: Vec<u8>| [&SIGN_OF_LIFE[..], &frame, &SIGN_OF_LIFE].concat();
        let bytes: Vec<u8> =
            messages.iter().flat_map(|text| alive(encode(text).unwrap())).collect();
        let mut received = Vec::new();
        for piece in bytes.chunks(7) {
            ours.write_all(piece).unwrap();
            while let Some(text) = reader.poll::<String>(&mut theirs, 1000).unwrap() {
                received.push(text);
            }
        }
        assert_eq!(received, messages);
        drop(ours);
        assert!(matches!(reader.poll::<String>(&mut theirs, 1000), Err(FrameError::Closed)));
    }

    #[test]
    fn lengths_are_checked_before_they_are_believed() {
        let boast = u32::MAX.to_le_bytes();
        let error = receive::<String>(&mut &boast[..], 100).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { limit: 100, .. }));

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&boast).unwrap();
        let error = FrameReader::default().poll::<String>(&mut receiver(theirs), 100).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { limit: 100, .. }));
    }

    #[test]
    fn nonsense_is_an_error() {
        // A string that claims to be longer than its message.
        let mut bytes = 3u32.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[200, 1, 65]);
        assert!(matches!(receive::<String>(&mut &bytes[..], 100), Err(FrameError::Malformed)));
        assert!(matches!(receive::<String>(&mut &bytes[..5], 100), Err(FrameError::Closed)));
    }

    #[test]
    fn signs_of_life_are_skipped_and_the_end_is_no_message() {
        let mut bytes = SIGN_OF_LIFE.to_vec();
        append(&"one".to_owned(), &mut bytes).unwrap();
        append(&"two".to_owned(), &mut bytes).unwrap();
        bytes.extend_from_slice(&SIGN_OF_LIFE);
        let (mut from, mut scratch) = (&bytes[..], Vec::new());
        for expected in ["one", "two"] {
            let message: Option<String> = read(&mut from, 100, &mut scratch).unwrap();
            assert_eq!(message.as_deref(), Some(expected));
        }
        assert_eq!(read::<String>(&mut from, 100, &mut scratch).unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (mut from, mut scratch) = (&bytes[..], Vec::new());
            while let Ok(Some(_)) = read::<Vec<String>>(&mut from, 100, &mut scratch) {}
        }
    }
}
