//! Single decisions of a launcher. Whole jobs are in the [simulator](super::simulator).

use std::time::Duration;

use super::{Command, Input, Launcher, Message, Role};
use crate::membership::coordinator::Report;
use crate::membership::core::{Settings, WorkerId};
use crate::membership::machines::record::{Applicant, Machine, Record};
use crate::membership::{About, FirstStep, Sign, ToWorker};

const TIMEOUT: Duration = Duration::from_secs(2);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn applicant(host: &str) -> Applicant {
    Applicant {
        id: "job".into(),
        workers: 1,
        address: ([10, 0, 0, host.as_bytes()[0]], 4000).into(),
        host: host.into(),
        least: 1,
        most: 8,
        token: Some("t".into()),
        proof: None,
        settings: String::new(),
    }
}

fn settings() -> Settings {
    Settings { workers: 1, least: 1, most: 8, timeout: TIMEOUT, patience: Duration::from_secs(60) }
}

fn worker(number: u32) -> WorkerId {
    WorkerId { number, life: 0 }
}

fn ready(shards: Option<u32>) -> Report {
    let about = About { shards, ..About::default() };
    Report::Ready { after: 0, silent: Vec::new(), about }
}

/// A launcher that leads, and whose only worker is in the first epoch.
fn leading() -> (Launcher, Record) {
    let (me, record) = Record::join(None, applicant("a")).unwrap();
    let (mut launcher, _) = Launcher::new(settings(), me, record.clone(), 1, ms(0));
    launcher.handle(ms(1), Input::Worker(worker(0), Report::Connected));
    let commands = launcher.handle(ms(2), Input::Worker(worker(0), ready(None)));
    let [Command::Write(record, 1)] = &commands[..] else { panic!("{commands:?}") };
    let commands = launcher.handle(ms(3), Input::Written(2));
    assert!(has_told(&commands, |message| matches!(message, ToWorker::Begin { epoch: 1, .. })));
    (launcher, (**record).clone())
}

/// Another machine, which has joined the job of a record.
fn other(record: &Record) -> (Machine, Record) {
    Record::join(Some(record.clone()), applicant("b")).unwrap()
}

/// A launcher that follows, with a worker in no epoch.
fn following() -> Launcher {
    let (_, record) = Record::join(None, applicant("a")).unwrap();
    let (me, record) = other(&record);
    let (mut launcher, commands) = Launcher::new(settings(), me, record, 2, ms(0));
    assert!(matches!(commands[..], [Command::Link(_)]), "{commands:?}");
    launcher.handle(ms(1), Input::Linked);
    assert!(matches!(launcher.role, Role::Following { .. }));
    launcher.handle(ms(2), Input::Worker(worker(1), Report::Connected));
    launcher
}

fn has_told(commands: &[Command], is_it: impl Fn(&ToWorker) -> bool) -> bool {
    commands.iter().any(|it| matches!(it, Command::ToWorker(_, message) if is_it(message)))
}

fn asks_to_regroup(commands: &[Command]) -> bool {
    has_told(commands, |message| matches!(message, ToWorker::AskToRegroup { .. }))
}

/// Members that left their epoch for one that cannot begin would stand still.
#[test]
fn members_are_not_asked_to_leave_while_etcd_does_not_answer() {
    let (mut launcher, record) = leading();
    let (machine, record) = other(&record);
    let workers = Vec::new();
    launcher.handle(ms(10), Input::FromMachine(1, Message::Register { machine, workers }));
    let connected = Message::Report(worker(1), Report::Connected);
    launcher.handle(ms(11), Input::FromMachine(1, connected));
    let is_ready = Input::FromMachine(1, Message::Report(worker(1), ready(None)));
    let commands = launcher.handle(ms(12), is_ready);
    assert!(!asks_to_regroup(&commands) && commands.contains(&Command::Read), "{commands:?}");
    for at in [100, 1000, 1900] {
        assert!(!asks_to_regroup(&launcher.tick(ms(at))));
    }
    let commands = launcher.handle(ms(1950), Input::Read(record, 3));
    assert!(asks_to_regroup(&commands), "{commands:?}");
}

#[test]
fn a_job_that_has_taken_the_name_of_this_one_ends_it() {
    let (mut launcher, _) = leading();
    let (_, another) =
        Record::join(None, Applicant { id: "new".into(), ..applicant("a") }).unwrap();
    let commands = launcher.handle(ms(10), Input::Read(another, 7));
    assert_eq!(commands, [Command::Superseded]);
}

#[test]
fn a_worker_that_cannot_be_told_anything_is_killed_whatever_becomes_of_the_leader() {
    let mut launcher = following();
    let commands = launcher.handle(ms(10), Input::Worker(worker(1), Report::Closed));
    assert!(commands.contains(&Command::Kill(worker(1), Sign::CutOff)), "{commands:?}");
}

#[test]
fn a_worker_that_waits_after_the_job_was_told_to_end_is_let_go() {
    let mut launcher = following();
    launcher.release(ms(10));
    let commands = launcher.handle(ms(11), Input::Worker(worker(1), ready(None)));
    assert_eq!(commands, [Command::ToWorker(worker(1), ToWorker::Finish)]);
}

#[test]
fn machines_that_are_all_told_to_leave_stop() {
    let (mut launcher, record) = leading();
    launcher.handle(ms(4), Input::Worker(worker(0), Report::Stepped(first_step())));
    let (machine, _) = other(&record);
    let workers = Vec::new();
    launcher.handle(ms(10), Input::FromMachine(1, Message::Register { machine, workers }));
    let connected = Message::Report(worker(1), Report::Connected);
    launcher.handle(ms(11), Input::FromMachine(1, connected));
    // The other machine stays: its worker is waited for.
    let commands = launcher.handle(ms(12), Input::Leave);
    assert_eq!(commands, []);
    let leaves = Message::Report(worker(1), Report::Leaving);
    let commands = launcher.handle(ms(13), Input::FromMachine(1, leaves));
    assert!(commands.contains(&Command::Disband), "{commands:?}");
    assert!(commands.contains(&Command::ToMachine(1, Message::Disband)), "{commands:?}");
    let leaves = Message::Report(worker(1), Report::Leaving);
    let commands = launcher.handle(ms(14), Input::FromMachine(1, leaves));
    assert!(!commands.contains(&Command::Disband), "{commands:?}");
}

#[test]
fn a_machine_that_leaves_and_finds_no_leader_stops_after_the_timeout() {
    let mut launcher = following();
    launcher.handle(ms(1000), Input::LeaderClosed);
    assert!(launcher.has_others());
    assert_eq!(launcher.handle(ms(1001), Input::Leave), []);
    assert_eq!(launcher.deadline(), Some(ms(1001) + TIMEOUT));
    assert_eq!(launcher.tick(ms(1001) + TIMEOUT), [Command::Disband]);
    assert_eq!(launcher.deadline(), None);
}

#[test]
fn a_leader_that_turns_a_launcher_away_is_asked_again_after_a_pause() {
    let mut launcher = following();
    assert_eq!(launcher.handle(ms(3), Input::LeaderClosed), [Command::Unlink]);
    let at = launcher.deadline().expect("it looks again");
    assert_eq!(launcher.tick(at), [Command::Read]);
}

#[test]
fn no_epoch_has_more_members_than_there_are_shards() {
    let (me, record) = Record::join(None, Applicant { workers: 3, ..applicant("a") }).unwrap();
    let settings = Settings { workers: 3, ..settings() };
    let (mut launcher, _) = Launcher::new(settings, me, record, 1, ms(0));
    let mut commands = Vec::new();
    for number in 0..3 {
        launcher.handle(ms(1), Input::Worker(worker(number), Report::Connected));
        commands = launcher.handle(ms(2), Input::Worker(worker(number), ready(Some(2))));
    }
    let [Command::Write(record, 1)] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!(record.members, [worker(0), worker(1)]);
    let commands = launcher.handle(ms(3), Input::Written(2));
    assert!(!asks_to_regroup(&commands) && !commands.contains(&Command::Read), "{commands:?}");
}

fn first_step() -> FirstStep {
    FirstStep { epoch: 1, step: 1, compute: 0.0, redone: false, behind: 0, from_checkpoint: false }
}
