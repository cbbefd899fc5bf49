//! A candle model that is trained by one worker of a run.

use candle_core::Tensor;
use unisono_collective::{Error, Group};
use unisono_optimizer::OptimizerSpec;
use unisono_sync::{Settings, SyncError, Synchronizer, divergence};

use super::parameters::Parameters;
use super::weights::ModelWeights;
use crate::elastic::{ElasticError, ElasticJob, Trainee};
use crate::worker::{
    Agreeing, Find, Joining, Keep, Regrouped, Seat, Stepped, Totals, Worker, WorkerError,
};

/// One worker's copy of the model.
///
/// After an error, the user's own in the middle of a shard included, the replica is of no more use:
/// its weights are those of no step, and further calls may panic. Make a new one, or, where workers agree,
/// [go on](Replica::regroup) in another group.
pub struct Replica<'a> {
    weights: ModelWeights,
    worker: Worker<'a>,
    /// In an elastic job, the weights that the model was built with, those that are not trained included.
    initial: Option<Vec<Vec<f32>>>,
}

/// Why a replica could not be made, or a step not be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The worker could not go on.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// candle could not compute.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// These parameters already belong to a replica. Build another model for another replica.
    #[error("these parameters already belong to a replica")]
    Taken,
}

impl ReplicaError {
    /// Why workers could not be kept in step, if that is what went wrong.
    pub fn sync(&self) -> Option<&SyncError> {
        match self {
            ReplicaError::Worker(WorkerError::Sync(error)) => Some(error),
            _ => None,
        }
    }
}

impl From<Error> for ReplicaError {
    fn from(error: Error) -> ReplicaError {
        WorkerError::from(error).into()
    }
}

impl From<SyncError> for ReplicaError {
    fn from(error: SyncError) -> ReplicaError {
        WorkerError::from(error).into()
    }
}

impl<'a> Replica<'a> {
    /// Makes the parameters of a model equal on all ranks of a group, to those of rank 0, and keeps
    /// them so. All ranks call this with the same model, settings and optimizer.
    pub fn new(
        group: &Group,
        parameters: &Parameters,
        settings: Settings,
        optimizer: OptimizerSpec,
    ) -> Result<Replica<'a>, ReplicaError> {
        let mut weights = ModelWeights::of(parameters);
        let list = weights.parameters();
        let worker = Worker::agreeing(group, list, settings, &optimizer, &mut weights)?;
        weights.broadcast_frozen(group)?;
        Replica::made(parameters, weights, worker)
    }

    /// A replica of a process that is going to join the others of a run, and is in no group yet:
    /// [`Replica::regroup`] brings it into one and gives it the weights.
    pub fn waiting(
        parameters: &Parameters,
        settings: Settings,
        optimizer: &OptimizerSpec,
    ) -> Result<Replica<'a>, ReplicaError> {
        let weights = ModelWeights::of(parameters);
        let worker = Worker::waiting(weights.parameters(), settings, optimizer)?;
        Replica::made(parameters, weights, worker)
    }

    /// Goes on in another group, all of whose ranks call this, those that [wait](Replica::waiting) too: after
    /// the group before has failed, or all its ranks have left it after the same step. Ranks that are behind
    /// get the weights, those that are not trained included, the optimizer's state and the number of steps
    /// of one that is not. The step under way, if there is one, is dropped and to be computed again. With
    /// [`Settings::withhold`], the weights are then those of a run that nothing had happened to.
    ///
    /// Where [no rank has all of its state](Regrouped::donor), restore a checkpoint, or begin
    /// [anew](Replica::begin_anew). After an error it can be called again, with the next group.
    pub fn regroup(&mut self, group: &Group) -> Result<Regrouped, ReplicaError> {
        let mut frozen = self.weights.as_frozen();
        let number = frozen.len();
        Ok(self.worker.regroup_with(group, &mut self.weights, (&mut frozen, number))?)
    }

    /// Enters the next epoch of a job, as [`ElasticJob::enter`]. A worker that joins gets the state of a member
    /// first, and follows its steps, while the members go on: when it is let in, it is behind none of them. Where
    /// the strategy [remembers](Synchronizer::remembers_nothing) more than that, all wait for the handover.
    ///
    /// The first time, it keeps a copy of the weights that the model was built with, for a run that begins
    /// [anew](Replica::begin_anew) when all others are lost.
    pub fn enter(&mut self, job: &mut ElasticJob) -> Result<Option<Group>, ElasticError> {
        self.initial.get_or_insert_with(|| {
            self.weights.entries.iter().map(|entry| entry.read(<[f32]>::to_vec)).collect()
        });
        let mut frozen = self.weights.as_frozen();
        let number = frozen.len();
        match self.worker.as_agreeing_mut() {
            Some(agreeing) if agreeing.synchronizer().remembers_nothing() => {
                let (weights, frozen) = (&mut self.weights, (&mut frozen as &mut _, number));
                job.enter_with(&mut Joining { agreeing, weights, frozen })
            }
            _ => job.enter(),
        }
    }

    /// From now on hands the state to workers that join a job, beside the training.
    pub fn hand_over(&mut self, job: &ElasticJob) {
        let frozen = self.weights.as_frozen();
        let number = frozen.len();
        if let (Some(agreeing), Some(donor)) = (self.worker.as_agreeing_mut(), job.donor()) {
            agreeing.hand_over_to(donor.clone(), Box::new(frozen), number);
        }
    }

    /// Begins the run anew, with the weights of rank 0: in an elastic job those that its model was built with, for
    /// the present ones may be those of a worker that was lost while it handed them over. All ranks must call it.
    pub fn begin_anew(&mut self, group: &Group) -> Result<(), ReplicaError> {
        for (entry, initial) in self.weights.entries.iter().zip(self.initial.iter().flatten()) {
            entry.change(|weights| weights.copy_from_slice(initial))?;
        }
        self.weights.broadcast_frozen(group)?;
        let (agreeing, weights) = self.agreeing_mut()?;
        Ok(agreeing.begin_anew(group, weights)?)
    }

    /// Takes a place in a run, at whatever level it is. The run begins with the model of worker 0.
    pub fn join(seat: Seat<'a>, parameters: &Parameters) -> Result<Replica<'a>, ReplicaError> {
        let mut weights = ModelWeights::of(parameters);
        let worker = seat.join(weights.parameters(), &mut weights)?;
        Replica::made(parameters, weights, worker)
    }

    /// The model of a worker that has joined a run by itself.
    pub fn of(worker: Worker<'a>, parameters: &Parameters) -> Result<Replica<'a>, ReplicaError> {
        Replica::made(parameters, ModelWeights::of(parameters), worker)
    }

    fn made(
        parameters: &Parameters,
        weights: ModelWeights,
        worker: Worker<'a>,
    ) -> Result<Replica<'a>, ReplicaError> {
        let replica = Replica { weights, worker, initial: None };
        match parameters.sink().gradients.set(replica.worker.gradients()) {
            Ok(()) => Ok(replica),
            Err(_) => Err(ReplicaError::Taken),
        }
    }

    /// Puts the weights for the next step in place; its number, from 0, or `None` if the run is over.
    /// Where workers agree, a replica of a [group](Replica::new) can do without.
    pub fn next_step(&mut self) -> Result<Option<u64>, ReplicaError> {
        Ok(self.worker.begin_step(&mut self.weights)?)
    }

    /// The next shard of the present step whose loss this worker should compute. `None` when it has
    /// computed all of its shards: it is time for [`Replica::step`].
    pub fn next_shard(&mut self) -> Option<usize> {
        self.worker.next_shard()
    }

    /// Computes the gradients of the shard's loss, which must be its mean over the samples. Where workers
    /// agree, gradients of the last shard travel while the others are still being computed.
    pub fn backward(&mut self, loss: &Tensor) -> Result<f32, ReplicaError> {
        let (value, gradients) = (loss.to_scalar::<f32>()?, self.worker.gradients());
        gradients.begin_backward(value);
        loss.backward()?;
        gradients.end_shard();
        Ok(value)
    }

    /// Updates the weights by the gradients of all shards, as the level does.
    pub fn step(&mut self) -> Result<Stepped, ReplicaError> {
        Ok(self.worker.step(&mut self.weights)?)
    }

    /// Ends a run that was [joined](Replica::join): the model gets the final weights, and worker 0 writes
    /// the report.
    pub fn finish(mut self) -> Result<Totals, ReplicaError> {
        Ok(self.worker.finish(&mut self.weights)?)
    }

    /// Leaves a run that others end. The model has the weights that this worker had last.
    pub fn leave(mut self) -> Result<(), ReplicaError> {
        Ok(self.worker.leave(&mut self.weights)?)
    }

    /// The worker.
    pub fn worker(&self) -> &Worker<'a> {
        &self.worker
    }

    /// The weights of the model.
    pub fn weights(&self) -> &ModelWeights {
        &self.weights
    }

    /// The hash of all weights: equal on all workers that have equal ones.
    pub fn weights_hash(&self) -> blake3::Hash {
        self.weights.hash()
    }

    /// Makes weights, optimizer state and number of steps equal on all ranks, to those of rank 0.
    /// All ranks must call it.
    pub fn broadcast(&mut self, group: &Group) -> Result<(), ReplicaError> {
        self.weights.broadcast_frozen(group)?;
        let (agreeing, weights) = self.agreeing_mut()?;
        Ok(agreeing.broadcast(group, weights)?)
    }

    /// Ends training where workers agree: makes their weights equal. All ranks must call it.
    pub fn settle(&mut self) -> Result<(), ReplicaError> {
        let (agreeing, weights) = self.agreeing_mut()?;
        Ok(agreeing.settle(weights)?)
    }

    /// Steps taken since the run began, by whatever process, where workers agree; else 0.
    pub fn steps(&self) -> u64 {
        self.worker.as_agreeing().map_or(0, Agreeing::steps)
    }

    /// What keeps this replica in step with the others, where workers agree.
    pub fn synchronizer(&self) -> Option<&Synchronizer> {
        self.worker.as_agreeing().map(|agreeing| &**agreeing.synchronizer())
    }

    /// Fails on all ranks if the replicas are not equal. All ranks must call it. Of workers with
    /// [local steps](unisono_sync::strategy::LocalSteps), what they have agreed on is compared.
    pub fn check(&self, group: &Group) -> Result<(), ReplicaError> {
        let hash =
            |entry: &super::parameters::Entry| (entry.name.clone(), entry.read(divergence::hash));
        let frozen = self.weights.frozen().map(hash).collect();
        Ok(self.agreeing()?.check(group, &self.weights, frozen)?)
    }

    /// Calls `each` at rank 0 with everything a checkpoint must hold: the names, shapes and values of
    /// the parameters, as `weights.NAME`, of the optimizer's state, as `optimizer.STATE.NAME`, and of
    /// whatever else must be remembered. All ranks must call it.
    pub fn save(
        &self,
        group: &Group,
        mut each: impl FnMut(String, &[usize], &[f32]),
    ) -> Result<(), ReplicaError> {
        for entry in self.weights.frozen().filter(|_| group.rank() == 0) {
            let name = format!("weights.{}", entry.name);
            entry.read(|values| each(name, entry.live.dims(), values));
        }
        Ok(self.agreeing()?.save(group, &self.weights, &mut each)?)
    }

    /// Continues where another replica was after `steps`, from what it [saved](Replica::save):
    /// `find` returns the values of a name. Only rank 0 needs to know the steps and to find anything.
    /// All ranks must call it. After an error the replica is unusable.
    pub fn restore(
        &mut self,
        group: &Group,
        steps: u64,
        find: impl Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<(), ReplicaError> {
        for entry in self.weights.frozen().filter(|_| group.rank() == 0) {
            let name = format!("weights.{}", entry.name);
            let values = find(&name).filter(|values| values.len() == entry.live.elem_count());
            let values = values.ok_or(WorkerError::Missing { name })?;
            entry.change(|weights| weights.copy_from_slice(&values))?;
        }
        self.weights.broadcast_frozen(group)?;
        let (agreeing, weights) = self.agreeing_mut()?;
        Ok(agreeing.restore(group, weights, steps, &find)?)
    }

    fn agreeing(&self) -> Result<&Agreeing, WorkerError> {
        self.worker.as_agreeing().ok_or(WorkerError::NotAgreeing)
    }

    fn agreeing_mut(&mut self) -> Result<(&mut Agreeing, &mut ModelWeights), WorkerError> {
        let agreeing = self.worker.as_agreeing_mut().ok_or(WorkerError::NotAgreeing)?;
        Ok((agreeing, &mut self.weights))
    }
}

impl Trainee for Replica<'_> {
    type Error = ReplicaError;

    fn steps(&self) -> u64 {
        self.steps()
    }

    fn synchronizer(&self) -> Option<&Synchronizer> {
        self.synchronizer()
    }

    fn enter(&mut self, job: &mut ElasticJob) -> Result<Option<Group>, ElasticError> {
        self.enter(job)
    }

    fn regroup(&mut self, group: &Group) -> Result<Regrouped, ReplicaError> {
        self.regroup(group)
    }

    fn hand_over(&mut self, job: &ElasticJob) {
        self.hand_over(job);
    }

    fn save(&self, group: &Group, each: &mut Keep<'_>) -> Result<(), ReplicaError> {
        self.save(group, each)
    }

    fn restore(&mut self, group: &Group, steps: u64, find: &Find<'_>) -> Result<(), ReplicaError> {
        self.restore(group, steps, find)
    }

    fn begin_anew(&mut self, group: &Group) -> Result<(), ReplicaError> {
        self.begin_anew(group)
    }
}
