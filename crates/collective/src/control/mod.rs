//! What the ranks of a group tell each other beside the data.

pub mod news;
pub mod overlay;
pub mod reason;
