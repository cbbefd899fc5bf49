//! A group of ranks that moves and reduces bytes.
//!
//! ```
//! use unisono_collective::{Group, Options, Reduction};
//!
//! let groups = Group::local(4, &Options::default())?;
//! std::thread::scope(|scope| {
//!     for group in &groups {
//!         scope.spawn(move || {
//!             let mut gradient = vec![group.rank() as f32; 1000];
//!             group.all_reduce(&mut gradient, Reduction::Mean).expect("all ranks are here");
//!             assert_eq!(gradient[0], 1.5);
//!         });
//!     }
//! });
//! # Ok::<(), unisono_collective::FormError>(())
//! ```
//!
//! From the caller to the wire: [`Group`] queues calls, its [`engine`] chooses an algorithm by
//! [`cost`], the algorithm's [`schedule`] says what to do, and `window` (shared memory) and
//! `link` (sockets) do it with the [`kernel`]s. Beside them, `control` watches over the peers, and
//! [`fabric`] makes the connections, each of which proves the job's token ([`unisono_net::handshake`]).

mod buffers;
pub mod call;
mod control;
pub mod cost;
pub mod dtype;
pub mod engine;
pub mod error;
mod excerpt;
pub mod fabric;
mod group;
mod helpers;
mod history;
pub mod kernel;
mod link;
mod memory;
mod messages;
pub mod options;
mod patience;
mod places;
mod regions;
mod registered;
mod request;
pub mod schedule;
pub mod shards;
mod state;
mod traffic;
pub mod tree;
mod waits;
mod window;
mod work;

pub use call::Call;
pub use dtype::{Dtype, Element, Reduction, Unit};
pub use engine::{Engine, Explanation};
pub use error::{CircleWait, Error, FormError, InvalidCall, Loss};
pub use group::{AbortHandle, Group, Owned};
pub use options::{BadSetting, Options, Transport};
pub use registered::Registered;
pub use request::{Address, Checked, Request};
pub use schedule::{Algorithm, Op};
pub use state::Epoch;
pub use traffic::Traffic;
pub use unisono_net::rank::{Listed, Rank};
pub use work::{Pending, Work};

/// For the tests and the fuzz targets of this crate only.
#[doc(hidden)]
pub mod internals {
    pub use crate::control::{frame, news, overlay, reason};
    pub use crate::fabric::gathering;
    pub use crate::helpers::{Board, serve, share};
    pub use crate::messages::frame as message_frame;
    pub use crate::window::clock;
}
