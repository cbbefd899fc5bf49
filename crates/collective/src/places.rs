//! From which lines of their programs the ranks made their calls.
//!
//! A caller may say of a call where it was made. When ranks have called different things, every
//! monitor tells the others the places of the calls in question, without help of its program, which
//! may not even wait for the call. So an error names both lines on all ranks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use unisono_net::rank::Rank;

/// Calls whose places are remembered, as many as the history of calls compares.
const REMEMBERED: usize = 64;

/// How long an error waits for the places that other ranks tell. Their monitors answer at once, so
/// that it only runs out where one is cut off. Longer: then the error comes later. Shorter: a busy
/// machine leaves out a line.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// A call, by its number, and its place.
type Noted = (u32, Arc<str>);

/// A rank, and the number of its call.
pub type Caller = (Rank, u32);

/// The places of this rank's last calls, and those that other ranks have told.
#[derive(Default)]
pub struct Places {
    /// Whether any call had a place: a group without takes no lock per call.
    used: AtomicBool,
    own: Mutex<Vec<Option<Noted>>>,
    told: Mutex<Told>,
    change: Condvar,
}

#[derive(Default)]
struct Told {
    places: Vec<(Caller, Option<String>)>,
    /// Ranks that tell nothing any more.
    gone: Vec<Rank>,
}

impl Places {
    /// Remembers where a call of this rank was made.
    pub fn note(&self, number: u32, place: Option<&Arc<str>>) {
        if place.is_none() && !self.used.load(Ordering::Relaxed) {
            return;
        }
        let mut own = self.own.lock().expect("no panic while locked");
        if own.is_empty() {
            self.used.store(true, Ordering::Relaxed);
            own.resize(REMEMBERED, None);
        }
        own[number as usize % REMEMBERED] = place.map(|place| (number, place.clone()));
    }

    /// Where a call of this rank was made, if that is known.
    pub fn own(&self, number: u32) -> Option<String> {
        let own = self.own.lock().expect("no panic while locked");
        let (noted, place) = own.get(number as usize % REMEMBERED)?.as_ref()?;
        (*noted == number).then(|| place.to_string())
    }

    /// A rank tells where it made a call, or that it does not know.
    pub fn tell(&self, caller: Caller, place: Option<String>) {
        let mut told = self.told.lock().expect("no panic while locked");
        // Each rank tells of the two calls that differ, once; more of one rank is not believed.
        let mut earlier = told.places.iter().filter(|((rank, _), _)| *rank == caller.0);
        if earlier.clone().count() < 2 && earlier.all(|(known, _)| *known != caller) {
            told.places.push((caller, place));
        }
        self.change.notify_all();
    }

    /// A rank is gone: callers do not wait for what it would tell.
    pub fn miss(&self, rank: Rank) {
        self.told.lock().expect("no panic while locked").gone.push(rank);
        self.change.notify_all();
    }

    /// What a rank has told by now.
    pub fn told(&self, caller: Caller) -> Option<String> {
        let told = self.told.lock().expect("no panic while locked");
        let known = told.places.iter().find(|(known, _)| *known == caller)?;
        known.1.clone()
    }

    /// Waits until this rank has told, or is gone.
    pub fn wait_for(&self, caller: Caller, deadline: Instant) {
        let mut told = self.told.lock().expect("no panic while locked");
        while told.places.iter().all(|(known, _)| *known != caller)
            && !told.gone.contains(&caller.0)
        {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
            let waited = self.change.wait_timeout(told, left);
            told = waited.expect("no panic while locked").0;
        }
    }
}
