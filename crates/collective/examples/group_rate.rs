//! How long it takes to make and to leave groups: `group_rate GROUPS RANKS TRANSPORT WORLDS`. After the
//! groups of one world come worlds, one after the other, each with one group of all its ranks: half of them
//! are measured, half go by the costs of the first.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use unisono_collective::cost::Costs;
use unisono_collective::fabric::Endpoint;
use unisono_collective::{Epoch, Group, Options};
use unisono_net::Token;

/// Forms a world of ranks that meet over sockets, and runs `body` on each.
fn meet<R: Send>(
    ranks: usize,
    options: &Options,
    costs: Option<Option<Costs>>,
    body: impl Fn(Group, Duration) -> R + Sync,
) -> Vec<R> {
    let token = Token::random().expect("randomness");
    let local = [127, 0, 0, 1].into();
    let endpoints: Vec<_> = (0..ranks).map(|_| Endpoint::bind(local).expect("a port")).collect();
    let roster: Vec<_> = endpoints.iter().map(|e| e.address().clone()).collect();
    let together = Barrier::new(ranks);
    std::thread::scope(|scope| {
        let rank = |(rank, endpoint): (usize, Endpoint)| {
            let (token, roster, options) = (token.clone(), roster.clone(), options.clone());
            let (together, body) = (&together, &body);
            scope.spawn(move || {
                let connector = endpoint.open(rank, token, roster).expect("an acceptor starts");
                together.wait();
                let (start, epoch) = (Instant::now(), Epoch::new(0));
                let world = match costs {
                    None => Group::world(connector, epoch, rank, ranks, options),
                    Some(costs) => {
                        Group::world_again(connector, epoch, rank, ranks, options, costs)
                    }
                };
                body(world.expect("the world forms"), start.elapsed())
            })
        };
        let ranks: Vec<_> = endpoints.into_iter().enumerate().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn main() {
    let mut args = std::env::args().skip(1);
    let groups: usize = args.next().map_or(800, |n| n.parse().expect("a number of groups"));
    let ranks: usize = args.next().map_or(2, |n| n.parse().expect("a number of ranks"));
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    if let Some(transport) = args.next() {
        options.transport = transport.parse().expect("a transport");
    }
    let worlds: usize = args.next().map_or(0, |n| n.parse().expect("a number of worlds"));
    let list: Vec<usize> = (0..ranks).collect();
    let costs = meet(ranks, &options, None, |world, formed| {
        let (mut making, mut leaving) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..groups {
            let start = Instant::now();
            let group = world.subgroup(&list).expect("a group forms");
            making += start.elapsed();
            let start = Instant::now();
            drop(group);
            leaving += start.elapsed();
        }
        if world.rank() == 0 {
            println!(
                "{ranks} ranks: the world in {formed:.1?}, then {groups} groups in {:.1?}: \
                 made in {making:.1?}, left in {leaving:.1?}",
                making + leaving
            );
        }
        world.costs()
    })[0];
    let mut times = [Vec::new(), Vec::new()];
    for world in 0..worlds {
        let known = (world % 2 == 1).then_some(Some(costs));
        let formed = meet(ranks, &options, known, |world, formed| {
            let start = Instant::now();
            let group = world.subgroup(&list).expect("a group forms");
            let made = start.elapsed();
            let start = Instant::now();
            drop((group, world));
            (formed, made, start.elapsed())
        });
        times[world % 2].push(formed[0]);
    }
    for (times, how) in times.iter_mut().zip(["measured", "by known costs"]) {
        let mut median = |part: fn(&(Duration, Duration, Duration)) -> Duration| {
            times.sort_by_key(part);
            times.get(times.len() / 2).map_or(Duration::ZERO, part)
        };
        let (world, group) = (median(|times| times.0), median(|times| times.1));
        let (both, left) = (median(|times| times.0 + times.1), median(|times| times.2));
        if worlds > 0 {
            println!(
                "{how}: the world in {world:.1?}, a group in it in {group:.1?}, both in {both:.1?}, \
                 left in {left:.1?}"
            );
        }
    }
}
