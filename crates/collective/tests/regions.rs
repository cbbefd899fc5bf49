//! Regions: told by name or found by measuring, in sub-groups, and the bits of what goes by them.

mod common;
#[path = "common/lab.rs"]
mod lab;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use common::{Sample, meet, on_all, reference};
use lab::in_lab;
use unisono_collective::cost::Costs;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{
    Algorithm, Epoch, FormError, Group, Options, Reduction, Request, Transport,
};
use unisono_netlab::{Link, Rate, regions_or_skip};

/// Options of ranks in regions of these names; an empty one is none.
fn named(names: &[&str], transport: Transport) -> Vec<Options> {
    let of = |name: &&str| {
        let mut options = Options::default();
        options.transport = transport;
        options.region = (!name.is_empty()).then(|| (*name).to_owned());
        options
    };
    names.iter().map(of).collect()
}

/// Ranks that are threads, on hosts of these numbers.
fn threads(hosts: &[u32], options: &[Options]) -> Vec<Group> {
    form(hosts, options, |hub, epoch, me, world, options| {
        Group::world(hub, epoch, me, world, options)
    })
}

fn form<F>(hosts: &[u32], options: &[Options], world: F) -> Vec<Group>
where
    F: Fn(Arc<LocalHub>, Arc<Epoch>, usize, usize, Options) -> Result<Group, FormError> + Sync,
{
    let (hub, epoch) = (LocalHub::on_hosts(hosts), Epoch::new(0));
    std::thread::scope(|scope| {
        let rank = |(me, options): (usize, &Options)| {
            let (hub, epoch, options) = (hub.clone(), epoch.clone(), options.clone());
            let world = &world;
            scope.spawn(move || world(hub, epoch, me, hosts.len(), options))
        };
        let ranks: Vec<_> = options.iter().enumerate().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

/// The regions of the ranks of a group, as it numbers them; equal on all of its ranks.
fn regions(groups: &[Group]) -> Vec<usize> {
    let of = |group: &Group| -> Vec<usize> {
        let topology = group.topology();
        (0..group.size()).map(|rank| topology.region(topology.host(rank))).collect()
    };
    let first = of(&groups[0]);
    assert!(groups.iter().all(|group| of(group) == first && group.costs() == groups[0].costs()));
    first
}

/// Sums over all ranks, by the algorithm that is forced, in and out of place, of several lengths.
fn check_bits<T: Sample>(groups: &[Group], algorithm: Option<Algorithm>) {
    for count in [0, 1, 1003, 300_001] {
        let inputs: Vec<Vec<T>> =
            (0..groups.len()).map(|rank| T::samples(count, 5 + rank as u64)).collect();
        let expected = reference(&inputs, Reduction::Mean);
        on_all(groups, |group| {
            let what = format!("{count} {} on rank {}", T::DTYPE, group.rank());
            let force = |request: Request<'_>| match algorithm {
                Some(algorithm) => group.run(request.with_algorithm(algorithm)).unwrap(),
                None => group.run(request).unwrap(),
            };
            let input = &inputs[group.rank()];
            let mut buffer = input.clone();
            force(Request::all_reduce(&mut buffer, Reduction::Mean));
            T::assert_same(&buffer, &expected, &what);
            let mut output = T::samples(count, 1);
            force(Request::all_reduce_into(input, &mut output, Reduction::Mean));
            T::assert_same(&output, &expected, &what);
        });
    }
}

#[test]
fn named_regions_have_the_bits_of_all_others() {
    let worlds: [(&[u32], &[&str]); 5] = [
        (&[0, 1, 2, 3], &["a", "a", "b", "b"]),
        (&[0, 1, 2, 3, 4], &["a", "b", "a", "b", ""]),
        (&[0, 0, 1, 1, 2, 2, 3, 3], &["a", "a", "a", "a", "b", "b", "b", "b"]),
        // The first rank of a host names its region.
        (&[0, 1, 0, 2, 1], &["a", "a", "x", "b", "b"]),
        (&[0, 1], &["a", "b"]),
    ];
    for (hosts, names) in worlds {
        let groups = threads(hosts, &named(names, Transport::Auto));
        check_bits::<f32>(&groups, Some(Algorithm::Regional));
        check_bits::<half::bf16>(&groups, None);
    }
    let groups = threads(&[0, 1, 0, 2, 1], &named(&["a", "a", "x", "b", "b"], Transport::Auto));
    assert_eq!(regions(&groups), [0, 0, 0, 1, 0]);
}

#[test]
fn named_regions_over_sockets() {
    let options = named(&["a", "b", "b", "a", "c"], Transport::Tcp);
    let groups = meet(IpAddr::V4(Ipv4Addr::LOCALHOST), &options);
    let groups: Vec<Group> = groups.into_iter().map(|group| group.unwrap()).collect();
    assert_eq!(regions(&groups), [0, 1, 1, 0, 2]);
    check_bits::<f32>(&groups, Some(Algorithm::Regional));
    check_bits::<f64>(&groups, None);
}

#[test]
fn sub_groups_know_the_regions_of_their_ranks() {
    let names = ["a", "a", "a", "b", "b", "b"];
    let groups = threads(&[0, 1, 2, 3, 4, 5], &named(&names, Transport::Auto));
    let parts = on_all(&groups, |world| {
        let inside = world.split(Some(u32::from(world.rank() >= 3)), 0).unwrap().unwrap();
        assert_eq!(inside.topology().regions(), 1);
        let reversed = world.split(Some(0), -(world.rank() as i64)).unwrap().unwrap();
        assert_eq!(reversed.costs(), world.costs());
        reversed
    });
    let mut parts = parts;
    parts.reverse();
    assert_eq!(regions(&parts), [0, 0, 0, 1, 1, 1]);
    check_bits::<f32>(&parts, Some(Algorithm::Regional));
    let across = on_all(&groups, |world| match world.rank() {
        1 | 2 | 4 => Some(world.subgroup(&[4, 1, 2]).unwrap()),
        _ => None,
    });
    let across: Vec<Group> = across.into_iter().flatten().collect();
    assert_eq!(regions(&across), [0, 1, 1]);
}

/// What an earlier group measured holds for the regions that the next one is told, if it had some.
#[test]
fn a_group_that_forms_again_goes_by_what_was_measured_between_regions() {
    let (hosts, names) = ([0, 1, 2], named(&["a", "b", "b"], Transport::Auto));
    let costs = threads(&hosts, &names)[0].costs();
    assert_ne!(costs.wide, Costs::default().wide);
    let again = |names: &[Options], costs: Costs| {
        form(&hosts, names, |hub, epoch, me, world, options| {
            Group::world_again(hub, epoch, me, world, options, Some(costs))
        })
    };
    let groups = again(&names, costs);
    assert_eq!(regions(&groups), [0, 1, 1]);
    assert_eq!((groups[0].costs().wide, groups[0].costs().far), (costs.wide, costs.far));
    check_bits::<f32>(&groups, Some(Algorithm::Regional));
    // Without names there are none on one machine, and no link between regions needs a price.
    let flat = Costs { wide: Costs::default().wide, ..costs };
    let groups = again(&named(&["", "", ""], Transport::Auto), flat);
    assert_eq!(regions(&groups), [0, 0, 0]);
    assert_eq!(groups[0].costs().far, costs.far);
    // Its costs will not do where there are some.
    let groups = again(&names, flat);
    assert_eq!(regions(&groups), [0, 1, 1]);
    assert_ne!(groups[0].costs().wide, Costs::default().wide);
}

#[test]
fn regional_is_refused_where_there_are_no_regions() {
    let groups = threads(&[0, 1, 2], &named(&["", "", ""], Transport::Auto));
    assert_eq!(regions(&groups), [0, 0, 0], "one machine is one region");
    let outcomes = on_all(&groups, |group| {
        let mut buffer = [1.0f32];
        let request = Request::all_reduce(&mut buffer, Reduction::Sum);
        group.run(request.with_algorithm(Algorithm::Regional)).is_err()
    });
    assert_eq!(outcomes, [true; 3]);
}

#[test]
fn regions_are_found_where_there_are_some() {
    let inside = Link::new(Rate::gbit(1));
    let between = Link::new(Rate::mbit(100)).with_delay(Duration::from_millis(20));
    for (sizes, order) in [(&[2, 2][..], [0, 2, 1, 3]), (&[3, 1], [0, 1, 2, 3])] {
        let Some(lab) = regions_or_skip(sizes, inside, between) else { return };
        let inputs: Vec<Vec<f32>> = (0..4).map(|rank| f32::samples(100_003, rank)).collect();
        let expected = reference(&inputs, Reduction::Sum);
        let found = in_lab(&lab, &order, &Options::default(), None, |group| {
            let mut buffer = inputs[group.rank()].clone();
            group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
            f32::assert_same(&buffer, &expected, "over regions");
            let costs = group.costs();
            let topology = group.topology();
            let region = |rank| topology.region(topology.host(rank));
            ((0..4).map(region).collect::<Vec<usize>>(), costs)
        });
        let of_host = |host: usize| usize::from(host >= sizes[0]);
        let expected: Vec<usize> = order.iter().map(|host| of_host(*host)).collect();
        for (regions, costs) in &found {
            assert_eq!(*regions, expected);
            assert!(costs.wide.latency > 15e-3, "{costs:?}");
            assert!(costs.wide.latency > costs.far.latency, "{costs:?}");
        }
        // A group that forms again looks for them if there were some.
        let flat = Costs { wide: Costs::default().wide, ..found[0].1 };
        let again = |group: &Group| (group.topology().regions(), group.costs());
        for (known, count) in [(found[0].1, 2), (flat, 1)] {
            for (regions, costs) in
                in_lab(&lab, &order, &Options::default(), Some((known, 4)), again)
            {
                assert_eq!((regions, costs.wide, costs.far), (count, known.wide, known.far));
            }
        }
        // So does one with a rank that has just come, from wherever that is.
        for (regions, costs) in in_lab(&lab, &order, &Options::default(), Some((flat, 3)), again) {
            assert_eq!(regions, 2);
            assert!(costs.wide.latency > 15e-3, "{costs:?}");
        }
    }
}
