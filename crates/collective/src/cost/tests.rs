use super::*;
use crate::schedule::candidates;

/// Cuts `bytes` per buffer (or per block, where ranks have their own) as an executor might.
fn cut(op: Op, world: usize, bytes: usize) -> impl Fn(Algorithm, &Schedule) -> Cut {
    move |_, schedule| {
        let blocks = if op.has_blocks() { world } else { schedule.parts as usize };
        let block = if op.has_blocks() { bytes } else { bytes.div_ceil(blocks) };
        let column = (512 * 1024 / blocks).clamp(1, block.max(1));
        Cut { column: column.min(block), segments: block.div_ceil(column).max(1), in_flight: 4 }
    }
}

fn ranking(op: Op, topology: &Topology, canonical: bool, bytes: usize) -> Vec<Algorithm> {
    let contest = Contest::new(op, topology, &candidates(op, topology, canonical), None);
    let cut = cut(op, topology.world(), bytes);
    let predictions = contest.predict(&Costs::default(), cut);
    predictions.into_iter().map(|prediction| prediction.algorithm).collect()
}

fn best(topology: &Topology, bytes: usize) -> Algorithm {
    ranking(Op::AllReduce, topology, true, bytes)[0]
}

#[test]
fn links_have_more_streams_where_threads_can_use_them() {
    let streams = |threads: f64, world: usize| {
        Costs { threads, ..Costs::default() }.streams(&Topology::all_apart(world))
    };
    assert_eq!(streams(1.0, 2), 1, "one thread would only share it between sockets");
    assert_eq!(streams(4.0, 8), 4);
    assert_eq!(streams(1.5, 8), 2, "one each way costs a single thread nothing");
    assert_eq!(streams(4.0, 64), 1, "too many sockets");
    let needed = |topology: &Topology| Costs { streams: 8, ..Costs::default() }.streams(topology);
    assert_eq!(needed(&Topology::all_apart(2)), 8, "one carries a part of the rate");
    assert_eq!(needed(&Topology::new(&[0, 0, 0, 1, 1])), 3, "the ranks of a host share its way");
    assert_eq!(needed(&Topology::all_apart(17)), 1, "too many sockets");
    let regions = Topology::all_apart(4).in_regions(&[0, 0, 1, 1]);
    assert_eq!(needed(&regions), 1, "nothing was tried between regions");
}

#[test]
fn threads_share_the_messages_of_a_round_out() {
    let several = Traffic { messages: 14.0, sent: 7.0, received: 7.0 };
    let pair = Traffic { messages: 2.0, sent: 7.0, received: 7.0 };
    let costs = Costs { threads: 2.0, ..Costs::default() };
    assert!(several.speedup(&costs, 1e6) > 1.0);
    assert_eq!(pair.speedup(&costs, 1e6), 1.0, "one message each way");
    assert_eq!(several.speedup(&costs, 1e3), 1.0, "too little for a helper");
    assert_eq!(several.speedup(&Costs::default(), 1e6), 1.0, "one thread");
}

#[test]
fn threads_are_worth_more_messages_where_the_link_is_quicker_than_one_of_them() {
    let first = |threads: f64, byte: f64, ranks: &Topology| {
        let far = LinkCost { message: 3e-6, latency: 3e-6, byte };
        let costs = Costs { far, threads, fold: 2e-11, ..Costs::default() };
        let contest = Contest::new(
            Op::AllReduce,
            ranks,
            &[Algorithm::HalvingDoubling, Algorithm::Pairwise],
            None,
        );
        let cut = Cut { column: (1 << 20) / 8, segments: 8, in_flight: 4 };
        contest.predict(&costs, |_, _| cut)[0].algorithm
    };
    let apart = Topology::all_apart(8);
    assert_eq!(first(1.0, 1.5e-10, &apart), Algorithm::HalvingDoubling, "fewer messages");
    assert_eq!(first(2.0, 1.5e-10, &apart), Algorithm::Pairwise, "messages for two threads");
    assert_eq!(first(2.0, 8e-9, &apart), Algorithm::HalvingDoubling, "the link takes as long");
}

#[test]
fn more_is_under_way_the_longer_it_takes() {
    let far = |latency| LinkCost { latency, ..Costs::default().far };
    let costs = |latency| Costs { far: far(latency), ..Costs::default() };
    assert_eq!(costs(20e-3).under_way(&Topology::all_apart(2)), 50_000_000);
    assert!(costs(30e-6).under_way(&Topology::all_apart(2)) < 512 << 10, "a local network");
    assert_eq!(costs(1.0).under_way(&Topology::one_host(2)), 0, "there is no far link");
}

#[test]
fn little_data_takes_one_wait_or_one_round() {
    assert_eq!(best(&Topology::one_host(4), 64), Algorithm::WindowDirect);
    assert_eq!(best(&Topology::all_apart(4), 64), Algorithm::Direct);
    assert_eq!(best(&Topology::all_apart(64), 64), Algorithm::RecursiveDoubling);
}

#[test]
fn much_data_takes_the_fewest_bytes() {
    assert_eq!(best(&Topology::one_host(4), 64 << 20), Algorithm::Window);
    for world in [2, 4, 6, 8] {
        let best = best(&Topology::all_apart(world), 64 << 20);
        assert!(
            matches!(best, Algorithm::Pairwise | Algorithm::HalvingDoubling),
            "{best} for {world}"
        );
    }
    let hosts = Topology::new(&[0, 0, 0, 0, 1, 1, 1, 1]);
    assert_eq!(best(&hosts, 64 << 20), Algorithm::Hierarchical);
}

#[test]
fn a_large_broadcast_is_not_sent_by_the_root_alone() {
    let op = Op::Broadcast { root: 3 };
    let best = ranking(op, &Topology::all_apart(8), true, 64 << 20)[0];
    assert_eq!(best, Algorithm::Pairwise);
    let best = ranking(op, &Topology::all_apart(8), true, 64)[0];
    assert!(matches!(best, Algorithm::Direct | Algorithm::Tree), "{best}");
}

#[test]
fn canonical_never_means_ring() {
    for bytes in [0, 1 << 10, 1 << 20, 1 << 30] {
        for topology in [Topology::one_host(5), Topology::all_apart(5)] {
            let ranking = ranking(Op::AllReduce, &topology, true, bytes);
            assert!(ranking.iter().all(|algorithm| algorithm.is_canonical()), "{ranking:?}");
        }
    }
}

#[test]
fn more_bytes_never_cost_less() {
    let hosts = Topology::new(&[0, 0, 0, 1, 1]);
    for topology in [Topology::one_host(5), Topology::all_apart(5), hosts] {
        for op in [Op::AllReduce, Op::ReduceScatter, Op::Broadcast { root: 2 }, Op::AllToAll] {
            let contest = Contest::new(op, &topology, &Algorithm::ALL, None);
            assert!(!contest.entries.is_empty());
            for entry in &contest.entries {
                let price = |bytes| {
                    let cut = cut(op, 5, bytes)(entry.algorithm, &entry.schedule);
                    entry.load.price(&Costs::default(), cut)
                };
                let prices: Vec<f64> = (0..30).map(|shift| price(1 << shift)).collect();
                assert!(prices.is_sorted(), "{} {op:?}: {prices:?}", entry.algorithm);
                assert!(price(0) > 0.0 && price(0) <= prices[0]);
            }
        }
    }
}

#[test]
fn a_long_pairwise_all_reduce_approaches_the_rate_of_the_link() {
    let topology = Topology::all_apart(4);
    let bytes = 1 << 30;
    let costs = Costs { fold: 0.0, ..Costs::default() };
    let contest = Contest::new(Op::AllReduce, &topology, &[Algorithm::Pairwise], None);
    let seconds = contest.predict(&costs, cut(Op::AllReduce, 4, bytes))[0].seconds;
    let limit = 1.5 * bytes as f64 * costs.far.byte;
    assert!(seconds > limit && seconds < 1.15 * limit, "{seconds} against {limit}");
}

/// Two regions of some hosts each, numbered one region after the other.
fn two_regions(hosts: usize) -> Topology {
    let regions: Vec<u32> = (0..2 * hosts).map(|host| (host / hosts) as u32).collect();
    Topology::all_apart(2 * hosts).in_regions(&regions)
}

#[test]
fn much_data_crosses_between_regions_once() {
    for hosts in [2, 3, 4, 8] {
        for bytes in [1 << 20, 4 << 20, 64 << 20] {
            let ranking = ranking(Op::AllReduce, &two_regions(hosts), true, bytes);
            // Regions of three hosts have two partials each.
            let expected = [Algorithm::Regional, Algorithm::HalvingDoubling];
            let best = if hosts == 3 { &expected[..] } else { &expected[..1] };
            assert!(best.contains(&ranking[0]), "{hosts} hosts, {bytes} bytes: {ranking:?}");
        }
    }
}

#[test]
fn little_data_does_not_go_from_region_to_region_twice() {
    let topology = two_regions(2);
    let best = best(&topology, 64);
    assert!(matches!(best, Algorithm::Regional | Algorithm::Direct), "{best}");
    let flat = [Algorithm::Pairwise, Algorithm::Regional];
    let contest = Contest::new(Op::AllReduce, &topology, &flat, None);
    let predictions = contest.predict(&Costs::default(), cut(Op::AllReduce, 4, 64));
    let seconds = |algorithm| {
        predictions.iter().find(|p| p.algorithm == algorithm).expect("it is one of two").seconds
    };
    assert!(seconds(Algorithm::Regional) < 0.6 * seconds(Algorithm::Pairwise));
}

#[test]
fn without_regions_nothing_is_regional() {
    for topology in [Topology::all_apart(4), Topology::new(&[0, 0, 1, 1])] {
        let ranking = ranking(Op::AllReduce, &topology, false, 4 << 20);
        assert!(!ranking.contains(&Algorithm::Regional));
    }
}

#[test]
fn costs_travel_as_they_are() {
    let mut numbers = [0.0; Costs::NUMBERS];
    numbers.iter_mut().enumerate().for_each(|(i, number)| *number = i as f64);
    assert_eq!(Costs::from_numbers(numbers).to_numbers(), numbers);
}

#[test]
fn costs_of_links_between_regions_count_where_there_are_regions() {
    let link = LinkCost { latency: 1.0, message: 1.0, byte: 1.0 };
    let without = Costs { far: link, ..Costs::default() };
    let with = Costs { wide: link, near: link, ..without };
    assert!(without.cover(&Topology::all_apart(4), true));
    assert!(!without.cover(&two_regions(2), true) && with.cover(&two_regions(2), true));
    // Every host is a region of its own.
    assert!(Costs { wide: link, ..Costs::default() }.cover(&two_regions(1), true));
    // What is left of two regions: two hosts, whose link may be that of one region or that between both.
    assert!(!with.cover(&Topology::all_apart(2), false));
    assert!(
        with.cover(&Topology::all_apart(3), true) && with.cover(&Topology::new(&[0, 0]), false)
    );
}

#[test]
fn regions_are_ruled_out_for_as_many_hosts_as_were_surveyed() {
    let alone = Costs::default();
    assert!(!alone.rule_out_regions(3), "a group of two hosts has looked for none");
    let surveyed = Costs { surveyed: 4, ..alone };
    assert!(surveyed.rule_out_regions(3) && surveyed.rule_out_regions(4));
    assert!(!surveyed.rule_out_regions(5), "another host has come");
    let wide = LinkCost { latency: 1.0, message: 1.0, byte: 1.0 };
    assert!(!Costs { wide, ..surveyed }.rule_out_regions(4));
}
