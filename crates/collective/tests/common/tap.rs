//! A group of two whose second rank has a stranger on its lines.
//!
//! Both ranks are real while the group forms. Then a second handle to rank 1's sockets speaks in
//! its place: what rank 0 hears is arbitrary, but comes over connections it has every reason to
//! trust.

use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use unisono_collective::call::MessageHeader;
use unisono_collective::fabric::{
    Arrival, Arrivals, Connector, Cores, Fabric, GroupSetup, Network, Opening, Use,
};
use unisono_collective::schedule::Topology;
use unisono_collective::{
    Algorithm, Epoch, Error, FormError, Group, Options, Reduction, Request, Transport, Work,
};
use unisono_net::Connection;

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
    tap: Arc<Tap>,
}

/// What a stranger says on the lines of rank 1.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    /// On the control connection.
    pub control: Vec<u8>,
    /// On a connection for messages to the victim.
    pub incoming: Vec<u8>,
    /// On the connection for the victim's messages.
    pub outgoing: Vec<u8>,
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
        let tap = Arc::new(Tap::new());
        let mut options = Options::default();
        options.transport = Transport::Tcp;
        // Nothing is tried over several: there is one data link to tap.
        options.streams = Some(1);
        let epoch = Epoch::new(0);
        let form = |rank| Group::world(tap.clone(), epoch.clone(), rank, 2, options.clone());
        let (victim, silent) = std::thread::scope(|scope| {
            let silent = scope.spawn(|| form(1).expect("the group forms"));
            (form(0).expect("the group forms"), silent.join().expect("forming does not panic"))
        });
        Tapped { victim, _silent: silent, tap }
    }

    /// Rank 0 starts an all-reduce, a receive and a send. `lines` says what it hears beside the data; on
    /// the data link, `reply` makes an answer from what it sent itself, which is what
    /// an honest peer with the same input would send. Then the stranger acts as `ending` says.
    pub fn attack(
        self,
        lines: &Lines,
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

        // Before anything is said that may end the group.
        let outgoing = self.tap.line(|lines| &lines.outgoing);
        let data = self.tap.line(|lines| &lines.data);
        let honest = overhear(&data, MessageHeader::SIZE + COUNT * size_of::<f32>());
        speak(&data, &reply(honest));
        let control = self.tap.line(|lines| &lines.control);
        let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let connection = Connection::from(theirs);
        let arrival = Arrival { peer: 1, purpose: Use::Messages, connection };
        self.tap.victim.others.put(arrival);
        speak(&outgoing, &lines.outgoing);
        speak(&ours, &lines.incoming);
        speak(&control, &lines.control);
        if ending == Ending::HangUp {
            for line in [&control, &outgoing, &ours, &data] {
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
}

/// Reads what rank 0 says on the data link.
fn overhear(mut data: &Socket, length: usize) -> Vec<u8> {
    let deadline = Instant::now() + PATIENCE;
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match data.read(&mut bytes[filled..]) {
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

/// Sends what the socket takes; a rank that hung up misses the rest.
fn speak(socket: &Socket, bytes: &[u8]) {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.send(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(_) => return,
        }
    }
}

/// Connects two ranks and keeps a second handle to what rank 1 gets.
struct Tap {
    victim: Arc<Ends>,
    silent: Arc<Ends>,
    control: Mutex<[Option<Connection>; 2]>,
    lines: Mutex<Handles>,
}

#[derive(Default)]
struct Handles {
    control: Option<Socket>,
    data: Option<Socket>,
    outgoing: Option<Socket>,
}

/// What a rank has been sent.
struct Ends {
    links: Arrivals,
    others: Arrivals,
}

impl Ends {
    fn new() -> Arc<Ends> {
        Arc::new(Ends { links: Arrivals::new().unwrap(), others: Arrivals::new().unwrap() })
    }
}

impl Tap {
    fn new() -> Tap {
        let (here, there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let control = Some(there.try_clone().unwrap());
        let lines = Mutex::new(Handles { control, ..Handles::default() });
        let control = Mutex::new([here, there].map(|end| Some(end.into())));
        Tap { victim: Ends::new(), silent: Ends::new(), control, lines }
    }

    /// A line, once there is one.
    fn line(&self, which: impl Fn(&Handles) -> &Option<Socket>) -> Socket {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = which(&self.lines.lock().unwrap()) {
                return line.try_clone().unwrap();
            }
            assert!(Instant::now() < deadline, "the victim opens no connection");
            std::thread::yield_now();
        }
    }
}

impl Connector for Tap {
    fn connect(self: Arc<Self>, setup: &GroupSetup) -> Result<Fabric, FormError> {
        let control = self.control.lock().unwrap()[setup.me].take().expect("a rank connects once");
        Ok(Fabric {
            topology: Topology::all_apart(2),
            control: vec![(1 - setup.me, control)],
            regions: Vec::new(),
            cores: Cores::of(1, 1),
            network: Arc::new(TapNetwork { me: setup.me, tap: self }),
        })
    }
}

/// The victim opens all connections, and the tap keeps a handle to their other ends.
struct TapNetwork {
    me: usize,
    tap: Arc<Tap>,
}

impl Network for TapNetwork {
    fn dial(&self, purpose: Use, _: usize) -> Opening {
        if self.me == 1 {
            return Opening::Coming;
        }
        let (here, there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let mut lines = self.tap.lines.lock().unwrap();
        match purpose {
            Use::Data(_) => {
                lines.data = Some(there.try_clone().unwrap());
                let connection = Connection::from(there);
                self.tap.silent.links.put(Arrival { peer: 0, purpose, connection });
            }
            Use::Messages | Use::Control => lines.outgoing = Some(there),
        }
        Opening::Open(Some(here.into()))
    }

    fn advance(&self, opening: &mut Opening) -> Result<Option<Connection>, String> {
        match opening {
            Opening::Open(connection) => Ok(connection.take()),
            _ => Ok(None),
        }
    }

    fn links(&self) -> &Arrivals {
        if self.me == 0 { &self.tap.victim.links } else { &self.tap.silent.links }
    }

    fn others(&self) -> &Arrivals {
        if self.me == 0 { &self.tap.victim.others } else { &self.tap.silent.others }
    }
}
