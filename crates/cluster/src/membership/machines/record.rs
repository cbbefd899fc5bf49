//! What is kept in etcd: the one fact that must outlast every launcher, and changes by compare-and-set.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::membership::core::WorkerId;
use crate::place::MAX_WORLD;

/// The version of [`Record`]. Launchers of another one are refused.
const VERSION: u32 = 1;

/// The present epoch of a job, and which launcher coordinates it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// Which job this is: another one may have been kept under the same name before.
    pub id: String,
    /// The present epoch; 0 before the first.
    pub epoch: u64,
    /// Its members, by rank.
    pub members: Vec<WorkerId>,
    /// The machine whose launcher coordinates the job.
    pub leader: Machine,
    /// The machine that joined last: two launchers never write the same record.
    pub newest: Machine,
    /// How many machines have joined, ever.
    pub machines: u32,
    /// How many numbers of workers were given out, ever.
    pub workers: u32,
    /// With fewer workers the job waits.
    pub least: u32,
    /// More workers wait as spares.
    pub most: u32,
    /// The job's token, unless the launchers were given one.
    pub token: Option<String>,
    /// A hash of the token.
    pub proof: String,
    /// Settings that must be equal on all machines, as text.
    pub settings: String,
    /// Whether the run is complete.
    pub is_complete: bool,
}

/// A machine, by the launcher that has joined there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its number, from 0; one that comes back gets another.
    pub number: u32,
    /// The number of its first worker.
    pub first: u32,
    /// How many workers it has.
    pub workers: u32,
    /// Where its launcher listens for the others.
    pub address: SocketAddr,
    /// Its name, for people.
    pub host: String,
}

impl Machine {
    /// Whether a worker belongs to this machine.
    pub fn has(&self, worker: WorkerId) -> bool {
        worker.number.checked_sub(self.first).is_some_and(|local| local < self.workers)
    }
}

/// A launcher that wants to take part in a job.
#[derive(Clone, Debug)]
pub struct Applicant {
    /// Of a job that begins with it.
    pub id: String,
    pub workers: u32,
    pub address: SocketAddr,
    pub host: String,
    pub least: u32,
    pub most: u32,
    /// A token, for a job that begins without one.
    pub token: Option<String>,
    /// A hash of the token that this launcher was given.
    pub proof: Option<String>,
    /// Settings that must be equal on all machines, as text.
    pub settings: String,
}

/// Why a launcher cannot take part in a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinRefused {
    /// The run is over.
    #[error("the job is complete; choose another --job name to run it once more")]
    Complete,
    /// The first launcher was started otherwise.
    #[error("the job was started with --elastic {least}:{most}; use the same on all machines")]
    Range {
        /// Its least.
        least: u32,
        /// Its most.
        most: u32,
    },
    /// Some launchers were given a token, others not.
    #[error("set UNISONO_TOKEN to the same on all machines of the job, or on none")]
    Token,
    /// This launcher was given another token than the first.
    #[error("UNISONO_TOKEN is not that of the job; set it to the same on all machines, or on none")]
    OtherToken,
    /// This machine has other settings than the first.
    #[error("the job was started with {theirs}, and this machine has {ours}; make them equal")]
    Settings {
        /// Those of the job that differ.
        theirs: String,
        /// Those of this machine.
        ours: String,
    },
    /// One of the two machines has an address that means another machine to each.
    #[error(
        "this machine would be reached at {ours}, and the one that coordinates the job is at {theirs}: a loopback \
         address cannot be reached from another machine; set UNISONO_INTERFACE to one that can, on each"
    )]
    OutOfReach {
        /// Of this machine.
        ours: IpAddr,
        /// Of the one that coordinates.
        theirs: IpAddr,
    },
    /// No numbers are left.
    #[error("the job has used up all numbers of workers; choose another --job name")]
    Numbers,
}

impl Record {
    /// Reads what was kept; `None` if this version of Unisono has not written it.
    pub fn parse(bytes: &[u8]) -> Option<Record> {
        let record: Record = serde_json::from_slice(bytes).ok()?;
        (record.version == VERSION).then_some(record)
    }

    /// What is kept.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record is plain data")
    }

    /// Adds a launcher to a job, which begins with it if there is none; its place, and the new record.
    pub fn join(
        record: Option<Record>,
        applicant: Applicant,
    ) -> Result<(Machine, Record), JoinRefused> {
        let Applicant { id, workers, address, host, least, most, token, proof, settings } =
            applicant;
        let place = |number, first| Machine { number, first, workers, address, host: host.clone() };
        let Some(record) = record else {
            let leader = place(0, 0);
            let record = Record {
                version: VERSION,
                id,
                epoch: 0,
                members: Vec::new(),
                leader: leader.clone(),
                newest: leader.clone(),
                machines: 1,
                workers,
                least,
                most,
                proof: proof.or(token.as_deref().map(proof_of)).unwrap_or_default(),
                settings,
                token,
                is_complete: false,
            };
            return Ok((leader, record));
        };
        if record.is_complete {
            return Err(JoinRefused::Complete);
        }
        if (record.least, record.most) != (least, most) {
            return Err(JoinRefused::Range { least: record.least, most: record.most });
        }
        if record.token.is_some() != token.is_some() {
            return Err(JoinRefused::Token);
        }
        if proof.is_some_and(|proof| proof != record.proof) {
            return Err(JoinRefused::OtherToken);
        }
        if let Some((theirs, ours)) = difference(&record.settings, &settings) {
            return Err(JoinRefused::Settings { theirs, ours });
        }
        let is_loopback = |address: &SocketAddr| address.ip().is_loopback();
        let theirs = &record.leader;
        if theirs.host != host && (is_loopback(&address) || is_loopback(&theirs.address)) {
            let (ours, theirs) = (address.ip(), theirs.address.ip());
            return Err(JoinRefused::OutOfReach { ours, theirs });
        }
        let end = record.workers.checked_add(workers).filter(|end| *end <= MAX_WORLD);
        let end = end.ok_or(JoinRefused::Numbers)?;
        let place = place(record.machines, record.workers);
        let machines = record.machines.checked_add(1).ok_or(JoinRefused::Numbers)?;
        let newest = place.clone();
        Ok((place, Record { newest, machines, workers: end, ..record }))
    }
}

/// What tells one token from another, and does not give it away.
pub fn proof_of(token: &str) -> String {
    blake3::derive_key("unisono machines v1: proof of a token", token.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The words by which two texts differ.
fn difference(theirs: &str, ours: &str) -> Option<(String, String)> {
    let only = |of: &str, not: &str| {
        let not: Vec<&str> = not.split(", ").collect();
        let words: Vec<&str> = of.split(", ").filter(|word| !not.contains(word)).collect();
        words.join(", ")
    };
    (theirs != ours).then(|| (only(theirs, ours), only(ours, theirs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applicant() -> Applicant {
        Applicant {
            id: "j".into(),
            workers: 2,
            address: "10.0.0.1:4000".parse().unwrap(),
            host: "a".into(),
            least: 1,
            most: 8,
            token: Some("t".into()),
            proof: None,
            settings: "timeout 2 s, streams 1".into(),
        }
    }

    #[test]
    fn the_first_launcher_leads_and_each_gets_numbers_of_its_own() {
        let (first, record) = Record::join(None, applicant()).unwrap();
        assert_eq!((first.number, first.first, record.leader.number), (0, 0, 0));
        let (second, record) = Record::join(Some(record), applicant()).unwrap();
        assert_eq!((second.number, second.first, record.leader.number), (1, 2, 0));
        assert_eq!((record.machines, record.workers), (2, 4));
        let has = |number| second.has(WorkerId { number, life: 3 });
        assert_eq!([0, 1, 2, 3, 4].map(has), [false, false, true, true, false]);
        assert_eq!(Record::parse(&record.to_bytes()), Some(record));
    }

    #[test]
    fn launchers_that_do_not_fit_are_refused() {
        let (_, record) = Record::join(None, applicant()).unwrap();
        let refused =
            |record: &Record, applicant| Record::join(Some(record.clone()), applicant).unwrap_err();
        let other = Applicant { most: 4, ..applicant() };
        assert_eq!(refused(&record, other), JoinRefused::Range { least: 1, most: 8 });
        let other = Applicant { token: None, ..applicant() };
        assert_eq!(refused(&record, other), JoinRefused::Token);
        let other = Applicant { settings: "timeout 5 s, streams 1".into(), ..applicant() };
        let (theirs, ours) = ("timeout 2 s".to_owned(), "timeout 5 s".to_owned());
        assert_eq!(refused(&record, other), JoinRefused::Settings { theirs, ours });
        let given = Applicant { token: None, proof: Some(proof_of("u")), ..applicant() };
        let (_, of_token) = Record::join(None, given.clone()).unwrap();
        assert!(Record::join(Some(of_token.clone()), given.clone()).is_ok());
        let other = Applicant { proof: Some(proof_of("v")), ..given };
        assert_eq!(refused(&of_token, other), JoinRefused::OtherToken);
        let local = Applicant {
            address: "127.0.0.1:4000".parse().unwrap(),
            host: "b".into(),
            ..applicant()
        };
        assert!(matches!(refused(&record, local.clone()), JoinRefused::OutOfReach { .. }));
        // One machine may have several launchers.
        assert!(
            Record::join(Some(record.clone()), Applicant { host: "a".into(), ..local }).is_ok()
        );
        let full = Record { workers: MAX_WORLD - 1, ..record.clone() };
        assert_eq!(refused(&full, applicant()), JoinRefused::Numbers);
        let complete = Record { is_complete: true, ..record };
        assert_eq!(refused(&complete, applicant()), JoinRefused::Complete);
        assert_eq!(Record::parse(b"{}"), None);
    }
}
