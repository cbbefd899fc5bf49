//! A candle model in a job whose workers may come and go.

use std::collections::HashMap;
use std::io::Write;
use std::ops::Deref;

use candle_core::Tensor;
use unisono_cluster::membership::FirstStep;
use unisono_collective::{BadSetting, Error, Group, Options};
use unisono_net::crash;
use unisono_optimizer::OptimizerSpec;
use unisono_sync::{Settings, SyncError};

use super::parameters::Parameters;
use super::replica::{Replica, ReplicaError};
use crate::elastic::{ElasticError, ElasticJob};
use crate::job::{Job, JoinError};
use crate::worker::{Regrouped, Stepped, WorkerError};

/// One worker's copy of the model, in a job whose workers may come and go.
///
/// When a worker is lost or comes back, the others go on in another group by themselves: a step that was under
/// way is computed again, and workers that are behind get the weights and the optimizer's state of another.
/// So the weights are those of a run to which nothing has happened. All that a loop must do is to ask for the
/// number of the step:
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{Module, VarMap};
/// use unisono::candle::{ElasticReplica, Parameters};
/// use unisono::prelude::*;
///
/// let variables = VarMap::new();
/// let parameters = Parameters::of(&variables);
/// let model = candle_nn::linear(2, 1, parameters.builder(DType::F32, &Device::Cpu))?;
/// let mut replica = ElasticReplica::join(&parameters, Settings::new(8), "adamw".parse()?)?;
/// while let Some(step) = replica.next_step(10)? {
///     while let Some(shard) = replica.next_shard() {
///         let inputs = Tensor::new(&[[step as f32, shard as f32]], &Device::Cpu)?;
///         let loss = model.forward(&inputs)?.sqr()?.mean_all()?;
///         replica.backward(&loss)?;
///     }
///     replica.step()?;
/// }
/// replica.finish(|replica| format!("weights {}\n", replica.weights_hash().to_hex()))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `unisono run --elastic` starts such a program. Under other launchers, or none, it is as with
/// [`Replica::new`]: the loss of a worker is an error.
///
/// If no worker with the state of the run is left, the run goes on from a
/// [checkpoint](ElasticReplica::find_checkpoints_by), or begins anew. For that a worker keeps a copy of the
/// weights that the model was built with, which costs 4 bytes per parameter. Workers must build their
/// models with the same weights, by [`Parameters::with_initializer`] or from a file: else a run that begins
/// anew is another run.
pub struct ElasticReplica<'a> {
    replica: Replica<'a>,
    home: Home,
    /// The weights that the model was built with, those that are not trained included.
    initial: Vec<Vec<f32>>,
    find: Option<Box<FindCheckpoint<'a>>>,
    /// Whether the replica goes on in the present group.
    is_regrouped: bool,
    /// Why the present group has failed, if that was noticed between shards.
    failure: Option<Error>,
    /// Whether all members have agreed to leave the present group.
    is_leaving: bool,
    /// At rank 0, until the first step of the epoch is complete.
    first: Option<FirstStep>,
    /// The steps after which this worker was in the middle of another when its group failed.
    failed_after: Option<u64>,
    /// How this worker's part of the run ended.
    over: Option<Over>,
}

/// A checkpoint that [`ElasticReplica::save`] was called for.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// The steps after which it was saved.
    pub steps: u64,
    /// What was saved, by name.
    pub values: HashMap<String, Vec<f32>>,
}

type FindCheckpoint<'a> = dyn FnMut() -> Option<Checkpoint> + 'a;

/// The job.
enum Home {
    Elastic { job: Box<ElasticJob>, group: Option<Group> },
    Fixed(Job),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    /// This worker is rank 0, and hands in the result.
    HandsIn,
    /// Another worker does, or has.
    Leaves,
}

/// Why a worker of an elastic job cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElasticReplicaError {
    /// The job, or a group of it that another would fail like.
    #[error(transparent)]
    Elastic(Box<ElasticError>),
    /// The job, where no elastic launcher has started it.
    #[error(transparent)]
    Join(Box<JoinError>),
    /// The model.
    #[error(transparent)]
    Replica(Box<ReplicaError>),
    /// The loop was left early, and then all workers with that state were lost. Call
    /// [`ElasticReplica::next_step`] until it returns `None`.
    #[error(
        "the state of the run was lost after the loop over its steps was left early; call next_step until \
         it returns None"
    )]
    LeftEarly,
    /// The result could not be printed.
    #[error("the result could not be printed: {0}")]
    Output(#[from] std::io::Error),
}

/// Errors of which few are made, and which are large.
macro_rules! boxed {
    ($($error:ty => $variant:ident,)*) => {
        $(impl From<$error> for ElasticReplicaError {
            fn from(error: $error) -> ElasticReplicaError {
                ElasticReplicaError::$variant(Box::new(error))
            }
        })*
    };
}

boxed! {
    ElasticError => Elastic,
    JoinError => Join,
    ReplicaError => Replica,
}

impl From<BadSetting> for ElasticReplicaError {
    fn from(error: BadSetting) -> ElasticReplicaError {
        JoinError::from(error).into()
    }
}

impl<'a> ElasticReplica<'a> {
    /// Joins the job that this process was started for, with the settings of the environment. All workers call
    /// this with the same model, settings and optimizer. Updates are [withheld](Settings::withhold).
    pub fn join(
        parameters: &Parameters,
        settings: Settings,
        optimizer: OptimizerSpec,
    ) -> Result<ElasticReplica<'a>, ElasticReplicaError> {
        ElasticReplica::join_with(Options::from_env()?, parameters, settings, optimizer)
    }

    /// As [`ElasticReplica::join`], with these settings of the groups.
    pub fn join_with(
        options: Options,
        parameters: &Parameters,
        settings: Settings,
        optimizer: OptimizerSpec,
    ) -> Result<ElasticReplica<'a>, ElasticReplicaError> {
        let home = match ElasticJob::join(options.clone())? {
            Some(mut job) => {
                job.set_shards(settings.shards);
                Home::Elastic { job: Box::new(job), group: None }
            }
            None => Home::Fixed(Job::join_with(options)?),
        };
        let settings = Settings { withhold: true, ..settings };
        let replica = Replica::waiting(parameters, settings, &optimizer)?;
        let entries = &replica.weights().entries;
        let initial = entries.iter().map(|entry| entry.read(<[f32]>::to_vec)).collect();
        Ok(ElasticReplica {
            replica,
            home,
            initial,
            find: None,
            is_regrouped: false,
            failure: None,
            is_leaving: false,
            first: None,
            failed_after: None,
            over: None,
        })
    }

    /// Has the run begin, and go on when no worker with its state is left, from the checkpoint that `find`
    /// returns, which is called at rank 0.
    pub fn find_checkpoints_by(&mut self, find: impl FnMut() -> Option<Checkpoint> + 'a) {
        self.find = Some(Box::new(find));
    }

    /// The number of the next step to compute, from 0: in the present group, or in the next one. `None` when
    /// the run is over, after so many steps: rank 0 is told so first, and the others when it has
    /// [handed in](ElasticReplica::finish) the result.
    pub fn next_step(&mut self, steps: u64) -> Result<Option<u64>, ElasticReplicaError> {
        while self.over.is_none() && self.enter(steps)? {
            match self.begin_step(steps) {
                Ok(Some(step)) => return Ok(Some(step)),
                Ok(None) => {}
                Err(error) => self.note(error)?,
            }
        }
        Ok(None)
    }

    /// The next shard of the present step whose loss this worker should compute. `None` when it has
    /// computed all of its shards, or the group has failed: it is time for [`ElasticReplica::step`].
    pub fn next_shard(&mut self) -> Option<usize> {
        self.failure = self.home.group()?.failure();
        if self.failure.is_some() {
            // What is computed for a group that has failed is in vain.
            return None;
        }
        crash::point("shard");
        let shard = self.replica.next_shard();
        if let Home::Elastic { job, .. } = &self.home
            && let Err(error) = job.note_shard(shard)
        {
            // A launcher that is gone is noticed soon enough.
            log::debug!("{error}");
        }
        shard
    }

    /// As [`Replica::backward`].
    pub fn backward(&mut self, loss: &Tensor) -> Result<f32, ElasticReplicaError> {
        Ok(self.replica.backward(loss)?)
    }

    /// Updates the weights by the gradients of all shards. `None` if the group has failed: then they are as
    /// before the step, and [`ElasticReplica::next_step`] says which to compute.
    pub fn step(&mut self) -> Result<Option<Stepped>, ElasticReplicaError> {
        if !self.is_regrouped {
            return Ok(None);
        }
        crash::point("computed");
        let stepped = match self.failure.take() {
            Some(error) => Err(error.into()),
            None => self.replica.step(),
        };
        match stepped {
            Ok(stepped) => {
                crash::point("applied");
                self.note_step(&stepped)?;
                Ok(Some(stepped))
            }
            Err(error) => {
                self.note(error)?;
                Ok(None)
            }
        }
    }

    /// As [`Replica::save`], between two steps: all workers must call it after the same ones. `false` if the
    /// group has failed meanwhile: then the checkpoint is incomplete.
    pub fn save(
        &mut self,
        each: impl FnMut(String, &[usize], &[f32]),
    ) -> Result<bool, ElasticReplicaError> {
        let Some(group) = self.home.group() else { return Ok(false) };
        let saved = self.replica.save(group, each);
        if let Err(error) = saved {
            self.note(error)?;
            return Ok(false);
        }
        Ok(true)
    }

    /// This worker's rank in the present group. It may have another one in the next.
    pub fn rank(&self) -> usize {
        self.home.group().map_or_else(|| self.replica.worker().rank(), Group::rank)
    }

    /// The number of workers of the present group; 0 between two.
    pub fn workers(&self) -> usize {
        self.home.group().map_or(0, Group::size)
    }

    /// Ends the run. At rank 0, hands in its result, which the elastic launcher prints, once; without such a
    /// launcher, rank 0 prints it. At other ranks `result` is not called.
    pub fn finish<R: Into<Vec<u8>>>(
        mut self,
        result: impl FnOnce(&ElasticReplica<'a>) -> R,
    ) -> Result<(), ElasticReplicaError> {
        if self.next_step(self.replica.steps())?.is_some() {
            return Err(ElasticReplicaError::LeftEarly);
        }
        if self.over != Some(Over::HandsIn) {
            return Ok(());
        }
        let result = result(&self).into();
        crash::point("summed-up");
        match &self.home {
            Home::Elastic { job, .. } => job.finish(result)?,
            Home::Fixed(_) => {
                let mut out = std::io::stdout().lock();
                out.write_all(&result)?;
                out.flush()?;
            }
        }
        crash::point("handed-in");
        Ok(())
    }

    /// Makes sure that this worker is in a group, in which it may have to be regrouped; `false` if the run is
    /// over.
    fn enter(&mut self, steps: u64) -> Result<bool, ElasticReplicaError> {
        if self.is_leaving && self.replica.steps() < steps {
            crash::point("leaving");
            self.leave();
        }
        if let Home::Elastic { job, group } = &mut self.home
            && group.is_none()
        {
            *group = self.replica.enter(job)?;
            if group.is_none() {
                self.over = Some(Over::Leaves);
                return Ok(false);
            }
            crash::point("formed");
        }
        Ok(true)
    }

    /// The step to compute in the present group; `None` if there is none.
    fn begin_step(&mut self, steps: u64) -> Result<Option<u64>, ReplicaError> {
        if !self.is_regrouped {
            self.regroup()?;
        }
        let step = self.replica.steps();
        if step >= steps {
            self.end()?;
            return Ok(None);
        }
        if let (Home::Elastic { job, .. }, Some(synchronizer)) =
            (&self.home, self.replica.synchronizer())
            && job.is_asked_to_regroup()
        {
            synchronizer.vote_to_regroup();
        }
        crash::point("step");
        Ok(Some(step))
    }

    /// Goes on in the present group.
    fn regroup(&mut self) -> Result<(), ReplicaError> {
        let ElasticReplica { replica, home, initial, find, .. } = self;
        let group = home.group().expect("it has entered one");
        let regrouped = match replica.regroup(group) {
            // What a codec remembers from step to step is gone, on all ranks: as if none had any state.
            Err(ReplicaError::Worker(WorkerError::Sync(SyncError::StateLost { .. }))) => {
                Regrouped { steps: 0, donor: None, behind: group.size(), bytes: 0 }
            }
            regrouped => regrouped?,
        };
        crash::point("regrouped");
        if regrouped.donor.is_none() {
            let found = find.as_mut().filter(|_| group.rank() == 0).and_then(|find| find());
            begin(replica, group, found, initial)?;
        }
        if let Home::Elastic { job, .. } = &*home {
            replica.hand_over(job);
        }
        if let Some(synchronizer) = replica.synchronizer() {
            synchronizer.begin_step();
        }
        let steps = self.replica.steps();
        let is_redone = self.failed_after.take().is_some_and(|failed_after| failed_after >= steps);
        self.first = match &self.home {
            Home::Elastic { job, group: Some(group) } if group.rank() == 0 => Some(FirstStep {
                epoch: job.epoch(),
                step: 0,
                compute: 0.0,
                redone: is_redone,
                behind: regrouped.behind as u64,
                from_checkpoint: regrouped.donor.is_none(),
            }),
            _ => None,
        };
        self.is_regrouped = true;
        Ok(())
    }

    /// Tells the launcher of the first step of an epoch, and notes whether it was the last of the group.
    fn note_step(&mut self, stepped: &Stepped) -> Result<(), ElasticReplicaError> {
        let Some(outcome) = &stepped.outcome else { return Ok(()) };
        self.is_leaving = outcome.regroup;
        if let (Home::Elastic { job, .. }, Some(first)) = (&self.home, self.first.take()) {
            let compute = outcome.times.compute.as_secs_f64();
            job.stepped(FirstStep { step: stepped.step, compute, ..first })?;
        }
        Ok(())
    }

    /// All steps are made. Fails if the workers do not have equal weights. From here on all of them have the
    /// final ones: if rank 0 is lost, another worker hands in the result.
    fn end(&mut self) -> Result<(), ReplicaError> {
        crash::point("trained");
        self.replica.settle()?;
        let group = self.home.group().expect("it has entered one");
        self.replica.check(group)?;
        crash::point("finished");
        match (&self.home, group.rank()) {
            (_, 0) => self.over = Some(Over::HandsIn),
            (Home::Fixed(_), _) => self.over = Some(Over::Leaves),
            // Waits for the next epoch, or for the end.
            (Home::Elastic { .. }, _) => self.leave(),
        }
        Ok(())
    }

    /// Takes note of an error after which another group can follow; passes others on.
    fn note(&mut self, error: ReplicaError) -> Result<(), ElasticReplicaError> {
        let Home::Elastic { job, .. } = &mut self.home else { return Err(error.into()) };
        match &error {
            ReplicaError::Worker(WorkerError::Sync(SyncError::Group(error))) => {
                job.note_loss(error)?;
            }
            ReplicaError::Worker(WorkerError::Sync(SyncError::Form(error))) => {
                job.note_unformed(error)?;
            }
            _ => return Err(error.into()),
        }
        self.failed_after = Some(self.replica.steps());
        self.leave();
        Ok(())
    }

    /// Leaves the present group.
    fn leave(&mut self) {
        if let Home::Elastic { group, .. } = &mut self.home {
            *group = None;
        }
        (self.is_regrouped, self.is_leaving, self.failure, self.first) = (false, false, None, None);
    }
}

impl<'a> Deref for ElasticReplica<'a> {
    type Target = Replica<'a>;

    fn deref(&self) -> &Replica<'a> {
        &self.replica
    }
}

impl Home {
    fn group(&self) -> Option<&Group> {
        match self {
            Home::Elastic { group, .. } => group.as_ref(),
            Home::Fixed(job) => Some(job.world()),
        }
    }
}

/// Brings workers none of which has any state to the checkpoint that rank 0 has found, or to the beginning.
fn begin(
    replica: &mut Replica<'_>,
    group: &Group,
    found: Option<Checkpoint>,
    initial: &[Vec<f32>],
) -> Result<(), ReplicaError> {
    let mut is_found = [u8::from(found.is_some())];
    group.broadcast(&mut is_found, 0)?;
    if is_found[0] == 1 {
        let Checkpoint { steps, values } = found.unwrap_or_default();
        return replica.restore(group, steps, |name| values.get(name).cloned());
    }
    // The present weights may be those of a worker that was lost while it handed them over.
    for (entry, initial) in replica.weights().entries.iter().zip(initial) {
        entry.change(|weights| weights.copy_from_slice(initial))?;
    }
    replica.begin_anew(group)
}
