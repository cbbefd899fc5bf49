//! Ranks die, leave, fall silent, or disagree: every other rank learns who and how, and the rest
//! goes on together.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use common::machine::now;
use common::protocol::{Call, Command, Failed, Failure, How, Reply, Settings};
use common::random::{Random, seed};
use common::{LONG, World, serve_if_rank};
use rustix::process::Signal;
use unisono::{Dtype, Reduction, Transport};

/// A rank in a process of its own; see [`common`].
#[test]
fn as_rank() {
    serve_if_rank();
}

/// The ways to connect ranks, each with the hosts they seem to be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wiring {
    Threads,
    Shm,
    Tcp,
    /// Shared memory inside two hosts, TCP between them.
    Hosts,
}

impl Wiring {
    const ALL: [Wiring; 4] = [Wiring::Threads, Wiring::Shm, Wiring::Tcp, Wiring::Hosts];
    const PROCESSES: [Wiring; 3] = [Wiring::Shm, Wiring::Tcp, Wiring::Hosts];

    fn start(self, ranks: usize) -> World {
        if self == Wiring::Threads {
            return World::threads(&vec![0; ranks]);
        }
        let mut world = World::processes(ranks);
        self.place(&mut world);
        world
    }

    /// Says which ranks seem to share a host.
    fn place(self, world: &mut World) {
        let ranks = world.ranks.len() as u32;
        world.hosts = (self == Wiring::Hosts).then(|| (0..ranks).map(|r| r * 2 / ranks).collect());
    }

    fn settings(self) -> Settings {
        Settings::new(match self {
            Wiring::Threads | Wiring::Hosts => Transport::Auto,
            Wiring::Shm => Transport::Shm,
            Wiring::Tcp => Transport::Tcp,
        })
    }
}

const SUM: Call = Call::AllReduce { dtype: Dtype::I64, count: 1000, reduction: Reduction::Sum };

fn lost(failure: &Failure, by: How) -> Option<usize> {
    match failure {
        Failure::Lost { peer, how, .. } if *how == by => Some(*peer),
        _ => None,
    }
}

/// Kills `chains` × 4 ranks: five processes form a group and call random collectives, one is
/// killed in the middle, the four that are left form the next group, and so on until one is left.
fn kill(wiring: Wiring, chains: usize) {
    let mut random = Random::new(seed() ^ wiring as u64);
    let mut delays = Vec::new();
    let mut inside = 0;
    for _ in 0..chains {
        let mut world = wiring.start(5);
        let fresh: Vec<_> = world.ranks.iter_mut().map(|r| r.residue(&Command::Inspect)).collect();
        while world.ranks.len() > 1 {
            wiring.place(&mut world);
            world.form(&wiring.settings());
            for reply in world.all(&Command::Call(SUM)) {
                assert_eq!(reply, Reply::Done, "the survivors make progress");
            }
            let victim = random.below(world.ranks.len());
            for failed in kill_one(&mut world, victim, &mut random, &mut delays) {
                let during = match failed.failure {
                    Failure::Lost { peer, how: How::Closed, during } if peer == victim => during,
                    other => panic!("rank {victim} was killed, but a survivor says {other:?}"),
                };
                inside += usize::from(during.is_some());
            }
            for rank in &mut world.ranks {
                let mut left = rank.residue(&Command::Leave);
                // A thread that was joined is still listed until the kernel has buried it.
                let deadline = Instant::now() + Duration::from_secs(5);
                while left != fresh[0] && Instant::now() < deadline {
                    left = rank.residue(&Command::Inspect);
                }
                assert_eq!(left, fresh[0], "a group that failed leaves something behind");
            }
        }
        world.end();
    }
    delays.sort_unstable();
    let (median, worst) = (delays[delays.len() / 2], delays[delays.len() - 1]);
    println!(
        "{wiring:?}: {} kills; survivors knew after {median:?} (median) to {worst:?}; \
         {inside} of {} were inside a call",
        4 * chains,
        delays.len()
    );
    assert!(inside > 0, "no kill struck a call");
    assert!(worst < Duration::from_secs(2), "a survivor knew only after {worst:?}");
}

/// Kills a rank while all are busy; what the others say about it.
fn kill_one(
    world: &mut World,
    victim: usize,
    random: &mut Random,
    delays: &mut Vec<Duration>,
) -> Vec<Failed> {
    for reply in world.all(&Command::Churn { seed: random.next() }) {
        assert_eq!(reply, Reply::Churning);
    }
    std::thread::sleep(Duration::from_micros(random.below(15_000) as u64));
    let mut victim = world.ranks.remove(victim);
    assert!(victim.is_running(), "the victim died too early: {}", victim.log());
    let killed = now();
    victim.signal(Signal::KILL);
    let status = victim.wait();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "the victim ended otherwise");
    let failures: Vec<Failed> = world.ranks.iter().map(|rank| rank.failed()).collect();
    for failed in &failures {
        assert!(failed.at > killed, "a survivor failed before the kill: {failed:?}");
        delays.push(failed.at - killed);
    }
    failures
}

#[test]
fn kills_are_noticed_over_shared_memory() {
    kill(Wiring::Shm, 17);
}

#[test]
fn kills_are_noticed_over_tcp() {
    kill(Wiring::Tcp, 17);
}

#[test]
fn kills_are_noticed_over_both() {
    kill(Wiring::Hosts, 16);
}

/// A child that was forked without `exec`, as loaders of data are, has what its parent had open.
#[test]
fn a_killed_rank_is_lost_at_once_though_its_forked_child_lives() {
    for wiring in Wiring::PROCESSES {
        let mut world = wiring.start(4);
        let mut settings = wiring.settings();
        // Nothing but the death itself tells the others before they count as hung.
        settings.timeout = 100 * LONG;
        world.form(&settings);
        let victim = 1;
        let child = world.ranks[victim].fork();
        for (rank, handle) in world.ranks.iter_mut().enumerate() {
            if rank != victim {
                handle.tell(&Command::Settle);
            }
        }
        world.ranks[victim].signal(Signal::KILL);
        world.ranks[victim].wait();
        world.ranks.remove(victim);
        for rank in &world.ranks {
            let Failed { failure, .. } = rank.failed();
            assert_eq!(lost(&failure, How::Closed), Some(victim), "{wiring:?}: {failure:?}");
        }
        assert!(child.is_running(), "the child held nothing open");
        for rank in &mut world.ranks {
            rank.residue(&Command::Leave);
        }
        wiring.place(&mut world);
        world.form(&settings);
        for reply in world.all(&Command::Call(SUM)) {
            assert_eq!(reply, Reply::Done);
        }
        drop(child);
        world.end();
    }
}

/// What a forked child does with the connections of its parent does not reach the others: they hear
/// from the parent alone, and when it has left, it has.
#[test]
fn a_rank_that_leaves_has_left_though_its_forked_child_lives() {
    for wiring in Wiring::PROCESSES {
        let mut world = wiring.start(3);
        let mut settings = wiring.settings();
        settings.timeout = 100 * LONG;
        world.form(&settings);
        let child = world.ranks[1].fork();
        world.ranks[1].residue(&Command::Leave);
        // The socket at which it could be reached is gone with the group.
        world.assert_unreachable(1);
        for rank in [0, 2] {
            world.ranks[rank].tell(&Command::Settle);
            let Failed { failure, .. } = world.ranks[rank].failed();
            assert_eq!(lost(&failure, How::Left), Some(1), "{wiring:?}: {failure:?}");
        }
        assert!(child.is_running(), "the child held nothing open");
        drop(child);
        world.end();
    }
}

/// Rank 1 of three does `what` while the others call collectives, which all end because it left, and
/// say how.
fn leaves(wiring: Wiring, what: &Command, how: How) {
    let mut world = wiring.start(3);
    world.form(&wiring.settings());
    for reply in world.all(&Command::Call(SUM)) {
        assert_eq!(reply, Reply::Done);
    }
    world.ranks[1].tell(what);
    for rank in [0, 2] {
        world.ranks[rank].tell(&Command::Settle);
    }
    for rank in [0, 2] {
        let Failed { failure, .. } = world.ranks[rank].failed();
        assert_eq!(lost(&failure, how), Some(1), "{wiring:?}: {failure:?}");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for wiring in Wiring::ALL {
        leaves(wiring, &Command::Leave, How::Left);
    }
}

#[test]
fn a_rank_that_panics_is_named() {
    for wiring in Wiring::ALL {
        leaves(wiring, &Command::Panic, How::Failed);
    }
}

#[test]
fn calls_that_a_rank_completed_before_it_left_complete_everywhere() {
    for wiring in Wiring::ALL {
        let mut world = wiring.start(3);
        world.form(&wiring.settings());
        for _ in 0..20 {
            world.tell_all(&Command::Call(SUM));
        }
        world.ranks[1].tell(&Command::Leave);
        for rank in &world.ranks {
            for _ in 0..20 {
                assert_eq!(rank.reply(), Reply::Done, "{wiring:?}");
            }
        }
    }
}

#[test]
fn a_stopped_rank_is_reported_and_then_lost() {
    for wiring in Wiring::PROCESSES {
        let mut world = wiring.start(3);
        let mut settings = wiring.settings();
        settings.timeout = Duration::from_secs(1);
        settings.stall_after = Duration::from_millis(200);
        world.form(&settings);
        for reply in world.all(&Command::Churn { seed: 1 }) {
            assert_eq!(reply, Reply::Churning);
        }
        let victim = 1;
        world.ranks[victim].stop();
        let stopped = now();
        for rank in [0, 2] {
            let Failed { failure, at, .. } = world.ranks[rank].failed();
            assert_eq!(lost(&failure, How::Silent), Some(victim), "{wiring:?}: {failure:?}");
            println!("{wiring:?}: rank {rank} gave up after {:?}: {failure:?}", at - stopped);
            assert!(at - stopped < Duration::from_secs(5), "{:?}", at - stopped);
        }
        let logs = world.ranks[0].log() + &world.ranks[2].log();
        let waits_for_victim = |(call, ranks): (&str, &str)| {
            let named = call.contains('#') || call.contains("with tag 7");
            named && ranks.split([' ', ',']).any(|rank| rank == victim.to_string())
        };
        assert!(stalls(&logs).any(waits_for_victim), "{wiring:?}: no stall report in {logs:?}");

        // Phase two: it comes back, learns that it was given up, and joins the next epoch.
        world.ranks[victim].signal(Signal::CONT);
        let Failed { failure, .. } = world.ranks[victim].failed();
        assert!(lost(&failure, How::Silent).is_some(), "{wiring:?}: {failure:?}");
        for rank in &mut world.ranks {
            rank.residue(&Command::Leave);
        }
        world.form(&settings);
        for reply in world.all(&Command::Call(SUM)) {
            assert_eq!(reply, Reply::Done);
        }
        world.end();
    }
}

/// The stall reports in a log: the call, and the ranks it waits for.
fn stalls(log: &str) -> impl Iterator<Item = (&str, &str)> {
    log.lines().filter_map(|line| {
        let (_, report) = line.split_once(" has waited ")?;
        report.split_once(" for rank")
    })
}

#[test]
fn a_rank_that_was_stopped_for_a_moment_is_forgiven() {
    for wiring in Wiring::PROCESSES {
        let mut world = wiring.start(3);
        world.form(&wiring.settings());
        world.ranks[1].stop();
        world.tell_all(&Command::Call(SUM));
        // The fault had an effect: no rank can finish without it.
        assert_eq!(world.ranks[0].reply_within(Duration::from_millis(300)), None);
        world.ranks[1].signal(Signal::CONT);
        for rank in &world.ranks {
            assert_eq!(rank.reply(), Reply::Done);
        }
        world.end();
    }
}

/// As when a machine sleeps: none of them has heard of the others, and none may blame another.
#[test]
fn ranks_that_were_all_stopped_go_on() {
    for wiring in Wiring::PROCESSES {
        let mut world = wiring.start(3);
        let settings = Settings { timeout: Duration::from_secs(2), ..wiring.settings() };
        world.form(&settings);
        for round in 0..2 {
            for rank in &world.ranks {
                rank.stop();
            }
            std::thread::sleep(settings.timeout * 2);
            for rank in &world.ranks {
                rank.signal(Signal::CONT);
            }
            for reply in world.all(&Command::Call(SUM)) {
                assert_eq!(reply, Reply::Done, "round {round}");
            }
        }
        world.end();
    }
}

/// Calls that look alike and are not: what rank 1 calls, and what the others call.
fn disagreements() -> Vec<(Call, Call)> {
    use Reduction::{Max, Sum};
    let all_reduce = |dtype, count, reduction| Call::AllReduce { dtype, count, reduction };
    let f32s = all_reduce(Dtype::F32, 1000, Sum);
    vec![
        (Call::AllGather { count: 1000 }, f32s),
        (Call::Barrier, f32s),
        (all_reduce(Dtype::F32, 1001, Sum), f32s),
        (all_reduce(Dtype::F32, 1_000_000, Sum), f32s),
        (all_reduce(Dtype::F32, 0, Sum), f32s),
        (all_reduce(Dtype::I32, 1000, Sum), f32s),
        (all_reduce(Dtype::F32, 1000, Max), f32s),
        (Call::Broadcast { count: 10, root: 1 }, Call::Broadcast { count: 10, root: 0 }),
        (Call::Reduce { count: 10, root: 1 }, Call::Reduce { count: 10, root: 0 }),
        (Call::Reduce { count: 10, root: 0 }, Call::Broadcast { count: 10, root: 0 }),
    ]
}

/// How errors name a call.
fn name(call: Call) -> String {
    match call {
        Call::AllReduce { dtype, count, reduction } => {
            format!("all_reduce of {count} {dtype} by {reduction}")
        }
        Call::AllGather { count } => format!("all_gather of {count} i64 per rank"),
        Call::Broadcast { count, root } => {
            format!("broadcast of {count} i64 with root {root}")
        }
        Call::Reduce { count, root } => {
            format!("reduce of {count} i64 by sum with root {root}")
        }
        Call::Barrier => "barrier".into(),
        Call::Send { .. } | Call::Receive { .. } => unreachable!("messages are not collective"),
    }
}

#[test]
fn ranks_that_disagree_are_named_with_their_calls() {
    for wiring in Wiring::ALL {
        for (odd, even) in disagreements() {
            let mut world = wiring.start(3);
            world.form(&wiring.settings());
            for (rank, handle) in world.ranks.iter_mut().enumerate() {
                handle.tell(&Command::Call(if rank == 1 { odd } else { even }));
                handle.tell(&Command::Settle);
            }
            for (rank, handle) in world.ranks.iter().enumerate() {
                let what = format!("{wiring:?}, {odd:?} against {even:?}, rank {rank}");
                // A rank that does not wait for others in this call learns of it in the next.
                let (first, Failed { failure: next, .. }) = (handle.reply(), handle.failed());
                let failure = match first {
                    Reply::Failed(Failed { failure, .. }) => failure,
                    _ => next,
                };
                let Failure::Mismatch { rank, call, peer, peer_call } = failure else {
                    panic!("{what}: {failure:?}");
                };
                let (theirs, ours) = match (rank, peer) {
                    (1, 0 | 2) => (call, peer_call),
                    (0 | 2, 1) => (peer_call, call),
                    _ => panic!("{what}: ranks {rank} and {peer} are said to disagree"),
                };
                let (theirs, ours) = (Named::parse(&theirs), Named::parse(&ours));
                // A rank that needed no other may be a call ahead when the others notice.
                let settling = |call: &Named, other: &Named| {
                    call.text == "barrier" && call.number == other.number + 1
                };
                assert!(
                    theirs.text.starts_with(&name(odd)) || settling(&theirs, &ours),
                    "{what}: rank 1 is said to have called {theirs:?}"
                );
                assert!(
                    ours.text.starts_with(&name(even)) || settling(&ours, &theirs),
                    "{what}: the others are said to have called {ours:?}"
                );
                assert_ne!(theirs, ours);
            }
        }
    }
}

/// A call as an error names it, its number apart.
#[derive(Debug, PartialEq)]
struct Named {
    number: u32,
    text: String,
}

impl Named {
    fn parse(call: &str) -> Named {
        let (op, rest) = call.split_once(" #").expect("calls are numbered");
        let (number, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let text = format!("{op} {rest}").trim().to_owned();
        Named { number: number.parse().expect("a number"), text }
    }
}

#[test]
fn messages_of_different_length_are_refused() {
    for wiring in Wiring::ALL {
        let mut world = wiring.start(3);
        world.form(&wiring.settings());
        world.ranks[0].tell(&Command::Call(Call::Send { to: 1, tag: 9, count: 10 }));
        world.ranks[1].tell(&Command::Call(Call::Receive { from: 0, tag: 9, count: 20 }));
        world.ranks[2].tell(&Command::Settle);
        for rank in &world.ranks {
            let Failed { failure, .. } = rank.failed();
            let expected = Failure::Length { from: 0, to: 1, tag: 9, sent: 80, expected: 160 };
            assert_eq!(failure, expected, "{wiring:?}");
        }
    }
}

/// Lets a process have `room` more bytes of addresses than it has; `None` lifts the limit again.
fn limit_memory(pid: u32, room: Option<u64>) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("it runs");
    let pages: u64 = status.split(' ').next().and_then(|n| n.parse().ok()).expect("its size");
    let pid = rustix::process::Pid::from_raw(pid as i32);
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::As);
    limit.current = room.map(|room| pages * 4096 + room).or(limit.maximum);
    rustix::process::prlimit(pid, rustix::process::Resource::As, limit).expect("its own user may");
}

#[test]
fn too_much_staging_memory_is_refused_at_once() {
    let large = 128 << 20;
    let mut world = Wiring::Shm.start(3);
    limit_memory(world.ranks[1].pid(), Some(large as u64 / 2));
    let replies = world.try_form(|_| Settings { staging: large, ..Wiring::Shm.settings() });
    for (rank, reply) in replies.into_iter().enumerate() {
        let Reply::Failed(Failed { failure, .. }) = reply else {
            panic!("rank {rank} joined a group that cannot form");
        };
        match failure {
            Failure::Staging { bytes } => assert!(rank == 1 && bytes > large / 2),
            Failure::Peer { peer, reason } => {
                assert!(rank != 1 && peer == 1, "rank {rank} blames {peer}");
                assert!(reason.contains("staging"), "{reason}");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    // Phase two: with more room, the same processes form a group.
    limit_memory(world.ranks[1].pid(), None);
    world.form(&Wiring::Shm.settings());
    for reply in world.all(&Command::Call(SUM)) {
        assert_eq!(reply, Reply::Done);
    }
    world.end();
}

#[test]
fn a_sub_group_names_ranks_as_the_job_does() {
    for wiring in Wiring::PROCESSES {
        let mut settings = wiring.settings();
        settings.stall_after = Duration::from_millis(300);
        let mut world = wiring.start(4);
        world.form(&settings);
        let form = |world: &mut World| {
            for rank in [1, 3] {
                world.ranks[rank].tell(&Command::Subgroup { members: vec![1, 3] });
            }
            for rank in [1, 3] {
                assert_eq!(world.ranks[rank].reply(), Reply::Done);
            }
        };

        // A stall, then a mismatch: the root is rank 0 of the group.
        form(&mut world);
        world.ranks[1].tell(&Command::Call(SUM));
        assert_eq!(world.ranks[1].reply_within(Duration::from_secs(1)), None);
        world.ranks[3].tell(&Command::Call(Call::Broadcast { count: 10, root: 0 }));
        for rank in [1, 3] {
            let failure = world.ranks[rank].failed().failure;
            let Failure::Mismatch { rank, call, peer, peer_call } = failure else {
                panic!("{wiring:?}: {failure:?}")
            };
            let mut calls = [(rank, call), (peer, peer_call)];
            calls.sort();
            assert_eq!(calls[0], (1, "all_reduce #1 of 1000 i64 by sum".into()));
            assert_eq!(calls[1], (3, "broadcast #1 of 10 i64 with root 1".into()));
        }
        let log = world.ranks[1].log();
        assert!(log.contains("rank 1 has waited "), "{wiring:?}: {log}");
        assert!(stalls(&log).any(|(_, ranks)| ranks == " 3"), "{wiring:?}: {log}");

        form(&mut world);
        world.ranks[1].tell(&Command::Settle);
        assert_eq!(world.ranks[1].reply_within(Duration::from_millis(200)), None);
        world.ranks[3].signal(Signal::KILL);
        world.ranks[3].wait();
        let failure = world.ranks[1].failed().failure;
        assert_eq!(lost(&failure, How::Closed), Some(3), "{wiring:?}: {failure:?}");
        world.ranks.remove(3);
        world.end();
    }
}

#[test]
fn an_epoch_that_has_ended_stays_ended() {
    for wiring in Wiring::PROCESSES {
        let mut world = wiring.start(3);
        world.form(&wiring.settings());
        for rank in [1, 2] {
            world.ranks[rank].tell(&Command::Settle);
        }
        world.ranks[0].tell(&Command::EndEpoch);
        assert_eq!(world.ranks[0].reply(), Reply::Done);
        for rank in [1, 2] {
            assert_eq!(world.ranks[rank].failed().failure, Failure::EpochEnded { epoch: 1 });
        }
        for command in [Command::Call(SUM), Command::Split, Command::Call(Call::Barrier)] {
            world.tell_all(&command);
            for rank in &world.ranks {
                assert_eq!(rank.failed().failure, Failure::EpochEnded { epoch: 1 });
            }
        }
        world.end();
    }
}
