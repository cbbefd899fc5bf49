//! Workers that are threads of one process, and update shared weights without a lock.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use unisono::insight::relaxed::{RelaxedFolder, UpdateLog};
use unisono::recording::relaxed::record;
use unisono::relaxed::hogwild::{Hogwild, SharedWeights, Step};
use unisono::relaxed::server::wire::Measured;
use unisono::relaxed::spec::Level;
use unisono::sync::optimizer::OptimizerSpec;
use unisono::sync::shards::Shards;

use super::super::args::{Plan, TrainArgs};
use super::super::progress::Reporter;
use super::home::{Home, describe};
use super::student::Student;
use super::{expect_number, note_divergence, optimizer};
use crate::exit::Wrong;

/// Trains with as many threads as there are workers.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }
    demand!(
        !super::is_launched(),
        "--strategy hogwild: its workers are threads of one process; start `unisono train --workers N` \
         by itself"
    );
    let threads = args.workers();
    let plan = args.plan(threads)?;
    let relaxed = plan.relaxed.clone().context("a relaxed run")?;
    let rate = match optimizer(&plan, Level::Hogwild, threads) {
        OptimizerSpec::Sgd { learning_rate, weight_decay: 0.0 } => learning_rate,
        other => refuse!(
            "--strategy hogwild updates single weights without a lock, which only plain gradient descent \
             can; use --optimizer sgd without weight decay instead of {}",
            other.name()
        ),
    };
    let student = Student::new(&plan, 0..1, false).wrong_call()?;
    let home = Home::make(&plan, &describe(&plan, &relaxed, threads, args))?;
    let mut log = UpdateLog::create(RelaxedFolder::updates(home.path(), 0))?;
    let weights = SharedWeights::new(student.read_all());
    let updates = plan.steps.saturating_mul(threads as u64);
    let mut reporter = Reporter::new(plan.steps, plan.batch / threads, false);
    let mut unwritten = Ok(());
    let run = Hogwild { weights: &weights, threads, updates, stop: &stop, began: Instant::now() };
    let shards = Shards::new(plan.shards, threads)?;
    let plan_of: &Plan = &plan;
    let done = run.train(
        |thread| -> anyhow::Result<_> {
            let mut student = Student::new(plan_of, shards.of(thread, threads), false)?;
            let slow = plan_of.slow.filter(|(rank, _)| *rank == thread).map_or(1.0, |(_, s)| s);
            let lengths: Vec<usize> = student.parameters().iter().map(|p| p.elements()).collect();
            let mut buffers: Vec<Vec<f32>> = lengths.iter().map(|len| vec![0.0; *len]).collect();
            Ok(move |clock: u64, weights: &SharedWeights| -> anyhow::Result<Step> {
                for (parameter, buffer) in buffers.iter_mut().enumerate() {
                    weights.read(parameter, buffer);
                    student.write(parameter, 0, buffer)?;
                }
                let computed = student.compute(clock, slow)?;
                expect_number(&computed, thread, clock)?;
                let rate = rate.at(clock * threads as u64 + 1) as f32;
                for parameter in 0..buffers.len() {
                    weights.update(parameter, student.gradient(parameter), rate);
                }
                let (loss, samples) = (computed.loss, computed.samples);
                Ok(Step { loss, samples, compute: computed.seconds })
            })
        },
        |update| {
            // A step is an update of every thread, and they compute at the same time.
            let step = update.update / threads as u64;
            let Measured { loss, compute, .. } = update.measured;
            reporter.took(step, loss, compute / threads as f64, 0.0);
            if unwritten.is_ok() {
                unwritten = log.append(&record(&update));
                if unwritten.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        },
    );
    let done = done.inspect_err(|error| note_divergence(&plan, Some(&home), error))?;
    unwritten?;
    if done < updates {
        say!("unisono: stopped after {done} of {updates} updates");
    }
    for (parameter, weights) in weights.into_parameters().into_iter().enumerate() {
        student.write(parameter, 0, &weights)?;
    }
    home.finish(&student, None, 0, args.json)?;
    Ok(ExitCode::SUCCESS)
}
