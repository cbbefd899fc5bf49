//! An all-reduce fills the links between hosts. In a test binary of its own, so that no other test
//! competes with it for the processor.

mod common;

use common::protocol::{Command, Reply, Settings};
use common::{World, serve_if_rank};
use unisono::Transport;
use unisono_netlab::{Host, Lab, Link, Rate, lab_or_skip};

/// A rank in a process of its own; see [`common`].
#[test]
fn as_rank() {
    serve_if_rank();
}

const RATE: Rate = Rate::gbit(1);
const BYTES: usize = 16 << 20;

/// Repetitions that count, after a few in which TCP finds out the rate.
const REPEATS: usize = 7;
const WARM_UP: usize = 3;

#[test]
fn all_reduce_fills_the_links() {
    for hosts in [2, 3, 4] {
        let Some(lab) = lab_or_skip(hosts, Link::new(RATE)) else { return };
        let shares = shares_of_rate(&lab);
        let (median, best) = (shares[shares.len() / 2], shares[shares.len() - 1]);
        let percent = |share: f64| share * 100.0;
        println!(
            "{hosts} hosts: {:.1} % of the links' rate, at best {:.1} %",
            percent(median),
            percent(best)
        );
        // More than all would be a mistake in the measurement. Less than half would be one in the
        // schedule, whatever else the machine has to do.
        assert!((0.5..=1.0).contains(&best), "{hosts} hosts: {shares:?}");
    }
}

/// What must travel over what could have travelled meanwhile, for each repetition, in ascending
/// order.
fn shares_of_rate(lab: &Lab) -> Vec<f64> {
    let mut world = World::in_lab(lab, 1, Host::address);
    world.form(&Settings::new(Transport::Auto));
    let mut slowest = [0f64; WARM_UP + REPEATS];
    for reply in world.all(&Command::Time { bytes: BYTES, repeats: slowest.len() }) {
        let Reply::Timed(seconds) = reply else { panic!("{reply:?}") };
        slowest.iter_mut().zip(seconds).for_each(|(slowest, s)| *slowest = slowest.max(s));
    }
    world.end();
    let hosts = lab.hosts().len() as f64;
    let must_travel = BYTES as f64 * 2.0 * (hosts - 1.0) / hosts;
    let limit = must_travel * 8.0 / RATE.as_bits_per_second() as f64;
    let mut shares: Vec<f64> = slowest[WARM_UP..].iter().map(|seconds| limit / seconds).collect();
    shares.sort_by(f64::total_cmp);
    shares
}
