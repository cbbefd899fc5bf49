//! Sizes as people write them: `1KiB..256MiB`, `4096`, `1MiB,64MiB`.

use anyhow::{Context, bail, ensure};

const UNITS: [(&str, usize); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// A list of sizes; ranges grow by `factor`.
pub fn parse_list(text: &str, factor: usize) -> anyhow::Result<Vec<usize>> {
    let mut sizes = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            None => sizes.push(parse(part)?),
            Some((from, to)) => {
                let (from, to) = (parse(from)?, parse(to)?);
                ensure!(from > 0 && from <= to, "the range {part} is empty");
                ensure!(factor >= 2, "ranges grow by a factor of at least 2, not {factor}");
                let steps = std::iter::successors(Some(from), |s| s.checked_mul(factor));
                sizes.extend(steps.take_while(|s| *s <= to));
            }
        }
    }
    Ok(sizes)
}

/// One size.
pub fn parse(text: &str) -> anyhow::Result<usize> {
    let text = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, *unit)))
        .unwrap_or((text, 1));
    let number: usize = number
        .trim()
        .parse()
        .with_context(|| format!("{text:?} is no size; try 64KiB or 16MiB"))?;
    match number.checked_mul(unit) {
        Some(bytes) => Ok(bytes),
        None => bail!("{text:?} is too large"),
    }
}

/// A size with a binary unit where it fits.
pub fn format(bytes: usize) -> String {
    let units = &UNITS[..3];
    match units.iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        assert_eq!(parse_list("1KiB..64KiB", 4).unwrap(), [1024, 4096, 16384, 65536]);
        assert_eq!(parse_list("7,1MiB", 2).unwrap(), [7, 1 << 20]);
        assert_eq!(parse_list("1KiB..3KiB", 2).unwrap(), [1024, 2048]);
        assert!(parse_list("4KiB..1KiB", 2).is_err());
        assert!(parse_list("many", 2).is_err());
    }

    #[test]
    fn sizes_print_as_written() {
        assert_eq!(format(1536), "1536 B");
        assert_eq!(format(256 << 20), "256 MiB");
    }
}
