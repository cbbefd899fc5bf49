//! `unisono train` with strategies whose workers do not wait for each other, or not for long.

#[path = "../common/mod.rs"]
mod common;

mod advice;
mod endings;
mod equal;
mod journal;
mod kills;
mod levels;
mod records;
mod servers;
