//! The variables of the environment that mean something here.
//!
//! A misspelt one changes nothing, and the user would not notice. So a launcher, or rank 0, looks for
//! names that begin like ours and are not, and says what may have been meant.

use std::ffi::OsString;

/// How the names of all variables begin.
const PREFIX: &str = "UNISONO_";

/// Every variable that Unisono reads or sets.
pub const KNOWN: [&str; 33] = [
    "UNISONO_ALGORITHM",
    "UNISONO_CANONICAL",
    "UNISONO_COLUMNS",
    "UNISONO_CUDA_DRIVER",
    "UNISONO_DEVICE_ENGINE",
    "UNISONO_ENCRYPT",
    "UNISONO_ETCD_CA",
    "UNISONO_ETCD_CERT",
    "UNISONO_ETCD_KEY",
    "UNISONO_ETCD_PASSWORD",
    "UNISONO_ETCD_USER",
    "UNISONO_GPU",
    "UNISONO_INTERFACE",
    "UNISONO_LAUNCH",
    "UNISONO_LIFE",
    "UNISONO_LISTEN_FD",
    "UNISONO_LOG",
    "UNISONO_MEMBERSHIP",
    "UNISONO_NCCL",
    "UNISONO_NETLAB",
    "UNISONO_PEERS",
    "UNISONO_PROGRAM",
    "UNISONO_REGION",
    "UNISONO_RENDEZVOUS",
    "UNISONO_SEGMENT",
    "UNISONO_SERVER",
    "UNISONO_SERVERS",
    "UNISONO_STAGING",
    "UNISONO_STREAMS",
    "UNISONO_THREADS",
    "UNISONO_TIMEOUT",
    "UNISONO_TOKEN",
    "UNISONO_TRANSPORT",
];

/// Beginnings of names that tests may make up.
const FOR_TESTS: [&str; 2] = ["UNISONO_TEST_", "UNISONO_NETLAB_"];

/// What to say about each variable of this process that begins like ours and means nothing.
pub fn complaints() -> Vec<String> {
    of(std::env::vars_os().map(|(name, _)| name))
}

fn of(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let is_unknown = |name: &String| {
        name.starts_with(PREFIX)
            && !KNOWN.contains(&name.as_str())
            && !FOR_TESTS.iter().any(|beginning| name.starts_with(beginning))
    };
    let complaint = |name: String| match nearest(&name, KNOWN) {
        Some(meant) => format!("the variable {name} means nothing; did you mean {meant}?"),
        None => format!("the variable {name} means nothing"),
    };
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.sort_unstable();
    names.into_iter().filter(is_unknown).map(complaint).collect()
}

/// The candidate that was most likely meant by a misspelt word, if one is near enough: that differs in
/// at most a third of its letters.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.strip_prefix(PREFIX).unwrap_or(word);
    let distance = |candidate: &&str| {
        let candidate = candidate.strip_prefix(PREFIX).unwrap_or(candidate);
        distance(word, candidate)
    };
    let best = candidates.into_iter().min_by_key(distance)?;
    let length = best.strip_prefix(PREFIX).unwrap_or(best).chars().count();
    (distance(&best) <= (length / 3).max(1)).then_some(best)
}

/// How many letters have to be inserted, removed or changed, or neighbours exchanged, to make one word of
/// the other: the optimal string alignment. `rows` holds, for each beginning of `from`, its distance to
/// each beginning of `to`.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for (i, letter) in from.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, other) in to.iter().enumerate() {
            let changed = rows[i][j] + usize::from(letter != other);
            let mut best = changed.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *letter == to[j - 1] && from[i - 1] == *other {
                best = best.min(rows[i - 1][j - 1] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_changes() {
        for (from, to, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("TIMEOUT", "TIMEOUT", 0),
            ("TIMEUOT", "TIMEOUT", 1),
            ("TIME_OUT", "TIMEOUT", 1),
            ("TRANSPRT", "TRANSPORT", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(from, to), expected, "{from} {to}");
            assert_eq!(distance(to, from), expected, "{to} {from}");
        }
    }

    #[test]
    fn unknown_variables_are_named_with_what_was_meant() {
        let names = ["UNISONO_TIMEOUT", "UNISONO_TEST_SEED", "UNISONO", "HOME", "OTHER_UNISONO_X"];
        assert_eq!(of(names.into_iter().map(OsString::from)), Vec::<String>::new());
        let misspelt = ["UNISONO_TRANSPRT", "UNISONO_TIME_OUT", "UNISONO_COLOR_OF_THE_SKY"];
        assert_eq!(
            of(misspelt.into_iter().map(OsString::from)),
            [
                "the variable UNISONO_COLOR_OF_THE_SKY means nothing",
                "the variable UNISONO_TIME_OUT means nothing; did you mean UNISONO_TIMEOUT?",
                "the variable UNISONO_TRANSPRT means nothing; did you mean UNISONO_TRANSPORT?",
            ]
        );
    }

    #[test]
    fn words_far_from_all_others_have_no_nearest() {
        assert_eq!(nearest("learning_rate", ["learning-rate", "steps"]), Some("learning-rate"));
        assert_eq!(nearest("step", ["learning-rate", "steps"]), Some("steps"));
        assert_eq!(nearest("colour", ["learning-rate", "steps"]), None);
        assert_eq!(nearest("colour", []), None);
    }
}
