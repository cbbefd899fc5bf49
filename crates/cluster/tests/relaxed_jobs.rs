//! Jobs with servers, and jobs whose members are killed and started again.
//!
//! Most members are shell commands. Where one has to serve the socket it inherits, this test binary
//! starts itself again: the "tests" [`as_server`], [`as_peer`] and [`as_launcher`] do nothing unless
//! they are started that way.

mod common;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::{
    LONG, MARKER, TestJob, failure, marker, processes, signal, wait_for_guard, wait_until,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, getpid, kill_process};
use unisono_cluster::launch::{
    Ending, Launch, LaunchError, Nodes, Outcome, Restarts, ServerFailure, Servers,
};

/// A job of shell scripts that may be started again `limit` times.
fn restarting(ranks: u32, limit: u32, script: &str) -> TestJob {
    let mut job = TestJob::shell(ranks, script);
    job.launch.restarts = Restarts { limit };
    job
}

fn shell_server(script: &str) -> Vec<OsString> {
    ["sh", "-c", script].map(OsString::from).to_vec()
}

/// This test binary in the role of one of its "tests".
fn role(name: &str) -> Vec<OsString> {
    let this = std::env::current_exe().expect("a test has a path").into_os_string();
    let env: OsString = format!("UNISONO_TEST_ROLE={name}").into();
    let mut command = vec!["env".into(), env, this];
    command.extend(["--exact", name, "--nocapture", "-q"].map(OsString::from));
    command
}

fn has_role(name: &str) -> bool {
    std::env::var_os("UNISONO_TEST_ROLE").is_some_and(|role| role == name)
}

fn restarted(job: &TestJob) -> u32 {
    job.launch.restarted.load(Ordering::Relaxed)
}

/// The path of a file for this job alone, which its members find in `$FILE`.
fn add_file(job: &mut TestJob) -> PathBuf {
    let path = std::env::temp_dir().join(format!("unisono-test-file-{}", job.marker));
    job.launch.vars.push(("FILE".into(), path.clone().into()));
    path
}

#[test]
fn a_killed_rank_is_started_again() {
    let script = r#"
        echo $RANK/$WORLD_SIZE life $UNISONO_LIFE
        if [ $RANK$UNISONO_LIFE = 10 ]; then kill -9 $$; fi"#;
    let job = restarting(2, 3, script);
    assert_eq!(job.run(), Outcome::Success);
    let stdout = job.stdout();
    let mut lines: Vec<&str> = stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["0/2 life 0", "1/2 life 0", "1/2 life 1"]);
    assert_eq!(restarted(&job), 1);
    let said =
        "unisono: rank 1 was killed by signal 9 (SIGKILL); starting it again (restart 1 of 3)\n";
    assert_eq!(job.stderr(), said);
}

#[test]
fn a_rank_that_gave_up_is_started_again_unless_it_was_called_wrongly() {
    let later = |code: u32| {
        format!("case $UNISONO_LIFE in 0) kill -9 $$;; 1) exit {code};; *) echo good;; esac")
    };
    let job = restarting(1, 5, &later(3));
    assert_eq!(job.run(), Outcome::Success);
    assert_eq!((job.stdout().as_str(), restarted(&job)), ("good\n", 2));
    for code in [2, 64] {
        let job = restarting(1, 5, &later(code));
        assert_eq!(failure(job.run()).ending, Ending::Code(code as i32));
        assert_eq!(restarted(&job), 1);
        let job = restarting(2, 5, &format!("if [ $RANK = 1 ]; then exit {code}; fi; sleep 1000"));
        assert_eq!(job.run().exit_code(), code as u8);
        assert_eq!(restarted(&job), 0);
    }
}

#[test]
fn restarts_have_a_limit() {
    let script = "if [ $RANK = 1 ]; then echo $UNISONO_LIFE; kill -9 $$; fi; sleep 1000; true";
    let job = restarting(2, 2, script);
    let failure = failure(job.run());
    assert_eq!((failure.rank, failure.ending), (1, Ending::Signal(9)));
    assert_eq!((job.stdout().as_str(), restarted(&job)), ("0\n1\n2\n", 2));
}

#[test]
fn a_program_that_has_gone_cannot_be_started_again() {
    let path = std::env::temp_dir().join(format!("unisono-test-program-{}", marker()));
    std::fs::copy("/bin/sh", &path).unwrap();
    let script = r#"rm "$0"; kill -9 $$"#;
    let name = path.to_str().unwrap();
    let mut job = TestJob::new(1, &[name, "-c", script, name]);
    job.launch.restarts.limit = 2;
    assert_eq!(job.run().exit_code(), 126);
    assert_eq!(restarted(&job), 0);
    assert!(job.stderr().contains("rank 0: cannot start"), "{}", job.stderr());
}

#[test]
fn ranks_are_started_again_though_the_guard_was_killed() {
    let script = r#"
        if [ $UNISONO_LIFE = 0 ]; then
            until [ -e $FILE ]; do sleep 0.01; done
            kill -9 $$
        fi
        echo life $UNISONO_LIFE"#;
    let mut job = restarting(1, 3, script);
    let file = add_file(&mut job);
    thread::scope(|scope| {
        let running = scope.spawn(|| job.run());
        let guard = wait_for_guard(&job.marker, None);
        kill_process(guard, Signal::KILL).unwrap();
        std::fs::write(&file, "").unwrap();
        assert_eq!(running.join().unwrap(), Outcome::Success);
    });
    std::fs::remove_file(&file).unwrap();
    assert_eq!((job.stdout().as_str(), restarted(&job)), ("life 1\n", 1));
}

/// A life does not share the machine with what an earlier one started.
#[test]
fn a_killed_rank_takes_its_children_with_it() {
    let script = r#"
        if [ $UNISONO_LIFE = 0 ]; then
            sleep 1000 &
            echo $! >$FILE
            kill -9 $$
        fi
        child=$(cat $FILE)
        for attempt in $(seq 1 1000); do
            if [ -z "$(tr -d '\0' 2>/dev/null </proc/$child/cmdline)" ]; then exit 0; fi
            sleep 0.01
        done
        exit 64"#;
    let mut job = restarting(1, 1, script);
    let file = add_file(&mut job);
    assert_eq!(job.run(), Outcome::Success);
    assert_eq!(restarted(&job), 1);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn jobs_that_ask_for_nothing_get_nothing() {
    let script = "env | grep -E '^UNISONO_(SERVERS?|PEERS|LISTEN_FD|LIFE)='";
    let job = TestJob::shell(1, &format!("{script}; true"));
    assert_eq!(job.run(), Outcome::Success);
    assert_eq!(job.stdout(), "");
    let job = TestJob::shell(1, "kill -9 $$");
    assert_eq!(failure(job.run()).ending, Ending::Signal(9));
    assert_eq!(restarted(&job), 0);
}

#[test]
fn servers_run_from_before_the_ranks_until_after_them() {
    let server = r#"
        trap '[ -e $FILE-done ] && echo server $UNISONO_SERVER told; exit 3' TERM
        : >$FILE$UNISONO_SERVER
        while true; do sleep 0.01; done"#;
    let rank = r#"
        for server in 0 1; do
            until [ -e $FILE$server ]; do sleep 0.01; done
            rm $FILE$server
        done
        echo rank: $UNISONO_SERVERS
        : >$FILE-done"#;
    let mut job = TestJob::shell(1, rank);
    let file = add_file(&mut job);
    let servers = Servers::bind(vec![shell_server(server); 2]).unwrap();
    let [first, second] = servers.addresses() else { panic!("{:?}", servers.addresses()) };
    let addresses = format!("{first},{second}");
    job.launch.servers = Some(servers);
    job.launch.grace = LONG;
    // What they exit with when they are told to end is of no concern.
    assert_eq!(job.run(), Outcome::Success);
    std::fs::remove_file(format!("{}-done", file.display())).unwrap();
    let stdout = job.stdout();
    // What different processes print may come in any order.
    let mut lines: Vec<&str> = stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, [&*format!("rank: {addresses}"), "server 0 told", "server 1 told"]);
}

#[test]
fn a_server_that_does_not_end_is_killed() {
    let server = "trap '' TERM; : >$FILE; while true; do sleep 0.01; done";
    let mut job = TestJob::shell(1, "until [ -e $FILE ]; do sleep 0.01; done; rm $FILE");
    add_file(&mut job);
    job.launch.servers = Some(Servers::bind(vec![shell_server(server)]).unwrap());
    job.launch.grace = Duration::from_millis(100);
    assert_eq!(job.run(), Outcome::Success);
}

#[test]
fn a_server_may_end_before_the_ranks() {
    let rank = r#"
        until [ -s $FILE ]; do sleep 0.01; done
        server=$(cat $FILE)
        until [ -z "$(tr -d '\0' 2>/dev/null </proc/$server/cmdline)" ]; do sleep 0.01; done
        rm $FILE"#;
    let mut job = restarting(1, 5, rank);
    add_file(&mut job);
    job.launch.servers = Some(Servers::bind(vec![shell_server("echo $$ >$FILE")]).unwrap());
    assert_eq!(job.run(), Outcome::Success);
    assert_eq!(restarted(&job), 0);
}

#[test]
fn a_server_that_fails_too_often_ends_the_job() {
    let mut job = restarting(2, 2, "sleep 1000; true");
    let servers = [shell_server("sleep 1000; true"), shell_server("echo oops >&2; kill -9 $$")];
    job.launch.servers = Some(Servers::bind(servers.to_vec()).unwrap());
    let outcome = job.run();
    assert_eq!(outcome.exit_code(), 128 + 9);
    let stderr = vec!["oops".to_owned()];
    let expected = ServerFailure { server: 1, ending: Ending::Signal(9), stderr };
    assert_eq!(outcome, Outcome::ServerFailed(expected));
    assert_eq!(restarted(&job), 2);
    let said = job.stderr();
    assert_eq!(said.matches("[server 1] oops\n").count(), 3, "{said}");
    assert!(
        said.contains("unisono: server 1 was killed by signal 9 (SIGKILL); its last"),
        "{said}"
    );
}

/// The socket a member inherited.
fn inherited() -> TcpListener {
    let file = std::env::var("UNISONO_LISTEN_FD").unwrap().parse().unwrap();
    // SAFETY: the launcher opened it for this process, which asks once.
    unsafe { TcpListener::from_raw_fd(file) }
}

/// Waits until a connection is in the queue of the socket, and dies without having taken it.
fn die_of_connection(listener: &TcpListener) -> ! {
    let mut files = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut files, None).unwrap();
    kill_process(getpid(), Signal::KILL).unwrap();
    unreachable!("a process survives SIGKILL")
}

/// Serves one connection.
fn answer(listener: &TcpListener) {
    let life = std::env::var("UNISONO_LIFE").unwrap();
    listener.accept().unwrap().0.write_all(format!("life {life}").as_bytes()).unwrap();
}

fn ask(address: SocketAddr) -> String {
    let mut text = String::new();
    TcpStream::connect(address).unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Dies of its first connection, and serves it in its next life.
#[test]
fn as_server() {
    if !has_role("as_server") {
        return;
    }
    let listener = inherited();
    if std::env::var("UNISONO_LIFE").unwrap() == "0" {
        die_of_connection(&listener);
    }
    loop {
        answer(&listener);
    }
}

#[test]
fn a_connection_outlives_the_server_that_did_not_take_it() {
    let mut job = restarting(1, 1, "until [ -e $FILE ]; do sleep 0.01; done; rm $FILE");
    let file = add_file(&mut job);
    let servers = Servers::bind(vec![role("as_server")]).unwrap();
    let address = servers.addresses()[0];
    job.launch.servers = Some(servers);
    thread::scope(|scope| {
        let client = scope.spawn(move || {
            let answers = [ask(address), ask(address)];
            std::fs::write(file, "").unwrap();
            answers
        });
        assert_eq!(job.run(), Outcome::Success);
        assert_eq!(client.join().unwrap(), ["life 1", "life 1"]);
    });
    assert_eq!(restarted(&job), 1);
}

/// Servers are there, and started again, for what the caller does when the ranks have ended.
#[test]
fn the_caller_meets_the_servers_when_the_ranks_have_ended() {
    let mut job = restarting(2, 1, "echo rank");
    let servers = Servers::bind(vec![role("as_server")]).unwrap();
    let address = servers.addresses()[0];
    job.launch.servers = Some(servers);
    let (outcome, answer) = job.launch.run_with(move || ask(address)).unwrap();
    assert_eq!((outcome, answer.as_deref()), (Outcome::Success, Some("life 1")));
    assert_eq!(job.stdout().matches("rank\n").count(), 2);
    assert_eq!(restarted(&job), 1);
    assert_eq!(processes(&job.marker), Vec::<i32>::new());
}

#[test]
fn the_caller_has_no_say_in_a_job_that_failed() {
    let job = TestJob::shell(1, "exit 7");
    let (outcome, called) = job.launch.run_with(|| ()).unwrap();
    assert_eq!((outcome.exit_code(), called), (7, None));
}

/// What the caller does at the end is not waited for when the servers cannot help it any more.
#[test]
fn a_server_that_fails_at_the_end_ends_the_job() {
    let mut job = restarting(1, 0, "true");
    let servers = Servers::bind(vec![role("as_server")]).unwrap();
    let address = servers.addresses()[0];
    job.launch.servers = Some(servers);
    let (release, wait) = channel::<()>();
    let (outcome, returned) = job
        .launch
        .run_with(move || {
            let _connection = TcpStream::connect(address).unwrap();
            wait.recv()
        })
        .unwrap();
    let Outcome::ServerFailed(failure) = outcome else { panic!("{outcome:?}") };
    assert_eq!((failure.server, failure.ending), (0, Ending::Signal(9)));
    assert!(returned.is_none());
    drop(release);
}

/// Rank 0 asks rank 1, which dies of it and answers in its next life.
#[test]
fn as_peer() {
    if !has_role("as_peer") {
        return;
    }
    let listener = inherited();
    let peers = std::env::var("UNISONO_PEERS").unwrap();
    let peers: Vec<SocketAddr> = peers.split(',').map(|peer| peer.parse().unwrap()).collect();
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    assert_eq!(listener.local_addr().unwrap(), peers[rank]);
    match (rank, std::env::var("UNISONO_LIFE").unwrap().as_str()) {
        (0, _) => println!("\nheard {}", ask(peers[1])),
        (_, "0") => die_of_connection(&listener),
        _ => answer(&listener),
    }
}

#[test]
fn ranks_listen_across_their_restarts() {
    let mut job = TestJob::new(2, &[]);
    job.launch.command = role("as_peer");
    job.launch.restarts = Restarts { limit: 1 };
    job.launch.listeners_for_ranks = true;
    assert_eq!(job.run(), Outcome::Success, "{}", job.stderr());
    assert!(job.stdout().contains("heard life 1\n"), "{}", job.stdout());
    assert_eq!(restarted(&job), 1);
}

/// A launcher with two servers and two ranks, each in its second life.
#[test]
fn as_launcher() {
    if !has_role("as_launcher") {
        return;
    }
    let script = std::env::var("UNISONO_TEST_SCRIPT").unwrap();
    let mut launch = Launch::new(shell_server(&script), 2);
    launch.servers = Some(Servers::bind(vec![shell_server(&script); 2]).unwrap());
    launch.restarts = Restarts { limit: 4 };
    launch.grace = Duration::from_secs(1);
    std::process::exit(launch.run().unwrap().exit_code().into());
}

#[test]
fn nothing_is_left_of_a_launcher_that_is_signalled() {
    // The first life leaves a process that has left its group, the second runs.
    let script = r#"
        if [ $UNISONO_LIFE = 0 ]; then
            setsid -f sh -c ": >$FILE.$$; exec sleep 1000"
            until [ -e $FILE.$$ ]; do sleep 0.01; done
            rm $FILE.$$
            kill -9 $$
        fi
        sleep 1000; true"#;
    let file = std::env::temp_dir().join(format!("unisono-test-left-{}", marker()));
    for how in [Signal::KILL, Signal::TERM, Signal::INT] {
        let marker = marker();
        let command = role("as_launcher");
        let mut launcher = Command::new(&command[0])
            .args(&command[1..])
            .env("UNISONO_TEST_SCRIPT", script)
            .env("FILE", &file)
            .env(MARKER, &marker)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The launcher, and four members of three processes each.
        let all_in_second_life = || {
            let running = processes(&marker);
            running.len() == 13 && running.iter().filter(|pid| is_in_life(**pid, 1)).count() == 8
        };
        wait_until("all processes run", all_in_second_life);
        signal(&launcher, how);
        launcher.wait().unwrap();
        wait_until("everything has ended", || processes(&marker).is_empty());
    }
}

fn is_in_life(process: i32, life: u32) -> bool {
    let environment = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    let needle = format!("UNISONO_LIFE={life}");
    environment.split(|byte| *byte == 0).any(|var| var == needle.as_bytes())
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    for commands in [vec![], vec![vec![]]] {
        assert!(matches!(Servers::bind(commands), Err(LaunchError::Usage(_))));
    }
    let nodes = Nodes { count: 2, node: 0, rendezvous: ("127.0.0.1".into(), 1) };
    let mut job = TestJob::shell(1, "true");
    job.launch.nodes = Some(nodes);
    job.launch.listeners_for_ranks = true;
    assert!(matches!(job.launch.run(), Err(LaunchError::Usage(_))));
    job.launch.listeners_for_ranks = false;
    job.launch.servers = Some(Servers::bind(vec![shell_server("true")]).unwrap());
    assert!(matches!(job.launch.run(), Err(LaunchError::Usage(_))));
    let mut job = TestJob::shell(1, "true");
    job.launch.servers = Some(Servers::bind(vec![vec!["/nowhere/to/be/found".into()]]).unwrap());
    let error = job.launch.run().unwrap_err();
    assert!(matches!(error, LaunchError::Spawn { .. }), "{error}");
}
