//! A candle model in a job whose workers may come and go.

use std::io::Write;
use std::ops::Deref;

use candle_core::Tensor;
use unisono_collective::{BadSetting, Error, FormError, Group, Options};
use unisono_net::crash;
use unisono_optimizer::OptimizerSpec;
use unisono_sync::{NotElastic, Settings, SyncError};

use super::parameters::Parameters;
use super::replica::{Replica, ReplicaError};
use crate::elastic::{Checkpoint, ElasticError, ElasticJob, GIVES_UP, Saved, Session};
use crate::job::{Job, JoinError};
use crate::worker::{Stepped, WorkerError};

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
/// A program that ends with an error exits with its [code](ElasticReplicaError::exit_code), so that the launcher
/// knows whether another attempt makes sense.
///
/// If no worker with the state of the run is left, the run goes on from a
/// [checkpoint](ElasticReplica::find_checkpoints_by), or begins anew. For that a worker keeps a copy of the
/// weights that the model was built with, which costs 4 bytes per parameter. Workers must build their
/// models with the same weights, by [`Parameters::with_initializer`] or from a file: else a run that begins
/// anew is another run.
pub struct ElasticReplica<'a> {
    replica: Replica<'a>,
    session: Session,
    find: Option<Box<FindCheckpoint<'a>>>,
    /// Why the present group has failed, if that was noticed between shards.
    failure: Option<Error>,
    /// How this worker's part of the run ended.
    over: Option<Over>,
}

type FindCheckpoint<'a> = dyn FnMut() -> Option<Checkpoint> + 'a;

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
    /// Workers with these settings cannot come and go.
    #[error(transparent)]
    NotElastic(#[from] NotElastic),
    /// The job.
    #[error(transparent)]
    Elastic(Box<ElasticError>),
    /// The job, where no elastic launcher has started it.
    #[error(transparent)]
    Join(Box<JoinError>),
    /// The model, or a group that another would fail like.
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

impl ElasticReplicaError {
    /// What a program that ends with this error should exit with: [64](GIVES_UP) where another attempt would meet it
    /// again, so that the launcher ends the run; else 1, so that it starts the program again.
    pub fn exit_code(&self) -> u8 {
        if self.would_recur() { GIVES_UP } else { 1 }
    }

    fn would_recur(&self) -> bool {
        match self {
            ElasticReplicaError::NotElastic(_) | ElasticReplicaError::LeftEarly => true,
            ElasticReplicaError::Elastic(error) => match &**error {
                ElasticError::Place(_) | ElasticError::Interface(_) => true,
                ElasticError::Roster { .. } => true,
                ElasticError::Form(error) => is_wrong_form(error),
                ElasticError::Group(error) => is_wrong_call(error),
                _ => false,
            },
            ElasticReplicaError::Join(error) => match &**error {
                JoinError::Setting(_) | JoinError::Place(_) | JoinError::Interface(_) => true,
                JoinError::Form(error) => is_wrong_form(error),
                _ => false,
            },
            ElasticReplicaError::Replica(error) => match &**error {
                ReplicaError::Worker(WorkerError::Sync(error)) => is_wrong_run(error),
                ReplicaError::Worker(_) | ReplicaError::Taken => true,
                // Its memory may have been short.
                ReplicaError::Candle(_) => false,
            },
            ElasticReplicaError::Output(_) => false,
        }
    }
}

/// Whether workers with these models, settings and programs will never be in step. Of replicas that differ nobody
/// knows which is right.
fn is_wrong_run(error: &SyncError) -> bool {
    match error {
        SyncError::Shards(_) | SyncError::Rule(_) | SyncError::DifferentModels { .. } => true,
        SyncError::MissingState { .. } | SyncError::Diverged { .. } => true,
        SyncError::Group(error) => is_wrong_call(error),
        SyncError::Form(error) => is_wrong_form(error),
        _ => false,
    }
}

/// Whether the ranks will make the same mistake in any group.
fn is_wrong_call(error: &Error) -> bool {
    matches!(
        error,
        Error::Mismatch { .. }
            | Error::Deadlock { .. }
            | Error::LengthMismatch { .. }
            | Error::InvalidCall(_)
    )
}

/// Whether no group of these ranks will form.
fn is_wrong_form(error: &FormError) -> bool {
    match error {
        FormError::Settings { .. } | FormError::Encryption { .. } => true,
        FormError::Transport { .. } | FormError::InvalidCall(_) => true,
        FormError::Parent(error) => is_wrong_call(error),
        _ => false,
    }
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
    /// this with the same model, settings and optimizer. Where workers may come and go, updates are
    /// [withheld](Settings::withhold).
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
        // Under every launcher: a program should not fail only where it is needed.
        settings.expect_elastic()?;
        let session = match ElasticJob::join(options.clone())? {
            Some(mut job) => {
                job.set_shards(settings.shards);
                Session::new(job)
            }
            None => Session::fixed(Job::join_with(options)?),
        };
        let withhold = settings.withhold || session.is_elastic();
        let settings = Settings { withhold, ..settings };
        let replica = Replica::waiting(parameters, settings, &optimizer)?;
        Ok(ElasticReplica { replica, session, find: None, failure: None, over: None })
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
        self.failure = self.session.group()?.failure();
        if self.failure.is_some() {
            // What is computed for a group that has failed is in vain.
            return None;
        }
        crash::point("shard");
        let shard = self.replica.next_shard();
        if let Err(error) = self.session.note_shard(shard) {
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
        if !self.session.has_gone_on() {
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
                if let Some(outcome) = &stepped.outcome {
                    self.session.stepped(stepped.step, outcome)?;
                }
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
        let Some(group) = self.session.group() else { return Ok(false) };
        let saved = self.replica.save(group, each);
        if let Err(error) = saved {
            self.note(error)?;
            return Ok(false);
        }
        Ok(true)
    }

    /// This worker's rank in the present group. It may have another one in the next.
    pub fn rank(&self) -> usize {
        self.session.group().map_or_else(|| self.replica.worker().rank(), Group::rank)
    }

    /// The number of workers of the present group; 0 between two.
    pub fn workers(&self) -> usize {
        self.session.group().map_or(0, Group::size)
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
        if !self.session.is_elastic() {
            let mut out = std::io::stdout().lock();
            out.write_all(&result)?;
            out.flush()?;
        }
        Ok(self.session.finish(result)?)
    }

    /// Makes sure that this worker is in a group, in which it may have yet to go on; `false` if the run is over.
    fn enter(&mut self, steps: u64) -> Result<bool, ElasticReplicaError> {
        if self.session.is_leaving()
            && self.replica.steps() < steps
            && let Err(error) = self.session.leave(&self.replica)
        {
            self.note(error)?;
        }
        let is_in = self.session.enter(&mut self.replica)?;
        if !is_in {
            self.over = Some(Over::Leaves);
        }
        Ok(is_in)
    }

    /// The step to compute in the present group; `None` if there is none.
    fn begin_step(&mut self, steps: u64) -> Result<Option<u64>, ReplicaError> {
        if !self.session.has_gone_on() {
            let find = &mut self.find;
            self.session.go_on(&mut self.replica, || {
                let found = find.as_mut().and_then(|find| find());
                Ok::<_, ReplicaError>(found.map(|found| Box::new(found) as Box<dyn Saved>))
            })?;
        }
        let step = self.replica.steps();
        if step >= steps {
            self.end()?;
            return Ok(None);
        }
        if let Some(synchronizer) = self.replica.synchronizer() {
            self.session.vote(synchronizer);
        }
        crash::point("step");
        Ok(Some(step))
    }

    /// All steps are made. Fails if the workers do not have equal weights. From here on all of them have the
    /// final ones: if rank 0 is lost, another worker hands in the result.
    fn end(&mut self) -> Result<(), ReplicaError> {
        crash::point("trained");
        self.replica.settle()?;
        let group = self.session.group().expect("it has entered one");
        self.replica.check(group)?;
        crash::point("finished");
        match group.rank() {
            0 => self.over = Some(Over::HandsIn),
            _ if self.session.is_elastic() => self.session.stand_by(),
            _ => self.over = Some(Over::Leaves),
        }
        Ok(())
    }

    /// Takes note of an error after which another group can follow; passes others on.
    fn note(&mut self, error: ReplicaError) -> Result<(), ElasticReplicaError> {
        let steps = self.replica.steps();
        self.failure = None;
        match error.sync() {
            Some(cause) if self.session.failed(cause, steps) => Ok(()),
            _ => Err(error.into()),
        }
    }
}

impl<'a> Deref for ElasticReplica<'a> {
    type Target = Replica<'a>;

    fn deref(&self) -> &Replica<'a> {
        &self.replica
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::VarMap;
    use unisono_sync::strategy::Compression;

    use super::*;

    fn join(settings: Settings) -> Result<(), ElasticReplicaError> {
        let parameters = Parameters::of(&VarMap::new());
        let _model = candle_nn::linear(2, 1, parameters.builder(DType::F32, &Device::Cpu)).unwrap();
        ElasticReplica::join(&parameters, settings, "sgd".parse().unwrap()).map(drop)
    }

    #[test]
    fn settings_with_which_a_loss_would_cost_more_than_steps_are_refused() {
        let compression = Some(Compression::new("int8".parse().unwrap()));
        let settings =
            |strategy: &str| Settings { strategy: strategy.parse().unwrap(), ..Settings::new(4) };
        for refused in [
            settings("diloco:4,streams=2"),
            settings("diloco:4,delay=1"),
            Settings { compression: compression.clone(), ..settings("local:4") },
        ] {
            let error = join(refused.clone()).expect_err("it is not elastic");
            assert!(matches!(error, ElasticReplicaError::NotElastic(_)), "{error}");
            assert_eq!(error.exit_code(), GIVES_UP);
        }
        join(settings("local:4")).unwrap();
        join(Settings { compression, ..settings("all-reduce") }).unwrap();
    }
}
