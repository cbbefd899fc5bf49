//! A shard that wakes up after it was stopped: what comes first, of all that happens then.

use super::*;
use crate::server::layout::Piece;
use crate::server::link::bytes;

/// Far longer than a test takes, so that only what is [slept](sleep) counts.
const TIMEOUT: Duration = Duration::from_secs(600);

fn job(level: &str) -> Job {
    let setup = Setup {
        pieces: vec![Piece { parameter: 0, start: 0, shape: vec![1] }],
        optimizer: "sgd".parse().unwrap(),
        level: level.parse().unwrap(),
        stale: Stale::Keep,
        total: 100,
        workers: 3,
        shards: 3,
        codecs: vec![None],
        seed: 0,
        timeout_ms: TIMEOUT.as_millis() as u64,
    };
    Job::new(setup, vec![vec![0.0]], &Files::default(), Waiting::default()).unwrap()
}

/// Stops the process for longer than workers wait for it.
fn sleep(job: &mut Job) {
    job.awake -= 2 * TIMEOUT;
}

/// A worker by its first, second, … connection.
fn caller(worker: u32, connection: u64) -> Caller {
    Caller { worker, life: 1, connection }
}

fn come(job: &Job, caller: Caller) -> u64 {
    let Ok(Reply::Joined { joined, .. }) = job.join(caller) else { panic!("it is let in") };
    job.enter(caller, joined.clock).unwrap();
    joined.clock
}

/// A run that its three workers have come to.
fn with_workers(level: &str) -> Job {
    let job = job(level);
    for worker in 0..3 {
        come(&job, caller(worker, 0));
    }
    job
}

/// The first push of a worker arrives, and nobody waits for the reply.
fn push(job: &Job, caller: Caller) {
    let push = PushId { worker: caller.worker, life: 1, number: 1, clock: 0 };
    let part = Part { piece: 0, vectors: 1, bytes: 4, encoded: false };
    let _ = job.push(caller, push, Measured::default(), &[(part, bytes(&[1.0]))], || true);
}

fn updates(job: &Job) -> u64 {
    job.report().unwrap().updates
}

/// Two have pushed, and the third comes back before the end of its old connection is noticed.
#[test]
fn a_round_waits_for_a_worker_that_comes_back_early() {
    let mut job = with_workers("bsp");
    sleep(&mut job);
    job.tick();
    push(&job, caller(1, 0));
    push(&job, caller(2, 0));
    let clock = come(&job, caller(0, 1));
    assert_eq!((clock, updates(&job)), (0, 0), "there was a round without it");
    job.lose(caller(0, 0)).unwrap();
    push(&job, caller(0, 1));
    assert_eq!(updates(&job), 1);
}

/// The same at a bound: it keeps its place.
#[test]
fn a_worker_that_comes_back_early_keeps_its_place() {
    let mut job = with_workers("ssp:1");
    push(&job, caller(1, 0));
    push(&job, caller(2, 0));
    sleep(&mut job);
    assert_eq!(come(&job, caller(0, 1)), 0);
}

#[test]
fn a_round_waits_for_a_worker_whose_connection_has_ended() {
    let mut job = with_workers("bsp");
    sleep(&mut job);
    push(&job, caller(1, 0));
    push(&job, caller(2, 0));
    job.lose(caller(0, 0)).unwrap();
    assert_eq!(updates(&job), 0, "there was a round without it");
    // However long it pauses before it tries again.
    let until = job.lock().unwrap().gathers_until.unwrap();
    assert!(until >= 2 * TIMEOUT + TIMEOUT + LONGEST_PAUSE, "{until:?}");
}

#[test]
fn a_round_does_not_wait_for_a_worker_that_is_done() {
    let mut job = with_workers("bsp");
    sleep(&mut job);
    push(&job, caller(1, 0));
    push(&job, caller(2, 0));
    job.leave(caller(0, 0)).unwrap();
    assert_eq!(updates(&job), 1);
}

#[test]
fn nobody_was_silent_while_the_shard_slept() {
    let mut job = with_workers("bsp");
    push(&job, caller(1, 0));
    push(&job, caller(2, 0));
    sleep(&mut job);
    for _ in 0..2 {
        job.expire().unwrap();
        assert_eq!((job.report().unwrap().present, updates(&job)), (3, 0));
        job.tick();
    }
}

/// The first update is one of all, whatever happens before all have come.
#[test]
fn a_sleep_does_not_shorten_the_wait_for_the_first_round() {
    let mut job = job("bsp");
    come(&job, caller(0, 0));
    sleep(&mut job);
    job.lose(caller(0, 0)).unwrap();
    come(&job, caller(0, 1));
    sleep(&mut job);
    push(&job, caller(0, 1));
    assert_eq!(updates(&job), 0);
}
