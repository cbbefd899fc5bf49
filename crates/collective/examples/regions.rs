//! What an all-reduce takes among regions of hosts in namespaces, in turns: what a group chooses that knows the regions, what
//! one chooses that takes all hosts for one region, and each algorithm. Needs what `unisono-netlab` needs.
//! `regions HOSTS_PER_REGION REGIONS MIB ROUNDS MBIT_BETWEEN DELAY_MS LOSS`

use std::time::{Duration, Instant};

use unisono_collective::fabric::{Address, Endpoint};
use unisono_collective::{Algorithm, Epoch, Group, Op, Options, Reduction, Request, Transport};
use unisono_net::Token;
use unisono_netlab::{Link, Rate, regions_or_skip};

const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::Regional,
    Algorithm::HalvingDoubling,
    Algorithm::Pairwise,
    Algorithm::RecursiveDoubling,
    Algorithm::Tree,
];

/// Rounds in which TCP finds out the rate.
const WARM_UP: usize = 2;

/// Bytes of the calls that are timed as one: ranks of different regions do not begin at the same time, which matters if
/// a call is short.
const TOGETHER: usize = 1 << 20;

fn main() {
    let args: Vec<f64> =
        std::env::args().skip(1).map(|arg| arg.parse().expect("a number")).collect();
    let or = |place: usize, usual: f64| args.get(place).copied().unwrap_or(usual);
    let (hosts, regions) = (or(0, 2.0) as usize, or(1, 2.0) as usize);
    let (bytes, rounds) = ((or(2, 4.0) * 1048576.0) as usize, or(3, 7.0) as usize);
    let between = Link::new(Rate::mbit(or(4, 100.0) as u64))
        .with_delay(Duration::from_secs_f64(or(5, 20.0) / 1e3))
        .with_loss(or(6, 0.0));
    let sizes = vec![hosts; regions];
    let Some(lab) = regions_or_skip(&sizes, Link::new(Rate::gbit(1)), between) else { return };
    // Of two worlds: the second is told that all hosts are in one region.
    let (token, world) = (Token::random().expect("randomness"), hosts * regions);
    let bind = |host: usize| {
        let host = lab.host(host);
        host.run(|| Endpoint::bind(host.address()).expect("a port")).expect("a host")
    };
    let endpoints: Vec<[Endpoint; 2]> = (0..world).map(|host| [bind(host), bind(host)]).collect();
    let address = |world: usize| -> Vec<Address> {
        endpoints.iter().map(|of_rank| of_rank[world].address().clone()).collect()
    };
    let rosters = [address(0), address(1)];
    std::thread::scope(|scope| {
        for (rank, endpoints) in endpoints.into_iter().enumerate() {
            let (lab, token, rosters) = (&lab, token.clone(), rosters.clone());
            scope.spawn(move || {
                let measure = || measure(rank, endpoints, token, rosters, bytes, rounds);
                lab.host(rank).run(measure).expect("a host");
            });
        }
    });
}

fn measure(
    rank: usize,
    endpoints: [Endpoint; 2],
    token: Token,
    rosters: [Vec<Address>; 2],
    bytes: usize,
    rounds: usize,
) {
    let mut buffer = vec![1.0f32; bytes / 4];
    let mut groups = Vec::new();
    let names = [None, Some("all".to_owned())];
    for ((endpoint, roster), region) in endpoints.into_iter().zip(rosters).zip(names) {
        let mut options = Options::default();
        (options.transport, options.timeout) = (Transport::Tcp, Duration::from_secs(60));
        options.region = region;
        let world = roster.len();
        let connector = endpoint.open(rank, token.clone(), roster).expect("an acceptor");
        let start = Instant::now();
        let group = Group::world(connector, Epoch::new(0), rank, world, options);
        let group = group.expect("the world forms");
        let formed = start.elapsed();
        let explanation = group.explain(Request::all_reduce(&mut buffer, Reduction::Max));
        let explanation = explanation.expect("a call");
        if rank == 0 {
            let regions = group.topology().regions();
            println!("{regions} regions, formed in {formed:.1?}; {:?}", group.costs());
            for candidate in &explanation.candidates {
                println!("{:>8.0} ms predicted: {}", candidate.seconds * 1e3, candidate.algorithm);
            }
        }
        groups.push((group, explanation.chosen));
    }
    let is_able = |algorithm: &Algorithm| algorithm.supports(Op::AllReduce, groups[0].0.topology());
    let forced = ALGORITHMS.into_iter().filter(is_able).map(|a| (&groups[0].0, a, "forced"));
    let chosen = groups.iter().zip(["chosen, knowing the regions", "chosen for one region"]);
    let chosen = chosen.map(|((group, algorithm), how)| (group, *algorithm, how));
    let ways: Vec<(&Group, Algorithm, &str)> = chosen.chain(forced).collect();
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..rounds + WARM_UP {
        for ((group, algorithm, _), times) in ways.iter().zip(&mut times) {
            group.barrier().expect("a barrier");
            let (start, calls) = (Instant::now(), TOGETHER.div_ceil(bytes.max(1)).min(16));
            for _ in 0..calls {
                let request = Request::all_reduce(&mut buffer, Reduction::Max);
                group.run(request.with_algorithm(*algorithm)).expect("an all-reduce");
            }
            // Of the slowest rank.
            let mut seconds = [start.elapsed().as_secs_f64() / calls as f64];
            group.all_reduce(&mut seconds, Reduction::Max).expect("an all-reduce");
            if round >= WARM_UP {
                times.push(seconds[0]);
            }
        }
    }
    assert!(buffer.iter().all(|element| *element == 1.0));
    for ((_, algorithm, how), mut times) in ways.into_iter().zip(times).filter(|_| rank == 0) {
        times.sort_by(f64::total_cmp);
        let (median, best) = (times[times.len() / 2] * 1e3, times[0] * 1e3);
        println!("{median:>8.0} ms, at best {best:.0}: {algorithm}, {how}");
    }
}
