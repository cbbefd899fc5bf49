//! Bytes from outside: whatever they are, no decoder panics, none allocates more than the message
//! it expects, and what decodes means what it says.

#[path = "common/tap.rs"]
mod tap;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use socket2::Socket;
use tap::{COUNT, Ending, MESSAGE, RECEIVED, Tapped};
use unisono_collective::call::{Call, MessageHeader, WireCall};
use unisono_collective::internals::frame::{
    self, Frame, MAX_DATA, MAX_REASON, MAX_STATEMENT, MAX_TEXT,
};
use unisono_collective::internals::receive_ready;
use unisono_collective::{
    Algorithm, CircleWait, Dtype, Error, FormError, InvalidCall, Loss, Op, Reduction, Unit,
};
use unisono_net::handshake::{
    ANY, Initiated, Initiator, Introduction, Nonce, Responder, Step, fuzz_initiator, fuzz_responder,
};
use unisono_net::{Connection, Token};
use zerocopy::{FromBytes, IntoBytes};

/// The system's allocator; notes the largest request of each thread.
struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends may allocate after its variables are gone.
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Runs `decode` and requires that it asks for no more than `limit` bytes at once.
fn within<R>(limit: usize, decode: impl FnOnce() -> R) -> R {
    LARGEST.set(0);
    let result = decode();
    let largest = LARGEST.get();
    assert!(largest <= limit, "{largest} bytes were allocated, {limit} are allowed");
    result
}

/// A reproducible source of bad ideas.
struct Mutator(u64);

impl Mutator {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n.max(1)
    }

    fn garbage(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// A corrupted copy: bits flipped, numbers made extreme, parts cut, doubled or moved.
    fn corrupt(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..1 + self.below(3) {
            if bytes.is_empty() {
                return self.garbage(16);
            }
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.next() as u8,
                2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                3 => bytes.truncate(at),
                4 => {
                    let tail = bytes[at..].to_vec();
                    bytes.extend(tail);
                }
                _ => bytes.rotate_left(at),
            }
        }
        bytes
    }

    /// Garbage now and then, else a corrupted one of `seeds`.
    fn input(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        if self.below(5) == 0 {
            let length = self.below(200);
            return self.garbage(length);
        }
        let seed = self.below(seeds.len());
        self.corrupt(&seeds[seed])
    }
}

const NONCE: Nonce = [5; 32];

fn introduction() -> Introduction {
    Introduction { purpose: ANY, epoch: 1, group: 2, from: 3, to: 4, channel: 5 }
}

/// What both sides of an honest handshake send: hello and answer, challenge and verdict.
fn honest_handshake(token: &Token) -> (Vec<u8>, Vec<u8>) {
    let mut initiator = Initiator::new(token, &introduction(), [9; 32]);
    let mut responder = Responder::new(token, &[ANY], NONCE);
    let (mut to_responder, mut to_initiator) = (initiator.hello().to_vec(), Vec::new());
    let (_, step) = responder.feed(&to_responder);
    let Step::Send(challenge) = step else { panic!("the hello is honest") };
    to_initiator.extend_from_slice(challenge.as_ref());
    let (_, step) = initiator.feed(&to_initiator);
    let Ok(Initiated::Send(answer)) = step else { panic!("the challenge is honest") };
    to_responder.extend_from_slice(&answer);
    let (_, step) = responder.feed(&answer);
    let Step::Accepted { introduction: accepted, verdict } = step else {
        panic!("the answer is honest")
    };
    assert_eq!(accepted, introduction());
    to_initiator.extend_from_slice(verdict.as_ref());
    (to_responder, to_initiator)
}

#[test]
fn no_corrupted_handshake_is_accepted() {
    let token = Token::random().unwrap();
    let (to_responder, to_initiator) = honest_handshake(&token);
    let mut mutator = Mutator(1);
    for _ in 0..150_000 {
        let bytes = mutator.input(std::slice::from_ref(&to_responder));
        let pieces = 1 + mutator.below(3);
        within(0, || {
            assert!(fuzz_responder(&token, NONCE, &bytes) <= bytes.len());
            let mut responder = Responder::new(&token, &[ANY], NONCE);
            for mut piece in bytes.chunks(bytes.len().div_ceil(pieces).max(1)) {
                while !piece.is_empty() && responder.wanted() > 0 {
                    let (taken, step) = responder.feed(piece);
                    piece = &piece[taken..];
                    if let Step::Accepted { introduction: accepted, .. } = step {
                        // What follows the handshake is not its business.
                        assert!(bytes.starts_with(&to_responder));
                        assert_eq!(accepted, introduction());
                    }
                }
            }
        });
        let bytes = mutator.input(std::slice::from_ref(&to_initiator));
        within(0, || assert!(fuzz_initiator(&token, NONCE, &bytes) <= bytes.len()));
    }
}

fn calls() -> Vec<Call> {
    let ops = [Op::AllReduce, Op::Broadcast { root: 3 }, Op::AllToAll, Op::Scatter { root: 0 }];
    let call = |(i, op): (usize, Op)| Call {
        seq: u32::MAX - i as u32,
        op,
        barrier: i == 0,
        dtype: Dtype::ALL[i],
        unit: Unit::from_code(5 * i as u8).unwrap(),
        reduction: Reduction::ALL[i],
        count: 1 << (13 * i),
        shape: i as u64,
        algorithm: Algorithm::ALL[i],
        column: 64,
    };
    ops.into_iter().enumerate().map(call).collect()
}

#[test]
fn calls_and_headers_decode_to_what_they_say_or_not_at_all() {
    let seeds: Vec<Vec<u8>> =
        calls().into_iter().map(|call| WireCall::from(call).as_bytes().to_vec()).collect();
    let mut mutator = Mutator(2);
    let mut decoded = 0;
    for _ in 0..300_000 {
        let mut bytes = mutator.input(&seeds);
        bytes.resize(MessageHeader::SIZE, 0);
        within(0, || {
            let (header, _) = MessageHeader::read_from_prefix(&bytes).unwrap();
            let Ok(call) = Call::try_from(header.call) else { return };
            decoded += 1;
            let again = Call::try_from(WireCall::from(call));
            assert_eq!(again, Ok(call));
            assert_eq!(again.map(|c| c.fingerprint()), Ok(call.fingerprint()));
        });
    }
    assert!(decoded > 10_000, "only {decoded} calls were readable");
}

#[test]
fn frames_decode_to_what_they_say_or_not_at_all() {
    let seeds = [
        Frame::Heartbeat,
        Frame::Goodbye { seq: u32::MAX, length: MAX_TEXT },
        Frame::Abort { length: MAX_REASON },
        Frame::Announce { tag: 1, id: 2, length: u64::MAX },
        Frame::Clear { id: 9 },
        Frame::Data { id: 9, length: MAX_DATA },
        Frame::Stuck,
        Frame::Place { number: 9, length: MAX_TEXT },
        Frame::Waits { length: MAX_STATEMENT },
    ]
    .map(|frame| frame.encode().to_vec());
    let mut mutator = Mutator(3);
    let mut decoded = 0;
    for _ in 0..300_000 {
        let mut bytes = mutator.input(&seeds);
        bytes.resize(frame::SIZE, 0);
        let bytes: [u8; frame::SIZE] = bytes.try_into().unwrap();
        within(0, || {
            let Ok(frame) = Frame::decode(&bytes) else { return };
            decoded += 1;
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
            match frame {
                Frame::Abort { length } => assert!(length <= MAX_REASON),
                Frame::Data { length, .. } => assert!(length <= MAX_DATA),
                Frame::Waits { length } => assert!(length <= MAX_STATEMENT),
                Frame::Goodbye { length, .. } | Frame::Place { length, .. } => {
                    assert!(length <= MAX_TEXT);
                }
                _ => {}
            }
        });
    }
    assert!(decoded > 10_000, "only {decoded} frames were readable");
}

fn errors() -> Vec<Error> {
    let [call, peer_call] = [calls()[0], calls()[1]];
    vec![
        Error::PeerLost { peer: 3, loss: Loss::Closed, during: None },
        Error::PeerLost { peer: 3, loss: Loss::Silent(Duration::from_secs(10)), during: None },
        Error::PeerLost { peer: 3, loss: Loss::Left, during: None },
        Error::EpochEnded { epoch: u64::MAX },
        Error::PeerLost { peer: 3, loss: Loss::Failed("ValueError: ü".into()), during: None },
        Error::Mismatch { rank: 1, call, peer: 2, peer_call, places: Box::default() },
        Error::Deadlock { waits: vec![circle_wait(call), circle_wait(peer_call)] },
        Error::LengthMismatch { from: 1, to: 2, tag: 3, sent: 4, expected: u64::MAX },
        Error::Aborted { peer: 1, reason: "ümlaut".repeat(1000) },
        Error::InvalidCall(InvalidCall::Members),
        Error::System { what: "poll", reason: "x".repeat(10_000) },
    ]
}

/// As long as one can be.
fn circle_wait(call: Call) -> CircleWait {
    CircleWait {
        rank: 65535,
        call,
        group: 3,
        members: (65528..65536).collect(),
        place: Some("x".repeat(200)),
    }
}

#[test]
fn the_longest_circle_fits() {
    let waits = vec![circle_wait(calls()[0]); 6];
    let bytes = frame::encode_reason(&Error::Deadlock { waits });
    assert!(bytes.len() <= MAX_REASON, "{} bytes", bytes.len());
}

#[test]
fn reasons_survive_the_wire_and_fit() {
    for error in errors() {
        let bytes = frame::encode_reason(&error);
        assert!(bytes.len() <= MAX_REASON, "{} bytes for {error:?}", bytes.len());
        let decoded = frame::decode_reason(1, &bytes);
        match error {
            Error::Aborted { .. } | Error::InvalidCall(_) | Error::System { .. } => {
                assert!(matches!(decoded, Error::Aborted { peer: 1, .. }));
            }
            error => assert_eq!(decoded, error),
        }
    }
}

#[test]
fn corrupted_reasons_still_make_an_error() {
    let seeds: Vec<Vec<u8>> = errors().iter().map(frame::encode_reason).collect();
    let mut mutator = Mutator(4);
    for _ in 0..300_000 {
        let mut bytes = mutator.input(&seeds);
        bytes.truncate(MAX_REASON);
        // A list of ranks takes eight times its bytes.
        let error = within(8 * MAX_REASON, || frame::decode_reason(1, &bytes));
        assert!(!error.to_string().is_empty());
        // What is heard may be passed on.
        assert!(frame::encode_reason(&error).len() <= MAX_REASON);
    }
}

#[test]
fn a_member_that_talks_nonsense_when_ready_is_refused() {
    let settings = [3; 32];
    let mut honest = vec![0; 256];
    honest[8..40].copy_from_slice(&settings);
    let mut failed = honest.clone();
    (failed[0], failed[1]) = (1, 9);
    failed[40..49].copy_from_slice(b"no memory");
    let hear = |bytes: &[u8]| {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        drop(theirs);
        let mut ours = Connection::from(Socket::from(ours));
        let deadline = Instant::now() + Duration::from_secs(20);
        within(4096, || receive_ready(&mut ours, 1, &settings, deadline))
    };
    assert!(matches!(hear(&honest), Ok(None)));
    let reason = "no memory".to_owned();
    assert_eq!(hear(&failed).unwrap_err(), FormError::Peer { peer: 1, reason });
    let mut mutator = Mutator(5);
    for _ in 0..20_000 {
        let bytes = mutator.input(&[honest.clone(), failed.clone()]);
        match hear(&bytes) {
            Ok(memory) => assert!(memory.is_none() && bytes[8..40] == settings),
            Err(FormError::Peer { peer: 1, .. } | FormError::Settings { peer: 1 }) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// What an honest peer says on the side channel to a tapped rank.
fn honest_side() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut say = |frame: Frame| bytes.extend(frame.encode());
    say(Frame::Heartbeat);
    say(Frame::Announce { tag: RECEIVED, id: 0, length: MESSAGE as u64 });
    say(Frame::Clear { id: 0 });
    say(Frame::Data { id: 0, length: MESSAGE });
    bytes.extend([9; MESSAGE]);
    bytes
}

/// The tap works: an honest answer is taken for one.
#[test]
fn an_honest_stranger_is_believed() {
    let outcomes = Tapped::new().attack(&honest_side(), |honest| honest, Ending::Stay);
    assert_eq!(outcomes.receive, Ok([9; MESSAGE]));
    assert_eq!(outcomes.send, Ok(()));
    assert_eq!(outcomes.all_reduce, Ok(vec![3.0; COUNT]));
}

#[test]
fn a_peer_gone_mad_ends_the_group_and_nothing_else() {
    let side = honest_side();
    let mut abort = Frame::Abort { length: 0 }.encode().to_vec();
    abort.extend(Frame::Heartbeat.encode());
    let mut flood = Vec::new();
    for id in 0..200 {
        flood.extend(Frame::Announce { tag: 77, id, length: u64::MAX }.encode());
    }
    // Asks for what was cleared before, and for more than was announced.
    let again = Frame::Clear { id: 0 }.encode().repeat(2);
    let too_much = [
        Frame::Announce { tag: RECEIVED, id: 0, length: MESSAGE as u64 }.encode(),
        Frame::Data { id: 0, length: MESSAGE + 1 }.encode(),
    ]
    .concat();
    let wrong_length = Frame::Announce { tag: RECEIVED, id: 0, length: u64::MAX }.encode().to_vec();
    let goodbye = Frame::Goodbye { seq: 0, length: 0 }.encode().to_vec();
    // Waits in a call nobody made, and in one that is none.
    let stuck = [&Frame::Stuck.encode()[..], WireCall::from(calls()[0]).as_bytes()].concat();
    let lost = [&Frame::Stuck.encode()[..], &[0xff; size_of::<WireCall>()]].concat();
    // A place that nobody asked for, and a statement that is none.
    let place = [&Frame::Place { number: 1, length: 3 }.encode()[..], b"a:1"].concat();
    let waits = [&Frame::Waits { length: 3 }.encode()[..], &[0xff; 3]].concat();
    let seeds =
        [side, abort, flood, again, too_much, wrong_length, goodbye, stuck, lost, place, waits];
    let panics = watch_for_panics();
    let mut mutator = Mutator(6);
    for attack in 0..200 {
        let seed = &seeds[attack % seeds.len()];
        let side = if attack < seeds.len() { seed.clone() } else { mutator.corrupt(seed) };
        let header_only = mutator.below(2) == 0;
        let reply = |honest: Vec<u8>| {
            let (header, body) = honest.split_at(MessageHeader::SIZE);
            if header_only {
                [mutator.corrupt(header), body.to_vec()].concat()
            } else {
                mutator.corrupt(&honest)
            }
        };
        let outcomes = Tapped::new().attack(&side, reply, Ending::HangUp);
        let errors = [outcomes.all_reduce.err(), outcomes.receive.err(), outcomes.send.err()];
        for error in errors.into_iter().flatten() {
            assert!(!matches!(error, Error::InvalidCall(_)), "the calls were valid: {error}");
        }
    }
    assert_eq!(panics.load(Ordering::SeqCst), 0);
}

/// Counts panics of the threads that serve groups, which nobody else would notice.
fn watch_for_panics() -> Arc<AtomicUsize> {
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, report) = (panics.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name().is_some_and(|name| name.starts_with("unisono")) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        report(panic);
    }));
    panics
}
