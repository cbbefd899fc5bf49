//! The folder of a run: made, found again by its journal, and finished.
//!
//! A journal remembers in which folder its run is recorded. So a run that was stopped goes on with both,
//! and every push is in the records once, whenever it was made.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde_json::json;
use unisono::insight::folder::FolderError;
use unisono::insight::relaxed::{RelaxedFolder, SavedRun};
use unisono::insight::{Outcome, RunInfo};
use unisono::recording::create;
use unisono::recording::relaxed::run_info;
use unisono::relaxed::server::Run;
use unisono::relaxed::server::journal::Journal;

use super::super::args::{RelaxedPlan, RunPlan, ServersChoice, TrainArgs, number};
use super::super::computation::Learning;

use crate::exit::Wrong;
use crate::output;

/// In a journal: names the folder of its run.
const FOLDER: &str = "run-dir";

/// Settings that may change when a run goes on.
const FREE: [&str; 2] = ["version", "slow"];

/// The folder of a run that is going on.
pub struct Folder {
    dir: PathBuf,
}

/// What a journal holds.
pub enum Found {
    /// Nothing.
    Nothing,
    /// A run that was stopped, and goes on.
    Unfinished(Folder),
    /// A run with nothing left to do.
    Complete(Box<SavedRun>),
}

impl Folder {
    /// Makes the folder: the one that was named, or the first in `runs` that does not exist.
    pub fn make(plan: &RunPlan, info: &RunInfo) -> anyhow::Result<Folder> {
        let dir = plan.run_dir.as_deref();
        let made = create(dir, &info.name, |dir| RelaxedFolder::create(dir, info));
        let made = made.map(|folder| Folder { dir: folder.path().to_owned() });
        match dir {
            Some(_) => made.context("--run-dir").wrong_call(),
            None => made.context("making a folder for the report; choose one by --run-dir"),
        }
    }

    /// Makes the folder, or goes on in the one that an earlier process made, if the run goes on.
    pub fn make_or_go_on(plan: &RunPlan, info: &RunInfo, goes_on: bool) -> anyhow::Result<Folder> {
        match &plan.run_dir {
            Some(dir) if goes_on && RelaxedFolder::is_relaxed(dir) => {
                let saved = RelaxedFolder::open(dir).context("--run-dir")?;
                ensure!(saved.summary.is_none(), FolderError::Occupied { path: dir.clone() });
                if let Some((key, theirs, ours)) = difference(&saved.run.info, info) {
                    bail!(
                        "--run-dir {} holds a run with {key} {theirs}, and this one has {ours}; go on \
                         with the settings of that one, or name another folder",
                        dir.display()
                    );
                }
                Ok(Folder { dir: dir.clone() })
            }
            _ => Folder::make(plan, info),
        }
    }

    /// Looks for the run of a journal.
    pub fn find(journal: &Path, plan: &RunPlan, info: &RunInfo) -> anyhow::Result<Found> {
        let name = journal.display();
        let dir = match std::fs::read(journal.join(FOLDER)) {
            Ok(path) => PathBuf::from(OsString::from_vec(path)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Found::Nothing);
            }
            Err(error) => {
                let unusable = || format!("--journal {name}: name another folder");
                return Err(error).with_context(unusable);
            }
        };
        if let Some(asked) = &plan.run_dir {
            ensure!(
                asked.canonicalize().is_ok_and(|asked| asked == dir),
                "--run-dir {}: the run of --journal {name} is recorded in {}; name that or none to go \
                 on with it, or another journal for another run",
                asked.display(),
                dir.display()
            );
        }
        let saved = RelaxedFolder::open(&dir).with_context(|| {
            format!("--journal {name} belongs to a run in {}; name another journal", dir.display())
        })?;
        if let Some((key, theirs, ours)) = difference(&saved.run.info, info) {
            bail!(
                "--journal {name} holds a run with {key} {theirs}, and this one has {ours}; go on with \
                 the settings of that one, or name another journal"
            );
        }
        Ok(match saved.summary {
            Some(_) => Found::Complete(Box::new(saved)),
            None => Found::Unfinished(Folder { dir }),
        })
    }

    /// Fails if a server that has recorded pushes here has lost its journal, and with it the weights.
    pub fn expect_states(&self, journal: &Path, servers: usize) -> anyhow::Result<()> {
        for server in 0..servers {
            let has_pushes = RelaxedFolder::updates(&self.dir, server).exists();
            let own = journal.join(server.to_string());
            ensure!(
                !has_pushes || Journal::has_state(&own),
                "--journal {}: server {server} has lost its weights, since {} is gone or empty; restore \
                 it, or remove the whole journal to begin anew, in another --run-dir than {}",
                journal.display(),
                own.display(),
                self.dir.display()
            );
        }
        Ok(())
    }

    /// Lets a journal remember this folder.
    pub fn remember_in(&self, journal: &Path) -> anyhow::Result<()> {
        let remember = || {
            // Wherever the run is continued from.
            let dir = self.dir.canonicalize()?.into_os_string();
            // On the disk before the name points there: the power may fail at any time.
            let unnamed = journal.join(format!("{FOLDER}.new"));
            let mut file = std::fs::File::create(&unnamed)?;
            file.write_all(dir.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(unnamed, journal.join(FOLDER))?;
            std::fs::File::open(journal)?.sync_all()
        };
        remember().with_context(|| {
            format!("--journal {}: name a folder that can be written to", journal.display())
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Writes the report of a run that was stopped: where it is.
    pub fn leave(&self) -> anyhow::Result<PathBuf> {
        let saved = RelaxedFolder::open(&self.dir)?;
        saved.write()?;
        Ok(saved.report_path())
    }

    /// Judges the model, writes the report, and says how it went. Where workers average by themselves,
    /// `exchanges` says how often two did; `restarted` is how many processes were started again. Returns
    /// how many pushes were recorded.
    pub fn finish(
        self,
        learning: &Learning,
        exchanges: Option<u64>,
        restarted: u32,
        json: bool,
    ) -> anyhow::Result<u64> {
        let judgement = learning.judge()?;
        let outcome = Outcome {
            accuracy: Some(judgement.accuracy),
            held_out_loss: Some(judgement.loss),
            weights_hash: learning.weights().hash().to_hex().to_string(),
        };
        let saved = RelaxedFolder::at(&self.dir).finish(outcome, exchanges)?;
        tell(&saved, restarted, json)?;
        expect_balanced(&saved)?;
        Ok(saved.run.pushes)
    }
}

/// Fails if some push is not accounted for exactly once.
fn expect_balanced(saved: &SavedRun) -> anyhow::Result<()> {
    let Some(summary) = &saved.summary else { return Ok(()) };
    ensure!(
        summary.is_balanced() || !summary.is_recorded(),
        "the ledger of pushes does not add up: {}; do not trust the weights",
        summary.ledger
    );
    Ok(())
}

/// Says what to do about servers that the leader did not start, if they have recorded nothing.
pub fn advise_to_record(pushes: u64, run: &Run) {
    if pushes == 0 && run.total > 0 {
        say!(
            "unisono: the servers recorded nothing here, so that the report lacks all that they know; \
             start them with the same --run-dir, in a folder that they share with rank 0"
        );
    }
}

/// Says that there is nothing to do, and what the run came to.
pub fn tell_complete(saved: &SavedRun, json: bool) -> anyhow::Result<()> {
    remark!("unisono: nothing left to do: the run of this journal is complete");
    tell(saved, 0, json)?;
    expect_balanced(saved)
}

/// Says how a run went.
fn tell(saved: &SavedRun, restarted: u32, json: bool) -> anyhow::Result<()> {
    let summary = saved.summary.as_ref().context("a finished run has a summary")?;
    if json {
        let mut object = serde_json::to_value(summary)?;
        object["processes_restarted"] = json!(restarted);
        object["report"] = json!(saved.report_path());
        return Ok(result_line!("{object}")?);
    }
    let mut out = String::new();
    match summary.is_recorded() {
        true => write!(out, "loss {:.4}, ", summary.final_loss)?,
        false => write!(out, "loss not recorded, ")?,
    }
    if let Some(accuracy) = summary.accuracy {
        write!(out, "held-out accuracy {:.1} %, ", accuracy * 100.0)?;
    }
    writeln!(out, "weights {}", summary.weights_hash)?;
    if !output::is_quiet() {
        writeln!(out, "{}", saved.report().terminal(output::columns()))?;
    }
    writeln!(out, "report: {}", saved.report_path().display())?;
    Ok(output::text_out(&out)?)
}

/// The first setting in which two runs differ that one cannot have changed on the way, and its values.
fn difference(theirs: &RunInfo, ours: &RunInfo) -> Option<(String, String, String)> {
    if theirs.workers != ours.workers {
        let (theirs, ours) = (theirs.workers.to_string(), ours.workers.to_string());
        return Some(("workers".to_owned(), theirs, ours));
    }
    let keys: BTreeSet<&String> = theirs.settings.keys().chain(ours.settings.keys()).collect();
    let value = |info: &RunInfo, key: &str| {
        let value = info.settings.get(key);
        value.map_or("none".to_owned(), |value| {
            value.as_str().map_or_else(|| value.to_string(), str::to_owned)
        })
    };
    let mut values = keys
        .into_iter()
        .filter(|key| !FREE.contains(&key.as_str()))
        .map(|key| (key.clone(), value(theirs, key), value(ours, key)));
    values.find(|(_, theirs, ours)| theirs != ours)
}

/// The run, for its report.
pub fn describe(
    plan: &RunPlan,
    relaxed: &RelaxedPlan,
    workers: usize,
    args: &TrainArgs,
) -> RunInfo {
    let (model, data) = plan.names();
    let mut settings = toml::Table::new();
    let mut set = |key: &str, value: toml::Value| settings.insert(key.to_owned(), value);
    set("version", env!("CARGO_PKG_VERSION").into());
    for (key, value) in plan.identity() {
        set(key, value.into());
    }
    set("steps", number(plan.steps));
    if let Some((rank, factor)) = plan.slow {
        set("slow", format!("{rank}:{factor}").into());
    }
    let servers = match &relaxed.servers {
        ServersChoice::Started(count) => count.to_string(),
        ServersChoice::Inside => "inside".to_owned(),
        ServersChoice::At(addresses) => addresses.join(","),
    };
    let (level, tcp) = (relaxed.level, args.transport() == unisono::Transport::Tcp);
    let optimizer = level.optimizer(&plan.optimizer, workers as u32);
    let info = run_info(level, &optimizer, relaxed.stale, &servers, workers, tcp);
    settings.extend(info.settings.clone());
    let (codec, shards) = (plan.codec_name(), plan.shards);
    RunInfo { name: plan.short_name(), model, data, codec, shards, settings, ..info }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(settings: &[(&str, &str)]) -> RunInfo {
        let settings = settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).into()));
        RunInfo { workers: 2, settings: settings.collect(), ..RunInfo::default() }
    }

    #[test]
    fn settings_that_decide_are_told_apart() {
        let run = info(&[("seed", "1"), ("version", "1"), ("slow", "1:4")]);
        assert_eq!(difference(&run, &run), None);
        let again = info(&[("seed", "1"), ("version", "2")]);
        assert_eq!(difference(&run, &again), None, "they decide nothing");
        let other = info(&[("seed", "2"), ("version", "1")]);
        let (key, theirs, ours) = difference(&run, &other).expect("another seed");
        assert_eq!((&*key, &*theirs, &*ours), ("seed", "1", "2"));
        let more = info(&[("seed", "1"), ("batch", "8")]);
        assert_eq!(difference(&run, &more).expect("one has a batch").1, "none");
        let (key, ..) = difference(&run, &RunInfo { workers: 3, ..run.clone() }).expect("more");
        assert_eq!(key, "workers");
    }
}
