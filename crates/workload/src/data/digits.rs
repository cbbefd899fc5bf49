//! Handwritten digits: 1797 images of 8 × 8 pixels with 17 shades, part of the program itself.

use smartcore::dataset::digits;

use super::images::Images;

/// Samples held out for testing.
const TEST: usize = 297;

/// Every sixth sample is held out, until there are enough. The file goes through the classes again
/// and again, so both parts have about the same number of each.
const STRIDE: usize = 6;

/// Training and test images.
pub(super) fn load() -> (Images, Images) {
    let digits = digits::load_dataset();
    let size = digits.num_features;
    let empty = || Images { shape: [1, 8, 8], white: 16, pixels: Vec::new(), labels: Vec::new() };
    let (mut train, mut test) = (empty(), empty());
    for (index, (pixels, &label)) in digits.data.chunks(size).zip(&digits.target).enumerate() {
        let held_out = index % STRIDE == STRIDE - 1 && test.len() < TEST;
        let part = if held_out { &mut test } else { &mut train };
        part.pixels.extend(pixels.iter().map(|&shade| shade as u8));
        part.labels.push(label as u8);
    }
    (train, test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_samples_are_there_and_scaled() {
        let (train, test) = load();
        assert_eq!((train.len(), test.len()), (1500, 297));
        for part in [&train, &test] {
            assert_eq!(part.pixels.len(), part.len() * 64);
            assert_eq!(part.pixels.iter().max(), Some(&16));
        }
    }

    #[test]
    fn classes_are_balanced() {
        let (train, test) = load();
        for (part, share) in [(train, 150), (test, 30)] {
            for class in 0..10 {
                let count = part.labels.iter().filter(|&&label| label == class).count();
                assert!(count * 10 > share * 7 && count * 10 < share * 13, "{class}: {count}");
            }
        }
    }
}
