//! A relay that keeps what it passes on.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Passes on what arrives at an address, and keeps a copy of it, both ways.
#[derive(Clone, Default)]
pub struct Wiretap(Arc<Mutex<Vec<u8>>>);

impl Wiretap {
    /// An address that leads to another.
    pub fn before(&self, target: SocketAddr) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let tap = self.clone();
        std::thread::spawn(move || {
            for here in listener.incoming().flatten() {
                let there = TcpStream::connect(target);
                let both =
                    there.and_then(|there| Ok((there.try_clone()?, there, here.try_clone()?)));
                let Ok((there, back, out)) = both else { continue };
                let _ = (here.set_nodelay(true), there.set_nodelay(true));
                tap.pass(out, there);
                tap.pass(back, here);
            }
        });
        Ok(address)
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let tap = self.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 1 << 16];
            while let Ok(read @ 1..) = from.read(&mut buffer) {
                tap.seen().extend_from_slice(&buffer[..read]);
                if to.write_all(&buffer[..read]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    }

    /// Whether these bytes were seen.
    pub fn shows(&self, secret: &[u8]) -> bool {
        self.seen().windows(secret.len()).any(|window| window == secret)
    }

    fn seen(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
