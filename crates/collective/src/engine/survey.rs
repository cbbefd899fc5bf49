//! Finds out, when a world forms, which of its hosts are in one region.
//!
//! Hosts may be told the name of their region. If none is, every two hosts exchange a few messages, in rounds of disjoint
//! pairs, and [`regions::decide`] decides by how long those took. All ranks decide from the same numbers, which they add up first.

use super::HostEngine;
use super::tune;
use crate::cost::Costs;
use crate::dtype::Reduction;
use crate::error::Error;
use crate::regions;
use crate::request::Request;
use crate::schedule::Algorithm;

/// Hosts from which on there are regions to look for: of two, none is closer than another.
const FEWEST: usize = 3;

/// Hosts up to which regions are looked for; more are in one, unless they are told. Larger: larger worlds take longer to form,
/// a round for each host, and have a connection between every two. Smaller: regions of larger worlds are not found.
const MOST: usize = 32;

/// Bytes of a message between two hosts. Larger: a low rate shows more clearly. Smaller: worlds form sooner.
const PROBE: usize = 64 << 10;

/// Exchanges that are timed as one. Two ranks that begin at different times take turns in being the one that finds the
/// other's message there already, which cancels out in an even number.
const TOGETHER: usize = 2;

/// How often; the quickest counts.
const BATCHES: usize = 3;

/// How often all of it is done where there seem to be regions, for the shortest distances of all times. Larger: worlds with
/// regions form later. Smaller: hosts whose ranks had to wait for a processor look as if they were far away.
const LOOKS: usize = 3;

/// The regions of a group's hosts.
pub struct Survey {
    /// The region of every host.
    pub regions: Vec<u32>,
    /// Whether that is known, and not only assumed because nobody has looked.
    pub is_known: bool,
}

/// Finds out the region of every host. Every rank of the group calls this, with what it knows of an earlier group: if that of
/// rank 0 [rules them out](Costs::rule_out_regions) and no rank is new, none are looked for; nor where all hosts `are_one`
/// machine. Where the earlier group had some, one look is enough.
pub fn regions(
    engine: &mut HostEngine,
    name: Option<&str>,
    known: Option<&Costs>,
    are_one: bool,
) -> Result<Survey, Error> {
    let hosts = engine.topology.hosts();
    let known_as = |regions| Ok(Survey { regions, is_known: true });
    let one = vec![0; hosts];
    if hosts == 1 {
        return Ok(Survey { regions: one, is_known: false });
    }
    let first = known.filter(|_| engine.rank == 0);
    let own = Said {
        rules_out: first.is_some_and(|costs| costs.rule_out_regions(hosts)),
        knows_some: first.is_some_and(Costs::know_regions),
        is_new: known.is_none(),
    };
    let (names, said) = names(engine, name, own)?;
    if let Some(regions) = regions::by_names(&names) {
        return known_as(regions);
    }
    if said.rules_out && !said.is_new {
        return known_as(one);
    }
    if are_one || !(FEWEST..=MOST).contains(&hosts) {
        return Ok(Survey { regions: one, is_known: false });
    }
    let mut shortest = vec![f64::INFINITY; hosts * hosts];
    for _ in 0..if said.knows_some { 1 } else { LOOKS } {
        let found = distances(engine)?;
        shortest
            .iter_mut()
            .zip(found)
            .for_each(|(shortest, found)| *shortest = shortest.min(found));
        let regions = regions::decide(hosts, &shortest);
        log::debug!("seconds between hosts: {shortest:?}; their regions: {regions:?}");
        if regions == one {
            return known_as(one);
        }
    }
    known_as(regions::decide(hosts, &shortest))
}

/// What ranks say of an earlier group; of several ranks, what any of them says.
#[derive(Clone, Copy)]
struct Said {
    /// Its hosts were in one region, and there were at least as many.
    rules_out: bool,
    /// They were in several.
    knows_some: bool,
    /// This rank knows of none.
    is_new: bool,
}

impl Said {
    const NUMBERS: usize = 3;

    fn to_numbers(self) -> [i64; Said::NUMBERS] {
        [self.rules_out, self.knows_some, self.is_new].map(i64::from)
    }

    /// Of sums over ranks.
    fn from_numbers(numbers: [i64; Said::NUMBERS]) -> Said {
        let [rules_out, knows_some, is_new] = numbers.map(|number| number != 0);
        Said { rules_out, knows_some, is_new }
    }
}

/// A hash of the name that the first rank of every host gives its region; and what ranks say, equal on all of them.
fn names(
    engine: &mut HostEngine,
    name: Option<&str>,
    said: Said,
) -> Result<(Vec<Option<u64>>, Said), Error> {
    let hosts = engine.topology.hosts();
    let mut numbers = vec![0i64; hosts];
    numbers.extend(said.to_numbers());
    if let (Some(host), Some(name)) = (first_of(engine), name) {
        let hash = blake3::hash(name.as_bytes());
        let bytes = hash.as_bytes()[..8].try_into().expect("eight of 32 bytes");
        // 0 is no name.
        numbers[host] = i64::from_le_bytes(bytes) | 1;
    }
    let request = Request::all_reduce(&mut numbers, Reduction::Sum);
    engine.run_unnumbered(request.with_algorithm(Algorithm::Tree))?;
    let (hashes, said) = numbers.split_last_chunk().expect("longer than what is said");
    let hashes = hashes.iter().map(|hash| (*hash != 0).then_some(*hash as u64)).collect();
    Ok((hashes, Said::from_numbers(*said)))
}

/// The host whose first rank this is, if it is one.
fn first_of(engine: &HostEngine) -> Option<usize> {
    let host = engine.topology.host(engine.rank);
    (engine.topology.members(host)[0] == engine.rank).then_some(host)
}

/// The distances between all hosts, row by row, as their first ranks find them.
fn distances(engine: &mut HostEngine) -> Result<Vec<f64>, Error> {
    let hosts = engine.topology.hosts();
    let mut distances = vec![0.0; hosts * hosts];
    if let Some(host) = first_of(engine) {
        for round in 0..regions::rounds(hosts) {
            let Some(other) = regions::opponent(hosts, round, host) else { continue };
            let peer = [engine.topology.members(other)[0]];
            // The first message opens the connection.
            tune::exchange_with(engine, &peer, 0, TOGETHER, 1)?;
            let seconds = tune::exchange_with(engine, &peer, PROBE, TOGETHER, BATCHES)?;
            distances[host * hosts + other] = seconds;
        }
    }
    let request = Request::all_reduce(&mut distances, Reduction::Sum);
    engine.run_unnumbered(request.with_algorithm(Algorithm::Tree))?;
    Ok(distances)
}
