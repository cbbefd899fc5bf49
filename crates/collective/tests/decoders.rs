//! Bytes from outside: whatever they are, no decoder panics, none allocates more than the message
//! it expects, and what decodes means what it says.

#[path = "common/tap.rs"]
mod tap;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tap::{COUNT, Ending, Lines, MESSAGE, RECEIVED, Tapped};
use unisono_collective::call::{Call, MessageHeader, WireCall};
use unisono_collective::internals::frame::{self, Frame};
use unisono_collective::internals::gathering::{Failure, Gathering, Update, longest_update};
use unisono_collective::internals::message_frame::{self, Frame as MessageFrame, MAX_DATA};
use unisono_collective::internals::news::{self, Fact, MAX_NEWS, News};
use unisono_collective::internals::reason::Reason;
use unisono_collective::{
    Algorithm, CircleWait, Dtype, Error, InvalidCall, Loss, Op, Rank, Reduction, Unit,
};
use unisono_net::Token;
use unisono_net::handshake::{
    ANY, Initiated, Initiator, Introduction, Nonce, Responder, Step, fuzz_initiator, fuzz_responder,
};
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
    let seeds = [Frame::Heartbeat, Frame::News { length: MAX_NEWS }].map(|f| f.encode().to_vec());
    let mut mutator = Mutator(3);
    let mut decoded = 0;
    for _ in 0..150_000 {
        let mut bytes = mutator.input(&seeds);
        bytes.resize(frame::SIZE, 0);
        let bytes: [u8; frame::SIZE] = bytes.try_into().unwrap();
        within(0, || {
            let Ok(frame) = Frame::decode(&bytes) else { return };
            decoded += 1;
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
            assert!(!matches!(frame, Frame::News { length } if length > MAX_NEWS));
        });
    }
    assert!(decoded > 5_000, "only {decoded} frames were readable");
}

#[test]
fn frames_of_messages_decode_to_what_they_say_or_not_at_all() {
    let seeds = [
        MessageFrame::Announce { tag: 1, id: 2, length: u64::MAX },
        MessageFrame::Clear { id: 9 },
        MessageFrame::Data { id: 9, length: MAX_DATA },
    ]
    .map(|frame| frame.encode().to_vec());
    let mut mutator = Mutator(3);
    let mut decoded = 0;
    for _ in 0..150_000 {
        let mut bytes = mutator.input(&seeds);
        bytes.resize(message_frame::SIZE, 0);
        let bytes: [u8; message_frame::SIZE] = bytes.try_into().unwrap();
        within(0, || {
            let Ok(frame) = MessageFrame::decode(&bytes) else { return };
            decoded += 1;
            assert_eq!(MessageFrame::decode(&frame.encode()), Ok(frame));
            assert!(!matches!(frame, MessageFrame::Data { length, .. } if length > MAX_DATA));
        });
    }
    assert!(decoded > 5_000, "only {decoded} frames were readable");
}

fn errors() -> Vec<Error> {
    let [call, peer_call] = [calls()[0], calls()[1]];
    vec![
        Error::PeerLost { peer: Rank(3), loss: Loss::Closed, during: None },
        Error::PeerLost {
            peer: Rank(3),
            loss: Loss::Silent(Duration::from_secs(10)),
            during: None,
        },
        Error::PeerLost { peer: Rank(3), loss: Loss::Left, during: None },
        Error::EpochEnded { epoch: u64::MAX },
        Error::PeerLost {
            peer: Rank(3), loss: Loss::Failed("ValueError: ü".into()), during: None
        },
        Error::Mismatch { rank: Rank(1), call, peer: Rank(2), peer_call, places: Box::default() },
        Error::Deadlock { waits: vec![circle_wait(call), circle_wait(peer_call)] },
        Error::LengthMismatch { from: Rank(1), to: Rank(2), tag: 3, sent: 4, expected: u64::MAX },
        Error::Aborted { peer: Rank(1), reason: "ümlaut".repeat(1000) },
        Error::InvalidCall(InvalidCall::Members),
        Error::System { what: "poll", reason: "x".repeat(10_000) },
    ]
}

/// As long as one can be.
fn circle_wait(call: Call) -> CircleWait {
    CircleWait {
        rank: Rank(65535),
        call,
        group: 3,
        members: (65528..65536).map(Rank).collect(),
        place: Some("x".repeat(200)),
    }
}

/// Ranks of the group whose news are decoded.
const WORLD: usize = 5;

/// Bytes that one fact takes at most.
const MAX_FACT: usize = 4 << 10;

fn facts() -> Vec<Fact> {
    let failures = errors().into_iter().map(|error| Fact::Failed(Reason::of(&error, Rank(1))));
    let why = Some("ValueError: ü".repeat(20));
    let place = Some("x".repeat(200));
    let others = [
        Fact::Left { rank: 2, seq: u32::MAX, why },
        Fact::Stuck { rank: 1, call: calls()[1] },
        Fact::Place { rank: Rank(4), number: 9, place },
        Fact::Awaited { rank: 3, number: u32::MAX / 2 },
    ];
    failures.chain(others).collect()
}

#[test]
fn the_longest_circle_fits() {
    let waits = vec![circle_wait(calls()[0]); 6];
    let fact = Fact::Failed(Reason::of(&Error::Deadlock { waits }, Rank(1)));
    let bytes = postcard::to_stdvec(&fact).unwrap();
    assert!(bytes.len() <= MAX_FACT, "{} bytes", bytes.len());
}

#[test]
fn reasons_survive_the_wire_and_fit() {
    for error in errors() {
        let fact = Fact::Failed(Reason::of(&error, Rank(1)));
        let bytes = postcard::to_stdvec(&fact).unwrap();
        assert!(bytes.len() <= MAX_FACT, "{} bytes for {error:?}", bytes.len());
        let decoded = news::decode(&bytes).unwrap();
        let [Fact::Failed(reason)] = &decoded[..] else { panic!("{decoded:?}") };
        let decoded = Error::from(reason.clone());
        match error {
            Error::Aborted { .. } | Error::InvalidCall(_) | Error::System { .. } => {
                assert!(matches!(decoded, Error::Aborted { peer: Rank(1), .. }));
            }
            error => assert_eq!(decoded, error),
        }
    }
}

#[test]
fn corrupted_news_are_refused_or_can_be_passed_on() {
    let encoded = |fact: &Fact| postcard::to_stdvec(fact).unwrap();
    let seeds: Vec<Vec<u8>> = facts().iter().map(encoded).collect();
    let mut mutator = Mutator(4);
    let mut heard = 0;
    for _ in 0..300_000 {
        let bytes = mutator.input(&seeds);
        let mut news = News::new(Rank::all(WORLD));
        news.connect(2);
        // A list of ranks takes eight times its bytes, and facts have a fixed size.
        let facts = within(8 * MAX_FACT + 300 * (1 + bytes.len()), || news::decode(&bytes));
        for fact in facts.unwrap_or_default() {
            heard += usize::from(news.hear(Some(1), fact).is_ok_and(|event| event.is_some()));
        }
        while let Some(bytes) = news.due(2) {
            assert!(bytes.len() <= MAX_NEWS);
        }
    }
    assert!(heard > 10_000, "only {heard} facts were readable");
}

#[test]
fn a_member_that_talks_nonsense_while_the_group_forms_is_refused() {
    let settings = [3; 32];
    let come = |me: usize, instance| {
        let others: Vec<usize> = (0..WORLD).filter(|rank| *rank != me).collect();
        let mut gathering = Gathering::new(me, Rank::all(WORLD), &others, settings, instance);
        others.iter().for_each(|rank| gathering.connect(*rank));
        gathering
    };
    let honest = come(0, Some(7)).due(1, true).unwrap();
    let mut failing = come(0, None);
    failing.fail(Failure::Rank { rank: Rank(3), reason: "no memory".into() });
    let failing = failing.due(1, true).unwrap();
    let mut missing = come(0, None);
    missing.fail(Failure::Missing { missing: vec![Rank(1), Rank(4)] });
    let missing = missing.due(1, true).unwrap();
    let seeds = [honest, failing, missing].map(|update| postcard::to_stdvec(&update).unwrap());
    assert!(seeds.iter().all(|bytes| bytes.len() <= longest_update(WORLD)));
    let mut mutator = Mutator(5);
    let mut heard = 0;
    for _ in 0..100_000 {
        let bytes = mutator.input(&seeds);
        let mut gathering = come(1, None);
        let update = within(64 * (64 + bytes.len()), || postcard::from_bytes::<Update>(&bytes));
        let Ok(update) = update else { continue };
        if gathering.hear(0, update).is_ok() {
            heard += 1;
            assert!(!gathering.is_formed());
            assert!(gathering.missing().iter().all(|rank| *rank < WORLD));
            let update = gathering.due(2, true).unwrap();
            assert!(postcard::to_stdvec(&update).unwrap().len() <= longest_update(WORLD));
        }
    }
    assert!(heard > 1_000, "only {heard} updates were readable");
}

/// What an honest peer says to a tapped rank.
fn honest_lines() -> Lines {
    let announce = MessageFrame::Announce { tag: RECEIVED, id: 0, length: MESSAGE as u64 };
    let data = MessageFrame::Data { id: 0, length: MESSAGE };
    Lines {
        control: Frame::Heartbeat.encode().to_vec(),
        incoming: [&announce.encode()[..], &data.encode(), &[9; MESSAGE]].concat(),
        outgoing: MessageFrame::Clear { id: 0 }.encode().to_vec(),
    }
}

/// The tap works: an honest answer is taken for one.
#[test]
fn an_honest_stranger_is_believed() {
    let outcomes = Tapped::new().attack(&honest_lines(), |honest| honest, Ending::Stay);
    assert_eq!(outcomes.receive, Ok([9; MESSAGE]));
    assert_eq!(outcomes.send, Ok(()));
    assert_eq!(outcomes.all_reduce, Ok(vec![3.0; COUNT]));
}

#[test]
fn a_peer_gone_mad_ends_the_group_and_nothing_else() {
    let honest = honest_lines();
    let control = |bytes: Vec<u8>| Lines { control: bytes, ..honest_lines() };
    let incoming = |bytes: Vec<u8>| Lines { incoming: bytes, ..honest_lines() };
    let outgoing = |bytes: Vec<u8>| Lines { outgoing: bytes, ..honest_lines() };
    let news = |facts: &[Fact]| {
        let bytes: Vec<u8> = facts.iter().flat_map(|f| postcard::to_stdvec(f).unwrap()).collect();
        control([&Frame::News { length: bytes.len() }.encode()[..], &bytes].concat())
    };
    let mut flood = Vec::new();
    for id in 0..200 {
        flood.extend(MessageFrame::Announce { tag: 77, id, length: u64::MAX }.encode());
    }
    // Asks for what was cleared before, and for more than was announced.
    let again = MessageFrame::Clear { id: 0 }.encode().repeat(2);
    let too_much = [
        MessageFrame::Announce { tag: RECEIVED, id: 0, length: MESSAGE as u64 }.encode(),
        MessageFrame::Data { id: 0, length: MESSAGE + 1 }.encode(),
    ]
    .concat();
    let wrong_length = MessageFrame::Announce { tag: RECEIVED, id: 0, length: u64::MAX }.encode();
    let all: Vec<Fact> = facts();
    let mut seeds = vec![
        honest,
        control([&Frame::News { length: 3 }.encode()[..], &[0xff; 3]].concat()),
        incoming(flood),
        incoming(too_much),
        incoming(wrong_length.to_vec()),
        outgoing(again),
        // A message where this rank sends.
        outgoing(MessageFrame::Data { id: 0, length: 0 }.encode().to_vec()),
        news(&all),
        news(&[Fact::Left { rank: 1, seq: 0, why: None }]),
        // Waits in a call that was never made, and is lost itself.
        news(&[Fact::Stuck { rank: 1, call: calls()[0] }]),
        news(&[Fact::Failed(Reason::Lost { peer: Rank(0), silent_ms: None })]),
        news(&[Fact::Place { rank: Rank(1), number: 1, place: Some("a:1".into()) }]),
    ];
    seeds.extend(all.into_iter().map(|fact| news(&[fact])));
    let panics = watch_for_panics();
    let mut mutator = Mutator(6);
    for attack in 0..200 {
        let mut side = seeds[attack % seeds.len()].clone();
        if attack >= seeds.len() {
            let line = match mutator.below(3) {
                0 => &mut side.control,
                1 => &mut side.incoming,
                _ => &mut side.outgoing,
            };
            *line = mutator.corrupt(line);
        }
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

/// Counts panics of the threads that serve groups, which the tests would not notice otherwise.
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
