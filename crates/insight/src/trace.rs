//! A timeline of all ranks, for Perfetto (<https://ui.perfetto.dev>) and Chrome's `about:tracing`.
//!
//! The format is the trace-event JSON both read: one process per rank, one track per concept, complete
//! events (`"ph": "X"`) in microseconds from the first step shown. Spans on one track must not overlap
//! or a viewer draws them as a call stack. Phases follow each other by nature, and hostile records are
//! cut so that they do. Buckets do overlap: each takes the first *lane* that is free, and a lane is a
//! track of its own.
//!
//! Ranks measure how long the passes took, not when they ran; the passes are drawn up to `computed`,
//! the backward pass of the last micro-batch at the end.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::breakdown::StepBreakdown;
use crate::record::{RunInfo, StepRecord};
use crate::units::bytes;

/// How many steps at the end of a run are written. More show nothing new and make the file too large
/// for the viewers; fewer might miss what happens every hundred steps, such as a checkpoint.
pub const DEFAULT_STEPS: usize = 200;

/// What the tracks of a rank show, from top to bottom.
#[derive(Clone, Copy)]
enum Track {
    Compute,
    Wait,
    Optimizer,
    Queue,
    Transfer,
    Coding,
    Reduce,
}

impl Track {
    const ALL: [Track; 7] = [
        Track::Compute,
        Track::Wait,
        Track::Optimizer,
        Track::Queue,
        Track::Transfer,
        Track::Coding,
        Track::Reduce,
    ];

    fn name(self) -> &'static str {
        match self {
            Track::Compute => "compute",
            Track::Wait => "wait",
            Track::Optimizer => "optimizer",
            Track::Queue => "bucket queue",
            Track::Transfer => "bucket transfer",
            Track::Coding => "bucket coding",
            Track::Reduce => "bucket reduce",
        }
    }
}

/// Writes the last `last` steps of a run.
pub fn write(info: &RunInfo, steps: &[StepRecord], last: usize, to: impl Write) -> io::Result<()> {
    let shown = &steps[steps.len().saturating_sub(last)..];
    let world = shown.iter().map(|record| record.ranks.len()).max().unwrap_or(0);
    let origin = shown
        .iter()
        .flat_map(|record| &record.ranks)
        .map(|rank| rank.begin)
        .filter(|begin| begin.is_finite())
        .fold(f64::INFINITY, f64::min);
    let mut out = Out { to, first: true };
    out.to.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut ranks: Vec<RankTimeline> =
        (0..world).map(|rank| RankTimeline::new(rank, origin)).collect();
    for record in shown {
        let breakdown = StepBreakdown::of(record);
        for (rank, timeline) in ranks.iter_mut().enumerate().take(record.ranks.len()) {
            timeline.step(record, rank, breakdown.ranks[rank].parts.straggler, &mut out)?;
        }
    }
    for timeline in &ranks {
        timeline.names(info, &mut out)?;
    }
    out.to.write_all(b"\n]}\n")?;
    out.to.flush()
}

/// The tracks of one rank: for every lane, when its last span ended.
struct RankTimeline {
    rank: usize,
    origin: f64,
    lanes: [Vec<i64>; Track::ALL.len()],
}

impl RankTimeline {
    fn new(rank: usize, origin: f64) -> RankTimeline {
        RankTimeline { rank, origin, lanes: Default::default() }
    }

    fn step(
        &mut self,
        record: &StepRecord,
        rank: usize,
        straggler: f64,
        out: &mut Out<impl Write>,
    ) -> io::Result<()> {
        let measured = &record.ranks[rank];
        let step = json!({ "step": record.step });
        let forward = measured.computed - measured.compute;
        let backward = measured.computed - measured.backward;
        let caught_up = measured.computed + straggler;
        let phases = [
            (Track::Compute, "data and bookkeeping", measured.begin, forward),
            (Track::Compute, "forward and earlier shards", forward, backward),
            (Track::Compute, "backward", backward, measured.computed),
            (Track::Wait, "wait for straggler", measured.computed, caught_up),
            (Track::Wait, "exposed communication", caught_up, measured.reduced),
            (Track::Optimizer, "optimizer", measured.reduced, measured.end),
        ];
        for (track, name, from, to) in phases {
            let from = self
                .nanoseconds(from)
                .max(self.lanes[track as usize].first().copied().unwrap_or(0));
            self.span(track, name, from, self.nanoseconds(to), &step, out)?;
        }
        for (index, bucket) in measured.buckets.iter().enumerate() {
            let name = format!("bucket {index} ({})", bytes(bucket.bytes as f64));
            let about = json!({ "step": record.step, "bytes": bucket.bytes });
            let started = self.nanoseconds(bucket.started);
            self.span(Track::Queue, &name, self.nanoseconds(bucket.ready), started, &about, out)?;
            // All go on by turns, segment by segment; what is drawn is how long each took in all.
            let ended = self.nanoseconds(bucket.ended);
            let (folding, coding) = (bucket.folding.max(0.0), bucket.coding.max(0.0));
            let coded = self.nanoseconds(bucket.ended - folding).clamp(started.min(ended), ended);
            let transferred = self.nanoseconds(bucket.ended - folding - coding);
            let transferred = transferred.clamp(started.min(ended), coded);
            self.span(Track::Transfer, &name, started, transferred, &about, out)?;
            let name = format!("bucket {index} coding");
            self.span(Track::Coding, &name, transferred, coded, &about, out)?;
            let name = format!("bucket {index} reduce");
            self.span(Track::Reduce, &name, coded, ended, &about, out)?;
        }
        Ok(())
    }

    /// Draws a span on the first free lane of a track. What has no length is left out.
    fn span(
        &mut self,
        track: Track,
        name: &str,
        from: i64,
        to: i64,
        about: &Value,
        out: &mut Out<impl Write>,
    ) -> io::Result<()> {
        if from >= to {
            return Ok(());
        }
        let lanes = &mut self.lanes[track as usize];
        let lane = lanes.iter().position(|ended| *ended <= from).unwrap_or_else(|| {
            lanes.push(0);
            lanes.len() - 1
        });
        lanes[lane] = to;
        out.event(&Event {
            ph: "X",
            pid: self.rank,
            tid: tid(track, lane),
            name,
            ts: Some(from as f64 / 1e3),
            dur: Some((to - from) as f64 / 1e3),
            args: about,
        })
    }

    fn names(&self, info: &RunInfo, out: &mut Out<impl Write>) -> io::Result<()> {
        let process = match info.host(self.rank) {
            Some(host) => format!("rank {} on {host}", self.rank),
            None => format!("rank {}", self.rank),
        };
        self.meta(0, "process_name", json!({ "name": process }), out)?;
        self.meta(0, "process_sort_index", json!({ "sort_index": self.rank }), out)?;
        for track in Track::ALL {
            for lane in 0..self.lanes[track as usize].len() {
                let tid = tid(track, lane);
                // Lanes of one concept stay together.
                let sort_index = track as usize * 1000 + lane;
                let name = match lane {
                    0 => track.name().to_string(),
                    _ => format!("{} {}", track.name(), lane + 1),
                };
                self.meta(tid, "thread_name", json!({ "name": name }), out)?;
                self.meta(tid, "thread_sort_index", json!({ "sort_index": sort_index }), out)?;
            }
        }
        Ok(())
    }

    fn meta(
        &self,
        tid: usize,
        name: &str,
        args: Value,
        out: &mut Out<impl Write>,
    ) -> io::Result<()> {
        out.event(&Event { ph: "M", pid: self.rank, tid, name, ts: None, dur: None, args: &args })
    }

    /// Whole nanoseconds since the origin, so that ends and beginnings meet exactly. Casts of floats
    /// saturate, and a NaN becomes 0, a span of no or cut length.
    fn nanoseconds(&self, instant: f64) -> i64 {
        // An hour of microseconds with three digits is exact in the `f64` that JSON readers use.
        (((instant - self.origin) * 1e9).round() as i64).clamp(0, i64::MAX / 4)
    }
}

fn tid(track: Track, lane: usize) -> usize {
    lane * Track::ALL.len() + track as usize + 1
}

#[derive(Serialize)]
struct Event<'a> {
    ph: &'a str,
    pid: usize,
    tid: usize,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: &'a Value,
}

/// A JSON array being written, one element per line.
struct Out<W> {
    to: W,
    first: bool,
}

impl<W: Write> Out<W> {
    fn event(&mut self, event: &Event) -> io::Result<()> {
        self.to.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        Ok(serde_json::to_writer(&mut self.to, event)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::record::{BucketSpan, RankStep};

    fn trace(info: &RunInfo, steps: &[StepRecord], last: usize) -> Vec<Value> {
        let mut written = Vec::new();
        write(info, steps, last, &mut written).unwrap();
        let parsed: Value = serde_json::from_slice(&written).unwrap();
        parsed["traceEvents"].as_array().unwrap().clone()
    }

    fn steps(n: u64) -> Vec<StepRecord> {
        let rank = |begin: f64, late: f64| RankStep {
            begin,
            computed: begin + 0.5 + late,
            reduced: begin + 0.9,
            end: begin + 1.0,
            compute: 0.4,
            backward: 0.3,
            device: None,
            buckets: vec![
                BucketSpan {
                    bytes: 100,
                    ready: begin + 0.3,
                    started: begin + 0.3,
                    ended: begin + 0.6,
                    folding: 0.05,
                    coding: 0.02,
                },
                BucketSpan {
                    bytes: 200,
                    ready: begin + 0.4,
                    started: begin + 0.5,
                    ended: begin + 0.9,
                    folding: 0.0,
                    coding: 0.0,
                },
            ],
        };
        (0..n)
            .map(|step| {
                let begin = 1e9 + step as f64;
                let ranks = vec![rank(begin, 0.0), rank(begin, 0.2)];
                StepRecord {
                    step,
                    loss: 1.0,
                    samples: 1,
                    wire_bytes: 1,
                    ranks,
                    agreed: true,
                    encoded: None,
                }
            })
            .collect()
    }

    /// The spans of every track, in nanoseconds.
    fn tracks(events: &[Value]) -> BTreeMap<(u64, u64), Vec<(i64, i64)>> {
        let mut tracks: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for event in events.iter().filter(|event| event["ph"] == "X") {
            let ns = |field: &str| (event[field].as_f64().unwrap() * 1e3).round() as i64;
            assert!(event["name"].is_string());
            assert!(ns("ts") >= 0 && ns("dur") > 0, "{event}");
            let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            tracks.entry(track).or_default().push((ns("ts"), ns("ts") + ns("dur")));
        }
        tracks
    }

    fn assert_no_overlap(events: &[Value]) {
        for (track, mut spans) in tracks(events) {
            spans.sort();
            for pair in spans.windows(2) {
                assert!(pair[0].1 <= pair[1].0, "{track:?}: {pair:?}");
            }
        }
    }

    #[test]
    fn every_rank_is_a_named_process_and_every_track_has_a_name() {
        let info = RunInfo { hosts: vec!["a".into(), "b".into()], ..RunInfo::default() };
        let events = trace(&info, &steps(3), DEFAULT_STEPS);
        let names: Vec<&str> = events
            .iter()
            .filter(|event| event["name"] == "process_name")
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["rank 0 on a", "rank 1 on b"]);
        for (pid, tid) in tracks(&events).into_keys() {
            let named = |event: &&Value| {
                event["name"] == "thread_name" && event["pid"] == pid && event["tid"] == tid
            };
            assert_eq!(events.iter().filter(named).count(), 1);
        }
    }

    #[test]
    fn spans_lie_where_they_were_measured() {
        let events = trace(&RunInfo::default(), &steps(2), DEFAULT_STEPS);
        let of = |rank: u64, name: &str| -> Vec<(f64, f64)> {
            let wanted = |event: &&Value| event["pid"] == rank && event["name"] == name;
            let span =
                |event: &Value| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            events.iter().filter(wanted).map(span).collect()
        };
        let close = |a: &[(f64, f64)], b: &[(f64, f64)]| {
            assert_eq!(a.len(), b.len(), "{a:?} {b:?}");
            for (a, b) in a.iter().zip(b) {
                assert!((a.0 - b.0).abs() < 1.0 && (a.1 - b.1).abs() < 1.0, "{a:?} {b:?}");
            }
        };
        close(&of(0, "backward"), &[(200e3, 300e3), (1200e3, 300e3)]);
        close(&of(0, "wait for straggler"), &[(500e3, 200e3), (1500e3, 200e3)]);
        close(&of(1, "wait for straggler"), &[]);
        close(&of(0, "exposed communication"), &[(700e3, 200e3), (1700e3, 200e3)]);
        close(&of(0, "bucket 0 coding"), &[(530e3, 20e3), (1530e3, 20e3)]);
        close(&of(0, "bucket 0 reduce"), &[(550e3, 50e3), (1550e3, 50e3)]);
        close(&of(0, "optimizer"), &[(900e3, 100e3), (1900e3, 100e3)]);
        assert_no_overlap(&events);
    }

    #[test]
    fn overlapping_buckets_take_lanes() {
        let events = trace(&RunInfo::default(), &steps(1), DEFAULT_STEPS);
        let transfers = events
            .iter()
            .filter(|event| event["ph"] == "X" && event["pid"] == 0)
            .filter(|event| event["name"].as_str().unwrap().starts_with("bucket"))
            .map(|event| event["tid"].as_u64().unwrap());
        let lanes = [
            (Track::Transfer, 0),
            (Track::Coding, 0),
            (Track::Reduce, 0),
            (Track::Queue, 0),
            (Track::Transfer, 1),
        ];
        let expected = lanes.map(|(track, lane)| tid(track, lane) as u64);
        assert_eq!(transfers.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn only_the_last_steps_are_written() {
        let events = trace(&RunInfo::default(), &steps(10), 3);
        let first = events.iter().filter_map(|event| event["args"]["step"].as_u64()).min();
        assert_eq!(first, Some(7));
        assert_eq!(trace(&RunInfo::default(), &[], 3), Vec::<Value>::new());
    }

    proptest! {
        #[test]
        fn hostile_records_still_make_a_valid_trace(
            times in prop::collection::vec(
                prop_oneof![4 => -10.0..10.0f64, 1 => any::<f64>(), 1 => Just(f64::NAN)], 36),
        ) {
            let ranks = times.chunks(9).map(|t| RankStep {
                begin: t[0], computed: t[1], reduced: t[2], end: t[3], compute: t[4], backward: t[5],
                device: None,
                buckets: vec![BucketSpan { bytes: 1, ready: t[6], started: t[7], ended: t[8], folding: t[0], coding: t[1] }],
            });
            let ranks: Vec<_> = ranks.collect();
            let step = |step| StepRecord {
                step, loss: 1.0, samples: 1, wire_bytes: 1, ranks: ranks.clone(), agreed: true, encoded: None,
            };
            let events = trace(&RunInfo::default(), &[step(0), step(1)], 10);
            for event in events.iter().filter(|event| event["ph"] == "X") {
                prop_assert!(event["ts"].as_f64().unwrap() >= 0.0);
                prop_assert!(event["dur"].as_f64().unwrap() > 0.0);
            }
        }
    }
}
