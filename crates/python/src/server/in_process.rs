//! A server in the process of a worker.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;

use pyo3::prelude::*;
use socket2::{Domain, Socket, Type};
use unisono_net::Token;
use unisono_relaxed::server::{Files, Server, ServerOptions};

use super::settings::environment;
use crate::error::not_begun;

/// Connections that may wait to be accepted: one per worker of a large job.
const QUEUE: i32 = 1024;

/// A server of a part of the weights, on threads of this process.
#[pyclass(frozen)]
pub struct InProcessServer {
    /// Where it listens: HOST:PORT.
    #[pyo3(get)]
    address: String,
    /// Until it was closed.
    server: Mutex<Option<Server>>,
    /// The process that started it. A child of `fork` has its memory but not its threads.
    process: u32,
}

#[pymethods]
impl InProcessServer {
    /// Serves the part of this number at a free port of this machine's address `ip`, to workers that
    /// know the token.
    #[new]
    fn new(py: Python<'_>, ip: &str, number: usize, token: [u8; 32]) -> PyResult<InProcessServer> {
        let failed = |reason: String| not_begun(py, format!("cannot serve on {ip}: {reason}"));
        let ip: IpAddr = ip.parse().map_err(|_| failed("not an IP address".into()))?;
        let listener = listener(ip).map_err(|error| failed(error.to_string()))?;
        let address = listener.local_addr().ok().and_then(|address| address.as_socket());
        let address = address.ok_or_else(|| failed("it has no port".into()))?.to_string();
        let files = Files { number, ..Files::default() };
        let encrypt = environment().map_err(failed)?.encrypt;
        let token = Token::from_bytes(token).with_encryption(encrypt);
        let options = ServerOptions { token, files, recorder: None };
        let server = py.detach(|| Server::start(listener, options));
        let server = Mutex::new(Some(server.map_err(|error| failed(error.to_string()))?));
        Ok(InProcessServer { address, server, process: std::process::id() })
    }

    /// Ends it; workers that still need it lose it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }
}

impl InProcessServer {
    fn end(&self) {
        let server = self.server.lock().expect("no panic while locked").take();
        match std::process::id() == self.process {
            true => drop(server),
            // Its threads are not here, and the connections are those of the parent.
            false => std::mem::forget(server),
        }
    }
}

impl Drop for InProcessServer {
    fn drop(&mut self) {
        Python::attach(|py| py.detach(|| self.end()));
    }
}

fn listener(ip: IpAddr) -> std::io::Result<Socket> {
    let address = SocketAddr::new(ip, 0);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.bind(&address.into())?;
    socket.listen(QUEUE)?;
    Ok(socket)
}
