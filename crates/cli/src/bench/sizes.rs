//! Sizes as people write them: `1KiB..256MiB`, `1KiB..256MiB:2`, `4096`, `1MiB,64MiB`.

use anyhow::{Context, anyhow, ensure};
use unisono::collective::options::parse_size;

/// A list of sizes; ranges grow by `factor` unless they name one of their own.
pub fn parse_list(text: &str, factor: usize) -> anyhow::Result<Vec<usize>> {
    let mut sizes = Vec::new();
    for part in text.split(',') {
        let Some((from, to)) = part.split_once("..") else {
            sizes.push(parse(part)?);
            continue;
        };
        let (to, factor) = match to.split_once(':') {
            None => (to, factor),
            Some((to, own)) => {
                let own = own.trim().parse();
                (to, own.with_context(|| format!("in {part}, the factor is no number"))?)
            }
        };
        let (from, to) = (parse(from)?, parse(to)?);
        ensure!(from > 0 && from <= to, "the range {part} is empty");
        ensure!(factor >= 2, "ranges grow by a factor of at least 2, not {factor}");
        let steps = std::iter::successors(Some(from), |s| s.checked_mul(factor));
        sizes.extend(steps.take_while(|s| *s <= to));
    }
    Ok(sizes)
}

/// As [`parse_list`], of buffers with elements of `element` bytes.
pub fn parse_buffers(text: &str, factor: usize, element: usize) -> anyhow::Result<Vec<usize>> {
    let sizes = parse_list(text, factor)?;
    if let Some(odd) = sizes.iter().find(|size| !size.is_multiple_of(element)) {
        return Err(anyhow!("{odd} bytes are no multiple of an element's {element}"));
    }
    Ok(sizes)
}

/// One size.
pub fn parse(text: &str) -> anyhow::Result<usize> {
    parse_size(text).map_err(|reason| anyhow!("{text:?}: {reason}"))
}

/// A size with a binary unit where it fits.
pub fn format(bytes: usize) -> String {
    const UNITS: [(&str, usize); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} B"),
    }
}

/// A size in the unit that shows it best, rounded.
pub fn about(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
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
        assert_eq!(parse_list("1KiB..64KiB:8,3", 2).unwrap(), [1024, 8192, 65536, 3]);
        for wrong in ["4KiB..1KiB", "many", "1KiB..4KiB:1", "1KiB..4KiB:", "1KiB..4KiB:x"] {
            assert!(parse_list(wrong, 2).is_err(), "{wrong}");
        }
    }

    #[test]
    fn buffers_hold_whole_elements() {
        assert_eq!(parse_buffers("8,1KiB", 2, 4).unwrap(), [8, 1024]);
        assert!(parse_buffers("8,3", 2, 4).unwrap_err().to_string().contains("3 bytes"));
    }

    #[test]
    fn sizes_print_as_written() {
        assert_eq!(format(1536), "1536 B");
        assert_eq!(format(256 << 20), "256 MiB");
    }
}
