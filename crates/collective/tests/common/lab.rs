//! Groups of ranks on hosts of a lab.

use std::sync::Mutex;
use std::time::Duration;

use unisono_collective::cost::Costs;
use unisono_collective::fabric::Endpoint;
use unisono_collective::{Epoch, Group, Options, Transport};
use unisono_net::Token;
use unisono_netlab::Lab;

/// Forms a world with one rank for each host of a lab, of which so many know the costs of an earlier one if there was one,
/// and runs `body` on all of them.
pub fn in_lab<R: Send>(
    lab: &Lab,
    order: &[usize],
    options: &Options,
    known: Option<(Costs, usize)>,
    body: impl Fn(&Group) -> R + Sync,
) -> Vec<R> {
    let token = Token::random().expect("randomness");
    let bind = |host: &usize| {
        let host = lab.host(*host);
        host.run(|| Endpoint::bind(host.address()).expect("a port")).expect("a host")
    };
    let endpoints: Vec<Endpoint> = order.iter().map(bind).collect();
    let roster: Vec<_> = endpoints.iter().map(|e| e.address().clone()).collect();
    let results: Vec<Mutex<Option<R>>> = order.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let (token, roster) = (token.clone(), roster.clone());
            let (body, result, world) = (&body, &results[rank], order.len());
            let mut options = options.clone();
            (options.transport, options.timeout) = (Transport::Tcp, Duration::from_secs(30));
            scope.spawn(move || {
                let on_host = || {
                    let connector = endpoint.open(rank, token, roster).expect("an acceptor");
                    let known = known.filter(|(_, old)| rank < *old).map(|(costs, _)| costs);
                    let epoch = Epoch::new(0);
                    let group = Group::world_again(connector, epoch, rank, world, options, known);
                    body(&group.expect("the world forms"))
                };
                let outcome = lab.host(order[rank]).run(on_host).expect("a host");
                *result.lock().unwrap() = Some(outcome);
            });
        }
    });
    results.into_iter().map(|result| result.into_inner().unwrap().unwrap()).collect()
}
