//! Which hosts are in one region.
//!
//! Every two hosts have a *distance*: the seconds that a message of a few tens of KiB takes between them, in which both a delay
//! and a low rate show. Hosts are in one region if they are close together and far from all others: every distance inside the
//! regions is several times shorter than every distance between them. Where there is no such gap, all hosts are in one region.
//!
//! A gap must be wide, and more than what a busy machine takes to wake a process up, because what is measured on a local
//! network differs as well: a region that is none costs the calls that go by it time, and saves nothing.

/// How many times longer every distance between regions must be than every distance inside them. Larger: regions that are
/// not far apart are not found. Smaller: noise looks like regions.
const GAP: f64 = 4.0;

/// By how many seconds it must be longer. Larger: as above. Smaller: on a busy machine, processes that wait for their
/// turn look like hosts that are far away.
const LEAST: f64 = 1e-3;

/// The region of every host, from the distances between all pairs of `hosts` hosts, row by row. Of a pair the shorter of the
/// two counts: what disturbs a measurement makes it longer. Distances that are not known are not numbers.
pub fn decide(hosts: usize, distances: &[f64]) -> Vec<u32> {
    assert_eq!(distances.len(), hosts * hosts, "a distance for every pair of hosts");
    let one = vec![0; hosts];
    let distance = |a: usize, b: usize| distances[a * hosts + b].min(distances[b * hosts + a]);
    let mut sorted: Vec<f64> =
        (0..hosts).flat_map(|b| (0..b).map(move |a| (a, b))).map(|(a, b)| distance(a, b)).collect();
    // One that nobody could measure says nothing about anything.
    if sorted.iter().any(|distance| !(distance.is_finite() && *distance > 0.0)) {
        return one;
    }
    sorted.sort_by(f64::total_cmp);
    let mut gaps: Vec<(f64, f64)> = sorted
        .windows(2)
        .filter(|pair| pair[1] >= GAP * pair[0] && pair[1] - pair[0] >= LEAST)
        .map(|pair| (pair[1] / pair[0], pair[0]))
        .collect();
    // The widest gap first, and of gaps that are as wide, the one of the closest hosts.
    gaps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1)));
    let regions = gaps.into_iter().find_map(|(_, longest)| {
        let close = |a, b| distance(a, b) <= longest;
        let first = |host| (0..host).find(|other| close(*other, host));
        // Each host is in the region of the first that is close to it, which must be true of all pairs.
        let mut regions: Vec<u32> = Vec::with_capacity(hosts);
        for host in 0..hosts {
            let region = first(host).map_or(host as u32, |other| regions[other]);
            regions.push(region);
        }
        let is_region =
            (0..hosts).all(|b| (0..b).all(|a| close(a, b) == (regions[a] == regions[b])));
        is_region.then_some(regions)
    });
    regions.unwrap_or(one)
}

/// The region of every host, from the names that the hosts give theirs: none, if no host names any. Hosts that name none
/// share one of their own.
pub fn by_names(names: &[Option<u64>]) -> Option<Vec<u32>> {
    names.iter().any(Option::is_some).then(|| {
        let first =
            |name| names.iter().position(|other| *other == name).expect("it is one of them");
        names.iter().map(|name| first(*name) as u32).collect()
    })
}

/// With which host another measures its distance in a round, of [`rounds`]; none where it has a pause. All pairs of a round
/// are disjoint, and every pair has its round.
pub fn opponent(hosts: usize, round: usize, host: usize) -> Option<usize> {
    // The last place stays, the others move on by one each round; where places are odd, it is empty.
    let places = hosts + hosts % 2;
    let moving = places - 1;
    let other = match host {
        last if last == moving => round % moving * (places / 2) % moving,
        _ => {
            let opposite = (round + moving - host % moving) % moving;
            if opposite == host { moving } else { opposite }
        }
    };
    (other < hosts).then_some(other)
}

/// The rounds that it takes for every pair of hosts to meet.
pub fn rounds(hosts: usize) -> usize {
    (hosts + hosts % 2).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distances of hosts in these regions: `near` inside, `far` between, each up to `noise` times as long as a seed has it.
    fn distances(regions: &[u32], near: f64, far: f64, noise: f64, seed: u64) -> Vec<f64> {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as f64 / (1_u64 << 31) as f64
        };
        let pair = |(a, b): (usize, usize)| if regions[a] == regions[b] { near } else { far };
        let hosts = regions.len();
        let pairs = (0..hosts).flat_map(|a| (0..hosts).map(move |b| (a, b)));
        pairs.map(|p| if p.0 == p.1 { 0.0 } else { pair(p) * (1.0 + noise * random()) }).collect()
    }

    /// Equal numbers in equal places.
    fn same(a: &[u32], b: &[u32]) -> bool {
        let pairs = || (0..a.len()).flat_map(|i| (0..a.len()).map(move |j| (i, j)));
        a.len() == b.len() && pairs().all(|(i, j)| (a[i] == a[j]) == (b[i] == b[j]))
    }

    const REGIONS: [&[u32]; 9] = [
        &[0, 0, 1],
        &[0, 1, 1],
        &[0, 1, 0],
        &[0, 0, 1, 1],
        &[0, 1, 0, 1],
        &[0, 0, 0, 0, 0, 1],
        &[0, 1, 2, 2],
        &[2, 1, 0, 0, 1, 2, 2, 1],
        &[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2],
    ];

    #[test]
    fn regions_are_found_whatever_their_size_and_numbers() {
        for regions in REGIONS {
            for seed in 0..100 {
                let found = decide(regions.len(), &distances(regions, 0.2e-3, 20e-3, 1.0, seed));
                assert!(same(&found, regions), "{regions:?}: {found:?}");
            }
        }
    }

    #[test]
    fn a_low_rate_is_a_distance_too() {
        // 64 KiB at 1 Gbit/s and at 100 Mbit/s, without any delay.
        let found = decide(4, &distances(&[0, 0, 1, 1], 0.55e-3, 5.3e-3, 0.3, 1));
        assert!(same(&found, &[0, 0, 1, 1]));
    }

    #[test]
    fn without_a_gap_there_is_one_region() {
        for hosts in 0..12 {
            let one = vec![0; hosts];
            for seed in 0..100 {
                // A network where a message takes up to three times as long as another.
                assert_eq!(decide(hosts, &distances(&one, 5e-3, 5e-3, 2.0, seed)), one);
                // One so quick that differences are those of a busy machine.
                assert_eq!(decide(hosts, &distances(&one, 30e-6, 30e-6, 25.0, seed)), one);
            }
        }
        // Links between regions that are not much slower.
        assert_eq!(decide(4, &distances(&[0, 0, 1, 1], 2e-3, 7e-3, 0.0, 0)), [0; 4]);
        assert_eq!(decide(4, &distances(&[0, 0, 1, 1], 50e-6, 900e-6, 0.0, 0)), [0; 4]);
        // Two hosts have one distance, which nothing compares with.
        assert_eq!(decide(2, &distances(&[0, 1], 1e-3, 1.0, 0.0, 0)), [0, 0]);
        // As have hosts of which none is close to another.
        assert_eq!(decide(3, &distances(&[0, 1, 2], 1e-3, 1.0, 0.5, 0)), [0; 3]);
    }

    #[test]
    fn a_host_that_is_close_to_two_regions_makes_none() {
        // 0 and 2 are far apart, and 1 is close to both.
        let mut matrix = vec![20e-3; 9];
        for (a, b) in [(0, 1), (1, 2)] {
            (matrix[a * 3 + b], matrix[b * 3 + a]) = (0.1e-3, 0.1e-3);
        }
        assert_eq!(decide(3, &matrix), [0; 3]);
    }

    #[test]
    fn the_widest_gap_makes_the_regions() {
        // Two racks, a few milliseconds apart, and a third far away: 0.1 ms, 5 ms, 40 ms.
        let mut matrix = distances(&[0, 0, 1, 1, 2, 2], 0.1e-3, 40e-3, 0.1, 3);
        for (a, b) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
            (matrix[a * 6 + b], matrix[b * 6 + a]) = (5e-3, 5e-3);
        }
        assert!(same(&decide(6, &matrix), &[0, 0, 1, 1, 2, 2]));
    }

    #[test]
    fn one_disturbed_measurement_of_the_two_of_a_pair_changes_nothing() {
        let mut matrix = distances(&[0, 0, 1, 1], 0.1e-3, 20e-3, 0.1, 5);
        matrix[1] = 0.5;
        assert!(same(&decide(4, &matrix), &[0, 0, 1, 1]));
    }

    #[test]
    fn what_is_not_known_makes_no_regions() {
        for unknown in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            let mut matrix = distances(&[0, 0, 1, 1], 0.1e-3, 20e-3, 0.1, 5);
            (matrix[1], matrix[4]) = (unknown, unknown);
            assert_eq!(decide(4, &matrix), [0; 4], "{unknown}");
        }
    }

    #[test]
    fn names_decide_if_there_are_any() {
        assert_eq!(by_names(&[None, None]), None);
        assert!(same(&by_names(&[Some(7), Some(9), Some(7)]).unwrap(), &[0, 1, 0]));
        assert!(same(&by_names(&[None, Some(9), None]).unwrap(), &[0, 1, 0]));
    }

    #[test]
    fn every_pair_meets_once_and_no_host_twice_in_a_round() {
        for hosts in 0..=33 {
            let mut met = vec![0; hosts * hosts];
            for round in 0..rounds(hosts) {
                for host in 0..hosts {
                    let Some(other) = opponent(hosts, round, host) else { continue };
                    assert_ne!(host, other);
                    assert_eq!(opponent(hosts, round, other), Some(host), "{hosts} {round}");
                    met[host * hosts + other] += 1;
                }
            }
            for (a, b) in (0..hosts).flat_map(|a| (0..hosts).map(move |b| (a, b))) {
                assert_eq!(met[a * hosts + b], usize::from(a != b), "{hosts}: {a} and {b}");
            }
        }
    }
}
