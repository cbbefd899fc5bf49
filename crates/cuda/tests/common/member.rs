//! What a rank that is a process does in the tests of faults, whatever its engine.

use std::error::Error as AnyError;
use std::time::{Duration, Instant};

use unisono_collective::{Dtype, Error, Reduction};
use unisono_cuda::{DeviceGroup, DevicePtr};

use crate::common::{element, same};
use crate::processes::say;

/// Names what the ranks do: `sums`, or calls until one of them fails.
pub const SCENARIO: &str = "DEVICE_TEST_SCENARIO";

type Outcome<T> = Result<T, Box<dyn AnyError>>;

/// Sums, and compares them with the host's; then says what `right` makes of the group. Or makes calls until one fails, and
/// says how. `nothing_is_left` looks, when the group is gone, whether all that it had is.
pub fn take_part(
    group: DeviceGroup,
    right: impl FnOnce(&DeviceGroup) -> Outcome<String>,
    nothing_is_left: impl Fn(),
) -> Outcome<()> {
    let rank = group.group().rank();
    let numbers = |count: usize, round: usize| -> Vec<f32> {
        (0..count).map(|i| f32::from_bits(element(Dtype::F32, rank + round, i) as u32)).collect()
    };
    let all_reduce = |count: usize, round: usize| {
        let mut buffer = numbers(count, round);
        let at = DevicePtr(buffer.as_mut_ptr() as u64);
        // SAFETY: the host's memory is the device's.
        let reduced = unsafe { group.all_reduce(at, at, count, Dtype::F32, Reduction::Sum, None) };
        reduced.map(|()| buffer)
    };
    if std::env::var(SCENARIO)? == "sums" {
        for (round, count) in [1, 3, 1000, 5001, 30_000, 7].into_iter().enumerate() {
            let found = all_reduce(count, round)?;
            let mut expected = numbers(count, round);
            group.group().all_reduce(&mut expected, Reduction::Sum)?;
            let equal = found.iter().zip(&expected).all(|(found, expected)| {
                same(Dtype::F32, found.to_bits().into(), expected.to_bits().into())
            });
            assert!(equal, "{count} elements");
        }
        let said = right(&group)?;
        drop(group);
        nothing_is_left();
        return say(&said);
    }
    for round in 0.. {
        if round == 5 {
            say("under way")?;
        }
        if let Err(error) = all_reduce(3000, round) {
            let after = all_reduce(10, 0).expect_err("the group has ended");
            assert_eq!(std::mem::discriminant(&after), std::mem::discriminant(&error));
            let dropped = Instant::now();
            drop(group);
            assert!(dropped.elapsed() < Duration::from_secs(5), "leaving takes too long");
            nothing_is_left();
            let kind = match error {
                Error::PeerLost { peer, .. } => format!("lost {peer}"),
                Error::Aborted { peer, reason } => format!("aborted by {peer}: {reason}"),
                error => format!("{error:?}"),
            };
            return say(&kind);
        }
    }
    Ok(())
}

/// What the library that a variable names has counted: pieces of device memory, or communicators, that this process has.
pub fn counted(variable: &str, function: &str) -> i32 {
    let library = std::env::var_os(variable).expect("set for every rank");
    // SAFETY: if it is there, it is loaded already, and has this function.
    unsafe {
        let Ok(library) = libloading::Library::new(library) else { return 0 };
        library.get::<unsafe extern "C" fn() -> i32>(function).unwrap()()
    }
}
