//! Workers that are threads of one process, and update shared weights without a lock.

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;

use unisono::candle::ReplicaError;
use unisono::insight::relaxed::{RelaxedFolder, UpdateLog};
use unisono::optimizer::OptimizerSpec;
use unisono::recording::relaxed::record;
use unisono::relaxed::hogwild;
use unisono::relaxed::server::wire::Measured;
use unisono::relaxed::spec::Level;
use unisono::sync::strategy::Weights as _;
use unisono::worker::{Hogwild, SharedModel, Worker};

use super::super::args::TrainArgs;
use super::super::computation::{Learner, Learning};
use super::super::progress::Reporter;
use super::super::stop_flag;
use super::folder::{Folder, describe};
use super::{explain, train};
use crate::exit::Wrong;

/// Trains with as many threads as there are workers.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let stop = stop_flag()?;
    demand!(
        !super::is_launched(),
        "--strategy hogwild: its workers are threads of one process; start `unisono train --workers N` \
         by itself"
    );
    let threads = args.workers();
    let plan = args.plan(threads)?;
    let relaxed = plan.relaxed.clone().context("a relaxed run")?;
    demand!(
        matches!(plan.optimizer, OptimizerSpec::Sgd { weight_decay: 0.0, .. }),
        "--strategy hogwild updates single weights without a lock, which only plain gradient descent \
         can; use --optimizer sgd without weight decay instead of {}",
        plan.optimizer.name()
    );
    let learning = Learning::load(&plan).wrong_call()?;
    let folder = Folder::make(&plan, &describe(&plan, &relaxed, threads, args))?;
    let mut log = UpdateLog::create(RelaxedFolder::updates(folder.path(), 0))?;
    let updates = Level::Hogwild.updates(plan.steps, threads as u32);
    let mut reporter = Reporter::new(plan.steps, plan.batch / threads, false);
    let mut unwritten = Ok(());
    let (model, began, plan_of) = (SharedModel::default(), Instant::now(), &plan);
    let done = hogwild::run(
        threads,
        updates,
        &stop,
        began,
        |thread| -> anyhow::Result<()> {
            let (number, learning) = (thread.number(), Learning::load(plan_of)?);
            let weights = learning.weights();
            let parameters = weights.parameters();
            let (count, optimizer) = (parameters.len(), &plan_of.optimizer);
            let level = Hogwild::new(thread, &model, threads, optimizer, count, &weights)
                .map_err(ReplicaError::from)?;
            let collector = plan_of.training()?.collector(&parameters, number, threads)?;
            let worker = Worker::relaxed(number, parameters, collector, level);
            train(&mut Learner::of(learning, worker)?, plan_of, number, &stop, &mut None)
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
    let (_, done) = done.map_err(|error| explain(error, &plan, Some(&folder)))?;
    unwritten?;
    if done < updates {
        say!("unisono: stopped after {done} of {updates} updates");
    }
    let last = model.into_parameters().context("thread 0 brings the weights")?;
    learning.weights().set_all(&last);
    folder.finish(&learning, None, 0, args.json)?;
    Ok(ExitCode::SUCCESS)
}
