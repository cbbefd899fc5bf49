//! The journal on a machine whose power fails.
//!
//! A history of updates and snapshots is written, and every change to the folder is noted. Then the
//! power fails after each of these changes in turn. What is on the disk is, of every file, what it held
//! when it was last forced there, and of the later changes any part: a prefix of them with the last one
//! torn, only some of them, or only a longer file, with zeros where nothing was written. The same goes
//! for names, by the last time that the folder was forced. From everything that may be left the journal
//! must come back: in a state that there was, not before the last that was promised, and one can go on.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::disk::{Change, notes};
use super::*;

/// Contents of a file: as they are for sure, and what was changed since.
#[derive(Clone, Debug, Default)]
struct Contents {
    forced: Vec<u8>,
    since: Vec<Change>,
}

/// A folder: names of files by number, as they are for sure, and what was changed since.
#[derive(Clone, Debug, Default)]
struct Machine {
    files: Vec<Contents>,
    names: BTreeMap<String, usize>,
    forced: BTreeMap<String, usize>,
    /// What may have reached the disk or not: a name, and the file that has it from then on.
    since: Vec<Vec<(String, Option<usize>)>>,
}

impl Machine {
    fn change(&mut self, change: &Change) {
        match change {
            Change::Create(name) => {
                let number = self.names.get(name).copied().unwrap_or(self.files.len());
                if number == self.files.len() {
                    self.files.push(Contents::default());
                    self.rename(vec![(name.clone(), Some(number))]);
                } else {
                    self.files[number].since.push(Change::Cut(name.clone(), 0));
                }
            }
            Change::Write(name, ..) | Change::Cut(name, _) => {
                self.file(name).since.push(change.clone());
            }
            Change::Sync(name) => {
                let file = self.file(name);
                file.forced = applied(&file.forced, &file.since);
                file.since.clear();
            }
            Change::Rename(from, to) => {
                let number = self.names[from];
                self.rename(vec![(from.clone(), None), (to.clone(), Some(number))]);
            }
            Change::Remove(name) => self.rename(vec![(name.clone(), None)]),
            Change::SyncFolder => {
                self.forced.clone_from(&self.names);
                self.since.clear();
            }
        }
    }

    fn rename(&mut self, changes: Vec<(String, Option<usize>)>) {
        name(&mut self.names, &changes);
        self.since.push(changes);
    }

    fn file(&mut self, name: &str) -> &mut Contents {
        &mut self.files[self.names[name]]
    }

    /// The folder as processes see it.
    fn now(&self) -> BTreeMap<String, Vec<u8>> {
        let file = |(name, number): (&String, &usize)| {
            let Contents { forced, since } = &self.files[*number];
            (name.clone(), applied(forced, since))
        };
        self.names.iter().map(file).collect()
    }

    /// What may be left of the folder, in many ways.
    fn ruins(&self, dice: &mut Dice) -> Vec<BTreeMap<String, Vec<u8>>> {
        let mut ruins = Vec::new();
        for chosen in 0..1usize << self.since.len() {
            let mut names = self.forced.clone();
            let reached = (0..self.since.len()).filter(|change| chosen >> change & 1 == 1);
            reached.for_each(|change| name(&mut names, &self.since[change]));
            for manner in 0..MANNERS {
                let left = |(name, number): (&String, &usize)| {
                    (name.clone(), self.files[*number].left(manner, dice))
                };
                ruins.push(names.iter().map(left).collect());
            }
        }
        ruins.sort();
        ruins.dedup();
        ruins
    }
}

/// Ways in which what was not forced may reach the disk, of which the last four are by chance.
const MANNERS: usize = 9;

impl Contents {
    fn left(&self, manner: usize, dice: &mut Dice) -> Vec<u8> {
        let all = applied(&self.forced, &self.since);
        match manner {
            0 => self.forced.clone(),
            1 => all,
            // As long as it was, and nothing in it.
            2 => {
                let mut left = self.forced.clone();
                left.resize(all.len().max(left.len()), 0);
                left
            }
            // The last page is missing, or the last byte.
            3 | 4 => {
                let lost = if manner == 3 { 16 } else { 1 };
                let mut left = all.clone();
                let start = all.len().saturating_sub(lost).max(self.forced.len().min(all.len()));
                left[start..].fill(0);
                left
            }
            // Changes up to some, the last of them torn.
            5 | 6 => {
                let upto = dice.below(self.since.len() + 1);
                let mut since = self.since[..upto].to_vec();
                if let Some(Change::Write(_, _, bytes)) = since.last_mut() {
                    bytes.truncate(dice.below(bytes.len() + 1));
                }
                applied(&self.forced, &since)
            }
            // Some changes, whichever.
            _ => {
                let some: Vec<Change> =
                    self.since.iter().filter(|_| dice.below(2) == 1).cloned().collect();
                applied(&self.forced, &some)
            }
        }
    }
}

fn applied(to: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut contents = to.to_vec();
    for change in changes {
        match change {
            Change::Write(_, at, bytes) => {
                let (at, end) = (*at as usize, *at as usize + bytes.len());
                contents.resize(contents.len().max(end), 0);
                contents[at..end].copy_from_slice(bytes);
            }
            Change::Cut(_, length) => contents.resize(*length as usize, 0),
            other => unreachable!("{other:?} changes no contents"),
        }
    }
    contents
}

fn name(names: &mut BTreeMap<String, usize>, changes: &[(String, Option<usize>)]) {
    for (name, file) in changes {
        match file {
            Some(file) => names.insert(name.clone(), *file),
            None => names.remove(name),
        };
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// What was promised after so many changes.
struct Promise {
    changes: usize,
    /// Updates that are there whatever happens.
    least: u64,
    /// Updates that were begun.
    most: u64,
}

/// Update `i` has the header `i`; a snapshot has that of the last update in it.
fn payload(update: u64) -> Vec<f32> {
    vec![update as f32; 5 + update as usize % 3]
}

fn open(folder: &Path, sync: bool) -> Result<(Journal, Recovered), JournalError> {
    Journal::open(folder, Options { sync, patience: Duration::ZERO })
}

/// The last update in a folder, all of which are there.
fn last(recovered: Recovered) -> Result<u64, String> {
    let number = |record: &Record| {
        let update = u64::from_le_bytes(record.header[..].try_into().unwrap());
        let is_whole = record.payload == payload(update);
        is_whole.then_some(update).ok_or(format!("update {update} with another payload"))
    };
    let mut last = recovered.snapshot.as_ref().map_or(Ok(0), number)?;
    for entry in recovered.entries {
        let next = number(&entry.map_err(|error| error.to_string())?)?;
        if next != last + 1 {
            return Err(format!("update {next} after {last}"));
        }
        last = next;
    }
    Ok(last)
}

/// Updates and snapshots, with a process that ends and comes back; what was changed, and what was
/// promised when.
fn history(folder: &Path, sync: bool) -> (Vec<Change>, Vec<Promise>) {
    notes();
    let mut changes = Vec::new();
    let mut promises = vec![Promise { changes: 0, least: 0, most: 0 }];
    let mut promise = |least, most| {
        changes.extend(notes());
        promises.push(Promise { changes: changes.len(), least, most });
    };
    let (mut update, mut safe) = (0, 0);
    for process in 0..2 {
        let (mut journal, recovered) = open(folder, sync).unwrap();
        assert_eq!(last(recovered), Ok(update));
        for step in 0..6 {
            update += 1;
            promise(safe, update);
            journal.append(&update.to_le_bytes(), &[&payload(update)]).unwrap();
            if sync {
                safe = update;
            }
            promise(safe, update);
            if (step + process) % 4 == 3 {
                journal.snapshot(&update.to_le_bytes(), [&payload(update)[..]]).unwrap();
                safe = update;
                promise(safe, update);
            }
        }
    }
    (changes, promises)
}

/// Whether from all that may be left something comes back that was promised, and one can go on. In how
/// many ways, and in how many of them something was lost.
fn recover(
    machine: &Machine,
    dice: &mut Dice,
    sync: bool,
    promised: &Promise,
) -> Result<(u64, u64), String> {
    let (mut failures, mut lost) = (0, 0);
    for ruin in machine.ruins(dice) {
        let attempt = || {
            let folder = folder_of(&ruin);
            let opened = open(folder.path(), sync);
            let (mut journal, recovered) = opened.map_err(|error| error.to_string())?;
            let found = last(recovered)?;
            if !(promised.least..=promised.most).contains(&found) {
                let Promise { least, most, .. } = promised;
                return Err(format!("update {found} instead of {least} to {most}"));
            }
            let next = found + 1;
            journal.append(&next.to_le_bytes(), &[&payload(next)]).unwrap();
            drop(journal);
            let (_, recovered) = open(folder.path(), sync).map_err(|error| error.to_string())?;
            match last(recovered)? {
                after if after == next => Ok(found),
                after => Err(format!("update {after} instead of {next}, which was appended")),
            }
        };
        let found = attempt().map_err(|error| {
            let left: Vec<_> = ruin.iter().map(|(name, left)| (name, left.len())).collect();
            format!("{error}, from {left:?}")
        })?;
        failures += 1;
        lost += u64::from(found < promised.most);
    }
    Ok((failures, lost))
}

/// Lets the power fail after every change, and while the next process opens the folder. `counts` says
/// which changes are made at all.
fn survives(sync: bool, counts: impl Fn(&Change) -> bool) -> Result<(), String> {
    let folder = scratch();
    let (changes, promises) = history(folder.path(), sync);
    let (mut machine, mut dice) = (Machine::default(), Dice(1));
    let (mut failures, mut lost) = (0, 0);
    for done in 0..=changes.len() {
        let promised = promises.iter().rfind(|promise| promise.changes <= done).unwrap();
        let when =
            |error: String| format!("after change {done}, {:?}: {error}", changes[..done].last());
        let (ways, less) = recover(&machine, &mut dice, sync, promised).map_err(when)?;
        (failures, lost) = (failures + ways, lost + less);

        // Or only the process dies, and the power fails while the next one opens the folder.
        if !machine.since.is_empty() {
            let folder = folder_of(&machine.now());
            notes();
            open(folder.path(), sync).map_err(|error| when(error.to_string()))?;
            let mut machine = machine.clone();
            for change in notes().into_iter().filter(|change| counts(change)) {
                machine.change(&change);
                failures += recover(&machine, &mut dice, sync, promised)
                    .map_err(|error| when(format!("{change:?} by the next process: {error}")))?
                    .0;
            }
        }
        if let Some(change) = changes.get(done).filter(|change| counts(change)) {
            machine.change(change);
        }
    }
    assert!(failures > 500, "{failures}");
    assert!(lost > 0, "no failure had an effect");
    Ok(())
}

/// A folder in memory, where to force something to the disk takes no time: that it was done is noted.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A folder with these files, and of whatever boot.
fn folder_of(files: &BTreeMap<String, Vec<u8>>) -> tempfile::TempDir {
    let folder = scratch();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

#[test]
fn a_power_failure_leaves_a_state_that_there_was() {
    survives(false, |_| true).unwrap();
}

#[test]
fn a_power_failure_loses_nothing_that_waited_for_the_disk() {
    survives(true, |_| true).unwrap();
}

/// If something were not forced to the disk, these tests would notice.
#[test]
fn what_is_not_forced_to_the_disk_is_missed() {
    for sync in [false, true] {
        let is_forced = |change: &Change, kind: &str| matches!(change, Change::Sync(name) if name.starts_with(kind));
        survives(sync, |change| !is_forced(change, "journal")).unwrap_err();
        survives(sync, |change| !is_forced(change, "snapshot")).unwrap_err();
        survives(sync, |change| *change != Change::SyncFolder).unwrap_err();
    }
}
