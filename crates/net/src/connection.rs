//! A connection whose two ends have proven the job's token to each other, in the clear or encrypted.
//!
//! In the clear, sending and receiving are the system calls of the socket. Encrypted, a half of a
//! connection keeps some bytes of its own, of which the socket does not know: what was sent is under way
//! only once it [is flushed](Sender::is_flushed), and what was received may [wait](Receiver::has_unread)
//! where no poll sees it.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use socket2::Socket;

use crate::cipher::{Keys, Open, Seal};
use crate::timed::TimedStream;

/// A connection: one half to send by and one to receive by, which two threads may use at once.
#[derive(Debug)]
pub struct Connection {
    /// Sends.
    pub sender: Sender,
    /// Receives.
    pub receiver: Receiver,
}

/// The half of a connection that sends.
pub struct Sender {
    socket: Arc<Socket>,
    seal: Option<Box<Seal>>,
}

/// The half of a connection that receives.
pub struct Receiver {
    socket: Arc<Socket>,
    open: Option<Box<Open>>,
}

impl Connection {
    /// The connection over a socket, encrypted if there are keys.
    pub(crate) fn new(socket: Socket, keys: Option<Keys>) -> Connection {
        let socket = Arc::new(socket);
        let (seal, open) = keys.map(Keys::split).unzip();
        let sender = Sender { socket: socket.clone(), seal };
        Connection { sender, receiver: Receiver { socket, open } }
    }

    /// The socket beneath: to watch it, to shut it down, to ask for addresses.
    pub fn socket(&self) -> &Arc<Socket> {
        &self.sender.socket
    }

    /// The connection as a stream that ends at `deadline`.
    pub fn until(&mut self, deadline: Instant) -> TimedStream<'_> {
        TimedStream::new(self, deadline)
    }
}

/// The end of a pair of sockets that this process made itself.
impl From<Socket> for Connection {
    fn from(socket: Socket) -> Connection {
        Connection::new(socket, None)
    }
}

impl Sender {
    /// The socket beneath.
    pub fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Sends some of these bytes, and says how many. A peer that is gone is an error, never a signal.
    pub fn send(&mut self, bytes: &[u8], flags: SendFlags) -> rustix::io::Result<usize> {
        let flags = flags | SendFlags::NOSIGNAL;
        match &mut self.seal {
            None => rustix::net::send(&self.socket, bytes, flags),
            Some(seal) => seal.send(&self.socket, &[IoSlice::new(bytes)], flags),
        }
    }

    /// As [`Sender::send`], from several places.
    pub fn send_vectored(
        &mut self,
        slices: &[IoSlice<'_>],
        flags: SendFlags,
    ) -> rustix::io::Result<usize> {
        let flags = flags | SendFlags::NOSIGNAL;
        let mut control = SendAncillaryBuffer::default();
        match &mut self.seal {
            None => rustix::net::sendmsg(&self.socket, slices, &mut control, flags),
            Some(seal) => seal.send(&self.socket, slices, flags),
        }
    }

    /// Whether the system has all that was sent.
    pub fn is_flushed(&self) -> bool {
        self.seal.as_ref().is_none_or(|seal| seal.is_flushed())
    }

    /// Gives the system what was sent and it has not got yet; an error if it does not take all of it.
    pub fn flush(&mut self, flags: SendFlags) -> rustix::io::Result<()> {
        match &mut self.seal {
            None => Ok(()),
            Some(seal) => seal.flush(&self.socket, flags | SendFlags::NOSIGNAL),
        }
    }
}

impl Receiver {
    /// The socket beneath.
    pub fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Receives some bytes, and says how many; 0 if the peer has ended the connection.
    pub fn receive(&mut self, into: &mut [u8], flags: RecvFlags) -> rustix::io::Result<usize> {
        match &mut self.open {
            None => rustix::net::recv(&self.socket, into, flags).map(|(received, _)| received),
            Some(open) => open.receive(&self.socket, &mut [IoSliceMut::new(into)], flags),
        }
    }

    /// As [`Receiver::receive`], to several places.
    pub fn receive_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> rustix::io::Result<usize> {
        match &mut self.open {
            None => rustix::io::readv(&self.socket, into),
            Some(open) => open.receive(&self.socket, into, RecvFlags::empty()),
        }
    }

    /// Copies the first bytes that are there, which are received later. Never waits.
    pub fn peek(&mut self, into: &mut [u8]) -> rustix::io::Result<usize> {
        match &mut self.open {
            None => self.receive(into, RecvFlags::PEEK | RecvFlags::DONTWAIT),
            Some(open) => open.peek(&self.socket, into),
        }
    }

    /// Whether bytes are here that a poll of the socket does not see.
    pub fn has_unread(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.has_unread())
    }
}

/// Waits as the socket does.
impl Read for Receiver {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(self.receive(into, RecvFlags::empty())?)
    }
}

/// Waits as the socket does.
impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.send(bytes, SendFlags::empty())?;
        while let Err(error) = Sender::flush(self, SendFlags::empty()) {
            if error != rustix::io::Errno::INTR {
                return Err(error.into());
            }
        }
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("socket", &self.socket).finish_non_exhaustive()
    }
}
