//! What a group says it has sent is what it had to send.

use unisono_collective::schedule::Algorithm;
use unisono_collective::{Group, Options, Reduction, Traffic, Transport};

const ELEMENTS: usize = 100_000;

/// What each of three ranks has sent for one all-reduce of so many elements, and whether it took the time of its folds.
///
/// Every rank adds in these algorithms; in those that the cost model may choose, not every one does.
fn all_reduce(transport: Transport, algorithm: Algorithm, elements: usize) -> Vec<(Traffic, bool)> {
    let mut options = Options::default();
    options.transport = transport;
    options.algorithm = Some(algorithm);
    let groups = Group::local(3, &options).unwrap();
    std::thread::scope(|scope| {
        let rank = |group: &'static Group| {
            move || {
                let before = group.traffic();
                assert!(group.folding().is_zero());
                group.time_folds();
                let mut buffer = vec![group.rank() as f32; elements];
                group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                assert_eq!(buffer[0], 3.0);
                let after = group.traffic();
                let sockets = after.sockets - before.sockets;
                let shared = after.shared - before.shared;
                (Traffic { sockets, shared }, !group.folding().is_zero())
            }
        };
        let ranks: Vec<_> = groups.leak().iter().map(|group| scope.spawn(rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// All ranks together send at least what any all-reduce of three ranks must, and headers come on top.
fn expect_enough(total: u64) {
    let least = 4 * ELEMENTS as u64 * 2 * 2;
    assert!((least..least + least / 4).contains(&total), "{total} bytes, at least {least}");
}

#[test]
fn bytes_on_sockets_are_counted() {
    let ranks = all_reduce(Transport::Tcp, Algorithm::Pairwise, ELEMENTS);
    assert!(ranks.iter().all(|(traffic, timed)| traffic.shared == 0 && *timed), "{ranks:?}");
    expect_enough(ranks.iter().map(|(traffic, _)| traffic.sockets).sum());
}

#[test]
fn bytes_in_shared_memory_are_counted() {
    let ranks = all_reduce(Transport::Shm, Algorithm::Window, ELEMENTS);
    assert!(ranks.iter().all(|(traffic, timed)| traffic.sockets == 0 && *timed), "{ranks:?}");
    // Staging two thirds and publishing one third is enough where all ranks can read it.
    let total: u64 = ranks.iter().map(|(traffic, _)| traffic.total()).sum();
    assert!(total >= 4 * ELEMENTS as u64 * 3, "{total} bytes");
}

/// However many segments a call has, and whatever is left for the last of them.
#[test]
fn no_rank_sends_more_than_its_part() {
    for elements in [1 << 20, 3 << 20, 4 << 20, (4 << 20) + 12_345] {
        let ranks = all_reduce(Transport::Tcp, Algorithm::Pairwise, elements);
        let part = (4 * elements) as f64 * 4.0 / 3.0;
        let most = ranks.iter().map(|(traffic, _)| traffic.sockets).max().unwrap() as f64;
        assert!((1.0..1.002).contains(&(most / part)), "{elements}: {} of its part", most / part);
    }
}
