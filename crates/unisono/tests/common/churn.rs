//! Random collectives, until one fails.

use unisono::{Error, Group, Reduction};

use super::random::Random;

/// Counts from nothing to several segments, so that a fault strikes every part of a call.
const COUNTS: [usize; 7] = [0, 1, 7, 100, 3_000, 40_000, 300_000];

/// Calls random collectives, the same on all ranks with the same seed, until one fails. What
/// succeeded is right, and inputs that are only read stay as they are. Returns the error and the
/// number of calls that went well; `started` is called after the first of them.
pub fn churn(group: &Group, seed: u64, started: impl FnOnce()) -> (Error, u64) {
    let mut random = Random::new(seed);
    let mut started = Some(started);
    let mut calls = 0;
    loop {
        if let Err(error) = call(group, &mut random) {
            let again = group.barrier().expect_err("a failed group stays failed");
            assert_eq!(forget_call(&again), forget_call(&error), "and for the same reason");
            if let Error::PeerLost { during, .. } = &again {
                assert!(
                    during.is_some_and(|call| call.barrier),
                    "every call names itself: {again}"
                );
            }
            return (error, calls);
        }
        calls += 1;
        if let Some(started) = started.take() {
            started();
        }
    }
}

/// An all-reduce whose result is checked.
pub fn checked_sum(group: &Group, count: usize) -> Result<(), Error> {
    let mut buffer = vec![own(group); count];
    group.all_reduce(&mut buffer, Reduction::Sum)?;
    assert!(buffer.iter().all(|&sum| sum == sum_of_all(group)), "a wrong sum");
    Ok(())
}

fn own(group: &Group) -> i64 {
    group.rank() as i64 + 1
}

fn sum_of_all(group: &Group) -> i64 {
    (group.size() * (group.size() + 1) / 2) as i64
}

fn call(group: &Group, random: &mut Random) -> Result<(), Error> {
    let (world, me) = (group.size(), group.rank());
    let (own, sum) = (own(group), sum_of_all(group));
    let count = random.pick(&COUNTS);
    let block = count / world;
    let root = random.below(world);
    let by_rank = |values: &[i64]| {
        let expected = |i: usize| (i / block.max(1)) as i64 + 1;
        values.iter().enumerate().all(|(i, &value)| value == expected(i))
    };
    match random.below(12) {
        0 => checked_sum(group, count),
        1 => {
            let (input, mut output) = (vec![own; count], vec![0; count]);
            let outcome = group.all_reduce_into(&input, &mut output, Reduction::Sum);
            assert!(input.iter().all(|&value| value == own), "an input was written");
            outcome?;
            assert!(output.iter().all(|&value| value == sum), "a wrong sum");
            Ok(())
        }
        2 => {
            let pending = group.submit_all_reduce(vec![own; count], Reduction::Sum)?;
            let second = group.submit_all_reduce(vec![own; block], Reduction::Max)?;
            assert!(pending.wait()?.iter().all(|&value| value == sum), "a wrong sum");
            assert!(second.wait()?.iter().all(|&value| value == world as i64), "a wrong maximum");
            Ok(())
        }
        3 => {
            let (input, mut output) = (vec![own; block * world], vec![0; block]);
            group.reduce_scatter(&input, &mut output, Reduction::Sum)?;
            assert!(output.iter().all(|&value| value == sum), "a wrong sum");
            Ok(())
        }
        4 => {
            let mut output = vec![0; block * world];
            group.all_gather(&vec![own; block], &mut output)?;
            assert!(by_rank(&output), "a wrong block");
            Ok(())
        }
        5 => {
            let mut buffer = vec![own; count];
            group.broadcast(&mut buffer, root)?;
            assert!(buffer.iter().all(|&value| value == root as i64 + 1), "a wrong broadcast");
            Ok(())
        }
        6 => {
            let mut output = vec![0; count];
            let at_root = (me == root).then_some(&mut output[..]);
            group.reduce(&vec![own; count], at_root, Reduction::Sum, root)?;
            assert!(me != root || output.iter().all(|&value| value == sum), "a wrong sum");
            Ok(())
        }
        7 => {
            let mut output = vec![0; block * world];
            group.all_to_all(&vec![own; block * world], &mut output)?;
            assert!(by_rank(&output), "a wrong block");
            Ok(())
        }
        8 => pass_on(group, count),
        9 | 10 => {
            let mut buffer = group.allocate(count)?;
            for _ in 0..3 {
                buffer.fill(own);
                if let Err(error) = group.all_reduce(&mut buffer, Reduction::Sum) {
                    // Whoever still reads it must not take this for a result.
                    buffer.fill(i64::MIN);
                    return Err(error);
                }
                assert!(buffer.iter().all(|&value| value == sum), "a wrong sum in place");
            }
            Ok(())
        }
        _ => group.barrier(),
    }
}

/// Every rank sends to the next rank and receives from the previous one.
fn pass_on(group: &Group, count: usize) -> Result<(), Error> {
    let (world, me) = (group.size(), group.rank());
    if world == 1 {
        return Ok(());
    }
    let (next, previous) = ((me + 1) % world, (me + world - 1) % world);
    let mut outgoing = vec![own(group); count];
    let mut incoming = vec![0i64; count];
    let bytes = size_of_val(&outgoing[..]);
    // SAFETY: the buffer is not touched before the wait below, which comes whatever happens.
    let sending = unsafe { group.submit_send(outgoing.as_mut_ptr().cast(), bytes, next, 7) }?;
    let received = group.receive(&mut incoming, previous, 7);
    let sent = sending.wait();
    received?;
    sent?;
    assert!(incoming.iter().all(|&value| value == previous as i64 + 1), "a wrong message");
    Ok(())
}

/// The error as a call sees it that begins after the failure.
fn forget_call(error: &Error) -> Error {
    match error.clone() {
        Error::PeerLost { peer, loss, .. } => Error::PeerLost { peer, loss, during: None },
        other => other,
    }
}
