use super::*;
use rustix::fs::MemfdFlags;
use socket2::Type;
use std::os::fd::AsFd;

fn pairs() -> [(Link, Link); 2] {
    pairs_for(1 << 16)
}

/// Pairs of links of both kinds, for so many bytes of bulk data.
fn pairs_for(bytes: usize) -> [(Link, Link); 2] {
    let pair = || Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    let (a, b) = pair();
    let (c, d) = pair();
    let (offered, mut taken) = (Link::offer(c, bytes).unwrap(), Link::over(d));
    taken.take_offer().unwrap();
    [(Link::over(a), Link::over(b)), (offered, taken)]
}

/// A worker and a server that have numbers in common memory.
pub fn in_common_memory(numbers: &[f32]) -> (Link, Link) {
    let [_, (mut worker, mut server)] = pairs_for(size_of_val(numbers));
    worker.send(&0u64, &[bytes(numbers)]).unwrap();
    server.receive::<u64>().unwrap();
    (worker, server)
}

#[test]
fn bulk_data_arrives_beside_its_message() {
    for (mut worker, mut server) in pairs() {
        let (odd, numbers_sent) = ([7u8; 13], [1.5f32, -2.0, 3.0]);
        for turn in 0..3u64 {
            worker.send(&turn, &[&odd, bytes(&numbers_sent)]).unwrap();
            assert_eq!(server.receive::<u64>().unwrap(), Some(turn));
            let parts = server.bulk([13, 12].into_iter()).unwrap();
            assert_eq!(parts[0], odd);
            assert_eq!(numbers(parts[1]).unwrap(), numbers_sent);
            server.send(&turn, &[bytes(&numbers_sent[..1])]).unwrap();
            assert_eq!(worker.receive::<u64>().unwrap(), Some(turn));
            assert_eq!(numbers(worker.bulk([4].into_iter()).unwrap()[0]).unwrap(), [1.5]);
        }
        assert!(!server.is_over());
        drop(worker);
        assert!(server.is_over());
        assert_eq!(server.receive::<u64>().unwrap(), None);
    }
}

#[test]
fn bulk_data_can_be_taken_as_it_comes() {
    let large: Vec<f32> = (0..CHUNK / 4 + 5).map(|i| i as f32).collect();
    let parts = [&large[..], &[], &[1.0, 2.0, 3.0]];
    let lengths = parts.map(|part| 4 * part.len());
    for (mut worker, mut server) in pairs_for(4 * large.len() + 64) {
        std::thread::scope(|scope| {
            scope.spawn(|| server.send(&0u64, &parts.map(bytes)).unwrap());
            worker.receive::<u64>().unwrap();
            let mut taken = [const { Vec::new() }; 3];
            let take = |part: usize, start: usize, bytes: &[u8]| {
                assert_eq!(start, 4 * taken[part].len());
                taken[part].extend_from_slice(numbers(bytes)?);
                Ok(())
            };
            worker.bulk_as_it_comes(&lengths, take).unwrap();
            assert_eq!(taken.each_ref().map(Vec::as_slice), parts);
        });
    }
}

/// Whatever lies at the end of a step: the end of a part, of all, or neither.
#[test]
fn weights_come_step_by_step() {
    let lengths = [STEP - 8, STEP, STEP + 8, 2 * STEP - 3, 2 * STEP, 3 * STEP + 5];
    for first in lengths {
        for second in [0, 13, STEP] {
            let parts = [first, second]
                .map(|bytes| -> Vec<u8> { (0..bytes).map(|i| (i / 4093 + i) as u8).collect() });
            for (mut worker, mut server) in pairs_for(first + second + 64) {
                std::thread::scope(|scope| {
                    let parts = parts.each_ref().map(Vec::as_slice);
                    scope.spawn(move || {
                        for turn in 0..3u64 {
                            server.send(&turn, &parts).unwrap();
                            assert_eq!(server.receive::<u64>().unwrap(), Some(turn));
                        }
                    });
                    for turn in 0..3u64 {
                        assert_eq!(worker.receive::<u64>().unwrap(), Some(turn));
                        if turn == 1 {
                            let bulk = worker.bulk([first, second].into_iter()).unwrap();
                            assert!(bulk == parts);
                        } else {
                            let mut taken = [const { Vec::new() }; 2];
                            let take = |part: usize, _: usize, bytes: &[u8]| {
                                taken[part].extend_from_slice(bytes);
                                Ok(())
                            };
                            worker.bulk_as_it_comes(&[first, second], take).unwrap();
                            assert!(taken.each_ref().map(Vec::as_slice) == parts);
                        }
                        // What is announced is taken: the next message follows.
                        worker.send(&turn, &[]).unwrap();
                    }
                });
            }
        }
    }
}

#[test]
fn bulk_data_is_written_to_its_place() {
    for large in [5, STEP / 4 - 1, STEP / 4 + 1, 3 * STEP / 4 + 7] {
        let large: Vec<f32> = (0..large).map(|i| i as f32).collect();
        let parts = [&large[..], &[], &[1.0, 2.0, 3.0], &large];
        let lengths = parts.map(|part| 4 * part.len());
        for (mut worker, mut server) in pairs_for(lengths.iter().sum::<usize>() + 64) {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    server.send(&7u64, &parts.map(bytes)).unwrap();
                    // Perhaps the worker is gone before it has all of it.
                    let _ = server.send(&7u64, &parts.map(bytes));
                });
                assert_eq!(worker.receive::<u64>().unwrap(), Some(7));
                let mut places = parts.map(|part| vec![f32::NAN; part.len()]);
                let lend =
                    |part: usize, first: usize, count: usize, fill: &mut dyn FnMut(&mut [f32])| {
                        fill(&mut places[part][first..first + count]);
                    };
                worker.bulk_to_place(&lengths, lend).unwrap();
                assert_eq!(places.each_ref().map(Vec::as_slice), parts);
                // The next message is where it should be, and what gets no place is an error.
                assert_eq!(worker.receive::<u64>().unwrap(), Some(7));
                worker.bulk_to_place(&lengths, |_, _, _, _| {}).unwrap_err();
                drop(worker);
            });
        }
    }
}

/// A server never waits for a worker that takes nothing, and the worker finds all of it later, heartbeats between
/// messages included.
#[test]
fn all_steps_can_be_announced_before_one_is_taken() {
    let large = vec![7u8; MOST_STEPS * STEP + 4099 * 8];
    let [_, (mut worker, mut server)] = pairs_for(large.len());
    for turn in 0..2u64 {
        server.send(&turn, &[&large]).unwrap();
        server.heartbeat().beat(&SIGN_OF_LIFE);
        assert_eq!(worker.receive::<u64>().unwrap(), Some(turn));
        assert!(worker.bulk([large.len()].into_iter()).unwrap()[0] == large);
    }
}

#[test]
fn parts_are_copied_or_stay_where_they_are() {
    for (mut worker, mut server) in pairs() {
        let (odd, numbers_sent) = ([7u8; 13], [1.5f32, -2.0, 3.0, 4.0, 5.0]);
        let parts = [&odd[..], bytes(&numbers_sent), &[], bytes(&numbers_sent)];
        worker.send(&0u64, &parts).unwrap();
        server.receive::<u64>().unwrap();
        let is_shared = server.is_shared();
        let wanted = [(13, true), (20, false), (0, false), (20, true)];
        let bulk = server.bulk_or_places(&wanted).unwrap();
        for ((part, sent), (_, copied)) in bulk.iter().zip(parts).zip(wanted) {
            match part {
                Bulk::Own(part) => assert_eq!(*part, sent),
                Bulk::There(place) => {
                    assert!(is_shared && !copied);
                    assert_eq!(place.len(), sent.len() / 4);
                    let mut read = vec![0.0; place.len().next_multiple_of(2)];
                    place.read(0, &mut read);
                    assert_eq!(bytes(&read[..place.len()]), sent);
                    if place.len() == 5 {
                        place.read(2, &mut read[..4]);
                        assert_eq!(read[..3], numbers_sent[2..]);
                    }
                }
            }
        }
        assert_eq!(bulk.iter().filter(|part| matches!(part, Bulk::There(_))).count(), {
            if is_shared { 2 } else { 0 }
        });
        worker.send(&1u64, &[]).unwrap();
        server.receive::<u64>().unwrap();
        let half = 1 << 16;
        assert!(!is_shared || server.bulk_or_places(&[(half, false), (8, true)]).is_err());
    }
}

/// A side that writes to its half before it was replied to changes nothing that was read.
#[test]
fn what_was_read_stays_as_it_was_read() {
    for (mut worker, mut server) in pairs() {
        worker.send(&0u64, &[bytes(&[1.0; 100])]).unwrap();
        server.receive::<u64>().unwrap();
        let parts = server.bulk([400].into_iter()).unwrap();
        worker.send(&1u64, &[bytes(&[2.0; 100])]).unwrap();
        assert_eq!(numbers(parts[0]).unwrap(), [1.0; 100]);
    }
}

#[test]
fn more_than_fits_is_refused() {
    let [_, (mut worker, mut server)] = pairs();
    assert!(worker.send(&0u64, &[&vec![0; 1 << 17]]).is_err());
    worker.send(&0u64, &[]).unwrap();
    server.receive::<u64>().unwrap();
    assert!(server.bulk([1 << 17].into_iter()).is_err());
    assert!(server.bulk([usize::MAX, 1].into_iter()).is_err());
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    send_with(&a, &4096u64.to_le_bytes(), Some(file.as_fd())).unwrap();
    assert!(Link::over(b).take_offer().is_err());
}

/// Its maker may write to it, but not who takes it, who would have to.
#[test]
fn memory_that_can_only_be_read_is_refused() {
    let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    let memory = memory::Memory::create_readable(8192).unwrap();
    send_with(&a, &4096u64.to_le_bytes(), memory.file()).unwrap();
    assert!(Link::over(b).take_offer().is_err());
}
