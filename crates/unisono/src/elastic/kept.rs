//! What is kept while members change.
//!
//! What a codec carries from step to step is with the worker of each shard, and the next group divides the shards
//! anew. So before the members leave a group together, they gather the whole state, as for a checkpoint, and one
//! worker of each machine keeps a copy: a machine may have been told to leave, and then all of its workers are let
//! go before the next group forms. In that group the workers find out who has a copy, and all go on from it. A copy is
//! dropped with the first step that its worker makes, and does not count where any worker has made one in a later
//! epoch.

use serde::{Deserialize, Serialize};
use unisono_collective::{Error, Group};

use super::trainee::{Checkpoint, Saved, Trainee};

/// A copy of the whole state.
pub struct Kept {
    /// The epoch in which it was made.
    epoch: u64,
    state: Checkpoint,
}

/// What a copy consists of.
#[derive(Serialize, Deserialize)]
struct Contents {
    steps: u64,
    /// Names and lengths.
    vectors: Vec<(String, usize)>,
}

impl Kept {
    /// Gathers the state, and keeps a copy at the first rank of each machine; `None` at other ranks. All ranks must
    /// call it.
    pub fn of<T: Trainee + ?Sized>(
        trainee: &T,
        group: &Group,
        epoch: u64,
    ) -> Result<Option<Kept>, T::Error> {
        let mut gathered = Checkpoint { steps: trainee.steps(), ..Checkpoint::default() };
        trainee.save(group, &mut |name, _, values| {
            gathered.values.insert(name, values.to_vec());
        })?;
        let (rank, topology) = (group.rank(), group.topology());
        let is_first = topology.members(topology.host(rank)).first() == Some(&rank);
        let given = match topology.is_one_host() {
            true => None,
            false => spread(group, &gathered, 0, is_first && rank != 0)?,
        };
        let state = if rank == 0 { Some(gathered) } else { given };
        Ok(state.map(|state| Kept { epoch, state }))
    }

    /// Brings all ranks of a group to the newest copy that one of them has; `false` if none has one. `stepped_in` is
    /// the last epoch in which this rank has made a step. All ranks must call it.
    pub fn restore<T: Trainee + ?Sized>(
        kept: Option<&Kept>,
        stepped_in: u64,
        trainee: &mut T,
        group: &Group,
    ) -> Result<bool, T::Error> {
        let own = [stepped_in as i64, kept.map_or(-1, |kept| kept.epoch as i64)];
        let mut all = vec![0; own.len() * group.size()];
        group.all_gather(&own, &mut all)?;
        let newest = all.iter().step_by(2).copied().max().unwrap_or(0);
        let mut made = all.iter().skip(1).step_by(2);
        let Some(holder) = made.position(|epoch| *epoch >= newest) else { return Ok(false) };
        let nothing = Checkpoint::default();
        let own = kept.map_or(&nothing, |kept| &kept.state);
        let given = match holder {
            0 => None,
            _ => spread(group, own, holder, group.rank() == 0)?,
        };
        let state = given.as_ref().unwrap_or(own);
        trainee.restore(group, state.steps, &|name| state.find(name))?;
        Ok(true)
    }
}

/// Gives the state that rank `from` has to all ranks that take it; `None` at the others. All ranks must call it.
fn spread(
    group: &Group,
    state: &Checkpoint,
    from: usize,
    takes: bool,
) -> Result<Option<Checkpoint>, Error> {
    let mut bytes = Vec::new();
    if group.rank() == from {
        let vectors = state.values.iter().map(|(name, values)| (name.clone(), values.len()));
        let contents = Contents { steps: state.steps, vectors: vectors.collect() };
        bytes = postcard::to_stdvec(&contents).expect("names and numbers encode");
    }
    let mut length = [bytes.len() as i64];
    group.broadcast(&mut length, from)?;
    bytes.resize(length[0] as usize, 0);
    group.broadcast(&mut bytes, from)?;
    let contents: Contents = postcard::from_bytes(&bytes).map_err(|_| Error::BadMessage {
        peer: group.members()[from],
        what: "what a kept state consists of",
    })?;
    let mut taken = Checkpoint { steps: contents.steps, ..Checkpoint::default() };
    for (name, length) in contents.vectors {
        let mut values = match group.rank() == from {
            true => state.values[&name].clone(),
            false => vec![0.0; length],
        };
        group.broadcast(&mut values, from)?;
        if takes {
            taken.values.insert(name, values);
        }
    }
    Ok(takes.then_some(taken))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use unisono_collective::Options;
    use unisono_sync::Synchronizer;

    use super::*;
    use crate::elastic::{ElasticError, ElasticJob};
    use crate::worker::{Find, Keep, Regrouped};

    /// A model of one weight, the same on all ranks, and something that only its rank remembers.
    #[derive(Default)]
    struct Model {
        steps: u64,
        weight: f32,
        memory: Vec<f32>,
    }

    impl Model {
        fn of(rank: usize) -> Model {
            Model { steps: 7, weight: 0.5, memory: vec![rank as f32 + 1.0; rank + 1] }
        }
    }

    impl Trainee for Model {
        type Error = Error;

        fn steps(&self) -> u64 {
            self.steps
        }

        fn synchronizer(&self) -> Option<&Synchronizer> {
            None
        }

        fn enter(&mut self, _job: &mut ElasticJob) -> Result<Option<Group>, ElasticError> {
            Ok(None)
        }

        fn regroup(&mut self, group: &Group) -> Result<Regrouped, Error> {
            Ok(Regrouped { steps: 0, donor: None, behind: group.size(), bytes: 0 })
        }

        fn hand_over(&mut self, _job: &ElasticJob) {}

        fn save(&self, group: &Group, each: &mut Keep<'_>) -> Result<(), Error> {
            for rank in 0..group.size() {
                let mut memory = vec![0.0; rank + 1];
                if rank == group.rank() {
                    memory.copy_from_slice(&self.memory);
                }
                group.broadcast(&mut memory, rank)?;
                if group.rank() == 0 {
                    each(format!("memory.{rank}"), &[rank + 1], &memory);
                }
            }
            if group.rank() == 0 {
                each("weight".to_owned(), &[1], &[self.weight]);
            }
            Ok(())
        }

        fn restore(&mut self, group: &Group, steps: u64, find: &Find<'_>) -> Result<(), Error> {
            let mut found = [0.0; 3];
            if group.rank() == 0 {
                let memory = (0..).map_while(|rank| find(&format!("memory.{rank}"))).flatten();
                found = [steps as f32, find("weight").unwrap()[0], memory.sum()];
            }
            group.broadcast(&mut found, 0)?;
            (self.steps, self.weight, self.memory) = (found[0] as u64, found[1], vec![found[2]]);
            Ok(())
        }

        fn begin_anew(&mut self, _group: &Group) -> Result<(), Error> {
            Ok(())
        }
    }

    /// What a function makes of each rank of a group.
    fn on_ranks<T: Send>(groups: Vec<Group>, run: impl Fn(Group) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// What each of four ranks on these hosts has kept in epoch 3.
    fn kept_on(hosts: &[u32]) -> Vec<Option<Kept>> {
        let groups = Group::local_on_hosts(hosts, &Options::default()).unwrap();
        on_ranks(groups, |group| Kept::of(&Model::of(group.rank()), &group, 3).unwrap())
    }

    /// Whether the ranks of a group go on from a copy, of which each has none or one and the last epoch in which it made
    /// a step; and with which model.
    fn restored(ranks: Vec<(Option<Kept>, u64)>) -> Vec<Option<(u64, f32, Vec<f32>)>> {
        let groups = Group::local(ranks.len(), &Options::default()).unwrap();
        on_ranks(groups, |group| {
            let (kept, stepped_in) = &ranks[group.rank()];
            let mut model = Model::default();
            let is_restored = Kept::restore(kept.as_ref(), *stepped_in, &mut model, &group);
            is_restored.unwrap().then_some((model.steps, model.weight, model.memory))
        })
    }

    #[test]
    fn one_worker_of_each_machine_keeps_a_copy() {
        for hosts in [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3]] {
            let kept = kept_on(&hosts);
            let keepers: Vec<usize> = (0..4).filter(|rank| kept[*rank].is_some()).collect();
            let is_first = |rank: &usize| !hosts[..*rank].contains(&hosts[*rank]);
            assert_eq!(keepers, (0..4).filter(is_first).collect::<Vec<_>>(), "{hosts:?}");
            let copies: Vec<&Checkpoint> = kept.iter().flatten().map(|kept| &kept.state).collect();
            assert!(copies.iter().all(|copy| *copy == copies[0]), "{hosts:?}");
            assert_eq!((copies[0].steps, copies[0].values.len()), (7, 5));
        }
    }

    #[test]
    fn workers_go_on_from_the_copy_that_any_of_them_has() {
        let whole = Some((7, 0.5, vec![1.0 + 4.0 + 9.0 + 16.0]));
        // The machine of rank 0 has left, and a new worker has come.
        let mut kept = kept_on(&[0, 0, 1, 1]).into_iter().skip(2);
        let (first, second) = (kept.next().unwrap(), kept.next().unwrap());
        let ranks = vec![(None, 0), (second, 3), (first, 3)];
        assert_eq!(restored(ranks), vec![whole.clone(); 3]);
        // All have one.
        let ranks = kept_on(&[0, 1, 2, 3]).into_iter().map(|kept| (kept, 3)).collect();
        assert_eq!(restored(ranks), vec![whole; 4]);
    }

    #[test]
    fn a_copy_does_not_count_where_a_step_was_made_since() {
        assert_eq!(restored(vec![(None, 3), (None, 3)]), [None, None]);
        let mut kept = kept_on(&[0, 1, 2, 3]);
        assert_eq!(restored(vec![(kept.remove(0), 3), (None, 4)]), [None, None]);
    }
}
