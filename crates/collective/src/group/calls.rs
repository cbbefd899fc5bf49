//! Makes the calls of a group: each at its place in the order, compared between ranks, and the end of
//! the group if it fails.

use std::sync::Arc;

use crate::call::Call;
use crate::engine::{CallPlan, Engine, Explanation};
use crate::error::{Error, InvalidCall};
use crate::options::Options;
use crate::request::{Checked, Request};
use crate::schedule::Topology;
use crate::state::GroupState;

/// The calls of one rank of a group, on its engine.
pub struct Calls {
    engine: Box<dyn Engine>,
    state: Arc<GroupState>,
    topology: Topology,
    /// Whether reductions of floats are canonical unless an algorithm is forced.
    canonical: bool,
}

impl Calls {
    pub fn new(
        engine: Box<dyn Engine>,
        state: Arc<GroupState>,
        topology: Topology,
        options: &Options,
    ) -> Calls {
        let canonical = options.canonical && options.algorithm.is_none();
        Calls { engine, state, topology, canonical }
    }

    /// Makes the call with this number.
    pub fn make(&mut self, number: u32, request: &mut Checked<'_>) -> Result<(), Error> {
        let [own, exchange] = Call::places(number);
        if let Some(lengths) = request.lengths_to_exchange() {
            let longest = self.agree_on_lengths(exchange, request, &lengths)?;
            request.set_longest(longest);
        }
        self.make_at(own, request)
    }

    /// What a call of this kind and size would do.
    pub fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        self.engine.explain(request)
    }

    /// Makes a call, or its exchange of lengths, at its place in the order of the group.
    fn make_at(&mut self, seq: u32, request: &Checked<'_>) -> Result<(), Error> {
        let plan = match self.engine.plan(request) {
            // A call that is wrong is refused, and the group goes on. What else fails before it has begun ends the
            // group: the others are in this call already.
            Err(error) if !matches!(error, Error::InvalidCall(_)) => {
                self.state.fail(error);
                return Err(self.state.settled_error(None));
            }
            planned => planned?,
        };
        self.expect_canonical(request, plan)?;
        let call = request.call(seq, plan);
        if self.state.is_over() {
            return Err(self.state.settled_error(Some(call)));
        }
        self.state.places().note(call.number(), request.place());
        self.state.history().record(&call);
        self.engine.run(&call, request).map_err(|error| self.state.fail_in(&call, error))
    }

    fn expect_canonical(&self, request: &Request<'_>, plan: CallPlan) -> Result<(), Error> {
        let is_float_sum = request.dtype().is_float() && request.op().reduces();
        if plan.canonical || !self.canonical || !is_float_sum || request.algorithm().is_some() {
            return Ok(());
        }
        Err(InvalidCall::NotCanonical { op: request.name() }.into())
    }

    /// Compares what every rank means to send with what its peers expect; the longest block. All
    /// ranks compare the same numbers, so that all of them refuse or none.
    fn agree_on_lengths(
        &mut self,
        seq: u32,
        request: &Request<'_>,
        own: &[i64],
    ) -> Result<usize, Error> {
        let world = self.topology.world();
        let mut all = vec![0i64; own.len() * world];
        let exchange = Request::all_gather(own, &mut all).with_place(request.place().cloned());
        self.make_at(seq, &exchange.check(self.state.rank(), &self.topology)?)?;
        let count = |rank: usize, entry: usize| all[rank * 2 * world + entry];
        for (from, to) in (0..world).flat_map(|from| (0..world).map(move |to| (from, to))) {
            let (sent, expected) = (count(from, to), count(to, world + from));
            if sent != expected {
                let bytes =
                    |count: i64| (count as u64).saturating_mul(request.dtype().size() as u64);
                let (sent, expected) = (bytes(sent), bytes(expected));
                return Err(self.state.length_mismatch((from, to), 0, sent, expected));
            }
        }
        Ok(all.into_iter().max().unwrap_or(0) as usize)
    }
}
