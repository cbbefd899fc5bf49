//! The arithmetic of an exchange.
//!
//! Both sides move by the same vector `h`, computed once, so what one gains the other loses to the
//! last bit of `h`; only the two additions round.

/// Moves `own` halfway towards `theirs` and leaves in `theirs` the way it went. Returns the sum of the
/// squared differences there were.
pub fn meet(own: &mut [f32], theirs: &mut [f32]) -> f64 {
    debug_assert_eq!(own.len(), theirs.len());
    for (own, theirs) in own.iter_mut().zip(theirs.iter_mut()) {
        // Halved before they are subtracted: no difference of finite weights overflows.
        let half = *theirs * 0.5 - *own * 0.5;
        *own += half;
        *theirs = half;
    }
    squares(theirs) * 4.0
}

/// The active side's part: moves `own` against the way its partner went.
pub fn follow(own: &mut [f32], half: &[f32]) {
    debug_assert_eq!(own.len(), half.len());
    for (own, half) in own.iter_mut().zip(half) {
        *own -= half;
    }
}

/// The distance of two replicas, per weight, from the sum of the squares of their differences.
pub fn root_mean_square(squares: f64, elements: usize) -> f64 {
    (squares / elements.max(1) as f64).sqrt()
}

/// The sum of the squares; not finite if an element is not.
pub fn squares(values: &[f32]) -> f64 {
    /// As many independent sums as a vector register has lanes: fewer leave it idle.
    const LANES: usize = 8;
    let square = |value: f32| f64::from(value) * f64::from(value);
    let mut sums = [0.0; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (sum, &value) in sums.iter_mut().zip(chunk) {
            *sum += square(value);
        }
    }
    let rest: f64 = chunks.remainder().iter().map(|&value| square(value)).sum();
    sums.iter().sum::<f64>() + rest
}

/// Whether all of `values` are numbers.
pub fn are_finite(values: &[f32]) -> bool {
    // Without an early end, so that the loop is vectorized.
    values.iter().fold(true, |all, value| all & value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_end_in_the_middle() {
        let (mut active, mut passive) = (vec![1.0, -4.0, 0.5], vec![3.0, 4.0, 0.5]);
        let mut message = active.clone();
        let squares = meet(&mut passive, &mut message);
        assert_eq!(passive, [2.0, 0.0, 0.5]);
        assert_eq!(squares, 4.0 + 64.0);
        follow(&mut active, &message);
        assert_eq!(active, passive);
        assert_eq!(root_mean_square(squares, 17), 2.0);
    }

    #[test]
    fn training_meanwhile_is_kept() {
        let (mut active, mut passive) = (vec![10.0f32], vec![0.0]);
        let mut message = active.clone();
        meet(&mut passive, &mut message);
        active[0] += 1.0;
        follow(&mut active, &message);
        assert_eq!((active[0], passive[0]), (6.0, 5.0));
    }

    #[test]
    fn what_is_not_a_number_is_noticed() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in 0..19 {
                let mut values = vec![1.0; 19];
                assert!(are_finite(&values) && squares(&values) == 19.0);
                values[place] = bad;
                assert!(!are_finite(&values) && !squares(&values).is_finite());
            }
        }
        let (mut own, mut theirs) = ([f32::MAX], [f32::MIN]);
        assert!(meet(&mut own, &mut theirs).is_finite());
        assert_eq!(own, [0.0]);
    }
}
