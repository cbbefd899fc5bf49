//! A connection whose two ends have proven the job's token to each other.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use socket2::Socket;

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
#[derive(Debug)]
pub struct Sender {
    socket: Arc<Socket>,
}

/// The half of a connection that receives.
#[derive(Debug)]
pub struct Receiver {
    socket: Arc<Socket>,
}

impl Connection {
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
        let socket = Arc::new(socket);
        Connection { sender: Sender { socket: socket.clone() }, receiver: Receiver { socket } }
    }
}

impl Sender {
    /// The socket beneath.
    pub fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Sends some of these bytes, and says how many. A peer that is gone is an error, never a signal.
    pub fn send(&mut self, bytes: &[u8], flags: SendFlags) -> rustix::io::Result<usize> {
        rustix::net::send(&self.socket, bytes, flags | SendFlags::NOSIGNAL)
    }

    /// As [`Sender::send`], from several places.
    pub fn send_vectored(
        &mut self,
        slices: &[IoSlice<'_>],
        flags: SendFlags,
    ) -> rustix::io::Result<usize> {
        let mut control = SendAncillaryBuffer::default();
        rustix::net::sendmsg(&self.socket, slices, &mut control, flags | SendFlags::NOSIGNAL)
    }
}

impl Receiver {
    /// The socket beneath.
    pub fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Receives some bytes, and says how many; 0 if the peer has ended the connection.
    pub fn receive(&mut self, into: &mut [u8], flags: RecvFlags) -> rustix::io::Result<usize> {
        rustix::net::recv(&self.socket, into, flags).map(|(received, _)| received)
    }

    /// As [`Receiver::receive`], to several places.
    pub fn receive_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> rustix::io::Result<usize> {
        rustix::io::readv(&self.socket, into)
    }

    /// Copies the first bytes that are there, which are received later. Never waits.
    pub fn peek(&mut self, into: &mut [u8]) -> rustix::io::Result<usize> {
        self.receive(into, RecvFlags::PEEK | RecvFlags::DONTWAIT)
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
        Ok(self.send(bytes, SendFlags::empty())?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
