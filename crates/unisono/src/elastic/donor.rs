//! A member's side of a handover, between its training thread and the thread that serves the joiner.
//!
//! The training thread is never made to wait: it looks at one number in every step, copies the state when a joiner
//! has asked for it, and from then on a copy of the means of every step goes into a queue. The serving thread
//! takes from the queue what it sends. A queue that is full ends the handover.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use socket2::Socket;
use unisono_cluster::membership::WorkerId;

use super::wire::Message;

/// Bytes of means that wait for the joiner, in steps. More: a joiner on a slow link has more time to keep up, and
/// the donor holds more memory meanwhile. Fewer: more joiners fall back to a handover for which the others wait.
const QUEUED_STEPS: usize = 4;

/// The least of that in bytes, for small models, whose steps take less time than a process may be kept from
/// running.
const QUEUED_LEAST: usize = 64 << 20;

/// What is sent to a joiner.
#[derive(Debug, PartialEq)]
pub enum Item {
    /// The state after so many steps, and whether the joiner must be told the lengths of its vectors.
    State { version: u64, vectors: Vec<Vec<f32>>, are_told: bool },
    /// What a step has changed.
    Step { version: u64, changes: Changes },
    /// The last word.
    Last(Message),
}

/// The means of a step that were copied for a joiner, by the number of the parameter.
pub type Means = Vec<(usize, Vec<f32>)>;

/// By what a joiner makes the same step.
#[derive(Debug, PartialEq)]
pub enum Changes {
    /// The means of parameters whose lengths it knows.
    Means(Means),
    /// Whatever it makes of these vectors, whose lengths it must be told.
    Vectors(Vec<Vec<f32>>),
}

impl Changes {
    fn bytes(&self) -> usize {
        let size = |values: &Vec<f32>| size_of_val(&values[..]);
        match self {
            Changes::Means(means) => means.iter().map(|(_, values)| size(values)).sum(),
            Changes::Vectors(vectors) => vectors.iter().map(size).sum(),
        }
    }
}

/// What the serving thread has to do.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// Send this.
    Item(Item),
    /// Show that this process lives.
    Nothing,
    /// Close the connection.
    Close,
}

/// What is to be sent to a joiner, without a lock or a socket.
#[derive(Debug, PartialEq)]
pub struct Outgoing {
    newest: u64,
    items: VecDeque<Item>,
    /// Bytes of the means among them.
    queued: usize,
    limit: usize,
    /// Whether nothing will follow.
    is_over: bool,
}

impl Outgoing {
    /// Begins with the state after so many steps.
    pub fn new(version: u64, vectors: Vec<Vec<f32>>, are_told: bool, limit: usize) -> Outgoing {
        let items = VecDeque::from([Item::State { version, vectors, are_told }]);
        Outgoing { newest: version, items, queued: 0, limit, is_over: false }
    }

    /// Adds what a step has changed. Those of another step than the next end the handover.
    pub fn push(&mut self, version: u64, changes: Changes) {
        if self.is_over {
            return;
        }
        let bytes = changes.bytes();
        if version != self.newest + 1 {
            self.break_off();
        } else if self.queued + bytes > self.limit {
            self.end_with(Message::TooSlow);
        } else {
            (self.newest, self.queued) = (version, self.queued + bytes);
            self.items.push_back(Item::Step { version, changes });
        }
    }

    /// The joiner is in the next epoch: what is in the queue is all.
    pub fn finish(&mut self) {
        if !self.is_over {
            self.is_over = true;
            self.items.push_back(Item::Last(Message::End { steps: self.newest }));
        }
    }

    /// The state is no longer that which the joiner gets to.
    pub fn break_off(&mut self) {
        (self.is_over, self.queued) = (true, 0);
        self.items.clear();
    }

    /// No step follows those in the queue.
    pub fn run_dry(&mut self) {
        self.is_over = true;
    }

    /// The joiner gets what it needs in the next group.
    pub fn refuse(&mut self) {
        if !self.is_over {
            self.end_with(Message::TooSlow);
        }
    }

    /// What to send next. `None` if there is nothing.
    pub fn pop(&mut self) -> Option<Item> {
        let item = self.items.pop_front();
        if let Some(Item::Step { changes, .. }) = &item {
            self.queued -= changes.bytes();
        }
        item
    }

    /// The steps that the donor has made.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    fn end_with(&mut self, word: Message) {
        self.break_off();
        self.items.push_back(Item::Last(word));
    }
}

/// What a member shares with the threads that serve its joiners: the training thread gives it the state when a joiner has
/// asked for it, and then what every step changes.
pub struct Donor {
    /// One of the numbers below; the training thread looks at it in every step.
    activity: AtomicU8,
    inner: Mutex<Inner>,
    bell: Condvar,
}

const IDLE: u8 = 0;
const ASKED: u8 = 1;
const FOLLOWED: u8 = 2;

#[derive(Default)]
struct Inner {
    /// What a joiner must have in common with this worker, once it trains.
    model: Option<[u8; 32]>,
    /// The most bytes of means that wait for a joiner.
    limit: usize,
    is_in_epoch: bool,
    is_closed: bool,
    joiner: Option<Joiner>,
}

/// The joiner that is served.
struct Joiner {
    id: WorkerId,
    socket: Arc<Socket>,
    /// Once the state is copied.
    outgoing: Option<Outgoing>,
    /// Why there will be none.
    refusal: Option<Message>,
}

impl Donor {
    pub(super) fn new() -> Arc<Donor> {
        let (activity, inner) = (AtomicU8::new(IDLE), Mutex::default());
        Arc::new(Donor { activity, inner, bell: Condvar::new() })
    }

    /// From now on joiners that train this model, in each of whose steps so many elements change, may ask for its
    /// state.
    pub fn offer(&self, model: [u8; 32], elements: usize) {
        let step = elements.saturating_mul(size_of::<f32>());
        let mut inner = self.lock();
        inner.model = Some(model);
        inner.limit = step.saturating_mul(QUEUED_STEPS).max(QUEUED_LEAST);
    }

    /// Sets how many bytes of means may wait for a joiner.
    #[cfg(test)]
    pub fn limit(&self, bytes: usize) {
        self.lock().limit = bytes;
    }

    /// Whether a joiner has asked for the state.
    pub fn is_asked(&self) -> bool {
        self.activity.load(Ordering::Relaxed) == ASKED
    }

    /// Whether a joiner follows, so that the means of the step must be copied.
    pub fn is_followed(&self) -> bool {
        self.activity.load(Ordering::Relaxed) == FOLLOWED
    }

    /// Gives the joiner that has asked the state after so many steps, of which it knows the lengths.
    pub fn give(&self, version: u64, vectors: Vec<Vec<f32>>) {
        self.begin(version, vectors, false);
    }

    /// Gives the joiner that follows the means of a step, from which all members update their weights.
    pub fn give_means(&self, version: u64, means: Means) {
        self.with_outgoing(|outgoing| outgoing.push(version, Changes::Means(means)));
    }

    /// Gives the joiner that has asked the state after so many steps, and tells it the lengths.
    pub fn tell(&self, version: u64, vectors: Vec<Vec<f32>>) {
        self.begin(version, vectors, true);
    }

    /// Gives the joiner that follows what it needs to make a step, and tells it the lengths.
    pub fn tell_step(&self, version: u64, vectors: Vec<Vec<f32>>) {
        self.with_outgoing(|outgoing| outgoing.push(version, Changes::Vectors(vectors)));
    }

    fn begin(&self, version: u64, vectors: Vec<Vec<f32>>, are_told: bool) {
        let mut inner = self.lock();
        let limit = inner.limit;
        if let Some(joiner) = inner.joiner.as_mut().filter(|joiner| joiner.is_waiting()) {
            joiner.outgoing = Some(Outgoing::new(version, vectors, are_told, limit));
            self.note(&inner);
        }
    }

    /// The state of this worker was replaced by another, so that what follows does not belong to what was sent.
    pub fn break_off(&self) {
        self.with_outgoing(Outgoing::break_off);
    }

    /// No joiner can follow the steps of this worker: the one that does is told so.
    pub fn refuse(&self) {
        self.with_outgoing(Outgoing::refuse);
    }

    /// The worker is let go: it makes no step any more, and a joiner needs another donor.
    pub(super) fn retire(&self) {
        self.leave_epoch();
        self.with_outgoing(Outgoing::run_dry);
    }

    /// The worker leaves its epoch: until it is in the next, it makes no step.
    pub(super) fn leave_epoch(&self) {
        let mut inner = self.lock();
        inner.is_in_epoch = false;
        if let Some(joiner) = inner.joiner.as_mut().filter(|joiner| joiner.is_waiting()) {
            joiner.refusal = Some(Message::NotNow);
        }
        self.note(&inner);
    }

    /// The worker is in another epoch, of these members.
    pub(super) fn enter_epoch(&self, members: &[WorkerId]) {
        let mut inner = self.lock();
        inner.is_in_epoch = true;
        if let Some(joiner) = inner.joiner.as_mut().filter(|joiner| members.contains(&joiner.id)) {
            match &mut joiner.outgoing {
                Some(outgoing) => outgoing.finish(),
                None => joiner.refusal = Some(Message::NotNow),
            }
        }
        self.note(&inner);
    }

    /// A joiner asks for the state, on this socket; if it does not get it, what it is told.
    pub(super) fn ask(
        &self,
        id: WorkerId,
        model: [u8; 32],
        socket: &Arc<Socket>,
    ) -> Result<(), Message> {
        let mut inner = self.lock();
        match inner.model {
            _ if inner.is_closed || !inner.is_in_epoch => Err(Message::NotNow),
            None => Err(Message::NotNow),
            Some(own) if own != model => Err(Message::Differs),
            _ if inner.joiner.is_some() => Err(Message::Busy),
            _ => {
                let socket = socket.clone();
                inner.joiner = Some(Joiner { id, socket, outgoing: None, refusal: None });
                self.note(&inner);
                Ok(())
            }
        }
    }

    /// What the serving thread does next; waits for so long at most.
    pub(super) fn next(&self, patience: Duration) -> Next {
        let until = Instant::now() + patience;
        let mut inner = self.lock();
        loop {
            let is_closed = inner.is_closed;
            let Some(joiner) = inner.joiner.as_mut().filter(|_| !is_closed) else {
                return Next::Close;
            };
            if let Some(refusal) = joiner.refusal.take() {
                return Next::Item(Item::Last(refusal));
            }
            if let Some(outgoing) = &mut joiner.outgoing {
                match outgoing.pop() {
                    Some(item) => return Next::Item(item),
                    None if outgoing.is_over => return Next::Close,
                    None => {}
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Nothing;
            }
            inner = self.bell.wait_timeout(inner, left).expect("no panic while locked").0;
        }
    }

    /// The steps that the donor has made, as the joiner is told.
    pub(super) fn newest(&self) -> u64 {
        let inner = self.lock();
        let outgoing = inner.joiner.as_ref().and_then(|joiner| joiner.outgoing.as_ref());
        outgoing.map_or(0, Outgoing::newest)
    }

    /// The serving thread has ended.
    pub(super) fn release(&self) {
        let mut inner = self.lock();
        let released = inner.joiner.take();
        self.note(&inner);
        drop(inner);
        // What it holds may be much.
        drop(released);
    }

    /// Ends what is under way, and serves no more.
    pub(super) fn close(&self) {
        let mut inner = self.lock();
        inner.is_closed = true;
        if let Some(joiner) = &inner.joiner {
            let _ = joiner.socket.shutdown(std::net::Shutdown::Both);
        }
        self.note(&inner);
    }

    fn with_outgoing(&self, then: impl FnOnce(&mut Outgoing)) {
        let mut inner = self.lock();
        if let Some(outgoing) = inner.joiner.as_mut().and_then(|joiner| joiner.outgoing.as_mut()) {
            then(outgoing);
            self.note(&inner);
        }
    }

    /// Tells both threads of a change.
    fn note(&self, inner: &Inner) {
        let activity = match &inner.joiner {
            Some(joiner) if joiner.is_waiting() => ASKED,
            Some(Joiner { outgoing: Some(outgoing), .. }) if !outgoing.is_over => FOLLOWED,
            _ => IDLE,
        };
        self.activity.store(activity, Ordering::Relaxed);
        self.bell.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while locked")
    }
}

impl Joiner {
    fn is_waiting(&self) -> bool {
        self.outgoing.is_none() && self.refusal.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn means(bytes: usize) -> Changes {
        Changes::Means(vec![(0, vec![0.0; bytes / 4])])
    }

    fn state(version: u64) -> Item {
        Item::State { version, vectors: vec![], are_told: false }
    }

    fn begun(version: u64) -> Outgoing {
        Outgoing::new(version, vec![], false, 100)
    }

    #[test]
    fn the_means_of_every_step_follow_the_state_and_then_the_end() {
        let mut outgoing = begun(3);
        outgoing.push(4, means(40));
        outgoing.push(5, means(40));
        outgoing.finish();
        outgoing.push(6, means(40));
        let sent: Vec<Item> = std::iter::from_fn(|| outgoing.pop()).collect();
        let expected = [
            state(3),
            Item::Step { version: 4, changes: means(40) },
            Item::Step { version: 5, changes: means(40) },
            Item::Last(Message::End { steps: 5 }),
        ];
        assert_eq!(sent, expected);
        assert!(outgoing.is_over);
    }

    #[test]
    fn a_joiner_that_does_not_keep_up_is_dropped_and_told_so() {
        let mut outgoing = begun(0);
        for version in 1..=2 {
            outgoing.push(version, means(40));
        }
        // What was sent makes room.
        assert_eq!(outgoing.pop(), Some(state(0)));
        assert!(matches!(outgoing.pop(), Some(Item::Step { version: 1, .. })));
        outgoing.push(3, means(60));
        outgoing.push(4, means(4));
        assert_eq!(outgoing.pop(), Some(Item::Last(Message::TooSlow)));
        assert_eq!(outgoing.pop(), None);
        assert!(outgoing.is_over);
    }

    #[test]
    fn a_gap_between_two_steps_ends_the_handover() {
        for version in [0, 1, 3, u64::MAX] {
            let mut outgoing = begun(1);
            outgoing.push(version, means(4));
            assert!(outgoing.is_over && outgoing.pop().is_none(), "{version}");
        }
    }
}
