//! Frames of control connections and of connections for messages.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_collective::internals::frame::{self, Frame};
use unisono_collective::internals::message_frame::{self, Frame as MessageFrame, MAX_DATA};
use unisono_collective::internals::news::MAX_NEWS;

fuzz_target!(|bytes: [u8; message_frame::SIZE]| {
    let (first, _) = bytes.split_first_chunk::<{ frame::SIZE }>().expect("it is longer");
    if let Ok(frame) = Frame::decode(first) {
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        assert!(!matches!(frame, Frame::News { length } if length > MAX_NEWS));
    }
    if let Ok(frame) = MessageFrame::decode(&bytes) {
        assert_eq!(MessageFrame::decode(&frame.encode()), Ok(frame));
        assert!(!matches!(frame, MessageFrame::Data { length, .. } if length > MAX_DATA));
    }
});
