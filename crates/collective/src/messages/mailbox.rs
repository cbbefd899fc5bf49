//! Which message belongs to which receive.
//!
//! Receives wait in the order in which they were submitted, messages in the order in which they were
//! announced. Whichever comes takes the oldest of the others that fits: a message fits a receive that
//! has its tag and names its sender, or no sender. So two messages of one rank with one tag never
//! overtake each other, and of two receives that fit, the older one gets the message, whether it
//! names a rank or not.

use std::collections::VecDeque;

/// Announcements a peer may have waiting. More than that is a program that sends and never
/// receives.
const MAX_ANNOUNCED: usize = 1 << 16;

/// Room in the queues before they grow. More: more idle memory. Less: the first burst of messages
/// allocates.
const ROOM: usize = 16;

/// Receives without a message, and messages without a receive. `R` is what a receive brings along.
pub struct Mailbox<R> {
    wanted: VecDeque<Wanted<R>>,
    announced: VecDeque<Announced>,
}

/// A receive that waits for a message.
pub struct Wanted<R> {
    /// The only rank whose message will do; any if `None`.
    pub from: Option<usize>,
    /// The tag the message must have.
    pub tag: u32,
    /// What happens with it.
    pub receive: R,
}

/// A message that a peer has ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// The peer.
    pub from: usize,
    /// Its tag.
    pub tag: u32,
    /// Its number.
    pub id: u32,
    /// Its length in bytes.
    pub length: u64,
}

/// A peer announced more messages than are ever received.
#[derive(Debug)]
pub struct Full;

impl<R> Mailbox<R> {
    pub fn new() -> Mailbox<R> {
        Mailbox { wanted: VecDeque::with_capacity(ROOM), announced: VecDeque::with_capacity(ROOM) }
    }

    /// The message for a new receive, if one is there; else the receive waits.
    pub fn receive(&mut self, wanted: Wanted<R>) -> Option<(R, Announced)> {
        match self.announced.iter().position(|announced| wanted.fits(announced)) {
            Some(i) => self.announced.remove(i).map(|announced| (wanted.receive, announced)),
            None => {
                self.wanted.push_back(wanted);
                None
            }
        }
    }

    /// The receive for a new message, if one waits; else the message does.
    pub fn announce(&mut self, announced: Announced) -> Result<Option<(R, Announced)>, Full> {
        if let Some(i) = self.wanted.iter().position(|wanted| wanted.fits(&announced)) {
            return Ok(self.wanted.remove(i).map(|wanted| (wanted.receive, announced)));
        }
        if self.announced.len() >= MAX_ANNOUNCED
            && self.announced.iter().filter(|a| a.from == announced.from).count() >= MAX_ANNOUNCED
        {
            return Err(Full);
        }
        self.announced.push_back(announced);
        Ok(None)
    }

    /// Forgets the messages of a peer that will not send them any more.
    pub fn forget(&mut self, from: usize) {
        self.announced.retain(|announced| announced.from != from);
    }

    /// Takes out the receives that `choose` does, oldest first.
    pub fn take(&mut self, choose: impl Fn(&Wanted<R>) -> bool) -> Vec<Wanted<R>> {
        let (taken, left) = self.wanted.drain(..).partition(choose);
        self.wanted = left;
        let taken: VecDeque<_> = taken;
        taken.into()
    }

    /// The receives that wait.
    pub fn waiting(&mut self) -> impl Iterator<Item = &mut Wanted<R>> {
        self.wanted.iter_mut()
    }
}

impl<R> Wanted<R> {
    fn fits(&self, announced: &Announced) -> bool {
        self.tag == announced.tag && self.from.is_none_or(|from| from == announced.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(from: Option<usize>, tag: u32, receive: &str) -> Wanted<&str> {
        Wanted { from, tag, receive }
    }

    fn announced(from: usize, tag: u32, id: u32) -> Announced {
        Announced { from, tag, id, length: 8 }
    }

    #[test]
    fn a_receive_takes_the_oldest_message_that_fits() {
        let mut mailbox = Mailbox::new();
        let messages = [announced(2, 7, 0), announced(1, 5, 0), announced(2, 5, 1)];
        for message in messages {
            assert!(mailbox.announce(message).unwrap().is_none());
        }
        assert_eq!(mailbox.receive(wanted(None, 5, "any")), Some(("any", messages[1])));
        assert_eq!(mailbox.receive(wanted(None, 5, "any")), Some(("any", messages[2])));
        assert_eq!(mailbox.receive(wanted(None, 5, "late")), None);
        assert_eq!(mailbox.receive(wanted(Some(2), 7, "named")), Some(("named", messages[0])));
    }

    #[test]
    fn a_message_goes_to_the_oldest_receive_that_fits() {
        let mut mailbox = Mailbox::new();
        for receive in
            [wanted(Some(1), 5, "of 1"), wanted(None, 5, "any"), wanted(Some(2), 5, "of 2")]
        {
            assert_eq!(mailbox.receive(receive), None);
        }
        let mut taker = |from, id| {
            mailbox.announce(announced(from, 5, id)).unwrap().map(|(receive, _)| receive)
        };
        assert_eq!(taker(2, 0), Some("any"));
        assert_eq!(taker(2, 1), Some("of 2"));
        assert_eq!(taker(2, 2), None);
        assert_eq!(taker(1, 0), Some("of 1"));
    }

    #[test]
    fn who_leaves_takes_its_messages_along() {
        let mut mailbox = Mailbox::new();
        mailbox.announce(announced(1, 5, 0)).unwrap();
        mailbox.announce(announced(2, 5, 0)).unwrap();
        mailbox.forget(1);
        assert_eq!(mailbox.receive(wanted(None, 5, "any")), Some(("any", announced(2, 5, 0))));
        assert_eq!(mailbox.receive(wanted(Some(1), 5, "of 1")), None);
        assert_eq!(mailbox.receive(wanted(None, 5, "any")), None);
        let ended = mailbox.take(|wanted| wanted.from == Some(1));
        assert_eq!(ended.iter().map(|w| w.receive).collect::<Vec<_>>(), ["of 1"]);
        assert_eq!(mailbox.waiting().count(), 1);
    }

    #[test]
    fn a_peer_that_only_announces_is_stopped() {
        let mut mailbox: Mailbox<()> = Mailbox::new();
        for id in 0..MAX_ANNOUNCED as u32 {
            assert!(mailbox.announce(announced(1, 0, id)).is_ok());
        }
        assert!(mailbox.announce(announced(1, 0, 0)).is_err());
        assert!(mailbox.announce(announced(2, 0, 0)).is_ok(), "others are not to blame");
    }
}
