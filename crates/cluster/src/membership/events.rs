//! What happens to the workers of a job, for those that record or show it.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{FirstStep, WorkerId};

/// Is told what happens, on the thread that coordinates the job: it must not keep it waiting.
pub type Observer = Arc<dyn Fn(Happened) + Send + Sync>;

/// Something that has happened to the workers of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Happened {
    /// When, since the start of the job.
    pub at: Duration,
    /// What.
    pub what: Occurrence,
}

/// What can happen to the workers of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Occurrence {
    /// The launcher has started the process of a worker.
    Started {
        /// Which.
        worker: WorkerId,
        /// The process.
        pid: u32,
    },
    /// A worker has connected.
    Connected(WorkerId),
    /// A worker wants to be in the next epoch.
    Ready(WorkerId),
    /// An epoch has begun.
    Epoch {
        /// Its number.
        epoch: u64,
        /// Its members, by rank.
        members: Vec<WorkerId>,
    },
    /// The first sign that a member of the present epoch is lost.
    Lost {
        /// Which.
        worker: WorkerId,
        /// Which sign.
        sign: Sign,
    },
    /// The coordinator has had the process of a worker killed.
    Killed {
        /// Which.
        worker: WorkerId,
        /// Why.
        sign: Sign,
    },
    /// The process of a worker has ended.
    Ended {
        /// Which.
        worker: WorkerId,
        /// With which code, if it exited.
        code: Option<i32>,
        /// By which signal, if one ended it.
        signal: Option<i32>,
    },
    /// The first step of an epoch is complete.
    Stepped {
        /// What it came to.
        first: FirstStep,
        /// If it followed a loss: see [`Recovery::seconds`](super::Recovery::seconds).
        recovery: Option<f64>,
    },
    /// The workers have handed in the result of the run.
    Finished,
    /// There were too few workers for too long.
    GaveUp {
        /// How many there were.
        ready: usize,
    },
}

/// How it shows that a worker is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sign {
    /// Its process has ended.
    Ended,
    /// Its connection has closed, or brought what makes no sense.
    CutOff,
    /// It did not answer.
    Silent,
}
