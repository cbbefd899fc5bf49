//! Quantities as people read them: three significant digits, and a unit that fits.

/// "812 µs", "41.3 ms", "1.25 s".
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "-".into();
    }
    // The bounds are where three digits would round up into the next unit.
    match seconds.abs() {
        s if s < 0.000_999_5 => format!("{:.0} µs", seconds * 1e6),
        s if s < 0.999_5 => format!("{} ms", three_digits(seconds * 1e3)),
        _ => format!("{} s", three_digits(seconds)),
    }
}

/// "812 B", "4.20 MB": powers of a thousand, like the networks they cross.
pub fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes;
    let mut unit = 0;
    while value.abs() >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    if unit == 0 {
        format!("{value:.0} B")
    } else {
        format!("{} {}", three_digits(value), UNITS[unit])
    }
}

/// "42 %", and "3.1 %" below ten, where the digit after the point still says something.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 9.95 && percent.abs() >= 0.05 {
        format!("{percent:.1} %")
    } else {
        format!("{percent:.0} %")
    }
}

/// "30× less" or "1.2× more": one amount as a multiple of a smaller or larger other.
pub fn times_less(ratio: f64) -> String {
    let (ratio, word) = if ratio >= 1.0 { (ratio, "less") } else { (1.0 / ratio, "more") };
    format!("{} {word}", times(ratio))
}

/// "3.25×".
pub fn times(ratio: f64) -> String {
    format!("{}×", three_digits(ratio))
}

/// "12,345" for large numbers, "12.3" for small ones.
pub fn count(value: f64) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    if value.abs() < 99.95 && value.fract() != 0.0 {
        return three_digits(value);
    }
    let digits = format!("{:.0}", value.abs());
    let mut grouped = String::from(if value < 0.0 { "-" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn three_digits(value: f64) -> String {
    match value.abs() {
        v if v < 9.995 => format!("{value:.2}"),
        v if v < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// So many of something, in the right number: "1 step", "2 steps". For nouns whose plural ends in s.
pub fn counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_quantity_has_three_digits_and_a_fitting_unit() {
        assert_eq!(duration(0.0), "0 µs");
        assert_eq!(duration(0.000_812_4), "812 µs");
        assert_eq!(duration(0.000_999_9), "1.00 ms");
        assert_eq!(duration(0.041_34), "41.3 ms");
        assert_eq!(duration(0.999_9), "1.00 s");
        assert_eq!(duration(73.21), "73.2 s");
        assert_eq!(duration(f64::NAN), "-");
        assert_eq!(times_less(3.966), "3.97× less");
        assert_eq!(times_less(0.5), "2.00× more");
        assert_eq!(times(3.254), "3.25×");
        assert_eq!(bytes(12.0), "12 B");
        assert_eq!(bytes(4_204_000.0), "4.20 MB");
        assert_eq!(bytes(999_900.0), "1.00 MB");
        assert_eq!(percent(0.421), "42 %");
        assert_eq!(percent(0.031), "3.1 %");
        assert_eq!(percent(0.0), "0 %");
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(count(12_345.4), "12,345");
        assert_eq!(count(1_000_000.0), "1,000,000");
        assert_eq!(count(100.0), "100");
        assert_eq!(count(12.34), "12.3");
        assert_eq!(count(7.0), "7");
        assert_eq!(count(f64::NAN), "-");
    }
}
