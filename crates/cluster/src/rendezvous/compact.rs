//! The blobs of all ranks in few bytes.
//!
//! Ranks of one host bring blobs that begin alike: with what the host is called, where it is, and which
//! cores it has. A blob is sent as the number of an earlier one that begins like it, the bytes that they
//! share, and the rest. So a host is described once, and its ranks take a few bytes each.

use serde::{Deserialize, Serialize};

/// Blobs that later ones are compared with. More: more hosts are recognized. Fewer: less to compare.
const PATTERNS: usize = 64;

/// The blobs of all ranks, in rank order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compact(Vec<Entry>);

/// One blob: the first bytes of an earlier one, and its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    like: u32,
    shared: u32,
    rest: Vec<u8>,
}

impl Compact {
    /// Encodes blobs.
    pub fn new(blobs: &[&[u8]]) -> Compact {
        let mut patterns: Vec<usize> = Vec::new();
        let mut entries = Vec::with_capacity(blobs.len());
        for (number, blob) in blobs.iter().enumerate() {
            let alike = patterns.iter().map(|pattern| (common(blobs[*pattern], blob), *pattern));
            let (shared, like) = alike.max().unwrap_or((0, number));
            if shared < blob.len() / 2 && patterns.len() < PATTERNS {
                patterns.push(number);
            }
            let rest = blob[shared..].to_vec();
            entries.push(Entry { like: like as u32, shared: shared as u32, rest });
        }
        Compact(entries)
    }

    /// The blobs, if they are none but `world` blobs of at most `longest` bytes.
    pub fn expand(self, world: usize, longest: usize) -> Option<Vec<Vec<u8>>> {
        if self.0.len() != world {
            return None;
        }
        let mut blobs: Vec<Vec<u8>> = Vec::with_capacity(world);
        for Entry { like, shared, rest } in self.0 {
            let shared = match shared as usize {
                0 => &[][..],
                shared => blobs.get(like as usize)?.get(..shared)?,
            };
            let blob = [shared, &rest].concat();
            if blob.len() > longest {
                return None;
            }
            blobs.push(blob);
        }
        Some(blobs)
    }
}

/// Bytes with which both begin.
fn common(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_thousand_ranks_take_a_few_bytes_each() {
        let blob = |rank: usize| {
            let host = [rank as u8 / 64; 60];
            [&host[..], &(rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()].concat()
        };
        let blobs: Vec<Vec<u8>> = (0..1024).map(blob).collect();
        let all: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        let bytes = postcard::to_stdvec(&Compact::new(&all)).unwrap();
        assert!(bytes.len() < 1024 * 14, "{} bytes", bytes.len());
        let compact: Compact = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(compact.expand(1024, 68), Some(blobs));
    }

    #[test]
    fn what_is_no_roster_is_refused() {
        let entry = |like, shared| Entry { like, shared, rest: vec![1, 2] };
        let expand = |entries: Vec<Entry>| {
            let world = entries.len();
            Compact(entries).expand(world, 3)
        };
        assert!(expand(vec![entry(0, 0), entry(0, 1)]).is_some());
        assert_eq!(expand(vec![entry(0, 1)]), None, "like itself");
        assert_eq!(expand(vec![entry(0, 0), entry(0, 3)]), None, "more than there is");
        assert_eq!(expand(vec![entry(0, 0), entry(0, 2)]), None, "too long");
        assert_eq!(Compact(vec![entry(0, 0)]).expand(2, 3), None, "too few");
    }

    proptest! {
        #[test]
        fn any_blobs_come_back(blobs in prop::collection::vec(prop::collection::vec(0u8..3, 0..20), 0..40)) {
            let all: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(Compact::new(&all).expand(blobs.len(), 20), Some(blobs));
        }
    }
}
