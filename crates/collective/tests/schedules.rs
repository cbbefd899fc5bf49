//! Every algorithm, interpreted in memory against the reference: right results, canonical order
//! where it is promised, no deadlock, no race; and proof that the check notices when a schedule
//! is wrong.

mod interpret;

use interpret::{Call, Expression, Fault, Floats, Sizes, Symbol, Symbols, interpret};
use proptest::prelude::*;
use unisono_collective::schedule::{
    Algorithm, Area, Fold, Op, Phase, Problem, Round, Schedule, Source, Topology, Window, build,
};

/// Why a schedule is wrong.
#[derive(Debug)]
#[expect(dead_code, reason = "for the message of a failed test")]
enum Wrong {
    Fault(Fault),
    Length { rank: usize },
    Element { rank: usize, index: usize, found: String },
}

fn ops(root: usize) -> [Op; 8] {
    [
        Op::AllReduce,
        Op::ReduceScatter,
        Op::AllGather,
        Op::Broadcast { root },
        Op::Reduce { root },
        Op::Gather { root },
        Op::Scatter { root },
        Op::AllToAll,
    ]
}

fn schedules(algorithm: Algorithm, op: Op, topology: &Topology) -> Option<Vec<Schedule>> {
    let world = topology.world();
    (0..world).map(|rank| build(algorithm, &Problem { op, rank, world }, topology)).collect()
}

/// Sizes for an operation: `count` elements, in blocks that are `uneven` or not.
fn sizes(op: Op, world: usize, count: usize, uneven: bool) -> Sizes {
    let size = |from: usize, to: usize| match uneven {
        true => (from * 5 + to * 3 + count) % (count + 1),
        false => count,
    };
    match op {
        Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. } => Sizes::Whole(count),
        Op::AllToAll => {
            Sizes::Matrix((0..world).map(|a| (0..world).map(|b| size(a, b)).collect()).collect())
        }
        _ => Sizes::Blocks((0..world).map(|rank| size(rank, 0)).collect()),
    }
}

/// The elements that a rank's output must be made of: (rank, index) of the one leaf it must be,
/// or `Err(index)` for the reduction of that element over all ranks.
fn reference(call: &Call, world: usize, rank: usize) -> Vec<Result<(usize, usize), usize>> {
    let offset = |counts: &[usize], block: usize| counts[..block].iter().sum::<usize>();
    match (&call.op, &call.sizes) {
        (Op::AllReduce, Sizes::Whole(count)) => (0..*count).map(Err).collect(),
        (Op::Reduce { root }, Sizes::Whole(count)) if rank == *root => {
            (0..*count).map(Err).collect()
        }
        (Op::Broadcast { root }, Sizes::Whole(count)) => {
            (0..*count).map(|i| Ok((*root, i))).collect()
        }
        (Op::ReduceScatter, Sizes::Blocks(counts)) => {
            (0..counts[rank]).map(|i| Err(offset(counts, rank) + i)).collect()
        }
        (Op::Scatter { root }, Sizes::Blocks(counts)) => {
            (0..counts[rank]).map(|i| Ok((*root, offset(counts, rank) + i))).collect()
        }
        (Op::AllGather, Sizes::Blocks(counts)) => gathered(counts),
        (Op::Gather { root }, Sizes::Blocks(counts)) if rank == *root => gathered(counts),
        (Op::AllToAll, Sizes::Matrix(counts)) => (0..world)
            .flat_map(|from| {
                let start = offset(&counts[from], rank);
                (0..counts[from][rank]).map(move |i| Ok((from, start + i)))
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn gathered(counts: &[usize]) -> Vec<Result<(usize, usize), usize>> {
    let block = |(rank, count): (usize, &usize)| (0..*count).map(move |i| Ok((rank, i)));
    counts.iter().enumerate().flat_map(block).collect()
}

/// Runs schedules with symbols and compares every element of every output.
fn check(
    algorithm: Algorithm,
    call: &Call,
    topology: &Topology,
    schedules: &[Schedule],
) -> Result<(), Wrong> {
    let world = topology.world();
    let mut symbols = Symbols::default();
    // The closure cannot intern while the machine does, so all leaves are made beforehand.
    let longest = match &call.sizes {
        Sizes::Whole(count) => *count,
        Sizes::Blocks(counts) => counts.iter().sum(),
        Sizes::Matrix(counts) => counts.iter().map(|row| row.iter().sum()).max().unwrap_or(0),
    };
    let leaves: Vec<Vec<Symbol>> = (0..world)
        .map(|rank| (0..longest).map(|index| symbols.leaf(rank, index)).collect())
        .collect();
    let input = |rank: usize, index: usize| leaves[rank][index];
    let outputs =
        interpret(call, topology, schedules, &mut symbols, input).map_err(Wrong::Fault)?;
    let mut agreed: Vec<Option<Symbol>> = vec![None; longest];
    for (rank, output) in outputs.iter().enumerate() {
        let expected = reference(call, world, rank);
        if output.len() != expected.len() {
            return Err(Wrong::Length { rank });
        }
        for (index, (found, expected)) in output.iter().zip(expected).enumerate() {
            let good = match (*found, expected) {
                (None, _) => false,
                (Some(found), Ok((from, element))) => found == leaves[from][element],
                (Some(found), Err(element)) if algorithm.is_canonical() || world == 1 => {
                    let sum = symbols.canonical(0..world, element);
                    matches!(symbols.expression(found), Expression::Root(inner) if inner == sum)
                }
                (Some(found), Err(element)) => {
                    let leaves = match symbols.expression(found) {
                        Expression::Root(inner) => symbols.leaves(inner),
                        _ => None,
                    };
                    let mut leaves = leaves.unwrap_or_default();
                    leaves.sort_unstable();
                    let once = leaves.into_iter().eq((0..world).map(|rank| (rank, element)));
                    once && *agreed[element].get_or_insert(found) == found
                }
            };
            if !good {
                let found = format!("{:?}", found.map(|symbol| symbols.expression(symbol)));
                return Err(Wrong::Element { rank, index, found });
            }
        }
    }
    Ok(())
}

/// Several ways to place ranks on hosts.
fn topologies(world: usize) -> Vec<Topology> {
    let place = |host: &dyn Fn(usize) -> usize| {
        Topology::new(&(0..world).map(|rank| host(rank) as u32).collect::<Vec<_>>())
    };
    vec![
        Topology::one_host(world),
        Topology::all_apart(world),
        place(&|rank| rank / 4),
        place(&|rank| rank / 3),
        place(&|rank| rank % 2),
        place(&|rank| rank % 3),
        place(&|rank| usize::from(rank == world / 2)),
    ]
}

/// Several ways to place ranks on hosts, and hosts in regions.
fn regions(world: usize) -> Vec<Topology> {
    let mut all = Vec::new();
    for topology in topologies(world).into_iter().filter(|topology| !topology.is_one_host()) {
        let mut add = |region: &dyn Fn(usize) -> usize| {
            let numbers: Vec<u32> = (0..topology.hosts()).map(|host| region(host) as u32).collect();
            let topology = topology.clone().in_regions(&numbers);
            if topology.regions() > 1 && !all.contains(&topology) {
                all.push(topology);
            }
        };
        add(&|host| host / 2);
        add(&|host| host / 3);
        add(&|host| host % 2);
        add(&|host| host);
        add(&|host| usize::from(host + 1 == topology.hosts()));
    }
    all
}

#[test]
fn every_algorithm_every_small_world() {
    let mut checked = 0;
    for world in 1..=17 {
        for topology in topologies(world).into_iter().chain(regions(world)) {
            for (op, algorithm) in
                ops(world / 2).into_iter().flat_map(|op| Algorithm::ALL.map(|a| (op, a)))
            {
                let matters = match algorithm {
                    Algorithm::Regional => topology.regions() > 1,
                    Algorithm::Hierarchical => topology.regions() == 1,
                    _ => topology.is_one_host(),
                };
                if !matters {
                    continue;
                }
                let Some(schedules) = schedules(algorithm, op, &topology) else { continue };
                for (case, count) in [0, 1, world - 1, 4 * world + 3].into_iter().enumerate() {
                    let uneven = case % 2 == 1;
                    let call = Call {
                        op,
                        sizes: sizes(op, world, count, uneven),
                        column: 1 + case,
                        // Unequal parts of an all-to-all lie elsewhere in input and output.
                        in_place: case >= 2 && !(op == Op::AllToAll && uneven),
                        in_flight: 3,
                        seed: (world * 31 + case) as u64,
                    };
                    let result = check(algorithm, &call, &topology, &schedules);
                    assert!(result.is_ok(), "{algorithm} {topology:?} {call:?}: {result:?}");
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 3000, "{checked}");
}

/// The scratch cells that a fold of several blocks reads for one block and writes for another.
fn entangled(inputs: impl Iterator<Item = Area>, into: Area, blocks: usize) -> Option<(u32, u32)> {
    let Area::Scratch(written) = into else { return None };
    let cell = |area| if let Area::Scratch(cell) = area { Some(cell) } else { None };
    let is_entangled = |read: &u32| *read != written && read.abs_diff(written) < blocks as u32;
    inputs.filter_map(cell).find(is_entangled).map(|read| (read, written))
}

/// Several threads carry out a fold, each on a share of every block: no block may depend on another.
#[test]
fn the_blocks_of_a_fold_have_nothing_to_do_with_each_other() {
    let mut folds = 0;
    let mut expect = |inputs: Vec<Area>, into, blocks: usize, what: &str| {
        assert_eq!(entangled(inputs.into_iter(), into, blocks), None, "{what}");
        folds += usize::from(blocks > 1);
    };
    for (algorithm, world) in Algorithm::ALL
        .into_iter()
        .flat_map(|algorithm| (1..=12).map(move |world| (algorithm, world)))
    {
        for topology in topologies(world).into_iter().chain(regions(world)) {
            for op in ops(world - 1) {
                let what = format!("{algorithm} {op:?} of {topology:?}");
                let all = schedules(algorithm, op, &topology).into_iter().flatten();
                for phase in all.flat_map(|schedule| schedule.phases) {
                    let (local, shared) = match phase {
                        Phase::Rounds(rounds) => {
                            let folds = rounds.rounds.into_iter().flat_map(|round| round.folds);
                            (folds.collect(), Vec::new())
                        }
                        Phase::Window(window) => (window.copies, window.folds),
                    };
                    let local = local.into_iter().map(|f: Fold| (f.inputs, f.into, f.blocks));
                    let own = |source: &Source| match source {
                        Source::Own(area) => Some(*area),
                        Source::Staged { .. } => None,
                    };
                    let shared = shared
                        .into_iter()
                        .map(|f| (f.inputs.iter().filter_map(own).collect(), f.into, f.blocks));
                    local.chain(shared).for_each(|(inputs, into, blocks)| {
                        expect(inputs, into, blocks.len(), &what);
                    });
                }
            }
        }
    }
    assert!(folds > 0, "no fold has several blocks");
    let cells = [Area::Scratch(3), Area::Input].into_iter();
    assert_eq!(entangled(cells, Area::Scratch(2), 2), Some((3, 2)));
}

fn any_case() -> impl Strategy<Value = (Algorithm, Topology, Call)> {
    let world = prop_oneof![1..=9_usize, 1..=64_usize];
    world.prop_flat_map(|world| {
        let hosts = prop_oneof![
            Just(vec![0; world]),
            (1..=world).prop_map(move |size| (0..world).map(|rank| (rank / size) as u32).collect()),
            (1..=world)
                .prop_map(move |hosts| (0..world).map(|rank| (rank % hosts) as u32).collect()),
            proptest::collection::vec(0..4_u32, world),
        ];
        let algorithm = proptest::sample::select(Algorithm::ALL.to_vec());
        let op = (0..world, 0..8_usize).prop_map(|(root, op)| ops(root)[op]);
        // About as many elements for every world, so that large ones do not take all the time.
        let count = prop_oneof![
            0..=1_usize,
            0..world,
            proptest::sample::select(vec![2, 3, 5, 7, 31, 61]),
            (1..=3_usize).prop_map(move |columns| columns * world),
        ];
        let flags = (any::<bool>(), any::<bool>());
        let regions = prop_oneof![
            Just(vec![0; world]),
            (1..=world).prop_map(move |size| (0..world).map(|host| (host / size) as u32).collect()),
            proptest::collection::vec(0..3_u32, world),
        ];
        let rest = (1..=8_usize, 1..=4_usize, any::<u64>());
        (algorithm, (hosts, regions), op, count, flags, rest).prop_map(
            move |(algorithm, places, op, count, (uneven, in_place), (column, in_flight, seed))| {
                let count = if op.has_blocks() { count.min(512 / world) } else { count };
                let in_place = in_place && !(op == Op::AllToAll && uneven);
                let sizes = sizes(op, world, count, uneven);
                let call = Call { op, sizes, column, in_place, in_flight, seed };
                let (hosts, regions): (Vec<u32>, Vec<u32>) = places;
                let topology = Topology::new(&hosts);
                let regions = &regions[..topology.hosts()];
                (algorithm, topology.in_regions(regions), call)
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_algorithm_any_case((algorithm, topology, call) in any_case()) {
        if let Some(schedules) = schedules(algorithm, call.op, &topology) {
            let result = check(algorithm, &call, &topology, &schedules);
            prop_assert!(result.is_ok(), "{result:?}");
        }
    }

    #[test]
    fn the_bits_of_a_mean_are_those_of_the_reference(
        world in 1..=33_usize,
        canonical in proptest::sample::select(
            Algorithm::ALL.into_iter().filter(|a| a.is_canonical()).collect::<Vec<_>>(),
        ),
        ranks_per_host in 1..=8_usize,
        column in 1..=4_usize,
        seed: u64,
    ) {
        let hosts: Vec<u32> = (0..world).map(|rank| (rank / ranks_per_host) as u32).collect();
        let window = matches!(canonical, Algorithm::Window | Algorithm::WindowDirect);
        let topology = if window { Topology::one_host(world) } else { Topology::new(&hosts) };
        let numbers: Vec<u32> = (0..topology.hosts()).map(|host| (host / 2) as u32).collect();
        let topology = topology.in_regions(&numbers);
        prop_assume!(canonical.supports(Op::AllReduce, &topology));
        let count = 11;
        let value = |rank: usize, index: usize| {
            let bits = (seed ^ (rank * count + index) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (bits >> 40) as f32 / 1000.0 - 5000.0
        };
        fn sum(ranks: std::ops::Range<usize>, value: &dyn Fn(usize) -> f32) -> f32 {
            if ranks.len() == 1 {
                return value(ranks.start);
            }
            let mid = ranks.start + (ranks.len().next_power_of_two() / 2);
            sum(ranks.start..mid, value) + sum(mid..ranks.end, value)
        }
        let sizes = Sizes::Whole(count);
        let call = Call { op: Op::AllReduce, sizes, column, in_place: true, in_flight: 2, seed };
        let schedules = schedules(canonical, call.op, &topology).expect("all do an all-reduce");
        let outputs = interpret(&call, &topology, &schedules, &mut Floats { world }, value)
            .expect("no fault");
        for output in outputs {
            for (index, found) in output.into_iter().enumerate() {
                let mean = sum(0..world, &|rank| value(rank, index)) / world as f32;
                prop_assert_eq!(found.map(f32::to_bits), Some(mean.to_bits()));
            }
        }
    }
}

fn without<T>(list: &mut Vec<T>, index: usize) {
    list.remove(index);
}

/// Ways to break a schedule, for the tests of the check itself.
fn mutants(schedule: &Schedule) -> Vec<(String, Schedule)> {
    let mut mutants = Vec::new();
    let mut mutate = |name: &str, change: &mut dyn FnMut(&mut Schedule)| {
        let mut mutant = schedule.clone();
        change(&mut mutant);
        mutants.push((name.to_owned(), mutant));
    };
    for (p, phase) in schedule.phases.iter().enumerate() {
        match phase {
            Phase::Rounds(rounds) => {
                for (r, round) in rounds.rounds.iter().enumerate() {
                    let mut each = |name: &str, change: &dyn Fn(&mut Round)| {
                        mutate(&format!("{name} in round {r} of phase {p}"), &mut |schedule| {
                            let Phase::Rounds(rounds) = &mut schedule.phases[p] else { return };
                            change(&mut rounds.rounds[r]);
                        });
                    };
                    for i in 0..round.sends.len() {
                        each("no send", &|round| without(&mut round.sends, i));
                    }
                    for i in 0..round.recvs.len() {
                        each("no receive", &|round| without(&mut round.recvs, i));
                    }
                    for (i, fold) in round.folds.iter().enumerate() {
                        each("no fold", &|round| without(&mut round.folds, i));
                        if fold.inputs.len() > 1 {
                            each("swapped", &|round| round.folds[i].inputs.swap(0, 1));
                            each("no root", &|round| round.folds[i].root ^= true);
                        }
                    }
                }
            }
            Phase::Window(window) => {
                let mut each = |name: &str, change: &dyn Fn(&mut Window)| {
                    mutate(&format!("{name} in phase {p}"), &mut |schedule| {
                        let Phase::Window(window) = &mut schedule.phases[p] else { return };
                        change(window);
                    });
                };
                for i in 0..window.stages.len() {
                    each("no stage", &|window| without(&mut window.stages, i));
                }
                for i in 0..window.copies.len() {
                    each("no copy", &|window| without(&mut window.copies, i));
                }
                for i in 0..window.collects.len() {
                    each("no collect", &|window| without(&mut window.collects, i));
                }
                for (i, fold) in window.folds.iter().enumerate() {
                    each("no fold", &|window| without(&mut window.folds, i));
                    if fold.inputs.len() > 1 {
                        each("swapped", &|window| window.folds[i].inputs.swap(0, 1));
                        each("no root", &|window| window.folds[i].root ^= true);
                    }
                    if fold.publish.is_some() {
                        each("not published", &|window| window.folds[i].publish = None);
                        each("no second wait", &|window| window.publishes = false);
                    }
                }
            }
        }
    }
    mutants
}

#[test]
fn every_mutant_is_noticed() {
    let mut killed = 0;
    let one_region = [[0; 5], [0, 0, 0, 1, 1]].map(|hosts| Topology::new(&hosts));
    let regions = [&[0, 0, 0, 1, 1][..], &[0, 1, 0, 1, 0], &[0, 0, 1, 2, 2]];
    let regions = regions.map(|numbers| Topology::all_apart(5).in_regions(numbers));
    let of_hosts = Topology::new(&[0, 0, 1, 1, 2]).in_regions(&[0, 0, 1]);
    for topology in one_region.into_iter().chain(regions).chain([of_hosts]) {
        let world = topology.world();
        for (op, algorithm) in ops(1).into_iter().flat_map(|op| Algorithm::ALL.map(|a| (op, a))) {
            let matters = match algorithm {
                Algorithm::Regional => true,
                Algorithm::Hierarchical => !topology.is_one_host() && topology.regions() == 1,
                _ => topology.is_one_host(),
            };
            if !matters {
                continue;
            }
            let Some(schedules) = schedules(algorithm, op, &topology) else { continue };
            let sizes = sizes(op, world, 31, false);
            let call = Call { op, sizes, column: 4, in_place: false, in_flight: 2, seed: 7 };
            for rank in 0..world {
                for (name, mutant) in mutants(&schedules[rank]) {
                    // Those that are not canonical may add in either order, if all agree.
                    if name.starts_with("swapped") && !algorithm.is_canonical() {
                        continue;
                    }
                    let mut broken = schedules.clone();
                    broken[rank] = mutant;
                    let result = check(algorithm, &call, &topology, &broken);
                    assert!(result.is_err(), "{algorithm} {op:?}, rank {rank}: {name}");
                    killed += 1;
                }
            }
        }
    }
    assert!(killed > 500, "{killed}");
}

/// The direct all-reduce without its copy: in place, the result overwrites what is being sent.
#[test]
fn a_race_is_noticed_under_every_seed() {
    let topology = Topology::all_apart(3);
    let mut broken = schedules(Algorithm::Direct, Op::AllReduce, &topology).expect("supported");
    for (rank, schedule) in broken.iter_mut().enumerate() {
        let Phase::Rounds(rounds) = &mut schedule.phases[0] else { panic!("rounds") };
        let round = &mut rounds.rounds[1];
        round.sends.iter_mut().for_each(|send| send.from = Area::Input);
        let fold: &mut Fold = &mut round.folds[0];
        fold.inputs[rank] = Area::Input;
    }
    for seed in 0..100 {
        let sizes = Sizes::Whole(5);
        let mut call =
            Call { op: Op::AllReduce, sizes, column: 2, in_place: true, in_flight: 2, seed };
        let result = check(Algorithm::Direct, &call, &topology, &broken);
        assert!(matches!(result, Err(Wrong::Fault(Fault::Race { .. }))), "{result:?}");
        call.in_place = false;
        let result = check(Algorithm::Direct, &call, &topology, &broken);
        assert!(result.is_ok(), "{result:?}");
    }
}

/// What crosses between regions is what one rank for each region would send, however many hosts they have.
#[test]
fn as_little_as_possible_crosses_between_regions() {
    for (world, hosts, regions) in
        [(4, 4, vec![2, 2]), (8, 8, vec![4, 4]), (8, 4, vec![2, 2]), (16, 16, vec![4, 4, 4, 4])]
    {
        let numbers: Vec<u32> = (0..world).map(|rank| (rank * hosts / world) as u32).collect();
        let region = |(region, hosts): (usize, &usize)| vec![region as u32; *hosts];
        let of_hosts: Vec<u32> = regions.iter().enumerate().flat_map(region).collect();
        let topology = Topology::new(&numbers).in_regions(&of_hosts);
        let all = schedules(Algorithm::Regional, Op::AllReduce, &topology).expect("supported");
        let mut crossing = vec![0; regions.len()];
        for (rank, schedule) in all.iter().enumerate() {
            let rounds = schedule.phases.iter().filter_map(|phase| match phase {
                Phase::Rounds(rounds) => Some(&rounds.rounds),
                Phase::Window(_) => None,
            });
            for send in rounds.flatten().flat_map(|round| &round.sends) {
                if !topology.share_region(rank, send.to) {
                    crossing[topology.region(topology.host(rank))] += send.blocks.len();
                }
            }
        }
        let count = regions.len();
        let least = 2 * (count - 1) * all[0].parts as usize;
        assert!(crossing.iter().all(|sent| sent * count == least), "{crossing:?} of {least}");
    }
}

/// Bytes are what the algorithms promise: an all-reduce by pairwise exchange, by halving and
/// doubling or by a ring sends `2(n−1)/n` of the buffer.
#[test]
fn all_reduce_sends_no_more_than_it_must() {
    for world in [2, 4, 8, 16] {
        for algorithm in [Algorithm::Pairwise, Algorithm::HalvingDoubling, Algorithm::Ring] {
            let topology = Topology::all_apart(world);
            for schedule in schedules(algorithm, Op::AllReduce, &topology).expect("supported") {
                let Phase::Rounds(rounds) = &schedule.phases[0] else { panic!("rounds") };
                let sends = rounds.rounds.iter().flat_map(|round| &round.sends);
                let sent: usize = sends.map(|send| send.blocks.len()).sum();
                assert_eq!(sent * world, 2 * (world - 1) * schedule.parts as usize);
            }
        }
    }
}
