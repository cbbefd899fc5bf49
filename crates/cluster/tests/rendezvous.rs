//! The rendezvous over real sockets: ranks are threads of this process.

#[path = "common/ports.rs"]
mod ports;

use std::collections::VecDeque;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ports::free_ports;
use socket2::Socket;
use unisono_cluster::place::{Launcher, Place, Rendezvous};
use unisono_cluster::rendezvous::{
    Abort, Gathered, JoinRefusal, MAX_BLOB, RendezvousError, Server, connect,
};
use unisono_net::{Acceptor, Admission, HandshakeError, Token};

const LONG: Duration = Duration::from_secs(30);

fn soon() -> Instant {
    Instant::now() + LONG
}

fn place(rank: u32, world: u32, rendezvous: Rendezvous, token: Option<Token>) -> Place {
    Place {
        rank,
        world,
        local_rank: rank,
        local_world: world,
        node: Some(0),
        rendezvous,
        token,
        job_name: "test".into(),
        launcher: Launcher::Torchrun,
    }
}

fn at_rank_zero(ports: &[u16]) -> Rendezvous {
    Rendezvous::RankZero { host: "127.0.0.1".into(), ports: ports.to_vec() }
}

/// Runs `ranks` as threads and returns how each fared.
fn meet(places: Vec<Place>, patience: Duration) -> Vec<Result<Gathered, RendezvousError>> {
    let deadline = Instant::now() + patience;
    let rank = |place: Place| {
        move || {
            let blob = vec![place.rank as u8; place.rank as usize * 100];
            connect(&place, false, deadline)?.exchange(&blob)
        }
    };
    let threads: Vec<_> = places.into_iter().map(|place| thread::spawn(rank(place))).collect();
    threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
}

/// A rendezvous as a launcher hosts it.
struct Hosted {
    server: Server,
    _acceptor: Acceptor,
    port: u16,
    token: Token,
}

impl Hosted {
    fn start(world: u32) -> Hosted {
        let token = Token::random().unwrap();
        let server = Server::start(world, Some(token.clone())).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let listeners = vec![Socket::from(listener)];
        let acceptor =
            Acceptor::start(listeners, server.admission(&token), server.doorkeeper()).unwrap();
        Hosted { server, _acceptor: acceptor, port, token }
    }

    fn place(&self, rank: u32, world: u32) -> Place {
        let rendezvous = Rendezvous::Launcher { host: "127.0.0.1".into(), port: self.port };
        place(rank, world, rendezvous, Some(self.token.clone()))
    }
}

fn assert_all_gathered(results: Vec<Result<Gathered, RendezvousError>>) -> Gathered {
    let gathered: Vec<Gathered> = results.into_iter().map(|result| result.unwrap()).collect();
    for (rank, blob) in gathered[0].blobs.iter().enumerate() {
        assert_eq!(*blob, vec![rank as u8; rank * 100]);
    }
    assert!(gathered.iter().all(|one| *one == gathered[0]));
    gathered.into_iter().next().unwrap()
}

#[test]
fn everyone_leaves_with_everything() {
    let ports = free_ports(4);
    let places = (0..9).map(|rank| place(rank, 9, at_rank_zero(&ports), None)).collect();
    let gathered = assert_all_gathered(meet(places, LONG));
    assert_ne!(gathered.token, Token::public("test"), "the true token is a secret");

    let hosted = Hosted::start(3);
    let places = (0..3).map(|rank| hosted.place(rank, 3)).collect();
    assert_eq!(assert_all_gathered(meet(places, LONG)).token, hosted.token);
}

#[test]
fn a_world_of_one_needs_no_rendezvous() {
    let session = connect(&place(0, 1, Rendezvous::Alone, None), false, soon()).unwrap();
    assert!(session.local_ip().is_loopback());
    assert_eq!(session.exchange(b"me").unwrap().blobs, [b"me"]);
}

#[test]
fn ports_taken_by_others_are_passed_over() {
    let ports = free_ports(4);
    // One port belongs to a program that never answers, the next to another job.
    let _silent = TcpListener::bind(("127.0.0.1", ports[0])).unwrap();
    let other = TcpListener::bind(("127.0.0.1", ports[1])).unwrap();
    let admission = Admission::new(Token::public("other"), &[]);
    let _other = Acceptor::start(vec![other.into()], admission, |_, _| {}).unwrap();
    let places = (0..3).map(|rank| place(rank, 3, at_rank_zero(&ports), None)).collect();
    assert_all_gathered(meet(places, LONG));
}

#[test]
fn strangers_do_not_disturb_a_job_that_forms() {
    let ports = free_ports(1);
    let attempts = AtomicU32::new(0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = VecDeque::new();
            while !stop.load(Ordering::Relaxed) {
                let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", ports[0])) else {
                    thread::yield_now();
                    continue;
                };
                let attempt = attempts.fetch_add(1, Ordering::Relaxed) as usize;
                let _ = stranger.write_all(&[attempt as u8; 300][..attempt % 300]);
                held.push_back(stranger);
                if held.len() > 40 {
                    held.pop_front();
                }
            }
        });
        let early = (0..2).map(|rank| place(rank, 3, at_rank_zero(&ports), None)).collect();
        let early = scope.spawn(move || meet(early, LONG));
        // The last rank comes when the strangers have been busy for a while.
        let deadline = soon();
        while attempts.load(Ordering::Relaxed) < 200 && Instant::now() < deadline {
            thread::yield_now();
        }
        let late = place(2, 3, at_rank_zero(&ports), None);
        let mut results = meet(vec![late], LONG);
        results.splice(0..0, early.join().expect("no rank panics"));
        stop.store(true, Ordering::Relaxed);
        assert_all_gathered(results);
    });
    assert!(attempts.into_inner() >= 200);
}

#[test]
fn those_who_never_came_are_named() {
    let ports = free_ports(1);
    let places = [0, 2].map(|rank| place(rank, 4, at_rank_zero(&ports), None)).to_vec();
    // Long enough for the two that do come, on a machine with much else to do.
    for result in meet(places, Duration::from_secs(4)) {
        match result.unwrap_err() {
            RendezvousError::Aborted(Abort::Missing { missing }) => assert_eq!(missing, [1, 3]),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_rendezvous_without_a_host_is_an_error_that_says_where() {
    let ports = free_ports(3);
    let lonely = place(1, 2, at_rank_zero(&ports), None);
    let error = connect(&lonely, false, Instant::now() + Duration::from_millis(200)).unwrap_err();
    let RendezvousError::Unreachable { last, .. } = &error else { panic!("{error}") };
    // What the attempts ran into, not that the last of them was cut off.
    assert!(last.contains("refused"), "{error}");
    assert!(error.to_string().contains(&ports[0].to_string()), "{error}");
}

#[test]
fn a_rank_that_leaves_calls_it_off() {
    for host_leaves in [false, true] {
        let ports = free_ports(1);
        let host = connect(&place(0, 3, at_rank_zero(&ports), None), false, soon()).unwrap();
        let other = connect(&place(1, 3, at_rank_zero(&ports), None), false, soon()).unwrap();
        let (leaver, stayer) = if host_leaves { (host, other) } else { (other, host) };
        let waiting = thread::spawn(move || stayer.exchange(b"x"));
        drop(leaver);
        match waiting.join().unwrap().unwrap_err() {
            RendezvousError::Aborted(Abort::Left { rank }) => assert_eq!(rank, !host_leaves as u32),
            RendezvousError::Aborted(Abort::Host { .. }) if host_leaves => {}
            // The host had not looked who is at its door.
            RendezvousError::Lost(_) if host_leaves => {}
            other => panic!("{other}"),
        }
    }
}

#[test]
fn misfits_are_refused_and_the_others_meet() {
    let hosted = Hosted::start(2);
    let try_join = |rank, world| {
        let result = connect(&hosted.place(rank, world), false, soon()).unwrap().exchange(b"");
        match result.unwrap_err() {
            RendezvousError::Refused(refusal) => refusal,
            other => panic!("{other}"),
        }
    };
    assert_eq!(try_join(2, 2), JoinRefusal::RankOutOfRange { rank: 2, world: 2 });
    let mismatch = JoinRefusal::WorldMismatch { rank: 1, theirs: 3, ours: 2 };
    assert_eq!(try_join(1, 3), mismatch);
    let places = (0..2).map(|rank| hosted.place(rank, 2)).collect();
    assert_all_gathered(meet(places, LONG));
    assert_eq!(try_join(1, 2), JoinRefusal::Late { rank: 1 });
}

#[test]
fn one_rank_cannot_join_twice() {
    let hosted = Hosted::start(3);
    let first = connect(&hosted.place(1, 3), false, soon()).unwrap();
    let second = connect(&hosted.place(1, 3), false, soon()).unwrap();
    let both = [first, second].map(|session| thread::spawn(move || session.exchange(b"")));
    let is_duplicate = |error: &RendezvousError| {
        matches!(error, RendezvousError::Refused(JoinRefusal::DuplicateRank { rank: 1 }))
    };
    // Whichever came second is refused at once; the other waits until all is called off.
    let deadline = soon();
    while !both.iter().any(|rank| rank.is_finished()) {
        assert!(Instant::now() < deadline, "neither rank was refused");
        thread::yield_now();
    }
    hosted.server.abort("enough");
    let errors = both.map(|rank| rank.join().unwrap().unwrap_err());
    assert_eq!(errors.iter().filter(|error| is_duplicate(error)).count(), 1);
    assert!(errors.iter().any(|error| error.to_string().contains("enough")), "{errors:?}");
}

#[test]
fn the_launcher_can_call_it_off() {
    let hosted = Hosted::start(2);
    let session = connect(&hosted.place(0, 2), false, soon()).unwrap();
    hosted.server.gone(1);
    // A rank that comes later learns it too.
    let late = connect(&hosted.place(0, 2), false, soon()).unwrap();
    for session in [session, late] {
        match session.exchange(b"").unwrap_err() {
            RendezvousError::Aborted(abort) => assert_eq!(abort, Abort::Gone { rank: 1 }),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn another_token_is_refused_at_once() {
    let hosted = Hosted::start(2);
    let mut stranger = hosted.place(1, 2);
    stranger.token = Some(Token::random().unwrap());
    let error = connect(&stranger, false, soon()).unwrap_err();
    assert!(matches!(error, RendezvousError::Handshake { .. }), "{error}");
}

#[test]
fn blobs_are_bounded() {
    let hosted = Hosted::start(2);
    let session = connect(&hosted.place(0, 2), false, soon()).unwrap();
    let error = session.exchange(&[0; MAX_BLOB + 1]).unwrap_err();
    assert!(matches!(error, RendezvousError::BlobTooLarge { .. }), "{error}");
    let hosted = Hosted::start(1);
    let session = connect(&hosted.place(0, 1), false, soon()).unwrap();
    assert_eq!(session.exchange(&[7; MAX_BLOB]).unwrap().blobs, [vec![7; MAX_BLOB]]);
}

#[test]
fn ranks_that_disagree_about_encryption_are_told_so() {
    for host_encrypts in [false, true] {
        let token = Some(Token::random().unwrap());
        // More than one port to look at: the answer is final nevertheless.
        let ports = free_ports(2);
        let place = |rank| place(rank, 2, at_rank_zero(&ports), token.clone());
        let host = connect(&place(0), host_encrypts, soon()).unwrap();
        let error = connect(&place(1), !host_encrypts, soon()).unwrap_err();
        let RendezvousError::Handshake { cause: HandshakeError::Encryption { theirs }, .. } = error
        else {
            panic!("{error}");
        };
        assert_eq!(theirs, host_encrypts);
        let other = connect(&place(1), host_encrypts, soon()).unwrap();
        let met = thread::spawn(move || other.exchange(b"other"));
        assert_eq!(host.exchange(b"host").unwrap().token.encrypts(), host_encrypts);
        assert_eq!(met.join().unwrap().unwrap().blobs, [b"host".to_vec(), b"other".to_vec()]);
    }
}
