//! News of a neighbour.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_collective::Rank;
use unisono_collective::internals::news::{self, MAX_NEWS, News};

fuzz_target!(|bytes: &[u8]| {
    let mut known = News::new(Rank::all(5));
    known.connect(2);
    for fact in news::decode(&bytes[..bytes.len().min(MAX_NEWS)]).unwrap_or_default() {
        let _ = known.hear(Some(1), fact);
    }
    while let Some(bytes) = known.due(2) {
        assert!(bytes.len() <= MAX_NEWS && news::decode(&bytes).is_ok());
    }
});
