//! Ranks that do not agree on a call, wait for each other, or give up.

use unisono_collective::Error;

use crate::behaviour::{
    all_reduce, ends_a_call_with_its_group, makes_groups_of_a_group, refuses_a_stream_that_records,
    says_for_whom_it_waits,
};
use crate::fake::on_all;
use crate::worlds::{ALL, world_of_any_engine, world_on};

/// Ranks call on so many elements, and are told.
fn tells_of(count: impl Fn(usize) -> usize + Sync) {
    for between in ALL {
        let errors = on_all(&world_on(&[0, 0, 1, 1], between), |group| {
            // Ranks that are ahead may disagree, and end the group, before one behind has seen the end of the first call.
            let first = all_reduce(group, &mut [1.0; 50]);
            let second = || all_reduce(group, &mut vec![1.0; count(group.group().rank())]);
            first.and_then(|()| second()).unwrap_err()
        });
        for error in errors {
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert!(text.contains("of 100 f32") && text.contains("of 101 f32"), "{text}");
        }
    }
}

#[test]
fn ranks_of_a_host_that_call_differently_are_told() {
    tells_of(|rank| 100 + rank % 2);
}

#[test]
fn hosts_that_call_differently_are_told() {
    tells_of(|rank| 100 + rank / 2);
}

#[test]
fn a_call_on_the_host_is_told() {
    for between in ALL {
        let errors =
            on_all(&world_on(&[0, 0, 1, 1], between), |group| match group.group().rank() {
                1 => group.group().barrier().unwrap_err(),
                _ => all_reduce(group, &mut [1.0; 50]).unwrap_err(),
            });
        for error in errors {
            assert!(matches!(error, Error::Mismatch { .. }), "{between:?}: {error}");
        }
    }
}

#[test]
fn a_call_ends_with_its_group() {
    for between in ALL {
        ends_a_call_with_its_group(&world_on(&[0, 0, 1, 1], between));
    }
}

#[test]
fn a_wait_says_for_whom() {
    for between in ALL {
        says_for_whom_it_waits(&world_on(&[0, 0, 1], between));
    }
}

#[test]
fn a_stream_that_records_is_refused() {
    refuses_a_stream_that_records(&world_on(&[0, 0, 1, 1], ALL[0]));
}

#[test]
fn groups_made_of_a_group_choose_for_themselves() {
    // Halves have one rank of each host, for which nothing but their own engine was asked.
    let groups = world_of_any_engine(&[0, 0, 1, 1], ALL[2]);
    makes_groups_of_a_group(&groups);
}
