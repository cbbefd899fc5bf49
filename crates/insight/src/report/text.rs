//! Text for a terminal: paragraphs and bars that fit it.

/// Narrower than this, lines wrap and bars are too short to compare.
const NARROWEST: usize = 60;

/// Wider than this, bars are far from their labels.
const WIDEST: usize = 110;

/// Text that knows how wide it may be.
pub(super) struct Text {
    /// Columns that bars and tables may take.
    pub width: usize,
    /// Columns after which paragraphs are broken.
    wrap: usize,
    pub text: String,
}

impl Text {
    /// For a terminal of about `width` columns. With `usize::MAX`, for no terminal: paragraphs are lines.
    pub(super) fn new(width: usize) -> Text {
        let fitting = width.clamp(NARROWEST, WIDEST);
        let wrap = if width == usize::MAX { width } else { fitting };
        Text { width: fitting, wrap, text: String::new() }
    }

    pub(super) fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    /// A paragraph, its lines after the first indented by the width of the mark before it.
    pub(super) fn wrapped(&mut self, mark: &str, paragraph: &str) {
        let indent = mark.chars().count();
        let mut line = String::from(mark);
        let mut length = indent;
        for word in words(paragraph) {
            let word_length = word.chars().count();
            if length > indent && length + 1 + word_length > self.wrap {
                self.line(&line);
                line = " ".repeat(indent);
                length = indent;
            } else if length > indent {
                line.push(' ');
                length += 1;
            }
            line.push_str(word);
            length += word_length;
        }
        self.line(&line);
    }
}

/// The words of a paragraph; a number and its unit are one.
fn words(paragraph: &str) -> impl Iterator<Item = &str> {
    let mut rest = paragraph;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let ends = rest.match_indices(' ').map(|(at, _)| at);
        let end = ends.into_iter().find(|at| !is_unit(&rest[at + 1..])).unwrap_or(rest.len());
        let word = &rest[..end];
        rest = rest.get(end + 1..).unwrap_or("");
        Some(word)
    })
}

fn is_unit(text: &str) -> bool {
    let word = text.split(' ').next().unwrap_or("").trim_end_matches([',', '.', ':', ';', ')']);
    ["%", "µs", "ms", "s", "kB", "MB", "GB"].contains(&word)
}

/// A bar of a share of `room` columns. Anything that is not nothing shows at least a sliver.
pub(super) fn bar(share: f64, room: usize, fill: char) -> String {
    let columns = (share.clamp(0.0, 1.0) * room as f64).round() as usize;
    if columns == 0 && share > 0.0 { "▏".into() } else { fill.to_string().repeat(columns) }
}

/// Parts side by side, each a fill and an amount, `whole` filling the room. Boundaries are rounded, not
/// lengths, so that the bar as a whole has the right one.
pub(super) fn stacked(
    parts: impl IntoIterator<Item = (char, f64)>,
    whole: f64,
    room: usize,
) -> String {
    let mut bar = String::new();
    let mut until = 0.0;
    let mut columns = 0;
    for (fill, amount) in parts {
        until += amount;
        let end = if whole > 0.0 { (until / whole * room as f64).round() as usize } else { 0 };
        bar.extend(std::iter::repeat_n(fill, end.min(room).saturating_sub(columns)));
        columns = columns.max(end);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_stay_within_the_width_and_keep_units_with_their_numbers() {
        let mut out = Text { width: 20, wrap: 20, text: String::new() };
        out.wrapped("- ", "every step takes 12.0 ms, and that is 3.1 % of it.");
        for line in out.text.lines() {
            assert!(line.chars().count() <= 20, "{line}");
            assert!(line.starts_with("- ") || line.starts_with("  "), "{line}");
        }
        assert!(out.text.contains("12.0 ms,") && out.text.contains("3.1 %"), "{}", out.text);
        assert_eq!(out.text.split_whitespace().collect::<Vec<_>>().len(), 12 + 1);
    }

    #[test]
    fn a_stacked_bar_has_the_length_of_the_whole() {
        let parts = [('█', 0.33), ('▓', 0.33), ('▒', 0.33), ('░', 0.01)];
        assert_eq!(stacked(parts, 1.0, 40).chars().count(), 40);
        assert_eq!(stacked(parts, 2.0, 40).chars().count(), 20);
        assert_eq!(stacked([('█', 0.0)], 0.0, 40), "");
    }

    #[test]
    fn a_small_part_is_still_seen() {
        assert_eq!(bar(0.001, 40, '█'), "▏");
        assert_eq!(bar(0.0, 40, '█'), "");
        assert_eq!(bar(0.5, 4, '▓'), "▓▓");
    }
}
