//! Steps of forming a group that all ranks take, or none.
//!
//! After each step a rank *tells* all others what they need of it, or why it cannot go on. All ranks then
//! either have what all said, or end with the reason of the first that could not: none is left with a group
//! that the others do not have.

use unisono_collective::engine::HostEngine;
use unisono_collective::{Error, FormError, Rank, Request};

use crate::error::CudaError;
use crate::fold::FoldError;

/// Bytes of a reason that travel. More: longer messages. Fewer: shorter texts.
const REASON: usize = 400;

/// Why a rank cannot take part, for all ranks to read.
#[derive(Debug)]
pub struct Reason(pub String);

impl From<CudaError> for Reason {
    fn from(error: CudaError) -> Reason {
        Reason(error.to_string())
    }
}

impl From<FoldError> for Reason {
    fn from(error: FoldError) -> Reason {
        Reason(error.to_string())
    }
}

/// A rank that cannot go on, and why.
#[derive(Debug)]
pub struct Refused {
    /// The rank, as the job numbers it.
    pub rank: Rank,
    /// What it said.
    pub reason: String,
}

impl From<Refused> for FormError {
    fn from(Refused { rank, reason }: Refused) -> FormError {
        FormError::Device { rank, reason }
    }
}

/// Tells all ranks how a step went; what all said, in rank order, or the first of those that cannot go on.
pub fn tell<const LENGTH: usize>(
    host: &mut HostEngine,
    outcome: Result<[u8; LENGTH], Reason>,
) -> Result<Result<Vec<[u8; LENGTH]>, Refused>, Error> {
    let length = 8 + LENGTH + REASON;
    let mut said = vec![0; length];
    let (head, rest) = said.split_at_mut(8);
    let (data, text) = rest.split_at_mut(LENGTH);
    head.copy_from_slice(&(host.state().job_rank().0 as u64).to_le_bytes());
    match outcome {
        Ok(bytes) => data.copy_from_slice(&bytes),
        Err(Reason(reason)) => {
            let whole = |end: &usize| reason.is_char_boundary(*end);
            let end = (0..=reason.len().min(REASON)).rev().find(whole).unwrap_or(0);
            let reason = if end == 0 { b"no reason" } else { &reason.as_bytes()[..end] };
            text[..reason.len()].copy_from_slice(reason);
        }
    }
    let mut all = vec![0; length * host.topology().world()];
    host.run_unnumbered(Request::all_gather(&said, &mut all))?;
    let said = all.chunks_exact(length).map(|said| {
        let (head, rest) = said.split_at(8);
        let (data, text) = rest.split_at(LENGTH);
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(REASON);
        if end > 0 {
            let rank = Rank(u64::from_le_bytes(head.try_into().expect("eight bytes")) as usize);
            let reason = String::from_utf8_lossy(&text[..end]).into_owned();
            return Err(Refused { rank, reason });
        }
        Ok(data.try_into().expect("cut to its length"))
    });
    Ok(said.collect())
}
