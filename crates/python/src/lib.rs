//! The module `unisono._native`: the engine, for Python.
//!
//! Python hands over addresses. For a call that is waited for, the caller keeps the memory behind
//! them alive; for one that is started, the engine is given a reference to its owner (`keep`) until
//! the call has ended. Nothing here holds the interpreter's lock while it waits, moves or reduces.
//!
//! `unisono/_native.pyi` has the same interface with Python's types.

mod allocated;
mod closable;
mod deadline;
mod device;
mod dispatch;
mod elastic;
mod endpoint;
mod error;
mod following;
mod group;
mod handover;
mod insight;
mod memory;
mod request;
mod server;
mod signals;
mod sync;
mod work;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::allocated::Allocated;
    #[pymodule_export]
    use super::elastic::ElasticJob;
    #[pymodule_export]
    use super::endpoint::{Endpoint, new_token};
    #[pymodule_export]
    use super::following::{Copies, hash_parts};
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::handover::{exchange, receive_state, send_state};
    #[pymodule_export]
    use super::insight::{Stamp, write_report};
    #[pymodule_export]
    use super::request::{Call, Origin};
    #[pymodule_export]
    use super::server::{InProcessServer, ServerClient, worker_from_env};
    #[pymodule_export]
    use super::sync::{DeviceExchange, DeviceSums, LocalSteps, Sums, Synchronizer, shards_of};
    #[pymodule_export]
    use super::work::Work;

    /// Shows the engine's warnings, such as which rank keeps a call waiting.
    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        let level = env_logger::Env::default().filter_or("UNISONO_LOG", "warn");
        // Fails only where the module was loaded before, and has its logger already.
        let _ = env_logger::Builder::from_env(level).try_init();
        Ok(())
    }
}
