//! Questions of a process that takes no part in a run, such as a launcher.

use std::time::Instant;

use super::options::{ClientOptions, Run, ServerError, Transport};
use super::session::{Fault, Session};
use super::sockets::ClientSockets;
use super::{FIRST_PAUSE, LONGEST_PAUSE};
use crate::server::wire::{Reply, Report, Request, Setup};
use crate::{Cause, Life};

/// The worker number of a process that is no worker, and only asks.
pub const NO_WORKER: u32 = u32::MAX;

/// The weights of all parameters as they are on the servers.
pub fn fetch_weights(run: &Run, options: &ClientOptions) -> Result<Vec<Vec<f32>>, ServerError> {
    let mut weights: Vec<Vec<f32>> =
        run.shapes.iter().map(|shape| vec![0.0; shape.iter().product()]).collect();
    ask_all(run, options, |session| {
        session.fetch_weights(&mut |parameter, first, count, fill| {
            fill(&mut weights[parameter][first..first + count]);
        })
    })?;
    Ok(weights)
}

/// How things are at every server.
pub fn reports(run: &Run, options: &ClientOptions) -> Result<Vec<Report>, ServerError> {
    ask_all(run, options, |session| match session.call(&Request::Report, &[])? {
        Reply::Report(report) => Ok(report),
        other => Err(session.unexpected(other)),
    })
}

/// How things are at every server, and `None` where no worker has joined yet: for a process that asks
/// before the workers have come.
pub fn reports_so_far(
    run: &Run,
    options: &ClientOptions,
) -> Result<Vec<Option<Report>>, ServerError> {
    ask_all(run, options, |session| match session.call(&Request::Report, &[])? {
        Reply::Report(report) => Ok(Some(report)),
        Reply::Unknown => Ok(None),
        other => Err(session.unexpected(other)),
    })
}

/// A number for a new life of the worker, which the first server gives out.
pub(super) fn life(
    run: &Run,
    options: &ClientOptions,
    sockets: &ClientSockets,
) -> Result<Life, ServerError> {
    // So little needs no common memory.
    let options = ClientOptions { transport: Transport::Tcp, ..options.clone() };
    let setup = run.setups(options.servers.len().max(1)).swap_remove(0);
    let mut session = Session::new(0, setup, &options);
    let deadline = Instant::now() + options.patience;
    ask(&mut session, &options, sockets, deadline, |session| {
        match session.call(&Request::Life { worker: options.worker }, &[])? {
            Reply::Life { life } => Ok(life),
            other => Err(session.unexpected(other)),
        }
    })
}

/// Asks every server something, over a connection of its own, until it answers.
fn ask_all<T>(
    run: &Run,
    options: &ClientOptions,
    mut question: impl FnMut(&mut Session) -> Result<T, Fault>,
) -> Result<Vec<T>, ServerError> {
    let deadline = Instant::now() + options.patience;
    let setups = run.setups(options.servers.len().max(1));
    let sockets =
        ClientSockets::new(setups.len()).map_err(|error| options.unreachable(0, error))?;
    let ask_one = |(server, setup): (usize, Setup)| {
        ask(&mut Session::new(server, setup, options), options, &sockets, deadline, &mut question)
    };
    setups.into_iter().enumerate().map(ask_one).collect()
}

/// Asks a server something, until it answers or the client is stopped.
fn ask<T>(
    session: &mut Session,
    options: &ClientOptions,
    sockets: &ClientSockets,
    deadline: Instant,
    mut question: impl FnMut(&mut Session) -> Result<T, Fault>,
) -> Result<T, ServerError> {
    let mut pause = FIRST_PAUSE;
    loop {
        let server = session.number;
        let connected = session.connect(options, NO_WORKER, sockets.abort());
        let opened =
            connected.and_then(|heartbeat| sockets.open(server, heartbeat).map_err(Fault::Fatal));
        let outcome = opened.and_then(|()| question(session));
        sockets.close(server);
        let last: Cause = match outcome {
            Ok(answer) => return Ok(answer),
            Err(_) if sockets.is_stopped() => return Err(ServerError::Stopped),
            Err(Fault::Fatal(ServerError::Forgotten { .. })) => {
                "no worker has joined it yet".into()
            }
            Err(Fault::Fatal(error)) => return Err(error),
            Err(Fault::Lost(error)) => error.into(),
            Err(Fault::Rejoin(refusal)) => refusal.into(),
        };
        if Instant::now() + pause >= deadline {
            return Err(options.unreachable(server, last));
        }
        sockets.pause(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
