//! An all-reduce fills the links between hosts. In a test binary of its own, so that no other test
//! competes with it for the processor.
//!
//! What a machine that does other things as well can be held to: no rank sends more than an all-reduce
//! must, and it takes hardly longer than as much data that is only passed on, in turns with it. The
//! algorithm is given, for on such a machine a group may measure links that suit another. Which share of the
//! links' rate is reached where the group chooses, `bench/links` measures.

mod common;

use std::time::Duration;

use common::protocol::{Command, Reply, Settings, Timed};
use common::{World, serve_if_rank};
use unisono::{Algorithm, Transport};
use unisono_netlab::{Host, Lab, Link, Rate, lab_or_skip};

/// A rank in a process of its own; see [`common`].
#[test]
fn as_rank() {
    serve_if_rank();
}

const RATE: Rate = Rate::gbit(1);
const BYTES: usize = 16 << 20;

/// Of a link between regions.
const DELAY: Duration = Duration::from_millis(20);
const LOSS: f64 = 0.002;
const FAR_BYTES: usize = 4 << 20;

/// Repetitions that count, after a few in which TCP finds out the rate.
const REPEATS: usize = 7;
const WARM_UP: usize = 3;

/// What headers may add to what must be sent.
const HEADERS: f64 = 0.005;

/// How much of the speed of passing on an all-reduce has at least, at its best. Half is what one has that adds
/// only while nothing travels. It also adds up, for which it needs cores: the less, the more other programs
/// have of them.
const OF_PASSING_ON: f64 = 0.5;

#[test]
fn all_reduce_fills_the_links() {
    for hosts in [2, 3, 4] {
        let Some(lab) = lab_or_skip(hosts, Link::new(RATE)) else { return };
        let measured = measure(&lab, BYTES, None);
        let must_send = BYTES as f64 * 2.0 * (hosts as f64 - 1.0) / hosts as f64;
        let limit = must_send * 8.0 / RATE.as_bits_per_second() as f64;
        let (median, best) = (limit / measured.all_reduce.median, limit / measured.all_reduce.best);
        let of_passing_on = measured.passing_on.best / measured.all_reduce.best;
        println!(
            "{hosts} hosts: {:.1} % of the links' rate, at best {:.1} %, which is {:.1} % of the speed \
             of passing on",
            median * 100.0,
            best * 100.0,
            of_passing_on * 100.0
        );
        let sent = measured.most_sent / must_send;
        assert!(
            (1.0..=1.0 + HEADERS).contains(&sent),
            "{hosts} hosts: {sent} of what must be sent"
        );
        assert!(best <= 1.0, "more than the links can carry: {best}");
        assert!(of_passing_on >= OF_PASSING_ON, "{hosts} hosts: {of_passing_on}");
    }
}

/// Between regions: what is in flight must last until an answer comes, with any number of streams.
#[test]
fn long_links_that_lose_packets() {
    let link = Link::new(RATE).with_delay(DELAY).with_loss(LOSS);
    let Some(lab) = lab_or_skip(2, link) else { return };
    let best = |streams| measure(&lab, FAR_BYTES, streams).all_reduce.best;
    let (chosen, several) = (best(None), best(Some(8)));
    println!(
        "2 hosts, {DELAY:?} apart, {LOSS} of the packets lost, {} MiB: {:.0} ms, {:.0} ms with 8 streams",
        FAR_BYTES >> 20,
        chosen * 1e3,
        several * 1e3
    );
    // One way for half of the buffer, to be summed, and one for the sums.
    let least = 2.0 * DELAY.as_secs_f64();
    assert!(chosen > least && several > least, "{chosen} and {several} s: the delay was not met");
}

struct Measured {
    all_reduce: Seconds,
    passing_on: Seconds,
    /// By the rank that sent most, for one all-reduce.
    most_sent: f64,
}

/// Of the slowest rank in each repetition.
struct Seconds {
    median: f64,
    best: f64,
}

impl Seconds {
    fn of_slowest(ranks: &[Timed], of: fn(&Timed) -> &Vec<f64>) -> Seconds {
        let slowest =
            |i: usize| ranks.iter().map(|rank| of(rank)[i]).fold(f64::NEG_INFINITY, f64::max);
        let mut seconds: Vec<f64> = (WARM_UP..WARM_UP + REPEATS).map(slowest).collect();
        seconds.sort_by(f64::total_cmp);
        Seconds { median: seconds[REPEATS / 2], best: seconds[0] }
    }
}

fn measure(lab: &Lab, bytes: usize, streams: Option<usize>) -> Measured {
    let mut world = World::in_lab(lab, 1, Host::address);
    let mut settings = Settings::new(Transport::Auto);
    settings.streams = streams;
    settings.algorithm = Some(Algorithm::Pairwise.name().to_owned());
    world.form(&settings);
    let repeats = WARM_UP + REPEATS;
    let ranks: Vec<Timed> = world
        .all(&Command::Time { bytes, repeats })
        .into_iter()
        .map(|reply| match reply {
            Reply::Timed(timed) => timed,
            other => panic!("{other:?}"),
        })
        .collect();
    world.end();
    Measured {
        all_reduce: Seconds::of_slowest(&ranks, |timed| &timed.all_reduce),
        passing_on: Seconds::of_slowest(&ranks, |timed| &timed.passing_on),
        most_sent: ranks.iter().map(|timed| timed.sent).max().unwrap_or(0) as f64 / repeats as f64,
    }
}
