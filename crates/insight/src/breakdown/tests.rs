use proptest::prelude::*;

use super::*;
use crate::record::BucketSpan;

fn rank(begin: f64, computed: f64, reduced: f64, end: f64) -> RankStep {
    let compute = computed - begin;
    let backward = compute / 2.0;
    RankStep { begin, computed, reduced, end, compute, backward, buckets: vec![], device: None }
}

fn record(step: u64, ranks: Vec<RankStep>) -> StepRecord {
    StepRecord {
        step,
        loss: 1.0,
        samples: 32,
        wire_bytes: 1000,
        ranks,
        agreed: true,
        encoded: None,
    }
}

fn bucket(started: f64, ended: f64) -> BucketSpan {
    BucketSpan { bytes: 4, ready: started, started, ended, folding: 0.0, coding: 0.0 }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

/// Steps of 10 s in which rank `slow` computes for `late` seconds longer than 5.
fn run(steps: u64, world: usize, slow: impl Fn(u64) -> usize, late: f64) -> Vec<StepRecord> {
    (0..steps)
        .map(|step| {
            let begin = 10.0 * step as f64;
            let ranks = (0..world).map(|r| {
                let computed = begin + 5.0 + if r == slow(step) { late } else { 0.0 };
                rank(begin, computed, begin + 9.0, begin + 10.0)
            });
            record(step, ranks.collect())
        })
        .collect()
}

#[test]
fn a_wait_is_charged_to_the_straggler_until_it_has_computed_and_then_to_communication() {
    let mut ranks = vec![rank(0.0, 4.0, 8.0, 9.0), rank(0.0, 7.0, 8.0, 9.0)];
    ranks.iter_mut().for_each(|rank| rank.buckets = vec![bucket(7.0, 8.0)]);
    let step = StepBreakdown::of(&record(0, ranks));
    let early = step.ranks[0].parts;
    assert_eq!(early, Parts { compute: 4.0, straggler: 3.0, exposed: 1.0, rest: 1.0 });
    let late = step.ranks[1].parts;
    assert_eq!(late, Parts { compute: 7.0, straggler: 0.0, exposed: 1.0, rest: 1.0 });
    assert_eq!(step.last, Some(1));
    assert_eq!(step.ranks[1].lateness, 3.0);
    assert_eq!(step.duration(), 9.0);
}

#[test]
fn a_wait_that_is_longer_than_the_communication_is_rest() {
    let mut alone = rank(0.0, 5.0, 8.0, 9.0);
    alone.buckets = vec![bucket(5.0, 6.0)];
    let step = StepBreakdown::of(&record(0, vec![alone]));
    let expected = Parts { compute: 5.0, straggler: 0.0, exposed: 1.0, rest: 3.0 };
    assert_eq!(step.ranks[0].parts, expected);
}

#[test]
fn a_rank_does_not_wait_for_a_straggler_beyond_its_own_last_bucket() {
    let step =
        StepBreakdown::of(&record(0, vec![rank(0.0, 4.0, 5.0, 9.0), rank(0.0, 7.0, 8.0, 9.0)]));
    assert_eq!(step.ranks[0].parts.straggler, 1.0);
    assert_eq!(step.ranks[0].parts.exposed, 0.0);
    assert_eq!(step.ranks[0].parts.total(), 9.0);
}

#[test]
fn communication_is_the_union_of_transfers_on_the_rank_that_waited_least() {
    let mut a = rank(0.0, 4.0, 8.0, 9.0);
    // 1..3 and 2..4 overlap, 5..6 lies inside 5..8, the last is not a span.
    a.buckets = vec![
        bucket(2.0, 4.0),
        bucket(1.0, 3.0),
        bucket(5.0, 8.0),
        bucket(5.0, 6.0),
        bucket(8.0, 7.0),
    ];
    let mut b = rank(0.0, 7.0, 8.0, 9.0);
    b.buckets = vec![bucket(3.0, 6.0), bucket(7.0, 8.0)];
    let step = StepBreakdown::of(&record(0, vec![a, b]));
    assert_eq!(step.ranks[0].comm, 6.0);
    assert_eq!(step.comm, 4.0);
    assert_eq!(step.parts.exposed, 1.0);
    assert_eq!(step.hidden(), 3.0);
    assert_eq!(step.overlap(), Some(0.75));
}

#[test]
fn without_communication_there_is_no_overlap_to_speak_of() {
    let records = run(10, 1, |_| 0, 0.0);
    let run = RunBreakdown::of(&RunInfo::default(), &records);
    assert_eq!(run.overlap(), None);
    assert_eq!(run.hidden_of_hideable(), None);
    assert_eq!(run.straggler, None);
}

#[test]
fn a_rank_that_is_late_in_most_steps_is_the_straggler() {
    let slow_mostly = |step| if step % 4 == 0 { 0 } else { 2 };
    let run = RunBreakdown::of(&RunInfo::default(), &run(100, 4, slow_mostly, 3.0));
    let straggler = run.straggler.unwrap();
    assert_eq!(straggler.rank, 2);
    assert!(close(straggler.last_share, 0.75), "{}", straggler.last_share);
    assert!(straggler.slowdown > 1.2);
    assert!(close(run.parts.total(), 10.0));
}

#[test]
fn ranks_that_take_turns_are_no_straggler_and_neither_is_one_that_costs_little() {
    let info = RunInfo::default();
    assert_eq!(
        RunBreakdown::of(&info, &run(100, 4, |step| step as usize % 4, 3.0)).straggler,
        None
    );
    assert_eq!(RunBreakdown::of(&info, &run(100, 4, |_| 2, 0.4)).straggler, None);
    assert!(RunBreakdown::of(&info, &run(100, 4, |_| 2, 0.6)).straggler.is_some());
}

#[test]
fn a_lateness_within_the_error_of_the_clocks_names_no_rank() {
    let info = RunInfo { clock_error: 1.0, ..RunInfo::default() };
    assert_eq!(RunBreakdown::of(&info, &run(100, 4, |_| 2, 0.9)).straggler, None);
    assert!(RunBreakdown::of(&info, &run(100, 4, |_| 2, 1.1)).straggler.is_some());
}

#[test]
fn outliers_and_warm_up_do_not_move_the_typical_step() {
    let mut records = run(100, 2, |_| 0, 0.0);
    for slow in [0, 1, 2, 3, 50, 99] {
        for rank in &mut records[slow].ranks {
            rank.end += 1000.0;
        }
    }
    let run = RunBreakdown::of(&RunInfo::default(), &records);
    assert_eq!(run.warm_up, 20);
    assert!(close(run.parts.total(), 10.0));
    assert!(close(run.samples_per_s, 3.2));
    assert!(run.p99 > 1000.0);
}

#[test]
fn hidden_is_measured_against_what_could_hide() {
    let mut records = run(10, 2, |_| 0, 0.0);
    for record in &mut records {
        for rank in &mut record.ranks {
            // Backward is 2.5..5 of the step, communication 3..9, so 2.5 of 6 can hide and 2 do.
            let begin = rank.begin;
            rank.buckets = vec![bucket(begin + 3.0, begin + 9.0)];
        }
    }
    let run = RunBreakdown::of(&RunInfo::default(), &records);
    assert!(close(run.comm, 6.0) && close(run.hideable, 2.5) && close(run.hidden, 2.0));
    assert!(close(run.hidden_of_hideable().unwrap(), 0.8));
}

#[test]
fn no_steps_give_a_breakdown_of_nothing() {
    let run = RunBreakdown::of(&RunInfo::default(), &[]);
    assert_eq!(run, RunBreakdown::default());
    let run = RunBreakdown::of(&RunInfo::default(), &[record(0, vec![])]);
    assert_eq!(run.parts.total(), 0.0);
    assert_eq!(run.straggler, None);
}

/// Every twentieth step ends in an agreement of 30 s, of which 6 are coding; the others take 5 s.
fn run_with_local_steps(steps: u64) -> Vec<StepRecord> {
    let mut begin = 0.0;
    (0..steps)
        .map(|step| {
            let agreed = step % 20 == 19;
            let computed = begin + 4.0;
            let reduced = computed + if agreed { 30.0 } else { 0.0 };
            let mut one = rank(begin, computed, reduced, reduced + 1.0);
            if agreed {
                let coded = |started, ended| BucketSpan { coding: 3.0, ..bucket(started, ended) };
                one.buckets =
                    vec![coded(computed, computed + 10.0), coded(computed + 10.0, reduced)];
            }
            begin = one.end;
            let wire_bytes = if agreed { 2000 } else { 0 };
            StepRecord { agreed, wire_bytes, ..record(step, vec![one.clone(), one]) }
        })
        .collect()
}

#[test]
fn agreements_count_by_how_rare_they_are() {
    let run = RunBreakdown::of(&RunInfo::default(), &run_with_local_steps(420));
    assert_eq!((run.recorded, run.agreed), (420, 21));
    assert!(run.has_local_steps());
    assert!(close(run.parts.exposed, 30.0 / 20.0), "{:?}", run.parts);
    assert!(close(run.parts.total(), 5.0 + 1.5));
    assert!(close(run.comm, 1.5) && close(run.coding, 0.3), "{} {}", run.comm, run.coding);
    assert!(close(run.coding_share().unwrap(), 0.2));
    assert!(close(run.sent.per_step().unwrap(), 100.0));
    assert_eq!(run.buckets, 2);
}

#[test]
fn no_rank_is_last_where_ranks_do_not_agree() {
    let mut records = run_with_local_steps(420);
    // Rank 1 is late wherever rank 0 does not wait for it, and rank 0 in agreements.
    for record in &mut records {
        record.ranks[usize::from(!record.agreed)].computed += 0.5;
    }
    let run = RunBreakdown::of(&RunInfo::default(), &records);
    assert!(close(run.ranks[0].last_share, 1.0));
    assert_eq!(run.ranks[1].last_share, 0.0);
    assert_eq!(run.straggler, None, "half a second in twenty steps is not worth a word");
}

#[test]
fn coding_is_a_part_of_communication() {
    let mut coder = rank(0.0, 5.0, 8.0, 9.0);
    coder.buckets = vec![BucketSpan { coding: 0.5, ..bucket(5.0, 7.0) }];
    let mut idler = coder.clone();
    idler.buckets = vec![BucketSpan { coding: 1.5, ..bucket(5.0, 8.0) }];
    let step = StepBreakdown::of(&record(0, vec![idler, coder.clone()]));
    assert_eq!((step.comm, step.coding), (2.0, 0.5));
    coder.buckets[0].coding = 100.0;
    let step = StepBreakdown::of(&record(0, vec![coder]));
    assert_eq!((step.comm, step.coding), (2.0, 2.0));
}

/// Any float, with the ones that break arithmetic far more often than by chance.
fn hostile() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => -100.0..100.0f64,
        1 => any::<f64>(),
        1 => prop::sample::select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, f64::MAX, f64::MIN]),
    ]
}

fn hostile_rank() -> impl Strategy<Value = RankStep> {
    let bucket = (hostile(), hostile(), hostile()).prop_map(|(ready, started, ended)| BucketSpan {
        bytes: 1,
        ready,
        started,
        ended,
        folding: ready,
        coding: started,
    });
    let times = [(); 6].map(|()| hostile());
    (times, prop::collection::vec(bucket, 0..4)).prop_map(|(t, buckets)| {
        let [begin, computed, reduced, end, compute, backward] = t;
        RankStep { begin, computed, reduced, end, compute, backward, buckets, device: None }
    })
}

/// A rank's step as an honest rank measures it, starting at any time of day.
fn honest_rank() -> impl Strategy<Value = RankStep> {
    (0.0..2e9f64, [0.0..10.0f64, 0.0..10.0, 0.0..10.0], 0.0..1.0f64, 0.0..1.0f64).prop_map(
        |(begin, [a, b, c], compute, backward)| RankStep {
            begin,
            computed: begin + a,
            reduced: begin + a + b,
            end: begin + a + b + c,
            compute: a * compute,
            backward: a * compute * backward,
            device: None,
            buckets: vec![bucket(begin + a / 2.0, begin + a + b)],
        },
    )
}

proptest! {
    #[test]
    fn honest_parts_add_up_to_the_measured_step(
        ranks in prop::collection::vec(honest_rank(), 1..6),
    ) {
        let step = StepBreakdown::of(&record(0, ranks.clone()));
        for (parts, measured) in step.ranks.iter().map(|r| r.parts).zip(&ranks) {
            // The clock itself resolves no better than this at such times of day.
            let resolution = 1e-6;
            prop_assert!((parts.total() - (measured.end - measured.begin)).abs() < resolution);
            prop_assert!((parts.compute - measured.compute).abs() < resolution);
        }
    }

    #[test]
    fn hostile_parts_are_finite_and_not_negative_and_add_up(
        ranks in prop::collection::vec(hostile_rank(), 0..5),
    ) {
        let record = record(0, ranks);
        let step = StepBreakdown::of(&record);
        for (rank, measured) in step.ranks.iter().zip(&record.ranks) {
            let parts = rank.parts;
            for part in [parts.compute, parts.straggler, parts.exposed, parts.rest] {
                prop_assert!(part.is_finite() && part >= 0.0, "{parts:?}");
            }
            let whole = Repaired::of(measured).to_end;
            prop_assert!((parts.total() - whole).abs() <= 1e-12 * whole.max(1.0), "{parts:?} {whole}");
            prop_assert!(rank.lateness.is_finite() && rank.lateness >= 0.0);
            prop_assert!(rank.comm >= 0.0 && rank.comm <= whole * (1.0 + 1e-12));
            prop_assert!(rank.coding >= 0.0 && rank.coding <= rank.comm);
            prop_assert!(rank.backward >= 0.0 && rank.backward <= parts.compute);
        }
        let run = RunBreakdown::of(&RunInfo::default(), &[record]);
        prop_assert!(run.parts.total().is_finite() && run.hidden >= 0.0 && run.samples_per_s >= 0.0);
    }
}
