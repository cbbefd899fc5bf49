//! Are the replicas still equal?
//!
//! Every rank hashes its weights. If the hashes differ, the ranks compare those of every parameter
//! to say which rank went astray, and where.

use unisono_collective::Group;

use crate::error::SyncError;

/// The hash of one parameter's weights.
pub fn hash(weights: &[f32]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    update(&mut hasher, weights);
    hasher.finalize()
}

/// The hash of a whole model: of the names, lengths and weights of all parameters, in order.
pub fn hash_all<'a>(parameters: impl IntoIterator<Item = (&'a str, &'a [f32])>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for (name, weights) in parameters {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&(weights.len() as u64).to_le_bytes());
        update(&mut hasher, weights);
    }
    hasher.finalize()
}

/// Compares replicas, given the hash of every parameter. All ranks must call it.
pub fn check(
    group: &Group,
    step: u64,
    names: &[String],
    hashes: &[blake3::Hash],
) -> Result<(), SyncError> {
    let short = |hash: &blake3::Hash| {
        i64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
    };
    let own: Vec<i64> = hashes.iter().map(short).collect();
    let mut whole = blake3::Hasher::new();
    hashes.iter().for_each(|hash| {
        whole.update(hash.as_bytes());
    });
    let mut totals = vec![0; group.size()];
    group.all_gather(&[short(&whole.finalize())], &mut totals)?;
    if totals.iter().all(|total| *total == totals[0]) {
        return Ok(());
    }
    let mut all = vec![0; own.len() * group.size()];
    group.all_gather(&own, &mut all)?;
    let (parameter, rank) = outlier(&all, group.size()).expect("the totals differ");
    let (rank, parameter) = (group.members()[rank], names[parameter].clone());
    Err(SyncError::Diverged { step, rank, parameter })
}

/// The first parameter that is not the same everywhere, and a rank that is unlike most. With two
/// ranks, or as many of one kind as of the other, it is the one of the higher rank.
fn outlier(hashes: &[i64], world: usize) -> Option<(usize, usize)> {
    let parameters = hashes.len() / world;
    for parameter in 0..parameters {
        let of = |rank: usize| hashes[rank * parameters + parameter];
        let votes = |rank: usize| (0..world).filter(|other| of(*other) == of(rank)).count();
        let most = (0..world).map(votes).max()?;
        let usual = (0..world).find(|rank| votes(*rank) == most)?;
        if let Some(rank) = (0..world).find(|rank| of(*rank) != of(usual)) {
            return Some((parameter, rank));
        }
    }
    None
}

fn update(hasher: &mut blake3::Hasher, weights: &[f32]) {
    // A few cache lines at a time, so that no copy of the weights is made.
    let mut bytes = [0; 4096];
    for chunk in weights.chunks(bytes.len() / 4) {
        let used = &mut bytes[..chunk.len() * 4];
        for (bytes, weight) in used.chunks_exact_mut(4).zip(chunk) {
            bytes.copy_from_slice(&weight.to_le_bytes());
        }
        hasher.update(used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono_collective::{Options, Rank};

    #[test]
    fn the_outlier_is_named() {
        assert_eq!(outlier(&[1, 2, 1, 2, 1, 2], 3), None);
        assert_eq!(outlier(&[1, 2, 1, 9, 1, 2], 3), Some((1, 1)));
        assert_eq!(outlier(&[9, 2, 1, 2, 1, 2], 3), Some((0, 0)));
        assert_eq!(outlier(&[1, 2, 1, 3], 2), Some((1, 1)));
    }

    #[test]
    fn a_diverged_rank_is_reported_everywhere() {
        let names = ["bias".to_owned(), "weight".to_owned()];
        let groups = Group::local(3, &Options::default()).unwrap();
        std::thread::scope(|scope| {
            for group in &groups {
                let names = &names;
                scope.spawn(move || {
                    let mut weights = [vec![1.0f32; 100], vec![2.0; 5000]];
                    let hashes = weights.each_ref().map(|w| hash(w));
                    check(group, 1, names, &hashes).unwrap();
                    if group.rank() == 2 {
                        weights[1][4999] = f32::from_bits(2f32.to_bits() + 1);
                    }
                    let hashes = weights.each_ref().map(|w| hash(w));
                    match check(group, 2, names, &hashes) {
                        Err(SyncError::Diverged { step: 2, rank: Rank(2), parameter }) => {
                            assert_eq!(parameter, "weight");
                        }
                        other => panic!("{other:?}"),
                    }
                });
            }
        });
    }

    #[test]
    fn the_hash_sees_names_and_shapes() {
        let a: [(&str, &[f32]); 2] = [("a", &[1.0]), ("b", &[2.0])];
        let b: [(&str, &[f32]); 1] = [("a", &[1.0, 2.0])];
        assert_ne!(hash_all(a), hash_all(b));
        assert_eq!(hash_all(a), hash_all(a));
    }
}
