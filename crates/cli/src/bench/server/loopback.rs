//! The *loopback*, the limit that the servers are compared with: a process that takes as many bytes from each worker
//! over plain TCP as a push has, encoded or not, and then sends it as many as a pull has, and does nothing else.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use unisono::net::pace::send_unpaced_within_machine;

use super::model::Model;

/// Takes the connections of all workers, and serves each by a thread.
pub fn serve(listener: &TcpListener, model: &Model) -> std::io::Result<()> {
    for _ in 0..model.workers {
        let (stream, _) = listener.accept()?;
        let mut loopback = Loopback::new(stream, model)?;
        std::thread::spawn(move || loopback.serve());
    }
    Ok(())
}

/// One end of a plain connection that carries as many bytes as the pushes and pulls of a worker have.
pub struct Loopback {
    stream: TcpStream,
    pushed: Vec<u8>,
    pulled: Vec<u8>,
}

impl Loopback {
    /// To the other end.
    pub fn connect(address: SocketAddr, model: &Model) -> std::io::Result<Loopback> {
        Loopback::new(TcpStream::connect(address)?, model)
    }

    /// At the end of the worker.
    pub fn push_pull(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&self.pushed)?;
        self.stream.read_exact(&mut self.pulled)
    }

    fn new(stream: TcpStream, model: &Model) -> std::io::Result<Loopback> {
        stream.set_nodelay(true)?;
        send_unpaced_within_machine(&stream);
        let [pushed, pulled] = [model.pushed_bytes(), model.bytes()].map(|bytes| vec![1; bytes]);
        Ok(Loopback { stream, pushed, pulled })
    }

    /// At the other end, until the worker leaves.
    fn serve(&mut self) -> std::io::Result<()> {
        loop {
            self.stream.read_exact(&mut self.pushed)?;
            self.stream.write_all(&self.pulled)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Shutdown};

    use unisono_codec::CodecSpec;
    use unisono_codec::sender::{Origin, Scratch, Sender};

    use super::*;

    /// What is pushed is encoded, what is pulled is not.
    #[test]
    fn the_loopback_moves_what_a_push_and_a_pull_have() {
        let codecs = [None, Some("fp16"), Some("int8"), Some("int4"), Some("sign")];
        for codec in codecs.map(|codec| codec.map(|codec| codec.parse::<CodecSpec>().unwrap())) {
            let model = Model { elements: 5000, tensors: 3, workers: 1, codec: codec.clone() };
            let pushed = codec.map_or(60_000, |codec| {
                let origin =
                    Origin { shape: vec![5000], parameter: 0, seed: 0, worker: 0, mean_of: 1 };
                let (mut bytes, mut scratch) = (Vec::new(), Scratch::default());
                let mut sender = Sender::new(codec.build(), origin, false);
                sender.encode(0, &model.gradient(), &mut scratch, &mut bytes);
                3 * bytes.len()
            });
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let mut worker = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut server = Loopback::new(listener.accept().unwrap().0, &model).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _left = server.serve();
                    server.stream.shutdown(Shutdown::Both)
                });
                worker.write_all(&vec![1; pushed]).unwrap();
                worker.shutdown(Shutdown::Write).unwrap();
                let mut pulled = Vec::new();
                worker.read_to_end(&mut pulled).unwrap();
                assert_eq!(pulled.len(), 60_000, "{:?}", model.codec);
            });
        }
    }
}
