//! Headers of messages.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_collective::call::{Call, MessageHeader, WireCall};
use zerocopy::FromBytes;

fuzz_target!(|bytes: [u8; MessageHeader::SIZE]| {
    let header = MessageHeader::read_from_bytes(&bytes).expect("any bytes are a header");
    let Ok(call) = Call::try_from(header.call) else { return };
    assert_eq!(Call::try_from(WireCall::from(call)), Ok(call));
    assert!(!call.to_string().is_empty());
});
