//! As much of a text as may travel, cut between characters.

/// The beginning of a text, of at most `most` bytes.
pub fn beginning(text: &str, most: usize) -> String {
    let end = (0..=most.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text[..end.unwrap_or(0)].into()
}

/// The end of a text, in which a file's name and line are, of at most `most` bytes.
pub fn ending(text: &str, most: usize) -> String {
    let first = text.len().saturating_sub(most);
    let start = (first..=text.len()).find(|at| text.is_char_boundary(*at));
    text[start.unwrap_or(text.len())..].into()
}
