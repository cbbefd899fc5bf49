//! Shows how training goes on.
//!
//! The workers' output goes through the launcher, which knows the terminal. So rank 0 tells its
//! progress in lines that begin with a byte no text has, and the launcher's end of the pipe draws a
//! bar of them. Where somebody else launched the workers, rank 0 writes plain lines now and then.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use unisono::cluster::launch::Sink;
use unisono::sync::StepOutcome;

/// Begins a line that is for the launcher: ASCII's record separator.
const MARK: u8 = 0x1e;

/// Time between two drawings. Shorter: nobody could read them.
const REDRAW: Duration = Duration::from_millis(100);

/// Time between two lines where there is no bar.
const LINES: Duration = Duration::from_secs(5);

/// How far training is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Progress {
    step: u64,
    steps: u64,
    loss: f32,
    samples_per_s: f64,
    /// The share of the time that was spent waiting for communication.
    exposed: f64,
    /// Whether everything is done and written.
    finished: bool,
}

/// Rank 0's end.
pub struct Reporter {
    steps: u64,
    samples: f64,
    /// Whether a launcher of ours listens.
    marked: bool,
    told: Instant,
    seconds: f64,
    blocked: f64,
    since: u32,
    last: Option<Progress>,
}

impl Reporter {
    /// For a run of `steps` with as many samples each.
    pub fn new(steps: u64, samples: usize, marked: bool) -> Reporter {
        Reporter {
            steps,
            samples: samples as f64,
            marked,
            told: Instant::now(),
            seconds: 0.0,
            blocked: 0.0,
            since: 0,
            last: None,
        }
    }

    /// After every step.
    pub fn step(&mut self, step: u64, outcome: &StepOutcome) {
        let times = &outcome.times;
        self.seconds += (times.end - times.begin).as_secs_f64();
        self.blocked += times.blocked.as_secs_f64();
        self.since += 1;
        let pause = if self.marked { REDRAW } else { LINES };
        if self.told.elapsed() < pause && step != self.steps {
            return;
        }
        let progress = Progress {
            step,
            steps: self.steps,
            loss: outcome.loss,
            samples_per_s: f64::from(self.since) * self.samples / self.seconds,
            exposed: self.blocked / self.seconds,
            finished: false,
        };
        (self.seconds, self.blocked, self.since) = (0.0, 0.0, 0);
        self.tell(&progress);
        self.last = Some(progress);
    }

    /// When all is done.
    pub fn finish(&mut self) {
        if let Some(last) = self.last.take()
            && self.marked
        {
            self.tell(&Progress { finished: true, ..last });
        }
    }

    fn tell(&mut self, progress: &Progress) {
        self.told = Instant::now();
        // Whoever closed the pipe does not want to know.
        let _ = if self.marked {
            let mut line = vec![MARK];
            line.extend(serde_json::to_vec(progress).unwrap_or_default());
            line.push(b'\n');
            let mut out = std::io::stdout().lock();
            out.write_all(&line).and_then(|()| out.flush())
        } else {
            writeln!(std::io::stderr(), "{}", progress.line())
        };
    }
}

impl Progress {
    fn line(&self) -> String {
        let Progress { step, steps, loss, samples_per_s, exposed, .. } = self;
        format!(
            "step {step}/{steps}  loss {loss:.4}  {samples_per_s:.0} samples/s  {:.0} % exposed",
            exposed * 100.0
        )
    }
}

/// The launcher's end.
pub struct Display {
    bar: ProgressBar,
    finished: Arc<AtomicBool>,
}

impl Display {
    pub fn new() -> Display {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:30.cyan/dim} {msg}  eta {eta}")
            .expect("the template is right")
            .progress_chars("━╸─");
        bar.set_style(style);
        Display { bar, finished: Arc::default() }
    }

    /// Where the workers' stdout goes.
    pub fn stdout(&self) -> Sink {
        let told = Instant::now();
        let (bar, finished) = (self.bar.clone(), self.finished.clone());
        Arc::new(Mutex::new(Output { bar, finished, told, partial: Vec::new() }))
    }

    /// Where their stderr goes.
    pub fn stderr(&self) -> Sink {
        Arc::new(Mutex::new(Beside { bar: self.bar.clone() }))
    }

    /// Removes the bar; whether training came to its end.
    pub fn close(&self) -> bool {
        self.bar.finish_and_clear();
        self.finished.load(Ordering::Relaxed)
    }
}

/// Takes lines of stdout: draws those that are marked, passes on the others.
struct Output {
    bar: ProgressBar,
    finished: Arc<AtomicBool>,
    told: Instant,
    partial: Vec<u8>,
}

impl Output {
    fn line(&mut self, line: &[u8]) -> std::io::Result<()> {
        let Some(event) = line.strip_prefix(&[MARK]) else {
            return self.bar.suspend(|| {
                let mut out = std::io::stdout().lock();
                out.write_all(line)?;
                out.flush()
            });
        };
        let Ok(progress) = serde_json::from_slice::<Progress>(event) else { return Ok(()) };
        if progress.finished {
            self.finished.store(true, Ordering::Relaxed);
            return Ok(());
        }
        self.bar.set_length(progress.steps);
        self.bar.set_position(progress.step);
        self.bar.set_message(progress.line());
        let due = progress.step == progress.steps || self.told.elapsed() >= LINES;
        if !std::io::stderr().is_terminal() && due {
            self.told = Instant::now();
            writeln!(std::io::stderr(), "{}", progress.line())?;
        }
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.partial.extend_from_slice(bytes);
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            self.line(&line)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes to stderr without harming the bar.
struct Beside {
    bar: ProgressBar,
}

impl Write for Beside {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bar.suspend(|| std::io::stderr().write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}
