//! What is said of a run whose loss is no longer a number: since when, and what to change. Where its
//! time went is beside the point.

use crate::record::RunInfo;

/// The answer in one sentence. `step` is the first whose loss, and every later one, was no number.
pub fn headline(step: u64) -> String {
    format!("The run is lost: its loss is no longer a number since step {step}.")
}

/// What to change about a run in which all workers agree.
pub fn advice(info: &RunInfo) -> Vec<String> {
    let below = rate(info).map(|rate| format!(" (it was {rate})")).unwrap_or_default();
    let again = match info.settings.get("checkpoint_dir").and_then(toml::Value::as_str) {
        Some(folder) => format!(
            "Go on from the last checkpoint in {folder} with a lower learning rate{below}: the same \
             command with --resume and --learning-rate. If that does not help, remove the newest \
             checkpoint and go on from the one before."
        ),
        None => format!(
            "Start again with a lower learning rate{below}: --learning-rate. With --checkpoint-dir, \
             a run can go on from before it was lost."
        ),
    };
    vec![
        again,
        "If it happens at the same step whatever the rate, look at the data of that step.".into(),
    ]
}

/// The learning rate, as the settings of a run tell it.
pub fn rate(info: &RunInfo) -> Option<&str> {
    let optimizer = info.settings.get("optimizer")?.as_str()?;
    let (_, rate) = optimizer.split_once("learning rate ")?;
    // A schedule has commas inside of its parentheses.
    let end = match rate.find(')') {
        Some(end) if rate.find('(').is_some_and(|begin| begin < end) => end + 1,
        _ => rate.find(',').unwrap_or(rate.len()),
    };
    Some(&rate[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(optimizer: &str) -> RunInfo {
        let mut info = RunInfo::default();
        info.settings.insert("optimizer".into(), optimizer.into());
        info
    }

    #[test]
    fn the_rate_is_found_in_the_settings() {
        for (optimizer, expected) in [
            ("sgd, learning rate 0.1, weight decay 0", Some("0.1")),
            (
                "adamw, learning rate cosine(0.5 to 0.1, warm-up 3 of 20 steps), betas 0.9 and 0.99",
                Some("cosine(0.5 to 0.1, warm-up 3 of 20 steps)"),
            ),
            ("something else", None),
        ] {
            assert_eq!(rate(&info(optimizer)), expected);
        }
        assert_eq!(rate(&RunInfo::default()), None);
    }

    #[test]
    fn what_to_do_depends_on_whether_there_are_checkpoints() {
        let mut info = info("sgd, learning rate 3, weight decay 0");
        let without = advice(&info).join(" ");
        assert!(without.contains("Start again") && without.contains("(it was 3)"), "{without}");
        assert!(!without.contains("--resume"), "{without}");
        info.settings.insert("checkpoint_dir".into(), "saved".into());
        let with = advice(&info).join(" ");
        assert!(with.contains("--resume and --learning-rate"), "{with}");
        assert!(with.contains("in saved with"), "{with}");
    }
}
