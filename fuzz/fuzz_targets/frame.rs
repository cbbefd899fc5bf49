//! Frames of the side channel.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_collective::internals::frame::{self, Frame, MAX_DATA, MAX_REASON};

fuzz_target!(|bytes: [u8; frame::SIZE]| {
    let Ok(frame) = Frame::decode(&bytes) else { return };
    assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
    match frame {
        Frame::Abort { length } => assert!(length <= MAX_REASON),
        Frame::Data { length, .. } => assert!(length <= MAX_DATA),
        _ => {}
    }
});
