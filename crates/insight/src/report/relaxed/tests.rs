use super::*;
use crate::record::{Outcome, RunInfo};
use crate::relaxed::tests::{info, unbounded};
use crate::updates::{Move, UpdateRecord};

/// One of four workers is four times as slow.
fn run(strategy: &str) -> RelaxedRun {
    let records = unbounded(&[(0.1, 0.01), (0.1, 0.01), (0.1, 0.01), (0.4, 0.0)], 20.0);
    RelaxedRun::of(info(strategy, 4), vec![records], Vec::new())
}

/// The data of the page, which must be one that stands alone.
fn page(report: &RelaxedReport<'_>) -> serde_json::Value {
    let page = report.html();
    let elsewhere = page.replace("http://www.w3.org/2000/svg", "").replace("url(#", "");
    for reference in ["http:", "https:", "//cdn", "src=", "@import", "url(", "fetch("] {
        assert!(!elsewhere.contains(reference), "{reference}");
    }
    assert!(page.contains("default-src 'none'"));
    assert!(!page.contains("{{style}}") && !page.contains("{{script}}"));
    let (_, after) = page.split_once("<script id=\"data\" type=\"application/json\">").unwrap();
    serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap()
}

/// Every element that the script looks up by name must be in the page.
#[test]
fn the_script_finds_what_it_fills() {
    let html = include_str!("page.html");
    let script = concat!(include_str!("../draw.js"), include_str!("page.js"));
    let mut found = 0;
    for (_, rest) in
        script.match_indices("byId(\"").map(|(at, mark)| (at, &script[at + mark.len()..]))
    {
        let id = rest.split('"').next().unwrap();
        assert!(html.contains(&format!("id=\"{id}\"")), "{id}");
        found += 1;
    }
    assert!(found > 10, "{found}");
    for chart in ["loss", "staleness", "lead", "levels"] {
        assert!(html.contains(&format!("class=\"chart\" id=\"{chart}\"")), "{chart}");
    }
}

#[test]
fn the_page_opens_and_closes_its_elements() {
    let html = include_str!("page.html");
    for element in ["section", "div", "table", "thead", "tbody", "main", "footer", "p", "h2"] {
        let opened = html.matches(&format!("<{element}>")).count()
            + html.matches(&format!("<{element} ")).count();
        let closed = html.matches(&format!("</{element}>")).count();
        assert_eq!(opened, closed, "{element}");
    }
}

#[test]
fn a_slow_worker_is_shown_with_what_would_suit() {
    let run = run("async");
    let outcome = Outcome { accuracy: Some(0.9789), ..Outcome::default() };
    let summary = RelaxedSummary::new(&run, outcome, None);
    let report = RelaxedReport::new(&run, Some(&summary));
    let text = report.terminal(100);
    for part in [
        "test:  on , async over , 4 workers, 1 server, stale gradients: keep",
        "gradients per second",
        "97.89 %",
        "The ledger adds up: 593 pushes in 593 updates",
        "→ async",
        "worker 3 takes 4.00× as long",
        "Worker 0 waited most, for 9.1 % of its time; worker 3 least, for 0 %.",
        "Verdict: async gave 29.8 gradients per second",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("not finished"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");

    let page = page(&report);
    assert_eq!(page["verdict"]["tone"], "good");
    assert_eq!(page["workers"].as_array().unwrap().len(), 4);
    assert_eq!(page["advised"], "async");
    assert!(page["losses"].as_array().unwrap().len() <= 240);
    assert_eq!(page["bound"], serde_json::Value::Null);
}

#[test]
fn another_level_than_the_advised_is_notable() {
    let of = |strategy: &str| {
        let run = run(strategy);
        page(&RelaxedReport::new(&run, None))["verdict"]["tone"].clone()
    };
    assert_eq!(of("downpour:1,1"), "notable");
    assert_eq!(of("hogwild"), "unknown");
}

#[test]
fn broken_promises_come_first() {
    let mut records = unbounded(&[(0.1, 0.0); 2], 5.0);
    records[20].lead = 5;
    let ahead = RelaxedRun::of(info("ssp:3", 2), vec![records.clone()], Vec::new());
    let report = RelaxedReport::new(&ahead, None);
    assert!(report.terminal(200).contains(
        "Verdict: The bound did not hold: a worker was 5 clocks ahead of the slowest, and ssp:3 allows 3."
    ));
    assert_eq!(page(&report)["verdict"]["tone"], "bad");

    records[20].lead = 3;
    let held = RelaxedRun::of(info("ssp:3", 2), vec![records.clone()], Vec::new());
    assert!(RelaxedReport::new(&held, None).terminal(200).contains("The bound held"));

    records.push(records[7].clone());
    let twice = RelaxedRun::of(info("ssp:3", 2), vec![records], Vec::new());
    let text = RelaxedReport::new(&twice, None).terminal(200);
    assert!(
        text.contains("Verdict: The ledger of pushes does not add up: updates-0.jsonl"),
        "{text}"
    );
    assert!(!text.contains("The ledger adds up"), "{text}");
}

#[test]
fn moves_are_shown_with_their_reasons() {
    let records = unbounded(&[(0.1, 0.0); 2], 5.0);
    let moves: Vec<Move> = (0..40)
        .map(|at| Move { time: 1.0, from: at, to: at + 1, reason: format!("reason {at}") })
        .collect();
    let run = RelaxedRun::of(info("ssp:auto", 2), vec![records], moves);
    let report = RelaxedReport::new(&run, None);
    let text = report.terminal(100);
    assert!(
        text.contains("39 → 40  reason 39") && text.contains("(after 28 earlier moves)"),
        "{text}"
    );
    assert!(text.contains("The bound moved 40 times, from 0 to 40."), "{text}");
    assert_eq!(page(&report)["moves"][39]["reason"], "reason 39");
}

#[test]
fn diverged_and_empty_runs_are_drawn() {
    let nan = |record: UpdateRecord| UpdateRecord { loss: f32::NAN, ..record };
    let records = unbounded(&[(0.1, 0.0); 2], 5.0).into_iter().map(nan).collect();
    let diverged = RelaxedRun::of(info("async", 2), vec![records], Vec::new());
    let report = RelaxedReport::new(&diverged, None);
    assert!(report.terminal(100).contains("diverged"));
    assert!(page(&report)["losses"][0][1].is_null());

    let empty = RelaxedRun::of(RunInfo::default(), Vec::new(), Vec::new());
    let report = RelaxedReport::new(&empty, None);
    assert!(report.terminal(100).contains("No gradient was recorded"));
    assert_eq!(page(&report)["staleness"], serde_json::json!([]));
}

#[test]
fn no_text_of_a_run_can_leave_the_data() {
    let name = "</script><!--<script>{{data}}{{style}} \"'&";
    let run =
        RelaxedRun::of(RunInfo { name: name.into(), ..RunInfo::default() }, Vec::new(), Vec::new());
    let html = RelaxedReport::new(&run, None).html();
    let (_, after) = html.split_once("<script id=\"data\" type=\"application/json\">").unwrap();
    let data: serde_json::Value =
        serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap();
    assert_eq!(data["name"], name);
}

#[test]
fn a_histogram_is_as_wide_as_its_pushes_need() {
    let drawn = |histogram: &[(u64, u64)]| -> Vec<String> {
        let columns = columns(histogram, 4).into_iter();
        columns.map(|(label, pushes)| format!("{label}: {pushes}")).collect()
    };
    assert_eq!(drawn(&[]), Vec::<String>::new());
    assert_eq!(drawn(&[(0, 5), (2, 1)]), ["0: 5", "1: 0", "2: 1"]);
    assert_eq!(drawn(&[(0, 98), (2, 100), (9, 2), (70, 1)]), ["0: 98", "1: 0", "2: 100", "3+: 3"]);
    assert_eq!(
        drawn(&[(0, 1), (2, 1), (9, 9), (11, 1)]),
        ["0–2: 2", "3–5: 0", "6–8: 0", "9–11: 10"]
    );
    assert_eq!(drawn(&[(u64::MAX, 9)]).len(), 4);
}

#[test]
fn a_loss_that_is_no_number_is_the_verdict() {
    let mut run = run("ssp:3");
    run.diverged = Some(crate::relaxed::Diverged { worker: 2, step: 37 });
    let report = RelaxedReport::new(&run, None);
    let text = report.terminal(200);
    assert!(text.contains("Verdict: The loss of worker 2 became NaN at step 37"), "{text}");
    assert!(text.contains("lower --learning-rate"), "{text}");
    assert!(!text.contains("suits"), "{text}");
    assert_eq!(page(&report)["verdict"]["tone"], "bad");
    run.diverged = None;
    assert!(!RelaxedReport::new(&run, None).terminal(200).contains("NaN"));
}

#[test]
fn figures_say_what_they_count() {
    let of = |strategy| RelaxedReport::new(&run(strategy), None).terminal(100);
    let text = of("downpour:2,4");
    for part in [
        "gradients per second    59.5",
        "pushes per second       29.8, each of 2 gradients",
        "Verdict: downpour:2,4 gave 59.5 gradients per second",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!of("async").contains("pushes per second"));

    let text = of("gossip");
    assert!(text.contains("staleness               not known"), "{text}");
    assert!(!text.contains("clocks old") && !text.contains("How stale"), "{text}");
    let gossip = run("gossip");
    let page = page(&RelaxedReport::new(&gossip, None));
    assert_eq!(page["staleness"].as_array().unwrap().len(), 0);
    assert!(page["tiles"].to_string().contains("not known"), "{page}");
}
