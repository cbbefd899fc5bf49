//! The memory of buckets.
//!
//! What the workers of one host all-reduce lies in memory that they [read of each other in
//! place](unisono_collective::Registered), if they share a host: it belongs to their group, and is cut anew when the
//! sizes of buckets change. Encodings that travel in place lie in such memory, too. Everything else is memory of the
//! process.

use std::ops::{Deref, DerefMut};

use unisono_collective::{Element, Error, Group, Registered};

use crate::error::SyncError;

/// The most workers that read each other's buckets in place. More: each maps the memory of all others, which takes
/// longer than it saves when a group forms. Fewer: larger hosts copy more.
const MOST: usize = 16;

/// The bytes of gradients from which on it is worth it. More: smaller models copy. Fewer: groups of small models, which
/// gain nothing, form later.
const LEAST: usize = 1 << 20;

/// Numbers of a bucket.
#[derive(Debug)]
pub enum Slot<T: Element = f32> {
    /// In memory of the process.
    Own(Vec<T>),
    /// In memory that other workers read.
    Lent(Registered<T>),
}

impl<T: Element> Deref for Slot<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Slot::Own(numbers) => numbers,
            Slot::Lent(numbers) => numbers,
        }
    }
}

impl<T: Element> DerefMut for Slot<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Slot::Own(numbers) => numbers,
            Slot::Lent(numbers) => numbers,
        }
    }
}

impl<T: Element> Default for Slot<T> {
    fn default() -> Slot<T> {
        Slot::Own(Vec::new())
    }
}

impl<T: Element + Default> Slot<T> {
    /// Makes room for so many numbers, whatever they are, in memory that other workers read if that is worth it. All
    /// workers call this, with the same number, on slots that they have treated alike.
    pub fn make_room(&mut self, group: &Group, count: usize) -> Result<(), SyncError> {
        if self.len() < count {
            // What was there is given back first.
            *self = Slot::default();
            *self = match lend(group, count)? {
                Some(memory) => Slot::Lent(memory),
                None => Slot::Own(vec![T::default(); count]),
            };
        }
        Ok(())
    }
}

impl From<Vec<f32>> for Slot {
    fn from(numbers: Vec<f32>) -> Slot {
        Slot::Own(numbers)
    }
}

/// Memory of a group for so many numbers, if it is worth it and there is some. All workers call this.
fn lend<T: Element>(group: &Group, count: usize) -> Result<Option<Registered<T>>, SyncError> {
    let is_near = group.topology().is_one_host() && (2..=MOST).contains(&group.size());
    if !is_near || count * size_of::<T>() < LEAST {
        return Ok(None);
    }
    match group.allocate(count) {
        Ok(memory) => Ok(Some(memory)),
        Err(Error::System { what, reason }) => {
            log::debug!("{what}: {reason}; it is in memory of each worker");
            Ok(None)
        }
        Err(error) => Err(error.into()),
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
        Ok(Arena { rest: lend(group, numbers)?, is_used: false })
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
