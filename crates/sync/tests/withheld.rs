//! Steps that fail at every bucket, on every rank: where the update is withheld, no weight has changed.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use unisono_collective::{Group, Options, Transport};
use unisono_sync::bucket::BucketSizes;
use unisono_sync::{Parameter, Settings, SyncError, Synchronizer};

/// One bucket each.
const PARAMETERS: usize = 4;
const SHARDS: usize = 4;

fn synchronizer(group: &Group, withhold: bool, overlap: bool) -> Synchronizer {
    let parameters = (0..PARAMETERS).map(|i| Parameter::flat(format!("p{i}"), 50)).collect();
    let mut settings = Settings::new(SHARDS);
    settings.buckets = Some(BucketSizes { first: 0, others: 0 });
    (settings.withhold, settings.overlap) = (withhold, overlap);
    Synchronizer::new(Some(group), parameters, settings).unwrap()
}

/// Computes the shards of a step. Before the gradient of `ends` in the last shard, which is bucket
/// `PARAMETERS - 1 - ends`, the group ends.
fn compute(sync: &Synchronizer, ends: Option<usize>) {
    let shards = sync.shards();
    for _ in shards.clone() {
        let shard = sync.begin_shard();
        sync.begin_backward(0.5);
        for parameter in (0..PARAMETERS).rev() {
            if ends == Some(parameter) && shard + 1 == shards.end {
                sync.abort_handle().expect("there are other ranks").abort("for the test");
            }
            sync.gradient(parameter, &[1.0; 50]);
        }
        sync.end_shard();
    }
}

/// How many parameters each rank had updated in a step in which one of them ended the group.
fn updated(
    workers: usize,
    transport: Transport,
    (withhold, overlap): (bool, bool),
    faulty: usize,
    ends: usize,
) -> Vec<(usize, bool)> {
    let mut options = Options::default();
    options.transport = transport;
    let groups = Group::local(workers, &options).unwrap();
    let begun = Barrier::new(workers);
    std::thread::scope(|scope| {
        let rank = |group: Group| {
            let begun = &begun;
            move || {
                let sync = synchronizer(&group, withhold, overlap);
                compute(&sync, None);
                let mut first = 0;
                sync.finish(|_, _| first += 1).unwrap();
                assert_eq!(first, PARAMETERS);
                begun.wait();
                compute(&sync, (group.rank() == faulty).then_some(ends));
                let mut updated = 0;
                let failed = match sync.finish(|_, _| updated += 1) {
                    Err(SyncError::Group(_)) => true,
                    Err(other) => panic!("{other:?}"),
                    Ok(_) => false,
                };
                begun.wait();
                (updated, failed)
            }
        };
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_step_that_fails_at_any_bucket_of_any_rank_has_updated_nothing() {
    let (mut faults, mut failed_ranks) = (0, 0);
    for transport in [Transport::Shm, Transport::Tcp] {
        for workers in [2, 3, 4] {
            for faulty in 0..workers {
                for ends in 0..PARAMETERS {
                    for overlap in [true, false] {
                        let ranks = updated(workers, transport, (true, overlap), faulty, ends);
                        // The rank that ends the group has at least one bucket to exchange.
                        assert!(ranks[faulty].1, "{workers} {faulty} {ends}: {ranks:?}");
                        for (updated, failed) in ranks {
                            assert_eq!(updated, if failed { 0 } else { PARAMETERS });
                            failed_ranks += usize::from(failed);
                        }
                        faults += 1;
                    }
                }
            }
        }
    }
    assert_eq!(faults, 2 * (2 + 3 + 4) * PARAMETERS * 2);
    // No rank can have the mean of a bucket that another rank never submitted.
    assert_eq!(failed_ranks, 2 * (4 + 9 + 16) * PARAMETERS * 2);
}

#[test]
fn without_that_a_step_that_fails_has_updated_some() {
    let mut groups = Group::local(2, &Options::default()).unwrap();
    let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
    let updated = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sync = synchronizer(&second, false, true);
            compute(&sync, None);
            assert!(sync.finish(|_, _| _ = updated.fetch_add(1, Ordering::SeqCst)).is_err());
        });
        let sync = synchronizer(&first, false, true);
        let shards = sync.shards();
        for shard in shards.clone() {
            sync.begin_shard();
            sync.begin_backward(0.5);
            for parameter in (1..PARAMETERS).rev() {
                sync.gradient(parameter, &[1.0; 50]);
            }
            // In its last shard, it leaves when the other waits for nothing but the last bucket.
            while shard + 1 == shards.end && updated.load(Ordering::SeqCst) < PARAMETERS - 1 {
                std::thread::yield_now();
            }
            if shard + 1 == shards.end {
                break;
            }
            sync.end_shard();
        }
        drop(sync);
    });
    assert_eq!(updated.into_inner(), PARAMETERS - 1);
}
