//! Sums the subtrees of all workers.
//!
//! Where every worker holds one subtree, and these combine like the ranks of a group do, the sum is
//! an all-reduce. Otherwise (3 workers with 8 shards) no all-reduce over ranks evaluates the right
//! tree, and the workers exchange their subtrees: each gets one block of every subtree of all workers,
//! folds them in the order of the tree, and all gather the blocks. That is pairwise exchange with
//! several leaves per rank.

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_collective::tree::{self, Tree};
use unisono_collective::{Element, Error, Group, Reduction, Request, kernel};

use crate::shards::Shards;

/// Sums what the workers of a group hold.
pub struct Combiner {
    group: Arc<Group>,
    exchange: Option<Exchange>,
}

impl Combiner {
    /// For the workers of this group.
    pub fn new(group: Group, shards: Shards) -> Combiner {
        group.time_folds();
        let workers = group.size();
        let exchange = (!shards.is_all_reduce(workers)).then(|| Exchange::new(shards, workers));
        Combiner { group: Arc::new(group), exchange }
    }

    /// Replaces the first of a worker's subtrees by the sum of all subtrees of all workers. All have
    /// one length, a multiple of [`alignment`].
    pub fn sum<T: Element, S: DerefMut<Target = [T]>>(
        &mut self,
        subtrees: &mut [S],
    ) -> Result<(), Error> {
        match &mut self.exchange {
            None => self.group.all_reduce(&mut subtrees[0], Reduction::Sum),
            Some(exchange) => exchange.sum(&self.group, subtrees),
        }
    }

    /// The workers.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// How long this rank has added up so far.
    pub fn folding(&self) -> Duration {
        self.group.folding() + self.exchange.as_ref().map_or(Duration::ZERO, |e| e.folding)
    }

    /// Bytes this rank has sent so far.
    pub fn sent(&self) -> u64 {
        self.group.traffic().total()
    }
}

/// What the lengths to be summed must be a multiple of.
pub fn alignment(shards: Shards, workers: usize) -> usize {
    if shards.is_all_reduce(workers) { 1 } else { workers }
}

/// The exchange of subtrees, and its memory.
struct Exchange {
    tree: Tree,
    /// How many subtrees every rank holds.
    held: Vec<usize>,
    /// What goes to each rank: a block of every subtree of this rank.
    outgoing: TypedBuffer,
    /// What came from each rank, which makes a block of every subtree of all, in order.
    incoming: TypedBuffer,
    /// How long the sums have taken so far.
    folding: Duration,
}

impl Exchange {
    fn new(shards: Shards, workers: usize) -> Exchange {
        let held = shards.subtrees(workers).iter().map(Vec::len).collect();
        let (outgoing, incoming) = (TypedBuffer::default(), TypedBuffer::default());
        Exchange { tree: shards.tree(workers), held, outgoing, incoming, folding: Duration::ZERO }
    }

    fn sum<T: Element, S: DerefMut<Target = [T]>>(
        &mut self,
        group: &Group,
        subtrees: &mut [S],
    ) -> Result<(), Error> {
        let (me, world) = (group.rank(), group.size());
        let length = subtrees[0].len();
        let block = length / world;
        debug_assert_eq!((block * world, subtrees.len()), (length, self.held[me]));

        let outgoing = self.outgoing.of::<T>(self.held[me] * length);
        let blocks = (0..world).flat_map(|rank| subtrees.iter().map(move |of| (rank, of)));
        for (i, (rank, subtree)) in blocks.enumerate() {
            outgoing[i * block..][..block].copy_from_slice(&subtree[rank * block..][..block]);
        }
        let incoming = self.incoming.of::<T>(self.tree.inputs() * block);
        let sent = vec![self.held[me] * block; world];
        let received: Vec<usize> = self.held.iter().map(|held| held * block).collect();
        let longest = received.iter().copied().max().unwrap_or(0);
        all_to_all(group, outgoing, &sent, incoming, &received, longest)?;

        let inputs: Vec<*const u8> = match block {
            0 => vec![std::ptr::null(); self.tree.inputs()],
            _ => incoming.chunks_exact(block).map(|input| input.as_ptr().cast()).collect(),
        };
        let start = Instant::now();
        let own = subtrees[0][me * block..][..block].as_mut_ptr().cast();
        // SAFETY: every input is a block of the incoming buffer, and the result is a block of
        // another one.
        unsafe {
            kernel::fold(T::DTYPE, Reduction::Sum, &self.tree, &inputs, own, None, block, None);
        }
        self.folding += start.elapsed();
        group.all_gather_in_place(&mut subtrees[0])
    }
}

/// Replaces the first of a worker's leaves by the sums of its subtrees, in order; how many there are.
pub fn fold_leaves<T: Element, S: DerefMut<Target = [T]>>(
    shards: Shards,
    own: std::ops::Range<usize>,
    leaves: &mut [S],
) -> usize {
    let subtrees = tree::maximal_subtrees(shards.count(), own.clone());
    for (i, subtree) in subtrees.iter().enumerate() {
        let first = subtree.start - own.start;
        if subtree.len() == 1 {
            leaves.swap(i, first);
            continue;
        }
        let length = leaves[first].len();
        let of = &leaves[first..first + subtree.len()];
        assert!(of.iter().all(|leaf| leaf.len() == length), "leaves have one length");
        let inputs: Vec<*const u8> = of.iter().map(|leaf| leaf.as_ptr().cast()).collect();
        // Leaves before `first` belong to subtrees that are summed already.
        let into = leaves[i].as_mut_ptr().cast();
        let tree = Tree::canonical(subtree.len());
        // SAFETY: all are as long, `into` too, for it is a leaf; it is one of the inputs or none.
        unsafe {
            kernel::fold(T::DTYPE, Reduction::Sum, &tree, &inputs, into, None, length, None);
        }
    }
    subtrees.len()
}

/// An all-to-all of blocks whose lengths all ranks know, so that none needs to be asked.
pub fn all_to_all<T: Element>(
    group: &Group,
    outgoing: &[T],
    sent: &[usize],
    incoming: &mut [T],
    received: &[usize],
    longest: usize,
) -> Result<(), Error> {
    let longest = Some(longest);
    group.run(Request::all_to_all_unequal(outgoing, sent, incoming, received, longest)).map(drop)
}

/// Memory for elements of any type, kept from call to call.
#[derive(Default)]
struct TypedBuffer {
    words: Vec<u64>,
}

impl TypedBuffer {
    /// Room for as many elements, with any content.
    fn of<T: Element>(&mut self, count: usize) -> &mut [T] {
        const { assert!(align_of::<T>() <= align_of::<u64>()) };
        let words = (count * size_of::<T>()).div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        // SAFETY: there are as many bytes, aligned for `T`, of which any content is an element, for
        // elements are plain numbers.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accumulate::Accumulation;
    use unisono_collective::{Options, Transport};

    /// Leaves whose sum depends on the order.
    fn leaf(shard: usize, length: usize) -> Vec<f32> {
        let value =
            |i: usize| ((shard * 7919 + i * 104_729) % 1009) as f32 * 1.1f32.powi(shard as i32);
        (0..length).map(value).collect()
    }

    /// What `workers` make of the shards.
    fn sum(shards: usize, workers: usize, length: usize, options: &Options) -> Vec<Vec<f32>> {
        let shards = Shards::new(shards, workers).unwrap();
        let groups = Group::local(workers, options).unwrap();
        std::thread::scope(|scope| {
            let worker = |group: Group| {
                move || {
                    let range = shards.of(group.rank(), workers);
                    let plan = Accumulation::new(shards.count(), range.clone());
                    let padded = length.next_multiple_of(alignment(shards, workers));
                    let mut slots = vec![vec![0.0; padded]; plan.slots()];
                    for (i, shard) in range.enumerate() {
                        let values = leaf(shard, length);
                        plan.add(i, &mut slots, 0..length, &values.as_slice());
                    }
                    let mut combiner = Combiner::new(group, shards);
                    combiner.sum(&mut slots[..plan.sums()]).unwrap();
                    slots.swap_remove(0)[..length].to_vec()
                }
            };
            let workers: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(worker(group))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        })
    }

    #[test]
    fn any_number_of_workers_gives_the_bits_of_one() {
        for transport in [Transport::Shm, Transport::Tcp] {
            let mut options = Options::default();
            options.transport = transport;
            for shards in [1, 5, 8, 12] {
                for length in [0, 1, 1000] {
                    let expected = &sum(shards, 1, length, &Options::default())[0];
                    for workers in (1..=shards).filter(|w| [2, 3, 4, 5, 7, 8].contains(w)) {
                        for (rank, actual) in
                            sum(shards, workers, length, &options).iter().enumerate()
                        {
                            let same = actual.iter().map(|x| x.to_bits());
                            assert!(
                                same.eq(expected.iter().map(|x| x.to_bits())),
                                "{shards} shards, {workers} workers, rank {rank}, length {length}"
                            );
                        }
                    }
                }
            }
        }
    }
}
