//! Links between hosts have the streams that they need.

mod common;
#[path = "common/lab.rs"]
mod lab;

use std::time::{Duration, Instant};

use common::{Sample, reference};
use lab::in_lab;
use unisono_collective::{Options, Reduction};
use unisono_netlab::{Link, Rate, lab_or_skip};

/// As in clouds that give a connection a fraction of what a host has.
#[test]
fn a_limit_on_single_connections_is_found_and_overcome() {
    let count = (4 << 20) / 4;
    let inputs: Vec<Vec<f32>> = (0..2).map(|rank| f32::samples(count, rank)).collect();
    let expected = reference(&inputs, Reduction::Sum);
    let link = Link::new(Rate::gbit(3)).with_flow_rate(Rate::mbit(600));
    let Some(lab) = lab_or_skip(2, link) else { return };
    let with = |streams: Option<usize>| {
        let mut options = Options::default();
        options.streams = streams;
        in_lab(&lab, &[0, 1], &options, None, |group| {
            let mut buffer = Vec::new();
            let quickest = (0..4).map(|_| {
                buffer.clone_from(&inputs[group.rank()]);
                group.barrier().unwrap();
                let start = Instant::now();
                group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                start.elapsed()
            });
            let quickest = quickest.min().unwrap_or(Duration::MAX);
            f32::assert_same(&buffer, &expected, "over several streams");
            (group.costs().streams, quickest)
        })
    };
    // What else the machine does may hide the limit while the group forms.
    let attempts = (0..5).map(|_| {
        let (one, auto) = (with(Some(1)), with(None));
        assert_eq!((one[0].0, auto[0].0), (1, auto[1].0), "all ranks find the same");
        let is_found = auto[0].0 > 1 && auto[0].1.as_secs_f64() < 0.7 * one[0].1.as_secs_f64();
        if is_found { Ok(()) } else { Err(format!("{auto:?} instead of {one:?}")) }
    });
    let mut missed = Vec::new();
    for attempt in attempts {
        match attempt {
            Ok(()) => return,
            Err(what) => missed.push(what),
        }
    }
    panic!("{missed:?}");
}
