//! Times by the device's own clock.

use std::error::Error;

use unisono_cuda::{CudaError, Event, EventKind, Stream};

const RUNS: usize = 20;

/// Seconds: the median of 20 runs, each timed by events.
pub fn median_seconds(
    stream: &Stream,
    mut run: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<f64, Box<dyn Error>> {
    let event = || Event::new(stream.context(), EventKind::Timing);
    let events = (0..=RUNS).map(|_| event()).collect::<Result<Vec<Event>, CudaError>>()?;
    for _ in 0..3 {
        run()?;
    }
    stream.record(&events[0])?;
    for event in &events[1..] {
        run()?;
        stream.record(event)?;
    }
    stream.synchronize()?;
    let mut seconds = events
        .windows(2)
        .map(|pair| pair[1].seconds_since(&pair[0]))
        .collect::<Result<Vec<f64>, CudaError>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[RUNS / 2])
}
