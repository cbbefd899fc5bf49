//! Advice for made-up steps.

use super::*;
use proptest::prelude::*;

const MIB: f64 = (1 << 20) as f64;

/// Seconds of a byte at so many bits per second.
fn rate(bits: f64) -> f64 {
    8.0 / bits
}

/// Volumes of four buckets.
fn volumes(bytes: f64, coding: f64) -> Vec<Volume> {
    let volume =
        Volume { calls: 1.0, bytes, all_bytes: 2.0 * bytes, folded: 0.0, coding: coding / 4.0 };
    vec![volume; 4]
}

fn dense() -> Vec<Volume> {
    volumes(MIB, 0.0)
}

fn candidate(codec: &str, bytes: f64, coding: f64) -> Candidate {
    Candidate { codec: codec.parse().unwrap(), volumes: volumes(bytes, coding) }
}

/// A backward pass of 50 ms that completes four buckets, and then a link with this price of a byte.
fn observed(byte: f64) -> Observed {
    let bucket = |i: u32| ObservedBucket {
        ready: 0.02 + 0.01 * f64::from(i),
        moving: 1e-4 + MIB * byte,
        update: 5e-4,
    };
    let mut observed = Observed {
        step: 7,
        workers: 2,
        seconds: 0.0,
        computed: 0.05,
        buckets: (0..4).map(bucket).collect(),
        latency: 1e-4,
        short: Short::default(),
        dearest_byte: f64::INFINITY,
        fold: 0.0,
        wire_bytes: 8 << 20,
        processors: Processors { cores: 16.0, busy: 2.0, coders: 2.0 },
    };
    observed.seconds = replay(&observed, &dense(), &Link { call: 1e-4, byte, burst: 0.0 });
    observed
}

#[test]
fn candidates_are_codecs_under_their_own_names() {
    for name in CANDIDATES {
        assert_eq!(name.parse::<CodecSpec>().unwrap().to_string(), name);
    }
}

#[test]
fn a_link_is_recognized_by_what_went_over_it() {
    let link = Link::of(&observed(rate(1e9)), &dense());
    assert!((link.call - 1e-4).abs() < 1e-9 && (link.byte - 8e-9).abs() < 1e-15, "{link:?}");
    // A latency that no bucket shows was not that of the link.
    let mut hasty = observed(rate(1e9));
    hasty.latency = 1.0;
    let link = Link::of(&hasty, &dense());
    assert!((link.call - hasty.buckets[0].moving).abs() < 1e-12 && link.byte < 1e-15, "{link:?}");
    let mut crowded = observed(rate(1e6));
    crowded.dearest_byte = 1e-10;
    let link = Link::of(&crowded, &dense());
    assert_eq!(link.byte, 1e-10);
    assert!((link.seconds(&dense()[0]) - crowded.buckets[0].moving).abs() < 1e-9, "{link:?}");
}

#[test]
fn what_is_hidden_needs_no_compression() {
    let observed = observed(rate(10e9));
    let advice = advise(&observed, &dense(), &[candidate("int8", MIB / 4.0, 1e-3)]);
    assert_eq!(advice.chosen, None);
    assert!(advice.reason.contains("hardly anything waits for communication"), "{}", advice.reason);
    assert!((advice.rows[0].seconds - observed.seconds).abs() < 1e-6);
    assert_eq!((advice.rows[0].codec.as_str(), advice.rows[0].wire_bytes), ("none", 8 << 20));
}

#[test]
fn over_a_slow_link_the_best_trade_wins() {
    let candidates = [
        candidate("fp16", MIB / 2.0, 1e-3),
        candidate("int8", MIB / 4.0, 2e-3),
        candidate("sign", MIB / 32.0, 4e-3),
        candidate("topk:1%", MIB / 32.0, 90e-3),
    ];
    let advice = advise(&observed(rate(100e6)), &dense(), &candidates);
    assert_eq!(advice.chosen, Some(CodecSpec::Sign), "{advice:?}");
    assert!(advice.reason.starts_with("sign saves"), "{}", advice.reason);
    let seconds: Vec<f64> = advice.rows.iter().map(|row| row.seconds).collect();
    assert!(seconds[0] > seconds[1] && seconds[1] > seconds[2] && seconds[2] > seconds[3]);
    assert!(seconds[4] > seconds[3]);
    // What a rank still sends in the end is the last bucket, and all of those before that do not fit.
    let expected = 0.05 + 1e-3 + 1e-4 + MIB / 32.0 * rate(100e6) + 5e-4;
    assert!((seconds[3] - expected).abs() < 2e-3, "{} {expected}", seconds[3]);
}

#[test]
fn a_gentler_codec_is_preferred_to_one_that_is_hardly_faster() {
    let candidates = [candidate("int8", 2e4, 1e-3), candidate("sign", 0.0, 1e-3)];
    let advice = advise(&observed(rate(100e6)), &dense(), &candidates);
    assert!(advice.rows[1].seconds > advice.rows[2].seconds);
    assert_eq!(advice.chosen, Some("int8".parse().unwrap()));
}

#[test]
fn encoding_that_takes_longer_than_it_saves_is_refused() {
    let advice = advise(&observed(rate(400e6)), &dense(), &[candidate("int8", MIB / 4.0, 0.4)]);
    assert_eq!(advice.chosen, None);
    assert!(advice.reason.contains("encoding takes longer (400.0 ms)"), "{}", advice.reason);
}

#[test]
fn a_small_gain_is_refused() {
    let advice = advise(&observed(rate(300e6)), &dense(), &[candidate("fp16", MIB * 0.95, 1e-3)]);
    assert_eq!(advice.chosen, None);
    assert!(advice.reason.contains("not worth its loss of precision"), "{}", advice.reason);
}

/// What coding costs depends on whether the processors have other work.
#[test]
fn full_processors_make_encoding_dear() {
    let candidates = [candidate("int8", MIB / 4.0, 30e-3)];
    let mut observed = observed(rate(500e6));
    let idle = advise(&observed, &dense(), &candidates);
    assert!(idle.chosen.is_some(), "{}", idle.reason);
    observed.processors = Processors { cores: 2.0, busy: 2.0, coders: 2.0 };
    assert_eq!((observed.processors.speed(), observed.processors.stretch()), (0.5, 2.0));
    let full = advise(&observed, &dense(), &candidates);
    assert_eq!(full.chosen, None, "{full:?}");
    assert!(full.rows[1].seconds > idle.rows[1].seconds);
    assert_eq!(full.rows[0], idle.rows[0]);
}

#[test]
fn processor_time_is_neither_lost_nor_won() {
    // All of the coding happens beside the backward pass, at half its speed: it costs what it takes.
    let mut observed = observed(rate(100e9));
    observed.processors = Processors { cores: 1.0, busy: 1.0, coders: 1.0 };
    let link = Link { call: 0.0, byte: 0.0, burst: 0.0 };
    observed.buckets[3].ready = 0.04;
    let without = replay(&observed, &volumes(0.0, 0.0), &link);
    let with = replay(&observed, &volumes(0.0, 8e-3), &link);
    assert!((with - without - 8e-3).abs() < 1e-9, "{with} {without}");
}

#[test]
fn alone_there_is_no_worker_to_send_to() {
    let observed = Observed { workers: 1, ..observed(0.0) };
    let advice = advise(&observed, &dense(), &[]);
    assert_eq!((advice.chosen, advice.rows.len()), (None, 1));
    assert_eq!(advice.reason, "there is no other worker to send to");
}

#[test]
fn without_large_parameters_nothing_is_compressed() {
    let advice = advise(&observed(rate(1e6)), &dense(), &[]);
    assert_eq!(advice.reason, "no parameter is large enough to be compressed");
}

#[test]
fn what_the_replay_misses_is_divided_between_link_and_rest() {
    // A link that was a tenth slower than the best times say.
    let mut observed = observed(rate(100e6));
    let (dense, link) = (dense(), Link::of(&observed, &dense()));
    observed.seconds = replay(&observed, &dense, &link.scaled(1.1));
    let correction = Correction::of(&observed, &dense, &link);
    assert!((correction.link - 1.1).abs() < 1e-4 && correction.seconds.abs() < 1e-4);
    // Half a second that has nothing to do with it.
    observed.seconds = replay(&observed, &dense, &link.scaled(CORRECTABLE)) + 0.5;
    let correction = Correction::of(&observed, &dense, &link);
    assert!((correction.link - CORRECTABLE).abs() < 1e-4);
    assert!((correction.seconds - 0.5).abs() < 1e-3);
}

fn any_number() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), 0.0..1e-6, 0.0..1.0, 0.0..1e3]
}

fn any_volume() -> impl Strategy<Value = Volume> {
    (0.0..6.0, 0.0..1e9, any_number()).prop_map(|(calls, bytes, coding): (f64, f64, f64)| Volume {
        calls: calls.floor(),
        bytes,
        all_bytes: 3.0 * bytes,
        folded: bytes / 4.0,
        coding,
    })
}

fn any_bucket() -> impl Strategy<Value = (ObservedBucket, Volume, Volume)> {
    let bucket = (any_number(), any_number(), any_number())
        .prop_map(|(ready, moving, update)| ObservedBucket { ready, moving, update });
    (bucket, any_volume(), any_volume())
}

proptest! {
    #[test]
    fn odd_steps_get_finite_advice(
        buckets in proptest::collection::vec(any_bucket(), 0..6),
        times in [any_number(), any_number(), any_number(), any_number()],
        processors in [any_number(), any_number(), any_number()],
        workers in 0usize..4,
        dearest in prop_oneof![Just(f64::INFINITY), any_number()],
    ) {
        let [seconds, computed, latency, fold] = times;
        let [cores, busy, coders] = processors;
        let observed = Observed {
            step: 0,
            workers,
            seconds,
            computed,
            buckets: buckets.iter().map(|(bucket, ..)| *bucket).collect(),
            latency,
            short: Short::default(),
            dearest_byte: dearest,
            fold,
            wire_bytes: 1,
            processors: Processors { cores, busy, coders },
        };
        let dense: Vec<Volume> = buckets.iter().map(|(_, dense, _)| *dense).collect();
        let volumes = buckets.iter().map(|(_, _, volume)| *volume).collect();
        let candidate = Candidate { codec: CodecSpec::Sign, volumes };
        let advice = advise(&observed, &dense, &[candidate]);
        for row in &advice.rows {
            prop_assert!(row.seconds.is_finite() && row.seconds >= 0.0, "{advice:?}");
        }
        prop_assert!(!advice.reason.contains("NaN") && !advice.reason.contains("inf"), "{advice:?}");
        if advice.chosen.is_some() {
            prop_assert!(workers > 1);
            prop_assert!(advice.rows[1].seconds <= advice.rows[0].seconds * (1.0 - WORTH_IT));
        }
    }

    #[test]
    fn a_slower_link_never_makes_a_step_shorter(
        buckets in proptest::collection::vec(any_bucket(), 1..6),
        computed in any_number(),
        byte in 0.0..1e-6,
        slower in 1.0..10.0,
        processors in (1.0..8.0, 0.0..8.0, 1.0..8.0),
    ) {
        let (cores, busy, coders) = processors;
        let observed = Observed {
            computed,
            buckets: buckets.iter().map(|(bucket, ..)| *bucket).collect(),
            processors: Processors { cores, busy, coders },
            ..observed(byte)
        };
        // Without coding, which a slower link can push out of the way of the backward pass.
        let dense = |volume: &Volume| Volume { coding: 0.0, ..*volume };
        let volumes: Vec<Volume> = buckets.iter().map(|(_, volume, _)| dense(volume)).collect();
        let step = |factor| replay(&observed, &volumes, &Link { call: 1e-5, byte, burst: 0.0 }.scaled(factor));
        prop_assert!(step(slower) >= step(1.0) - 1e-9, "{} {}", step(1.0), step(slower));
    }
}

#[test]
fn what_a_link_saved_while_it_was_idle_passes_at_once() {
    // A byte takes a microsecond, and 1000 may pass at once.
    let link = Link { call: 0.0, byte: 1e-6, burst: 1000.0 };
    let volume = |bytes: f64| Volume { bytes, calls: 1.0, ..Volume::default() };
    let mut idling = Idling { link: &link, saved: 1000.0, at: 0.0 };
    assert_eq!(idling.send(0.0, &volume(600.0)), 0.0);
    let rest = idling.send(0.0, &volume(600.0));
    assert!((rest - 200e-6).abs() < 1e-9, "{rest}");
    // It has saved 100 since, and never more than its burst.
    let rest = idling.send(300e-6, &volume(600.0));
    assert!((rest - 500e-6).abs() < 1e-9, "{rest}");
    assert_eq!(idling.send(1.0, &volume(1000.0)), 0.0);
    let rest = idling.send(1.0, &volume(1000.0));
    assert!((rest - 1e-3).abs() < 1e-9, "{rest}");
}

#[test]
fn a_burst_is_what_a_short_call_did_not_wait_for() {
    let of = |seconds: f64| burst(&Short { bytes: 1000.0, seconds }, 1e-4, 1e-6);
    assert!((of(1e-4) - 1000.0).abs() < 1e-6);
    assert!((of(6e-4) - 500.0).abs() < 1e-6);
    assert_eq!(of(1.0), 0.0);
}
