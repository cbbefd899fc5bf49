//! What a worker asks before it joins: whether the run has begun, and whether a server has forgotten it.

use std::time::{Duration, Instant};

use super::options::{ClientOptions, Run, ServerError};
use super::queries::{reports, reports_so_far};
use crate::server::wire::Report;

/// How often a worker that waits for others asks the servers. Longer: it notices later. Shorter: servers
/// answer more questions.
pub const ASK_EVERY: Duration = Duration::from_millis(50);

/// How long worker 0 may take to set the servers up, at least. Longer: a job without it is noticed
/// later. Shorter: with a large model on a busy machine, the others give up while it does so.
const SET_UP: Duration = Duration::from_secs(60);

/// Whether the run has begun. Fails if a server has forgotten what others know of the run: a worker
/// that joins would give it the weights of the beginning.
pub fn has_begun(run: &Run, options: &ClientOptions) -> Result<bool, ServerError> {
    // A worker that pushes has joined all servers. So one that knows of nothing while another has
    // updates has forgotten; unless others have begun while this one was asking.
    for is_sure in [false, true] {
        let reports = reports_so_far(run, options)?;
        let has_begun = reports.iter().flatten().any(|report| report.updates > 0);
        match reports.iter().position(Option::is_none) {
            Some(server) if has_begun && is_sure => return Err(ServerError::Forgotten { server }),
            Some(_) if has_begun => {}
            _ => return Ok(has_begun),
        }
    }
    Ok(false)
}

/// Waits until the servers have been set up, so that the run begins with the weights of worker 0,
/// whichever worker is faster. Worker 0 does not wait.
pub fn wait_for_worker_zero(run: &Run, options: &ClientOptions) -> Result<(), ServerError> {
    if options.worker == 0 {
        return has_begun(run, options).map(drop);
    }
    let (start, limit) = (Instant::now(), options.patience.max(SET_UP));
    while reports_so_far(run, options)?.iter().any(Option::is_none) {
        if start.elapsed() > limit {
            return Err(ServerError::NotBegun { waited: limit });
        }
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}

/// Whether no worker works any more, and none has to.
pub fn is_over(run: &Run, options: &ClientOptions) -> Result<bool, ServerError> {
    Ok(are_done(&reports(run, options)?))
}

/// A push of a worker that was killed may have reached one server and not another, so one that has all
/// it wants is enough.
fn are_done(reports: &[Report]) -> bool {
    reports.iter().any(|report| report.finished) && reports.iter().all(|report| report.present == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_over_when_one_server_has_all_pushes_and_no_worker_works() {
        let report = |finished, present| Report { finished, present, ..Report::default() };
        assert!(are_done(&[report(true, 0), report(false, 0)]));
        assert!(!are_done(&[report(true, 0), report(false, 1)]));
        assert!(!are_done(&[report(false, 0), report(false, 0)]));
    }
}
