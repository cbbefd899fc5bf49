//! What more threads for one call gain: `call_threads RANKS TRANSPORT MIB THREADS…`. All-reduces of so many MiB of f32,
//! in turns by groups whose ranks have so many threads each; the median of each, and how many times as long the first
//! takes. The ranks are threads of this process, and compute nothing. With `BUFFERS=N` each rank has so many buffers, which it
//! uses by turns: enough of them are in no cache when their turn comes, as the gradients of a large model.

use std::sync::Barrier;
use std::time::Instant;

use unisono_collective::fabric::Endpoint;
use unisono_collective::{Epoch, Group, Options, Reduction};
use unisono_net::Token;

/// All-reduces of each group.
const ROUNDS: usize = 60;

fn world(ranks: usize, options: &Options) -> Vec<Group> {
    let token = Token::random().expect("randomness");
    let local = [127, 0, 0, 1].into();
    let endpoints: Vec<_> = (0..ranks).map(|_| Endpoint::bind(local).expect("a port")).collect();
    let roster: Vec<_> = endpoints.iter().map(|e| e.address().clone()).collect();
    std::thread::scope(|scope| {
        let rank = |(rank, endpoint): (usize, Endpoint)| {
            let (token, roster) = (token.clone(), roster.clone());
            scope.spawn(move || {
                let connector = endpoint.open(rank, token, roster).expect("an acceptor starts");
                Group::world(connector, Epoch::new(0), rank, ranks, options.clone())
            })
        };
        let ranks: Vec<_> = endpoints.into_iter().enumerate().map(rank).collect();
        let formed = ranks.into_iter().map(|rank| rank.join().expect("no rank panics"));
        formed.collect::<Result<_, _>>().expect("the world forms")
    })
}

fn main() {
    let mut args = std::env::args().skip(1);
    let ranks: usize = args.next().map_or(2, |n| n.parse().expect("a number of ranks"));
    let transport = args.next().unwrap_or_else(|| "shm".into());
    let mut numbers = args.map(|n| n.parse::<usize>().expect("a number"));
    let bytes = numbers.next().unwrap_or(30) << 20;
    let mut threads: Vec<usize> = numbers.collect();
    if threads.is_empty() {
        threads = vec![1, 2, 4];
    }
    let worlds: Vec<Vec<Group>> = threads
        .iter()
        .map(|&threads| {
            let mut options = Options::from_env().expect("settings");
            options.transport = transport.parse().expect("a transport");
            options.threads = Some(threads);
            world(ranks, &options)
        })
        .collect();
    let buffers = std::env::var("BUFFERS").map_or(1, |n| n.parse().expect("a number of buffers"));
    let together = Barrier::new(ranks);
    let times: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let (worlds, together) = (&worlds, &together);
            scope.spawn(move || {
                let mut buffers = vec![vec![0f32; bytes / 4]; buffers];
                let mut times = vec![Vec::with_capacity(ROUNDS); worlds.len()];
                for round in 0..ROUNDS + 3 {
                    for (world, times) in worlds.iter().zip(&mut times) {
                        buffers.rotate_left(1);
                        buffers.last_mut().expect("one at least").fill(1.0);
                        let buffer = &mut buffers[0];
                        if buffer[0] != 1.0 {
                            buffer.fill(1.0);
                        }
                        together.wait();
                        let start = Instant::now();
                        world[rank].all_reduce(buffer, Reduction::Sum).expect("a sum");
                        let time = start.elapsed().as_secs_f64();
                        assert!(buffer.iter().all(|x| *x == ranks as f32), "a wrong sum");
                        if round >= 3 {
                            times.push(time);
                        }
                    }
                }
                times
            })
        };
        let all: Vec<_> = (0..ranks).map(rank).collect();
        all.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    });
    let median = |world: usize| {
        let mut slowest: Vec<f64> = (0..ROUNDS)
            .map(|round| times.iter().map(|rank| rank[world][round]).fold(0.0, f64::max))
            .collect();
        slowest.sort_by(f64::total_cmp);
        slowest[ROUNDS / 2]
    };
    for (world, threads) in threads.iter().enumerate() {
        let (own, first) = (median(world), median(0));
        println!(
            "{ranks} ranks over {transport}, {} MiB, {threads} threads each: {:.2} ms, {:.2} times as quick",
            bytes >> 20,
            own * 1e3,
            first / own
        );
    }
}
