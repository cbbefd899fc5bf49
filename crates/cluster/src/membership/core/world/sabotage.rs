//! What a broken core, or a broken worker, would do.

use super::super::{Input, Phase, WorkerId};
use super::World;

/// What is done wrong, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The next epoch does not wait for members of the old one.
    WaitForNone,
    /// The next epoch waits for the answer of a member that was silent, but does not kill it.
    SpareTheSilent,
    /// The next epoch begins when a member was told to die, and not when it has.
    KillWithoutWaiting,
    /// That an old life is ready counts for the new one.
    MixLives,
    /// A process that sent something before its end counts as alive after it.
    ForgetEnds,
    /// A bucket is complete before all parts are in.
    CommitEarly,
    /// The lowest rank that has state hands it on, whatever its steps.
    OldDonor,
    /// A receiver that was interrupted says that it has state.
    HalfReceived,
    /// The end of the run is believed to a member of an old epoch.
    OldFinish,
    /// Members leave when they are asked to, without a vote.
    NoVote,
    /// Answers are not heard.
    OverlookAnswers,
    /// A pause of the coordinator counts as silence of the workers.
    CountPauses,
    /// A pause of the coordinator counts as waiting for workers.
    GiveUpAfterPauses,
}

impl World {
    pub(super) fn is_sabotaged(&self, sabotage: Sabotage) -> bool {
        self.job.sabotage == Some(sabotage)
    }

    /// Does to the core, or to what it is told, what a sabotaged core would do by itself.
    pub(super) fn corrupt(&mut self, input: &mut Input) {
        let Some(sabotage) = self.job.sabotage else { return };
        let core = &mut self.core;
        match sabotage {
            Sabotage::WaitForNone if core.epoch > 0 && !core.is_whole() => {
                core.workers.retain(|_, worker| !matches!(worker.phase, Phase::In | Phase::Ending));
            }
            Sabotage::KillWithoutWaiting => {
                core.workers.retain(|_, worker| worker.phase != Phase::Ending);
            }
            Sabotage::MixLives => {
                let life = |id: WorkerId| {
                    let mut known = core.workers.keys().filter(|known| known.number == id.number);
                    known.next_back().map_or(id, |known| *known)
                };
                if let Input::Ready { worker, .. } = input {
                    *worker = life(*worker);
                }
            }
            Sabotage::ForgetEnds => core.ended.clear(),
            Sabotage::OverlookAnswers => {
                if let Input::Answered(id) = input {
                    id.number = u32::MAX;
                }
            }
            Sabotage::CountPauses => core.idle_until = None,
            Sabotage::GiveUpAfterPauses if core.is_too_late(self.now) => core.idle_until = None,
            _ => {}
        }
    }
}
