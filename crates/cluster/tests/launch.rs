//! The launcher and its ranks as processes.
//!
//! Most tests run the launcher in this process and shell commands as ranks. Where the launcher
//! itself is to be signalled, or ranks are to meet, this test binary starts itself again: the
//! "tests" [`as_launcher`] and [`as_rank`] do nothing unless they are started that way.

mod common;
#[path = "common/ports.rs"]
mod ports;

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    LONG, MARKER, TestJob, failure, marker, processes, raw, signal, wait_for_guard, wait_until,
};
use ports::free_ports;
use rustix::process::{Signal, kill_process};
use unisono_cluster::launch::{Ending, Failure, Launch, LaunchError, Nodes, Outcome};
use unisono_cluster::place::Place;
use unisono_cluster::rendezvous::connect;
use unisono_net::Token;

/// Ranks that meet; see [`as_rank`].
fn meeting(ranks: u32) -> TestJob {
    let this = std::env::current_exe().expect("a test has a path");
    let mut job = TestJob::new(ranks, &["--exact", "as_rank", "--nocapture", "-q"]);
    job.launch.command.insert(0, this.into());
    job.launch.vars.push(("UNISONO_TEST_ROLE".into(), "rank".into()));
    job
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn ranks_find_their_place_in_the_environment() {
    let job = TestJob::shell(
        3,
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR",
    );
    assert_eq!(job.run(), Outcome::Success);
    let expected = ["0/3 0/3 0 127.0.0.1", "1/3 1/3 0 127.0.0.1", "2/3 2/3 0 127.0.0.1"];
    assert_eq!(sorted(&job.stdout()), expected);
    assert_eq!(job.stderr(), "");
}

#[test]
fn a_failing_rank_ends_the_job_with_its_code_and_last_words() {
    let script = r#"
        if [ $RANK = 1 ]; then
            for line in $(seq 1 30); do echo "word $line" >&2; done
            exit 7
        fi
        sleep 1000; true"#;
    let job = TestJob::shell(3, script);
    let outcome = job.run();
    assert_eq!(outcome.exit_code(), 7);
    let failure = failure(outcome);
    assert_eq!((failure.rank, failure.ending), (1, Ending::Code(7)));
    let last: Vec<String> = (11..=30).map(|line| format!("word {line}")).collect();
    assert_eq!(failure.stderr, last);
    let stderr = job.stderr();
    assert!(stderr.contains("[rank 1] word 1\n"), "{stderr}");
    let report =
        "unisono: rank 1 exited with code 7; its last lines of stderr:\nunisono:   | word 11";
    assert!(stderr.contains(report), "{stderr}");
}

#[test]
fn a_rank_killed_by_a_signal_gives_the_code_a_shell_would() {
    let outcome = TestJob::shell(2, "[ $RANK = 0 ] && sleep 1000; kill -SEGV $$").run();
    assert_eq!(outcome.exit_code(), 128 + 11);
    let failure = failure(outcome);
    assert_eq!((failure.rank, failure.ending), (1, Ending::Signal(11)));
}

/// Rank 0 fails when rank 1, which runs `script`, has created the file `$READY`.
fn failing_when_ready(script: &str) -> TestJob {
    let wait = "until [ -e $READY ]; do sleep 0.01; done; rm $READY; exit 5";
    let mut job = TestJob::shell(2, &format!("if [ $RANK = 0 ]; then {wait}; fi; {script}"));
    let ready = std::env::temp_dir().join(format!("unisono-test-ready-{}", job.marker));
    job.launch.vars.push(("READY".into(), ready.into()));
    job
}

#[test]
fn ranks_that_ignore_the_signal_are_killed() {
    let mut job = failing_when_ready("trap '' TERM; : >$READY; while true; do sleep 1; done");
    job.launch.grace = Duration::from_millis(100);
    assert_eq!(job.run().exit_code(), 5);
}

#[test]
fn ranks_may_clean_up_in_the_grace_period() {
    let mut job = failing_when_ready(
        "trap 'echo saved; exit 0' TERM; : >$READY; while true; do sleep 0.01; done",
    );
    job.launch.grace = LONG;
    assert_eq!(job.run().exit_code(), 5);
    assert_eq!(job.stdout(), "saved\n");
}

#[test]
fn children_of_ranks_that_ended_well_do_not_outlive_the_job() {
    let job = TestJob::shell(2, "sleep 1000 & exit 0");
    assert_eq!(job.run(), Outcome::Success);
}

/// Programs that take their children out of the rank's process group.
#[test]
fn nothing_outlives_the_job_by_leaving_its_group() {
    let job = TestJob::shell(2, "setsid sleep 1000 & setsid setsid sleep 1000 & exit 0");
    assert_eq!(job.run(), Outcome::Success);
    let script = "if [ $RANK = 0 ]; then exit 5; fi; timeout 1000 sleep 1000; true";
    assert_eq!(TestJob::shell(2, script).run().exit_code(), 5);
}

/// A process that is stopped does not hear that it should end, unless it is made to go on.
#[test]
fn a_stopped_rank_ends_when_told_to() {
    let mut job = failing_when_ready(
        "(until grep -q '^State:.T' /proc/$$/status; do sleep 0.01; done; : >$READY) &
         kill -STOP $$; sleep 1000",
    );
    job.launch.grace = Duration::from_secs(1000);
    let start = Instant::now();
    assert_eq!(job.run().exit_code(), 5);
    assert!(start.elapsed() < LONG, "it was waited for");
}

#[test]
fn lines_of_several_ranks_stay_whole() {
    // Each line leaves its rank in three pieces.
    let script = r#"
        for line in $(seq 1 200); do
            printf "$RANK"; printf ' and '; printf "the same $RANK\n"
        done
        printf "open $RANK""#;
    let mut job = TestJob::shell(4, script);
    job.launch.label_stdout = true;
    assert_eq!(job.run(), Outcome::Success);
    let stdout = job.stdout();
    assert_eq!(stdout.lines().count(), 4 * 201);
    for rank in 0..4 {
        let whole = format!("[rank {rank}] {rank} and the same {rank}");
        assert_eq!(stdout.lines().filter(|line| **line == whole).count(), 200);
        assert_eq!(
            stdout.lines().filter(|line| *line == format!("[rank {rank}] open {rank}")).count(),
            1
        );
    }
}

#[test]
fn long_lines_stay_whole() {
    const LONGEST: usize = 5_000_000;
    // Written in pieces, while others write; the last has no end.
    let script = format!(
        r#"
        for length in 65536 70000 {LONGEST}; do
            printf "$RANK "; head -c $length /dev/zero | tr '\0' "$RANK"; printf " $RANK\n"
            echo short
        done
        printf "$RANK "; head -c {LONGEST} /dev/zero | tr '\0' "$RANK"; printf " $RANK""#
    );
    let job = TestJob::shell(3, &script);
    assert_eq!(job.run(), Outcome::Success);
    let stdout = job.stdout();
    let mut found = [const { Vec::new() }; 3];
    for line in stdout.lines().filter(|line| *line != "short") {
        let rank = line.as_bytes()[0];
        assert_eq!(&line[line.len() - 2..], format!(" {}", rank as char), "the end is missing");
        let middle = &line.as_bytes()[2..line.len() - 2];
        assert!(middle.iter().all(|byte| *byte == rank), "mixed");
        found[usize::from(rank - b'0')].push(middle.len());
    }
    assert_eq!(found, [const { [65_536, 70_000, LONGEST, LONGEST] }; 3]);
}

/// Somewhere that takes so many writes, and then fails as told.
struct Failing {
    writes: u32,
    how: std::io::ErrorKind,
}

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.writes = self.writes.checked_sub(1).ok_or(self.how)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// As the system ends a program whose reader has gone, but with time to clean up.
#[test]
fn a_job_whose_reader_has_gone_ends_without_a_word() {
    let cleanup = std::env::temp_dir().join(format!("unisono-test-cleanup-{}", marker()));
    let script = format!(
        "trap 'echo still here; echo $RANK >>{}; exit 0' TERM; while true; do echo $RANK; sleep 0.01; done",
        cleanup.display()
    );
    let mut job = TestJob::shell(2, &script);
    job.launch.grace = LONG;
    let closed = Failing { writes: 5, how: std::io::ErrorKind::BrokenPipe };
    job.launch.stdout = Arc::new(Mutex::new(closed));
    let outcome = job.run();
    assert!(matches!(outcome, Outcome::OutputLost { closed: true, .. }), "{outcome:?}");
    assert_eq!(outcome.exit_code(), 141);
    assert!(!job.stderr().contains("unisono"), "{}", job.stderr());
    let cleaned = std::fs::read_to_string(&cleanup).unwrap();
    std::fs::remove_file(&cleanup).unwrap();
    assert_eq!(sorted(&cleaned), ["0", "1"]);
}

#[test]
fn output_that_is_lost_at_the_very_end_counts() {
    for (how, code, words) in [
        (std::io::ErrorKind::BrokenPipe, 141, ""),
        (std::io::ErrorKind::StorageFull, 1, "the output could not be written: "),
    ] {
        let mut job = TestJob::shell(2, "echo $RANK");
        job.launch.stdout = Arc::new(Mutex::new(Failing { writes: 1, how }));
        let outcome = job.run();
        assert_eq!(outcome.exit_code(), code, "{outcome:?}");
        assert!(outcome.to_string().contains(words), "{outcome}");
    }
}

#[test]
fn a_program_that_does_not_exist_is_an_error() {
    let error = TestJob::new(2, &["/nowhere/to/be/found"]).launch.run().unwrap_err();
    assert!(matches!(error, LaunchError::Spawn { .. }), "{error}");
    assert!(matches!(TestJob::new(0, &["true"]).launch.run(), Err(LaunchError::Usage(_))));
    assert!(matches!(TestJob::new(1, &[]).launch.run(), Err(LaunchError::Usage(_))));
    let too_many = TestJob::new(4_000_000_000, &["true"]);
    assert!(matches!(too_many.launch.run(), Err(LaunchError::Usage(_))));
}

#[test]
fn ranks_meet_at_the_launcher() {
    let job = meeting(4);
    assert_eq!(job.run(), Outcome::Success, "{}", job.stderr());
    let met = "met 0 1 2 3";
    assert_eq!(job.stdout().lines().filter(|line| line.ends_with(met)).count(), 4);
}

#[test]
fn no_rank_waits_for_one_that_ended() {
    let mut job = meeting(3);
    // Rank 2 ends well, but without coming to the meeting.
    job.launch.vars.push(("UNISONO_TEST_ABSENT".into(), "2".into()));
    let outcome = job.run();
    let failure = failure(outcome);
    assert!(failure.rank < 2);
    assert!(failure.stderr.iter().any(|line| line.contains("rank 2 ended")), "{failure:?}");
}

/// A rank that will be started again has not ended: the others wait for it.
#[test]
fn a_restart_is_no_end_at_the_rendezvous() {
    let mut job = meeting(3);
    let script = r#"if [ $RANK$UNISONO_LIFE = 20 ]; then kill -9 $$; fi; exec "$0" "$@""#;
    job.launch.command.splice(0..0, ["sh", "-c", script].map(Into::into));
    job.launch.restarts.limit = 1;
    assert_eq!(job.run(), Outcome::Success, "{}", job.stderr());
    assert_eq!(job.stdout().lines().filter(|line| line.ends_with("met 0 1 2")).count(), 3);
}

/// A rank of [`meeting`]: joins the rendezvous and prints whom it met.
#[test]
fn as_rank() {
    if std::env::var_os("UNISONO_TEST_ROLE").is_none_or(|role| role != "rank") {
        return;
    }
    let place = Place::from_env().unwrap();
    if std::env::var("UNISONO_TEST_ABSENT").is_ok_and(|rank| rank == place.rank.to_string()) {
        return;
    }
    let name = place.rank.to_string();
    let met = connect(&place, false, Instant::now() + LONG)
        .and_then(|session| session.exchange(name.as_bytes()))
        .unwrap_or_else(|error| {
            eprintln!("{error}");
            std::process::exit(1);
        });
    let names: Vec<String> =
        met.blobs.into_iter().map(|blob| String::from_utf8(blob).unwrap()).collect();
    println!("\nmet {}", names.join(" "));
}

/// Starts a launcher of two ranks in a process of its own; waits until it, both ranks and what they
/// started run: as many processes as that makes.
fn launcher_process(script: &str, count: usize) -> (Child, String) {
    let marker = marker();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_launcher", "--nocapture", "-q"])
        .env("UNISONO_TEST_ROLE", "launcher")
        .env("UNISONO_TEST_SCRIPT", script)
        .env(MARKER, &marker)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("all processes run", || processes(&marker).len() == count);
    (child, marker)
}

#[test]
fn as_launcher() {
    if std::env::var_os("UNISONO_TEST_ROLE").is_none_or(|role| role != "launcher") {
        return;
    }
    // Below another launcher, the ranks run something else.
    let nested = std::env::var_os("UNISONO_RENDEZVOUS").is_some();
    let script = if nested { "UNISONO_TEST_INNER_SCRIPT" } else { "UNISONO_TEST_SCRIPT" };
    let script = std::env::var_os(script).unwrap();
    let mut launch = Launch::new(vec!["sh".into(), "-c".into(), script], 2);
    launch.grace = Duration::from_secs(1);
    let outcome = launch.run().unwrap();
    std::process::exit(outcome.exit_code().into());
}

/// What two ranks may do, and how many processes they are with their launcher.
const SCRIPTS: [(&str, usize); 5] = [
    ("sleep 1000; true", 5),
    ("trap '' INT TERM; sleep 1000; sleep 1000", 5),
    ("timeout 1000 sleep 1000; true", 7),
    ("setsid sh -c 'trap \"\" INT TERM; sleep 1000; sleep 1000'; true", 7),
    // The fork of `setsid` whose parent does not wait for it.
    ("setsid setsid -f sleep 1000; sleep 1000; true", 7),
];

#[test]
fn an_interrupted_launcher_leaves_no_process() {
    for (name, how, code) in [("INT", Signal::INT, 130), ("TERM", Signal::TERM, 143)] {
        for (script, count) in SCRIPTS {
            let (mut launcher, marker) = launcher_process(script, count);
            signal(&launcher, how);
            assert_eq!(launcher.wait().unwrap().code(), Some(code), "{name}, {script}");
            assert_eq!(processes(&marker), Vec::<i32>::new(), "{name}, {script}");
        }
    }
}

#[test]
fn a_killed_launcher_leaves_no_process() {
    for (script, count) in SCRIPTS {
        let (mut launcher, marker) = launcher_process(script, count);
        signal(&launcher, Signal::KILL);
        launcher.wait().unwrap();
        wait_until("everything has ended", || processes(&marker).is_empty());
    }
}

#[test]
fn a_killed_guard_is_replaced() {
    let (mut launcher, marker) = launcher_process("setsid sleep 1000; true", 5);
    let first = wait_for_guard(&marker, None);
    kill_process(first, Signal::KILL).unwrap();
    let second = wait_for_guard(&marker, Some(first));
    // It was told of the ranks that there were.
    signal(&launcher, Signal::KILL);
    launcher.wait().unwrap();
    wait_until("everything has ended", || processes(&marker).is_empty());
    wait_until("the guard has ended", || !Path::new(&format!("/proc/{}", raw(second))).exists());
}

/// A launcher whose ranks are launchers: the ranks of those are told to end once, by their own.
#[test]
fn launchers_below_a_launcher_end_their_own_ranks() {
    let this = std::env::current_exe().unwrap();
    let inner = format!("exec {} --exact as_launcher --nocapture -q", this.display());
    let told = std::env::temp_dir().join(format!("unisono-test-told-{}", marker()));
    for how in [Signal::INT, Signal::KILL] {
        let marker = marker();
        let ready = std::env::temp_dir().join(format!("unisono-test-ready-{marker}"));
        let script = format!(
            "trap 'echo told >>{}; exit 0' INT; echo ready >>{}; while true; do sleep 0.01; done",
            told.display(),
            ready.display()
        );
        let mut launcher = Command::new(&this)
            .args(["--exact", "as_launcher", "--nocapture", "-q"])
            .env("UNISONO_TEST_ROLE", "launcher")
            .env("UNISONO_TEST_SCRIPT", &inner)
            .env("UNISONO_TEST_INNER_SCRIPT", &script)
            .env(MARKER, &marker)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // A rank that has not said so may not have set its trap yet, and would die untold.
        let listening = || std::fs::read_to_string(&ready).map_or(0, |text| text.lines().count());
        wait_until("all four ranks run", || listening() == 4);
        std::fs::remove_file(&ready).unwrap();
        signal(&launcher, how);
        launcher.wait().unwrap();
        wait_until("everything has ended", || processes(&marker).is_empty());
        if how == Signal::INT {
            let text = std::fs::read_to_string(&told).unwrap();
            std::fs::remove_file(&told).unwrap();
            assert_eq!(text, "told\n".repeat(4));
        }
    }
}

/// The launchers of several nodes, on threads of this process.
fn run_nodes(jobs: &[TestJob]) -> Vec<Result<Outcome, LaunchError>> {
    thread::scope(|scope| {
        let nodes: Vec<_> = jobs.iter().map(|job| scope.spawn(|| job.launch.run())).collect();
        nodes.into_iter().map(|node| node.join().unwrap()).collect()
    })
}

fn join_nodes(jobs: &mut [TestJob], port: u16, tokens: &[Option<Token>]) {
    let count = jobs.len() as u32;
    for (node, job) in (0..).zip(jobs) {
        job.launch.nodes = Some(Nodes { count, node, rendezvous: ("127.0.0.1".into(), port) });
        job.launch.token = tokens[node as usize % tokens.len()].clone();
    }
}

/// A port that is free now.
fn free_port() -> u16 {
    free_ports(1)[0]
}

#[test]
fn two_nodes_of_different_size_make_one_job() {
    for token in [None, Some(Token::random().unwrap())] {
        let mut jobs = [meeting(1), meeting(3)];
        join_nodes(&mut jobs, free_port(), &[token]);
        let outcomes = run_nodes(&jobs);
        for (job, outcome) in jobs.iter().zip(outcomes) {
            assert_eq!(outcome.unwrap(), Outcome::Success, "{}", job.stderr());
            let met = job.stdout().lines().filter(|line| line.ends_with("met 0 1 2 3")).count();
            assert_eq!(met, job.launch.ranks as usize);
            assert_eq!(processes(&job.marker), Vec::<i32>::new());
        }
    }
}

#[test]
fn a_failure_on_one_node_ends_all_and_is_named_everywhere() {
    for failing_rank in [0, 4] {
        let script = format!(
            "if [ $RANK = {failing_rank} ]; then echo oops >&2; exit 9; fi; sleep 1000; true"
        );
        let mut jobs =
            [TestJob::shell(2, &script), TestJob::shell(1, &script), TestJob::shell(2, &script)];
        join_nodes(&mut jobs, free_port(), &[None]);
        let node = if failing_rank == 0 { 0 } else { 2 };
        for (job, outcome) in jobs.iter().zip(run_nodes(&jobs)) {
            let failure = failure(outcome.unwrap());
            let stderr = vec!["oops".to_owned()];
            let expected = Failure { rank: failing_rank, node, ending: Ending::Code(9), stderr };
            assert_eq!(failure, expected);
            let report = format!("unisono: rank {failing_rank} exited with code 9 on node {node}");
            assert!(job.stderr().contains(&report), "{}", job.stderr());
            assert_eq!(processes(&job.marker), Vec::<i32>::new());
        }
    }
}

#[test]
fn nodes_assemble_among_strangers() {
    let port = free_port();
    let mut jobs = [TestJob::shell(1, "echo $RANK"), TestJob::shell(1, "echo $RANK")];
    join_nodes(&mut jobs, port, &[Some(Token::random().unwrap())]);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) {
                    let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
                }
                thread::yield_now();
            }
        });
        let outcomes = run_nodes(&jobs);
        stop.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(Outcome::Success))));
    });
    assert_eq!(jobs.map(|job| job.stdout()), ["0\n", "1\n"]);
}

#[test]
fn a_node_without_the_token_is_told_so() {
    let mut jobs = [TestJob::shell(1, "true"), TestJob::shell(1, "true")];
    join_nodes(&mut jobs, free_port(), &[Some(Token::random().unwrap()), None]);
    // Long enough for node 1 to come and be refused, on a machine with much else to do.
    jobs[0].launch.timeout = Duration::from_secs(10);
    let outcomes = run_nodes(&jobs);
    assert!(matches!(&outcomes[0], Err(LaunchError::NodesMissing { missing }) if *missing == [1]));
    assert!(matches!(&outcomes[1], Err(LaunchError::Handshake { .. })));
}

#[test]
fn a_rendezvous_that_is_not_at_node_0_is_refused_there() {
    for host in ["192.0.2.7", "no-such-machine.invalid"] {
        let mut job = TestJob::shell(1, "true");
        let rendezvous = (host.to_owned(), free_port());
        job.launch.nodes = Some(Nodes { count: 2, node: 0, rendezvous });
        let error = job.launch.run().unwrap_err();
        assert!(matches!(&error, LaunchError::Listen { .. }), "{error}");
        assert!(error.to_string().contains(host) && error.to_string().contains("0.0.0.0"));
        let source = std::error::Error::source(&error).expect("what the system said");
        assert!(source.is::<std::io::Error>() && error.to_string().contains(&source.to_string()));
    }
}

#[test]
fn a_node_that_does_not_find_node_0_says_what_it_found() {
    let mut job = TestJob::shell(1, "true");
    let rendezvous = ("::1".to_owned(), free_port());
    let address = format!("[::1]:{}", rendezvous.1);
    job.launch.nodes = Some(Nodes { count: 2, node: 1, rendezvous });
    job.launch.timeout = Duration::from_millis(300);
    let error = job.launch.run().unwrap_err();
    let LaunchError::Unreachable { last, .. } = &error else { panic!("{error}") };
    assert!(last.contains("refused"), "{error}");
    assert!(error.to_string().contains(&address), "{error}");
}

#[test]
fn times_that_no_clock_can_tell_are_endless() {
    let mut jobs = [TestJob::shell(1, "sleep 0.01; exit 3"), TestJob::shell(1, "sleep 1000; true")];
    join_nodes(&mut jobs, free_port(), &[None]);
    for job in &mut jobs {
        (job.launch.grace, job.launch.timeout) = (Duration::MAX, Duration::MAX);
    }
    assert!(run_nodes(&jobs).into_iter().all(|outcome| outcome.unwrap().exit_code() == 3));
}

#[test]
fn a_node_that_is_not_expected_is_told_so() {
    let mut jobs =
        [TestJob::shell(1, "true"), TestJob::shell(1, "true"), TestJob::shell(1, "true")];
    join_nodes(&mut jobs, free_port(), &[None]);
    let two = |job: &mut TestJob| job.launch.nodes.as_mut().unwrap().count = 2;
    two(&mut jobs[0]);
    two(&mut jobs[1]);
    // Node 1 comes once the one too many has been turned away.
    let [lead, follower, surplus] = &jobs;
    thread::scope(|scope| {
        let leading = scope.spawn(|| lead.launch.run());
        let error = surplus.launch.run().unwrap_err();
        assert!(
            matches!(&error, LaunchError::Rejected { reason } if reason.contains("3 nodes")),
            "{error}"
        );
        assert_eq!(follower.launch.run().unwrap(), Outcome::Success);
        assert_eq!(leading.join().unwrap().unwrap(), Outcome::Success);
    });
}

#[test]
fn a_lost_node_ends_the_job() {
    let port = free_port();
    let mut jobs = [TestJob::shell(1, "sleep 1000; true")];
    join_nodes(&mut jobs, port, &[None]);
    jobs[0].launch.nodes.as_mut().unwrap().count = 2;
    let marker = marker();
    let mut node = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_node", "--nocapture", "-q"])
        .env("UNISONO_TEST_ROLE", "node")
        .env("UNISONO_TEST_PORT", port.to_string())
        .env(MARKER, &marker)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    thread::scope(|scope| {
        let leading = scope.spawn(|| jobs[0].launch.run());
        wait_until("both nodes run", || {
            processes(&marker).len() == 3 && !processes(&jobs[0].marker).is_empty()
        });
        signal(&node, Signal::KILL);
        node.wait().unwrap();
        assert_eq!(leading.join().unwrap().unwrap(), Outcome::NodeLost { node: 1 });
    });
    wait_until("the lost node's ranks have ended", || processes(&marker).is_empty());
    assert_eq!(processes(&jobs[0].marker), Vec::<i32>::new());
}

/// Node 1 of two, in a process of its own.
#[test]
fn as_node() {
    if std::env::var_os("UNISONO_TEST_ROLE").is_none_or(|role| role != "node") {
        return;
    }
    let port = std::env::var("UNISONO_TEST_PORT").unwrap().parse().unwrap();
    let mut launch = Launch::new(["sh", "-c", "sleep 1000; true"].map(Into::into).to_vec(), 1);
    let rendezvous = ("127.0.0.1".into(), port);
    launch.nodes = Some(Nodes { count: 2, node: 1, rendezvous });
    let outcome = launch.run().unwrap();
    std::process::exit(outcome.exit_code().into());
}
