//! Writes down what happens to the workers of an elastic run, in the folder that rank 0 makes for it.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use unisono::cluster::membership::{self, Happened, Observer, Occurrence};
use unisono::insight::folder::{FolderError, RunFolder};
use unisono::insight::membership::{
    Event, FirstStep, Happening, Launcher, MembershipLog, Sign, WorkerId,
};

/// How often to look whether the folder is there. Longer: `unisono status` knows later of a run that has begun.
/// Shorter: more system calls before that.
const LOOK: Duration = Duration::from_millis(100);

/// A thread that writes, so that a slow disk keeps no recovery waiting.
pub struct Recorder {
    events: Sender<Event>,
    thread: JoinHandle<()>,
    began: Instant,
    dir: PathBuf,
}

impl Recorder {
    /// For the run that will have this folder.
    pub fn start(dir: PathBuf) -> std::io::Result<Recorder> {
        let (events, inbox) = channel();
        let _ = events.send(Event { at: 0.0, what: Happening::Launched(launcher()) });
        let log = MembershipLog::new(&dir);
        let write = move || {
            if let Err(error) = write(log, &inbox) {
                say!("unisono: warning: {error}; the run goes on, without a record of its workers");
            }
        };
        let thread = std::thread::Builder::new().name("unisono-record".into()).spawn(write)?;
        Ok(Recorder { events, thread, began: Instant::now(), dir })
    }

    /// What the launcher is to tell.
    pub fn observer(&self) -> Observer {
        let events = self.events.clone();
        // Where nothing can be written, nothing is wanted.
        Arc::new(move |happened| drop(events.send(event(happened))))
    }

    /// Writes how the run ended, and the report once more: with the end of it all.
    pub fn close(self, (complete, outcome): (bool, String)) {
        let at = self.began.elapsed().as_secs_f64();
        let _ = self.events.send(Event { at, what: Happening::Over { complete, outcome } });
        drop(self.events);
        let _ = self.thread.join();
        let Ok(run) = RunFolder::open(self.dir) else { return };
        // Where rank 0 could write none, the user was told.
        if run.report_path().exists()
            && let Err(error) = run.write_report()
        {
            log::debug!("{error}");
        }
    }
}

fn write(mut log: MembershipLog, inbox: &Receiver<Event>) -> Result<(), FolderError> {
    loop {
        let next = match log.is_waiting() {
            true => inbox.recv_timeout(LOOK),
            false => inbox.recv().map_err(RecvTimeoutError::from),
        };
        match next {
            Ok(event) => {
                let is_last = matches!(event.what, Happening::Over { .. });
                log.append(event)?;
                if is_last {
                    return Ok(());
                }
            }
            Err(RecvTimeoutError::Timeout) => log.flush()?,
            Err(RecvTimeoutError::Disconnected) => return log.flush(),
        }
    }
}

/// This process.
fn launcher() -> Launcher {
    let pid = std::process::id();
    Launcher {
        pid,
        started: process_start(pid).unwrap_or(0),
        boot: boot(),
        host: host(),
        folder: std::env::current_dir().unwrap_or_default().display().to_string(),
    }
}

/// The name of this host.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What tells this boot of the host from all others.
pub fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// When a process that runs was started, in ticks since the boot.
pub fn process_start(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may hold anything: state, and then numbers.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let has_ended = matches!(fields.first(), Some(&"Z" | &"X"));
    if has_ended { None } else { fields.get(19)?.parse().ok() }
}

/// As it is written down.
fn event(Happened { at, what }: Happened) -> Event {
    let id = |worker: membership::WorkerId| {
        let membership::WorkerId { number, life } = worker;
        WorkerId { number, life }
    };
    let sign = |sign: membership::Sign| match sign {
        membership::Sign::Ended => Sign::Ended,
        membership::Sign::CutOff => Sign::CutOff,
        membership::Sign::Silent => Sign::Silent,
    };
    let what = match what {
        Occurrence::Started { worker, pid } => Happening::Started { worker: id(worker), pid },
        Occurrence::Connected(worker) => Happening::Connected { worker: id(worker) },
        Occurrence::Ready(worker) => Happening::Ready { worker: id(worker) },
        Occurrence::Epoch { epoch, members } => {
            Happening::Epoch { epoch, members: members.into_iter().map(id).collect() }
        }
        Occurrence::Lost { worker, sign: by } => {
            Happening::Lost { worker: id(worker), sign: sign(by) }
        }
        Occurrence::Killed { worker, sign: by } => {
            Happening::Killed { worker: id(worker), sign: sign(by) }
        }
        Occurrence::Ended { worker, code, signal } => {
            Happening::Ended { worker: id(worker), code, signal }
        }
        Occurrence::Stepped { first, recovery } => Happening::Stepped(FirstStep {
            epoch: first.epoch,
            step: first.step,
            compute: first.compute,
            redone: first.redone,
            behind: first.behind,
            from_checkpoint: first.from_checkpoint,
            recovery,
        }),
        Occurrence::Finished => Happening::Finished,
        Occurrence::GaveUp { ready } => Happening::GaveUp { ready: ready as u64 },
        _ => Happening::Unknown,
    };
    Event { at: at.as_secs_f64(), what }
}
