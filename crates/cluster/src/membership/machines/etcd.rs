//! Keeps the record of a job in etcd.

use std::time::Duration;

use super::clerk::{Replaced, Store, StoreError};
use super::launcher::Status;
use super::record::Record;
use crate::etcd::{Etcd, EtcdError, Until, Versioned, Written};

/// How long one request may take before the caller looks whether it is still wanted. Longer: a launcher ends
/// later while etcd is away. Shorter: an etcd that is slow is asked again and again.
const PATIENCE: Duration = Duration::from_secs(2);

/// The record of one job, in etcd.
pub struct EtcdRecord {
    etcd: Etcd,
    record: String,
    status: String,
}

impl EtcdRecord {
    /// Of the job with this name.
    pub fn new(etcd: Etcd, job: &str) -> EtcdRecord {
        let key = |what: &str| format!("/unisono/jobs/{job}/{what}");
        EtcdRecord { etcd, record: key("record"), status: key("status") }
    }

    /// The record, and what the leader has published, if there are any.
    pub fn look(&self) -> Result<(Option<Record>, Option<Status>), EtcdError> {
        let read = |key: &str| self.etcd.read(key, Until::within(PATIENCE));
        let record = read(&self.record)?.and_then(|found| Record::parse(&found.value));
        let status = read(&self.status)?;
        let status = status.and_then(|found| serde_json::from_slice(&found.value).ok());
        Ok((record, status))
    }
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

    fn publish(&self, value: &[u8]) {
        let until = Until::within(PATIENCE);
        let published = self.etcd.read(&self.status, until).and_then(|found| {
            let revision = found.map_or(0, |found| found.revision);
            self.etcd.write_if(&self.status, revision, value, until)
        });
        if let Err(error) = published {
            log::debug!("what `unisono status` shows is not up to date: {error}");
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
