//! The lives of the workers of an elastic run, reduced to what a screen can show.
//!
//! Time is cut into columns, and neighbouring workers share a row if there are many. A cell shows the state
//! that a worker was in for most of the time, and of several workers the one furthest from being a member: a
//! single one that is gone must not vanish among the others. What is shorter than a column is still there as
//! the beginning of another life, an epoch, or a recovery.

use serde::Serialize;

use super::bins::{bins, rounded};
use super::text::Text;
use crate::membership::{Epoch, Life, Recovery, State, Timeline, WorkerId};
use crate::units::{count, counted, duration};

/// Columns on the page: cells of about two pixels.
const COLUMNS: usize = 480;

/// Rows on the page, which must fit on a screen.
const ROWS: usize = 64;

/// Rows in the terminal.
const TERMINAL_ROWS: usize = 16;

/// Epochs and recoveries that can be told apart on the page.
const MARKS: usize = 120;

/// Recoveries listed one by one.
const LISTED: usize = 16;

/// What the page draws. Times are seconds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Workers {
    /// How long all of it took.
    end: f64,
    columns: usize,
    rows: Vec<Row>,
    epochs: Vec<EpochMark>,
    recoveries: Vec<RecoveryMark>,
    listed: Vec<Listed>,
    recoveries_in_all: usize,
    note: String,
}

/// One worker, or several neighbours.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    /// The first and the last worker.
    workers: (u32, u32),
    /// The state in each column, as a letter: m, r, s, g; or a blank where there was no process yet.
    cells: String,
    /// In which columns another life begins.
    begins: Vec<usize>,
}

/// Epochs that began at about the same time.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct EpochMark {
    at: f64,
    first: u64,
    last: u64,
    /// Of the last of them.
    members: usize,
}

/// Recoveries of about the same time.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct RecoveryMark {
    at: f64,
    count: usize,
    /// The longest of them.
    seconds: f64,
}

/// A recovery in words.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Listed {
    at: String,
    epoch: String,
    lost: String,
    took: String,
    members: String,
    step: String,
    cost: String,
}

impl Workers {
    pub fn of(timeline: &Timeline) -> Workers {
        let recoveries = &timeline.recoveries;
        let numbers = timeline.workers().len();
        let epochs = counted(timeline.epochs.len(), "epoch");
        Workers {
            end: rounded(timeline.end),
            columns: COLUMNS,
            rows: rows(timeline, ROWS, COLUMNS),
            epochs: epoch_marks(&timeline.epochs, timeline.end),
            recoveries: recovery_marks(recoveries, timeline.end),
            listed: longest(recoveries, LISTED).map(Listed::of).collect(),
            recoveries_in_all: recoveries.len(),
            note: format!("{}, {epochs} in {}", counted(numbers, "worker"), duration(timeline.end)),
        }
    }
}

/// As text: who was there when, how many were members, and what the longest recoveries cost.
pub(super) fn terminal(timeline: &Timeline, out: &mut Text) {
    let room = out.width.saturating_sub(18).max(10);
    out.line("");
    out.line(&format!(
        "Workers over {}: █ member  ▒ spare  ░ starting  · gone  │ started again",
        duration(timeline.end)
    ));
    for row in rows(timeline, TERMINAL_ROWS, room) {
        let name = match row.workers {
            (first, last) if first == last => format!("worker {first}"),
            (first, last) => format!("{first} to {last}"),
        };
        let mut cells: Vec<char> = row.cells.chars().map(fill).collect();
        row.begins.iter().for_each(|column| cells[*column] = '│');
        out.line(&format!("  {name:<14}{}", cells.into_iter().collect::<String>()));
    }
    out.line(&format!("  {:<14}{}", "members", members_line(timeline, room)));
    let listed: Vec<Listed> = longest(&timeline.recoveries, LISTED).map(Listed::of).collect();
    if listed.is_empty() {
        return;
    }
    out.line("");
    match timeline.recoveries.len() {
        all if all > listed.len() => {
            out.line(&format!("The {} longest of {} recoveries:", listed.len(), count(all as f64)));
        }
        _ => out.line("Recoveries:"),
    }
    out.line(&format!("  {:>9}{:>7}{:>8}{:>10}  lost: cost", "at", "epoch", "step", "took"));
    for Listed { at, epoch, lost, took, step, cost, .. } in listed {
        let mark = format!("  {at:>9}{epoch:>7}{step:>8}{took:>10}  ");
        out.wrapped(&mark, &format!("{lost}: {cost}"));
    }
}

fn fill(cell: char) -> char {
    match cell {
        'm' => '█',
        'r' => '▒',
        's' => '░',
        'g' => '·',
        _ => ' ',
    }
}

/// How many members each epoch had, where it began; a dot where there is no room for a number.
fn members_line(timeline: &Timeline, room: usize) -> String {
    let mut line = vec![' '; room];
    let mut free = 0;
    for epoch in &timeline.epochs {
        let column = column(epoch.at, timeline.end, room);
        let text: Vec<char> = epoch.members.len().to_string().chars().collect();
        if column >= free && column + text.len() <= room {
            line[column..column + text.len()].copy_from_slice(&text);
            free = column + text.len() + 1;
        } else if line[column] == ' ' {
            line[column] = '.';
        }
    }
    line.into_iter().collect()
}

fn column(at: f64, end: f64, columns: usize) -> usize {
    let share = if end > 0.0 { at / end } else { 0.0 };
    ((share * columns as f64) as usize).min(columns - 1)
}

fn rows(timeline: &Timeline, at_most: usize, columns: usize) -> Vec<Row> {
    let numbers: Vec<u32> = timeline.workers().into_keys().collect();
    let mut lives: Vec<&Life> = timeline.lives.iter().collect();
    // Stable: the lives of one number stay in order.
    lives.sort_by_key(|life| life.worker.number);
    let of = |number: u32| {
        let start = lives.partition_point(|life| life.worker.number < number);
        let end = lives.partition_point(|life| life.worker.number <= number);
        &lives[start..end]
    };
    let row = |row: std::ops::Range<usize>| {
        let numbers = &numbers[row];
        let mut cells = vec![None; columns];
        let mut begins = Vec::new();
        for number in numbers {
            let lives = of(*number);
            let shown = dominant(lives, timeline.end, columns);
            cells.iter_mut().zip(shown).for_each(|(cell, state)| *cell = state.max(*cell));
            let began = |life: &&Life| life.states.first().map_or(0.0, |(at, _)| *at);
            let again = lives.iter().skip(1).map(began);
            begins.extend(again.map(|at| column(at, timeline.end, columns)));
        }
        begins.sort_unstable();
        begins.dedup();
        let cells = cells.into_iter().map(letter).collect();
        Row { workers: (numbers[0], numbers[numbers.len() - 1]), cells, begins }
    };
    bins(numbers.len(), at_most).into_iter().map(row).collect()
}

fn letter(state: Option<State>) -> char {
    match state {
        None => ' ',
        Some(State::Member) => 'm',
        Some(State::Spare) => 'r',
        Some(State::Starting) => 's',
        Some(State::Gone) => 'g',
    }
}

/// The state that a worker was in for most of each column, if it was there.
fn dominant(lives: &[&Life], end: f64, columns: usize) -> Vec<Option<State>> {
    let states: Vec<(f64, State)> =
        lives.iter().flat_map(|life| life.states.iter().copied()).collect();
    let mut time = vec![[0.0; 4]; columns];
    let width = if end > 0.0 { end / columns as f64 } else { 1.0 };
    for (index, (from, state)) in states.iter().enumerate() {
        let until = states.get(index + 1).map_or(end, |(at, _)| *at);
        let (first, last) = (column(*from, end, columns), column(until, end, columns));
        for (cell, time) in time.iter_mut().enumerate().take(last + 1).skip(first) {
            let (begin, finish) = (cell as f64 * width, (cell + 1) as f64 * width);
            time[*state as usize] += (until.min(finish) - from.max(begin)).max(0.0);
        }
    }
    let all = [State::Member, State::Spare, State::Starting, State::Gone];
    let longest = |time: [f64; 4]| {
        let present = all.into_iter().filter(|state| time[*state as usize] > 0.0);
        present.max_by(|a, b| time[*a as usize].total_cmp(&time[*b as usize]))
    };
    time.into_iter().map(longest).collect()
}

fn epoch_marks(epochs: &[Epoch], end: f64) -> Vec<EpochMark> {
    let mut marks: Vec<(usize, EpochMark)> = Vec::new();
    for epoch in epochs {
        let place = column(epoch.at, end, MARKS);
        let (number, members) = (epoch.number, epoch.members.len());
        match marks.last_mut() {
            Some((last, mark)) if *last == place => (mark.last, mark.members) = (number, members),
            _ => {
                let at = rounded(epoch.at);
                marks.push((place, EpochMark { at, first: number, last: number, members }));
            }
        }
    }
    marks.into_iter().map(|(_, mark)| mark).collect()
}

fn recovery_marks(recoveries: &[Recovery], end: f64) -> Vec<RecoveryMark> {
    let mut marks: Vec<(usize, RecoveryMark)> = Vec::new();
    for recovery in recoveries {
        let place = column(recovery.at, end, MARKS);
        let seconds = rounded(recovery.seconds);
        match marks.last_mut() {
            Some((last, mark)) if *last == place => {
                mark.count += 1;
                mark.seconds = mark.seconds.max(seconds);
            }
            _ => {
                let at = rounded(recovery.at);
                marks.push((place, RecoveryMark { at, count: 1, seconds }));
            }
        }
    }
    marks.into_iter().map(|(_, mark)| mark).collect()
}

/// The longest recoveries, in the order in which they happened.
fn longest(recoveries: &[Recovery], at_most: usize) -> impl Iterator<Item = &Recovery> {
    let mut order: Vec<usize> = (0..recoveries.len()).collect();
    order.sort_by(|a, b| recoveries[*b].seconds.total_cmp(&recoveries[*a].seconds));
    order.truncate(at_most);
    order.sort_unstable();
    order.into_iter().map(|index| &recoveries[index])
}

impl Listed {
    fn of(recovery: &Recovery) -> Listed {
        let first = &recovery.first;
        let mut cost = vec![match first.redone {
            true => "step computed again".to_owned(),
            false => "no step computed again".to_owned(),
        }];
        if first.behind > 0 {
            cost.push(format!("{} given state", counted(first.behind as usize, "worker")));
        }
        if first.from_checkpoint {
            cost.push("back to the last checkpoint".into());
        }
        Listed {
            at: duration(recovery.at),
            epoch: first.epoch.to_string(),
            lost: names(&recovery.lost),
            took: duration(recovery.seconds),
            members: recovery.members.to_string(),
            step: count(first.step as f64),
            cost: cost.join(", "),
        }
    }
}

/// "worker 2", "workers 0, 2", "5 workers".
fn names(workers: &[WorkerId]) -> String {
    let mut numbers: Vec<u32> = workers.iter().map(|worker| worker.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    match numbers[..] {
        [] => "-".into(),
        [one] => format!("worker {one}"),
        [a, b] => format!("workers {a}, {b}"),
        [a, b, c] => format!("workers {a}, {b}, {c}"),
        _ => counted(numbers.len(), "worker"),
    }
}

#[cfg(test)]
mod tests;
