//! Keeps the record of a job in etcd.

use std::time::Duration;

use super::clerk::{Replaced, Store, StoreError};
use super::launcher::Status;
use super::record::Record;
use crate::etcd::{Etcd, EtcdError, Until, Versioned, Written};

/// How long one request may take before the caller looks whether it is still wanted. Longer: a launcher ends
/// later while etcd is away. Shorter: an etcd that is slow is asked again and again.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest result that is kept: etcd takes requests of at most 1.5 MiB, which are longer than their values.
const LONGEST_RESULT: usize = 1 << 20;

/// The record of one job, in etcd.
pub struct EtcdRecord {
    etcd: Etcd,
    record: String,
    status: String,
    result: String,
}

impl EtcdRecord {
    /// Of the job with this name.
    pub fn new(etcd: Etcd, job: &str) -> EtcdRecord {
        let key = |what: &str| format!("/unisono/jobs/{job}/{what}");
        EtcdRecord { etcd, record: key("record"), status: key("status"), result: key("result") }
    }

    /// What is kept of the job.
    pub fn look(&self) -> Result<Kept, EtcdError> {
        let read = |key: &str| self.etcd.read(key, Until::within(PATIENCE));
        let record = read(&self.record)?;
        let is_unreadable = record.as_ref().is_some_and(|it| Record::parse(&it.value).is_none());
        let record = record.and_then(|found| Record::parse(&found.value));
        let status = read(&self.status)?;
        let status = status.and_then(|found| serde_json::from_slice(&found.value).ok());
        let result = read(&self.result)?.map(|found| found.value);
        Ok(Kept { record, is_unreadable, status, result })
    }

    /// Writes a key, whatever it holds.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), EtcdError> {
        let until = Until::within(PATIENCE);
        loop {
            let revision = self.etcd.read(key, until)?.map_or(0, |found| found.revision);
            if let Written::Done { .. } = self.etcd.write_if(key, revision, value, until)? {
                return Ok(());
            }
        }
    }
}

/// What is kept of a job.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The record, if there is one.
    pub record: Option<Record>,
    /// Whether there is something else in its place.
    pub is_unreadable: bool,
    /// What the leader has published.
    pub status: Option<Status>,
    /// The result, once rank 0 has handed it in.
    pub result: Option<Vec<u8>>,
}

impl Store for EtcdRecord {
    fn read(&self) -> Result<Option<(Vec<u8>, u64)>, StoreError> {
        let found = self.etcd.read(&self.record, Until::within(PATIENCE)).map_err(store_error)?;
        Ok(found.map(pair))
    }

    fn replace(&self, revision: u64, value: &[u8]) -> Result<Replaced, StoreError> {
        let written = self.etcd.write_if(&self.record, revision, value, Until::within(PATIENCE));
        Ok(match written.map_err(store_error)? {
            Written::Done { revision } => Replaced::Done(revision),
            // An earlier attempt of this launcher has been carried out: no other writes the same.
            Written::Conflict(Some(found)) if found.value == value && found.revision > revision => {
                Replaced::Done(found.revision)
            }
            Written::Conflict(found) => Replaced::Other(found.map(pair)),
        })
    }

    fn publish(&self, status: &Status) {
        let until = Until::within(PATIENCE);
        let value = serde_json::to_vec(status).expect("a status is plain data");
        let published = self.etcd.read(&self.status, until).and_then(|found| {
            let kept: Option<Status> =
                found.as_ref().and_then(|found| serde_json::from_slice(&found.value).ok());
            let revision = found.map_or(0, |found| found.revision);
            // A launcher that was stopped, and leads no more, may not know it yet.
            match kept.is_some_and(|kept| {
                (kept.is_complete, kept.epoch) > (status.is_complete, status.epoch)
            }) {
                true => Ok(()),
                false => self.etcd.write_if(&self.status, revision, &value, until).map(drop),
            }
        });
        if let Err(error) = published {
            log::debug!("what `unisono status` shows is not up to date: {error}");
        }
    }

    fn keep_result(&self, result: &[u8]) -> Result<(), StoreError> {
        match result.len() > LONGEST_RESULT {
            true => Ok(()),
            false => self.put(&self.result, result).map_err(store_error),
        }
    }
}

fn pair(found: Versioned) -> (Vec<u8>, u64) {
    (found.value, found.revision)
}

fn store_error(error: EtcdError) -> StoreError {
    match error {
        EtcdError::Unreachable { .. } | EtcdError::Aborted { .. } => {
            StoreError::Unavailable(error.to_string())
        }
        _ => StoreError::Refused(error.to_string()),
    }
}
