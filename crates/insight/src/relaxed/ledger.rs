//! Whether every push is accounted for.
//!
//! Within one file of records, a push stands exactly once; the pushes of one life of a worker are
//! numbered without a gap, for a gap is a push that was acknowledged and lost; and so are the updates,
//! for a gap is a change of the weights that was not written down.
//!
//! Across servers, a push met all of them. The last push of a life is the one exception: its
//! worker may have died before it reached every server. A worker pushes again only when all servers have
//! acknowledged, so it can never be more than the last one.

use std::collections::{BTreeMap, BTreeSet};

use crate::updates::UpdateRecord;

/// All pushes of a run, each counted once: `applied + dropped + partial = pushes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Different pushes.
    pub pushes: u64,
    /// Those that were applied on every server.
    pub applied: u64,
    /// Those that were dropped on every server.
    pub dropped: u64,
    /// Those that one server applied and another dropped, or never received because the worker died.
    pub partial: u64,
    /// Lives of all workers together.
    pub lives: u64,
}

/// The first push or update that does not add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// A push was recorded twice: it may have been applied twice.
    #[error(
        "updates-{file}.jsonl has push {push} of worker {worker} (life {life}) twice, in updates \
         {first} and {second}"
    )]
    Repeated {
        /// The number of the file.
        file: usize,
        /// Who pushed.
        worker: u32,
        /// Its life.
        life: u64,
        /// The push.
        push: u64,
        /// The update of its first record; 0 if that says it was dropped.
        first: u64,
        /// The update of its second record.
        second: u64,
    },
    /// A push is missing, though later ones of the same life are there.
    #[error(
        "updates-{file}.jsonl lacks push {push} of worker {worker} (life {life}), which went on to \
         push {last}"
    )]
    Lost {
        /// The number of the file.
        file: usize,
        /// Who pushed.
        worker: u32,
        /// Its life.
        life: u64,
        /// The first push that is missing.
        push: u64,
        /// The last one of that life, in any file.
        last: u64,
    },
    /// An update is missing, though later ones are there.
    #[error("updates-{file}.jsonl lacks update {update}, though it goes on to update {last}")]
    Skipped {
        /// The number of the file.
        file: usize,
        /// The first update that is missing.
        update: u64,
        /// The last one in the file.
        last: u64,
    },
}

impl Ledger {
    /// Of weights in one place, or split over servers: every server has met every push.
    pub(super) fn of_servers(servers: &[Vec<UpdateRecord>]) -> Result<Ledger, LedgerError> {
        let mut books = Vec::with_capacity(servers.len());
        for (file, records) in servers.iter().enumerate() {
            let book = Book::of(file, records)?;
            book.check_updates(file)?;
            books.push(book);
        }
        let lives: BTreeSet<Life> =
            books.iter().flat_map(|book| book.lives.keys()).copied().collect();
        for &(worker, life) in &lives {
            let pushes_on = |book: &Book| book.lives.get(&(worker, life)).map_or(0, Pushes::len);
            let last = books.iter().map(pushes_on).max().unwrap_or(0);
            for (file, book) in books.iter().enumerate() {
                let push = pushes_on(book) + 1;
                if push < last {
                    return Err(LedgerError::Lost { file, worker, life, push, last });
                }
            }
        }
        Ok(Ledger::count(&books, &lives))
    }

    /// Of weights that every worker has for itself: a push is in the file of its worker alone.
    pub(super) fn of_workers(files: &[Vec<UpdateRecord>]) -> Result<Ledger, LedgerError> {
        let mut all = Ledger::default();
        for (file, records) in files.iter().enumerate() {
            // Updates are not checked: a worker that begins a new life counts them as it likes.
            let book = Book::of(file, records)?;
            let lives = book.lives.keys().copied().collect();
            let part = Ledger::count(std::slice::from_ref(&book), &lives);
            all.pushes += part.pushes;
            all.applied += part.applied;
            all.dropped += part.dropped;
            all.lives += part.lives;
        }
        Ok(all)
    }

    fn count(books: &[Book], lives: &BTreeSet<Life>) -> Ledger {
        let mut ledger = Ledger { lives: lives.len() as u64, ..Ledger::default() };
        for life in lives {
            let servers: Vec<Option<&Pushes>> =
                books.iter().map(|book| book.lives.get(life)).collect();
            let last = servers.iter().flatten().map(|pushes| pushes.len()).max().unwrap_or(0);
            for push in 1..=last {
                let fates = servers.iter().map(|pushes| pushes.and_then(|p| p.get(&push).copied()));
                let (mut applied, mut dropped) = (true, true);
                for fate in fates {
                    applied &= fate.is_some_and(|update| update > 0);
                    dropped &= fate == Some(0);
                }
                ledger.pushes += 1;
                ledger.applied += u64::from(applied);
                ledger.dropped += u64::from(dropped);
                ledger.partial += u64::from(!applied && !dropped);
            }
        }
        ledger
    }
}

/// A worker, and which life of it.
type Life = (u32, u64);

/// The update that each push of a life went into, by its number; 0 where it was dropped.
struct Pushes(BTreeMap<u64, u64>);

impl Pushes {
    /// How many, which is the number of the last.
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn get(&self, push: &u64) -> Option<&u64> {
        self.0.get(push)
    }
}

/// One file, ordered by life and push.
struct Book {
    lives: BTreeMap<Life, Pushes>,
}

impl Book {
    /// Enters all records, none twice and no push of a life left out.
    fn of(file: usize, records: &[UpdateRecord]) -> Result<Book, LedgerError> {
        let mut lives: BTreeMap<Life, Pushes> = BTreeMap::new();
        for record in records {
            let UpdateRecord { worker, life, push, update, .. } = *record;
            let pushes = lives.entry((worker, life)).or_insert_with(|| Pushes(BTreeMap::new()));
            if let Some(first) = pushes.0.insert(push, update) {
                let second = update;
                return Err(LedgerError::Repeated { file, worker, life, push, first, second });
            }
        }
        for (&(worker, life), Pushes(pushes)) in &lives {
            if let Some((push, last)) = first_gap(pushes.keys()) {
                return Err(LedgerError::Lost { file, worker, life, push, last });
            }
        }
        Ok(Book { lives })
    }

    fn check_updates(&self, file: usize) -> Result<(), LedgerError> {
        let updates = self.lives.values().flat_map(|pushes| pushes.0.values());
        let updates: BTreeSet<u64> = updates.copied().filter(|update| *update > 0).collect();
        match first_gap(updates.iter()) {
            Some((update, last)) => Err(LedgerError::Skipped { file, update, last }),
            None => Ok(()),
        }
    }
}

/// The first of 1, 2, 3… that is missing before the last of some ascending numbers, and that last one.
fn first_gap<'a>(numbers: impl DoubleEndedIterator<Item = &'a u64> + Clone) -> Option<(u64, u64)> {
    let last = *numbers.clone().next_back()?;
    let gap = (1..).zip(numbers).find(|(expected, number)| expected != *number);
    gap.map(|(missing, _)| (missing, last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relaxed::tests::record;

    /// Worker, life, push, update.
    fn file(entries: &[(u32, u64, u64, u64)]) -> Vec<UpdateRecord> {
        let entry = |&(worker, life, push, update): &(u32, u64, u64, u64)| UpdateRecord {
            life,
            push,
            update,
            ..record(worker, 1.0)
        };
        entries.iter().map(entry).collect()
    }

    fn violation(servers: &[Vec<UpdateRecord>]) -> String {
        let text = Ledger::of_servers(servers).unwrap_err().to_string();
        assert!(!text.contains('\n') && !text.contains("  "), "{text}");
        text
    }

    #[test]
    fn pushes_updates_and_fates_are_counted() {
        // Server 1 drops what server 0 applied once; the last push of the first life never got there.
        let shard_0 = file(&[(0, 1, 1, 1), (1, 1, 1, 1), (0, 1, 2, 2), (0, 2, 1, 0), (1, 1, 2, 3)]);
        let shard_1 = file(&[(1, 1, 1, 1), (0, 1, 1, 1), (0, 2, 1, 0), (1, 1, 2, 0)]);
        let ledger = Ledger::of_servers(&[shard_0, shard_1]).unwrap();
        assert_eq!(ledger, Ledger { pushes: 5, applied: 2, dropped: 1, partial: 2, lives: 3 });
        assert_eq!(Ledger::of_servers(&[]).unwrap(), Ledger::default());
    }

    #[test]
    fn a_push_applied_twice_is_found() {
        let servers = [file(&[(0, 1, 1, 1), (2, 7, 1, 2), (2, 7, 1, 3)])];
        assert_eq!(
            violation(&servers),
            "updates-0.jsonl has push 1 of worker 2 (life 7) twice, in updates 2 and 3"
        );
    }

    #[test]
    fn a_lost_push_is_found_within_a_server_and_across() {
        let with_gap = file(&[(0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 4, 3)]);
        assert_eq!(
            violation(&[with_gap]),
            "updates-0.jsonl lacks push 3 of worker 0 (life 1), which went on to push 4"
        );
        let whole = file(&[(0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 3, 3)]);
        let behind = file(&[(0, 1, 1, 1)]);
        assert!(Ledger::of_servers(&[whole.clone(), whole[..2].to_vec()]).is_ok());
        assert_eq!(
            violation(&[whole, behind]),
            "updates-1.jsonl lacks push 2 of worker 0 (life 1), which went on to push 3"
        );
    }

    #[test]
    fn a_missing_update_is_found() {
        let from_two = file(&[(0, 1, 1, 2), (0, 1, 2, 3)]);
        assert_eq!(
            violation(&[from_two]),
            "updates-0.jsonl lacks update 1, though it goes on to update 3"
        );
        assert!(Ledger::of_servers(&[file(&[(0, 1, 1, 0), (0, 1, 2, 1)])]).is_ok());
    }

    #[test]
    fn workers_with_weights_of_their_own_keep_their_own_records() {
        let files = [file(&[(0, 1, 1, 1), (0, 1, 2, 2), (0, 2, 1, 1)]), file(&[(1, 1, 1, 1)])];
        let ledger = Ledger::of_workers(&files).unwrap();
        assert_eq!(ledger, Ledger { pushes: 4, applied: 4, dropped: 0, partial: 0, lives: 3 });
        assert!(Ledger::of_workers(&[file(&[(0, 1, 2, 1)])]).is_err());
    }
}
