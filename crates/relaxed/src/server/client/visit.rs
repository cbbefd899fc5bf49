//! Questions of somebody who takes no part in a run.

use std::time::Instant;

use super::options::{ClientOptions, Run, ServerError};
use super::session::{Fault, Session};
use super::{FIRST_PAUSE, LONGEST_PAUSE};
use crate::server::wire::{Reply, Report, Request};

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

/// Asks every server something, over a connection of its own, until it answers.
fn visit<T>(
    run: &Run,
    options: &ClientOptions,
    mut ask: impl FnMut(&mut Session) -> Result<T, Fault>,
) -> Result<Vec<T>, ServerError> {
    let deadline = Instant::now() + options.patience;
    let mut answers = Vec::new();
    for (server, setup) in run.setups(options.servers.len().max(1)).into_iter().enumerate() {
        let mut session = Session::new(server, setup, options);
        let mut pause = FIRST_PAUSE;
        let answer = loop {
            let connected = session.connect(options, NOBODY, |_| Ok(()));
            let last = match connected.and_then(|()| ask(&mut session)) {
                Ok(answer) => break answer,
                Err(Fault::Fatal(ServerError::Forgotten { .. })) => {
                    "no worker has joined it yet".to_owned()
                }
                Err(Fault::Fatal(error)) => return Err(error),
                Err(Fault::Lost(error)) => error.to_string(),
                Err(Fault::Rejoin(refusal)) => refusal.to_string(),
            };
            if Instant::now() + pause >= deadline {
                let address = options.servers.get(server).cloned().unwrap_or_default();
                return Err(ServerError::Unreachable { server, address, last });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        };
        answers.push(answer);
    }
    Ok(answers)
}
