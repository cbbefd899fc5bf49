//! The memory of buckets.
//!
//! What the workers of one host all-reduce lies in memory that they [read of each other in
//! place](unisono_collective::Registered), if they share a host: it belongs to their group, and is cut anew when the
//! sizes of buckets change. Everything else is memory of the process.

use std::ops::{Deref, DerefMut};

use unisono_collective::{Error, Group, Registered};

use crate::error::SyncError;

/// The most workers that read each other's buckets in place. More: each maps the memory of all others, which takes
/// longer than it saves when a group forms. Fewer: larger hosts copy more.
const MOST: usize = 16;

/// The bytes of gradients from which on it is worth it. More: smaller models copy. Fewer: groups of small models, which
/// gain nothing, form later.
const LEAST: usize = 1 << 20;

/// Numbers of a bucket.
#[derive(Debug)]
pub enum Slot {
    /// In memory of the process.
    Own(Vec<f32>),
    /// In memory that other workers read.
    Lent(Registered<f32>),
}

impl Deref for Slot {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Slot::Own(numbers) => numbers,
            Slot::Lent(numbers) => numbers,
        }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Slot::Own(numbers) => numbers,
            Slot::Lent(numbers) => numbers,
        }
    }
}

impl From<Vec<f32>> for Slot {
    fn from(numbers: Vec<f32>) -> Slot {
        Slot::Own(numbers)
    }
}

/// Memory of a group from which buckets are cut. All workers of the group have as much, and cut it alike.
#[derive(Debug, Default)]
pub struct Arena {
    /// What is not cut off.
    rest: Option<Registered<f32>>,
    /// Whether it was cut before, so that there are numbers in it.
    is_used: bool,
}

impl Arena {
    /// For buckets of so many numbers in all. All workers call this; without memory for it, they go on without.
    pub fn new(group: &Group, numbers: usize) -> Result<Arena, SyncError> {
        let is_near = group.topology().is_one_host() && (2..=MOST).contains(&group.size());
        if !is_near || numbers * 4 < LEAST {
            return Ok(Arena::default());
        }
        match group.allocate(numbers) {
            Ok(memory) => Ok(Arena { rest: Some(memory), is_used: false }),
            Err(Error::System { what, reason }) => {
                log::debug!("{what}: {reason}; buckets are in memory of each worker");
                Ok(Arena::default())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// So many numbers of it, all of them 0, or of other memory if it has no more.
    pub fn cut(&mut self, count: usize) -> Slot {
        match self.rest.as_mut().filter(|rest| rest.len() >= count) {
            Some(rest) => {
                let remaining = rest.split_off(count);
                let mut part = std::mem::replace(rest, remaining);
                if self.is_used {
                    part.fill(0.0);
                }
                Slot::Lent(part)
            }
            None => Slot::Own(vec![0.0; count]),
        }
    }

    /// Takes back all that was cut off, in the order in which it was. If some of it is missing, the memory is given up.
    pub fn join(&mut self, slots: impl Iterator<Item = Slot>) {
        let Some(rest) = self.rest.take() else { return };
        self.is_used = true;
        let mut whole: Option<Registered<f32>> = None;
        let parts = slots.filter_map(|slot| match slot {
            Slot::Lent(part) => Some(part),
            Slot::Own(_) => None,
        });
        for part in parts.chain([rest]) {
            let Some(whole) = &mut whole else {
                whole = Some(part);
                continue;
            };
            if whole.unsplit(part).is_err() {
                return;
            }
        }
        self.rest = whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono_collective::Options;

    /// A pair of workers with memory for buckets of 400,000 numbers in all.
    fn arenas() -> Vec<Arena> {
        let groups = Group::local(2, &Options::default()).unwrap();
        std::thread::scope(|scope| {
            let arena = |group| scope.spawn(move || Arena::new(group, 400_000).unwrap());
            let arenas: Vec<_> = groups.iter().map(arena).collect();
            arenas.into_iter().map(|arena| arena.join().unwrap()).collect()
        })
    }

    #[test]
    fn memory_is_cut_and_joined() {
        for mut arena in arenas() {
            for lengths in [&[100_000, 0, 300_000][..], &[7; 100], &[400_000]] {
                let mut slots: Vec<Slot> = lengths.iter().map(|count| arena.cut(*count)).collect();
                for (i, (slot, length)) in slots.iter_mut().zip(lengths).enumerate() {
                    assert!(matches!(slot, Slot::Lent(_)));
                    assert_eq!(slot.len(), *length);
                    assert!(slot.iter().all(|number| *number == 0.0));
                    slot.fill(i as f32 + 1.0);
                }
                for (i, slot) in slots.iter().enumerate() {
                    assert!(slot.iter().all(|number| *number == i as f32 + 1.0), "parts overlap");
                }
                arena.join(slots.into_iter());
            }
            assert!(matches!(arena.cut(400_001), Slot::Own(numbers) if numbers.len() == 400_001));
            assert!(matches!(arena.cut(400_000), Slot::Lent(_)));
        }
    }

    #[test]
    fn memory_of_which_a_part_is_missing_is_given_up() {
        for mut arena in arenas() {
            let [first, second, third] = [100, 200, 300].map(|count| arena.cut(count));
            drop(second);
            arena.join([first, third].into_iter());
            assert!(matches!(arena.cut(100), Slot::Own(_)));
        }
    }

    #[test]
    fn little_memory_is_the_processes_own() {
        let group = &Group::local(1, &Options::default()).unwrap()[0];
        assert!(matches!(Arena::new(group, 400_000).unwrap().cut(5), Slot::Own(_)));
    }
}
