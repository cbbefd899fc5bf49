//! Where the time of a training run goes.
//!
//! Ranks measure their steps and hand in [`StepRecord`]s on one common clock ([`clock`]). Everything
//! else is computed from those: what each step was spent on ([`breakdown`]), what that means in plain
//! words ([`verdict`]), what a prediction came to ([`advice`]), a timeline of all ranks ([`trace`]) and
//! the report for people ([`report`]). All of it is pure; [`folder`] alone touches files.
//!
//! In an elastic run workers come and go; [`membership`] has their lives and what each loss cost.
//!
//! In a relaxed run workers do not step together. Its servers write down every push
//! ([`updates::UpdateRecord`]), and [`relaxed`] computes from those how much was done, how stale it was,
//! who waited, and whether every push is accounted for.
//!
//! ```
//! use unisono_insight::{RankStep, StepRecord, breakdown::StepBreakdown};
//!
//! // Rank 1 computes for 3 ms longer; the last bucket arrives 1 ms after that.
//! let rank = |computed: f64| RankStep {
//!     begin: 0.0,
//!     computed,
//!     reduced: 0.014,
//!     end: 0.015,
//!     compute: computed,
//!     backward: computed / 2.0,
//!     device: None,
//!     buckets: Vec::new(),
//! };
//! let record = StepRecord {
//!     step: 0,
//!     loss: 2.3,
//!     samples: 64,
//!     wire_bytes: 0,
//!     agreed: true,
//!     encoded: None,
//!     ranks: vec![rank(0.010), rank(0.013)],
//! };
//! let step = StepBreakdown::of(&record);
//! assert_eq!(step.last, Some(1));
//! assert!((step.ranks[0].parts.straggler - 0.003).abs() < 1e-12);
//! ```

pub mod advice;
pub mod breakdown;
pub mod clock;
pub mod folder;
mod log;
pub mod membership;
mod record;
pub mod relaxed;
pub mod report;
pub mod trace;
pub mod units;
pub mod updates;
pub mod verdict;

pub use advice::{Advice, Prediction};
pub use record::{
    BucketSpan, DeviceTimes, Outcome, RankStep, RunInfo, Scaling, StepRecord, Summary,
};
