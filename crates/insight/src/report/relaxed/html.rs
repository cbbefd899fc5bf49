//! The report of a relaxed run as one page, drawn by a script from data that it holds.

use serde::Serialize;

use super::{Answer, RelaxedReport, clocks, columns, loss, plural, rate};
use crate::relaxed::WorkerStats;
use crate::relaxed::advice::LevelPrediction;
use crate::report::bins::{bins, mean, rounded};
use crate::report::html::{STYLE, Tile, fill_in, more_settings};
use crate::units::{count, duration, percent};
use crate::updates::Move;

const PAGE: &str = include_str!("page.html");
const SCRIPT: &str = concat!(include_str!("../draw.js"), include_str!("page.js"));

/// Points along the curve of the loss. More than a wide screen resolves would only make the page
/// heavier.
const POINTS: usize = 240;

/// Workers listed one by one.
const WORKERS: usize = 32;

/// Columns of a histogram.
const COLUMNS: u64 = 24;

/// Moves of the bound that are listed.
const MOVES: usize = 100;

pub(super) fn render(report: &RelaxedReport<'_>) -> String {
    fill_in(PAGE, STYLE, SCRIPT, &Page::of(report))
}

/// What the script draws. Times are seconds.
#[derive(Serialize)]
struct Page<'a> {
    name: &'a str,
    subtitle: String,
    verdict: &'a Answer,
    tiles: Vec<Tile>,
    workers: Vec<Worker>,
    workers_in_all: usize,
    staleness: Vec<(String, u64)>,
    leads: Vec<(String, u64)>,
    bound: Option<u64>,
    /// Time and loss.
    losses: Vec<(f64, f64)>,
    levels: &'a [LevelPrediction],
    advised: Option<&'a str>,
    moves: &'a [Move],
    moves_in_all: usize,
    settings: Vec<(String, String)>,
}

/// A row of the table; the shares are the bar in it.
#[derive(Serialize)]
struct Worker {
    worker: u32,
    pushes: String,
    dropped: u64,
    rate: String,
    compute: String,
    computing: f64,
    blocked: f64,
    staleness: String,
    lead: u64,
    lives: u64,
}

impl Page<'_> {
    fn of<'a>(report: &'a RelaxedReport<'_>) -> Page<'a> {
        let run = report.run;
        let advice = report.advice.as_ref();
        Page {
            name: &run.info.name,
            subtitle: report.subtitle(),
            verdict: &report.answer,
            tiles: tiles(report),
            workers: report.notable_workers(WORKERS).into_iter().map(Worker::of).collect(),
            workers_in_all: run.workers.len(),
            staleness: columns(&run.staleness, COLUMNS),
            leads: columns(&run.leads, COLUMNS),
            bound: run.bound(),
            losses: curve(&run.losses),
            levels: advice.map_or(&[], |advice| &advice.predictions),
            advised: advice.map(|advice| advice.level.as_str()),
            moves: &run.moves[run.moves.len().saturating_sub(MOVES)..],
            moves_in_all: run.moves.len(),
            settings: settings(report),
        }
    }
}

impl Worker {
    fn of(stats: &WorkerStats) -> Worker {
        Worker {
            worker: stats.worker,
            pushes: count(stats.pushes as f64),
            dropped: stats.dropped,
            rate: rate(stats.pushes_per_s),
            compute: duration(stats.median_compute),
            computing: rounded(stats.computing_share),
            blocked: rounded(stats.blocked_share),
            staleness: match (stats.mean_staleness, stats.max_staleness) {
                (Some(mean), Some(most)) => format!("{} / {}", clocks(mean), clocks(most)),
                _ => "–".into(),
            },
            lead: stats.max_lead,
            lives: stats.lives,
        }
    }
}

/// Neighbouring points become one. NaN, which is `null` in JSON, where any of them was no number.
fn curve(losses: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let point = |bin: std::ops::Range<usize>| {
        let points = &losses[bin];
        let of = |values: &dyn Fn(&(f64, f64)) -> f64| {
            rounded(mean(points.iter().map(values)).unwrap_or(f64::NAN))
        };
        (of(&|point| point.0), of(&|point| point.1))
    };
    bins(losses.len(), POINTS).into_iter().map(point).collect()
}

fn tiles(report: &RelaxedReport<'_>) -> Vec<Tile> {
    let run = report.run;
    let (staleness, of) = match run.mean_staleness {
        Some(mean) => (clocks(mean), "clocks, mean over all pushes"),
        None => ("not known".into(), "there are no common weights"),
    };
    let bound = run.bound().map_or("no bound".into(), |bound| format!("{bound} allowed"));
    let gradients = format!("{} in {}", plural(run.pushes, "push"), duration(run.seconds));
    let mut tiles = vec![
        Tile::new("Gradients per second", count(run.gradients_per_s()), gradients),
        Tile::new("Updates per second", count(run.updates_per_s), plural(run.updates, "update")),
        Tile::new("Throughput", count(run.samples_per_s), "samples per second"),
        Tile::new("Blocked", percent(run.blocked_share), "of the workers' time"),
        Tile::new("Staleness", staleness, of),
        Tile::new("Furthest ahead", plural(run.max_lead, "clock"), bound),
    ];
    if run.dropped > 0 {
        tiles.push(Tile::new("Dropped", count(run.dropped as f64), "pushes that were too stale"));
    }
    if run.restarts() > 0 {
        tiles.push(Tile::new("Restarts", count(run.restarts() as f64), "of workers"));
    }
    if let Some(exchanges) = report.summary.and_then(|summary| summary.exchanges) {
        tiles.push(Tile::new("Exchanges", count(exchanges as f64), "between two workers"));
    }
    if run.pushes > 0 {
        let note = match report.summary.and_then(|summary| summary.accuracy) {
            Some(accuracy) => format!("held-out accuracy {:.2} %", accuracy * 100.0),
            None => "mean of the last pushes".into(),
        };
        tiles.push(Tile::new("Final loss", loss(run.final_loss()), note));
    }
    tiles
}

fn settings(report: &RelaxedReport<'_>) -> Vec<(String, String)> {
    let info = &report.run.info;
    let mut settings = vec![
        ("model".into(), info.model.clone()),
        ("data".into(), info.data.clone()),
        ("strategy".into(), info.strategy.clone()),
        ("stale".into(), report.run.stale().to_owned()),
        ("transport".into(), info.transport.clone()),
        ("codec".into(), info.codec().unwrap_or("none").into()),
        ("workers".into(), info.workers.to_string()),
        ("servers".into(), report.run.servers().to_string()),
    ];
    more_settings(info, &mut settings);
    if let Some(summary) = report.summary {
        settings.push(("weights hash".into(), summary.weights_hash.clone()));
    }
    settings
}
