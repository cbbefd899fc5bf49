//! When local steps are synchronized.
//!
//! Steps are counted from 1 and cut into *periods*. In each period, every *group* of parameters is
//! submitted once, at the end of a step: the last of `P` groups in the last step of the period, the
//! others before it, at even distances, so that the links always have about as much to carry. What
//! was submitted is applied *delay* steps later. The delay is shorter than a period, so a group is
//! applied before it is submitted again.
//!
//! All periods are equally long, or each is one step longer than the one before it until they are
//! as long as the *longest*: early in training the weights move fast and workers drift apart, later
//! they can be left to themselves for longer.
//!
//! What happens after a step follows from its number alone, so a run that is resumed goes on as it
//! would have.

/// When local steps are synchronized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Steps of the first period.
    first: u64,
    /// Steps of the longest.
    longest: u64,
    groups: u64,
    delay: u64,
}

/// What happens after a step. Submission comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// The group that is to be submitted.
    pub submit: Option<usize>,
    /// The group whose last submission is to be applied.
    pub apply: Option<usize>,
}

impl Schedule {
    /// Periods that grow from `first` steps to `longest`. No period may be shorter than the number
    /// of groups, nor as short as the delay.
    pub(in crate::strategy) fn new(first: u32, longest: u32, groups: u32, delay: u32) -> Schedule {
        let [first, longest, groups, delay] = [first, longest, groups, delay].map(u64::from);
        assert!(groups >= 1 && groups <= first && delay < first && first <= longest);
        Schedule { first, longest, groups, delay }
    }

    /// The same with no more groups than that, but at least one.
    pub(super) fn of_at_most(self, groups: usize) -> Schedule {
        Schedule { groups: self.groups.min(groups as u64).max(1), ..self }
    }

    /// Into how many groups the parameters are split.
    pub fn groups(&self) -> usize {
        self.groups as usize
    }

    /// Steps between submission and application.
    pub fn delay(&self) -> u64 {
        self.delay
    }

    /// What happens after a step, the first of which is 1.
    pub fn after(&self, step: u64) -> Due {
        let apply = step.checked_sub(self.delay).and_then(|step| self.submitted(step));
        Due { submit: self.submitted(step), apply }
    }

    /// The group that is submitted after a step. There is at most one: a period is not shorter than
    /// the number of groups, so no two fall on one step.
    fn submitted(&self, step: u64) -> Option<usize> {
        let (before, length) = self.period(step.checked_sub(1)?);
        let within = u128::from(step - before);
        let (length, groups) = (u128::from(length), u128::from(self.groups));
        // The last that is not due later: ⌊group · length / groups⌋ ≤ within.
        let group = ((within + 1) * groups - 1) / length;
        (group > 0 && group * length / groups == within).then(|| group as usize - 1)
    }

    /// The period in which there is a step that comes after so many: the steps before the period,
    /// and those in it.
    fn period(&self, steps: u64) -> (u64, u64) {
        let grown = self.longest - self.first;
        let growing = self.before(grown);
        if steps >= growing {
            (steps - (steps - growing) % self.longest, self.longest)
        } else {
            // The last period with `before(period)` of at most `steps`, which is a root of a
            // quadratic equation.
            let half = 2 * u128::from(self.first) - 1;
            let period = ((half * half + 8 * u128::from(steps)).isqrt() - half) / 2;
            (self.before(period as u64), self.first + period as u64)
        }
    }

    /// Steps before a growing period, which are counted from 0.
    fn before(&self, period: u64) -> u64 {
        // At most the square of the longest period, which has 32 bits.
        period * (2 * self.first + period - 1) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The schedule by its definition, step by step: what is submitted after steps 1, 2, ….
    fn replay(schedule: &Schedule, steps: u64) -> Vec<Option<usize>> {
        let mut submitted = Vec::new();
        let mut length = schedule.first;
        while (submitted.len() as u64) < steps {
            let mut period = vec![None; length as usize];
            for group in 0..schedule.groups {
                let at = ((group + 1) * length / schedule.groups) as usize - 1;
                assert_eq!(period[at].replace(group as usize), None);
            }
            submitted.extend(period);
            length = (length + 1).min(schedule.longest);
        }
        submitted.truncate(steps as usize);
        submitted
    }

    #[test]
    fn every_small_schedule_is_as_defined() {
        for first in 1..9 {
            for longest in first..first + 6 {
                for groups in 1..=first {
                    for delay in 0..first {
                        let schedule = Schedule::new(first, longest, groups, delay);
                        let submitted = replay(&schedule, 120);
                        for (i, group) in submitted.iter().enumerate() {
                            let before = i.checked_sub(delay as usize);
                            let apply = before.and_then(|before| submitted[before]);
                            let expected = Due { submit: *group, apply };
                            let step = i as u64 + 1;
                            assert_eq!(schedule.after(step), expected, "{schedule:?}, {step}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_group_is_applied_before_it_is_submitted_again() {
        for (first, longest, groups, delay) in [(4, 4, 4, 3), (5, 9, 3, 4), (7, 7, 1, 6)] {
            let schedule = Schedule::new(first, longest, groups, delay);
            let mut in_flight = vec![false; groups as usize];
            for step in 1..200 {
                let due = schedule.after(step);
                if let Some(group) = due.submit {
                    assert!(!std::mem::replace(&mut in_flight[group], true));
                }
                if let Some(group) = due.apply {
                    assert!(std::mem::replace(&mut in_flight[group], false));
                }
            }
        }
    }

    #[test]
    fn plain_periods_end_at_multiples() {
        let schedule = Schedule::new(20, 20, 1, 0);
        for step in 0..100 {
            let synchronizes = step > 0 && step % 20 == 0;
            let group = synchronizes.then_some(0);
            assert_eq!(schedule.after(step), Due { submit: group, apply: group }, "{step}");
        }
    }

    #[test]
    fn groups_take_turns() {
        let schedule = Schedule::new(20, 20, 4, 2);
        let submitted = |step| schedule.after(step).submit;
        let steps: Vec<_> = (1..41).filter_map(|s| submitted(s).map(|g| (s, g))).collect();
        let expected = [(5, 0), (10, 1), (15, 2), (20, 3), (25, 0), (30, 1), (35, 2), (40, 3)];
        assert_eq!(steps, expected);
        assert_eq!(schedule.after(22), Due { submit: None, apply: Some(3) });
        assert_eq!(schedule.after(2), Due::default());
    }

    proptest! {
        #[test]
        fn long_runs_have_whole_periods(
            first in 1u32..,
            growth in 0u32..100_000,
            groups in 1u32..50,
            step in 1u64..,
        ) {
            let longest = first.saturating_add(growth);
            let schedule = Schedule::new(first, longest, groups.min(first), 0);
            let (before, length) = schedule.period(step - 1);
            prop_assert!(before < step && step - before <= length);
            prop_assert!((schedule.first..=schedule.longest).contains(&length));
            if let Some(last) = before.checked_add(length) {
                prop_assert_eq!(schedule.after(last).submit, Some(schedule.groups() - 1));
                let (next, longer) = schedule.period(last);
                prop_assert_eq!((next, longer), (last, (length + 1).min(schedule.longest)));
            }
        }
    }
}
