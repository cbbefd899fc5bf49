//! Shows how training goes on, and why it did not.
//!
//! The workers' output goes through the launcher, which knows the terminal. So they send it messages
//! in lines that begin with a byte no text has. Of rank 0's progress the launcher's end of the pipe
//! draws a bar; of the reasons why workers gave up, the launcher shows the one that made the others
//! give up too. Where another launcher started the workers, rank 0 writes plain lines now and then.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use unisono::cluster::launch::Sink;
use unisono::sync::StepOutcome;

use crate::output;

/// Begins a line that is for the launcher: ASCII's record separator.
const MARK: u8 = 0x1e;

/// Time between two drawings. Shorter: they could not be read.
const REDRAW: Duration = Duration::from_millis(100);

/// Time between two lines where there is no bar.
const LINES: Duration = Duration::from_secs(5);

/// What a worker tells the launcher.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Progress(Progress),
    /// Everything is done and written.
    Finished,
    Failure(Failure),
}

/// How far training is.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Progress {
    step: u64,
    steps: u64,
    loss: f32,
    samples_per_s: f64,
    /// The share of the time that was spent waiting for communication.
    exposed: f64,
}

/// Why a worker gave up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// In one line.
    pub reason: String,
    /// Whether it did so only because another worker was gone.
    pub consequence: bool,
}

impl Failure {
    /// Tells the launcher.
    pub fn tell(self) {
        tell(&Message::Failure(self));
    }
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
        }
    }

    /// After every step.
    pub fn step(&mut self, step: u64, outcome: &StepOutcome) {
        let times = &outcome.times;
        let seconds = (times.end - times.begin).as_secs_f64();
        self.took(step, outcome.loss, seconds, times.blocked.as_secs_f64());
    }

    /// After every step, which took so many seconds, some of which it waited.
    pub fn took(&mut self, step: u64, loss: f32, seconds: f64, blocked: f64) {
        self.seconds += seconds;
        self.blocked += blocked;
        self.since += 1;
        let pause = if self.marked { REDRAW } else { LINES };
        if self.told.elapsed() < pause && step != self.steps {
            return;
        }
        let progress = Progress {
            step,
            steps: self.steps,
            loss,
            samples_per_s: f64::from(self.since) * self.samples / self.seconds,
            exposed: self.blocked / self.seconds,
        };
        (self.seconds, self.blocked, self.since) = (0.0, 0.0, 0);
        self.told = Instant::now();
        if self.marked {
            tell(&Message::Progress(progress));
        } else {
            remark!("{}", progress.line());
        }
    }

    /// When all is done.
    pub fn finish(&self) {
        if self.marked {
            tell(&Message::Finished);
        }
    }
}

fn tell(message: &Message) {
    let mut line = vec![MARK];
    line.extend(serde_json::to_vec(message).unwrap_or_default());
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    // Where the pipe is closed, there is no reader to tell.
    let _ = out.write_all(&line).and_then(|()| out.flush());
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
    heard: Arc<Mutex<Heard>>,
}

/// What the workers had to say.
#[derive(Clone, Default)]
pub struct Heard {
    /// Training came to its end, or was interrupted, and all is written.
    pub finished: bool,
    /// Why they gave up: the cause, if one of them told it.
    pub failure: Option<Failure>,
}

impl Display {
    pub fn new() -> Display {
        let target = match output::is_quiet() {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template(&template(Term::stderr().size().1.into()))
            .expect("the template is right")
            .progress_chars("━╸─");
        bar.set_style(style);
        Display { bar, heard: Arc::default() }
    }

    /// Where the workers' stdout goes.
    pub fn stdout(&self) -> Sink {
        let told = Instant::now();
        let (bar, heard) = (self.bar.clone(), self.heard.clone());
        Arc::new(Mutex::new(Output { bar, heard, told, partial: Vec::new() }))
    }

    /// Where their stderr goes.
    pub fn stderr(&self) -> Sink {
        Arc::new(Mutex::new(Beside { bar: self.bar.clone() }))
    }

    /// Removes the bar.
    pub fn close(&self) -> Heard {
        self.bar.finish_and_clear();
        lock(&self.heard).clone()
    }
}

/// A bar in one line of a terminal with so many columns. What has no room is cut off: a line that wraps
/// could not be drawn over.
fn template(columns: usize) -> String {
    /// Columns of the usual words and the time that is left.
    const WORDS: usize = 72;
    match columns.saturating_sub(WORDS).min(30) {
        0..5 => "{wide_msg} eta {eta}".to_owned(),
        bar => format!("{{bar:{bar}.cyan/dim}} {{wide_msg}} eta {{eta}}"),
    }
}

/// Nothing is left half done by a panic while it is locked.
fn lock(heard: &Mutex<Heard>) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes lines of stdout: heeds those that are marked, passes on the others.
struct Output {
    bar: ProgressBar,
    heard: Arc<Mutex<Heard>>,
    told: Instant,
    partial: Vec<u8>,
}

impl Output {
    fn line(&mut self, line: &[u8]) -> std::io::Result<()> {
        let Some(message) = line.strip_prefix(&[MARK]) else {
            return self.bar.suspend(|| {
                let mut out = std::io::stdout().lock();
                out.write_all(line)?;
                out.flush()
            });
        };
        match serde_json::from_slice(message) {
            Ok(Message::Progress(progress)) => return self.draw(&progress),
            Ok(Message::Finished) => {
                lock(&self.heard).finished = true;
                // What follows is the result, which no bar needs to stand beside.
                self.bar.finish_and_clear();
            }
            Ok(Message::Failure(failure)) => {
                let mut heard = lock(&self.heard);
                let better = |known: &Failure| known.consequence && !failure.consequence;
                if heard.failure.as_ref().is_none_or(better) {
                    heard.failure = Some(failure);
                }
            }
            Err(error) => log::debug!("a worker sent a message that cannot be read: {error}"),
        }
        Ok(())
    }

    fn draw(&mut self, progress: &Progress) -> std::io::Result<()> {
        self.bar.set_length(progress.steps);
        self.bar.set_position(progress.step);
        self.bar.set_message(progress.line());
        let due = progress.step == progress.steps || self.told.elapsed() >= LINES;
        if !std::io::stderr().is_terminal() && due && !output::is_quiet() {
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

/// How the launcher's account of what ended a job begins. It comes in one piece.
const ACCOUNTS: [&str; 4] = [
    "unisono: rank ",
    "unisono: server ",
    "unisono: workers were lost ",
    "unisono: waited too long for workers",
];

/// What is part of an account of a rank or server that is started again.
const AGAIN: &str = "starting it again";

impl Write for Beside {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // One line that says why will do; see `Heard::failure`.
        let text = String::from_utf8_lossy(bytes);
        if ACCOUNTS.iter().any(|account| text.starts_with(account)) && !text.contains(AGAIN) {
            return Ok(bytes.len());
        }
        self.bar.suspend(|| std::io::stderr().write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use indicatif::TermLike;

    use super::*;

    /// A terminal that remembers what was drawn.
    #[derive(Clone, Debug)]
    struct Paper {
        columns: u16,
        drawn: Arc<Mutex<Vec<String>>>,
    }

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            self.columns
        }
        fn move_cursor_up(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> std::io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> std::io::Result<()> {
            self.drawn.lock().unwrap().push(text.to_owned());
            Ok(())
        }
        fn clear_line(&self) -> std::io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_takes_one_line_of_any_terminal() {
        for columns in [30, 60, 80, 100, 200] {
            let paper = Paper { columns, drawn: Arc::default() };
            let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
            let bar = ProgressBar::with_draw_target(Some(1_000_000), target);
            bar.set_style(ProgressStyle::with_template(&template(columns.into())).unwrap());
            let progress = Progress {
                step: 999_999,
                steps: 1_000_000,
                loss: 1234.5,
                samples_per_s: 1e6,
                exposed: 0.99,
            };
            bar.set_message(progress.line());
            bar.set_position(999_999);
            bar.force_draw();
            let drawn = paper.drawn.lock().unwrap();
            assert!(drawn.iter().any(|text| text.contains("step 999999")), "{drawn:?}");
            for text in drawn.iter() {
                let width = console::measure_text_width(text);
                assert!(width <= columns.into(), "{width} in {columns} columns: {text:?}");
            }
        }
    }
}
