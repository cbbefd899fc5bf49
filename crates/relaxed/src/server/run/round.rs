//! Lock-step: the gradients of a round become one update.
//!
//! They are kept until all workers have pushed. Their mean is then summed in the canonical order over the
//! shards of the batch: what the all-reduce strategy computes, bit for bit. If workers are gone, it
//! is the mean over the shards of those that are there.
//!
//! A push whose round is over, because the worker was taken for gone, is dropped: written down as
//! such, so that every push of a worker is accounted for.

use std::borrow::Cow;
use std::collections::BTreeMap;

use unisono_collective::tree::Tree;

use super::checked::{Gradient, Rounds};
use super::{Caller, ServedRun, State, Unserved};
use crate::server::core::{self, Age, PushId, Refusal};
use crate::server::mean::Mean;
use crate::server::source::Source;
use crate::server::store::Change;
use crate::server::wire::{Measured, Reply};

/// What a worker has pushed for a round: the vectors of every piece.
pub struct Contribution {
    pieces: BTreeMap<usize, Vec<Vec<f32>>>,
    measured: Measured,
}

impl ServedRun {
    /// A push waits for the others of its round.
    pub(super) fn push_round(
        &self,
        caller: Caller,
        push: PushId,
        measured: Measured,
        gradients: Vec<Gradient<'_>>,
        is_over: impl Fn() -> bool,
    ) -> Result<Reply, Unserved> {
        let mut state = self.lock()?;
        state.expect_current(caller)?;
        let now = self.now();
        state.core.hear(push.worker, push.life, now);
        match state.core.push(push)? {
            core::Pushed::Late { clock } if push.clock > clock => {
                // It has not entered there, or this server would be as far.
                return Err(Refusal::OtherClock { clock }.into());
            }
            core::Pushed::Late { clock } => {
                let entry = state.core.drop_late(push);
                self.write_down(&mut state, entry, vec![measured], &[])?;
                return Ok(self.pushed(&state, false, Age::default(), clock));
            }
            core::Pushed::Duplicate => {}
            _ => {
                let vectors = |(piece, gradient): Gradient<'_>| {
                    let length = self.checked.pieces()[piece].len();
                    (piece, vectors(gradient, length))
                };
                let pieces = gradients.into_iter().map(vectors).collect();
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
        Ok(self.pushed(&state, true, age, push.clock.next()))
    }

    /// To be called after every change: makes an update of a round that is complete, and wakes
    /// every thread that waits.
    pub(super) fn settle_rounds(&self, state: &mut State) -> Result<(), Unserved> {
        if let Some(rounds) = &self.checked.rounds {
            // While workers are gathered nothing is updated, but rounds that no worker is left of may end.
            let is_gathering = self.is_gathering(state);
            while state.round.is_empty() || !is_gathering {
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
        let mut changes = Vec::new();
        for (number, piece) in self.checked.pieces().iter().enumerate() {
            if let Some(mean) = mean(rounds, &round, number, piece.len()) {
                state.versions[number] += 1;
                let version = state.versions[number];
                let source = match self.keeps_journal {
                    true => mean.whole().into(),
                    false => Source::Mean(mean),
                };
                changes.push(Change { piece: number, version, source, by: None });
            }
        }
        self.write_down(state, entry, measured, &changes)?;
        // All workers wait for this: none is busy.
        self.apply(1.0, &changes, 0);
        self.snapshot_if_due(state)
    }
}

/// Vectors of so many numbers, to keep.
fn vectors(gradient: Source<'_>, length: usize) -> Vec<Vec<f32>> {
    match gradient {
        Source::Values(Cow::Owned(vector)) if vector.len() == length => vec![vector],
        gradient => {
            let values = gradient.values().expect("in lock-step gradients are made whole");
            values.chunks(length.max(1)).map(<[f32]>::to_vec).collect()
        }
    }
}

/// The mean over the shards of the batch that were computed; `None` if no worker has a gradient of the
/// piece, which then stays as it is.
fn mean<'a>(
    rounds: &'a Rounds,
    round: &'a BTreeMap<u32, Contribution>,
    piece: usize,
    length: usize,
) -> Option<Mean<'a>> {
    if length == 0 || !round.values().any(|who| who.pieces.contains_key(&piece)) {
        return None;
    }
    let (mut inputs, mut shards) = (Vec::new(), 0);
    for (worker, contribution) in round {
        let worker = *worker as usize;
        shards += rounds.shards[worker];
        match contribution.pieces.get(&piece) {
            Some(vectors) => inputs.extend(vectors.iter().map(|vector| Some(vector.as_slice()))),
            None => inputs.extend(vec![None; rounds.subtrees[worker]]),
        }
    }
    let tree = match round.len() == rounds.shards.len() {
        true => Cow::Borrowed(&rounds.tree),
        false => Cow::Owned(Tree::canonical(inputs.len())),
    };
    Some(Mean::new(inputs, tree, shards, length))
}
