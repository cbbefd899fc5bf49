//! A server that wakes up after it was stopped: what comes first, of all that happens then. And one whose threads share
//! updates.

use super::*;
use crate::server::layout::Piece;
use crate::server::link::bytes;
use crate::server::link::tests::in_common_memory;
use unisono_codec::CodecSpec;
use unisono_codec::sender::{Origin, Scratch, Sender};

/// Far longer than a test takes, so that only what is [slept](sleep) counts.
const TIMEOUT: Duration = Duration::from_secs(600);

fn served(level: &str) -> ServedRun {
    served_with(level, 1, None)
}

/// With so many weights.
fn served_with(level: &str, elements: usize, codec: Option<CodecSpec>) -> ServedRun {
    let setup = Setup {
        pieces: vec![Piece { parameter: 0, start: 0, shape: vec![elements] }],
        optimizer: "sgd".parse().unwrap(),
        level: level.parse().unwrap(),
        stale: StalenessPolicy::Keep,
        total: 100,
        workers: 3,
        shards: 3,
        codecs: vec![codec],
        seed: 0,
        timeout_ms: TIMEOUT.as_millis() as u64,
    };
    ServedRun::new(setup, vec![vec![0.0; elements]], &Files::default(), Waiting::default()).unwrap()
}

/// Stops the process for longer than workers wait for it.
fn sleep(served: &mut ServedRun) {
    served.awake -= 2 * TIMEOUT;
}

/// A worker by its first, second, … connection.
fn caller(worker: u32, connection: u64) -> Caller {
    Caller { worker, life: Life(1), connection, is_here: true }
}

fn come(served: &ServedRun, caller: Caller) -> Clock {
    let Ok(Reply::Joined { joined, .. }) = served.join(caller) else { panic!("it is let in") };
    served.enter(caller, joined.clock).unwrap();
    joined.clock
}

/// A run that its three workers have come to.
fn with_workers(level: &str) -> ServedRun {
    let served = served(level);
    all_come(&served);
    served
}

fn all_come(served: &ServedRun) {
    for worker in 0..3 {
        come(served, caller(worker, 0));
    }
}

/// The first push of a worker arrives, and no worker waits for the reply.
fn push(served: &ServedRun, caller: Caller) {
    let push = PushId { worker: caller.worker, life: Life(1), number: 1, clock: Clock::START };
    let part = Part { piece: 0, vectors: 1, bytes: 4, encoded: false };
    let parts = [(part, Bulk::Own(bytes(&[1.0])))];
    let _ = served.push(caller, push, Measured::default(), &parts, || true);
}

fn updates(served: &ServedRun) -> u64 {
    served.report().unwrap().updates
}

/// Two have pushed, and the third comes back before the end of its old connection is noticed.
#[test]
fn a_round_waits_for_a_worker_that_comes_back_early() {
    let mut served = with_workers("bsp");
    sleep(&mut served);
    served.tick();
    push(&served, caller(1, 0));
    push(&served, caller(2, 0));
    let clock = come(&served, caller(0, 1));
    assert_eq!((clock, updates(&served)), (Clock::START, 0), "there was a round without it");
    served.lose(caller(0, 0)).unwrap();
    push(&served, caller(0, 1));
    assert_eq!(updates(&served), 1);
}

/// The same at a bound: it keeps its place.
#[test]
fn a_worker_that_comes_back_early_keeps_its_place() {
    let mut served = with_workers("ssp:1");
    push(&served, caller(1, 0));
    push(&served, caller(2, 0));
    sleep(&mut served);
    assert_eq!(come(&served, caller(0, 1)), Clock::START);
}

#[test]
fn a_round_waits_for_a_worker_whose_connection_has_ended() {
    let mut served = with_workers("bsp");
    sleep(&mut served);
    push(&served, caller(1, 0));
    push(&served, caller(2, 0));
    served.lose(caller(0, 0)).unwrap();
    assert_eq!(updates(&served), 0, "there was a round without it");
    // However long it pauses before it tries again.
    let until = served.lock().unwrap().gathers_until.unwrap();
    assert!(until >= 2 * TIMEOUT + TIMEOUT + LONGEST_PAUSE, "{until:?}");
}

#[test]
fn a_round_does_not_wait_for_a_worker_that_is_done() {
    let mut served = with_workers("bsp");
    sleep(&mut served);
    push(&served, caller(1, 0));
    push(&served, caller(2, 0));
    served.leave(caller(0, 0)).unwrap();
    assert_eq!(updates(&served), 1);
}

#[test]
fn no_worker_was_silent_while_the_server_slept() {
    let mut served = with_workers("bsp");
    push(&served, caller(1, 0));
    push(&served, caller(2, 0));
    sleep(&mut served);
    for _ in 0..2 {
        served.expire().unwrap();
        assert_eq!((served.report().unwrap().present, updates(&served)), (3, 0));
        served.tick();
    }
}

/// The first update is one of all, whatever happens before all have come.
#[test]
fn a_sleep_does_not_shorten_the_wait_for_the_first_round() {
    let mut served = served("bsp");
    come(&served, caller(0, 0));
    sleep(&mut served);
    served.lose(caller(0, 0)).unwrap();
    come(&served, caller(0, 1));
    sleep(&mut served);
    push(&served, caller(0, 1));
    assert_eq!(updates(&served), 0);
}

/// Whatever gradients are made of, and for as many cores as a machine may have: what several threads make of the weights is
/// what one does. Helpers come if there are cores on which no worker computes.
#[test]
fn helpers_change_no_bit() {
    const LARGE: usize = MOST_THREADS * MANY + 77;
    let gradient = |worker: u32| -> Vec<f32> {
        let at = |i: usize| ((i * 7919 + worker as usize * 104_729) % 1009) as f32 / 504.5 - 1.0;
        (0..LARGE).map(at).collect()
    };
    let gradients = [0, 1, 2].map(gradient);
    let codec: CodecSpec = "int8".parse().unwrap();
    let origin = Origin { shape: vec![LARGE], parameter: 0, seed: 0, worker: 2, mean_of: 1 };
    let (mut encoded, mut scratch) = (Vec::new(), Scratch::default());
    Sender::new(codec.build(), origin, false).encode(0, &gradients[2], &mut scratch, &mut encoded);

    let weights = |level: &str, cores: usize| {
        let mut served = served_with(level, LARGE, Some(codec.clone()));
        served.cores = cores;
        all_come(&served);
        for (worker, numbers) in (0..).zip(&gradients) {
            let (_worker, mut link) = in_common_memory(numbers);
            let there = link.bulk_or_places(&[(4 * LARGE, false)]).unwrap().remove(0);
            let (bulk, is_encoded) = match (level, worker) {
                ("async", 1) => (there, false),
                ("async", 2) => (Bulk::Own(&encoded), true),
                _ => (Bulk::Own(bytes(numbers)), false),
            };
            let length = if is_encoded { encoded.len() } else { 4 * LARGE };
            let part = Part { piece: 0, vectors: 1, bytes: length as u64, encoded: is_encoded };
            let push = PushId { worker, life: Life(1), number: 1, clock: Clock::START };
            // In lock-step none of these waits for the last, which makes the update.
            let parts = [(part, bulk)];
            let _ = served.push(caller(worker, 0), push, Measured::default(), &parts, || true);
        }
        assert_eq!(updates(&served), if level == "bsp" { 1 } else { 3 });
        let weights = served.weights().unwrap().remove(0).2.to_vec();
        let bits: Vec<u32> = weights.iter().map(|weight| weight.to_bits()).collect();
        (bits, served.crew.threads())
    };
    for (level, cores, helpers) in
        [("async", 3, 0), ("async", 5, 2), ("async", 9, 3), ("bsp", 3, 2), ("bsp", 9, 3)]
    {
        let (alone, shared) = (weights(level, 1), weights(level, cores));
        assert!(alone.0 == shared.0, "{level} with {cores} cores");
        assert_eq!(alone.1, 0);
        assert_eq!(shared.1 > 0, helpers > 0, "{level} with {cores} cores");
        assert!(shared.1 <= helpers, "{} helpers of {level} with {cores} cores", shared.1);
    }
}
