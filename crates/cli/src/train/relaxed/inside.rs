//! `--servers inside`: a server in every worker.
//!
//! Others need the server of a worker until all are done, so no worker leaves before. Rank 0 finds out, and
//! then leaves the weights in a file. Where that file is, the run is over: for workers that wait for it,
//! and for those that were killed on the last stretch and come back.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Context;
use unisono::recording::relaxed::ServerRecorder;
use unisono::relaxed::server::{
    ASK_EVERY, ClientOptions, Files, Run, Server, ServerOptions, fetch_weights, is_over,
};

use super::super::args::{RelaxedPlan, RunPlan};
use super::lead::journal;
use super::worker::{WorkerPlace, need_leader};
use super::{run_dir, weights};
use crate::serve;

/// The server that lives in this worker.
pub struct Inside {
    server: Server,
    number: usize,
    end: PathBuf,
}

impl Inside {
    /// Starts it; `None` if the run is over.
    pub fn start(
        plan: &RunPlan,
        relaxed: &RelaxedPlan,
        place: &WorkerPlace,
    ) -> anyhow::Result<Option<Inside>> {
        let listener = serve::inherited()?.with_context(|| need_leader("--servers inside"))?;
        let dir = run_dir(plan)?;
        let end = weights::path(&dir, 0);
        if end.exists() {
            return Ok(None);
        }
        let files = Files {
            number: place.rank,
            journal: journal(relaxed, &dir).map(|journal| journal.join(place.rank.to_string())),
            ..Files::default()
        };
        let recorder = ServerRecorder::new(dir, place.rank);
        let options =
            ServerOptions { token: serve::token()?, files, recorder: Some(Box::new(recorder)) };
        let server = Server::start(listener, options)?;
        Ok(Some(Inside { server, number: place.rank, end }))
    }

    /// Fails as the server has, if it cannot go on.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.server.failure() {
            Some(error) => Err(error).with_context(|| format!("server {}", self.number)),
            None => Ok(()),
        }
    }

    /// Whether the server cannot go on.
    pub fn has_failed(&self) -> bool {
        self.server.has_failed()
    }

    /// Serves until all workers are done.
    pub fn wait_for_all(
        &self,
        run: &Run,
        options: &ClientOptions,
        place: &WorkerPlace,
    ) -> anyhow::Result<()> {
        while !place.stop.load(Ordering::Relaxed) && !self.end.exists() {
            self.check()?;
            if place.rank == 0 && is_over(run, options)? {
                return weights::write(&self.end, &fetch_weights(run, options)?);
            }
            std::thread::sleep(ASK_EVERY);
        }
        Ok(())
    }
}
