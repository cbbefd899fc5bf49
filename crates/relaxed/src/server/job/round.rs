//! Lock-step: the gradients of a round become one update.
//!
//! They are kept until everybody has pushed. Their mean is then summed in the canonical order over the
//! shards of the batch: what the all-reduce strategy computes, bit for bit. If somebody is gone, it is
//! the mean over the shards of those who are there.
//!
//! A push whose round is over, because the worker was taken for gone, is dropped: written down as
//! such, so that every push of a worker is accounted for.

use std::borrow::Cow;
use std::collections::BTreeMap;

use unisono_collective::tree::Tree;
use unisono_collective::{Dtype, Reduction, kernel};

use super::plan::{Gradients, Rounds};
use super::{Caller, Job, State, Unserved};
use crate::server::core::{self, Age, PushId, Refusal};
use crate::server::wire::{Measured, Reply};

/// What a worker has pushed for a round: the vectors of every piece.
pub struct Contribution {
    pieces: BTreeMap<usize, Vec<Vec<f32>>>,
    measured: Measured,
}

impl Job {
    /// A push waits for the others of its round.
    pub(super) fn push_round(
        &self,
        caller: Caller,
        push: PushId,
        measured: Measured,
        gradients: &Gradients<'_>,
        is_over: impl Fn() -> bool,
    ) -> Result<Reply, Unserved> {
        let mut state = self.lock()?;
        state.expect_current(caller)?;
        let now = self.now();
        state.core.hear(push.worker, push.life, now);
        match state.core.push(push)? {
            core::Pushed::Late { clock } => {
                let entry = state.core.drop_late(push);
                self.write_down(&mut state, entry, vec![measured], &Vec::new())?;
                return Ok(self.pushed(&state, false, Age::default(), clock));
            }
            core::Pushed::Duplicate => {}
            _ => {
                let vectors = |(piece, gradient): &(usize, Cow<'_, [f32]>)| {
                    let length = self.plan.pieces()[*piece].len().max(1);
                    (*piece, gradient.chunks(length).map(<[f32]>::to_vec).collect())
                };
                let pieces = gradients.iter().map(vectors).collect();
                state.round.insert(push.worker, Contribution { pieces, measured });
                self.settle_rounds(&mut state)?;
            }
        }
        while !state.core.is_settled(push.worker, push.life, push.number) {
            state.expect_current(caller)?;
            if !state.core.is_present(push.worker, push.life) {
                return Err(Refusal::NotPresent.into());
            }
            state = self.wait(state)?;
            let now = self.now();
            state.core.hear(push.worker, push.life, now);
            if is_over() {
                return Err(Unserved::Gone);
            }
        }
        let age = Age { present: state.core.present_members(), ..Age::default() };
        Ok(self.pushed(&state, true, age, push.clock + 1))
    }

    /// To be called after every change: makes an update of a round that is complete, and wakes
    /// everybody who waits.
    pub(super) fn settle_rounds(&self, state: &mut State) -> Result<(), Unserved> {
        if let Some(rounds) = &self.plan.rounds {
            // While workers are gathered nothing is updated, but rounds that nobody is left of may end.
            while state.round.is_empty() || !self.is_gathering(state) {
                let Some(entry) = state.core.commit() else { break };
                self.settle_round(state, rounds, entry)?;
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    fn settle_round(
        &self,
        state: &mut State,
        rounds: &Rounds,
        entry: core::Entry,
    ) -> Result<(), Unserved> {
        let round = std::mem::take(&mut state.round);
        let measured = round.values().map(|contribution| contribution.measured).collect();
        let (mut gradients, mut versions) = (Gradients::new(), Vec::new());
        for (piece, Some(mean)) in
            self.plan.pieces().iter().map(|piece| piece.len()).enumerate().map(|(piece, length)| {
                (piece, mean(rounds, &round, piece, length))
            })
        {
            state.versions[piece] += 1;
            versions.push(state.versions[piece]);
            gradients.push((piece, Cow::Owned(mean)));
        }
        self.write_down(state, entry, measured, &gradients)?;
        self.apply(1.0, &versions, &gradients);
        self.snapshot_if_due(state)
    }
}
