//! Operation × type × transport × world × count, against a reference computed on one rank.

mod common;

use common::{Kind, Sample, on_all, reference};
use unisono_collective::{Dtype, Element, Group, Options, Reduction};

/// Counts that matter: nothing, one, fewer than ranks, primes, several segments.
fn counts(world: usize) -> Vec<usize> {
    if world > 5 { vec![0, 1, world - 1, 5003] } else { vec![0, 1, world - 1, 7, 1009, 9973] }
}

/// Small segments, so that a few thousand elements are many of them.
fn options() -> Options {
    let mut options = Options::default();
    options.segment = Some(8 << 10);
    options
}

fn reductions<T: Element>() -> Vec<Reduction> {
    Reduction::ALL.into_iter().filter(|r| r.supports(T::DTYPE)).collect()
}

/// Every rank's input, known to all.
fn inputs<T: Sample>(world: usize, count: usize, seed: u64) -> Vec<Vec<T>> {
    (0..world).map(|rank| T::samples(count, seed * 1000 + rank as u64)).collect()
}

fn reducing_operations<T: Sample>(group: &Group, count: usize) {
    let (rank, world) = (group.rank(), group.size());
    for (i, reduction) in reductions::<T>().into_iter().enumerate() {
        let all = inputs::<T>(world, count, i as u64);
        let expected = reference(&all, reduction);
        let what = format!("{} {reduction} {count} of {world}", T::DTYPE);

        let mut in_place = all[rank].clone();
        group.all_reduce(&mut in_place, reduction).unwrap();
        T::assert_same(&in_place, &expected, &what);

        let mut output = T::samples(count, 99);
        group.all_reduce_into(&all[rank], &mut output, reduction).unwrap();
        T::assert_same(&output, &expected, &what);

        let root = (i + count) % world;
        let mut result = T::samples(count, 98);
        let at_root = (rank == root).then_some(&mut result[..]);
        group.reduce(&all[rank], at_root, reduction, root).unwrap();
        let mut in_place = all[rank].clone();
        group.reduce_in_place(&mut in_place, reduction, root).unwrap();
        if rank == root {
            T::assert_same(&result, &expected, &what);
            T::assert_same(&in_place, &expected, &what);
        } else {
            T::assert_same(&in_place, &all[rank], "the buffer of a rank that is not the root");
        }

        let all = inputs::<T>(world, count * world, 50 + i as u64);
        let expected = reference(&all, reduction);
        let own = rank * count..(rank + 1) * count;
        let mut output = T::samples(count, 97);
        group.reduce_scatter(&all[rank], &mut output, reduction).unwrap();
        T::assert_same(&output, &expected[own.clone()], &what);
        let mut in_place = all[rank].clone();
        group.reduce_scatter_in_place(&mut in_place, reduction).unwrap();
        T::assert_same(&in_place[own.clone()], &expected[own], &what);
    }
}

fn moving_operations<T: Sample>(group: &Group, count: usize) {
    let (rank, world) = (group.rank(), group.size());
    let all = inputs::<T>(world, count, 7);
    let what = format!("{} {count} of {world}", T::DTYPE);
    let gathered = all.concat();

    let mut output = T::samples(count * world, 99);
    group.all_gather(&all[rank], &mut output).unwrap();
    T::assert_same(&output, &gathered, &what);
    let mut in_place = T::samples(count * world, 98);
    in_place[rank * count..(rank + 1) * count].copy_from_slice(&all[rank]);
    group.all_gather_in_place(&mut in_place).unwrap();
    T::assert_same(&in_place, &gathered, &what);

    // Rank r has count + r elements, rank 1 none.
    let lengths: Vec<usize> = (0..world).map(|r| if r == 1 { 0 } else { count + r }).collect();
    let uneven: Vec<Vec<T>> = (0..world).map(|r| T::samples(lengths[r], r as u64)).collect();
    let mut output = T::samples(lengths.iter().sum(), 97);
    group.all_gather_unequal(&uneven[rank], &mut output, &lengths).unwrap();
    T::assert_same(&output, &uneven.concat(), &what);

    let root = count % world;
    let mut buffer = all[rank].clone();
    group.broadcast(&mut buffer, root).unwrap();
    T::assert_same(&buffer, &all[root], &what);

    let mut output = T::samples(count * world, 96);
    let at_root = (rank == root).then_some(&mut output[..]);
    group.gather(&all[rank], at_root, root).unwrap();
    if rank == root {
        T::assert_same(&output, &gathered, &what);
    }
    let mut output = T::samples(count, 95);
    group.scatter((rank == root).then_some(&gathered[..]), &mut output, root).unwrap();
    T::assert_same(&output, &all[rank], &what);

    // What rank a sends to rank b is known from both numbers.
    let block = |a: usize, b: usize| T::samples(count, (a * world + b) as u64);
    let sent: Vec<T> = (0..world).flat_map(|peer| block(rank, peer)).collect();
    let expected: Vec<T> = (0..world).flat_map(|peer| block(peer, rank)).collect();
    let mut output = T::samples(count * world, 94);
    group.all_to_all(&sent, &mut output).unwrap();
    T::assert_same(&output, &expected, &what);
    let mut in_place = sent.clone();
    group.all_to_all_in_place(&mut in_place).unwrap();
    T::assert_same(&in_place, &expected, &what);

    let length = |a: usize, b: usize| if (a + b).is_multiple_of(3) { 0 } else { count + a + 2 * b };
    let block = |a: usize, b: usize| T::samples(length(a, b), (a * world + b) as u64);
    let sent: Vec<T> = (0..world).flat_map(|peer| block(rank, peer)).collect();
    let expected: Vec<T> = (0..world).flat_map(|peer| block(peer, rank)).collect();
    let sent_counts: Vec<usize> = (0..world).map(|peer| length(rank, peer)).collect();
    let received_counts: Vec<usize> = (0..world).map(|peer| length(peer, rank)).collect();
    let mut output = T::samples(expected.len(), 93);
    group.all_to_all_unequal(&sent, &sent_counts, &mut output, &received_counts).unwrap();
    T::assert_same(&output, &expected, &what);

    if world > 1 {
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let mut buffer = T::samples(count, 92);
        std::thread::scope(|scope| {
            scope.spawn(|| group.send(&all[rank], next, 5).unwrap());
            group.receive(&mut buffer, previous, 5).unwrap();
        });
        T::assert_same(&buffer, &all[previous], &what);
    }
    group.barrier().unwrap();
}

fn everything<T: Sample>(group: &Group) {
    for count in counts(group.size()) {
        reducing_operations::<T>(group, count);
        moving_operations::<T>(group, count);
    }
}

/// Beyond five ranks, where threads far outnumber cores, a type of each kind stands for all: how
/// elements combine no longer depends on the type there.
fn matrix(kind: Kind, world: usize) {
    let groups = kind.start(world, &options());
    on_all(&groups, |group| {
        for dtype in Dtype::ALL {
            if world > 5 && !matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::I64) {
                continue;
            }
            match dtype {
                Dtype::F32 => everything::<f32>(group),
                Dtype::F64 => everything::<f64>(group),
                Dtype::F16 => everything::<half::f16>(group),
                Dtype::Bf16 => everything::<half::bf16>(group),
                Dtype::I8 => everything::<i8>(group),
                Dtype::U8 => everything::<u8>(group),
                Dtype::I32 => everything::<i32>(group),
                Dtype::I64 => everything::<i64>(group),
            }
        }
    });
}

/// One test per transport, so that they run side by side.
macro_rules! matrix {
    ($($name:ident: $kind:expr, $worlds:expr;)*) => {$(
        #[test]
        fn $name() {
            for world in $worlds {
                matrix($kind, world);
            }
        }
    )*};
}

matrix! {
    local_small: Kind::Local, 1..=5;
    local_large: Kind::Local, [6, 7, 8, 9, 16];
    hosts_small: Kind::LocalHosts, 1..=5;
    hosts_large: Kind::LocalHosts, [6, 7, 8, 9, 16];
    shm_small: Kind::Shm, 1..=5;
    shm_large: Kind::Shm, [6, 7, 8, 9, 16];
    tcp_small: Kind::Tcp, 1..=5;
    tcp_large: Kind::Tcp, [6, 7, 8, 9, 16];
    tcp6: Kind::Tcp6, [2, 3];
}
