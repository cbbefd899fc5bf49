//! What servers record, read independently of the program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use serde_json::Value;

/// A worker, and the life of it.
type Life = (u64, u64);

/// The pushes that one server has recorded, in order.
pub fn records(run_dir: &Path, server: usize) -> Vec<Value> {
    lines(&run_dir.join(format!("updates-{server}.jsonl")))
}

/// The lines of a file of JSON.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    text.lines().map(parse).collect()
}

/// A count in a record.
pub fn count(record: &Value, key: &str) -> u64 {
    record[key].as_u64().unwrap_or_else(|| panic!("no count {key}: {record}"))
}

/// How many updates the first server has recorded so far.
pub fn updates(run_dir: &Path) -> u64 {
    last(run_dir, 0).map_or(0, |record| count(&record, "update"))
}

/// How far the furthest of workers is that record for themselves.
pub fn furthest(run_dir: &Path, workers: usize) -> u64 {
    let clocks = (0..workers).filter_map(|worker| last(run_dir, worker));
    clocks.map(|record| count(&record, "clock")).max().unwrap_or(0)
}

/// The last complete record of a file; found quickly, however long that is.
fn last(run_dir: &Path, file: usize) -> Option<Value> {
    const LINES: u64 = 2048;
    let mut file = File::open(run_dir.join(format!("updates-{file}.jsonl"))).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LINES))).ok()?;
    let mut end = String::new();
    file.read_to_string(&mut end).ok()?;
    let complete = &end[..end.rfind('\n')?];
    let line = &complete[complete.rfind('\n').map_or(0, |at| at + 1)..];
    serde_json::from_str(line).ok()
}

/// Requires that every push is accounted for: on each server once, without a gap, in updates without a
/// gap; and on all servers alike, but for the last push of a life that was killed, which some may have
/// received and others not. Returns how many lives there were.
pub fn assert_adds_up(run_dir: &Path, servers: usize) -> usize {
    let mut books: Vec<BTreeMap<Life, BTreeSet<u64>>> = Vec::new();
    for server in 0..servers {
        let mut lives: BTreeMap<Life, BTreeSet<u64>> = BTreeMap::new();
        let mut numbers = BTreeSet::new();
        for record in records(run_dir, server) {
            let of = |key: &str| count(&record, key);
            let new = lives.entry((of("worker"), of("life"))).or_default().insert(of("push"));
            assert!(new, "server {server} has it twice: {record}");
            numbers.insert(of("update"));
        }
        numbers.remove(&0);
        let last = numbers.last().copied().unwrap_or(0);
        assert_eq!(numbers.len() as u64, last, "server {server} lacks an update");
        for (life, pushes) in &lives {
            let last = pushes.last().copied().unwrap_or(0);
            assert_eq!(pushes.len() as u64, last, "server {server} lacks a push of {life:?}");
        }
        books.push(lives);
    }
    let lives: BTreeSet<Life> = books.iter().flat_map(BTreeMap::keys).copied().collect();
    let newest: BTreeMap<u64, u64> = lives.iter().copied().collect();
    for (worker, life) in &lives {
        let on = |book: &BTreeMap<Life, BTreeSet<u64>>| {
            book.get(&(*worker, *life)).map_or(0, BTreeSet::len)
        };
        let least = books.iter().map(on).min().unwrap_or(0);
        let most = books.iter().map(on).max().unwrap_or(0);
        let allowed = usize::from(newest[worker] != *life);
        assert!(
            most - least <= allowed,
            "worker {worker}, life {life}: some server has {most} pushes, another {least}"
        );
    }
    lives.len()
}
