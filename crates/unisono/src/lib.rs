//! The public library of Unisono.
