use std::fs;
use std::io::Write;

use tempfile::TempDir;

use super::*;

fn id(number: u32, life: u32) -> WorkerId {
    WorkerId { number, life }
}

fn first(epoch: u64, recovery: Option<f64>) -> FirstStep {
    FirstStep {
        epoch,
        step: 10 * epoch,
        compute: 0.01,
        redone: recovery.is_some(),
        behind: 1,
        from_checkpoint: false,
        recovery,
    }
}

/// Three workers, of which the second is lost at 10 s and back at 12 s; the end is at 20 s.
pub(crate) fn events() -> Vec<Event> {
    let mut events = vec![(0.0, Happening::Launched(Launcher { pid: 7, ..Launcher::default() }))];
    for number in 0..3 {
        events.push((0.0, Happening::Started { worker: id(number, 0), pid: 100 + number }));
    }
    events.extend((0..3).map(|number| (0.5, Happening::Connected { worker: id(number, 0) })));
    events.extend((0..3).map(|number| (1.0, Happening::Ready { worker: id(number, 0) })));
    let members = vec![id(0, 0), id(1, 0), id(2, 0)];
    events.push((1.0, Happening::Epoch { epoch: 1, members }));
    events.push((1.1, Happening::Stepped(first(1, None))));
    let worker = id(1, 0);
    events.push((10.0, Happening::Lost { worker, sign: Sign::CutOff }));
    events.push((10.0, Happening::Killed { worker, sign: Sign::CutOff }));
    events.push((10.0, Happening::Ended { worker, code: None, signal: Some(9) }));
    events.extend([0, 2].map(|number| (10.01, Happening::Ready { worker: id(number, 0) })));
    events.push((10.02, Happening::Epoch { epoch: 2, members: vec![id(0, 0), id(2, 0)] }));
    events.push((10.06, Happening::Stepped(first(2, Some(0.048)))));
    events.push((10.1, Happening::Started { worker: id(1, 1), pid: 200 }));
    events.push((12.0, Happening::Ready { worker: id(1, 1) }));
    let members = vec![id(0, 0), id(2, 0), id(1, 1)];
    events.push((12.0, Happening::Epoch { epoch: 3, members }));
    events.push((12.1, Happening::Stepped(first(3, None))));
    events.push((19.0, Happening::Finished));
    let ends =
        |number, life| Happening::Ended { worker: id(number, life), code: Some(0), signal: None };
    events.extend([ends(0, 0), ends(2, 0), ends(1, 1)].map(|what| (19.5, what)));
    events.push((20.0, Happening::Over { complete: true, outcome: "finished".into() }));
    events.into_iter().map(|(at, what)| Event { at, what }).collect()
}

#[test]
fn events_make_lives_epochs_and_recoveries() {
    let timeline = Timeline::of(&events()).unwrap();
    assert_eq!((timeline.workers_lost, timeline.workers_joined), (1, 1));
    assert_eq!((timeline.epochs.len(), timeline.steps_redone(), timeline.end), (3, 1, 20.0));
    assert_eq!(timeline.members, [id(0, 0), id(2, 0), id(1, 1)]);
    let [recovery] = &timeline.recoveries[..] else { panic!("{:?}", timeline.recoveries) };
    assert_eq!(
        (recovery.seconds, &recovery.lost[..], recovery.members),
        (0.048, &[id(1, 0)][..], 2)
    );
    assert_eq!(timeline.lives.len(), 4);
    let lost = &timeline.lives[1];
    let states =
        [(0.0, State::Starting), (1.0, State::Spare), (1.0, State::Member), (10.0, State::Gone)];
    assert_eq!((lost.pid, &lost.states[..]), (Some(101), &states[..]));
    assert_eq!(lost.ended.as_deref(), Some("killed by signal 9"));
    assert_eq!(timeline.workers()[&1].pid, Some(200));
    assert_eq!(timeline.over, Some((true, "finished".into())));
    assert_eq!(
        timeline.sentence(),
        "1 worker lost, 1 joined; 1 recovery in 48.0 ms; 1 step computed again."
    );
}

#[test]
fn a_run_that_was_not_disturbed_says_so() {
    let calm: Vec<Event> = events().into_iter().filter(|event| event.at < 10.0).collect();
    let timeline = Timeline::of(&calm).unwrap();
    assert_eq!(timeline.sentence(), "No worker was lost, and none joined: 3 workers all the time.");
    assert_eq!((timeline.recovery_seconds(), timeline.over), (None, None));
    assert_eq!(Timeline::of(&[]), None);
}

#[test]
fn several_recoveries_have_a_median_and_a_longest() {
    let mut timeline = Timeline::of(&events()).unwrap();
    for seconds in [0.071, 0.02] {
        let recovery = Recovery { seconds, ..timeline.recoveries[0].clone() };
        timeline.recoveries.push(recovery);
    }
    assert_eq!(timeline.recovery_seconds(), Some((0.048, 0.071)));
    let sentence = timeline.sentence();
    assert!(sentence.contains("3 recoveries, median 48.0 ms, longest 71.0 ms"), "{sentence}");
}

#[test]
fn a_resumed_run_goes_on_where_the_first_launcher_stopped() {
    let mut twice: Vec<Event> = events().into_iter().filter(|event| event.at < 11.0).collect();
    twice.extend(events());
    let timeline = Timeline::of(&twice).unwrap();
    // The launcher of the first was killed, so that the ends of its workers were not recorded.
    assert_eq!((timeline.workers_lost, timeline.workers_joined), (2, 1));
    assert_eq!((timeline.epochs.len(), timeline.end), (5, 10.1 + 20.0));
    assert_eq!(timeline.lives.len(), 8);
    assert!(timeline.lives.iter().all(|life| life.state() == State::Gone));
}

#[test]
fn what_makes_no_sense_is_borne() {
    let worker = id(u32::MAX, 3);
    let odd = [
        Event { at: -5.0, what: Happening::Ended { worker, code: None, signal: None } },
        Event { at: 3.0, what: Happening::Epoch { epoch: 9, members: vec![worker, worker] } },
        Event { at: 1.0, what: Happening::Ready { worker } },
        Event { at: 1.0, what: Happening::Stepped(first(4, Some(f64::MAX))) },
    ];
    let timeline = Timeline::of(&odd).unwrap();
    assert_eq!((timeline.end, timeline.lives.len()), (3.0, 1));
    let unknown: Event = serde_json::from_str(r#"{"at":1.5,"event":"applauded","by":3}"#).unwrap();
    assert_eq!(unknown, Event { at: 1.5, what: Happening::Unknown });
}

#[test]
fn events_are_lines_in_a_folder_that_another_process_makes() {
    let dir = TempDir::new().unwrap();
    let run = dir.path().join("run");
    let mut log = MembershipLog::new(&run);
    let events = events();
    for event in &events[..4] {
        log.append(event.clone()).unwrap();
    }
    assert!(log.is_waiting() && !run.exists());
    fs::create_dir(&run).unwrap();
    fs::write(run.join(INFO), "").unwrap();
    log.flush().unwrap();
    assert!(!log.is_waiting());
    for event in &events[4..] {
        log.append(event.clone()).unwrap();
    }
    assert_eq!(read(&run).unwrap(), events);
    // Every event is there at once, and a line that its writer did not finish does not count.
    let mut file = fs::File::options().append(true).open(run.join(FILE)).unwrap();
    file.write_all(br#"{"at":30.0,"event":"fin"#).unwrap();
    assert_eq!(read(&run).unwrap(), events);
    // A launcher that resumes the run appends behind the last complete line.
    let mut log = MembershipLog::new(&run);
    log.append(events[0].clone()).unwrap();
    assert_eq!(read(&run).unwrap().len(), events.len() + 1);
}

#[test]
fn a_damaged_line_is_named() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join(FILE), "{\"at\":0,\"event\":\"finished\"}\n{\"at\":null}\n").unwrap();
    let error = read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("membership.jsonl:2: "), "{error}");
    assert_eq!(read(&dir.path().join("nowhere")).unwrap(), []);
}
