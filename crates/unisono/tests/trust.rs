//! Strangers at the doors of a job: they neither stop it, nor slow it down for long, nor make it
//! grow, and the log says that they were there.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use common::machine::resident;
use common::protocol::{Call, Command, Reply, Settings};
use common::random::Random;
use common::{LONG, World, serve_if_rank, wait_until};
use unisono::collective::fabric::Address;
use unisono::collective::fabric::CONTROL;
use unisono::net::handshake::{Initiated, Initiator, random_nonce};
use unisono::net::{Introduction, Token};
use unisono::{Dtype, Reduction, Transport};

/// A rank in a process of its own; see [`common`].
#[test]
fn as_rank() {
    serve_if_rank();
}

const SUM: Call = Call::AllReduce { dtype: Dtype::I64, count: 50_000, reduction: Reduction::Sum };

/// Connections that a flood opens before it closes any.
const FLOOD: usize = 500;

/// A connection to a door, whichever kind it is.
trait Connection: Read + Write {}
impl<T: Read + Write> Connection for T {}

/// Where a rank lets others in.
#[derive(Clone, Debug)]
enum Door {
    Tcp(SocketAddr),
    Unix(String),
}

impl Door {
    fn of(address: &Address) -> [Door; 2] {
        [Door::Tcp(address.tcp), Door::Unix(address.unix.clone())]
    }

    fn knock(&self) -> std::io::Result<Box<dyn Connection>> {
        match self {
            Door::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, LONG)?;
                stream.set_read_timeout(Some(LONG))?;
                Ok(Box::new(stream))
            }
            Door::Unix(name) => {
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                let stream = UnixStream::connect_addr(&address)?;
                stream.set_read_timeout(Some(LONG))?;
                Ok(Box::new(stream))
            }
        }
    }

    /// Sends these bytes and hears the answer to its end.
    fn say(&self, bytes: &[u8]) -> Vec<u8> {
        let mut connection = self.knock().expect("the door is there");
        connection.write_all(bytes).expect("a few bytes always fit");
        let mut answer = Vec::new();
        // Being hung up on is an answer too.
        let _ = connection.read_to_end(&mut answer);
        answer
    }
}

/// An introduction of a member that reached the wrong rank.
const LOST: Introduction =
    Introduction { purpose: CONTROL, epoch: 1, group: 0, from: 0, to: 99, channel: 0 };

fn hello(token: &Token) -> Vec<u8> {
    let nonce = random_nonce().expect("the system has random numbers");
    Initiator::new(token, &LOST, nonce).hello().to_vec()
}

/// What a member of the job would send, recorded: its hello and its proof.
fn record(door: &Door, token: &Token) -> (Vec<u8>, Vec<u8>) {
    let nonce = random_nonce().expect("the system has random numbers");
    let mut initiator = Initiator::new(token, &LOST, nonce);
    let hello = initiator.hello().to_vec();
    let mut connection = door.knock().expect("the door is there");
    connection.write_all(&hello).expect("a few bytes always fit");
    let mut recorded = Vec::new();
    loop {
        let mut bytes = vec![0; initiator.wanted()];
        connection.read_exact(&mut bytes).expect("a member is answered");
        match initiator.feed(&bytes).1.expect("a member is trusted") {
            Initiated::More => {}
            Initiated::Send(answer) => {
                connection.write_all(&answer).expect("a few bytes always fit");
                recorded.extend_from_slice(&answer);
            }
            Initiated::Done => return (hello, recorded),
        }
    }
}

/// Each kind of stranger once, and what the log will say of it.
fn visit(door: &Door, token: &Token) -> Vec<&'static str> {
    let mut random = Random::new(1);
    let garbage: Vec<u8> = (0..1024).map(|_| random.next() as u8).collect();
    door.say(&garbage);
    door.say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    door.say(&hello(&Token::random().expect("the system has random numbers")));

    let mut other_version = hello(token);
    // Magic, then the version.
    other_version[8..10].copy_from_slice(&9_999u16.to_le_bytes());
    door.say(&other_version);

    // Half a hello, then the end.
    let whole = hello(token);
    let mut half = door.knock().expect("the door is there");
    half.write_all(&whole[..whole.len() / 2]).expect("a few bytes always fit");
    drop(half);

    // What proved the token once proves nothing the second time.
    let (hello, answer) = record(door, token);
    door.say(&[hello, answer].concat());

    vec![
        "does not speak Unisono's protocol",
        "belongs to another job",
        "speaks version 9999 of the protocol",
        "closed before the end of the handshake",
        "failed to prove the job's token",
        "meant for rank 99",
    ]
}

/// Knocks at all doors at once, as often as it can, until told to stop; how often that was.
fn flood(doors: &[Door], token: &Token, stop: &AtomicBool, knocks: &AtomicUsize) {
    let hello = hello(token);
    while !stop.load(Ordering::Relaxed) {
        let mut held = Vec::with_capacity(FLOOD);
        for i in 0..FLOOD {
            // A queue that is full turns strangers away as well.
            let Ok(mut connection) = doors[i % doors.len()].knock() else { continue };
            // Some say nothing, some say half of what a member says.
            if i % 3 == 0 {
                let _ = connection.write_all(&hello[..hello.len() / 2]);
            }
            held.push(connection);
            knocks.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Does `work` while strangers flood the doors; how often they knocked.
fn flooded<T>(doors: &[Door], token: &Token, work: impl FnOnce(&AtomicUsize) -> T) -> T {
    let (stop, knocks) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| flood(doors, token, &stop, &knocks));
        /// Ends the flood also when the work panics.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&stop);
        work(&knocks)
    })
}

fn assert_sum(world: &mut World) {
    for reply in world.all(&Command::Call(SUM)) {
        assert_eq!(reply, Reply::Done);
    }
}

fn strangers_are_kept_out(transport: Transport) {
    let mut world = World::processes(3);
    let token = world.token.clone();
    let roster = world.bind();
    let doors: Vec<Door> = roster.iter().flat_map(Door::of).collect();

    // They are there before the ranks answer the doors, and stay while the group forms.
    let every = |_| Settings::new(transport);
    let replies = flooded(&doors, &token, |knocks| {
        wait_until("the strangers are there", || knocks.load(Ordering::Relaxed) >= FLOOD);
        world.join(&roster, every)
    });
    assert_eq!(replies, [Reply::Done, Reply::Done, Reply::Done]);
    assert_sum(&mut world);

    // The group runs, and they come again.
    let memory = |world: &World| -> Vec<usize> {
        world.ranks.iter().map(|rank| resident(rank.pid())).collect()
    };
    let before = memory(&world);
    flooded(&doors, &token, |knocks| {
        wait_until("the strangers are there", || {
            assert_sum(&mut world);
            knocks.load(Ordering::Relaxed) >= 4 * FLOOD
        });
    });
    for (rank, (before, after)) in before.into_iter().zip(memory(&world)).enumerate() {
        let grown = after.saturating_sub(before);
        assert!(grown < 4 << 20, "rank {rank} grew by {grown} bytes");
    }
    for rank in &mut world.ranks {
        rank.residue(&Command::Leave);
        wait_until("the log tells of the strangers", || {
            let log = rank.log();
            log.contains("refused a connection from ") && log.contains(" more connections")
        });
    }
    world.end();
}

#[test]
fn strangers_are_kept_out_of_shared_memory() {
    strangers_are_kept_out(Transport::Shm);
}

#[test]
fn strangers_are_kept_out_of_tcp() {
    strangers_are_kept_out(Transport::Tcp);
}

#[test]
fn every_stranger_is_refused_with_a_reason() {
    for way_in in [0, 1] {
        let mut world = World::processes(2);
        let token = world.token.clone();
        let roster = world.bind();
        let doors = roster.iter().map(|address| Door::of(address)[way_in].clone());
        let doors: Vec<Door> = doors.collect();
        // One falls silent in the middle of its hello before the rank answers.
        let mut silent: Vec<_> =
            doors.iter().map(|door| door.knock().expect("the door is there")).collect();
        for connection in &mut silent {
            connection.write_all(&hello(&token)[..20]).expect("a few bytes always fit");
        }
        let every = |_| Settings::new(Transport::Auto);
        assert_eq!(world.join(&roster, every), [Reply::Done, Reply::Done]);
        for (door, rank) in doors.iter().zip(0..) {
            for reason in visit(door, &token) {
                assert_sum(&mut world);
                wait_until(reason, || world.ranks[rank].log().contains(reason));
            }
            wait_until("the silent one is given up", || {
                world.ranks[rank].log().contains("did not finish the handshake in time")
            });
        }
        world.end();
    }
}
