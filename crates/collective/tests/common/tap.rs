//! A group of two whose second rank has a stranger on its lines.
//!
//! Both ranks are real while the group forms. Then a second handle to rank 1's sockets speaks in
//! its place: what rank 0 hears is arbitrary, but comes over connections it has every reason to
//! trust.

use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use socket2::Socket;
use unisono_collective::call::MessageHeader;
use unisono_collective::fabric::{Connector, Fabric, LocalHub, Plan};
use unisono_collective::{
    Algorithm, Epoch, Error, FormError, Group, Options, Reduction, Request, Transport, Work,
};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Elements of the all-reduce in which rank 0 waits.
pub const COUNT: usize = 500;

/// Bytes of each message that rank 0 sends and receives.
pub const MESSAGE: usize = 64;

/// The tags of what rank 0 receives and sends.
pub const RECEIVED: u32 = 1;
const SENT: u32 = 2;

/// A group with a tap on its second rank.
pub struct Tapped {
    victim: Group,
    /// Keeps the victim's connections open.
    _silent: Group,
    side: Socket,
    data: Socket,
}

/// What the stranger does when it has said everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "a fuzz target always hangs up")]
pub enum Ending {
    /// Closes the lines; nothing the victim waits for can come any more.
    HangUp,
    /// Stays on the line until the victim has what it waits for.
    Stay,
}

/// How the victim's operations ended.
#[derive(Debug)]
pub struct Outcomes {
    pub all_reduce: Result<Vec<f32>, Error>,
    pub receive: Result<[u8; MESSAGE], Error>,
    pub send: Result<(), Error>,
}

impl Tapped {
    pub fn new() -> Tapped {
        let tap = Arc::new(Tap { hub: LocalHub::new(2), sockets: Mutex::default() });
        let mut options = Options::default();
        options.transport = Transport::Tcp;
        let epoch = Epoch::new(0);
        let form = |rank| Group::world(tap.clone(), epoch.clone(), rank, 2, options.clone());
        let (victim, silent) = std::thread::scope(|scope| {
            let silent = scope.spawn(|| form(1).expect("the group forms"));
            (form(0).expect("the group forms"), silent.join().expect("forming does not panic"))
        });
        let (side, data) = tap.sockets.lock().unwrap().take().expect("rank 1 has connected");
        Tapped { victim, _silent: silent, side, data }
    }

    /// Rank 0 starts an all-reduce, a receive and a send. `side` is sent to it on the side
    /// channel; on the data link, `reply` makes an answer from what it sent itself, which is what
    /// an honest peer with the same input would send. Then the stranger acts as `ending` says.
    pub fn attack(
        self,
        side: &[u8],
        reply: impl FnOnce(Vec<u8>) -> Vec<u8>,
        ending: Ending,
    ) -> Outcomes {
        let mut buffer = vec![1.5f32; COUNT];
        let (mut received, mut sent) = ([0; MESSAGE], [7; MESSAGE]);
        let request = Request::all_reduce(&mut buffer, Reduction::Sum);
        let request = request.with_algorithm(Algorithm::Direct);
        // SAFETY: the buffers outlive the waits below.
        let [all_reduce, receive, send] = unsafe {
            [
                self.victim.submit(request),
                self.victim.submit_receive(received.as_mut_ptr(), MESSAGE, 1, RECEIVED),
                self.victim.submit_send(sent.as_mut_ptr(), MESSAGE, 1, SENT),
            ]
        }
        .map(|work| work.expect("the call is valid"));

        let honest = self.overhear(MessageHeader::SIZE + COUNT * size_of::<f32>());
        speak(&self.data, &reply(honest));
        speak(&self.side, side);
        if ending == Ending::HangUp {
            for line in [&self.side, &self.data] {
                // The victim may have hung up already.
                let _ = line.shutdown(std::net::Shutdown::Write);
            }
        }
        let [all_reduce, receive, send] = [all_reduce, receive, send].map(|work: Work| {
            work.wait_until(Instant::now() + PATIENCE).expect("every operation ends in time")
        });
        Outcomes {
            all_reduce: all_reduce.map(|()| buffer),
            receive: receive.map(|()| received),
            send,
        }
    }

    /// Reads what rank 0 says on the data link.
    fn overhear(&self, length: usize) -> Vec<u8> {
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while filled < length {
            match (&self.data).read(&mut bytes[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    assert!(Instant::now() < deadline, "the victim says nothing");
                    std::thread::yield_now();
                }
                Err(e) => panic!("the line is broken: {e}"),
            }
        }
        bytes.truncate(filled);
        bytes
    }
}

/// Sends what the socket takes; whoever hung up misses the rest.
fn speak(socket: &Socket, bytes: &[u8]) {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.send(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(_) => return,
        }
    }
}

/// Connects ranks through a hub and keeps a second handle to what rank 1 gets.
struct Tap {
    hub: Arc<LocalHub>,
    sockets: Mutex<Option<(Socket, Socket)>>,
}

impl Connector for Tap {
    fn connect(self: Arc<Self>, plan: &Plan) -> Result<Fabric, FormError> {
        let fabric = self.hub.clone().connect(plan)?;
        if plan.me == 1 {
            let side = fabric.side[0].as_ref().expect("ranks have a side channel");
            let data = &fabric.data[0][0];
            let both = (side.socket().try_clone().unwrap(), data.socket().try_clone().unwrap());
            *self.sockets.lock().unwrap() = Some(both);
        }
        Ok(fabric)
    }
}
