//! The report as text: what `unisono report DIR` prints.

use super::text::{Text, bar, stacked};
use super::{Choice, Report, workers};
use crate::breakdown::Parts;
use crate::units::{count, duration, percent};

/// Ranks shown one by one. More scroll the verdict's reasons out of sight.
const RANKS: usize = 16;

/// A part of a step, and its fill in a bar.
struct Part {
    name: &'static str,
    fill: char,
    of: fn(&Parts) -> f64,
}

/// In the order of the page.
const PARTS: [Part; 4] = [
    Part { name: "compute", fill: '█', of: |parts| parts.compute },
    Part { name: "exposed communication", fill: '▓', of: |parts| parts.exposed },
    Part { name: "waiting for a straggler", fill: '▒', of: |parts| parts.straggler },
    Part { name: "rest", fill: '░', of: |parts| parts.rest },
];

pub(super) fn render(report: &Report, width: usize) -> String {
    let mut out = Text::new(width);
    title(report, &mut out);
    if report.run.measured() > 0 {
        typical_step(report, &mut out);
        figures(report, &mut out);
        choice(report, &mut out);
        if report.run.ranks.len() > 1 {
            ranks(report, &mut out);
        }
    }
    if let Some(timeline) = &report.timeline {
        workers::terminal(timeline, &mut out);
    }
    verdict(report, &mut out);
    out.text
}

fn title(report: &Report, out: &mut Text) {
    out.wrapped("", &format!("{}: {}", report.info.name, report.info.subtitle()));
    let run = &report.run;
    let unfinished = if report.summary.is_none() { ", not finished" } else { "" };
    out.line(&format!(
        "{} {}, the first {} of them warm-up{unfinished}",
        count(run.recorded as f64),
        if run.recorded == 1 { "step" } else { "steps" },
        run.warm_up
    ));
    if let Some(rates) = report.info.earlier_rates() {
        out.wrapped("", &format!("learning rate: {rates}"));
    }
}

fn typical_step(report: &Report, out: &mut Text) {
    let parts = &report.run.parts;
    out.line("");
    out.line(&format!(
        "A typical step: {}, {} samples/s",
        duration(parts.total()),
        count(report.run.samples_per_s)
    ));
    let room = out.width.saturating_sub(48);
    for Part { name, fill, of } in PARTS {
        let share = parts.share(of(parts));
        let bar = bar(share, room, fill);
        out.line(&format!("  {name:<24}{:>9}{:>7}  {bar}", duration(of(parts)), percent(share)));
    }
}

fn figures(report: &Report, out: &mut Text) {
    let run = &report.run;
    out.line("");
    let mut figure = |name: &str, value: String| out.line(&format!("  {name:<24}{value}"));
    figure("slowest 1 % of steps", format!("{} and more", duration(run.p99)));
    if let Some(overlap) = run.overlap() {
        let hidden = format!("{} a step, {} of it hidden", duration(run.comm), percent(overlap));
        figure("communication", hidden);
    }
    if let Some(share) = run.coding_share() {
        let coding = format!("{} a step, {} of it", duration(run.coding), percent(share));
        figure("  coding", coding);
    }
    if let Some(hidden) = run.hidden_of_hideable() {
        figure(
            "overlap",
            format!("{} of the {} that can hide", percent(hidden), duration(run.hideable)),
        );
    }
    if let Some(sent) = report.sent() {
        figure("sent by all ranks", sent);
    }
    if let Some((with, before)) = report.sent_by_codec() {
        figure("  with the codec", with);
        figure("  before it", before);
    }
    if run.has_local_steps() {
        figure("agreed", format!("in {} of {} steps", run.agreed, run.recorded));
    }
    if let Some(loss) = report.final_loss() {
        figure("final loss", loss);
    }
    if let Some(summary) = &report.summary {
        // Of weights that are no numbers, what they answer is chance.
        if let (Some(accuracy), None) = (summary.accuracy, run.diverged) {
            figure("held-out accuracy", format!("{:.2} %", accuracy * 100.0));
        }
        if let Some(efficiency) = summary.scaling_efficiency {
            figure("scaling", format!("{} of {} workers", percent(efficiency), summary.workers));
        }
    }
}

/// What was predicted of each codec, and of the chosen one what was measured.
fn choice(report: &Report, out: &mut Text) {
    let Some(Choice { basis, rows, result, reason }) = &report.choice else { return };
    out.line("");
    out.wrapped("", &format!("Codec: {basis}"));
    let longest = rows.iter().map(|row| row.codec.chars().count()).max().unwrap_or(0);
    let codecs = longest.clamp(8, 24) + 2;
    out.line(&format!("    {:<codecs$}{:>9}{:>9}{:>10}", "codec", "step", "coding", "bytes"));
    for row in rows {
        let mark = if row.chosen { "→" } else { " " };
        let mut line = format!(
            "  {mark} {:<codecs$}{:>9}{:>9}{:>10}",
            row.codec, row.step, row.coding, row.bytes
        );
        if !row.measured.is_empty() {
            line += &format!("   measured {}", row.measured);
        }
        if !row.error.is_empty() {
            line += &format!(", predicted {}", row.error);
        }
        out.line(&line);
    }
    out.wrapped("  ", result);
    out.wrapped("  ", reason);
}

fn ranks(report: &Report, out: &mut Text) {
    let run = &report.run;
    out.line("");
    let legend: Vec<String> =
        PARTS.iter().map(|part| format!("{} {}", part.fill, part.name)).collect();
    out.line(&format!("By rank: {}", legend.join("  ")));
    out.line(&format!(
        "  {:>4}  {:<14}{:>9}{:>9}{:>8}",
        "rank", "host", "compute", "late by", "last"
    ));
    let longest = run.ranks.iter().map(|rank| rank.parts.total()).fold(0.0, f64::max);
    let room = out.width.saturating_sub(50);
    let shown = report.notable_ranks(RANKS);
    for rank in &shown {
        let stats = &run.ranks[*rank];
        let host: String = report.info.host(*rank).unwrap_or("").chars().take(13).collect();
        out.line(&format!(
            "  {rank:>4}  {host:<14}{:>9}{:>9}{:>8}  {}",
            duration(stats.parts.compute),
            duration(stats.lateness),
            percent(stats.last_share),
            stacked(PARTS.map(|part| (part.fill, (part.of)(&stats.parts))), longest, room),
        ));
    }
    if shown.len() < run.ranks.len() {
        out.line(&format!("  (the latest {} of {} ranks)", shown.len(), run.ranks.len()));
    }
}

fn verdict(report: &Report, out: &mut Text) {
    let verdict = &report.verdict;
    for finding in &verdict.findings {
        out.line("");
        out.wrapped("", finding);
    }
    if !verdict.advice.is_empty() {
        out.line("");
        out.line("What would help:");
    }
    for advice in &verdict.advice {
        out.wrapped("- ", advice);
    }
    out.line("");
    out.wrapped("", &format!("Verdict: {}", verdict.headline));
}
