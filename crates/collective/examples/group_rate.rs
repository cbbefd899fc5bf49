//! How long it takes to make and to leave groups: `group_rate GROUPS RANKS TRANSPORT`.

use std::time::{Duration, Instant};

use unisono_collective::fabric::Endpoint;
use unisono_collective::{Epoch, Group, Options};
use unisono_net::Token;

fn main() {
    let mut args = std::env::args().skip(1);
    let groups: usize = args.next().map_or(800, |n| n.parse().expect("a number of groups"));
    let ranks: usize = args.next().map_or(2, |n| n.parse().expect("a number of ranks"));
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    if let Some(transport) = args.next() {
        options.transport = transport.parse().expect("a transport");
    }
    let token = Token::random().expect("randomness");
    let local = [127, 0, 0, 1].into();
    let endpoints: Vec<_> = (0..ranks).map(|_| Endpoint::bind(local).expect("a port")).collect();
    let roster: Vec<_> = endpoints.iter().map(|e| e.address().clone()).collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let (token, roster, options) = (token.clone(), roster.clone(), options.clone());
            scope.spawn(move || {
                let connector = endpoint.open(rank, token, roster).expect("an acceptor starts");
                let world = Group::world(connector, Epoch::new(0), rank, ranks, options);
                let world = world.expect("the world forms");
                let formed = start.elapsed();
                let list: Vec<usize> = (0..ranks).collect();
                let (mut making, mut leaving) = (Duration::ZERO, Duration::ZERO);
                for _ in 0..groups {
                    let start = Instant::now();
                    let group = world.subgroup(&list).expect("a group forms");
                    making += start.elapsed();
                    let start = Instant::now();
                    drop(group);
                    leaving += start.elapsed();
                }
                if rank == 0 {
                    println!(
                        "{ranks} ranks: the world in {formed:.1?}, then {groups} groups in {:.1?}: \
                         made in {making:.1?}, left in {leaving:.1?}",
                        start.elapsed() - formed
                    );
                }
            });
        }
    });
}
