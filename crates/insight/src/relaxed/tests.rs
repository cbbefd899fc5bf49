use super::*;

/// A push of a tenth of a second of computing, nothing else about it being special.
pub(crate) fn record(worker: u32, time: f64) -> UpdateRecord {
    UpdateRecord {
        time,
        update: 1,
        worker,
        life: 1,
        push: 1,
        clock: 1,
        lead: 0,
        delay: 0,
        present: 4,
        loss: 1.0,
        samples: 16,
        compute: 0.1,
        blocked: 0.0,
        bytes: 1000,
    }
}

pub(crate) fn info(strategy: &str, workers: usize) -> RunInfo {
    RunInfo { name: "test".into(), strategy: strategy.into(), workers, ..RunInfo::default() }
}

/// Workers that push for `seconds`, without waiting for each other, each as often as its seconds of
/// computing and waiting allow.
pub(crate) fn unbounded(workers: &[(f64, f64)], seconds: f64) -> Vec<UpdateRecord> {
    let mut records: Vec<UpdateRecord> = Vec::new();
    for (worker, &(compute, blocked)) in (0..).zip(workers) {
        let pushes = (seconds / (compute + blocked) + 1e-9) as u64;
        records.extend((1..=pushes).map(|push| UpdateRecord {
            push,
            clock: push,
            compute,
            blocked,
            present: workers.len() as u32,
            ..record(worker, push as f64 * (compute + blocked))
        }));
    }
    records.sort_by(|a, b| a.time.total_cmp(&b.time));
    for (update, record) in (1..).zip(&mut records) {
        record.update = update;
        record.loss = 1.0 / update as f32;
    }
    records
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9 * (1.0 + b.abs())
}

#[test]
fn rates_shares_and_staleness_of_a_small_run() {
    // Worker 0 pushes every half second, of which it waits 0.1; worker 1 every two seconds.
    let mut records = unbounded(&[(0.4, 0.1), (2.0, 0.0)], 8.0);
    let slow: Vec<usize> = (0..records.len()).filter(|&at| records[at].worker == 1).collect();
    assert_eq!((records.len(), slow.len()), (20, 4));
    for &at in &slow {
        records[at].delay = 4;
    }
    records[slow[3]].update = 0; // The last of all.
    for record in records.iter_mut().filter(|record| record.worker == 0) {
        record.lead = record.clock % 3;
        record.life = 1 + record.push / 10;
    }

    let run = RelaxedRun::of(info("async", 2), vec![records], Vec::new());
    assert_eq!((run.pushes, run.dropped, run.updates), (20, 1, 19));
    assert!(close(run.seconds, 8.0), "{}", run.seconds);
    assert!(close(run.pushes_per_s, 2.5), "{}", run.pushes_per_s);
    assert!(close(run.updates_per_s, 2.5 * 19.0 / 20.0), "{}", run.updates_per_s);
    assert!(close(run.samples_per_s, 19.0 * 16.0 / 8.0), "{}", run.samples_per_s);
    assert!(close(run.blocked_share, 0.1), "{}", run.blocked_share);
    assert!(close(run.mean_staleness.unwrap(), 8.0 / 20.0), "{:?}", run.mean_staleness);
    assert_eq!(run.staleness, [(0, 16), (2, 4)]);
    assert_eq!(run.leads, [(0, 9), (1, 6), (2, 5)]);
    assert_eq!((run.max_lead, run.restarts(), run.bound()), (2, 1, None));

    let [fast, slow] = &run.workers[..] else { panic!("{:?}", run.workers) };
    assert_eq!((fast.worker, fast.pushes, fast.lives, fast.max_lead), (0, 16, 2, 2));
    assert!(close(fast.pushes_per_s, 2.0) && close(fast.blocked_share, 0.2), "{fast:?}");
    assert!(close(fast.computing_share, 0.8) && close(fast.mean_compute, 0.4), "{fast:?}");
    assert_eq!((slow.worker, slow.pushes, slow.dropped, slow.max_staleness), (1, 4, 1, Some(2.0)));
}

#[test]
fn a_worker_that_ends_early_does_not_lower_the_rates() {
    // Both push ten times; one takes a tenth of the time.
    let mut records = unbounded(&[(0.1, 0.0)], 1.0);
    records.extend(
        unbounded(&[(1.0, 0.0)], 10.0).into_iter().map(|r| UpdateRecord { worker: 1, ..r }),
    );
    let run = RelaxedRun::of(info("async", 2), vec![records], Vec::new());
    assert!(close(run.pushes_per_s, 11.0), "{}", run.pushes_per_s);
}

#[test]
fn pushes_of_one_commit_are_one_update() {
    let commit = |clock: u64| {
        (0..4).map(move |worker| UpdateRecord {
            update: clock,
            push: clock,
            clock,
            ..record(worker, clock as f64 * 0.1)
        })
    };
    let records: Vec<UpdateRecord> = (1..=10).flat_map(commit).collect();
    // What the second server says changes nothing but the ledger.
    let run = RelaxedRun::of(info("bsp", 4), vec![records.clone(), records.clone()], Vec::new());
    assert_eq!((run.pushes, run.updates, run.bound(), run.servers()), (40, 10, Some(0), 2));
    assert!(close(run.updates_per_s, 10.0), "{}", run.updates_per_s);
    let ledger = run.ledger().unwrap();
    assert_eq!((ledger.pushes, ledger.applied, ledger.lives), (40, 40, 4));
    let behind =
        RelaxedRun::of(info("bsp", 4), vec![records.clone(), records[..8].to_vec()], Vec::new());
    assert!(matches!(behind.ledger(), Err(LedgerError::Lost { file: 1, push: 3, .. })));
}

#[test]
fn without_servers_all_files_are_the_run() {
    let file = |worker: u32| -> Vec<UpdateRecord> {
        let records = unbounded(&[(0.1, 0.0)], 1.0).into_iter();
        records.map(|record| UpdateRecord { worker, ..record }).collect()
    };
    let run = RelaxedRun::of(info("gossip", 2), vec![file(0), file(1)], Vec::new());
    assert_eq!((run.pushes, run.updates, run.servers(), run.workers.len()), (20, 20, 0, 2));
    assert!(run.losses.is_sorted_by(|a, b| a.0 <= b.0));
    assert_eq!(run.ledger().unwrap().pushes, 20);
}

#[test]
fn the_bound_is_that_of_the_strategy() {
    let bound = |strategy: &str, moves: Vec<Move>| {
        RelaxedRun::of(info(strategy, 1), Vec::new(), moves).bound()
    };
    assert_eq!(bound("ssp:3", Vec::new()), Some(3));
    assert_eq!(bound("downpour:2,4", Vec::new()), None);
    assert_eq!(bound("ssp:auto", Vec::new()), None);
    let change = |from, to| Move { time: 1.0, from, to, reason: String::new() };
    assert_eq!(bound("ssp:auto", vec![change(2, 6), change(6, 4)]), Some(6));
}

#[test]
fn the_time_to_a_loss_is_that_of_the_smoothed_curve() {
    let mut records = unbounded(&[(0.1, 0.0)], 10.0);
    for (at, record) in records.iter_mut().enumerate() {
        record.loss = if at < 50 { 2.0 } else { 1.0 };
    }
    records[10].loss = 0.0; // One lucky batch is not the loss of the model.
    let run = RelaxedRun::of(info("async", 1), vec![records], Vec::new());
    assert!(close(run.seconds_until(2.0).unwrap(), 3.2), "{:?}", run.seconds_until(2.0));
    // The push after which the window holds nothing older.
    assert!(close(run.seconds_until(1.0).unwrap(), 8.2), "{:?}", run.seconds_until(1.0));
    assert_eq!(run.seconds_until(0.5), None);
    assert_eq!(run.final_loss(), 1.0);
}

#[test]
fn a_diverged_loss_is_no_loss() {
    let mut records = unbounded(&[(0.1, 0.0)], 10.0);
    records[60].loss = f32::NAN;
    let run = RelaxedRun::of(info("async", 1), vec![records.clone()], Vec::new());
    assert!(run.losses[59].1.is_finite() && run.losses[60].1.is_nan());
    assert!(run.losses[60 + SMOOTHING].1.is_finite());
    assert!(run.final_loss().is_finite());
    records[99].loss = f32::INFINITY;
    let run = RelaxedRun::of(info("async", 1), vec![records], Vec::new());
    assert!(!run.final_loss().is_finite());
    let summary = RelaxedSummary::new(&run, crate::Outcome::default(), None);
    let read: RelaxedSummary =
        serde_json::from_str(&serde_json::to_string(&summary).unwrap()).unwrap();
    assert!(read.final_loss.is_nan());
}

#[test]
fn nothing_is_analysed_as_nothing() {
    for strategy in ["async", "gossip", "hogwild"] {
        let run = RelaxedRun::of(info(strategy, 4), Vec::new(), Vec::new());
        assert_eq!((run.pushes, run.seconds, run.pushes_per_s), (0, 0.0, 0.0));
        assert_eq!((run.advice(), run.seconds_until(1.0)), (None, None));
        assert_eq!(run.ledger(), Ok(Ledger::default()));
        assert!(run.final_loss().is_nan());
    }
}

#[test]
fn times_that_were_not_measured_do_no_harm() {
    let unknown = UpdateRecord {
        time: f64::NAN,
        compute: f64::NAN,
        blocked: f64::INFINITY,
        ..record(0, 0.0)
    };
    let run = RelaxedRun::of(info("async", 1), vec![vec![unknown, record(0, 1.0)]], Vec::new());
    assert!(run.pushes_per_s.is_finite() && run.blocked_share == 0.0);
}

#[test]
fn equal_workers_are_advised_bsp_and_a_slow_one_async() {
    let equal = unbounded(&[(0.1, 0.01); 4], 10.0);
    let run = RelaxedRun::of(info("ssp:3", 4), vec![equal], Vec::new());
    let summary = RelaxedSummary::new(&run, crate::Outcome::default(), None);
    assert_eq!(summary.advised.as_deref(), Some("bsp"));
    assert!(
        summary.advice.as_ref().unwrap().contains("about equally fast") && summary.is_balanced()
    );

    let slow = unbounded(&[(0.1, 0.0), (0.1, 0.0), (0.1, 0.0), (0.4, 0.0)], 10.0);
    let run = RelaxedRun::of(info("bsp", 4), vec![slow], Vec::new());
    let advice = run.advice().unwrap();
    assert_eq!(advice.level, "async");
    let ratio = advice.predictions.last().unwrap().ratio;
    assert!((ratio - 3.25).abs() < 0.02, "{ratio}");
}

#[test]
fn what_the_records_do_not_say_is_not_zero() {
    let records = unbounded(&[(0.1, 0.0)], 1.0);
    let run = RelaxedRun::of(info("gossip", 1), vec![records], Vec::new());
    assert_eq!((run.pushes, run.mean_staleness), (10, None));
    assert!(run.staleness.is_empty());
    assert_eq!((run.workers[0].mean_staleness, run.workers[0].max_staleness), (None, None));
}

#[test]
fn a_push_of_downpour_is_of_several_gradients() {
    let records = unbounded(&[(0.4, 0.0), (0.4, 0.0)], 8.0);
    let of = |strategy| RelaxedRun::of(info(strategy, 2), vec![records.clone()], Vec::new());
    let (downpour, plain) = (of("downpour:4,8"), of("async"));
    assert!(close(downpour.pushes_per_s, 5.0) && close(downpour.gradients_per_s(), 20.0));
    assert!(close(plain.gradients_per_s(), 5.0));
    // Nor are levels compared that push something else.
    let predicted = |run: &RelaxedRun| run.advice().unwrap().predictions[0].pushes_per_s;
    assert!(close(predicted(&downpour), 20.0), "{}", predicted(&downpour));
    assert!(close(predicted(&plain), 5.0), "{}", predicted(&plain));
}
