//! The connections of a rank with all others, through NCCL.
//!
//! Its calls do not block: NCCL goes on in a thread of its own, and a rank looks now and then how far it is
//! ([`Communicator::is_ready`]). Between two looks the rank can find that its group is over, and *abort* the
//! communicator: NCCL then ends what it has on the device, also if the other ranks are gone.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use unisono_collective::{Dtype, Reduction};

use super::error::NcclError;
use super::library::{BYTES, Config, IN_PROGRESS, INVALID_USAGE, Nccl, RawComm, SUCCESS, UniqueId};
use crate::library::DevicePtr;
use crate::stream::Stream;

/// How long a communicator that is no longer used may take to end by itself before it is aborted. Longer: a
/// rank whose peers are stuck leaves later. Shorter: what a busy machine still sends may be lost.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long to sleep between two looks at a communicator that forms or ends.
const NAP: Duration = Duration::from_millis(1);

/// One rank's end of a communicator. The context of its device is current whenever it is used.
pub struct Communicator {
    nccl: Nccl,
    /// `None` once it is destroyed or aborted.
    raw: Option<RawComm>,
    /// The process that made it: in a child that is forked later, it is the parent's.
    process: u32,
}

impl Communicator {
    /// What all ranks need to find each other, made by one of them.
    pub fn unique_id(nccl: &Nccl) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: NCCL writes as many bytes.
        unsafe { nccl.unique_id(&mut id)? };
        Ok(id)
    }

    /// Forms the communicator with the other ranks, which do the same, as long as `go_on` says so.
    pub fn form(
        nccl: &Nccl,
        id: UniqueId,
        rank: usize,
        world: usize,
        go_on: impl Fn() -> Result<(), NcclError>,
    ) -> Result<Communicator, NcclError> {
        let mut raw = RawComm(std::ptr::null_mut());
        let mut config = Config::NON_BLOCKING;
        let process = std::process::id();
        // SAFETY: the place for the result and the settings are here; NCCL copies the settings.
        let begun =
            unsafe { nccl.init(&mut raw, world as c_int, id, rank as c_int, &raw mut config) };
        let raw = Some(raw).filter(|raw| !raw.0.is_null());
        let communicator = Communicator { nccl: nccl.clone(), raw, process };
        begun?;
        while !communicator.is_ready("ncclCommInitRankConfig")? {
            go_on()?;
            std::thread::sleep(NAP);
        }
        Ok(communicator)
    }

    /// Whether NCCL has done what it was asked for, as far as that happens on the host; `Err` if it, or something
    /// on the way to the others, has failed since. `during` names what was asked for.
    pub fn is_ready(&self, during: &'static str) -> Result<bool, NcclError> {
        let raw = self.raw(during)?;
        let mut status = SUCCESS;
        // SAFETY: the communicator is alive, and NCCL writes its status.
        unsafe { self.nccl.async_error(raw, &mut status)? };
        match status {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(self.nccl.error(during, code)),
        }
    }

    /// Begins an exchange of messages, all of which make progress together. Until the communicator
    /// is ready nothing else can be asked of it.
    ///
    /// # Safety
    /// Each message is device memory, valid for its bytes until the stream has come to the end of the exchange;
    /// nothing else writes it, or touches what is received, meanwhile.
    pub unsafe fn exchange(&self, messages: &[Message], stream: &Stream) -> Result<(), NcclError> {
        let raw = self.raw("ncclGroupStart")?;
        // SAFETY: the group is ended below, on the same thread.
        unsafe { self.nccl.group_start()? };
        let post = |message: &Message| {
            let Message { way, peer, at, bytes } = *message;
            let (peer, stream) = (peer as c_int, stream.raw());
            // SAFETY: the caller's promise.
            unsafe {
                match way {
                    Way::To => self.nccl.send(at, bytes, BYTES, peer, raw, stream),
                    Way::From => self.nccl.receive(at, bytes, BYTES, peer, raw, stream),
                }
            }
        };
        let posted = messages.iter().try_for_each(post);
        // SAFETY: begun above.
        let ended = unsafe { self.nccl.group_end() };
        posted.and(ended)
    }

    /// Begins NCCL's own all-gather: this rank's bytes are in their place among those of all ranks, one rank's behind the
    /// other's. Until the communicator is ready nothing else can be asked of it.
    ///
    /// # Safety
    /// As of [`Communicator::exchange`], for the bytes of all ranks.
    pub unsafe fn gather(&self, gather: Gather, stream: &Stream) -> Result<(), NcclError> {
        let raw = self.raw("ncclAllGather")?;
        let Gather { own, all, bytes } = gather;
        // SAFETY: the caller's promise.
        unsafe { self.nccl.all_gather(own, all, bytes, BYTES, raw, stream.raw()) }
    }

    /// Begins NCCL's own reduction, in an order of its own choosing. Until the communicator is ready nothing
    /// else can be asked of it.
    ///
    /// # Safety
    /// As of [`Communicator::exchange`], for so many elements of both.
    pub unsafe fn all_reduce(
        &self,
        from: DevicePtr,
        into: DevicePtr,
        count: usize,
        (dtype, reduction): (NcclType, NcclReduction),
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let raw = self.raw("ncclAllReduce")?;
        // SAFETY: the caller's promise.
        unsafe { self.nccl.all_reduce(from, into, count, dtype.0, reduction.0, raw, stream.raw()) }
    }

    /// NCCL's name of it, while there is one.
    fn raw(&self, call: &'static str) -> Result<RawComm, NcclError> {
        self.raw.ok_or_else(|| self.nccl.error(call, INVALID_USAGE))
    }

    /// Ends it at once, and with it what it has on the device; it is of no use afterwards.
    pub fn abort(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        if std::process::id() != self.process {
            return;
        }
        // SAFETY: the communicator is alive, and this is its last use.
        if let Err(error) = unsafe { self.nccl.abort(raw) } {
            log::debug!("{error}");
        }
    }

    /// Ends it in an orderly way, for when all ranks are done with it; aborts it where that takes too long, or
    /// where `is_over` says that other ranks are gone.
    pub fn leave(&mut self, is_over: impl Fn() -> bool) {
        let Some(raw) = self.raw else { return };
        if std::process::id() != self.process || is_over() {
            return self.abort();
        }
        let deadline = Instant::now() + FAREWELL;
        // SAFETY: the communicator is alive, and nothing is under way.
        let mut ended = unsafe { self.nccl.finalize(raw) };
        while ended.is_ok() {
            match self.is_ready("ncclCommFinalize") {
                Ok(true) => break,
                Ok(false) if is_over() || Instant::now() > deadline => return self.abort(),
                Ok(false) => std::thread::sleep(NAP),
                Err(error) => ended = Err(error),
            }
        }
        if let Err(error) = ended {
            log::debug!("{error}");
            return self.abort();
        }
        self.raw = None;
        // SAFETY: it is finalized, and this is its last use.
        if let Err(error) = unsafe { self.nccl.destroy(raw) } {
            log::debug!("{error}");
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

/// A message to or from another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub way: Way,
    pub peer: usize,
    pub at: DevicePtr,
    pub bytes: usize,
}

/// Messages by which every rank sends its bytes to all others, and gets theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gather {
    /// This rank's bytes, among those of all.
    pub own: DevicePtr,
    pub all: DevicePtr,
    /// Bytes of each rank.
    pub bytes: usize,
}

impl Gather {
    /// The gather that the messages of a rank are, if they are one.
    pub fn of(messages: &[Message], rank: usize, world: usize) -> Option<Gather> {
        let Message { at: own, bytes, .. } = *messages.iter().find(|it| it.way == Way::To)?;
        let all = DevicePtr(own.0.checked_sub((rank * bytes) as u64)?);
        let belongs = |message: &Message| {
            let at = match message.way {
                Way::To => own,
                Way::From => all.offset(message.peer * bytes),
            };
            message.bytes == bytes && message.at == at
        };
        let is_gather = messages.len() == 2 * (world - 1) && messages.iter().all(belongs);
        is_gather.then_some(Gather { own, all, bytes })
    }
}

/// Where a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    To,
    From,
}

/// An `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclType(c_int);

/// An `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclReduction(c_int);

/// How NCCL names a reduction, if it has one that may stand for ours where the order of additions does not
/// matter: of floats, those whose rules about NaN and about dividing leave no other choice.
pub fn own_reduction(dtype: Dtype, reduction: Reduction) -> Option<(NcclType, NcclReduction)> {
    let dtype = match dtype {
        Dtype::F16 => 6,
        Dtype::F32 => 7,
        Dtype::F64 => 8,
        Dtype::Bf16 => 9,
        Dtype::I8 | Dtype::U8 | Dtype::I32 | Dtype::I64 => return None,
    };
    let reduction = match reduction {
        Reduction::Sum => 0,
        Reduction::Product => 1,
        Reduction::Mean => 4,
        _ => return None,
    };
    Some((NcclType(dtype), NcclReduction(reduction)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What rank 1 of three sends and gets, with blocks of so many bytes at the address 1000.
    fn messages(blocks: [usize; 3]) -> Vec<Message> {
        let begins = [1000, 1000 + blocks[0], 1000 + blocks[0] + blocks[1]];
        let message = |way, peer: usize, block: usize| {
            let at = DevicePtr(begins[block] as u64);
            Message { way, peer, at, bytes: blocks[block] }
        };
        let to = [message(Way::To, 0, 1), message(Way::To, 2, 1)];
        let from = [message(Way::From, 0, 0), message(Way::From, 2, 2)];
        to.into_iter().chain(from).collect()
    }

    #[test]
    fn equal_blocks_in_a_row_are_a_gather() {
        let gather = Gather { own: DevicePtr(1064), all: DevicePtr(1000), bytes: 64 };
        assert_eq!(Gather::of(&messages([64; 3]), 1, 3), Some(gather));
    }

    #[test]
    fn other_messages_are_none() {
        assert_eq!(Gather::of(&messages([64, 64, 60]), 1, 3), None);
        assert_eq!(Gather::of(&messages([60, 64, 64]), 1, 3), None);
        assert_eq!(Gather::of(&messages([64; 3])[..3], 1, 3), None);
        assert_eq!(Gather::of(&messages([64; 3]), 1, 4), None);
        assert_eq!(Gather::of(&[], 0, 1), None);
        let mut apart = messages([64; 3]);
        apart[3].at = DevicePtr(5000);
        assert_eq!(Gather::of(&apart, 1, 3), None);
    }
}
