//! Workers that gossip over loopback, with threads in the place of processes, and those who disturb
//! them: peers that die, hang, lie, train another model or are cut off.

#[path = "common/forked.rs"]
mod forked;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use socket2::Socket;
use unisono_net::{Acceptor, Admission, Dialer, Introduction, Purpose, Target, Token};
use unisono_relaxed::gossip::{Cut, Gossip, GossipConfig, GossipError};
use unisono_relaxed::{Clock, Life};

const PURPOSE: Purpose = Purpose::new(*b"goss");
const TOKEN: Token = Token::from_bytes([9; 32]);
const HEADER: usize = 48;

/// Far longer than anything here takes, but for a test that hangs.
const HUNG: Duration = Duration::from_secs(120);

/// For tests in which an exchange has to be given up, or a cut found healed.
const SHORT: Duration = Duration::from_secs(1);

fn listeners(world: usize) -> (Vec<Option<Socket>>, Vec<SocketAddr>) {
    (0..world)
        .map(|_| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            (Some(listener.into()), address)
        })
        .unzip()
}

struct Job {
    listeners: Vec<Option<Socket>>,
    addresses: Vec<SocketAddr>,
    timeout: Duration,
}

impl Job {
    fn new(world: usize, timeout: Duration) -> Job {
        let (listeners, addresses) = listeners(world);
        Job { listeners, addresses, timeout }
    }

    /// At the address of this worker no process listens, now or later: it refuses at once, where a socket that
    /// listens and does not answer yet would be waited for. The worker may start elsewhere.
    fn absent(&mut self, rank: usize) {
        self.listeners[rank] = listeners(1).0.remove(0);
    }

    fn config(&mut self, rank: usize) -> GossipConfig {
        GossipConfig {
            rank: rank as u32,
            life: Life(1),
            addresses: self.addresses.clone(),
            listener: self.listeners[rank].take().expect("each rank starts once"),
            token: TOKEN,
            timeout: self.timeout,
            seed: 3,
            is_cut: None,
        }
    }

    fn start(&mut self, rank: usize, initial: Vec<Vec<f32>>) -> Gossip {
        Gossip::start(self.config(rank), initial).unwrap()
    }

    /// All workers at once, as a launcher starts them.
    fn start_all(&mut self, initial: impl Fn(usize) -> Vec<Vec<f32>> + Sync) -> Vec<Gossip> {
        self.start_some(self.addresses.len(), initial)
    }

    /// The first of them at once.
    fn start_some(
        &mut self,
        count: usize,
        initial: impl Fn(usize) -> Vec<Vec<f32>> + Sync,
    ) -> Vec<Gossip> {
        let configs: Vec<_> = (0..count).map(|rank| self.config(rank)).collect();
        let initial = &initial;
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..)
                .zip(configs)
                .map(|(rank, config)| scope.spawn(move || Gossip::start(config, initial(rank))))
                .collect();
            started.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        })
    }
}

fn first(gossip: &Gossip) -> f32 {
    let mut weights = vec![0.0; 3];
    gossip.weights(0, &mut weights).unwrap();
    weights[0]
}

fn spread(gossips: &[Gossip]) -> f32 {
    let values = || gossips.iter().map(first);
    values().fold(f32::MIN, f32::max) - values().fold(f32::MAX, f32::min)
}

/// Repeats `attempt` until it succeeds.
fn eventually(what: &str, mut attempt: impl FnMut() -> bool) {
    let deadline = Instant::now() + HUNG;
    while !attempt() {
        assert!(Instant::now() < deadline, "hung: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn exchange_once(gossip: &Gossip) {
    gossip.exchange().unwrap();
    gossip.settle();
}

#[test]
fn workers_with_different_data_find_the_common_minimum() {
    const WORLD: usize = 4;
    // Worker r alone would end at r; all together end at the mean.
    let gossips =
        Job::new(WORLD, HUNG).start_all(|rank| vec![vec![rank as f32 * 10.0; 3], vec![1.0]]);
    let step = Barrier::new(WORLD);
    std::thread::scope(|scope| {
        for (rank, gossip) in gossips.iter().enumerate() {
            let step = &step;
            scope.spawn(move || {
                let mut weights = vec![0.0; 3];
                for _ in 0..300 {
                    gossip.weights(0, &mut weights).unwrap();
                    let change: Vec<f32> =
                        weights.iter().map(|weight| 0.02 * (rank as f32 - weight)).collect();
                    gossip.step(&[change, vec![0.0]]).unwrap();
                    exchange_once(gossip);
                    // They start together and go on at the same pace, but exchange as they like.
                    step.wait();
                }
            });
        }
    });
    for gossip in &gossips {
        let value = first(gossip);
        assert!((value - 1.5).abs() < 0.3, "{value} is not the mean");
    }
    let all: Vec<_> = gossips.iter().map(Gossip::stats).collect();
    let sum = |count: fn(&unisono_relaxed::gossip::GossipStats) -> u64| -> u64 {
        all.iter().map(count).sum()
    };
    assert_eq!(sum(|stats| stats.done()), sum(|stats| stats.answered()));
    assert!(sum(|stats| stats.done()) > 300);
    assert!(all.iter().all(|stats| stats.clock == Clock(300) && stats.distance().is_some()));
    // An offer and its move, on both sides of each exchange that took place.
    let message = HEADER as u64 + 4 * 4;
    assert!(sum(|stats| stats.bytes()) >= sum(|stats| stats.done()) * 4 * message);
}

#[test]
fn replicas_meet_in_their_mean_and_no_read_sees_half_a_merge() {
    const LENGTH: usize = 100_000;
    let gossips = Job::new(3, HUNG).start_all(|rank| vec![vec![rank as f32; LENGTH]]);
    let over = AtomicBool::new(false);
    // If they never agree, the threads have to end for the test to fail.
    let deadline = Instant::now() + 2 * HUNG;
    std::thread::scope(|scope| {
        for gossip in &gossips {
            let over = &over;
            scope.spawn(move || {
                let mut weights = vec![0.0; LENGTH];
                while !over.load(Ordering::Relaxed) && Instant::now() < deadline {
                    gossip.weights(0, &mut weights).unwrap();
                    assert!(weights.iter().all(|weight| *weight == weights[0]), "half a merge");
                    exchange_once(gossip);
                }
            });
        }
        let values = || {
            gossips.iter().map(|gossip| {
                let mut weights = vec![0.0; LENGTH];
                gossip.weights(0, &mut weights).unwrap();
                weights[0]
            })
        };
        eventually("all agree on the mean", || values().all(|value| (value - 1.0).abs() < 1e-3));
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn forked_children_hold_no_connection() {
    let gossips = Job::new(2, HUNG).start_all(|rank| vec![vec![rank as f32; 3]]);
    eventually("both take part", || {
        gossips.iter().for_each(exchange_once);
        gossips.iter().all(|gossip| gossip.stats().done() > 0)
    });
    let (mine, of_child) = forked::connections();
    assert!(mine >= 2, "a connection has two ends, not {mine}");
    assert_eq!(of_child, 0);
}

#[test]
fn the_others_go_on_when_one_is_gone() {
    let mut gossips = Job::new(3, SHORT).start_all(|rank| vec![vec![rank as f32; 3]]);
    eventually("every worker takes part", || {
        gossips.iter().for_each(exchange_once);
        gossips.iter().all(|gossip| gossip.stats().done() > 0)
    });
    drop(gossips.pop());
    gossips[0].step(&[[8.0; 3]]).unwrap();
    let before = gossips[0].stats();
    eventually("the others agree, and the loss shows", || {
        gossips.iter().for_each(exchange_once);
        spread(&gossips) < 1e-3 && gossips[0].stats().partners[2].failed > before.partners[2].failed
    });
    let stats = gossips[0].stats();
    assert!(stats.partners[1].done + stats.partners[1].answered > 0);
    assert!(first(&gossips[1]) > 3.0, "{} lacks the step", first(&gossips[1]));
}

#[test]
fn who_joins_late_takes_over_from_the_furthest() {
    let mut job = Job::new(3, HUNG);
    job.absent(2);
    let mut started = job.start_some(2, |_| vec![vec![0.0; 3]]).into_iter();
    let (early, further) = (started.next().unwrap(), started.next().unwrap());
    assert_eq!((early.joined(), further.joined()), (None, None));
    early.step(&[[1.0; 3]]).unwrap();
    for _ in 0..5 {
        further.step(&[[2.0; 3]]).unwrap();
    }
    let late = job.start(2, vec![vec![-7.0; 3]]);
    let joined = late.joined().unwrap();
    assert_eq!((joined.from, joined.clock), (1, Clock(5)));
    assert_eq!((first(&late), late.stats().clock), (10.0, Clock(5)));
    // It is connected already, and exchanges at once.
    exchange_once(&late);
    assert_eq!(late.stats().done(), 1);
    assert!([0, 4].contains(&late.stats().lead()));

    let alone = Job::new(2, SHORT).start(0, vec![vec![4.0; 3]]);
    assert_eq!((alone.joined(), first(&alone)), (None, 4.0));
    exchange_once(&alone);
    assert_eq!(alone.stats().done(), 0);
}

#[test]
fn both_sides_of_a_cut_go_on_and_mix_when_it_heals() {
    let cut = Arc::new(AtomicBool::new(false));
    let mut job = Job::new(4, SHORT);
    let gossips: Vec<Gossip> = (0..4)
        .map(|rank| {
            let cut = Arc::clone(&cut);
            let is_cut: Cut =
                Arc::new(move |peer| cut.load(Ordering::SeqCst) && (peer < 2) != (rank < 2));
            let config = GossipConfig { is_cut: Some(is_cut), ..job.config(rank) };
            Gossip::start(config, vec![vec![rank as f32; 3]]).unwrap()
        })
        .collect();
    eventually("all agree before", || {
        gossips.iter().for_each(exchange_once);
        spread(&gossips) < 1e-3
    });
    cut.store(true, Ordering::SeqCst);
    for gossip in &gossips[2..] {
        gossip.step(&[[100.0; 3]]).unwrap();
    }
    gossips[0].step(&[[-4.0; 3]]).unwrap();
    eventually("each side agrees", || {
        gossips.iter().for_each(exchange_once);
        spread(&gossips[..2]) < 1e-3 && spread(&gossips[2..]) < 1e-3
    });
    assert!(spread(&gossips) > 90.0, "the cut leaks");
    assert!(gossips.iter().any(|gossip| gossip.stats().failed() > 0), "the cut did nothing");
    cut.store(false, Ordering::SeqCst);
    eventually("the sides mix", || {
        gossips.iter().for_each(exchange_once);
        spread(&gossips) < 1e-3
    });
    let mean = 1.5 + (100.0 + 100.0 - 4.0) / 4.0;
    assert!((first(&gossips[0]) - mean).abs() < 1.0, "{} is not {mean}", first(&gossips[0]));
}

#[test]
fn different_models_are_refused_by_name() {
    let mut job = Job::new(2, HUNG);
    job.absent(1);
    let right = job.start(0, vec![vec![0.0; 3]]);
    right.step(&[[1.0; 3]]).unwrap();
    // As many weights, in other parameters.
    let error = Gossip::start(job.config(1), vec![vec![0.0; 2], vec![0.0]]).unwrap_err();
    let GossipError::WrongModel { rank: 1, partner: 0, elements: 3, theirs: 3 } = error else {
        panic!("{error}");
    };
    let text = error.to_string();
    assert!(text.contains("worker 1") && text.contains("worker 0"), "{text}");
    exchange_once(&right);
    assert!(right.exchange().is_ok(), "the one that is right goes on");

    // Found out only later, because they could not see each other when they started.
    let cut = Arc::new(AtomicBool::new(true));
    let mut job = Job::new(2, SHORT);
    let mut start = |rank: usize, initial: Vec<Vec<f32>>| {
        let cut = Arc::clone(&cut);
        let is_cut: Cut = Arc::new(move |_| cut.load(Ordering::SeqCst));
        Gossip::start(GossipConfig { is_cut: Some(is_cut), ..job.config(rank) }, initial).unwrap()
    };
    let (one, _other) = (start(0, vec![vec![0.0; 3]]), start(1, vec![vec![0.0; 4]]));
    assert!(one.exchange().is_ok());
    cut.store(false, Ordering::SeqCst);
    eventually("the difference is found", || {
        let found = one.exchange();
        one.settle();
        matches!(
            found,
            Err(GossipError::WrongModel { rank: 0, partner: 1, elements: 3, theirs: 4 })
        )
    });
}

#[test]
fn a_replica_that_diverged_spoils_no_other() {
    let gossips = Job::new(2, HUNG).start_all(|_| vec![vec![1.0; 3]]);
    gossips[1].step(&[[f32::NAN; 3]]).unwrap();
    eventually("both have tried", || {
        gossips.iter().for_each(exchange_once);
        gossips.iter().all(|gossip| gossip.stats().failed() > 2)
    });
    assert_eq!(first(&gossips[0]), 1.0);
    assert_eq!(gossips[0].stats().done() + gossips[0].stats().answered(), 0);
}

#[test]
fn mistakes_of_the_caller_change_nothing() {
    let mut job = Job::new(1, SHORT);
    let gossip = job.start(0, vec![vec![1.0; 3], vec![2.0]]);
    let short: &[&[f32]] = &[&[1.0; 3], &[]];
    assert!(matches!(
        gossip.step(short),
        Err(GossipError::Length { parameter: 1, expected: 1, given: 0 })
    ));
    assert!(matches!(
        gossip.step(&[[1.0; 3]]),
        Err(GossipError::Changes { parameters: 2, given: 1 })
    ));
    assert!(matches!(gossip.weights(2, &mut []), Err(GossipError::NoParameter { .. })));
    assert!(matches!(gossip.weights(0, &mut []), Err(GossipError::Length { .. })));
    exchange_once(&gossip);
    assert_eq!(gossip.stats().clock, Clock::START);
    assert_eq!(gossip.leave(), [vec![1.0; 3], vec![2.0]]);
    let (mut listeners, addresses) = listeners(2);
    let listener = listeners[0].take().unwrap();
    let outside = GossipConfig { rank: 2, addresses, listener, ..Job::new(1, SHORT).config(0) };
    assert!(matches!(
        Gossip::start(outside, vec![]),
        Err(GossipError::Place { rank: 2, world: 2 })
    ));
}

/// A worker 1 that is not one: it proves the token, greets like the one who dials it, and hands the
/// connection to the test.
fn impostor(listener: Socket) -> (Acceptor, Receiver<Socket>) {
    let (sender, receiver) = channel();
    let admission = Admission::new(TOKEN, &[PURPOSE]);
    let acceptor = Acceptor::start(vec![listener], admission, move |connection, _| {
        let mut socket = connection.socket().try_clone().unwrap();
        let mut greeting = [0; HEADER];
        socket.read_exact(&mut greeting).unwrap();
        socket.write_all(&greeting).unwrap();
        let _ = sender.send(socket);
    });
    (acceptor.unwrap(), receiver)
}

#[test]
fn half_an_exchange_with_a_partner_that_dies_changes_nothing() {
    let mut job = Job::new(2, HUNG);
    let (_acceptor, dialed) = impostor(job.listeners[1].take().unwrap());
    let gossip = job.start(0, vec![vec![1.0; 3]]);
    let mut partner = dialed.recv_timeout(HUNG).unwrap();
    assert!(gossip.exchange().unwrap());
    partner.read_exact(&mut [0; HEADER]).unwrap();
    drop(partner);
    gossip.settle();
    assert_eq!((gossip.stats().failed(), gossip.stats().done()), (1, 0));
    assert_eq!(first(&gossip), 1.0);
    eventually("it is dialed again", || {
        gossip.exchange().unwrap();
        dialed.try_recv().is_ok()
    });
}

#[test]
fn a_partner_that_hangs_holds_no_worker_up() {
    let mut job = Job::new(2, HUNG * 10);
    let (_acceptor, dialed) = impostor(job.listeners[1].take().unwrap());
    let gossip = job.start(0, vec![vec![1.0; 3]]);
    let mut partner = dialed.recv_timeout(HUNG).unwrap();
    assert!(gossip.exchange().unwrap());
    // It has the whole offer, and never replies.
    partner.read_exact(&mut [0; HEADER + 12]).unwrap();
    for _ in 0..100 {
        gossip.step(&[[1.0; 3]]).unwrap();
        assert!(!gossip.exchange().unwrap(), "one exchange at a time");
    }
    assert_eq!(gossip.stats().skipped, 100);
    // Leaving ends the wait, which would otherwise last for many minutes.
    assert_eq!(gossip.leave()[0][0], 101.0);
}

#[test]
fn leaving_ends_an_attempt_to_connect() {
    // A queue of connections that is full: the kernel drops whatever comes after.
    let full = Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let filling: Vec<_> =
        (0..4).map(|_| TcpStream::connect_timeout(&address, Duration::from_millis(100))).collect();
    assert!(filling.iter().any(Result::is_err), "the queue is not full");

    let mut job = Job::new(2, SHORT);
    job.addresses[1] = address;
    // At its start it waits for a part of the timeout, later as long as it takes, in the background.
    let config = GossipConfig { timeout: HUNG, ..job.config(0) };
    let cut = Arc::new(AtomicBool::new(true));
    let until = Arc::clone(&cut);
    let is_cut: Cut = Arc::new(move |_| until.load(Ordering::SeqCst));
    let gossip =
        Gossip::start(GossipConfig { is_cut: Some(is_cut), ..config }, vec![vec![1.0; 3]]).unwrap();
    cut.store(false, Ordering::SeqCst);
    // The kernel's table shows the attempt, in state 2: the first packet was sent, none came back.
    let attempt = format!("0100007F:{:04X} 02", address.port());
    let connecting = || std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&attempt);
    eventually("it tries to connect", || {
        exchange_once(&gossip);
        connecting()
    });
    gossip.step(&[[1.0; 3]]).unwrap();
    let left = Instant::now();
    assert_eq!(gossip.leave()[0][0], 2.0);
    assert!(left.elapsed() < HUNG / 2, "it waited for the attempt");
}

fn dial(address: SocketAddr, from: u32, to: u32) -> Socket {
    let purpose = PURPOSE;
    let introduction = Introduction { purpose, epoch: 1, group: 0, from, to, channel: 0 };
    let dialer = Dialer::new(&TOKEN, Instant::now() + HUNG);
    let connection = dialer.dial(Target::Tcp(address), introduction).unwrap();
    let socket = connection.socket().try_clone().unwrap();
    socket.set_read_timeout(Some(HUNG)).unwrap();
    socket
}

/// A header: kind, detail, life, number, clock, model, elements.
fn header(kind: u32, life: u64, number: u64, model: [u8; 8], elements: u64) -> Vec<u8> {
    let mut bytes = [kind, 0].map(u32::to_le_bytes).concat();
    for field in [life, number, 0] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(model);
    bytes.extend(elements.to_le_bytes());
    bytes
}

/// Greets as a worker with the same model; returns the model's hash.
fn greet(socket: &mut Socket, elements: u64, model: [u8; 8]) -> [u8; 8] {
    socket.write_all(&header(1, 1, 0, model, elements)).unwrap();
    let mut greeting = [0; HEADER];
    socket.read_exact(&mut greeting).unwrap();
    greeting[32..40].try_into().unwrap()
}

fn offer(socket: &mut Socket, number: u64, model: [u8; 8], weights: [f32; 3]) -> u32 {
    socket.write_all(&header(2, 1, number, model, 3)).unwrap();
    socket.write_all(&weights.map(f32::to_ne_bytes).concat()).unwrap();
    let mut reply = [0; HEADER];
    socket.read_exact(&mut reply).unwrap();
    let kind = u32::from_le_bytes(reply[..4].try_into().unwrap());
    if kind == 3 {
        socket.read_exact(&mut [0; 12]).unwrap();
    }
    kind
}

const MOVED: u32 = 3;
const DECLINED: u32 = 4;

#[test]
fn an_exchange_counts_once() {
    let mut job = Job::new(2, HUNG);
    job.absent(1);
    let gossip = job.start(0, vec![vec![0.0; 3]]);
    let model = greet(&mut dial(job.addresses[0], 1, 0), 3, [0; 8]);
    let mut socket = dial(job.addresses[0], 1, 0);
    greet(&mut socket, 3, model);
    assert_eq!(offer(&mut socket, 1, model, [8.0; 3]), MOVED);
    assert_eq!(first(&gossip), 4.0);
    assert_eq!(offer(&mut socket, 1, model, [8.0; 3]), DECLINED);
    let mut again = dial(job.addresses[0], 1, 0);
    greet(&mut again, 3, model);
    assert_eq!(offer(&mut again, 1, model, [8.0; 3]), DECLINED);
    assert_eq!(first(&gossip), 4.0);
    assert_eq!(offer(&mut again, 2, model, [8.0; 3]), MOVED);
    assert_eq!(first(&gossip), 6.0);
    let partner = &gossip.stats().partners[1];
    assert_eq!((partner.answered, partner.declined), (2, 2));
    // The newer connection of a partner takes the place of the older one.
    assert_eq!(socket.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn hostile_bytes_are_harmless() {
    let mut job = Job::new(3, HUNG);
    job.absent(2);
    let gossips = job.start_some(2, |rank| vec![vec![rank as f32 * 4.0; 3]]);
    let address = job.addresses[0];
    let noise: Vec<u8> =
        (0..10_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let closed = |mut socket: Socket| {
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = socket.read_to_end(&mut rest);
    };

    // Strangers, and a peer that is proven but not for this worker.
    let _ = TcpStream::connect(address).unwrap().write_all(&noise);
    closed(dial(address, 1, 2));
    closed(dial(address, 99, 0));
    closed(dial(address, 0, 0));
    // Proven, but not making sense: in place of a greeting, of an offer, of a length.
    let mut socket = dial(address, 2, 0);
    let _ = socket.write_all(&noise);
    closed(socket);
    let model = greet(&mut dial(address, 2, 0), 3, [0; 8]);
    let mut socket = dial(address, 2, 0);
    greet(&mut socket, 3, model);
    let _ = socket.write_all(&noise);
    closed(socket);
    for elements in [0, 2, 4, u64::MAX] {
        let mut socket = dial(address, 2, 0);
        greet(&mut socket, 3, model);
        socket.write_all(&header(2, 1, 9, model, elements)).unwrap();
        closed(socket);
    }
    // Half an offer changes nothing.
    let mut socket = dial(address, 2, 0);
    greet(&mut socket, 3, model);
    socket.write_all(&header(2, 1, 9, model, 3)).unwrap();
    socket.write_all(&[0x42; 11]).unwrap();
    closed(socket);

    assert_eq!((first(&gossips[0]), gossips[0].stats().answered()), (0.0, 0));
    eventually("the two still average", || {
        gossips.iter().for_each(exchange_once);
        spread(&gossips) == 0.0 && first(&gossips[0]) == 2.0
    });
}
