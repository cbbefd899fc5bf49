//! How far another machine's clock is from ours.
//!
//! One side sends a message at `sent`, the other stamps it with its own clock at `remote`, the answer
//! is back at `received`. If both ways took equally long, the stamp was made halfway between `sent`
//! and `received`; however unequal they were, it was made between the two. So the midpoint gives the
//! offset, and half of the round trip bounds its error. The exchange with the shortest round trip has
//! the tightest bound, and averaging in the others would only widen it.

use serde::{Deserialize, Serialize};

/// One exchange with the other side, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// When the question left, on our clock.
    pub sent: f64,
    /// When the other side answered, on its clock.
    pub remote: f64,
    /// When the answer arrived, on our clock.
    pub received: f64,
}

/// The difference between two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offset {
    /// The other clock minus ours: subtract it from a remote time to have it on our clock.
    pub seconds: f64,
    /// The true offset is within this many seconds of [`Offset::seconds`].
    pub error: f64,
}

impl Offset {
    /// The offset from the exchange with the shortest round trip.
    ///
    /// Exchanges that cannot have happened (a time that is no number, an answer before its question)
    /// are passed over; `None` if none is left.
    pub fn from_samples(samples: &[Sample]) -> Option<Offset> {
        samples
            .iter()
            .map(|sample| Offset {
                seconds: sample.remote - (sample.sent + sample.received) / 2.0,
                error: (sample.received - sample.sent) / 2.0,
            })
            .filter(|offset| offset.seconds.is_finite() && offset.error >= 0.0)
            .min_by(|a, b| a.error.total_cmp(&b.error))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_shortest_round_trip_decides() {
        let slow = Sample { sent: 0.0, remote: 100.9, received: 1.0 };
        let fast = Sample { sent: 2.0, remote: 102.01, received: 2.02 };
        let offset = Offset::from_samples(&[slow, fast]).unwrap();
        assert!((offset.seconds - 100.0).abs() < 1e-9);
        assert!((offset.error - 0.01).abs() < 1e-9);
    }

    #[test]
    fn impossible_exchanges_are_passed_over() {
        let backwards = Sample { sent: 1.0, remote: 0.0, received: 0.5 };
        let nonsense = Sample { sent: f64::NAN, remote: 0.0, received: 0.5 };
        let endless = Sample { sent: 0.0, remote: 0.0, received: f64::INFINITY };
        assert_eq!(Offset::from_samples(&[backwards, nonsense, endless]), None);
        assert_eq!(Offset::from_samples(&[]), None);
    }

    proptest! {
        #[test]
        fn the_error_bounds_the_offset_however_unequal_the_ways(
            truth in -1e6..1e6f64,
            ways in prop::collection::vec((0.0..0.1f64, 0.0..0.1f64), 1..20),
        ) {
            let samples: Vec<Sample> = ways
                .iter()
                .enumerate()
                .map(|(i, (there, back))| Sample {
                    sent: i as f64,
                    remote: i as f64 + there + truth,
                    received: i as f64 + there + back,
                })
                .collect();
            let offset = Offset::from_samples(&samples).unwrap();
            prop_assert!((offset.seconds - truth).abs() <= offset.error + 1e-8);
        }
    }
}
