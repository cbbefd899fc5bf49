//! Why a peer says that the group failed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_collective::internals::frame::{self, MAX_REASON};

fuzz_target!(|bytes: &[u8]| {
    let bytes = &bytes[..bytes.len().min(MAX_REASON)];
    let error = frame::decode_reason(1, bytes);
    assert!(!error.to_string().is_empty());
    assert!(frame::encode_reason(&error).len() <= MAX_REASON);
});
