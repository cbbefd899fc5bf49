//! Every algorithm, forced, on every operation it does: canonical bits where they are promised,
//! repeatable bits where they are not, and a clear refusal of what it does not do.

mod common;

use common::{Kind, Sample, on_all, reference};
use half::bf16;
use unisono_collective::{
    Algorithm, Dtype, Error, Group, InvalidCall, Op, Options, Reduction, Request,
};

/// One operation with the inputs and the expected outputs of all ranks; an output of a rank that
/// gets none is empty.
struct Case<T> {
    op: Op,
    reduction: Reduction,
    count: usize,
    inputs: Vec<Vec<T>>,
    outputs: Vec<Vec<T>>,
}

impl<T: Sample> Case<T> {
    fn new(op: Op, reduction: Reduction, world: usize, count: usize) -> Case<T> {
        let blocks = match op {
            Op::ReduceScatter | Op::Scatter { .. } | Op::AllToAll => world,
            _ => 1,
        };
        let inputs: Vec<Vec<T>> =
            (0..world).map(|rank| T::samples(count * blocks, 31 + rank as u64)).collect();
        let block = |rank: usize, i: usize| inputs[rank][i * count..(i + 1) * count].to_vec();
        let at = |root: usize, all: Vec<T>| {
            (0..world).map(|r| if r == root { all.clone() } else { Vec::new() }).collect()
        };
        let outputs: Vec<Vec<T>> = match op {
            Op::AllReduce => vec![reference(&inputs, reduction); world],
            Op::ReduceScatter => {
                let all = reference(&inputs, reduction);
                (0..world).map(|r| all[r * count..(r + 1) * count].to_vec()).collect()
            }
            Op::AllGather => vec![inputs.concat(); world],
            Op::Broadcast { root } => vec![inputs[root].clone(); world],
            Op::Reduce { root } => at(root, reference(&inputs, reduction)),
            Op::Gather { root } => at(root, inputs.concat()),
            Op::Scatter { root } => (0..world).map(|r| block(root, r)).collect(),
            Op::AllToAll => {
                (0..world).map(|r| (0..world).flat_map(|from| block(from, r)).collect()).collect()
            }
        };
        Case { op, reduction, count, inputs, outputs }
    }

    /// All operations, those with a root with two different ones.
    fn all(world: usize, count: usize, reduction: Reduction) -> Vec<Case<T>> {
        let mut ops = vec![Op::AllReduce, Op::ReduceScatter, Op::AllGather, Op::AllToAll];
        for root in if world > 1 { vec![0, world - 1] } else { vec![0] } {
            ops.extend([
                Op::Broadcast { root },
                Op::Reduce { root },
                Op::Gather { root },
                Op::Scatter { root },
            ]);
        }
        ops.into_iter().map(|op| Case::new(op, reduction, world, count)).collect()
    }

    /// This rank's output. In place where `in_place` and the operation can.
    fn run(&self, group: &Group, algorithm: Algorithm, in_place: bool) -> Result<Vec<T>, Error> {
        let (rank, count) = (group.rank(), self.count);
        let mut input = self.inputs[rank].clone();
        let junk = T::samples(1, 97)[0];
        let mut output = vec![junk; self.outputs[rank].len()];
        let mut whole = vec![junk; count * group.size()];
        let own = rank * count..(rank + 1) * count;
        let (from, into): (*const T, *mut T) = match self.op {
            Op::Broadcast { .. } => (input.as_ptr(), input.as_mut_ptr()),
            Op::AllReduce | Op::Reduce { .. } | Op::AllToAll if in_place => {
                (input.as_ptr(), input.as_mut_ptr())
            }
            Op::ReduceScatter if in_place => (input.as_ptr(), input[own.clone()].as_mut_ptr()),
            Op::AllGather if in_place => {
                whole[own.clone()].copy_from_slice(&input);
                (whole[own.clone()].as_ptr(), whole.as_mut_ptr())
            }
            _ => (input.as_ptr(), output.as_mut_ptr()),
        };
        // SAFETY: the vectors have the lengths the operation needs and outlive the call.
        let request = unsafe { Request::raw(self.op, T::DTYPE, count, from, into) }?;
        group.run(request.with_reduction(self.reduction).with_algorithm(algorithm))?;
        Ok(match self.op {
            Op::Broadcast { .. } => input,
            Op::Reduce { root } if in_place && root != rank => Vec::new(),
            Op::AllReduce | Op::Reduce { .. } | Op::AllToAll if in_place => input,
            Op::ReduceScatter if in_place => input[own].to_vec(),
            Op::AllGather if in_place => whole,
            _ => output,
        })
    }
}

/// Runs the case with every algorithm on one rank.
fn force_all<T: Sample>(group: &Group, case: &Case<T>, settings: &str) {
    let rank = group.rank();
    for algorithm in Algorithm::ALL {
        for in_place in [false, true] {
            let what = format!(
                "{algorithm} {:?} of {} {} on rank {rank} of {}, in place: {in_place}, {settings}",
                case.op,
                case.count,
                T::DTYPE,
                group.size(),
            );
            let outcome = case.run(group, algorithm, in_place);
            if !algorithm.supports(case.op, group.topology()) {
                let op = case.op.name();
                let refusal = InvalidCall::UnsupportedAlgorithm { algorithm, op };
                assert_eq!(outcome, Err(Error::InvalidCall(refusal)), "{what}");
                continue;
            }
            let output = outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
            if algorithm.is_canonical() || !case.op.reduces() {
                T::assert_same(&output, &case.outputs[rank], &what);
                continue;
            }
            let again = case.run(group, algorithm, in_place).unwrap();
            T::assert_same(&again, &output, &what);
            if case.op == Op::AllReduce {
                let mut first = output.clone();
                group.broadcast(&mut first, 0).unwrap();
                T::assert_same(&output, &first, &what);
            }
        }
    }
}

/// Segments of one column, of an odd number of bytes, and of more than any call has.
const SEGMENTS: [usize; 3] = [1, 3000, 1 << 30];

fn options(segment: usize, streams: usize) -> Options {
    let mut options = Options::default();
    options.segment = Some(segment);
    options.streams = Some(streams);
    options
}

fn sweep(worlds: impl IntoIterator<Item = usize>, start: impl Fn(usize, &Options) -> Vec<Group>) {
    for world in worlds {
        // Fewer elements than ranks, and a prime number of columns with a remainder.
        let few = Case::<f32>::all(world, world - 1, Reduction::Sum);
        let many = Case::<f32>::all(world, 509, Reduction::Sum);
        let halves = Case::<bf16>::all(world, 131, Reduction::Mean);
        for segment in SEGMENTS {
            let groups = start(world, &options(segment, 1));
            let settings = format!("segments of {segment}");
            on_all(&groups, |group| {
                few.iter().chain(&many).for_each(|case| force_all(group, case, &settings));
                halves.iter().for_each(|case| force_all(group, case, &settings));
                group.barrier().unwrap();
            });
        }
    }
}

#[test]
fn local() {
    sweep(1..=8, |world, options| Kind::Local.start(world, options));
}

#[test]
fn shm() {
    sweep([2, 3, 5, 8], |world, options| Kind::Shm.start(world, options));
}

#[test]
fn tcp() {
    sweep(2..=8, |world, options| Kind::Tcp.start(world, options));
}

/// Uneven, interleaved, alone, and one host of all: what a hierarchy must cope with.
#[test]
fn hosts() {
    let placements: [&[u32]; 9] = [
        &[0, 1],
        &[0, 0, 1],
        &[1, 0, 1, 0],
        &[0, 1, 1, 1],
        &[0, 1, 2, 3, 3],
        &[0, 0, 0, 1, 1, 2],
        &[2, 0, 1, 0, 2, 2],
        &[0, 1, 2, 0, 1, 2, 0],
        &[0, 0, 1, 0, 1, 2, 2, 0],
    ];
    for hosts in placements {
        sweep([hosts.len()], |_, options| Group::local_on_hosts(hosts, options).unwrap());
    }
}

/// Messages that are long enough to be cut into stripes.
#[test]
fn several_streams() {
    for (kind, world) in [(Kind::Local, 4), (Kind::Tcp, 2), (Kind::Tcp, 3), (Kind::LocalHosts, 5)] {
        let cases = [Op::AllReduce, Op::Reduce { root: 1 }, Op::Broadcast { root: 0 }]
            .map(|op| Case::<f32>::new(op, Reduction::Sum, world, 300_003));
        let blocks = [Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Scatter { root: 0 }]
            .map(|op| Case::<f32>::new(op, Reduction::Sum, world, 270_003));
        for segment in [500_003, 1 << 30] {
            let groups = kind.start(world, &options(segment, 3));
            let settings = format!("three streams, segments of {segment}");
            on_all(&groups, |group| {
                cases.iter().chain(&blocks).for_each(|case| force_all(group, case, &settings));
            });
        }
    }
}

/// What an algorithm that is not canonical gives is not noise: it is close to the canonical sum,
/// and it does not depend on when messages arrive.
#[test]
fn the_others_repeat_their_bits_in_every_new_group() {
    for algorithm in [Algorithm::Ring, Algorithm::DoubleTree] {
        for world in [3, 4, 7] {
            let case = Case::<f32>::new(Op::AllReduce, Reduction::Sum, world, 5003);
            let run = |kind: Kind| {
                let groups = kind.start(world, &options(4096, 1));
                on_all(&groups, |group| case.run(group, algorithm, false).unwrap()).swap_remove(0)
            };
            let first = run(Kind::Tcp);
            for (x, canonical) in first.iter().zip(&case.outputs[0]) {
                assert!((x - canonical).abs() < 1e-4 * world as f32, "{x} {canonical}");
            }
            for kind in [Kind::Tcp, Kind::Local] {
                f32::assert_same(&run(kind), &first, "another group");
            }
        }
    }
}

#[test]
fn an_algorithm_forced_for_the_group_is_used_where_it_can_be() {
    let mut options = Options::default();
    for algorithm in Algorithm::ALL {
        options.algorithm = Some(algorithm);
        let groups = Kind::Local.start(3, &options);
        on_all(&groups, |group| {
            let request = Request::sized(Op::AllReduce, Dtype::F32, 1000);
            let chosen = group.explain(request).unwrap().chosen;
            // There is one region.
            assert!(chosen == algorithm || algorithm == Algorithm::Regional, "{chosen}");
            let mut buffer = vec![group.rank() as i32; 1000];
            group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
            assert_eq!(buffer, vec![3; 1000]);
            // Not every algorithm can; then the model chooses.
            let mut all = [0; 3];
            group.all_to_all(&[10, 11, 12], &mut all).unwrap();
            assert_eq!(all, [10 + group.rank() as i32; 3]);
        });
    }
}

/// What saves rounds at the price of bytes and additions is for short calls, whatever the machine was busy with when
/// the group measured its links.
#[test]
fn whole_buffers_are_for_short_calls() {
    for world in [2, 3] {
        let groups = Kind::Tcp.start(world, &Options::default());
        on_all(&groups, |group| {
            let compete = |bytes: usize| {
                let request = Request::sized(Op::AllReduce, Dtype::F32, bytes / 4);
                let candidates = group.explain(request).unwrap().candidates;
                let whole = [Algorithm::Direct, Algorithm::RecursiveDoubling];
                candidates.iter().filter(|it| whole.contains(&it.algorithm)).count()
            };
            assert_eq!(compete(1 << 10), 2);
            assert_eq!(compete(64 << 20), 0);
        });
    }
}

/// Where canonical bits are promised, the model never chooses what does not give them.
#[test]
fn the_model_chooses_canonical_algorithms_for_floats() {
    for kind in [Kind::Local, Kind::LocalHosts, Kind::Tcp] {
        let groups = kind.start(4, &Options::default());
        for count in [1, 1000, 1 << 20, 1 << 26] {
            let request = Request::sized(Op::AllReduce, Dtype::F32, count);
            let explanation = groups[0].explain(request).unwrap();
            assert!(explanation.chosen.is_canonical());
            assert!(explanation.candidates.iter().all(|c| c.algorithm.is_canonical()));
        }
    }
}
