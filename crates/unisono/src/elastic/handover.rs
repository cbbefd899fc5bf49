//! A worker joins beside the training: it finds a member, takes its state, follows its steps until it is level with
//! the members, and only then says that it is ready. Until the epoch that it is in begins it goes on following.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use unisono_cluster::membership::{Client, MembershipError, Seen, WorkerId};
use unisono_net::frame::{self, FrameError};
use unisono_net::{Connection, Dialer, HandshakeError, Target, Token, timespec};

use super::joiner::{Follower, Following, Heard, Lost, Patient};
use super::server::introduction;
use super::wire::Ask;

/// How many donors may be lost on the way before the state is handed over inside of the group. More: a worker
/// whose donors are killed one after the other joins later. Fewer: the others wait for a handover more often.
const DONORS: u32 = 5;

/// How many steps a worker may be behind its donor when it says that it is ready: the one whose means are under
/// way. More: the others wait longer for it. Fewer: it is never level with members that do not pause.
const LEVEL: u64 = 1;

/// How long a joiner waits before it asks again where no member could serve it. Longer: it joins later by as much.
/// Shorter: members that are busy are asked more often in vain.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a joiner waits after it has lost its first donor, and twice as long after each further one. Longer: it joins
/// later. Shorter: it gives up before the launcher has noticed that a member is gone, if its machine was cut off.
const AFTER_LOSS: Duration = Duration::from_millis(100);

/// How often a joiner looks whether it is needed at once. Longer: a run that waits for it waits as much longer. Shorter:
/// more messages to the launcher.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A joiner that is level with its donor, and follows it.
pub struct Handover {
    connection: Connection,
    following: Following,
    timeout: Duration,
}

/// What came of asking a member.
pub(super) enum Asked {
    Level(Box<Handover>),
    /// Another member may be free, or this one later.
    NotNow,
    /// No member can help.
    Never,
}

/// Why a member was lost that was asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Dial(#[from] HandshakeError),
    #[error(transparent)]
    Lost(#[from] Lost),
    #[error(transparent)]
    Said(#[from] FrameError),
}

impl Handover {
    /// Gets a model level with the members of the present epoch, which `place` finds in what a member says of
    /// itself. `None` if there is none that could help: then the state is handed over inside of the group.
    pub fn find(
        client: &Client,
        timeout: Duration,
        model: &mut dyn Follower,
        place: impl Fn(&[u8]) -> Option<SocketAddr>,
    ) -> Result<Option<Handover>, MembershipError> {
        let (mut lost, mut turn) = (0, client.id().number as usize);
        let mut regrouping_since = None;
        while lost < DONORS && !client.is_let_go() {
            let addresses = match client.look()? {
                Seen::Members(addresses) => addresses,
                // Soon they serve again; but a worker that is stuck among them is no reason to wait for ever.
                Seen::Regrouping => {
                    let since = regrouping_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= timeout {
                        return Ok(None);
                    }
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Seen::Nothing => return Ok(None),
            };
            regrouping_since = None;
            let donors: Vec<SocketAddr> =
                addresses.iter().filter_map(|address| place(address)).collect();
            if donors.is_empty() {
                return Ok(None);
            }
            // Workers that join at once begin with different members.
            let donor = donors[turn % donors.len()];
            turn += 1;
            // While the state comes, the others may be lost, and this worker needed for the next epoch.
            let looked = Cell::new(Instant::now());
            let is_enough = || {
                let is_due = looked.get().elapsed() >= LOOK_AGAIN;
                if is_due {
                    looked.set(Instant::now());
                }
                client.is_let_go() || is_due && matches!(client.look(), Ok(Seen::Nothing))
            };
            let asker = (client.token(), client.id());
            match Handover::ask(asker, donor, timeout, model, &is_enough) {
                Ok(Asked::Level(handover)) => return Ok(Some(*handover)),
                Ok(Asked::Never) => return Ok(None),
                Ok(Asked::NotNow) => std::thread::sleep(PAUSE),
                Err(Failure::Lost(Lost::Unfit(why))) => {
                    log::debug!("following the worker at {donor}: {why}");
                    return Ok(None);
                }
                Err(error) => {
                    log::debug!("the state of the worker at {donor}: {error}");
                    std::thread::sleep(AFTER_LOSS * (1 << lost));
                    lost += 1;
                }
            }
        }
        Ok(None)
    }

    /// Asks one member, and gets level with it, unless that `is_enough`.
    pub(super) fn ask(
        (token, joiner): (&Token, WorkerId),
        donor: SocketAddr,
        timeout: Duration,
        model: &mut dyn Follower,
        is_enough: &dyn Fn() -> bool,
    ) -> Result<Asked, Failure> {
        let dialer = Dialer::new(token, Instant::now() + timeout);
        let mut connection = dialer.dial(Target::Tcp(donor), introduction(joiner))?;
        let ask = Ask { model: model.fingerprint() };
        frame::send(&mut connection.until(Instant::now() + timeout), &ask)?;
        let mut handover =
            Box::new(Handover { connection, following: Following::default(), timeout });
        loop {
            match handover.hear(model, is_enough)? {
                // While this worker took over a state or a step, the donor may have made others: what it said before
                // is not what it has come to since.
                Heard::At { steps, newest } if newest - steps <= LEVEL && !handover.has_more() => {
                    return Ok(Asked::Level(handover));
                }
                Heard::At { .. } => {}
                Heard::NotNow => return Ok(Asked::NotNow),
                Heard::Never | Heard::Ended => return Ok(Asked::Never),
            }
        }
    }

    /// Follows the donor while `enter` waits for the next epoch, and to the end of the one before, which is known
    /// soon after: half of the timeout at most, so that the others do not take this worker for lost. If what comes of
    /// `enter` is no epoch, as `is_in` says, there is nothing to follow any more.
    pub fn follow<T: Send>(
        mut self,
        model: &mut dyn Follower,
        enter: impl FnOnce() -> T + Send,
        is_in: impl Fn(&T) -> bool + Send,
    ) -> T {
        let is_left_out = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let entering = scope.spawn(move || {
                let entered = enter();
                is_left_out.store(!is_in(&entered), Ordering::Relaxed);
                entered
            });
            let (begun, limit) = (Cell::new(None), self.timeout / 2);
            let is_enough = || {
                if entering.is_finished() && begun.get().is_none() {
                    begun.set(Some(Instant::now()));
                }
                is_left_out.load(Ordering::Relaxed)
                    || begun.get().is_some_and(|begun| begun.elapsed() >= limit)
            };
            loop {
                match self.hear(model, &is_enough) {
                    Ok(Heard::At { .. }) if !is_enough() => {}
                    Ok(_) => break,
                    Err(error) => {
                        log::debug!("following a member: {error}");
                        break;
                    }
                }
            }
            // The donor need not go on.
            drop(self);
            entering.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Whether the donor has said something that was not heard yet.
    fn has_more(&self) -> bool {
        let receiver = &self.connection.receiver;
        let mut fds = [PollFd::new(receiver.socket(), PollFlags::IN)];
        receiver.has_unread()
            || poll(&mut fds, Some(&timespec(Duration::ZERO))).is_ok_and(|n| n > 0)
    }

    pub(super) fn hear(
        &mut self,
        model: &mut dyn Follower,
        is_enough: &dyn Fn() -> bool,
    ) -> Result<Heard, Lost> {
        let (receiver, silence) = (&mut self.connection.receiver, self.timeout);
        self.following.hear(&mut Patient { receiver, silence, is_enough }, model)
    }
}
