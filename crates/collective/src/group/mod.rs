//! A group of ranks: the public face of this crate.

mod abort;
mod calls;
mod ops;
mod queue;
mod subgroup;
mod submit;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::call::Call;
use crate::control::Control;
use crate::cost::Costs;
use crate::engine::{HostEngine, MakeEngine, Memory};
use crate::error::{Error, FormError};
use crate::fabric::{Connector, Fabric, GroupSetup, LocalHub};
use crate::helpers::{Helpers, Threads};
use crate::link::Links;
use crate::options::Options;
use crate::patience::Patience;
use crate::schedule::Topology;
use crate::state::{Epoch, GroupState};
use crate::traffic::Traffic;
use crate::window::WindowMemory;
use crate::window::region::Region;
use crate::work::in_callback;
use calls::Calls;
use queue::Queue;
use unisono_net::rank::Rank;

pub use abort::AbortHandle;
pub use submit::Owned;

/// Ordered ranks of one epoch, with connections and an operation counter of their own.
///
/// All ranks of a group issue the same collective calls in the same order, from one thread or
/// from several that agree on the order. Messages ([`Group::send`], [`Group::receive`]) are not
/// part of that order.
///
/// Dropping the last handle of a rank leaves the group: later calls of the other ranks fail,
/// calls that this rank has completed do not.
pub struct Group {
    inner: Arc<Inner>,
}

/// Where the costs of a group come from.
enum Pricing {
    /// It is measured.
    Measured,
    /// From the group that it is part of, as are the regions of its ranks.
    Inherited(Costs, Vec<u32>),
    /// From what this rank knows of an earlier group; rank 0's count.
    Known(Option<Costs>),
}

struct Inner {
    setup: GroupSetup,
    connector: Arc<dyn Connector>,
    epoch: Arc<Epoch>,
    state: Arc<GroupState>,
    topology: Topology,
    costs: Costs,
    make_engine: Arc<MakeEngine>,
    /// The memory that the engine reaches.
    reach: Vec<Memory>,
    queue: Queue,
    control: Mutex<Control>,
    /// Splits made so far, to number them.
    children: std::sync::atomic::AtomicU64,
    /// For each list of members, by its id: whose turn it is to make a sub-group of it.
    lists: Mutex<HashMap<u64, Arc<Mutex<()>>>>,
}

impl Group {
    /// A world of ranks that are threads of this process.
    pub fn local(world: usize, options: &Options) -> Result<Vec<Group>, FormError> {
        Group::local_on_hosts(&vec![0; world], options)
    }

    /// As [`Group::local`], as if ranks with different numbers were on different hosts.
    pub fn local_on_hosts(hosts: &[u32], options: &Options) -> Result<Vec<Group>, FormError> {
        let hub = LocalHub::on_hosts(hosts);
        let epoch = Epoch::new(0);
        let world = hosts.len();
        let form = |me: usize| {
            let (hub, epoch, options) = (hub.clone(), epoch.clone(), options.clone());
            move || Group::world(hub, epoch, me, world, options)
        };
        // Forming a group measures it, for which all ranks are needed.
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..world).map(|me| scope.spawn(form(me))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("forming does not panic")).collect()
        })
    }

    /// The world of a job: all ranks that the connector knows.
    pub fn world(
        connector: Arc<dyn Connector>,
        epoch: Arc<Epoch>,
        rank: usize,
        world: usize,
        options: Options,
    ) -> Result<Group, FormError> {
        let host = |host| Ok(Box::new(host) as Box<_>);
        Group::with_engine(connector, epoch, rank, world, options, Arc::new(host))
    }

    /// As [`Group::world`], with an engine of the caller's making, for this group and those made of it.
    pub fn with_engine(
        connector: Arc<dyn Connector>,
        epoch: Arc<Epoch>,
        rank: usize,
        world: usize,
        options: Options,
        make_engine: Arc<MakeEngine>,
    ) -> Result<Group, FormError> {
        let setup = GroupSetup::of_world(&epoch, rank, world, options);
        Group::form(connector, epoch, setup, Pricing::Measured, make_engine)
    }

    /// As [`Group::world`], for ranks of which some were in a group before: they hand over the
    /// [costs](Group::costs) of the last one, others `None`. If rank 0 has some that will do, all ranks
    /// go by those, and the group forms without the measurement; where there were [regions](Options::region), or
    /// a rank has none, those are looked for again. All ranks must call this, and none [`Group::world`].
    pub fn world_again(
        connector: Arc<dyn Connector>,
        epoch: Arc<Epoch>,
        rank: usize,
        world: usize,
        options: Options,
        costs: Option<Costs>,
    ) -> Result<Group, FormError> {
        let setup = GroupSetup::of_world(&epoch, rank, world, options);
        let host = |host| Ok(Box::new(host) as Box<_>);
        Group::form(connector, epoch, setup, Pricing::Known(costs), Arc::new(host))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.inner.setup.me
    }

    /// Its ranks, as the job and its errors number them, in the order of the group.
    pub fn members(&self) -> &[Rank] {
        &self.inner.setup.members
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.inner.setup.members.len()
    }

    /// The epoch this group belongs to.
    pub fn epoch(&self) -> &Arc<Epoch> {
        &self.inner.epoch
    }

    /// The settings.
    pub fn options(&self) -> &Options {
        &self.inner.setup.options
    }

    /// Which ranks share a host, and which hosts a region.
    pub fn topology(&self) -> &Topology {
        &self.inner.topology
    }

    /// What was measured when the group, or the one it is part of, formed.
    pub fn costs(&self) -> Costs {
        self.inner.costs
    }

    /// The number of the last collective call that was made on this rank, also of one that waits in
    /// line; 0 before the first.
    pub fn calls(&self) -> u32 {
        self.inner.state.calls()
    }

    /// What this rank has handed to others so far.
    pub fn traffic(&self) -> Traffic {
        self.inner.state.meter().read()
    }

    /// From now on, takes the time of reductions: two looks at the clock for every segment.
    pub fn time_folds(&self) {
        self.inner.state.meter().time_folds();
    }

    /// How long this rank has combined data since [`Group::time_folds`], which is what remains of a
    /// call without moving data and waiting for others.
    pub fn folding(&self) -> std::time::Duration {
        self.inner.state.meter().folding()
    }

    /// Says that the program of this rank waits for calls of the group and computes nothing, until what this returns is
    /// dropped: the calls may use the cores on which it [computes](Options::computing).
    #[must_use]
    pub fn program_rests(&self) -> impl Drop + use<> {
        self.inner.state.rest().begin()
    }

    /// Why the group can no longer be used, if so.
    pub fn failure(&self) -> Option<Error> {
        self.inner.state.is_over().then(|| self.inner.state.settled_error(None))
    }

    fn form(
        connector: Arc<dyn Connector>,
        epoch: Arc<Epoch>,
        mut setup: GroupSetup,
        pricing: Pricing,
        make_engine: Arc<MakeEngine>,
    ) -> Result<Group, FormError> {
        if epoch.has_ended() {
            return Err(FormError::EpochEnded { epoch: epoch.number() });
        }
        let world = setup.members.len();
        let fabric = connector.clone().connect(&setup)?;
        let are_one_machine = connector.is_one_machine(&setup);
        let Fabric { mut topology, control, regions, cores, network } = fabric;
        let region = setup.options.region.clone();
        if let Pricing::Inherited(_, of_ranks) = &pricing {
            let first = |host| of_ranks[topology.members(host)[0]];
            let of_hosts: Vec<u32> = (0..topology.hosts()).map(first).collect();
            topology = topology.in_regions(&of_hosts);
        }
        let crowd = cores.crowd;
        // A part of this group has no more: the other ranks of the host are still there.
        let Options { threads, computing, .. } = setup.options;
        let threads = Threads::of(threads, cores.each, computing);
        setup.options.threads = Some(threads.always);
        let (members, stall_after) = (setup.members.clone(), setup.options.stall_after);
        let state = GroupState::new(setup.me, setup.id, members, stall_after);
        let failed =
            |what| move |e: std::io::Error| FormError::System { what, reason: e.to_string() };

        let here = topology.members(topology.host(setup.me)).to_vec();
        let patience = Patience::for_crowd(crowd);
        let control = Control::start(
            control,
            network.clone(),
            setup.me,
            setup.options.timeout,
            state.clone(),
        );
        let mut control = control.map_err(failed("starting the monitor"))?;
        let watcher = control.watcher();
        let links = Links::new(setup.me, world, network, watcher, patience.for_links());
        state.on_failure(Region::waker(&regions));
        let window = (!regions.is_empty()).then(|| {
            let me = here.iter().position(|&m| m == setup.me).expect("a rank is on its own host");
            WindowMemory::new(regions, crate::fabric::STAGING_BUFFERS, here, me, patience)
        });
        let helpers = Helpers::new(setup.me, threads, world, crowd <= 1.0, state.rest().clone());
        let options = setup.options.clone();
        let costs =
            if let Pricing::Inherited(costs, _) = &pricing { *costs } else { Costs::default() };
        let mut host = HostEngine::new(
            setup.me,
            topology,
            options.clone(),
            links,
            window,
            helpers,
            costs,
            state.clone(),
        );
        epoch.enter(&state);

        let known = if let Pricing::Known(costs) = &pricing { costs.as_ref() } else { None };
        if world > 1 && !matches!(pricing, Pricing::Inherited(..)) {
            host.find_regions(region.as_deref(), known, are_one_machine)?;
        }
        match pricing {
            _ if world == 1 => {}
            Pricing::Inherited(..) => {}
            Pricing::Known(costs) if host.agree_on_costs(costs, crowd)? => {}
            Pricing::Known(_) | Pricing::Measured => host.measure(crowd, are_one_machine)?,
        }
        let (costs, topology) = (*host.costs(), host.topology().clone());
        let engine = make_engine(host).inspect_err(|error| match error {
            // Ranks agree on why there is none. Others may not have come out yet of the last call in which they did so.
            FormError::Device { .. } => control.leaving().leave(Call::after(Call::MEASURING)),
            // Others may wait for this one in the engine.
            _ => {
                let reason = error.to_string();
                state.fail(Error::System { what: "making an engine", reason });
            }
        })?;
        let reach = engine.reaches();
        let calls = Calls::new(engine, state.clone(), topology.clone(), &options);
        let queue = Queue::new(calls, state.clone());
        let (children, lists) = Default::default();
        let control = Mutex::new(control);
        let inner = Inner {
            setup,
            connector,
            epoch,
            state,
            topology,
            costs,
            make_engine,
            reach,
            queue,
            control,
            children,
            lists,
        };
        Ok(Group { inner: Arc::new(inner) })
    }
}

impl Drop for Inner {
    /// Runs what is queued, so that no call is under way when this rank leaves.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.state.leave_because("its program panicked");
        }
        let closing = self.queue.closing();
        let control = self.control.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let leaving = control.leaving();
        let is_waited_for = closing.is_on_own_thread() || leaving.is_on_own_thread();
        let end = move || leaving.leave(closing.finish());
        if !is_waited_for && !in_callback() {
            return end();
        }
        // The last handle was dropped by a callback: on a thread that is to be waited for, or on one that waits for no more
        // than the call that has ended.
        let name = format!("unisono-farewell-{}", self.setup.me);
        if let Err(error) = std::thread::Builder::new().name(name).spawn(end) {
            log::error!("cannot leave a group in an orderly way: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
