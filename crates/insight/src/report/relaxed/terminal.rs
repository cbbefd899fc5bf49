//! The report of a relaxed run as text.

use super::{RelaxedReport, clocks, columns, loss, plural, rate};
use crate::relaxed::WorkerStats;
use crate::report::text::{Text, bar, stacked};
use crate::units::{bytes, count, duration, percent, times};

/// Workers shown one by one. More scroll the reasons of the answer out of sight.
const WORKERS: usize = 16;

/// Rows of the histogram.
const ROWS: u64 = 12;

/// Moves of the bound that are shown.
const MOVES: usize = 12;

pub(super) fn render(report: &RelaxedReport<'_>, width: usize) -> String {
    let mut out = Text::new(width);
    title(report, &mut out);
    if report.run.pushes > 0 {
        figures(report, &mut out);
        workers(report, &mut out);
        staleness(report, &mut out);
        moves(report, &mut out);
        levels(report, &mut out);
    }
    answer(report, &mut out);
    out.text
}

fn title(report: &RelaxedReport<'_>, out: &mut Text) {
    let run = report.run;
    out.wrapped("", &format!("{}: {}", run.info.name, report.subtitle()));
    let unfinished = if report.summary.is_none() { ", not finished" } else { "" };
    out.line(&format!(
        "{} of {} in {}{unfinished}",
        plural(run.pushes, "push"),
        plural(run.workers.len() as u64, "worker"),
        duration(run.seconds)
    ));
}

fn figures(report: &RelaxedReport<'_>, out: &mut Text) {
    let run = report.run;
    out.line("");
    let mut figure = |name: &str, value: String| out.line(&format!("  {name:<24}{value}"));
    figure("gradients per second", count(run.gradients_per_s()));
    if run.gradients_per_push() > 1 {
        let each = plural(run.gradients_per_push(), "gradient");
        figure("pushes per second", format!("{}, each of {each}", count(run.pushes_per_s)));
    }
    figure("updates per second", count(run.updates_per_s));
    figure("samples per second", count(run.samples_per_s));
    figure("blocked", format!("{} of the workers' time", percent(run.blocked_share)));
    let staleness = run.mean_staleness.map(|mean| format!("{} clocks, mean", clocks(mean)));
    figure("staleness", staleness.unwrap_or("not known".into()));
    let bound = run.bound().map_or("no bound".into(), |bound| format!("bound {bound}"));
    figure("furthest ahead", format!("{}, {bound}", plural(run.max_lead, "clock")));
    if run.dropped > 0 {
        figure("dropped", plural(run.dropped, "push"));
    }
    if run.restarts() > 0 {
        figure("restarts", count(run.restarts() as f64));
    }
    figure(
        "sent and received",
        format!("{} a push", bytes(run.bytes() as f64 / run.pushes as f64)),
    );
    figure("final loss", loss(run.final_loss()));
    if let Some(summary) = report.summary {
        if let Some(accuracy) = summary.accuracy {
            figure("held-out accuracy", format!("{:.2} %", accuracy * 100.0));
        }
        if let Some(exchanges) = summary.exchanges {
            figure("exchanges", count(exchanges as f64));
        }
    }
}

fn workers(report: &RelaxedReport<'_>, out: &mut Text) {
    out.line("");
    out.line("By worker: █ computing  ▒ blocked  ░ rest");
    out.line(&format!(
        "  {:>6}{:>9}{:>11}{:>10}{:>9}{:>7}{:>6}{:>7}",
        "worker", "pushes", "rate", "compute", "blocked", "stale", "lead", "lives"
    ));
    let room = out.width.saturating_sub(69);
    let shown = report.notable_workers(WORKERS);
    for worker in &shown {
        let WorkerStats { computing_share, blocked_share, .. } = **worker;
        let rest = (1.0 - computing_share - blocked_share).max(0.0);
        let parts = [('█', computing_share), ('▒', blocked_share), ('░', rest)];
        out.line(&format!(
            "  {:>6}{:>9}{:>11}{:>10}{:>9}{:>7}{:>6}{:>7}  {}",
            worker.worker,
            count(worker.pushes as f64),
            rate(worker.pushes_per_s),
            duration(worker.median_compute),
            percent(blocked_share),
            worker.mean_staleness.map_or("–".into(), clocks),
            worker.max_lead,
            worker.lives,
            stacked(parts, 1.0, room),
        ));
    }
    let all = report.run.workers.len();
    if shown.len() < all {
        out.line(&format!("  (the slowest {} of {all} workers)", shown.len()));
    }
}

fn staleness(report: &RelaxedReport<'_>, out: &mut Text) {
    if report.run.staleness.is_empty() {
        return;
    }
    out.line("");
    out.line("How stale gradients were, in clocks:");
    let room = out.width.saturating_sub(30);
    for (clocks, pushes) in columns(&report.run.staleness, ROWS) {
        let share = pushes as f64 / report.run.pushes as f64;
        let bar = bar(share, room, '█');
        out.line(&format!("  {clocks:>9}{:>9}{:>8}  {bar}", count(pushes as f64), percent(share)));
    }
}

fn moves(report: &RelaxedReport<'_>, out: &mut Text) {
    let moves = &report.run.moves;
    if moves.is_empty() {
        return;
    }
    out.line("");
    out.line("How the bound moved:");
    let skipped = moves.len().saturating_sub(MOVES);
    if skipped > 0 {
        out.line(&format!("  (after {})", plural(skipped as u64, "earlier move")));
    }
    for change in &moves[skipped..] {
        let mark = format!("  {:>9}  {} → {}  ", duration(change.time), change.from, change.to);
        out.wrapped(&mark, &change.reason);
    }
}

fn levels(report: &RelaxedReport<'_>, out: &mut Text) {
    let Some(advice) = &report.advice else { return };
    out.line("");
    out.line("What each level would give these workers, predicted:");
    let most = advice.predictions.iter().map(|level| level.pushes_per_s).fold(0.0, f64::max);
    let room = out.width.saturating_sub(43);
    for level in &advice.predictions {
        let mark = if level.level == advice.level { "→" } else { " " };
        out.line(&format!(
            "  {mark} {:<8}{:>10} gradients/s{:>7}  {}",
            level.level,
            count(level.pushes_per_s),
            times(level.ratio),
            bar(level.pushes_per_s / most, room, '█')
        ));
    }
}

fn answer(report: &RelaxedReport<'_>, out: &mut Text) {
    for finding in &report.answer.findings {
        out.line("");
        out.wrapped("", finding);
    }
    if !report.answer.advice.is_empty() {
        out.line("");
        out.line("Advice:");
    }
    for advice in &report.answer.advice {
        out.wrapped("- ", advice);
    }
    out.line("");
    out.wrapped("", &format!("Verdict: {}", report.answer.headline));
}
