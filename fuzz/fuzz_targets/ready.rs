//! What a member tells its neighbours while a group forms.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_collective::Rank;
use unisono_collective::internals::gathering::{Gathering, Update, longest_update};

const WORLD: usize = 5;

fuzz_target!(|bytes: &[u8]| {
    let Ok(update) = postcard::from_bytes::<Update>(bytes) else { return };
    let mut gathering = Gathering::new(1, Rank::all(WORLD), &[0, 2, 3, 4], [3; 32], None);
    [0, 2].into_iter().for_each(|rank| gathering.connect(rank));
    if gathering.hear(0, update).is_ok() {
        assert!(!gathering.is_formed());
        let update = gathering.due(2, true).expect("it was told nothing");
        let bytes = postcard::to_stdvec(&update).expect("plain data always encodes");
        assert!(bytes.len() <= longest_update(WORLD));
    }
});
