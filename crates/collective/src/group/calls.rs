//! Makes the calls of a group: each at its place in the order, compared between ranks, and the end of
//! the group if it fails.

use std::sync::Arc;

use crate::call::Call;
use crate::engine::{CallPlan, Engine, Explanation};
use crate::error::{Error, InvalidCall};
use crate::options::Options;
use crate::registered::Allocation;
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

    /// Makes memory of so many bytes that the other ranks of the host read in place, by two calls with these numbers.
    /// If one rank cannot, none of them does, and the group goes on.
    pub fn allocate(&mut self, numbers: [u32; 2], bytes: usize) -> Result<Arc<Allocation>, Error> {
        let [offering, taking] = numbers.map(|number| Call::places(number)[0]);
        let world = self.topology.world();
        let offered = self.engine.host().offer_readable(bytes);
        let own = [bytes as i64, i64::from(offered.is_err())];
        let said = self.exchange(offering, own)?;
        if let Some([other, _]) = said.iter().find(|said| said[0] != own[0]) {
            let what = "the memory that all ranks allocate";
            let (actual, expected) = (bytes, *other as usize);
            return Err(InvalidCall::Length { what, actual, expected }.into());
        }
        let own = agreed(offered, &said)?;
        let me = self.state.rank();
        let is_shared = self.topology.is_one_host() && world > 1;
        let host = self.engine.host();
        let memory = |rank| match rank == me {
            true => Ok(own.clone()),
            false => host.take_memory(rank, bytes),
        };
        let all: Result<Vec<_>, _> = (0..if is_shared { world } else { 0 }).map(memory).collect();
        // A rank that hands over nothing may have died. Then all ranks hear of that, and not that this one could not.
        if all.is_err()
            && let Some(error) = self.state.verdict()
        {
            self.engine.host().withdraw_memory();
            return Err(error);
        }
        let said = self.exchange(taking, [0, i64::from(all.is_err())]);
        let host = self.engine.host();
        host.withdraw_memory();
        let allocation = Allocation::new(own, agreed(all, &said?)?);
        host.register(&allocation);
        Ok(allocation)
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

    /// What all ranks say, in rank order.
    fn exchange(&mut self, seq: u32, own: [i64; 2]) -> Result<Vec<[i64; 2]>, Error> {
        let mut all = vec![0; 2 * self.topology.world()];
        let request = Request::all_gather(&own, &mut all);
        self.make_at(seq, &request.check(self.state.rank(), &self.topology)?)?;
        Ok(all.chunks_exact(2).map(|said| [said[0], said[1]]).collect())
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

/// What this rank has, if all ranks have said that they have it.
fn agreed<T>(own: Result<T, String>, said: &[[i64; 2]]) -> Result<T, Error> {
    let what = "allocating registered memory";
    let own = own.map_err(|reason| Error::System { what, reason })?;
    match said.iter().position(|[_, has_failed]| *has_failed != 0) {
        Some(rank) => Err(Error::System { what, reason: format!("rank {rank} could not") }),
        None => Ok(own),
    }
}
