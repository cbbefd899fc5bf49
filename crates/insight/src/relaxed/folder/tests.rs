use std::fs::File;

use tempfile::TempDir;

use super::*;
use crate::relaxed::tests::{info, unbounded};

/// A run of two servers, with a line of updates for every push of three workers. Their times have
/// few digits, so that they survive JSON to the bit.
fn run_of(seconds: f64) -> (TempDir, RelaxedFolder, Vec<UpdateRecord>) {
    let dir = TempDir::new().unwrap();
    let folder = RelaxedFolder::create(dir.path().join("run"), &info("ssp:3", 3)).unwrap();
    let records = unbounded(&[(0.125, 0.0), (0.125, 0.0), (0.25, 0.0)], seconds);
    for server in 0..2 {
        let mut log = UpdateLog::create(RelaxedFolder::updates(folder.path(), server)).unwrap();
        log.append(&records[0]).unwrap();
        log.append_all(&records[1..]).unwrap();
    }
    (dir, folder, records)
}

fn add_to(path: &Path, text: &str) {
    let mut file = File::options().append(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

fn lines(path: &Path) -> Vec<UpdateRecord> {
    read_lines(path, "record").unwrap()
}

/// Goes on after a crash whose server remembers everything up to this update.
fn reopen(path: &Path, last_update: u64) -> Result<UpdateLog, FolderError> {
    Log::reopen_keeping(path, |record: &UpdateRecord| record.update <= last_update)
}

#[test]
fn what_was_written_is_read_back() {
    let (_dir, folder, records) = run_of(5.0);
    let path = folder.path().to_path_buf();
    let change = Move { time: 1.0, from: 3, to: 4, reason: "much waiting".into() };
    MoveLog::create(RelaxedFolder::moves(&path)).unwrap().append(&change).unwrap();
    assert!(RelaxedFolder::is_relaxed(&path));
    assert!(RelaxedFolder::open(&path).unwrap().summary.is_none());

    let outcome =
        Outcome { accuracy: Some(0.975), held_out_loss: Some(0.08), weights_hash: "abc".into() };
    let finished = folder.finish(outcome, None).unwrap();
    let read = RelaxedFolder::open(&path).unwrap();
    assert_eq!(read.run, finished.run);
    assert_eq!(read.summary.as_ref().unwrap().advice, finished.summary.unwrap().advice);
    assert_eq!(read.run.moves, [change]);
    let summary = read.summary.unwrap();
    assert_eq!((summary.servers, summary.pushes), (2, records.len() as u64));
    assert_eq!((summary.accuracy, summary.bound), (Some(0.975), Some(3)));
    assert!(summary.is_balanced(), "{}", summary.ledger);
    assert!(fs::read_to_string(path.join(REPORT)).unwrap().contains("</html>"));
    let value: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join(SUMMARY)).unwrap()).unwrap();
    assert_eq!(value["staleness"], serde_json::json!([[0, records.len()]]));
}

#[test]
fn a_killed_server_costs_at_most_the_line_it_was_writing() {
    let (_dir, folder, records) = run_of(2.0);
    let path = RelaxedFolder::updates(folder.path(), 1);
    add_to(&path, "{\"time\":3.0,\"upda");
    assert_eq!(lines(&path), records);
    // A line is complete with its end, not before.
    let whole = serde_json::to_string(&records[0]).unwrap();
    let (_dir, folder, records) = run_of(2.0);
    let path = RelaxedFolder::updates(folder.path(), 1);
    add_to(&path, &whole);
    assert_eq!(lines(&path), records);

    let mut log = reopen(&path, u64::MAX).unwrap();
    log.append(&records[3]).unwrap();
    let read = lines(&path);
    assert_eq!((&read[..records.len()], &read[records.len()..]), (&records[..], &records[3..4]));
}

#[test]
fn reopening_forgets_updates_that_will_be_replayed() {
    let (_dir, folder, mut records) = run_of(2.0);
    let path = RelaxedFolder::updates(folder.path(), 0);
    let dropped = UpdateRecord { update: 0, push: 99, ..records[0].clone() };
    reopen(&path, u64::MAX).unwrap().append(&dropped).unwrap();
    let mut log = reopen(&path, 7).unwrap();
    let mut expected = records[..7].to_vec();
    expected.push(dropped);
    assert_eq!(lines(&path), expected);
    for record in &records[7..] {
        log.append(record).unwrap();
    }
    // Everything is there again, and nothing twice.
    let mut read = lines(&path);
    read.retain(UpdateRecord::is_applied);
    records.sort_by_key(|record| record.update);
    read.sort_by_key(|record| record.update);
    assert_eq!(read, records);

    UpdateLog::reopen_keeping(&path, |record: &UpdateRecord| record.worker == 2).unwrap();
    assert!(lines(&path).iter().all(|record| record.worker == 2) && !lines(&path).is_empty());
}

#[test]
fn a_log_that_does_not_exist_is_begun() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("updates-0.jsonl");
    reopen(&path, 0).unwrap();
    assert_eq!(lines(&path), []);
    let text = UpdateLog::create(&path).unwrap_err().to_string();
    assert!(text.contains("updates-0.jsonl"), "{text}");
}

#[test]
fn a_broken_line_is_named() {
    let (_dir, folder, records) = run_of(2.0);
    let path = RelaxedFolder::updates(folder.path(), 1);
    add_to(&path, "{\"time\":3.0\n");
    let text = RelaxedFolder::open(folder.path()).unwrap_err().to_string();
    let expected = format!("updates-1.jsonl:{}: not the record of an update", records.len() + 1);
    assert!(text.contains(&expected) && !text.contains('\n'), "{text}");
}

#[test]
fn a_missing_shard_is_a_shard_without_records() {
    let (_dir, folder, _) = run_of(2.0);
    fs::rename(RelaxedFolder::updates(folder.path(), 1), RelaxedFolder::updates(folder.path(), 2))
        .unwrap();
    fs::write(folder.path().join("updates-x.jsonl"), "").unwrap();
    fs::write(folder.path().join("updates-99999999.jsonl"), "").unwrap();
    let saved = RelaxedFolder::open(folder.path()).unwrap();
    assert_eq!(saved.run.servers(), 3);
    let text = saved.run.ledger().unwrap_err().to_string();
    assert!(text.starts_with("updates-1.jsonl lacks push 1 of worker 0"), "{text}");
    saved.write().unwrap();
    assert!(saved.report().terminal(100).contains("does not add up"));
}

#[test]
fn an_earlier_run_is_never_overwritten() {
    let (_dir, folder, _) = run_of(1.0);
    let error = RelaxedFolder::create(folder.path(), &info("async", 3)).unwrap_err();
    assert!(matches!(error, FolderError::Occupied { .. }), "{error}");
    let error = RelaxedFolder::open(folder.path().join("nowhere")).unwrap_err();
    assert!(matches!(error, FolderError::NotARun { .. }), "{error}");
}

/// `/dev/full` refuses every write as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_says_so() {
    let (_dir, folder, records) = run_of(1.0);
    let path = RelaxedFolder::updates(folder.path(), 0);
    let mut log = reopen(&path, u64::MAX).unwrap();
    log.file = File::options().append(true).open("/dev/full").unwrap();
    let text = log.append(&records[0]).unwrap_err().to_string();
    assert!(text.contains("updates-0.jsonl") && text.contains("free some space"), "{text}");
}
