//! What a rank called: compared between ranks, named in errors and reports.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::dtype::{Dtype, Reduction, Unit};
use crate::schedule::{Algorithm, Op};

/// One collective call of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Its place in the order of the group: `2n + 1` for call `n`, from 1; `2n` for the exchange of
    /// lengths with which an all-to-all of unequal blocks begins; 1 for what a group runs to measure
    /// itself.
    pub seq: u32,
    /// The operation.
    pub op: Op,
    /// Whether it is a barrier: an all-reduce of nothing.
    pub barrier: bool,
    /// The element type.
    pub dtype: Dtype,
    /// What the caller counts in.
    pub unit: Unit,
    /// The reduction; [`Reduction::Sum`] where nothing is reduced.
    pub reduction: Reduction,
    /// Elements in the buffer that is equal on all ranks, or of the longest block.
    pub count: u64,
    /// A hash of the blocks' lengths where all ranks know them and they differ, or of the place of the buffer
    /// where ranks read it in place; else 0.
    pub shape: u64,
    /// The algorithm this rank chose.
    pub algorithm: Algorithm,
    /// Elements of a column.
    pub column: u32,
}

impl Call {
    /// The place of what a group runs to measure itself.
    pub const MEASURING: u32 = 1;

    /// The number of the call after the one with this number; 0 comes before the first. After the
    /// last, numbers begin again at 1.
    pub(crate) fn after(number: u32) -> u32 {
        if number >= u32::MAX / 2 { 1 } else { number + 1 }
    }

    /// The place of a call with this number, and, before it, of its exchange of lengths.
    pub(crate) fn places(number: u32) -> [u32; 2] {
        [2 * number + 1, 2 * number]
    }

    /// The shape of a call on a place of registered memory: the highest bit says so.
    pub(crate) fn in_registered(allocation: u64, offset: u64) -> u64 {
        shape([allocation, offset]) | REGISTERED
    }

    /// The shape of a call on blocks of these lengths.
    pub(crate) fn with_lengths(counts: &[usize]) -> u64 {
        shape(counts.iter().map(|count| *count as u64)) & !REGISTERED | 1
    }

    /// Whether ranks read the buffers in place.
    pub(crate) fn is_in_registered(&self) -> bool {
        self.shape & REGISTERED != 0
    }

    /// A hash in which two different calls differ, but for one chance in 2⁶⁴.
    pub fn fingerprint(&self) -> u64 {
        let wire = WireCall::from(*self);
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for word in wire.as_bytes().chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().expect("chunks of eight"));
            hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 29;
        }
        hash
    }

    /// The number of the call in its group, as users count: from 1.
    pub fn number(&self) -> u32 {
        self.seq / 2
    }

    /// Whether it is the exchange of lengths before an all-to-all of unequal blocks.
    pub fn is_exchange_of_lengths(&self) -> bool {
        self.seq.is_multiple_of(2)
    }

    /// The name of the function that makes such a call.
    pub fn name(&self) -> &'static str {
        match self {
            Call { barrier: true, .. } => "barrier",
            _ if self.is_exchange_of_lengths() => Op::AllToAll.function(),
            _ => self.op.function(),
        }
    }

    /// What to add to each of two calls that differ in nothing that their texts show.
    pub(crate) fn hidden_difference(&self, other: &Call) -> [String; 2] {
        if self.is_in_registered() != other.is_in_registered() {
            let memory = |call: &Call| if call.is_in_registered() { "registered" } else { "other" };
            return [self, other].map(|call| format!(" in {} memory", memory(call)));
        }
        if self.is_in_registered() && self.shape != other.shape {
            return [self, other].map(|_| " at another place of registered memory".into());
        }
        if self.algorithm != other.algorithm {
            return [self, other].map(|call| format!(" by the algorithm {}", call.algorithm));
        }
        if self.shape != other.shape {
            return [self, other].map(|_| " with other lengths per rank".into());
        }
        [self, other].map(|call| format!(" in segments of {} elements", call.column))
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} #{}", self.name(), self.number())?;
        if self.barrier {
            return Ok(());
        }
        if self.is_exchange_of_lengths() {
            return write!(f, " with a length for each rank");
        }
        let (count, name) = self.unit.seen(self.count, self.dtype);
        let is_equal = self.shape == 0 || self.is_in_registered();
        write!(f, " of {}{count} {name}", if is_equal { "" } else { "up to " })?;
        if self.op.has_blocks() {
            write!(f, " per rank")?;
        }
        if matches!(self.op, Op::AllReduce | Op::ReduceScatter | Op::Reduce { .. }) {
            write!(f, " by {}", self.reduction)?;
        }
        match self.op.root() {
            Some(root) => write!(f, " with root {root}"),
            None => Ok(()),
        }
    }
}

/// A hash of some numbers.
fn shape(numbers: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |hash: u64, number: u64| {
        (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    numbers.into_iter().fold(0, mix)
}

/// A [`Call`] as it travels.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireCall {
    seq: U32,
    op: u8,
    /// The type in the lower three bits, the unit in the others.
    dtype: u8,
    reduction: u8,
    algorithm: u8,
    root: U32,
    column: U32,
    count: U64,
    shape: U64,
}

const BARRIER: u8 = 0x80;

/// In the shape of a call: ranks read the buffers in place.
const REGISTERED: u64 = 1 << 63;

const TYPE_BITS: u8 = 3;
const _: () = assert!(Dtype::ALL.len() <= 1 << TYPE_BITS);

impl From<Call> for WireCall {
    fn from(call: Call) -> WireCall {
        WireCall {
            seq: call.seq.into(),
            op: call.op.code() | if call.barrier { BARRIER } else { 0 },
            dtype: call.dtype as u8 | call.unit.code() << TYPE_BITS,
            reduction: call.reduction as u8,
            algorithm: call.algorithm as u8,
            root: (call.op.root().unwrap_or(0) as u32).into(),
            column: call.column.into(),
            count: call.count.into(),
            shape: call.shape.into(),
        }
    }
}

impl TryFrom<WireCall> for Call {
    type Error = MalformedCall;
    fn try_from(wire: WireCall) -> Result<Call, MalformedCall> {
        let op =
            Op::from_code(wire.op & !BARRIER, wire.root.get() as usize).ok_or(MalformedCall)?;
        Ok(Call {
            seq: wire.seq.get(),
            op,
            barrier: wire.op & BARRIER != 0,
            dtype: Dtype::from_code(wire.dtype & ((1 << TYPE_BITS) - 1)).ok_or(MalformedCall)?,
            unit: Unit::from_code(wire.dtype >> TYPE_BITS).ok_or(MalformedCall)?,
            reduction: Reduction::from_code(wire.reduction).ok_or(MalformedCall)?,
            count: wire.count.get(),
            shape: wire.shape.get(),
            algorithm: *Algorithm::ALL.get(usize::from(wire.algorithm)).ok_or(MalformedCall)?,
            column: wire.column.get(),
        })
    }
}

/// A [`Call`] inside of a serialized message, as [`WireCall`].
pub(crate) mod wire {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    use super::{Call, WireCall};

    pub fn serialize<S: Serializer>(call: &Call, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes: [u8; size_of::<WireCall>()] = zerocopy::transmute!(WireCall::from(*call));
        bytes.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Call, D::Error> {
        let bytes = <[u8; size_of::<WireCall>()]>::deserialize(deserializer)?;
        let wire: WireCall = zerocopy::transmute!(bytes);
        Call::try_from(wire).map_err(Error::custom)
    }
}

/// Bytes that are no call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed call")]
pub struct MalformedCall;

/// Precedes every message on a link.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MessageHeader {
    /// The call the message belongs to.
    pub call: WireCall,
    /// The segment.
    pub segment: U32,
    /// The round.
    pub round: U32,
    /// Which of the messages of this round to this peer.
    pub index: U32,
    /// Bytes that follow.
    pub length: U32,
}

impl MessageHeader {
    /// Bytes of a header.
    pub const SIZE: usize = size_of::<MessageHeader>();
}

impl Op {
    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all-reduce",
            Op::ReduceScatter => "reduce-scatter",
            Op::AllGather => "all-gather",
            Op::Broadcast { .. } => "broadcast",
            Op::Reduce { .. } => "reduce",
            Op::Gather { .. } => "gather",
            Op::Scatter { .. } => "scatter",
            Op::AllToAll => "all-to-all",
        }
    }

    /// The name of the function, in Rust and in Python, that calls it.
    pub const fn function(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllGather => "all_gather",
            Op::AllToAll => "all_to_all",
            Op::Broadcast { .. } | Op::Reduce { .. } | Op::Gather { .. } | Op::Scatter { .. } => {
                self.name()
            }
        }
    }

    /// The root, where there is one.
    pub const fn root(self) -> Option<usize> {
        match self {
            Op::Broadcast { root } | Op::Reduce { root } => Some(root),
            Op::Gather { root } | Op::Scatter { root } => Some(root),
            Op::AllReduce | Op::ReduceScatter | Op::AllGather | Op::AllToAll => None,
        }
    }

    /// The operation with another root, where it has one.
    pub(crate) fn with_root(self, root: usize) -> Op {
        Op::from_code(self.code(), root).expect("it is the code of an operation")
    }

    const fn code(self) -> u8 {
        match self {
            Op::AllReduce => 0,
            Op::ReduceScatter => 1,
            Op::AllGather => 2,
            Op::Broadcast { .. } => 3,
            Op::Reduce { .. } => 4,
            Op::Gather { .. } => 5,
            Op::Scatter { .. } => 6,
            Op::AllToAll => 7,
        }
    }

    /// The operation with this code on the wire; `root` is for those that have one.
    pub const fn from_code(code: u8, root: usize) -> Option<Op> {
        Some(match code {
            0 => Op::AllReduce,
            1 => Op::ReduceScatter,
            2 => Op::AllGather,
            3 => Op::Broadcast { root },
            4 => Op::Reduce { root },
            5 => Op::Gather { root },
            6 => Op::Scatter { root },
            7 => Op::AllToAll,
            _ => return None,
        })
    }
}
