use std::collections::BTreeMap;
use std::fs::File;
use std::thread;

use super::*;

/// What a folder leads to: the snapshot's header, and those of the updates after it.
type State = (Option<Vec<u8>>, Vec<Vec<u8>>);

/// Reads a folder, and compares every payload with its header's.
fn state(folder: &Path) -> Result<State, JournalError> {
    let (_journal, recovered) = open(folder)?;
    let checked = |record: Record| {
        assert_eq!(record.payload, payload(&record.header));
        record.header
    };
    let entries = recovered.entries.map(|entry| entry.map(checked));
    Ok((recovered.snapshot.map(checked), entries.collect::<Result<Vec<_>, _>>()?))
}

fn open(folder: &Path) -> Result<(Journal, Recovered), JournalError> {
    Journal::open(folder, Options { sync: false, patience: Duration::ZERO })
}

/// Numbers that belong to a header.
fn payload(header: &[u8]) -> Vec<f32> {
    header.iter().flat_map(|byte| [f32::from(*byte), 0.5, -1.0]).collect()
}

fn append(journal: &mut Journal, header: &[u8]) {
    let payload = payload(header);
    let (first, second) = payload.split_at(payload.len() / 2);
    journal.append(header, &[first, &[], second]).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |name: String| (name.clone(), fs::read(folder.join(name)).unwrap());
    names(folder).into_iter().map(file).collect()
}

fn folder_of(files: &BTreeMap<String, Vec<u8>>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
    folder
}

/// Three updates of different lengths, one of them empty, and where each ends.
fn three() -> (tempfile::TempDir, [u64; 4]) {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    let mut ends = [record::PREAMBLE; 4];
    for (i, header) in [b"one".as_slice(), b"", b"three"].into_iter().enumerate() {
        append(&mut journal, header);
        ends[i + 1] = record::PREAMBLE + journal.len_bytes();
    }
    (folder, ends)
}

fn headers(count: usize) -> Vec<Vec<u8>> {
    [b"one".to_vec(), b"".to_vec(), b"three".to_vec()][..count].to_vec()
}

#[test]
fn a_new_folder_is_empty_and_can_be_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("servers/0");
    for _ in 0..3 {
        assert_eq!(state(&folder).unwrap(), (None, Vec::new()));
        assert_eq!(names(&folder), ["journal-0", "lock"]);
    }
}

#[test]
fn updates_and_snapshots_come_back() {
    let (folder, ends) = three();
    let (mut journal, recovered) = open(folder.path()).unwrap();
    assert_eq!((recovered.cut, journal.len_bytes()), (0, ends[3] - record::PREAMBLE));
    append(&mut journal, b"four");
    // What was there when it was opened.
    assert_eq!(recovered.entries.count(), 3);
    let whole = payload(b"state");
    journal.snapshot(b"state", whole.chunks(4)).unwrap();
    assert_eq!(journal.len_bytes(), 0);
    assert_eq!(names(folder.path()), ["journal-1", "lock", "snapshot-1"]);
    append(&mut journal, b"five");
    let bytes = journal.len_bytes();
    drop(journal);
    assert_eq!(state(folder.path()).unwrap(), (Some(b"state".to_vec()), vec![b"five".to_vec()]));
    let (mut journal, _) = open(folder.path()).unwrap();
    assert_eq!(journal.len_bytes(), bytes);
    journal.snapshot(b"next", [&payload(b"next")[..]]).unwrap();
    drop(journal);
    assert_eq!(state(folder.path()).unwrap(), (Some(b"next".to_vec()), Vec::new()));
}

#[test]
fn numbers_come_back_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    let odd = [f32::NAN, -0.0, f32::INFINITY, f32::from_bits(1), f32::from_bits(0xffc0_1234)];
    // More parts than one call of the system takes, and more bytes than a buffer.
    let (many, long) = (vec![&odd[..]; 2000], vec![0.25; 100_000]);
    journal.append(b"", &many).unwrap();
    journal.append(b"x", &[&long, &odd]).unwrap();
    drop(journal);
    let (_, recovered) = open(folder.path()).unwrap();
    let entries: Vec<Record> = recovered.entries.map(Result::unwrap).collect();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&entries[0].payload), bits(&many.concat()));
    assert_eq!(bits(&entries[1].payload), bits(&[&long[..], &odd].concat()));
}

#[test]
fn a_torn_end_is_cut_off_at_every_length() {
    let (folder, ends) = three();
    let files = files(folder.path());
    for length in 0..=ends[3] {
        let mut files = files.clone();
        files.get_mut("journal-0").unwrap().truncate(length as usize);
        let folder = folder_of(&files);
        let whole = ends.iter().filter(|end| **end <= length).count().max(1) - 1;
        let torn = length.saturating_sub(ends[whole]);
        let (mut journal, recovered) = open(folder.path()).unwrap();
        assert_eq!(recovered.cut, torn, "cut to {length}");
        assert_eq!(recovered.entries.count(), whole, "cut to {length}");
        // What follows is not lost with the next crash.
        append(&mut journal, b"after");
        drop(journal);
        let expected = [headers(whole), vec![b"after".to_vec()]].concat();
        assert_eq!(state(folder.path()).unwrap(), (None, expected), "cut to {length}");
    }
}

#[test]
fn no_bit_changes_unseen() {
    let (folder, ends) = three();
    let files = files(folder.path());
    for byte in 0..ends[3] {
        for bit in [0, 5, 7] {
            let mut files = files.clone();
            files.get_mut("journal-0").unwrap()[byte as usize] ^= 1 << bit;
            let folder = folder_of(&files);
            let before = ends.iter().rposition(|end| *end <= byte);
            match state(folder.path()) {
                Err(JournalError::Damaged { file, offset }) => {
                    assert_eq!(file, folder.path().join("journal-0"));
                    assert_eq!(offset, before.map_or(0, |i| ends[i]), "byte {byte}");
                }
                other => panic!("byte {byte}, bit {bit}: {other:?}"),
            }
        }
    }
}

/// The files of a folder after the machine went down.
fn after_a_boot(files: &BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    let mut files = files.clone();
    let lock = files.get_mut(LOCK).unwrap();
    let boot = lock.iter_mut().rev().find(|byte| byte.is_ascii_hexdigit()).unwrap();
    *boot = if *boot == b'0' { b'1' } else { b'0' };
    files
}

/// What was not forced to the disk may be there in part. What was, is there, or it was damaged.
#[test]
fn what_a_machine_that_went_down_may_lack_is_torn() {
    for sync in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { sync, patience: Duration::ZERO };
        let (mut journal, _) = Journal::open(folder.path(), options).unwrap();
        let mut ends = vec![record::PREAMBLE];
        for header in headers(3) {
            append(&mut journal, &header);
            ends.push(record::PREAMBLE + journal.len_bytes());
        }
        drop(journal);
        let files = files(folder.path());
        for byte in ends[0]..ends[3] {
            let mut damaged = after_a_boot(&files);
            damaged.get_mut("journal-0").unwrap()[byte as usize] ^= 1;
            let before = ends.iter().rposition(|end| *end <= byte).unwrap();
            let folder = folder_of(&damaged);
            match state(folder.path()) {
                Err(JournalError::Damaged { offset, .. }) => {
                    assert!(sync && before < 2 && offset == ends[before], "byte {byte}");
                }
                other => {
                    assert!(!sync || before == 2, "byte {byte}");
                    assert_eq!(other.unwrap(), (None, headers(before)), "byte {byte}");
                    // From now on it is good, and must stay so.
                    let (mut journal, _) = open(folder.path()).unwrap();
                    append(&mut journal, b"next");
                    drop(journal);
                    let path = folder.path().join("journal-0");
                    let mut bytes = fs::read(&path).unwrap();
                    *bytes.last_mut().unwrap() ^= 1;
                    fs::write(&path, bytes).unwrap();
                    let error = state(folder.path()).unwrap_err();
                    assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
                }
            }
        }
    }
}

#[test]
fn a_record_after_damage_is_found_wherever_it_begins() {
    // The search goes by windows of 1 MiB, of which the first begins a byte after the damage.
    for place in (1 << 20) - 33..=(1 << 20) + 1 {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { sync: true, patience: Duration::ZERO };
        let (mut journal, _) = Journal::open(folder.path(), options).unwrap();
        let numbers = vec![0.5; 200_000];
        journal.append(&vec![0; place - 32 - 800_000], &[&numbers]).unwrap();
        assert_eq!(journal.len_bytes(), place as u64);
        append(&mut journal, b"after");
        drop(journal);
        let mut files = after_a_boot(&files(folder.path()));
        files.get_mut("journal-0").unwrap()[record::PREAMBLE as usize] ^= 1;
        let error = state(folder_of(&files).path()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { offset: 16, .. }), "{place}: {error}");
    }
}

#[test]
fn no_bit_of_a_snapshot_changes_unseen() {
    let (folder, _) = three();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.snapshot(b"state", [&payload(b"state")[..]]).unwrap();
    drop(journal);
    let files = files(folder.path());
    let length = files["snapshot-1"].len();
    let damaged = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut files = files.clone();
        change(files.get_mut("snapshot-1").unwrap());
        let folder = folder_of(&files);
        assert!(matches!(state(folder.path()), Err(JournalError::Damaged { .. })));
    };
    for at in 0..length {
        damaged(&|bytes| bytes[at] ^= 0x10);
        damaged(&|bytes| bytes.truncate(at));
    }
    damaged(&|bytes| bytes.push(0));
}

#[test]
fn records_of_other_places_and_files_are_none() {
    let (folder, ends) = three();
    let path = folder.path().join("journal-0");
    let bytes = fs::read(&path).unwrap();
    let (first, last) = (&bytes[..ends[1] as usize], &bytes[ends[2] as usize..]);
    // The second is gone, and the third in its place.
    fs::write(&path, [first, last].concat()).unwrap();
    let error = state(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { offset, .. } if offset == ends[1]), "{error}");
    // A whole file, under another number.
    fs::write(&path, &bytes).unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.snapshot(b"state", [&payload(b"state")[..]]).unwrap();
    drop(journal);
    fs::write(folder.path().join("journal-1"), &bytes).unwrap();
    let error = state(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { offset: 0, .. }), "{error}");
}

#[test]
fn a_payload_that_imitates_a_record_hides_no_torn_end() {
    let (folder, ends) = three();
    let record = fs::read(folder.path().join("journal-0")).unwrap()[16..ends[1] as usize].to_vec();
    let numbers: Vec<f32> = record
        .chunks(4)
        .map(|bytes| f32::from_ne_bytes(std::array::from_fn(|i| *bytes.get(i).unwrap_or(&0))))
        .collect();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.append(b"", &[&numbers]).unwrap();
    drop(journal);
    let mut files = after_a_boot(&files(folder.path()));
    // Its own head is unreadable, so that its payload is searched.
    files.get_mut("journal-0").unwrap()[ends[3] as usize] ^= 1;
    let folder = folder_of(&files);
    assert_eq!(state(folder.path()).unwrap(), (None, headers(3)));
}

#[test]
fn a_crash_at_any_stage_of_a_snapshot_loses_nothing() {
    let (folder, _) = three();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.snapshot(b"base", [&payload(b"base")[..]]).unwrap();
    append(&mut journal, b"one");
    append(&mut journal, b"two");
    let whole = payload(b"base, one, two");
    let mut stages = Vec::new();
    let copy = |stage| stages.push((stage, files(folder.path())));
    journal.snapshot_watched(b"base, one, two", whole.chunks(5), copy).unwrap();
    let seen: Vec<&str> = stages.iter().map(|(stage, _)| *stage).collect();
    assert_eq!(
        seen,
        [
            "an empty snapshot",
            "a snapshot without its name",
            "a journal more",
            "a snapshot",
            "a file less",
            "a file less"
        ]
    );
    let before = (Some(b"base".to_vec()), vec![b"one".to_vec(), b"two".to_vec()]);
    let after = (Some(b"base, one, two".to_vec()), Vec::new());
    let mut crashes = 0;
    let mut crash = |stage: &str, files: &BTreeMap<String, Vec<u8>>| {
        let has_snapshot = files.contains_key("snapshot-2");
        let expected = if has_snapshot { &after } else { &before };
        let folder = folder_of(files);
        assert_eq!(state(folder.path()).unwrap(), *expected, "{stage}");
        // And a server that goes on from there keeps what comes next.
        let (mut journal, _) = open(folder.path()).unwrap();
        append(&mut journal, b"more");
        drop(journal);
        let (snapshot, mut entries) = expected.clone();
        entries.push(b"more".to_vec());
        assert_eq!(state(folder.path()).unwrap(), (snapshot, entries), "{stage}");
        assert!(!names(folder.path()).iter().any(|name| name.contains(UNFINISHED)));
        crashes += 1;
    };
    for (stage, files) in &stages {
        crash(stage, files);
        // In the middle of what this stage has written.
        let written = match *stage {
            "a journal more" => "journal-2",
            "an empty snapshot" | "a snapshot without its name" => "snapshot-2.unfinished",
            _ => continue,
        };
        for length in 0..files[written].len() {
            let mut files = files.clone();
            files.get_mut(written).unwrap().truncate(length);
            crash(stage, &files);
        }
    }
    assert!(crashes > 100, "{crashes}");
}

#[test]
fn a_snapshot_that_fails_changes_nothing() {
    let (folder, ends) = three();
    let (mut journal, _) = open(folder.path()).unwrap();
    // Something is in the way of its name.
    let in_the_way = folder.path().join("snapshot-1");
    fs::create_dir(&in_the_way).unwrap();
    let error = journal.snapshot(b"state", [&payload(b"state")[..]]).unwrap_err();
    assert!(matches!(error, JournalError::Io { .. }), "{error}");
    fs::remove_dir(&in_the_way).unwrap();
    append(&mut journal, b"four");
    assert!(journal.len_bytes() > ends[3] - record::PREAMBLE);
    let bytes = journal.len_bytes();
    drop(journal);
    let expected = [headers(3), vec![b"four".to_vec()]].concat();
    assert_eq!(state(folder.path()).unwrap(), (None, expected));

    let (mut journal, _) = open(folder.path()).unwrap();
    assert_eq!(journal.len_bytes(), bytes);
    journal.snapshot(b"state", [&payload(b"state")[..]]).unwrap();
    assert_eq!(names(folder.path()), ["journal-1", "lock", "snapshot-1"]);
}

#[test]
fn a_journal_whose_snapshot_is_gone_is_refused() {
    let (folder, _) = three();
    let before = fs::read(folder.path().join("journal-0")).unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.snapshot(b"state", [&payload(b"state")[..]]).unwrap();
    append(&mut journal, b"four");
    drop(journal);
    fs::remove_file(folder.path().join("snapshot-1")).unwrap();
    let error = state(folder.path()).unwrap_err();
    assert!(matches!(&error, JournalError::Missing { file } if file.ends_with("journal-0")));
    // What came before it is no way around it.
    fs::write(folder.path().join("journal-0"), before).unwrap();
    let error = state(folder.path()).unwrap_err();
    assert!(matches!(&error, JournalError::Missing { file } if file.ends_with("snapshot-1")));
}

#[test]
fn a_journal_of_the_version_before_is_told_from_a_damaged_one() {
    let (folder, _) = three();
    let path = folder.path().join("journal-0");
    let mut bytes = fs::read(&path).unwrap();
    bytes[7] = b'1';
    fs::write(&path, bytes).unwrap();
    let error = state(folder.path()).unwrap_err();
    assert!(matches!(&error, JournalError::OtherVersion { file } if *file == path), "{error}");
}

#[test]
fn a_snapshot_whose_journal_is_gone_is_refused() {
    let (folder, _) = three();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.snapshot(b"state", [&payload(b"state")[..]]).unwrap();
    drop(journal);
    fs::remove_file(folder.path().join("journal-1")).unwrap();
    let error = state(folder.path()).unwrap_err();
    assert!(matches!(&error, JournalError::Missing { file } if file.ends_with("journal-1")));
}

#[test]
fn two_servers_never_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path()).unwrap();
    let error = open(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::InUse { .. }), "{error}");
    let process = format!("process {} uses", std::process::id());
    assert!(error.to_string().contains(&process), "{error}");
    // One that is about to end is waited for.
    let patient = Options { sync: false, patience: Duration::from_secs(60) };
    let path = folder.path().to_owned();
    let waiting = thread::spawn(move || Journal::open(path, patient).map(|_| ()));
    thread::sleep(Duration::from_millis(30));
    drop(journal);
    waiting.join().unwrap().unwrap();
}

#[test]
fn the_folder_of_something_else_is_left_alone() {
    for name in [
        "weights.safetensors",
        "journal-01",
        "journal-+1",
        "journal-",
        "snapshot-x",
        "journal-1.old",
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name), "mine").unwrap();
        let error = open(folder.path()).unwrap_err();
        assert!(
            matches!(&error, JournalError::Foreign { path } if path.ends_with(name)),
            "{error}"
        );
        assert_eq!(names(folder.path()), [name]);
    }
}

#[test]
fn an_update_that_fits_in_part_is_taken_back() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use std::io::{Read, Seek, SeekFrom, Write};

    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    append(&mut journal, b"one");
    // A file that cannot grow has room for half of the next.
    let bytes = fs::read(folder.path().join("journal-0")).unwrap();
    let mut small = File::from(memfd_create("small", MemfdFlags::ALLOW_SEALING).unwrap());
    small.write_all(&bytes).unwrap();
    let mut watched = small.try_clone().unwrap();
    small.set_len(3 << 20).unwrap();
    fcntl_add_seals(&small, SealFlags::GROW).unwrap();
    let file = journal.writer.replace_file(small);
    let large = vec![1.5; 1 << 20];
    assert!(matches!(journal.append(b"two", &[&large]), Err(JournalError::Io { .. })));

    let mut left = Vec::new();
    watched.seek(SeekFrom::Start(0)).unwrap();
    watched.read_to_end(&mut left).unwrap();
    assert!(left == bytes, "{} bytes are left of {}", left.len(), bytes.len());
    // With room, it goes on as if nothing had happened.
    journal.writer.replace_file(file);
    append(&mut journal, b"two");
    drop(journal);
    assert_eq!(state(folder.path()).unwrap(), (None, vec![b"one".to_vec(), b"two".to_vec()]));
}

#[test]
fn nothing_follows_what_could_not_be_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    append(&mut journal, b"one");
    // A device that is full, and cannot be cut.
    journal.writer.replace_file(File::options().write(true).open("/dev/full").unwrap());
    assert!(matches!(journal.append(b"two", &[]), Err(JournalError::Io { .. })));
    for error in [journal.append(b"two", &[]), journal.snapshot(b"", [])] {
        assert!(matches!(error, Err(JournalError::Unfinished { .. })), "{error:?}");
    }
    drop(journal);
    assert_eq!(state(folder.path()).unwrap(), (None, vec![b"one".to_vec()]));
}

#[test]
fn synced_updates_come_back_too() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { sync: true, ..Options::default() };
    let (mut journal, _) = Journal::open(folder.path(), options).unwrap();
    append(&mut journal, b"one");
    drop(journal);
    assert_eq!(state(folder.path()).unwrap(), (None, vec![b"one".to_vec()]));
}
