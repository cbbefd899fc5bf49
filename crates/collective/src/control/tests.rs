use std::io::Write;

use socket2::{Domain, Socket, Type};

use super::*;
use crate::fabric::Arrivals;
use unisono_net::rank::Rank;

/// After this long, what has not happened never will.
const HUNG: Duration = Duration::from_secs(30);

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + HUNG;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A network in which nothing can be dialed.
struct Nothing(Arrivals);

impl Network for Nothing {
    fn dial(&self, _: Use, _: usize) -> Opening {
        Opening::Open(None)
    }

    fn advance(&self, _: &mut Opening) -> Result<Option<Connection>, String> {
        Err("there is nothing".into())
    }

    fn links(&self) -> &Arrivals {
        &self.0
    }

    fn others(&self) -> &Arrivals {
        &self.0
    }
}

/// A rank whose neighbours are at the command of a test.
fn monitored(timeout: Duration) -> (Control, Arc<GroupState>, [Socket; 2]) {
    let pair = || Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    let ((one, first), (two, second)) = (pair(), pair());
    let state = GroupState::new(0, 0, Rank::all(3), Duration::MAX);
    let connections = vec![(1, one.into()), (2, two.into())];
    let network = Arc::new(Nothing(Arrivals::new().unwrap()));
    let control = Control::start(connections, network, 0, timeout, state.clone()).unwrap();
    (control, state, [first, second])
}

fn frame(fact: &Fact) -> Vec<u8> {
    let news = postcard::to_stdvec(fact).unwrap();
    [&Frame::News { length: news.len() }.encode()[..], &news].concat()
}

/// A rank that has left owes no sign of life: not even if its connection stays open, because
/// another process holds it.
#[test]
fn a_peer_that_has_left_is_never_silent() {
    let (_control, state, [mut left, mut silent]) = monitored(Duration::from_millis(100));
    left.write_all(&frame(&Fact::Left { rank: 1, seq: 5, why: None })).unwrap();
    wait_until("the goodbye was heard", || state.has_left(1, 5));
    // Heard from later than the one that left.
    silent.write_all(&Frame::Heartbeat.encode()).unwrap();
    wait_until("one is given up", || state.is_over());
    let error = state.error(None);
    let Error::PeerLost { peer: Rank(2), loss: Loss::Silent(_), .. } = error else {
        panic!("{error:?}")
    };
}
