//! A server that wakes up after it was stopped: what comes first, of all that happens then.

use super::*;
use crate::server::layout::Piece;
use crate::server::link::bytes;

/// Far longer than a test takes, so that only what is [slept](sleep) counts.
const TIMEOUT: Duration = Duration::from_secs(600);

fn served(level: &str) -> ServedRun {
    let setup = Setup {
        pieces: vec![Piece { parameter: 0, start: 0, shape: vec![1] }],
        optimizer: "sgd".parse().unwrap(),
        level: level.parse().unwrap(),
        stale: StalenessPolicy::Keep,
        total: 100,
        workers: 3,
        shards: 3,
        codecs: vec![None],
        seed: 0,
        timeout_ms: TIMEOUT.as_millis() as u64,
    };
    ServedRun::new(setup, vec![vec![0.0]], &Files::default(), Waiting::default()).unwrap()
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
    for worker in 0..3 {
        come(&served, caller(worker, 0));
    }
    served
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
