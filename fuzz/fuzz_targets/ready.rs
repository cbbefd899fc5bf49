//! What a member says when it is ready, over a socket that closes afterwards.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use socket2::Socket;
use unisono_collective::internals::receive_ready;
use unisono_net::Connection;

fuzz_target!(|bytes: &[u8]| {
    let settings = [3; 32];
    let (mut theirs, ours) = UnixStream::pair().expect("a pair of sockets");
    theirs.write_all(&bytes[..bytes.len().min(4096)]).expect("it fits the buffer");
    drop(theirs);
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut ours = Connection::from(Socket::from(ours));
    let heard = receive_ready(&mut ours, 1, &settings, deadline);
    assert!(Instant::now() < deadline, "a closed socket was waited for");
    if let Ok(memory) = heard {
        assert!(memory.is_none(), "no descriptor was sent");
        assert_eq!(bytes[8..40], settings);
    }
});
