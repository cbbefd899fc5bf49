//! What a rank called: compared between ranks, named in errors and reports.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::dtype::{Dtype, Reduction};
use crate::schedule::{Algorithm, Op};

/// One collective call of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The number of the call in its group, from 0.
    pub seq: u32,
    /// The operation.
    pub op: Op,
    /// Whether it is a barrier: an all-reduce of nothing.
    pub barrier: bool,
    /// The element type.
    pub dtype: Dtype,
    /// The reduction; [`Reduction::Sum`] where nothing is reduced.
    pub reduction: Reduction,
    /// Elements in the buffer that is equal on all ranks, or of the longest block.
    pub count: u64,
    /// A hash of the blocks' lengths where all ranks know them and they differ; else 0.
    pub shape: u64,
    /// The algorithm this rank chose.
    pub algorithm: Algorithm,
    /// Elements of a column.
    pub column: u32,
}

impl Call {
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

    /// The operation's name.
    pub fn name(&self) -> &'static str {
        if self.barrier { "barrier" } else { self.op.name() }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Call { seq, dtype, count, reduction, algorithm, .. } = self;
        write!(f, "{} #{seq}", self.name())?;
        if self.barrier {
            return Ok(());
        }
        write!(f, " of {count} {dtype}")?;
        if self.shape != 0 {
            write!(f, " at most, blocks {:08x}", self.shape as u32)?;
        }
        if matches!(self.op, Op::AllReduce | Op::ReduceScatter | Op::Reduce { .. }) {
            write!(f, " by {reduction}")?;
        }
        if let Some(root) = self.op.root() {
            write!(f, " with root {root}")?;
        }
        write!(f, " ({algorithm})")
    }
}

/// A [`Call`] as it travels.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireCall {
    seq: U32,
    op: u8,
    dtype: u8,
    reduction: u8,
    algorithm: u8,
    root: U32,
    column: U32,
    count: U64,
    shape: U64,
}

const BARRIER: u8 = 0x80;

impl From<Call> for WireCall {
    fn from(call: Call) -> WireCall {
        WireCall {
            seq: call.seq.into(),
            op: call.op.code() | if call.barrier { BARRIER } else { 0 },
            dtype: call.dtype as u8,
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
            dtype: Dtype::from_code(wire.dtype).ok_or(MalformedCall)?,
            reduction: Reduction::from_code(wire.reduction).ok_or(MalformedCall)?,
            count: wire.count.get(),
            shape: wire.shape.get(),
            algorithm: *Algorithm::ALL.get(usize::from(wire.algorithm)).ok_or(MalformedCall)?,
            column: wire.column.get(),
        })
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
    pub round: U16,
    /// Which of the messages of this round to this peer.
    pub index: U16,
    /// Bytes that follow.
    pub length: U32,
    /// Zero.
    pub reserved: U32,
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

    /// The root, where there is one.
    pub const fn root(self) -> Option<usize> {
        match self {
            Op::Broadcast { root } | Op::Reduce { root } => Some(root),
            Op::Gather { root } | Op::Scatter { root } => Some(root),
            Op::AllReduce | Op::ReduceScatter | Op::AllGather | Op::AllToAll => None,
        }
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
