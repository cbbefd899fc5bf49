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
            buckets: if agreed { vec![bucket] } else { Vec::new() },
        };
        let wire_bytes = if agreed { 400 } else { 0 };
        StepRecord { step, loss: 1.0, samples: 1, wire_bytes, ranks: vec![rank; 2], agreed }
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
