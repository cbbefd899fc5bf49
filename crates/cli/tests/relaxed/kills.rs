//! Workers and servers that are killed while a run goes on. Every kill is counted and must have had its
//! effect: the launcher has started as many processes again.

use std::collections::HashMap;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Desk, Running, Summary, numbers};
use crate::records::{assert_adds_up, furthest, updates};

/// Whom to kill.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Whom {
    Worker,
    Server,
    Any,
}

/// A run that is disturbed.
struct Victim<'a> {
    desk: &'a Desk,
    job: Running,
    /// Who was killed, and whether it was a server.
    killed: HashMap<Pid, bool>,
    dice: Box<dyn Iterator<Item = u32>>,
}

impl<'a> Victim<'a> {
    fn start(desk: &'a Desk, arguments: &str) -> Victim<'a> {
        let arguments = format!("train --json --run-dir run --restarts 1000 {arguments}");
        let job = desk.start(&mut desk.command(&arguments));
        Victim { desk, job, killed: HashMap::new(), dice: Box::new(numbers().skip(17)) }
    }

    /// Waits until so many updates are made, and kills a process that has not been killed before.
    fn kill(&mut self, whom: Whom, after: u64) {
        let run_dir = self.desk.path("run");
        self.job.wait_until(&format!("update {after}"), || updates(&run_dir) >= after);
        self.kill_now(whom);
    }

    fn kill_now(&mut self, whom: Whom) {
        let roll = self.dice.next().expect("they never end") as usize;
        let (killed, mut victim) = (&self.killed, None);
        // Its next life may be about to begin.
        let members = || self.job.members();
        crate::common::wait_until("a process can be killed", || {
            let mut alive = members();
            alive.retain(|(pid, is_server)| {
                let is_meant = match whom {
                    Whom::Worker => !is_server,
                    Whom::Server => *is_server,
                    Whom::Any => true,
                };
                is_meant && !killed.contains_key(pid)
            });
            victim = alive.get(roll % alive.len().max(1)).copied();
            victim.is_some()
        });
        let (victim, is_server) = victim.expect("waited for above");
        kill_process(victim, Signal::KILL).expect("it is not waited for before the end");
        self.killed.insert(victim, is_server);
    }

    fn end(self) -> Summary {
        let summary = self.job.wait().summary();
        let restarted = summary.count("processes_restarted");
        assert_eq!(
            restarted,
            self.killed.len() as u64,
            "every kill has its effect, and only kills"
        );
        assert_eq!(summary.object["ledger"], "balanced", "{}", summary.object);
        summary
    }
}

/// Kills processes now and then in the first two thirds of a run, and requires that it learns all the
/// same.
fn survives(arguments: &str, servers: usize, updates: u64, kills: &[Whom]) -> Summary {
    let desk = Desk::new();
    let mut victim = Victim::start(&desk, arguments);
    for (number, whom) in (1..).zip(kills) {
        victim.kill(*whom, number * updates * 2 / 3 / kills.len() as u64);
    }
    let summary = victim.end();
    let undisturbed = desk.train(arguments).number("accuracy");
    let accuracy = summary.number("accuracy");
    assert!((accuracy - undisturbed).abs() <= 0.02, "{accuracy} instead of {undisturbed}");
    assert_adds_up(&desk.path("run"), servers);
    summary
}

const SIX: [Whom; 6] =
    [Whom::Worker, Whom::Server, Whom::Any, Whom::Server, Whom::Worker, Whom::Any];

#[test]
fn a_worker_that_is_killed_comes_back() {
    let settings = "--strategy ssp:3 --workers 3 --servers 1 --steps 500 --schedule cosine";
    let summary = survives(settings, 1, 1500, &[Whom::Worker]);
    assert_eq!(summary.count("restarts"), 1, "the records show its second life");
    assert!(summary.count("max_lead") <= 3);
}

#[test]
fn a_server_that_is_killed_has_forgotten_nothing() {
    let settings = "--strategy ssp:3 --workers 3 --servers 2 --steps 500 --schedule cosine";
    let summary = survives(settings, 2, 1500, &[Whom::Server]);
    assert_eq!(summary.count("restarts"), 0, "workers go on by themselves");
    assert!(summary.count("max_lead") <= 3);
}

#[test]
fn several_kills_at_the_bound() {
    let settings = "--strategy ssp:3 --workers 4 --servers 2 --steps 600 --schedule cosine";
    assert!(survives(settings, 2, 2400, &SIX).count("max_lead") <= 3);
}

#[test]
fn several_kills_in_lock_step() {
    let settings = "--strategy bsp --workers 3 --servers 2 --steps 600 --schedule cosine";
    let summary = survives(settings, 2, 600, &SIX);
    assert_eq!((summary.count("max_lead"), summary.count("updates")), (0, 600));
}

#[test]
fn several_kills_without_a_bound() {
    let settings = "--strategy async --workers 3 --servers 2 --steps 600 --schedule cosine";
    survives(settings, 2, 1800, &SIX);
}

#[test]
fn several_kills_of_replicas_that_push_and_fetch() {
    let settings = "--strategy downpour:2,4 --workers 3 --servers 2 --steps 800 --schedule cosine";
    survives(settings, 2, 1200, &SIX);
}

#[test]
fn several_kills_with_servers_inside() {
    let many = [Whom::Worker; 8];
    let settings = "--strategy ssp:3 --workers 3 --servers inside --steps 600 --schedule cosine";
    assert!(survives(settings, 3, 1800, &many).count("max_lead") <= 3);
    let settings = "--strategy bsp --workers 3 --servers inside --steps 600 --schedule cosine";
    survives(settings, 3, 600, &many);
}

#[test]
fn several_kills_of_workers_that_gossip() {
    const STEPS: u64 = 800;
    let settings = format!("--strategy gossip --workers 3 --steps {STEPS} --schedule cosine");
    let desk = Desk::new();
    let mut victim = Victim::start(&desk, &settings);
    let run_dir = desk.path("run");
    for number in 1..=4 {
        // A worker that comes back goes on where the others are.
        let far = number * STEPS / 6;
        victim.job.wait_until(&format!("step {far}"), || furthest(&run_dir, 3) >= far);
        victim.kill_now(Whom::Worker);
    }
    let accuracy = victim.end().number("accuracy");
    let undisturbed = desk.train(&settings).number("accuracy");
    assert!((accuracy - undisturbed).abs() <= 0.02, "{accuracy} instead of {undisturbed}");
}

#[test]
fn more_kills_than_restarts_end_the_run_with_a_way_to_go_on() {
    let desk = Desk::new();
    let settings = "train --json --strategy async --servers 1 --steps 100000 --restarts 1";
    let job = desk.start(&mut desk.command(&format!("{settings} --run-dir run")));
    let mut victim = Victim { desk: &desk, job, killed: HashMap::new(), dice: Box::new(numbers()) };
    victim.kill(Whom::Server, 10);
    victim.kill(Whom::Server, 20);
    let ended = victim.job.wait();
    assert!(!ended.status.success());
    let last = ended.stderr.lines().last().unwrap_or_default();
    for word in ["server 0 was killed", "--restarts", "the same command with --journal run/journal"]
    {
        assert!(last.contains(word), "no {word:?}: {}", ended.stderr);
    }
}

/// The whole idea, at length.
#[test]
#[ignore = "soak: two runs of a minute or two; its last result is in docs/measurements/relaxed.md"]
fn a_hundred_kills_in_one_run() {
    const KILLS: usize = 100;
    const STEPS: u64 = 6000;
    let settings =
        format!("--strategy ssp:3 --workers 4 --servers 2 --steps {STEPS} --schedule cosine");
    let desk = Desk::new();
    let undisturbed = desk.train(&settings);
    let mut victim = Victim::start(&desk, &settings);
    // Anywhere in the first nine tenths, so that several may come at once.
    let mut times: Vec<u64> =
        numbers().take(KILLS).map(|number| u64::from(number) % (STEPS * 4 * 9 / 10)).collect();
    times.sort_unstable();
    for after in times {
        victim.kill(Whom::Any, after);
    }
    let servers = victim.killed.values().filter(|is_server| **is_server).count();
    assert_eq!(victim.killed.len(), KILLS);
    let summary = victim.end();
    let lives = assert_adds_up(&desk.path("run"), 2);
    let (accuracy, expected) = (summary.number("accuracy"), undisturbed.number("accuracy"));
    println!(
        "{KILLS} kills, {servers} of them of servers; {lives} lives with a push; {} pushes; accuracy \
         {accuracy:.4}, undisturbed {expected:.4}; {:.1} s, undisturbed {:.1} s",
        summary.count("pushes"),
        summary.number("seconds"),
        undisturbed.number("seconds"),
    );
    assert!(summary.count("max_lead") <= 3);
    assert!((accuracy - expected).abs() <= 0.005, "{accuracy} instead of {expected}");
}
