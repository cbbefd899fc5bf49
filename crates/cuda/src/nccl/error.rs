//! What can go wrong with NCCL.

use std::fmt;

/// NCCL cannot be used, or a call of it failed.
///
/// After `Call` the communicator is of no more use, and is aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// No library was found that is NCCL.
    #[error(
        "NCCL cannot be loaded; install it (the package nvidia-nccl-cu13 of pip), or name its library in \
         UNISONO_NCCL; looked for {}",
        listed(looked)
    )]
    NotFound {
        /// Where it was looked for, and what was found there.
        looked: Vec<Looked>,
    },
    /// The newest library that was found is too old to be aborted.
    #[error(
        "{library} is NCCL {version}, and {oldest} or newer is needed; install a newer one, or name its \
         library in UNISONO_NCCL; looked for {}",
        listed(looked)
    )]
    TooOld {
        /// Its name or path.
        library: String,
        /// What it is.
        version: NcclVersion,
        /// What it would have to be.
        oldest: NcclVersion,
        /// Where a library was looked for, and what was found there.
        looked: Vec<Looked>,
    },
    /// NCCL refused a call, or reports that an earlier one failed.
    #[error("{call} failed: {meaning} ({code}){}", said(detail))]
    Call {
        /// Which function of NCCL.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// NCCL's description of that code.
        meaning: String,
        /// The last error that NCCL noted, if it did.
        detail: String,
    },
    /// The ranks did not form a communicator in time.
    #[error("the ranks have formed no NCCL communicator within {seconds} s")]
    Slow {
        /// How long they had.
        seconds: u64,
    },
}

/// A place where a library was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// A path, or a name that the system's loader knows.
    pub library: String,
    /// Why it will not do.
    pub reason: String,
}

/// A version of NCCL, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclVersion {
    /// Before the first point.
    pub major: u32,
    /// Between the points.
    pub minor: u32,
    /// After the second point.
    pub patch: u32,
}

impl NcclVersion {
    /// The version that NCCL tells as a number: until 2.8 it had one digit less.
    pub(super) fn of_code(code: i32) -> NcclVersion {
        let code = code.unsigned_abs();
        let major = if code < 10_000 { 1_000 } else { 10_000 };
        NcclVersion { major: code / major, minor: code % major / 100, patch: code % 100 }
    }

    /// The number that NCCL has for it since 2.9.
    pub(super) fn code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

fn listed(looked: &[Looked]) -> String {
    let each = looked.iter().map(|Looked { library, reason }| format!("{library} ({reason})"));
    each.collect::<Vec<String>>().join(", ")
}

fn said(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(", {detail}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_in_both_codes() {
        let version = |major, minor, patch| NcclVersion { major, minor, patch };
        assert_eq!(NcclVersion::of_code(2708), version(2, 7, 8));
        assert_eq!(NcclVersion::of_code(20906), version(2, 9, 6));
        assert_eq!(NcclVersion::of_code(22809), version(2, 28, 9));
        assert!(NcclVersion::of_code(2708) < NcclVersion::of_code(21400));
        assert_eq!(NcclVersion::of_code(23007).to_string(), "2.30.7");
        assert_eq!(NcclVersion::of_code(22809).code(), 22809);
    }
}
