//! What a worker counts about its exchanges.

use crate::Clock;

/// What happened so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GossipStats {
    /// Steps this worker has finished, those it took over when it joined included.
    pub clock: Clock,
    /// Times no exchange was begun: the last one was still under way, or no partner was within reach.
    pub skipped: u64,
    /// The latest exchange, active or passive, was with this partner.
    pub latest: Option<u32>,
    /// Per rank; this worker's own entry stays empty.
    pub partners: Vec<PartnerStats>,
}

impl GossipStats {
    /// Exchanges this worker asked for and that were carried out.
    pub fn done(&self) -> u64 {
        self.partners.iter().map(|partner| partner.done).sum()
    }

    /// Exchanges this worker asked for and that were not carried out, or of which no reply came.
    pub fn failed(&self) -> u64 {
        self.partners.iter().map(|partner| partner.failed).sum()
    }

    /// Exchanges others asked for and this worker carried out.
    pub fn answered(&self) -> u64 {
        self.partners.iter().map(|partner| partner.answered).sum()
    }

    /// Bytes sent and received.
    pub fn bytes(&self) -> u64 {
        self.partners.iter().map(|partner| partner.bytes).sum()
    }

    /// How many clocks the two sides of the latest exchange were apart.
    pub fn lead(&self) -> u64 {
        self.latest_partner().map_or(0, |partner| partner.lead)
    }

    /// How far the two sides of the latest exchange were apart before it: the root of the mean square
    /// of the differences of their weights.
    pub fn distance(&self) -> Option<f64> {
        self.latest_partner().map(|partner| partner.distance)
    }

    fn latest_partner(&self) -> Option<&PartnerStats> {
        self.partners.get(self.latest? as usize)
    }
}

/// What happened so far with one partner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartnerStats {
    /// Exchanges this worker asked for and that were carried out.
    pub done: u64,
    /// Exchanges this worker asked for and that were not carried out, or of which no reply came.
    pub failed: u64,
    /// Exchanges the partner asked for and this worker carried out.
    pub answered: u64,
    /// Exchanges the partner asked for and this worker declined: they crossed its own, came twice, or
    /// brought weights that are not finite.
    pub declined: u64,
    /// Bytes sent and received, of whole messages.
    pub bytes: u64,
    /// Clocks between the two at the latest exchange.
    pub lead: u64,
    /// Distance of the two before the latest exchange, root mean square per weight.
    pub distance: f64,
}
