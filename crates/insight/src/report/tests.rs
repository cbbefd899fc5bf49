use super::*;
use crate::record::{BucketSpan, RankStep};

/// Steps of a second, of which 0.2 are communication and half of that is coding.
fn steps(n: u64, agreed: impl Fn(u64) -> bool) -> Vec<StepRecord> {
    let step = |step: u64| {
        let begin = step as f64;
        let agreed = agreed(step);
        let bucket = BucketSpan {
            bytes: 400,
            ready: begin + 0.7,
            started: begin + 0.7,
            ended: begin + 0.9,
            folding: 0.0,
            coding: 0.1,
        };
        let rank = RankStep {
            begin,
            computed: begin + 0.7,
            reduced: begin + if agreed { 0.9 } else { 0.7 },
            end: begin + 1.0,
            compute: 0.7,
            backward: 0.4,
            device: None,
            buckets: if agreed { vec![bucket] } else { Vec::new() },
        };
        let wire_bytes = if agreed { 400 } else { 0 };
        let (ranks, encoded) = (vec![rank; 2], None);
        StepRecord { step, loss: 1.0, samples: 1, wire_bytes, ranks, agreed, encoded }
    };
    (0..n).map(step).collect()
}

fn info() -> RunInfo {
    RunInfo { codec: "auto".into(), dense_bytes_per_step: 1600, workers: 2, ..RunInfo::default() }
}

fn advice(chosen: &str) -> Advice {
    let row = |codec: &str, seconds, coding_seconds, wire_bytes| Prediction {
        codec: codec.into(),
        seconds,
        coding_seconds,
        wire_bytes,
    };
    Advice {
        step: 19,
        rows: vec![row("none", 2.0, 0.0, 1600), row("int8", 0.95, 0.09, 400)],
        chosen: chosen.into(),
        measured_dense_seconds: 2.0,
        reason: "The link is <slow>.".into(),
        observed_steps: 8,
        deciding_bytes: 12_000,
        deciding_seconds: 0.25,
    }
}

/// The data of the page.
fn page(report: &Report) -> serde_json::Value {
    let page = report.html();
    let (_, after) = page.split_once("<script id=\"data\" type=\"application/json\">").unwrap();
    serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap()
}

fn tile<'a>(page: &'a serde_json::Value, label: &str) -> Option<&'a str> {
    let tiles = page["tiles"].as_array().unwrap();
    tiles.iter().find(|tile| tile["label"] == label).map(|tile| tile["note"].as_str().unwrap())
}

#[test]
fn a_choice_is_shown_beside_what_came_of_it() {
    let advice = advice("int8");
    let report = Report::new(&info(), &steps(60, |_| true), None, Some(&advice));
    let text = report.terminal(100);
    assert!(
        text.contains("decided at step 19, where a step without a codec took 2.00 s"),
        "{text}"
    );
    let row = |codec: &str| text.lines().find(|line| line.contains(codec)).unwrap();
    let chosen = row("→ int8");
    assert!(chosen.contains("950 ms") && chosen.contains("90.0 ms"), "{chosen}");
    assert!(chosen.contains("400 B") && chosen.contains("measured 1.00 s"), "{chosen}");
    assert!(chosen.contains("predicted 5.0 % too short"), "{chosen}");
    assert!(!row("  none ").contains("measured"), "{text}");
    assert!(text.contains("int8 was chosen; since then a step takes 1.00 s (median of 40)"));
    assert!(text.contains("The link is <slow>."), "{text}");

    let choice = &page(&report)["choice"];
    let basis = choice["basis"].as_str().unwrap();
    assert!(basis.contains("12.0 kB sent to decide, in 250 ms, after 8 steps"), "{basis}");
    assert_eq!(choice["rows"][1]["measured"], "1.00 s");
    assert_eq!(choice["rows"][1]["error"], "5.0 % too short");
    assert_eq!(
        (&choice["rows"][0]["chosen"], &choice["rows"][1]["chosen"]),
        (&false.into(), &true.into())
    );
    assert_eq!(choice["reason"], "The link is <slow>.");
}

#[test]
fn a_choice_for_none_and_one_without_steps_are_said() {
    let report = |steps: &[StepRecord], chosen: &str| {
        Report::new(&info(), steps, None, Some(&advice(chosen))).terminal(100)
    };
    let text = report(&steps(60, |_| true), "none");
    assert!(text.contains("No codec was chosen; since then"), "{text}");
    assert!(text.contains("100 % too long"), "{text}");
    let text = report(&steps(22, |_| true), "int8");
    assert!(text.contains("too few steps since then"), "{text}");
    assert!(!text.contains("measured "), "{text}");
}

#[test]
fn a_run_without_a_choice_shows_none() {
    let report = Report::new(&info(), &steps(60, |_| true), None, None);
    assert!(!report.terminal(100).contains("Codec:"));
    assert!(page(&report)["choice"].is_null());
}

#[test]
fn coding_and_what_it_saves_are_shown() {
    let report = Report::new(&info(), &steps(60, |_| true), None, None);
    let text = report.terminal(100);
    assert!(text.contains("100 ms a step, 50 % of it"), "{text}");
    assert!(text.contains("400 B a step, 4.00× less than without a codec"), "{text}");
    assert!(!text.contains("agreed"), "{text}");
    let page = page(&report);
    assert!((page["communication"]["coding"].as_f64().unwrap() - 0.1).abs() < 1e-9);
    assert_eq!(tile(&page, "Sent per step"), Some("4.00× less than without a codec"));
    assert_eq!(tile(&page, "Agreed"), None);
}

/// Warm-up steps are among the shortest or the longest, as it happens; the figure is of all of them.
#[test]
fn what_is_sent_is_counted_over_all_steps_and_apart_before_the_codec() {
    for slow_warm_up in [true, false] {
        let mut steps = steps(60, |_| true);
        for step in &mut steps[..40] {
            step.encoded = Some(false);
            step.wire_bytes = 1600;
            if slow_warm_up {
                step.ranks.iter_mut().for_each(|rank| rank.end += 1.0);
            }
        }
        steps[40..].iter_mut().for_each(|step| step.encoded = Some(true));
        let report = Report::new(&info(), &steps, None, None);
        let text = report.terminal(100);
        // (40 · 1600 + 20 · 400) / 60, of 1600.
        assert!(text.contains("1.20 kB a step, 1.33× less than without a codec"), "{text}");
        let with = "400 B a step, 4.00× less, in 20 steps";
        let before = "1.60 kB a step, no less, in 40 steps";
        assert!(text.contains(with) && text.contains(before), "{text}");
        let page = page(&report);
        assert_eq!(tile(&page, "Sent per step"), Some("1.33× less than without a codec"));
        assert_eq!(tile(&page, "Sent with the codec"), Some(with));
        assert_eq!(tile(&page, "Sent before it"), Some(before));
        // A typical step is one with the codec.
        assert_eq!(report.run.warm_up, 40);
        assert!((report.run.parts.total() - 1.0).abs() < 1e-9, "{:?}", report.run.parts);
        let summary = Summary::new(&info(), &report.run, Default::default(), None);
        assert_eq!(summary.wire_bytes, 40 * 1600 + 20 * 400);
        assert_eq!((summary.wire_bytes_per_step, summary.wire_ratio), (1200.0, Some(4.0 / 3.0)));
        assert_eq!((summary.codec_steps, summary.codec_warmup_steps), (Some(20), Some(40)));
        assert_eq!(summary.codec_wire_bytes_per_step, Some(400.0));
        assert_eq!(summary.codec_wire_ratio, Some(4.0));
        assert_eq!(summary.codec_warmup_wire_bytes_per_step, Some(1600.0));
    }
}

#[test]
fn a_codec_that_never_came_into_force_is_said() {
    let mut steps = steps(60, |_| true);
    steps.iter_mut().for_each(|step| step.encoded = Some(false));
    let text = Report::new(&info(), &steps, None, None).terminal(100);
    assert!(text.contains("no step was encoded"), "{text}");
}

#[test]
fn local_steps_are_counted() {
    let report = Report::new(&info(), &steps(60, |step| step % 10 == 9), None, None);
    let text = report.terminal(100);
    assert!(text.contains("in 6 of 60 steps"), "{text}");
    assert!(text.contains("40.0× less than a full exchange in every step"), "{text}");
    assert_eq!(tile(&page(&report), "Agreed"), Some("in 6 of 60 steps"));
}

#[test]
fn a_run_without_codec_claims_no_saving() {
    let dense = RunInfo { codec: "none".into(), ..info() };
    let report = Report::new(&dense, &steps(60, |_| true), None, None);
    assert!(!report.terminal(100).contains("less than"));
    assert_eq!(tile(&page(&report), "Sent per step"), Some("by all ranks together"));
}

#[test]
fn a_run_whose_loss_is_lost_has_a_verdict_that_says_so() {
    let mut lost = steps(60, |_| true);
    lost[10].loss = f64::NAN;
    lost[55..].iter_mut().for_each(|step| step.loss = f64::INFINITY);
    let mut info = info();
    info.settings.insert("optimizer".into(), "sgd, learning rate 0.5, weight decay 0".into());
    let report = Report::new(&info, &lost, None, None);
    let text = report.terminal(200);
    assert!(text.contains("no longer a number since step 55"), "{text}");
    assert!(text.contains("lower learning rate (it was 0.5)"), "{text}");
    assert!(
        !text.contains("bottleneck") && !text.contains("NaN") && !text.contains("inf"),
        "{text}"
    );
    assert_eq!(page(&report)["verdict"]["headline"], report.verdict.headline);
    // A framework's program may not have told its loss.
    info.settings.insert("framework".into(), "torch 2.15.0".into());
    let text = Report::new(&info, &lost, None, None).terminal(200);
    assert!(text.contains("bottleneck") && !text.contains("final loss"), "{text}");
    // One bad batch is not the end.
    lost.truncate(50);
    info.settings.remove("framework");
    assert!(Report::new(&info, &lost, None, None).verdict.headline.contains("bottleneck"));
}

#[test]
fn workers_that_come_and_go_are_shown_and_those_that_cannot_change_nothing() {
    let steps = steps(60, |_| true);
    let plain = || Report::new(&info(), &steps, None, None);
    let (text, html) = (plain().terminal(100), plain().html());
    let without = plain().with_timeline(None);
    assert_eq!((without.terminal(100), without.html()), (text.clone(), html));
    assert!(page(&without)["workers"].is_null() && !text.contains("Workers"));

    let timeline = Timeline::of(&crate::membership::tests::events());
    let report = plain().with_timeline(timeline.as_ref());
    let said = "1 worker lost, 1 joined; 1 recovery in 48.0 ms; 1 step computed again.";
    let shown = report.terminal(100);
    assert!(shown.contains(said) && shown.contains("Workers over 20.0 s"), "{shown}");
    let page = page(&report);
    let findings = page["verdict"]["findings"].as_array().unwrap();
    assert_eq!(findings.last().unwrap(), said);
    assert_eq!(page["workers"]["note"], "3 workers, 3 epochs in 20.0 s");
    assert_eq!(page["workers"]["listed"][0]["took"], "48.0 ms");
    assert_eq!(page["workers"]["listed"][0]["lost"], "worker 1");
}
