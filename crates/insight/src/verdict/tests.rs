use super::*;
use crate::breakdown::{Parts, RankStats};

fn info() -> RunInfo {
    RunInfo {
        workers: 4,
        transport: "auto".into(),
        hosts: ["node-a", "node-a", "node-b", "node-b"].map(String::from).to_vec(),
        ..RunInfo::default()
    }
}

/// A run of a hundred steps of 100 ms.
fn run(exposed: f64, straggler: f64, rest: f64) -> RunBreakdown {
    let compute = 0.1 - exposed - straggler - rest;
    RunBreakdown {
        recorded: 120,
        warm_up: 20,
        agreed: 120,
        parts: Parts { compute, straggler, exposed, rest },
        comm: exposed + 0.01,
        backward: 0.05,
        hidden: 0.01,
        hideable: (exposed + 0.01).min(0.05),
        ranks: vec![RankStats::default(); 4],
        samples_per_s: 1000.0,
        ..RunBreakdown::default()
    }
}

fn judge(run: &RunBreakdown) -> Verdict {
    Verdict::of(run, &info(), None)
}

#[test]
fn little_exposed_communication_acquits_synchronization() {
    let verdict = judge(&run(0.001, 0.001, 0.001));
    assert_eq!(verdict.bottleneck, Bottleneck::Compute);
    assert!(verdict.headline.starts_with("Synchronization is not the bottleneck"));
    assert!(verdict.headline.contains("1.0 %"), "{}", verdict.headline);
    assert_eq!(verdict.advice, Vec::<String>::new());
    assert!(verdict.findings[0].contains("100 ms"), "{}", verdict.findings[0]);
}

#[test]
fn much_exposed_communication_convicts_it_and_says_what_would_help() {
    let verdict = judge(&run(0.06, 0.01, 0.01));
    assert_eq!(verdict.bottleneck, Bottleneck::Synchronization);
    assert!(verdict.headline.contains("is the bottleneck") && verdict.headline.contains("60 %"));
    let advice = verdict.advice.join("\n");
    assert!(advice.contains("another bucket size"), "{advice}");
    assert!(advice.contains("20.0 ms stay exposed at best"), "{advice}");
    assert!(advice.contains("2.50 times as fast"), "{advice}");
    assert!(!advice.contains("shared memory"), "{advice}");
}

#[test]
fn advice_fits_the_settings() {
    let run = run(0.03, 0.0, 0.0);
    let mut info = info();
    info.settings.insert("overlap".into(), false.into());
    info.transport = "tcp".into();
    info.hosts = vec!["node-a".into(); 4];
    let advice = Verdict::of(&run, &info, None).advice.join("\n");
    assert!(advice.contains("Switch overlap on: up to 30.0 ms"), "{advice}");
    assert!(advice.contains("--transport shm"), "{advice}");
    assert!(!advice.contains("bucket size"), "{advice}");
    assert!(!advice.contains("stay exposed"), "{advice}");
}

#[test]
fn a_straggler_is_named_with_its_rank_host_and_cost() {
    let mut run = run(0.01, 0.03, 0.0);
    run.straggler = Some(Straggler { rank: 2, last_share: 0.97, cost: 0.04, slowdown: 2.0 });
    let verdict = judge(&run);
    assert_eq!(verdict.bottleneck, Bottleneck::Straggler);
    assert!(verdict.headline.starts_with("Rank 2 on node-b is the bottleneck"));
    assert!(verdict.headline.contains("40 %"), "{}", verdict.headline);
    let finding = &verdict.findings[1];
    assert!(finding.contains("97 %") && finding.contains("40.0 ms"), "{finding}");
    assert!(finding.contains("2.0 times as long"), "{finding}");
    assert!(verdict.advice.iter().any(|advice| advice.contains("throttled")));
}

#[test]
fn a_straggler_among_many_ranks_or_few_is_weighed_by_what_the_others_wait() {
    // Of two ranks one waits 30 % of its steps: 15 % in the mean, but it is the bottleneck.
    let mut run = run(0.01, 0.015, 0.0);
    run.straggler = Some(Straggler { rank: 1, last_share: 1.0, cost: 0.03, slowdown: 2.0 });
    assert_eq!(judge(&run).bottleneck, Bottleneck::Straggler);
}

#[test]
fn a_straggler_is_named_even_where_something_else_is_the_bottleneck() {
    let mut run = run(0.06, 0.01, 0.0);
    run.straggler = Some(Straggler { rank: 3, last_share: 0.9, cost: 0.013, slowdown: 1.3 });
    let verdict = judge(&run);
    assert_eq!(verdict.bottleneck, Bottleneck::Synchronization);
    assert!(verdict.headline.contains("Rank 3 on node-b holds up the others: they wait 13 %"));
}

#[test]
fn a_straggler_that_computes_as_fast_is_told_apart() {
    let mut run = run(0.01, 0.03, 0.0);
    run.straggler = Some(Straggler { rank: 1, last_share: 1.0, cost: 0.04, slowdown: 1.0 });
    let verdict = judge(&run);
    assert!(verdict.findings[1].contains("waits for its data"));
    assert!(verdict.advice.iter().any(|advice| advice.contains("before it computes")));
}

#[test]
fn waiting_without_a_culprit_names_no_rank() {
    let verdict = judge(&run(0.01, 0.03, 0.0));
    assert_eq!(verdict.bottleneck, Bottleneck::Straggler);
    assert!(verdict.headline.starts_with("Uneven ranks"));
    assert!(verdict.advice.iter().any(|advice| advice.starts_with("No single rank")));
}

#[test]
fn the_largest_loss_is_the_bottleneck() {
    assert_eq!(judge(&run(0.25e-1, 0.0, 0.3e-1)).bottleneck, Bottleneck::Rest);
    assert_eq!(judge(&run(0.3e-1, 0.0, 0.25e-1)).bottleneck, Bottleneck::Synchronization);
}

#[test]
fn a_handful_of_steps_proves_nothing() {
    let mut run = run(0.06, 0.0, 0.0);
    run.recorded = run.warm_up + ENOUGH_STEPS - 1;
    let verdict = judge(&run);
    assert_eq!(verdict.bottleneck, Bottleneck::Unknown);
    assert!(verdict.advice.is_empty());
    assert_eq!(judge(&RunBreakdown::default()).findings, Vec::<String>::new());
}

#[test]
fn steps_without_an_exchange_change_what_would_help() {
    let mut run = run(0.04, 0.0, 0.0);
    run.agreed = 6;
    run.comm = 0.06;
    let verdict = judge(&run);
    assert_eq!(verdict.bottleneck, Bottleneck::Synchronization);
    assert!(verdict.findings.iter().any(|f| f.contains("agreed in 6 of 120 steps")));
    let advice = verdict.advice.join("\n");
    assert!(advice.contains("Agree less often"), "{advice}");
    assert!(!advice.contains("bucket size") && !advice.contains("at best"), "{advice}");
}

#[test]
fn coding_is_a_finding_and_too_much_of_it_a_reason_to_act() {
    let mut run = run(0.04, 0.0, 0.0);
    assert!(!judge(&run).findings.join("\n").contains("ncoding"));
    run.coding = 0.4 * run.comm;
    let verdict = judge(&run);
    assert!(verdict.findings.iter().any(|f| f.contains("20.0 ms a step, 40 % of the comm")));
    assert!(!verdict.advice.join("\n").contains("faster codec"));
    run.coding = 0.6 * run.comm;
    assert!(
        judge(&run).advice.join("\n").contains("60 % of the communication: try a faster codec")
    );
}

#[test]
fn a_codec_is_suggested_only_where_there_is_none() {
    let mut run = run(0.06, 0.0, 0.0);
    run.comm = 0.08;
    assert!(judge(&run).advice.join("\n").contains("--codec auto"));
    let with = RunInfo { codec: "int8".into(), ..info() };
    assert!(!Verdict::of(&run, &with, None).advice.join("\n").contains("--codec"));
}

#[test]
fn advice_speaks_the_language_of_the_framework() {
    let mut run = run(0.06, 0.0, 0.0);
    run.comm = 0.08;
    let mut with = info();
    with.settings.insert("framework".into(), "torch 2.15.0".into());
    let advice = Verdict::of(&run, &with, None).advice.join("\n");
    assert!(advice.contains("send less (unisono.torch.compress)"), "{advice}");
    assert!(!advice.contains("--codec"), "{advice}");
}

#[test]
fn scaling_is_compared_with_ideal_and_with_what_waiting_explains() {
    let run = run(0.05, 0.0, 0.0);
    let scaled = |one_worker_samples_per_s| {
        let scaling = Scaling { one_worker_samples_per_s };
        Verdict::of(&run, &info(), Some(&scaling))
    };
    let explained = scaled(500.0).findings.join("\n");
    assert!(explained.contains("2.00 times the work of one"), "{explained}");
    assert!(explained.contains("50 % of ideal"), "{explained}");
    assert!(!explained.contains("beside each other"), "{explained}");
    let unexplained = scaled(1000.0);
    assert!(unexplained.findings.join("\n").contains("beside each other"));
    assert!(unexplained.advice.iter().any(|advice| advice.contains("its own cores")));
}
