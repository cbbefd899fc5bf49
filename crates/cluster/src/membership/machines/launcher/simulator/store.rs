//! The store of the record: compare-and-set of one key, by requests that take time and whose answers get lost.

use super::hosts::Brought;
use super::world::{Event, MS, Sabotage, Time, World};
use crate::membership::core::WorkerId;
use crate::membership::machines::launcher::Launcher;
use crate::membership::machines::record::{Applicant, Machine, Record};
use crate::membership::model::{Checked, check};

/// How long a launcher waits for an answer, and how long it pauses before it asks again.
const ANSWER: Time = 200 * MS;
const PAUSE: Time = 100 * MS;

/// The one key.
#[derive(Default)]
pub struct Store {
    pub record: Option<(Record, u64)>,
    pub away_until: Time,
    /// Until then answers get lost, now and then.
    pub flaky_until: Time,
}

#[derive(Clone, Debug)]
pub enum Request {
    Read,
    Write(Box<Record>, u64),
}

#[derive(Clone, Debug)]
pub enum Answer {
    Read(Box<Record>, u64),
    Written(u64),
}

impl World {
    fn has_store(&self, host: usize) -> bool {
        self.now >= self.store.away_until.max(self.hosts[host].no_store_until)
    }

    /// A launcher on a new machine reads the record, and will write itself into it.
    pub fn apply_to_join(&mut self, host: usize) {
        if !self.hosts[host].is_alive {
            return;
        }
        if !self.has_store(host) {
            return self.plan(self.now + PAUSE, Event::Apply(host));
        }
        let revision = self.store.record.as_ref().map_or(0, |(_, revision)| *revision);
        let found = self.store.record.as_ref().map(|(record, _)| record.clone());
        let settings = &self.settings;
        let applicant = Applicant {
            id: "simulated".into(),
            workers: self.hosts[host].workers,
            address: ([10, 0, (host >> 8) as u8, host as u8], 4_000).into(),
            host: format!("host {host}"),
            least: settings.least as u32,
            most: settings.most as u32,
            token: Some("t".into()),
            proof: None,
            settings: String::new(),
        };
        match Record::join(found, applicant) {
            // The job is over.
            Err(_) => self.hosts[host].is_alive = false,
            Ok((me, record)) => {
                let at = self.now + self.random.below(self.answer);
                self.plan(at, Event::Enroll(host, Box::new((me, record)), revision));
            }
        }
    }

    pub fn enroll(&mut self, host: usize, me: Machine, record: Record, revision: u64) -> Checked {
        if !self.hosts[host].is_alive {
            return Ok(());
        }
        if !self.has_store(host) {
            self.plan(self.now + PAUSE, Event::Apply(host));
            return Ok(());
        }
        let written = self.replace(host, revision, &record)?;
        if self.loses_answer() {
            // It asks once more, or gives up and begins anew.
            let event = match self.random.one_in(2) {
                true => Event::Enroll(host, Box::new((me, record)), revision),
                false => Event::Apply(host),
            };
            self.plan(self.now + PAUSE, event);
            return Ok(());
        }
        let Some(revision) = written else {
            self.plan(self.now, Event::Apply(host));
            return Ok(());
        };
        self.tally.count("machines that join");
        let is_late = self.has_begun();
        self.tally.count(if is_late { "machines that join later" } else { "first machines" });
        let settings = self.settings.clone();
        let (launcher, commands) =
            Launcher::new(settings, me.clone(), record, revision, self.time());
        self.hosts[host].launcher = Some(launcher);
        for local in 0..me.workers {
            let at = self.now + self.random.below(20 * MS);
            self.plan(at, Event::Start(host, WorkerId { number: me.first + local, life: 0 }));
        }
        self.hosts[host].me = Some(me);
        self.carry_out(host, commands)
    }

    fn loses_answer(&mut self) -> bool {
        let loses = self.now < self.store.flaky_until && self.random.one_in(3);
        if loses {
            self.tally.count("lost answers of the store");
        }
        loses
    }

    /// Compare-and-set; the new revision, if it was done.
    fn replace(
        &mut self,
        host: usize,
        revision: u64,
        record: &Record,
    ) -> Result<Option<u64>, String> {
        let present = self.store.record.as_ref().map_or(0, |(_, revision)| *revision);
        let is_takeover = self
            .store
            .record
            .as_ref()
            .is_some_and(|(old, _)| old.leader != record.leader && old.epoch == record.epoch);
        let is_forced = is_takeover && self.sabotage == Some(Sabotage::TakeOverBlindly);
        if present != revision && !is_forced {
            // What this launcher has written before, though the answer was lost, counts as done.
            let is_kept = self.store.record.as_ref().is_some_and(|(kept, _)| kept == record);
            return Ok((is_kept && present > revision).then_some(present));
        }
        self.check_record(host, record)?;
        self.store.record = Some((record.clone(), present + 1));
        if is_takeover {
            self.tally.count("takeovers");
            self.spring("takeover", host);
        }
        Ok(Some(present + 1))
    }

    pub fn ask_store(&mut self, host: usize, request: Request) -> Checked {
        check(self.hosts[host].request.is_none(), || "two requests at once".into())?;
        if let Request::Write(record, _) = &request {
            if self.now < self.store.away_until {
                self.tally.count("changes while the store is away");
            }
            self.check_decision(host, record)?;
            let is_early = match self.sabotage {
                Some(Sabotage::BeginEarly) => !record.is_complete,
                Some(Sabotage::CompleteEarly) => record.is_complete,
                _ => false,
            };
            if is_early {
                let answer =
                    Answer::Written(self.store.record.as_ref().map_or(1, |(_, at)| at + 1));
                self.plan(self.now, Event::Deliver(host, Brought::Store(answer)));
            }
            self.spring("write", host);
        }
        self.hosts[host].request = Some(request);
        let at = self.now + self.random.below(self.answer);
        self.plan(at, Event::Request(host));
        Ok(())
    }

    pub fn serve(&mut self, host: usize) -> Checked {
        let Some(request) = self.hosts[host].request.clone() else { return Ok(()) };
        if self.hosts[host].is_lost || (!self.hosts[host].is_alive && self.random.one_in(2)) {
            return Ok(());
        }
        if !self.has_store(host) {
            let at = self.now + ANSWER + PAUSE;
            self.plan(at, Event::Request(host));
            return Ok(());
        }
        let answer = match request {
            Request::Read => None,
            Request::Write(record, revision) => self.replace(host, revision, &record)?,
        };
        let is_write = matches!(self.hosts[host].request, Some(Request::Write(..)));
        if self.loses_answer() {
            let at = self.now + ANSWER + PAUSE;
            self.plan(at, Event::Request(host));
            return Ok(());
        }
        let (record, revision) = self.store.record.clone().expect("there is a record");
        let launcher = self.hosts[host].launcher.as_ref();
        let is_overtaken = launcher.is_some_and(|launcher| launcher.record.leader != record.leader);
        if is_write && answer.is_none() && is_overtaken {
            let is_leading = self.hosts[host].is_leading();
            self.tally.count(match is_leading {
                true => "writes of a deposed leader",
                false => "takeovers by two",
            });
        }
        let answer = match answer {
            Some(revision) => Answer::Written(revision),
            None if is_write && self.sabotage == Some(Sabotage::IgnoreConflicts) => {
                Answer::Written(revision)
            }
            None => Answer::Read(Box::new(record), revision),
        };
        self.spring("answer", host);
        let at = self.now + self.random.below(self.answer);
        self.plan(at, Event::Deliver(host, Brought::Store(answer)));
        Ok(())
    }
}
