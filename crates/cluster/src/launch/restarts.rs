//! Which members of a job are started again when they fail, and when.
//!
//! Every start of a member is one of its *lives*, numbered from 0. A life that a signal ended, or
//! that exited with an error, is followed by another after a pause, as long as the job's *budget*
//! of restarts lasts. Two kinds of failure would only be repeated, and are final:
//!
//! - exit codes 2 and 64, by which programs say that they were called wrongly;
//! - an error in the first second of the first life: it never worked.
//!
//! The pause doubles with every life in a row that ended at once, and is short again after one that
//! lasted.

use std::time::Duration;

use super::Ending;

/// Whether members of a job that fail are started again.
///
/// For jobs whose ranks do not form groups: a group does not survive the loss of a rank, and the other
/// ranks do not wait for a restarted one at the rendezvous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// How many restarts the whole job may have; 0 for none. A failure beyond it ends the job. More
    /// survive more kills; but a member that cannot work is tried as often, and every ended life
    /// keeps its process number until the job ends.
    pub limit: u32,
}

/// The restarts a job has left.
pub(super) struct Budget {
    limit: u32,
    used: u32,
}

/// One life of a member, as far as it decides about the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Life {
    pub number: u32,
    /// How long it lasted.
    pub lasted: Duration,
    /// How many lives in a row before this one ended at once.
    pub hasty: u32,
}

/// A life shorter than this ended *at once*. Longer takes more failures for mistakes that will be
/// repeated; shorter restarts programs that never get beyond their beginning.
const AT_ONCE: Duration = Duration::from_secs(1);

/// The pause after a life that lasted. Longer leaves the others without the member; shorter repeats
/// what is over in a moment, such as a machine short of memory.
const PAUSE: Duration = Duration::from_millis(20);

/// The longest pause. Longer keeps a job waiting for a member that was merely unlucky; shorter
/// spends the budget, and the machine, on one that cannot work.
const LONGEST_PAUSE: Duration = Duration::from_millis(1280);

impl Budget {
    pub fn new(restarts: Restarts) -> Budget {
        Budget { limit: restarts.limit, used: 0 }
    }

    /// How long to wait before the member is started again, at the cost of one restart; `None` if
    /// its failure is final.
    pub fn spend(&mut self, life: &Life, ending: Ending) -> Option<Duration> {
        if self.used == self.limit || is_final(life, ending) {
            return None;
        }
        self.used += 1;
        let doublings = life.hasty_after().min(31);
        Some(PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE))
    }

    /// How many restarts were spent, and of how many.
    pub fn spent(&self) -> (u32, u32) {
        (self.used, self.limit)
    }
}

impl Life {
    /// How many lives in a row have ended at once, this one included.
    pub fn hasty_after(&self) -> u32 {
        if self.lasted < AT_ONCE { self.hasty.saturating_add(1) } else { 0 }
    }
}

/// Whether a life that ended so would only be repeated.
pub(super) fn is_final(life: &Life, ending: Ending) -> bool {
    match ending {
        Ending::Signal(_) => false,
        Ending::Code(2 | 64) => true,
        Ending::Code(_) => life.number == 0 && life.lasted < AT_ONCE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const KILLED: Ending = Ending::Signal(9);

    fn is_restarted(life: Life, ending: Ending) -> bool {
        Budget::new(Restarts { limit: 1 }).spend(&life, ending).is_some()
    }

    #[test]
    fn mistakes_are_final_and_accidents_are_not() {
        let newborn = Life::default();
        let first = Life { lasted: LONG, ..newborn };
        let second = Life { number: 1, ..newborn };
        for life in [newborn, first, second] {
            assert!(is_restarted(life, KILLED), "{life:?}");
            assert!(!is_restarted(life, Ending::Code(2)), "{life:?}");
            assert!(!is_restarted(life, Ending::Code(64)), "{life:?}");
        }
        assert!(!is_restarted(newborn, Ending::Code(1)), "it never worked");
        assert!(is_restarted(first, Ending::Code(1)));
        assert!(is_restarted(second, Ending::Code(1)));
    }

    #[test]
    fn the_budget_is_the_limit() {
        let mut budget = Budget::new(Restarts { limit: 3 });
        let life = Life { lasted: LONG, ..Life::default() };
        assert_eq!((0..9).filter(|_| budget.spend(&life, KILLED).is_some()).count(), 3);
        assert_eq!(budget.spent(), (3, 3));
        assert!(Budget::new(Restarts::default()).spend(&life, KILLED).is_none());
    }

    #[test]
    fn pauses_grow_while_lives_end_at_once() {
        let mut budget = Budget::new(Restarts { limit: u32::MAX });
        let mut life = Life::default();
        let mut last = Duration::ZERO;
        for _ in 0..100 {
            let pause = budget.spend(&life, KILLED).expect("there are enough");
            assert!(pause > last || pause == LONGEST_PAUSE, "{life:?}");
            last = pause;
            life = Life { number: life.number + 1, hasty: life.hasty_after(), ..life };
        }
        assert_eq!(last, LONGEST_PAUSE);
        life.lasted = LONG;
        assert_eq!(budget.spend(&life, KILLED), Some(PAUSE));
    }
}
