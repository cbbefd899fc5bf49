//! Control messages on a stream: a length of four bytes, then that many bytes of postcard.

use std::io::{self, Read, Write};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::Socket;

const HEADER: usize = 4;

/// Why no message arrived, or left.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("the connection closed")]
    Closed,
    #[error("the time is up")]
    TimedOut,
    #[error("a message of {len} bytes, where {limit} are allowed")]
    TooLong { len: usize, limit: usize },
    #[error("a message that makes no sense")]
    Malformed,
    #[error("{0}")]
    Io(io::Error),
}

/// The bytes of one message.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut bytes =
        postcard::to_extend(message, vec![0; HEADER]).map_err(|_| FrameError::Malformed)?;
    let len = u32::try_from(bytes.len() - HEADER).map_err(|_| FrameError::Malformed)?;
    bytes[..HEADER].copy_from_slice(&len.to_le_bytes());
    Ok(bytes)
}

/// Sends one message.
pub(crate) fn send(stream: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    stream.write_all(&encode(message)?).map_err(FrameError::from)
}

/// Receives one message of at most `limit` bytes.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &mut impl Read,
    limit: usize,
) -> Result<T, FrameError> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let mut bytes = vec![0; checked_len(header, limit)?];
    stream.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(|_| FrameError::Malformed)
}

/// Collects one message after the other from a socket that is never waited for.
#[derive(Default)]
pub(crate) struct FrameReader {
    bytes: Vec<u8>,
    filled: usize,
}

impl FrameReader {
    /// The next message, if all of it has arrived.
    pub fn poll<T: DeserializeOwned>(
        &mut self,
        socket: &Socket,
        limit: usize,
    ) -> Result<Option<T>, FrameError> {
        loop {
            if self.bytes.len() < HEADER {
                self.bytes.resize(HEADER, 0);
            }
            if self.filled == self.bytes.len() {
                let mut header = [0; HEADER];
                header.copy_from_slice(&self.bytes[..HEADER]);
                let whole = HEADER + checked_len(header, limit)?;
                if self.filled == whole {
                    let message = postcard::from_bytes(&self.bytes[HEADER..]);
                    *self = FrameReader::default();
                    return message.map(Some).map_err(|_| FrameError::Malformed);
                }
                self.bytes.resize(whole, 0);
            }
            match rustix::net::recv(socket, &mut self.bytes[self.filled..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(FrameError::Closed),
                Ok((received, _)) => self.filled += received,
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
        match error.kind() {
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => FrameError::Closed,
            TimedOut | WouldBlock => FrameError::TimedOut,
            _ => FrameError::Io(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn messages_arrive_in_any_pieces() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let theirs = Socket::from(theirs);
        let mut reader = FrameReader::default();
        let messages = ["one".to_owned(), String::new(), "three".repeat(100)];
        let bytes: Vec<u8> = messages.iter().flat_map(|text| encode(text).unwrap()).collect();
        let mut received = Vec::new();
        for piece in bytes.chunks(7) {
            ours.write_all(piece).unwrap();
            while let Some(text) = reader.poll::<String>(&theirs, 1000).unwrap() {
                received.push(text);
            }
        }
        assert_eq!(received, messages);
        drop(ours);
        assert!(matches!(reader.poll::<String>(&theirs, 1000), Err(FrameError::Closed)));
    }

    #[test]
    fn lengths_are_checked_before_they_are_believed() {
        let boast = u32::MAX.to_le_bytes();
        let error = receive::<String>(&mut &boast[..], 100).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { limit: 100, .. }));

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&boast).unwrap();
        let error = FrameReader::default().poll::<String>(&theirs.into(), 100).unwrap_err();
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
}
