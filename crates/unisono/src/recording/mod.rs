//! What a run tells, written into its folder.

pub mod relaxed;
