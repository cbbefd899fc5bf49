//! Servers and workers that are not started by `unisono train`: `unisono serve`, `unisono run`.

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::process::Command;

use rustix::process::{Signal, kill_process};

use crate::common::{Desk, PROGRAM, Running};
use crate::records::{assert_adds_up, updates};

/// A token for a job of several commands.
fn token() -> String {
    let mut bytes = [0; 32];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).unwrap();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An address at which no process listens.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Servers that were started by hand, and what workers must be told of them.
struct ByHand<'a> {
    desk: &'a Desk,
    token: String,
    addresses: Vec<String>,
    jobs: Vec<Running>,
}

impl<'a> ByHand<'a> {
    fn start(desk: &'a Desk, count: usize, more: &str) -> ByHand<'a> {
        let addresses = (0..count).map(|_| free_address()).collect();
        let mut servers = ByHand { desk, token: token(), addresses, jobs: Vec::new() };
        for number in 0..count {
            servers.jobs.push(servers.serve(number, more));
        }
        servers
    }

    fn serve(&self, number: usize, more: &str) -> Running {
        let address = &self.addresses[number];
        let more = more.replace("{}", &number.to_string());
        let arguments = format!("serve --listen {address} --server {number} {more}");
        self.desk.start(&mut self.command(&arguments))
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = self.desk.command(arguments);
        command.env("UNISONO_TOKEN", &self.token);
        command
    }

    fn train(&self, arguments: &str) -> Command {
        let addresses = self.addresses.join(",");
        self.command(&format!("train --json --servers {addresses} {arguments}"))
    }

    fn end(self) {
        for job in self.jobs {
            job.signal(Signal::TERM);
            job.wait().expect_success();
        }
    }
}

#[test]
fn servers_started_by_hand_serve_workers_of_any_launcher() {
    let desk = Desk::new();
    let servers = ByHand::start(&desk, 2, "--run-dir run");
    let arguments = "--strategy ssp:2 --workers 3 --steps 200 --run-dir run";
    let summary = desk.start(&mut servers.train(arguments)).wait().summary();
    assert!(summary.number("accuracy") > 0.9);
    assert_eq!(summary.object["ledger"], "balanced");
    assert_eq!((summary.count("servers"), assert_adds_up(&desk.path("run"), 2)), (2, 3));

    // They have done what they were started for.
    let again = "--strategy ssp:2 --workers 3 --steps 200";
    let ended = desk.start(&mut servers.train(again)).wait();
    let complaint = ended.complaint();
    assert!(complaint.contains("--servers") && complaint.contains("complete"), "{complaint}");
    assert!(complaint.contains("start them again"), "{complaint}");
    servers.end();
}

/// Servers that keep no records leave the figures of the run unknown, which is no lost run and no
/// balanced ledger.
#[test]
fn what_servers_elsewhere_did_not_record_is_not_known() {
    let desk = Desk::new();
    let arguments = "--strategy ssp:2 --workers 2 --steps 60 --run-dir run";
    for json in [true, false] {
        let servers = ByHand::start(&desk, 1, "");
        let mut command = servers.train(arguments);
        if !json {
            let servers_at = &servers.addresses[0];
            command = servers.command(&format!("train --servers {servers_at} {arguments}"));
        }
        let ended = desk.start(&mut command).wait();
        ended.expect_success();
        if json {
            let summary = ended.summary();
            assert_eq!(summary.object["ledger"], "not recorded");
            assert!(summary.object["final_loss"].is_null(), "{}", summary.object);
            assert_eq!(summary.object["pushes_per_s"].to_string(), "0.0");
        } else {
            let said = &ended.stdout;
            assert!(said.contains("loss not recorded, held-out accuracy"), "{said}");
            assert!(said.contains("No gradient was recorded in this folder"), "{said}");
            assert!(!said.contains("NaN"), "{said}");
        }
        servers.end();
        std::fs::remove_dir_all(desk.path("run")).unwrap();
    }
}

#[test]
fn a_server_started_by_hand_goes_on_from_its_journal() {
    let desk = Desk::new();
    let mut servers = ByHand::start(&desk, 2, "--run-dir run --journal journal-{}");
    let arguments = "--strategy ssp:2 --workers 2 --steps 500 --run-dir run";
    let mut training = desk.start(&mut servers.train(arguments));
    let run_dir = desk.path("run");
    training.wait_until("update 100", || updates(&run_dir) >= 100);
    servers.jobs[1].signal(Signal::KILL);
    assert!(servers.jobs.remove(1).wait().was_killed_by(Signal::KILL));
    let again = servers.serve(1, "--run-dir run --journal journal-{}");
    servers.jobs.push(again);
    let summary = training.wait().summary();
    assert_eq!(summary.object["ledger"], "balanced");
    assert_eq!(summary.count("processes_restarted"), 0, "workers wait for it");
    assert_adds_up(&run_dir, 2);
    servers.end();
}

#[test]
fn a_server_that_has_forgotten_ends_the_run() {
    let desk = Desk::new();
    let mut servers = ByHand::start(&desk, 2, "");
    let arguments = "--strategy async --workers 2 --steps 100000 --restarts 0 --run-dir run";
    let mut training = desk.start(&mut servers.train(arguments));
    // Nothing is recorded, but rank 0 tells of its progress.
    training.wait_until("both workers are there", || training_has_begun(&desk));
    servers.jobs[1].signal(Signal::KILL);
    servers.jobs.remove(1).wait();
    let again = servers.serve(1, "");
    servers.jobs.push(again);
    let ended = training.wait();
    assert!(!ended.status.success());
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("server 1 has lost its state") && last.contains("journal"), "{last}");
    // Nor would a later worker give it the weights of the beginning.
    let ended =
        desk.start(&mut servers.train(&arguments.replace("run-dir run", "run-dir later"))).wait();
    assert!(ended.stderr.contains("server 1 has lost its state"), "{}", ended.stderr);
    servers.end();
}

#[test]
fn servers_that_cannot_be_used_are_told_apart() {
    let desk = Desk::new();
    let mut servers = ByHand::start(&desk, 1, "");
    let free = free_address();
    let ended = desk
        .start(&mut servers.command(&format!("train --strategy async --servers {free}")))
        .wait();
    let complaint = ended.complaint();
    assert!(
        complaint.contains(&free) && complaint.contains("unisono serve --listen"),
        "{complaint}"
    );
    // The servers are there, in another order.
    let more = ByHand::start(&desk, 2, "");
    let swapped = [&*more.addresses[1], &more.addresses[0]].join(",");
    let swapped = format!("train --strategy async --servers {swapped}");
    let ended = desk.start(&mut more.command(&swapped)).wait();
    let complaint = ended.complaint();
    for word in ["--servers", &more.addresses[1], "is server 1", "in the order of their numbers"] {
        assert!(complaint.contains(word), "no {word:?}: {complaint}");
    }
    more.end();
    servers.token = token();
    let ended = desk.start(&mut servers.train("--strategy async")).wait();
    let complaint = ended.complaint();
    assert!(
        complaint.contains(&servers.addresses[0]) && complaint.contains("tokens"),
        "{complaint}"
    );
    assert!(!desk.path("runs").exists(), "a run that was refused left a folder");
    servers.end();
}

#[test]
fn workers_of_another_launcher_have_rank_0_write_the_report() {
    let desk = Desk::new();
    for (level, run_dir) in [("async", "async"), ("bsp", "bsp")] {
        let train = format!("train --json --strategy {level} --steps 150 --run-dir {run_dir}");
        let launcher = format!("run --servers 2 --run-dir {run_dir} -n 3");
        let summary = desk.run(&format!("{launcher} -- {PROGRAM} {train}")).summary();
        assert!(summary.number("accuracy") > 0.85, "{}", summary.object);
        assert_eq!(summary.object["ledger"], "balanced");
        assert_eq!(assert_adds_up(&desk.path(run_dir), 2), 3);
        if level == "bsp" {
            summary.assert_same_weights(&desk.train("--steps 150"));
        }
    }
}

#[test]
fn workers_of_another_launcher_survive_kills() {
    let desk = Desk::new();
    let launcher = "run --servers 2 --run-dir run --journal journal --restarts 10 -n 3";
    let train = "train --json --strategy ssp:3 --steps 500 --run-dir run";
    let mut job = desk.start(&mut desk.command(&format!("{launcher} -- {PROGRAM} {train}")));
    let run_dir = desk.path("run");
    for (rank, after) in [(0, 200), (2, 400)] {
        job.wait_until(&format!("update {after}"), || updates(&run_dir) >= after);
        kill_process(job.worker(rank), Signal::KILL).unwrap();
    }
    let summary = job.wait().summary();
    assert_eq!(summary.object["ledger"], "balanced");
    assert_eq!(summary.count("restarts"), 2, "both kills had their effect");
    assert!(summary.number("accuracy") > 0.9);
    assert_adds_up(&run_dir, 2);
}

#[test]
fn a_report_without_records_says_how_to_get_them() {
    let desk = Desk::new();
    let train = "train --json --strategy async --steps 50 --run-dir run";
    let ended = desk.run(&format!("run --servers 1 -n 2 -- {PROGRAM} {train}"));
    assert!(ended.stderr.contains("start them with the same --run-dir"), "{}", ended.stderr);
    assert_eq!(ended.summary().count("pushes"), 0);
}

#[test]
fn what_only_the_leader_of_a_run_can_provide_is_refused_elsewhere() {
    let desk = Desk::new();
    for (strategy, words) in [
        ("--strategy gossip", ["--strategy gossip", "unisono train --workers N"]),
        ("--strategy bsp --servers inside", ["--servers inside", "unisono train --workers N"]),
        ("--strategy hogwild", ["threads of one process", "unisono train --workers N"]),
        ("--strategy async", ["unisono run --servers S", "--servers HOST:PORT"]),
    ] {
        let ended = desk.run(&format!("run -n 2 -- {PROGRAM} train {strategy}"));
        assert!(!ended.status.success(), "{strategy}");
        for word in words {
            assert!(ended.stderr.contains(word), "{strategy}: no {word:?}: {}", ended.stderr);
        }
    }
    assert!(!desk.path("runs").exists(), "a run that was refused left a folder");
}

/// Whether rank 0 has told of its progress.
fn training_has_begun(desk: &Desk) -> bool {
    let number = desk.count() - 1;
    desk.read(&format!(".{number}-stderr")).contains("step ")
}
