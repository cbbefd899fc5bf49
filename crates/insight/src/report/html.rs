//! The report as one page that needs no network and no other file.
//!
//! The page holds its data as JSON, already reduced to what it draws; the script in it only draws.

use serde::Serialize;

use super::bins::{Curves, HeatMap};
use super::workers::Workers;
use super::{Choice, Report};
use crate::breakdown::Parts;
use crate::record::RunInfo;
use crate::units::{bytes, count, duration, percent};
use crate::verdict::Verdict;

const PAGE: &str = include_str!("page.html");
pub(super) const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = concat!(include_str!("draw.js"), include_str!("page.js"));

/// Ranks listed one by one; the heat map shows all.
const RANKS: usize = 16;

/// Hosts listed by name.
const HOSTS: usize = 8;

pub(super) fn render(report: &Report) -> String {
    fill_in(PAGE, STYLE, SCRIPT, &Page::of(report))
}

/// A page with its style, its script and the data that the script draws.
pub(super) fn fill_in(page: &str, style: &str, script: &str, data: &impl Serialize) -> String {
    let data =
        serde_json::to_string(data).expect("a structure of numbers, strings and lists is JSON");
    // What stands in the data is never searched for marks: it is filled in last, and only once.
    page.replacen("{{style}}", style, 1).replacen("{{script}}", script, 1).replacen(
        "{{data}}",
        &inside_script(&data),
        1,
    )
}

/// JSON that cannot end the `script` element it stands in, nor open a comment there. In JSON a `<` can
/// only be part of a string, where the escape means the same.
fn inside_script(json: &str) -> String {
    json.replace('<', "\\u003c")
}

/// What the script draws. Times are seconds.
#[derive(Serialize)]
struct Page<'a> {
    name: &'a str,
    subtitle: String,
    verdict: &'a Verdict,
    tiles: Vec<Tile>,
    measured: usize,
    step: Parts,
    communication: Option<Communication>,
    choice: Option<&'a Choice>,
    scaling: Option<Scaling>,
    curves: &'a Curves,
    heat_map: &'a HeatMap,
    ranks: Vec<Rank<'a>>,
    ranks_in_all: usize,
    /// Of a run whose workers could come and go.
    workers: Option<Workers>,
    settings: Vec<(String, String)>,
}

/// A figure that stands out.
#[derive(Serialize)]
pub(super) struct Tile {
    label: &'static str,
    value: String,
    note: String,
}

impl Tile {
    pub fn new(label: &'static str, value: String, note: impl Into<String>) -> Tile {
        Tile { label, value, note: note.into() }
    }
}

#[derive(Serialize)]
struct Communication {
    total: f64,
    hidden: f64,
    coding: f64,
    backward: f64,
}

#[derive(Serialize)]
struct Scaling {
    one_worker: f64,
    all_workers: f64,
    workers: usize,
    efficiency: f64,
}

#[derive(Serialize)]
struct Rank<'a> {
    rank: usize,
    host: &'a str,
    step: Parts,
    lateness: f64,
    last_share: f64,
}

impl Page<'_> {
    fn of(report: &Report) -> Page<'_> {
        let run = &report.run;
        let rank = |rank: usize| Rank {
            rank,
            host: report.info.host(rank).unwrap_or(""),
            step: run.ranks[rank].parts,
            lateness: run.ranks[rank].lateness,
            last_share: run.ranks[rank].last_share,
        };
        Page {
            name: &report.info.name,
            subtitle: report.info.subtitle(),
            verdict: &report.verdict,
            tiles: tiles(report),
            measured: run.measured(),
            step: run.parts,
            communication: (run.comm > 0.0).then_some(Communication {
                total: run.comm,
                hidden: run.hidden,
                coding: run.coding,
                backward: run.backward,
            }),
            choice: report.choice.as_ref(),
            scaling: scaling(report),
            curves: &report.curves,
            heat_map: &report.heat_map,
            ranks: report.notable_ranks(RANKS).into_iter().map(rank).collect(),
            ranks_in_all: run.ranks.len(),
            workers: report.timeline.as_ref().map(Workers::of),
            settings: settings(report),
        }
    }
}

fn tiles(report: &Report) -> Vec<Tile> {
    let run = &report.run;
    let parts = &run.parts;
    let of_each = |seconds: f64| format!("{} of each step", duration(seconds));
    let waiting = match &run.straggler {
        Some(straggler) => format!("mostly for rank {}", straggler.rank),
        None => of_each(parts.straggler),
    };
    let (exposed, straggler) = (parts.share(parts.exposed), parts.share(parts.straggler));
    let p99 = format!("99 % within {}", duration(run.p99));
    let mut tiles = vec![
        Tile::new("Step time", duration(parts.total()), p99),
        Tile::new("Throughput", count(run.samples_per_s), "samples per second"),
        Tile::new("Exposed communication", percent(exposed), of_each(parts.exposed)),
        Tile::new("Waiting for a straggler", percent(straggler), waiting),
    ];
    if let Some(hidden) = run.hidden_of_hideable() {
        let of = format!("of the {} that can hide", duration(run.hideable));
        tiles.push(Tile::new("Overlap", percent(hidden), of));
    }
    if let Some(scaling) = scaling(report) {
        let workers = format!("{} workers against one", scaling.workers);
        tiles.push(Tile::new("Scaling efficiency", percent(scaling.efficiency), workers));
    }
    if let Some(sent) = run.sent.per_step().filter(|sent| *sent > 0.0) {
        let saving = report.saving().unwrap_or("by all ranks together".into());
        tiles.push(Tile::new("Sent per step", bytes(sent), saving));
    }
    if let (Some(by), Some((with, before))) = (run.by_codec, report.sent_by_codec()) {
        let amount = |sent: Option<f64>| sent.map_or("-".into(), bytes);
        tiles.push(Tile::new("Sent with the codec", amount(by.encoded.per_step()), with));
        tiles.push(Tile::new("Sent before it", amount(by.plain.per_step()), before));
    }
    if run.has_local_steps() {
        let steps = format!("in {} of {} steps", run.agreed, run.recorded);
        tiles.push(Tile::new("Agreed", count(run.agreed as f64), steps));
    }
    if let Some(value) = report.final_loss() {
        let accuracy = report.summary.as_ref().and_then(|summary| summary.accuracy);
        let note = match accuracy.filter(|_| run.diverged.is_none()) {
            Some(accuracy) => format!("held-out accuracy {:.2} %", accuracy * 100.0),
            None => {
                let steps = if run.recorded == 1 { "step" } else { "steps" };
                format!("after {} {steps}", count(run.recorded as f64))
            }
        };
        tiles.push(Tile::new("Final loss", value, note));
    }
    tiles
}

fn scaling(report: &Report) -> Option<Scaling> {
    let summary = report.summary.as_ref()?;
    Some(Scaling {
        one_worker: summary.one_worker_samples_per_s?,
        all_workers: report.run.samples_per_s,
        workers: summary.workers,
        efficiency: summary.scaling_efficiency?,
    })
}

fn settings(report: &Report) -> Vec<(String, String)> {
    let info = &report.info;
    let mut settings = vec![
        ("model".into(), info.model.clone()),
        ("data".into(), info.data.clone()),
        ("strategy".into(), info.strategy.clone()),
        ("algorithm".into(), info.algorithm.clone()),
        ("transport".into(), info.transport.clone()),
        ("codec".into(), info.codec().unwrap_or("none").into()),
        ("workers".into(), info.workers.to_string()),
        ("shards".into(), info.shards.to_string()),
        ("hosts".into(), hosts(&info.hosts)),
    ];
    more_settings(info, &mut settings);
    if let Some(summary) = report.summary.as_ref().filter(|s| !s.weights_hash.is_empty()) {
        settings.push(("weights hash".into(), summary.weights_hash.clone()));
    }
    settings
}

/// Adds every setting of the run that is not among them yet.
pub(super) fn more_settings(info: &RunInfo, settings: &mut Vec<(String, String)>) {
    let mut more = Vec::new();
    flatten("", &info.settings, &mut more);
    more.retain(|(key, _)| settings.iter().all(|(known, _)| known != key));
    settings.extend(more);
}

/// Each host once; of many, how many.
fn hosts(of_ranks: &[String]) -> String {
    let mut hosts = of_ranks.to_vec();
    hosts.sort();
    hosts.dedup();
    if hosts.len() <= HOSTS { hosts.join(", ") } else { count(hosts.len() as f64) }
}

/// Nested tables as dotted keys.
fn flatten(prefix: &str, table: &toml::Table, into: &mut Vec<(String, String)>) {
    for (key, value) in table {
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(table) => flatten(&key, table, into),
            toml::Value::String(text) => into.push((key, text.clone())),
            other => into.push((key, other.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_run_can_leave_the_data() {
        let name = "</script><!--<script>{{data}}{{style}} \"'&";
        let info = RunInfo { name: name.into(), ..RunInfo::default() };
        let page = Report::new(&info, &[], None, None).html();
        let (_, after) = page.split_once("<script id=\"data\" type=\"application/json\">").unwrap();
        let (data, _) = after.split_once("</script>").unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["name"], name);
    }

    #[test]
    fn the_page_refers_to_nothing_outside_itself() {
        let page = Report::new(&RunInfo::default(), &[], None, None).html();
        let elsewhere = page.replace("http://www.w3.org/2000/svg", "").replace("url(#", "");
        for reference in ["http:", "https:", "//cdn", "src=", "@import", "url(", "fetch("] {
            assert!(!elsewhere.contains(reference), "{reference}");
        }
        assert!(page.contains("default-src 'none'"));
        assert!(!page.contains("{{"), "a mark was not filled in");
    }

    #[test]
    fn hosts_are_listed_once_and_counted_when_many() {
        let interleaved = ["b", "a", "b", "a"].map(String::from);
        assert_eq!(hosts(&interleaved), "a, b");
        let many: Vec<String> = (0..1000).map(|host| format!("node-{host}")).collect();
        assert_eq!(hosts(&many), "1,000");
    }

    #[test]
    fn nested_settings_become_dotted_keys() {
        let mut info = RunInfo { workers: 2, ..RunInfo::default() };
        info.settings =
            toml::from_str("workers = 9\nseed = 1\n[optimizer]\nname = \"sgd\"").unwrap();
        let settings = settings(&Report::new(&info, &[], None, None));
        let value = |key: &str| {
            let found: Vec<&str> =
                settings.iter().filter(|(k, _)| k == key).map(|(_, v)| v.as_str()).collect();
            found.join("|")
        };
        assert_eq!(value("optimizer.name"), "sgd");
        assert_eq!(value("seed"), "1");
        assert_eq!(value("workers"), "2");
    }
}
