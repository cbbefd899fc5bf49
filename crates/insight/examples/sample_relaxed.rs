//! Writes the folder of a made-up relaxed run, to look at its report without training anything.
//!
//!     cargo run -p unisono-insight --example sample_relaxed -- DIR [STRATEGY [PUSHES]]
//!
//! Four workers push to one server; worker 2 is four times as slow, and starts again once. At `ssp:S`
//! no worker gets further ahead than S clocks; at `ssp:auto` the bound moves a few times.

use std::error::Error;

use unisono_insight::relaxed::folder::MoveLog;
use unisono_insight::relaxed::{RelaxedFolder, UpdateLog};
use unisono_insight::updates::{Move, UpdateRecord};
use unisono_insight::{Outcome, RunInfo};

const WORKERS: usize = 4;
const SLOW: usize = 2;
const COMPUTE: f64 = 0.021;
const EXCHANGE: f64 = 0.0017;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().ok_or("usage: sample_relaxed DIR [STRATEGY [PUSHES]]")?;
    let strategy = arguments.next().unwrap_or("ssp:3".into());
    let pushes: u64 = arguments.next().map_or(Ok(2000), |pushes| pushes.parse())?;
    let bound = match strategy.strip_prefix("ssp:") {
        Some(bound) => bound.parse().unwrap_or(6),
        None => u64::MAX,
    };

    let folder = RelaxedFolder::create(&dir, &info(&strategy))?;
    let mut log = UpdateLog::create(RelaxedFolder::updates(folder.path(), 0))?;
    let mut server = Server::default();
    for _ in 0..pushes {
        log.append(&server.push(bound))?;
    }
    if strategy == "ssp:auto" {
        let mut moves = MoveLog::create(RelaxedFolder::moves(folder.path()))?;
        for (time, from, to, reason) in [
            (2.0, 3, 4, "workers were blocked for 61 % of the time, and the loss still falls"),
            (4.0, 4, 6, "workers were blocked for 58 % of the time, and the loss still falls"),
            (9.0, 6, 5, "the loss stopped falling since the bound is 6"),
        ] {
            moves.append(&Move { time, from, to, reason: reason.into() })?;
        }
    }
    let outcome = Outcome {
        accuracy: Some(0.9722),
        held_out_loss: Some(0.0913),
        weights_hash: "5f0c3a1be28d9647".into(),
    };
    let saved = folder.finish(outcome, None)?;
    print!("{}", saved.report().terminal(100));
    Ok(())
}

fn info(strategy: &str) -> RunInfo {
    let mut info = RunInfo {
        name: "sample".into(),
        model: "mlp".into(),
        data: "digits".into(),
        strategy: strategy.into(),
        transport: "tcp".into(),
        workers: WORKERS,
        ..RunInfo::default()
    };
    info.settings.insert("stale".into(), "scale".into());
    info.settings.insert("optimizer".into(), "sgd:0.05".into());
    info.settings.insert("slow".into(), format!("{SLOW}:4").into());
    info
}

/// When each worker's gradient arrives next, and the clocks of all.
#[derive(Default)]
struct Server {
    updates: u64,
    /// When each worker began to wait for what it does now, and the version it computes on.
    since: [f64; WORKERS],
    version: [u64; WORKERS],
    clocks: [u64; WORKERS],
    pushes: [u64; WORKERS],
    lives: [u64; WORKERS],
    /// When the slowest worker reached its clock: whom it held back starts then.
    freed: f64,
    noise: u64,
}

impl Server {
    /// The next push that arrives, if no worker may be more than `bound` ahead.
    fn push(&mut self, bound: u64) -> UpdateRecord {
        let slowest = self.clocks.into_iter().min().unwrap_or(0);
        let computes: [f64; WORKERS] = std::array::from_fn(|worker| {
            let slow = if worker == SLOW { 4.0 } else { 1.0 };
            COMPUTE * slow * (1.0 + 0.1 * self.draw())
        });
        let begin = |worker: usize| {
            let held = self.clocks[worker] == slowest.saturating_add(bound);
            if held { self.since[worker].max(self.freed) } else { self.since[worker] }
        };
        let admitted = (0..WORKERS).filter(|&w| self.clocks[w] - slowest <= bound);
        let arrival = |worker: usize| begin(worker) + computes[worker] + EXCHANGE;
        let worker = admitted
            .min_by(|a, b| arrival(*a).total_cmp(&arrival(*b)))
            .expect("the slowest worker is always admitted");
        let (time, blocked) = (arrival(worker), begin(worker) - self.since[worker] + EXCHANGE);
        let lead = self.clocks[worker] - slowest;

        self.updates += 1;
        self.clocks[worker] += 1;
        self.pushes[worker] += 1;
        if worker == SLOW && self.clocks[worker] == 100 {
            (self.lives[worker], self.pushes[worker]) = (1, 1);
        }
        let delay = self.updates - 1 - self.version[worker];
        self.version[worker] = self.updates;
        self.since[worker] = time;
        if self.clocks.into_iter().min() > Some(slowest) {
            self.freed = time;
        }
        UpdateRecord {
            time,
            update: self.updates,
            worker: worker as u32,
            life: 1 + self.lives[worker],
            push: self.pushes[worker],
            clock: self.clocks[worker],
            lead,
            delay,
            present: WORKERS as u32,
            loss: (0.1 + 2.2 / (1.0 + self.updates as f64 / 150.0) + 0.2 * self.draw().abs())
                as f32,
            samples: 16,
            compute: computes[worker],
            blocked,
            bytes: 218_000,
        }
    }

    /// Numbers between -1 and 1 that look random and are the same in every run.
    fn draw(&mut self) -> f64 {
        self.noise = self
            .noise
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.noise >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}
