//! Memory of a rank that the other ranks of its host read in place.
//!
//! All ranks [allocate](crate::Group::allocate) it together. Each has a part of its own, which it alone can write,
//! and has the parts of the others mapped for reading. A call on a buffer in it stages nothing, if all ranks make
//! the call with the same place of the same allocation, which they compare as they compare everything else of a
//! call. Where not all ranks share a host it is ordinary memory.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Weak};

use unisono_net::memory::Memory;

use crate::call::Call;
use crate::dtype::Element;

/// A buffer that other ranks of the host can read, as [`Group::allocate`](crate::Group::allocate) makes it. At
/// first all elements are 0.
///
/// It is a slice, and is given to calls as one. It may outlive the group.
pub struct Registered<T> {
    allocation: Arc<Allocation>,
    /// Where it begins in the allocation, in elements.
    start: usize,
    count: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Registered<T> {
    pub(crate) fn new(allocation: Arc<Allocation>, count: usize) -> Registered<T> {
        assert!(count * size_of::<T>() <= allocation.own.len());
        Registered { allocation, start: 0, count, elements: PhantomData }
    }

    /// Cuts it in two: this keeps the first `at` elements, the others are returned. Both stay where they are.
    ///
    /// # Panics
    /// If it has fewer.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Registered<T> {
        assert!(at <= self.count, "{at} of {} elements", self.count);
        let (allocation, start) = (self.allocation.clone(), self.start + at);
        let count = std::mem::replace(&mut self.count, at) - at;
        Registered { allocation, start, count, elements: PhantomData }
    }

    /// Makes one of this and the part of the same allocation that follows it; returns any other.
    pub fn unsplit(&mut self, next: Registered<T>) -> Result<(), Registered<T>> {
        let is_next = Arc::ptr_eq(&self.allocation, &next.allocation)
            && self.start + self.count == next.start;
        if !is_next {
            return Err(next);
        }
        self.count += next.count;
        Ok(())
    }

    fn address(&self) -> *mut T {
        self.allocation.own.as_ptr().cast::<T>().wrapping_add(self.start)
    }
}

impl<T: Element> Deref for Registered<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is aligned to pages, long enough, and holds numbers, for which any bytes are valid;
        // no other process can write it, and this process only through this value: parts that were split off do
        // not overlap.
        unsafe { std::slice::from_raw_parts(self.address(), self.count) }
    }
}

impl<T: Element> DerefMut for Registered<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above. Other ranks read it, but take what they have read for something only within a call
        // that borrows this value.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.count) }
    }
}

impl<T: Element + std::fmt::Debug> std::fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// One allocation, as one rank has it.
pub(crate) struct Allocation {
    own: Arc<Memory>,
    /// Of each rank, its own included. Empty where not all ranks share a host.
    all: Vec<Arc<Memory>>,
}

impl Allocation {
    pub fn new(own: Arc<Memory>, all: Vec<Arc<Memory>>) -> Arc<Allocation> {
        assert!(all.iter().all(|memory| memory.len() == own.len()));
        Arc::new(Allocation { own, all })
    }
}

/// The allocations of a group that ranks can read in place, as one rank knows them.
#[derive(Default)]
pub(crate) struct Allocations {
    /// How many there were: each has a number, equal on all ranks.
    made: u64,
    /// Those that are in use, or were until lately.
    known: Vec<(u64, Weak<Allocation>)>,
}

impl Allocations {
    /// Adds one. All ranks do so in the same order.
    pub fn add(&mut self, allocation: &Arc<Allocation>) {
        self.known.retain(|(_, known)| known.strong_count() > 0);
        if allocation.all.len() > 1 {
            self.known.push((self.made, Arc::downgrade(allocation)));
        }
        self.made += 1;
    }

    /// The allocation in which these addresses lie, if there is one.
    pub fn find(&self, addresses: Range<usize>) -> Option<Lent> {
        self.known.iter().find_map(|(number, known)| {
            let allocation = known.upgrade()?;
            let start = allocation.own.as_ptr().addr();
            let offset = addresses.start.checked_sub(start)?;
            let is_inside = addresses.end <= start + allocation.own.len();
            is_inside.then_some(Lent { number: *number, offset, allocation })
        })
    }
}

/// A buffer of this rank that the others read in place, and theirs.
pub(crate) struct Lent {
    number: u64,
    offset: usize,
    allocation: Arc<Allocation>,
}

impl Lent {
    /// What ranks compare, in the [shape](Call::shape) of a call.
    pub fn shape(&self) -> u64 {
        Call::in_registered(self.number, self.offset as u64)
    }

    /// Where a rank has what this rank has at an address of the same allocation.
    pub fn of_rank(&self, rank: usize, own: *const u8) -> *const u8 {
        let Allocation { own: memory, all } = &*self.allocation;
        let offset = own.addr().wrapping_sub(memory.as_ptr().addr());
        assert!(offset <= memory.len(), "not an address of the allocation");
        // SAFETY: the memory of every rank is as long as this rank's, as `new` has checked.
        unsafe { all[rank].as_ptr().add(offset).cast_const() }
    }
}
