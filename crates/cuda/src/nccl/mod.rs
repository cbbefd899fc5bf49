//! NCCL as an engine: collectives between GPUs of any hosts, with canonical bits.
//!
//! NCCL moves bytes, over NVLink, PCIe, InfiniBand or sockets, as it finds them; what is reduced is reduced by our own
//! [folds](crate::fold). The ranks do what the [rounds](unisono_collective::schedule::Rounds) of a schedule say:
//! the messages of a round are one group of NCCL's sends and receives, and then the device folds what has
//! arrived. An all-reduce is the pairwise exchange: each rank gets its part of the buffer from all others, folds
//! all inputs at once in the order of the canonical tree, and sends the result to all: the bytes of a
//! ring, the bits of the tree, for any world and count. For little data every rank gets all inputs and folds
//! everything for itself, which saves a group ([`NcclCosts`] says when). A call that is larger than
//! the scratch memory goes through it in segments, whose messages and folds overlap (`run.rs`).
//!
//! Where canonical bits are [switched off](unisono_collective::Options::canonical), an all-reduce of floats is
//! NCCL's own.
//!
//! **Agreement.** Messages of NCCL have no headers. So the ranks meet on their hosts before every call, and
//! compare what they call ([`HostEngine::meet`](unisono_collective::engine::HostEngine::meet)): a rank that does not
//! come, or calls something else, is found there and named, as in every group.
//!
//! **Failure.** NCCL's kernels wait for other ranks on the device. A call therefore ends on the host when the device
//! has done it, also one [on a stream](unisono_collective::Request::on_stream): were it to return before, a rank that
//! dies later would leave a wrong result that no error tells of. No host waits inside of NCCL: its calls do not
//! block, and a rank that waits for it, or for the device, looks whether its group is over. If so it
//! aborts the communicator, which frees the device of its kernels.
//!
//! **Libraries.** NCCL is loaded when a group forms, from where `UNISONO_NCCL` says or where it is usually found. A
//! child that is forked leaves it to its parent.

mod communicator;
mod cost;
mod engine;
mod error;
mod library;
mod measure;
mod opening;
mod places;
mod run;

use std::path::PathBuf;
use std::sync::Arc;

use unisono_collective::engine::{Engine, MakeEngine};

use crate::device::Device;
use crate::error::CudaError;

pub use cost::NcclCosts;
pub use engine::NcclEngine;
pub(crate) use engine::{connect, connect_with, price};
pub use error::{Looked, NcclError, NcclVersion};
pub use places::NCCL_VARIABLE;
pub(crate) use run::Lane;

/// How the engine works. Equal on all ranks of a group, but for the library.
#[derive(Clone, Debug, PartialEq)]
pub struct NcclOptions {
    /// NCCL's library, in place of all that would be looked for.
    pub library: Option<PathBuf>,
    /// Bytes of device memory for what other ranks send to be folded. Larger: more device memory. Smaller: more
    /// segments, each with its groups of messages.
    pub scratch: usize,
    /// By which algorithms are chosen; by default those that are measured when the group forms.
    pub costs: Option<NcclCosts>,
}

impl Default for NcclOptions {
    fn default() -> NcclOptions {
        NcclOptions { library: None, scratch: 128 << 20, costs: None }
    }
}

/// Which NCCL a group would load here.
pub fn version(options: &NcclOptions) -> Result<(NcclVersion, String), NcclError> {
    let library = options.library.as_ref().map(|path| path.as_os_str());
    library::Nccl::load(library).map(|nccl| (nccl.version(), nccl.library().to_owned()))
}

/// An engine for calls on host memory and on memory of a device, which each rank names when the group forms.
/// To be given to [`Group::with_engine`](unisono_collective::Group::with_engine) by all ranks.
///
/// If a rank has no device or no NCCL, or NCCL refuses its device, the group does not form: all ranks get
/// [`FormError::Device`](unisono_collective::FormError::Device).
pub fn nccl_engine(
    device: impl Fn() -> Result<Device, CudaError> + Send + Sync + 'static,
    options: NcclOptions,
) -> Arc<MakeEngine> {
    Arc::new(move |host| {
        let engine = NcclEngine::open(host, &device, options.clone())?;
        Ok(Box::new(engine) as Box<dyn Engine>)
    })
}
