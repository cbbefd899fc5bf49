//! A worker whose weights live on servers.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono_relaxed::downpour::Downpour;
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{
    ASK_EVERY, Client, ClientOptions, Fill, Gradient, Pushed, Run, ServerError, Stopper, reports,
    wait_for_worker_zero,
};
use unisono_relaxed::spec::Level;

use super::error::{ServerOperation, ServerSite};
use super::interrupt;
use super::settings::ServerSettings;
use crate::memory::Buffer;

/// What became of a step: of the push, if there was one, whether it was applied, its lead, its delay
/// and the workers present; whether the run is over; seconds of waiting.
type Stepped = (Option<(bool, u64, u64, u32)>, bool, f64);

/// A worker of a run.
#[pyclass(frozen)]
pub struct ServerClient {
    run: Run,
    options: ClientOptions,
    lengths: Vec<usize>,
    stopper: Stopper,
    state: Mutex<WorkerState>,
    /// The process that joined. A child of `fork` has the sockets of its parent and must not use them.
    process: u32,
}

/// What a step changes.
struct WorkerState {
    /// Until the worker has left.
    client: Option<Client>,
    /// At downpour.
    replica: Option<Downpour>,
    /// Since when a gradient is being computed.
    since: Instant,
}

#[pymethods]
impl ServerClient {
    /// Joins a run. The weights that worker 0 has at these addresses become those of the run, if it
    /// has not begun yet; the others wait for worker 0.
    #[new]
    fn new(
        py: Python<'_>,
        settings: ServerSettings,
        weights: Vec<usize>,
    ) -> PyResult<ServerClient> {
        let site = ServerSite { rank: settings.worker, operation: ServerOperation::Join };
        let invalid = |text: String| site.invalid(py, &text);
        let run = settings.run().map_err(invalid)?;
        let optimizer = settings.optimizer().map_err(invalid)?;
        let options = settings.options().map_err(invalid)?;
        let lengths: Vec<usize> = run.shapes.iter().map(|shape| shape.iter().product()).collect();
        // A copy, since the attempt to join cannot be ended: after Ctrl-C it goes on for a while, when
        // the tensors may be gone.
        let initial = weights_at(&weights, &lengths).map_err(invalid)?;
        let initial: Vec<Vec<f32>> = initial.iter().map(|weights| weights.to_vec()).collect();
        let joining = (run.clone(), options.clone());
        let joined = interrupt::owning(py, move || join(&joining.0, joining.1, &initial))?;
        let client = joined.map_err(|error| site.failed(py, &error))?;
        let replica = match run.level {
            Level::Downpour(periods) => {
                let replica = Downpour::new(periods, &optimizer, &lengths, client.clock());
                Some(replica.map_err(|error| invalid(error.to_string()))?)
            }
            _ => None,
        };
        Ok(ServerClient {
            stopper: client.stopper(),
            state: Mutex::new(WorkerState { client: Some(client), replica, since: Instant::now() }),
            process: std::process::id(),
            lengths,
            run,
            options,
        })
    }

    /// Takes a step with gradients, where there are some, and puts the weights that follow where the
    /// old ones are. The caller keeps the memory alive, and away from others, meanwhile.
    fn step(
        &self,
        py: Python<'_>,
        weights: Vec<usize>,
        gradients: Vec<Option<usize>>,
        loss: f32,
        samples: u64,
    ) -> PyResult<Stepped> {
        let site = self.site(ServerOperation::Step);
        let invalid = |text: String| site.invalid(py, &text);
        let mut weights = weights_at(&weights, &self.lengths).map_err(invalid)?;
        let gradients = numbers(&gradients, &self.lengths).map_err(invalid)?;
        self.wait(py, site, |state| state.step(&mut weights, &gradients, loss, samples))
    }

    /// Puts the weights of the servers where the old ones are, as soon as this worker may read.
    fn pull(&self, py: Python<'_>, weights: Vec<usize>) -> PyResult<f64> {
        let site = self.site(ServerOperation::Pull);
        let mut weights =
            weights_at(&weights, &self.lengths).map_err(|text| site.invalid(py, &text))?;
        self.wait(py, site, |state| {
            let start = Instant::now();
            state.client.as_mut().ok_or(Unable::Left)?.pull_into(None, &mut into(&mut weights))?;
            state.since = Instant::now();
            Ok(start.elapsed().as_secs_f64())
        })
    }

    /// Steps that this worker has finished, and bytes sent and received; `None` after it has left.
    fn state(&self, py: Python<'_>) -> Option<(u64, u64)> {
        let state = |client: &Client| (client.clock().0, client.traffic());
        py.detach(|| self.lock().client.as_ref().map(state))
    }

    /// The optimizer as the servers apply it, in words.
    fn optimizer(&self) -> String {
        self.run.optimizer.to_string()
    }

    /// Leaves the run, so that the other workers do not wait for this one.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| {
            let client = self.lock().client.take();
            if let Some(client) = self.owned(client) {
                client.leave();
            }
        });
    }

    /// Waits until no worker is present, at most `seconds`; whether that is so. For a worker that has
    /// left, and in whose process there is a server.
    fn wait_for_others(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let options = ClientOptions { patience: Duration::ZERO, ..self.options.clone() };
        let limit = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let start = Instant::now();
        loop {
            match py.detach(|| reports(&self.run, &options)) {
                Ok(reports) if reports.iter().any(|report| report.present > 0) => {}
                // Another worker with a server has seen that all are gone, and has ended it.
                Ok(_) | Err(_) => return Ok(true),
            }
            if start.elapsed() > limit {
                return Ok(false);
            }
            py.check_signals()?;
            py.detach(|| std::thread::sleep(ASK_EVERY));
        }
    }
}

impl ServerClient {
    fn site(&self, operation: ServerOperation) -> ServerSite {
        ServerSite { rank: self.options.worker, operation }
    }

    fn lock(&self) -> MutexGuard<'_, WorkerState> {
        self.state.lock().expect("no panic while locked")
    }

    /// Does something that may wait for servers, until Ctrl-C.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        site: ServerSite,
        wait: impl FnOnce(&mut WorkerState) -> Result<T, Unable> + Send,
    ) -> PyResult<T> {
        if std::process::id() != self.process {
            return Err(site.unusable(py, "this process was forked from the one that has joined"));
        }
        let outcome = interrupt::borrowing(py, || self.stopper.stop(), || wait(&mut self.lock()))?;
        outcome.map_err(|unable| match unable {
            Unable::Left => site.unusable(py, "the worker has left"),
            Unable::Server(error) => site.failed(py, &error),
        })
    }

    /// The client, if it is this process that has joined.
    fn owned(&self, client: Option<Client>) -> Option<Client> {
        if std::process::id() != self.process {
            // To leave would end the connections of the parent.
            std::mem::forget(client);
            return None;
        }
        client
    }
}

impl Drop for ServerClient {
    fn drop(&mut self) {
        // Without the lock: in a child of `fork`, the thread that held it is not there to release it.
        let client = self.state.get_mut().expect("no panic while locked").client.take();
        Python::attach(|py| py.detach(|| drop(self.owned(client))));
    }
}

/// Why something cannot be done.
enum Unable {
    /// The worker has left.
    Left,
    /// A server.
    Server(ServerError),
}

impl From<ServerError> for Unable {
    fn from(error: ServerError) -> Unable {
        Unable::Server(error)
    }
}

impl WorkerState {
    fn step(
        &mut self,
        weights: &mut [&mut [f32]],
        gradients: &[Option<&[f32]>],
        loss: f32,
        samples: u64,
    ) -> Result<Stepped, Unable> {
        let compute = self.since.elapsed().as_secs_f64();
        let measured = Measured { loss, samples, compute, ..Measured::default() };
        let client = self.client.as_mut().ok_or(Unable::Left)?;
        let (pushed, blocked) = match &mut self.replica {
            Some(replica) => {
                for (parameter, gradient) in gradients.iter().enumerate() {
                    if let Some(gradient) = gradient {
                        replica.update(parameter, weights[parameter], gradient);
                    }
                }
                replica.end_step(measured);
                let start = Instant::now();
                let mut pushed = None;
                if replica.push_is_due() {
                    let (gathered, measured) = replica.gathered();
                    pushed = Some(client.push(&gathered, measured)?);
                    replica.clear();
                }
                if replica.fetch_is_due() {
                    client.pull_into(None, &mut into(weights))?;
                }
                (pushed, start.elapsed())
            }
            None => {
                let start = Instant::now();
                let pushed =
                    client.push_pull_into(&present(gradients), measured, &mut into(weights))?;
                (Some(pushed), start.elapsed())
            }
        };
        self.since = Instant::now();
        let of = |Pushed { applied, age, .. }| (applied, age.lead, age.delay, age.present);
        Ok((pushed.map(of), client.is_finished(), blocked.as_secs_f64()))
    }
}

/// Joins, after worker 0: it is its weights that the run begins with, whichever worker is faster.
fn join(run: &Run, options: ClientOptions, initial: &[Vec<f32>]) -> Result<Client, ServerError> {
    wait_for_worker_zero(run, &options)?;
    Client::join(run, options, &|parameter| initial[parameter].clone())
}

/// The gradients that there are.
fn present<'a>(gradients: &[Option<&'a [f32]>]) -> Vec<Gradient<'a>> {
    let all = gradients.iter().enumerate();
    all.filter_map(|(parameter, gradient)| Some((parameter, vec![(*gradient)?]))).collect()
}

/// Puts weights where they belong.
fn into<'a>(weights: &'a mut [&mut [f32]]) -> impl FnMut(usize, usize, usize, &mut Fill<'_>) + 'a {
    |parameter, first, count, fill| fill(&mut weights[parameter][first..first + count])
}

/// The buffers at these addresses, one for every parameter, where there is one; or what is wrong with
/// them.
fn buffers(
    addresses: impl ExactSizeIterator<Item = Option<usize>>,
    lengths: &[usize],
) -> Result<Vec<Option<Buffer>>, String> {
    let given = addresses.len();
    if given != lengths.len() {
        return Err(format!("{given} tensors, where the run has {} parameters", lengths.len()));
    }
    let of = |(number, (address, length)): (usize, (Option<usize>, &usize))| {
        let name = format!("parameter {number}");
        address.map(|address| Buffer::new(address, *length, &name, *length)).transpose()
    };
    addresses.zip(lengths).enumerate().map(of).collect()
}

/// The numbers at these addresses, where there are some.
fn numbers<'a>(
    addresses: &[Option<usize>],
    lengths: &[usize],
) -> Result<Vec<Option<&'a [f32]>>, String> {
    let buffers = buffers(addresses.iter().copied(), lengths)?;
    // SAFETY: Python gives the addresses of tensors with as many elements as their parameters, and
    // keeps them as they are for as long as its call takes.
    Ok(buffers.into_iter().map(|buffer| buffer.map(|buffer| unsafe { buffer.read() })).collect())
}

/// The weights at these addresses, one for every parameter, to be read and changed.
fn weights_at<'a>(addresses: &[usize], lengths: &[usize]) -> Result<Vec<&'a mut [f32]>, String> {
    let buffers = buffers(addresses.iter().copied().map(Some), lengths)?;
    // SAFETY: Python gives the addresses of tensors with as many elements as their parameters, no two
    // of which overlap, and keeps them to this call.
    Ok(buffers.into_iter().flatten().map(|buffer| unsafe { buffer.write() }).collect())
}
