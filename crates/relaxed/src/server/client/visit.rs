//! Questions of somebody who takes no part in a run.

use std::time::Instant;

use super::options::{ClientOptions, Run, ServerError, Transport};
use super::session::{Fault, Session};
use super::voice::Voices;
use super::{FIRST_PAUSE, LONGEST_PAUSE};
use crate::server::wire::{Reply, Report, Request, Setup};

/// The worker number of somebody who only looks.
pub const NOBODY: u32 = u32::MAX;

/// The weights of all parameters as they are on the servers.
pub fn look(run: &Run, options: &ClientOptions) -> Result<Vec<Vec<f32>>, ServerError> {
    let mut weights: Vec<Vec<f32>> =
        run.shapes.iter().map(|shape| vec![0.0; shape.iter().product()]).collect();
    visit(run, options, |session| {
        session.look(&mut |parameter, start, values| {
            weights[parameter][start..start + values.len()].copy_from_slice(values);
        })
    })?;
    Ok(weights)
}

/// How things are at every server.
pub fn reports(run: &Run, options: &ClientOptions) -> Result<Vec<Report>, ServerError> {
    visit(run, options, |session| match session.call(&Request::Report, &[])? {
        Reply::Report(report) => Ok(report),
        other => Err(session.unexpected(other)),
    })
}

/// How things are at every server, and `None` where no worker has joined yet: for those who come before
/// the workers.
pub fn glance(run: &Run, options: &ClientOptions) -> Result<Vec<Option<Report>>, ServerError> {
    visit(run, options, |session| match session.call(&Request::Report, &[])? {
        Reply::Report(report) => Ok(Some(report)),
        Reply::Unknown => Ok(None),
        other => Err(session.unexpected(other)),
    })
}

/// A number for a new life of the worker, which the first server gives out.
pub(super) fn life(
    run: &Run,
    options: &ClientOptions,
    voices: &Voices,
) -> Result<u64, ServerError> {
    // So little needs no common memory.
    let options = ClientOptions { transport: Transport::Tcp, ..options.clone() };
    let setup = run.setups(options.servers.len().max(1)).swap_remove(0);
    let mut session = Session::new(0, setup, &options);
    let request = Request::Life { worker: options.worker };
    ask(&mut session, &options, voices, Instant::now() + options.patience, |session| match session
        .call(
        &request,
        &[],
    )? {
        Reply::Life { life } => Ok(life),
        other => Err(session.unexpected(other)),
    })
}

/// Asks every server something, over a connection of its own, until it answers.
fn visit<T>(
    run: &Run,
    options: &ClientOptions,
    mut question: impl FnMut(&mut Session) -> Result<T, Fault>,
) -> Result<Vec<T>, ServerError> {
    let deadline = Instant::now() + options.patience;
    let setups = run.setups(options.servers.len().max(1));
    let voices =
        Voices::new(setups.len()).map_err(|error| options.unreachable(0, error.to_string()))?;
    let visit = |(server, setup): (usize, Setup)| {
        ask(&mut Session::new(server, setup, options), options, &voices, deadline, &mut question)
    };
    setups.into_iter().enumerate().map(visit).collect()
}

/// Asks a server something, until it answers or the client is stopped.
fn ask<T>(
    session: &mut Session,
    options: &ClientOptions,
    voices: &Voices,
    deadline: Instant,
    mut question: impl FnMut(&mut Session) -> Result<T, Fault>,
) -> Result<T, ServerError> {
    let mut pause = FIRST_PAUSE;
    loop {
        let server = session.number;
        let connected = session.connect(options, NOBODY, voices.abort());
        let opened = connected.and_then(|pulse| voices.open(server, pulse).map_err(Fault::Fatal));
        let outcome = opened.and_then(|()| question(session));
        voices.close(server);
        let last = match outcome {
            Ok(answer) => return Ok(answer),
            Err(_) if voices.is_stopped() => return Err(ServerError::Stopped),
            Err(Fault::Fatal(ServerError::Forgotten { .. })) => {
                "no worker has joined it yet".to_owned()
            }
            Err(Fault::Fatal(error)) => return Err(error),
            Err(Fault::Lost(error)) => error.to_string(),
            Err(Fault::Rejoin(refusal)) => refusal.to_string(),
        };
        if Instant::now() + pause >= deadline {
            return Err(options.unreachable(server, last));
        }
        voices.pause(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
