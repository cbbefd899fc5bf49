//! The journal of a server whose process is killed while it writes.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use unisono_relaxed::server::journal::{Journal, Options};

const FOLDER: &str = "UNISONO_TEST_JOURNAL";

/// Update `i` has `i` as its header, and as every number of its payload. Long enough that a kill often
/// comes in the middle.
const NUMBERS: usize = 300_000;

/// The process that is killed, which does nothing unless the test below starts it: appends updates, and says when each is safe. With every seventh, it
/// takes a snapshot, of which the header is the last update in it.
#[test]
fn appends_until_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let (mut journal, next) = open(Path::new(&folder));
    let mut out = std::io::stdout();
    for update in next.. {
        let payload = vec![update as f32; NUMBERS];
        let halves = payload.split_at(NUMBERS / 2);
        journal.append(&update.to_le_bytes(), &[halves.0, halves.1]).unwrap();
        writeln!(out, "safe {update}").unwrap();
        if update % 7 == 0 {
            journal.snapshot(&update.to_le_bytes(), [&payload[..]]).unwrap();
        }
    }
}

#[test]
fn what_was_safe_survives_kill_9() {
    let folder = tempfile::tempdir().unwrap();
    let mut safe = 0;
    for round in 0..20 {
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["appends_until_killed", "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        let mut safe_now = lines.filter_map(|line| {
            line.unwrap().split_once("safe ").map(|(_, update)| update.parse::<u64>().unwrap())
        });
        for update in safe_now.by_ref().take(1 + round % 5) {
            assert_eq!(update, safe + 1, "an update was lost or came twice");
            safe = update;
        }
        writer.kill().unwrap();
        let status = writer.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "the writer ended by itself");
        // What it said before it died.
        safe = safe_now.last().unwrap_or(safe);
        let (_, next) = open(folder.path());
        assert!(next == safe + 1 || next == safe + 2, "{next} after {safe}");
        // An update that was complete, but not yet said to be safe, stays.
        safe = next - 1;
    }
    assert!(safe >= 20);
}

/// Opens the folder, requires that every update is there once, and returns the number of the next.
fn open(folder: &Path) -> (Journal, u64) {
    let (journal, recovered) = Journal::open(folder, Options::default()).unwrap();
    let number = |header: &[u8], payload: &[f32]| {
        let number = u64::from_le_bytes(header.try_into().unwrap());
        assert_eq!(payload.len(), NUMBERS);
        assert!(payload.iter().all(|x| *x == number as f32));
        number
    };
    let mut last = recovered.snapshot.map_or(0, |state| number(&state.header, &state.payload));
    for entry in recovered.entries {
        let entry = entry.unwrap();
        last += 1;
        assert_eq!(number(&entry.header, &entry.payload), last);
    }
    (journal, last + 1)
}
