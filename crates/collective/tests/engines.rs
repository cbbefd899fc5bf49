//! A group over an engine from elsewhere: one for the memory of a device that only it reaches, made
//! from the engine of host memory, as an engine for GPUs would be.

mod common;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use common::on_all;
use unisono_collective::engine::{CallPlan, Engine, GroupState, HostEngine, MakeEngine, Memory};
use unisono_collective::fabric::LocalHub;
use unisono_collective::schedule::{Area, Blocks, Phase, Problem, Topology, build};
use unisono_collective::{
    Algorithm, Call, Checked, Dtype, Epoch, Error, Explanation, FormError, Group, InvalidCall, Op,
    Options, Rank, Reduction, Request,
};

const DEVICE: Memory = Memory::Device(7);

/// Elements of a column: few, so that calls have several segments.
const COLUMN: usize = 300;

/// A session, who sends, and who receives.
type Wire = (i64, usize, usize);

/// What ranks send to each other through the device.
#[derive(Default)]
struct Wires {
    messages: Mutex<HashMap<Wire, VecDeque<Vec<u8>>>>,
    arrival: Condvar,
    sessions: AtomicI64,
    /// The calls of rank 0 on the device.
    seen: Mutex<Vec<Call>>,
    /// Whether reductions are planned in an order that is not canonical.
    careless: bool,
}

/// The engine of a rank: runs rounds over the wires, and gives calls on host memory to the host's.
struct Device {
    host: HostEngine,
    topology: Topology,
    wires: Arc<Wires>,
    session: i64,
    scratch: Vec<u64>,
}

impl Device {
    /// All ranks of a group agree on a session, by the engine they have already.
    fn open(mut host: HostEngine, wires: Arc<Wires>) -> Result<Device, FormError> {
        let mut session = [wires.sessions.fetch_add(1, Ordering::SeqCst)];
        host.run_unnumbered(Request::broadcast(&mut session, 0))?;
        let waiting = wires.clone();
        host.state().on_failure(move || {
            let _messages = waiting.messages.lock().unwrap();
            waiting.arrival.notify_all();
        });
        let topology = Topology::all_apart(host.topology().world());
        Ok(Device { host, topology, wires, session: session[0], scratch: Vec::new() })
    }

    fn receive(&self, call: &Call, state: &GroupState, from: usize) -> Result<Vec<u8>, Error> {
        let key = (self.session, from, self.host.rank());
        let mut watch = state.watch(call);
        let mut messages = self.wires.messages.lock().unwrap();
        loop {
            if let Some(message) = messages.get_mut(&key).and_then(VecDeque::pop_front) {
                return Ok(message);
            }
            if state.is_over_for(from, call) {
                return Err(state.error(Some(*call)));
            }
            // Longer than the test lasts, but for what the watch does meanwhile.
            let nap = Duration::from_millis(100);
            messages = self.wires.arrival.wait_timeout(messages, nap).unwrap().0;
            watch.tick(|| vec![from]);
        }
    }
}

impl Engine for Device {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host, DEVICE]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        if request.memory() == Memory::Host {
            return self.host.plan(request);
        }
        let algorithm = request.algorithm().unwrap_or(Algorithm::Pairwise);
        let canonical = !self.wires.careless;
        Ok(CallPlan { algorithm, column: COLUMN, canonical, registered: 0 })
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        self.host.explain(request)
    }

    fn host(&mut self) -> &mut HostEngine {
        &mut self.host
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.memory() == Memory::Host {
            return self.host.run(call, request);
        }
        let (rank, world) = (self.host.rank(), self.topology.world());
        if rank == 0 {
            self.wires.seen.lock().unwrap().push(*call);
        }
        let problem = Problem { op: request.op(), rank, world };
        let schedule = build(call.algorithm, &problem, &self.topology).expect("it was planned");
        let (mut buffers, segments) = request.cut(&schedule, call.column as usize, 1);
        self.scratch.resize(buffers.scratch_bytes() / 8, 0);
        buffers.scratch = self.scratch.as_mut_ptr().cast();
        let state = self.host.state().clone();
        let places = |blocks: &Blocks, place: Area, segment: usize| {
            let places = blocks.clone().enumerate();
            let place = |(i, block)| buffers.block(place, segment, block, i as u32);
            let bytes = |(at, count)| (at, count * request.dtype().size());
            places.map(place).map(bytes).collect::<Vec<(*mut u8, usize)>>()
        };
        let divisor = (call.reduction == Reduction::Mean).then_some(world as u32);
        for segment in 0..segments {
            let rounds = schedule.phases.iter().flat_map(|phase| match phase {
                Phase::Rounds(rounds) => &rounds.rounds,
                Phase::Window(_) => panic!("no two ranks share memory"),
            });
            for round in rounds {
                for send in &round.sends {
                    let message = places(&send.blocks, send.from, segment).into_iter().flat_map(
                        // SAFETY: the blocks of a checked request, or scratch.
                        |(at, bytes)| unsafe { std::slice::from_raw_parts(at, bytes) }.to_vec(),
                    );
                    let message = message.collect();
                    let mut messages = self.wires.messages.lock().unwrap();
                    let key = (self.session, rank, send.to);
                    messages.entry(key).or_default().push_back(message);
                    self.wires.arrival.notify_all();
                }
                for recv in &round.recvs {
                    let message = self.receive(call, &state, recv.from)?;
                    let mut rest = &message[..];
                    for (at, bytes) in places(&recv.blocks, recv.into, segment) {
                        let (block, after) = rest.split_at(bytes);
                        // SAFETY: as above.
                        unsafe { at.copy_from_nonoverlapping(block.as_ptr(), bytes) };
                        rest = after;
                    }
                }
                for fold in &round.folds {
                    // SAFETY: as above, and the scratch is as large as it must be.
                    unsafe { buffers.fold(fold, segment, call, divisor, &mut Vec::new()) };
                }
            }
        }
        Ok(())
    }
}

fn make_device(wires: &Arc<Wires>) -> Arc<MakeEngine> {
    let wires = wires.clone();
    Arc::new(move |host| Ok(Box::new(Device::open(host, wires.clone())?) as Box<dyn Engine>))
}

/// A world of threads with a device.
fn start(world: usize, wires: &Arc<Wires>) -> Vec<Group> {
    start_with(world, &make_device(wires))
}

/// A world of threads with engines of this kind.
fn start_with(world: usize, make: &Arc<MakeEngine>) -> Vec<Group> {
    let (hub, epoch) = (LocalHub::new(world), Epoch::new(0));
    std::thread::scope(|scope| {
        let form = |rank| {
            let (hub, epoch, make) = (hub.clone(), epoch.clone(), make.clone());
            let options = Options::default();
            scope.spawn(move || Group::with_engine(hub, epoch, rank, world, options, make))
        };
        let ranks: Vec<_> = (0..world).map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

/// An all-reduce on the device.
fn on_device(buffer: &mut [f32], reduction: Reduction) -> Request<'_> {
    let start = buffer.as_mut_ptr();
    // SAFETY: the buffer is borrowed for as long as the request, and the device's memory is the
    // host's in truth.
    let request = unsafe { Request::raw(Op::AllReduce, Dtype::F32, buffer.len(), start, start) };
    // SAFETY: as above.
    unsafe { request.unwrap().in_memory(DEVICE) }.with_reduction(reduction)
}

/// Numbers whose sum depends on the order.
fn numbers(rank: usize) -> Vec<f32> {
    (0..1000)
        .map(|i| ((rank * 7919 + i * 104_729) % 1009) as f32 * 1.1f32.powi(rank as i32))
        .collect()
}

#[test]
fn calls_on_memory_of_the_host_and_of_a_device_share_one_order_and_give_the_same_bits() {
    for world in [1, 2, 3, 5] {
        let wires = Arc::default();
        let groups = start(world, &wires);
        on_all(&groups, |group| {
            for reduction in [Reduction::Sum, Reduction::Mean] {
                let mut expected = numbers(group.rank());
                group.all_reduce(&mut expected, reduction).unwrap();
                let mut actual = numbers(group.rank());
                let before = group.calls();
                let number = group.run(on_device(&mut actual, reduction)).unwrap();
                assert_eq!((number, group.calls()), (before + 1, number));
                let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&actual), bits(&expected), "{reduction} of {world}");
            }
            // Submitted ones wait for their turn, and know their numbers at once.
            let (mut first, mut second) = (vec![1f32; 700], vec![2f32; 10]);
            // SAFETY: the buffers live until after the waits.
            let works = unsafe {
                [
                    group.submit(on_device(&mut first, Reduction::Sum)).unwrap(),
                    group.submit(Request::all_reduce(&mut second, Reduction::Sum)).unwrap(),
                ]
            };
            assert_eq!(works.each_ref().map(|work| work.number()), [Some(5), Some(6)]);
            works.iter().for_each(|work| work.wait().unwrap());
            assert_eq!((first[699], second[9]), (world as f32, 2.0 * world as f32));
        });
        let seen: Vec<u32> = wires.seen.lock().unwrap().iter().map(Call::number).collect();
        assert_eq!(seen, [2, 4, 5]);
    }
}

#[test]
fn groups_made_of_a_group_have_its_engine() {
    let groups = start(4, &Arc::default());
    on_all(&groups, |group| {
        let half = group.split(Some(group.rank() as u32 % 2), 0).unwrap().unwrap();
        let mut ranks = [group.rank() as f32; 1000];
        half.run(on_device(&mut ranks, Reduction::Sum)).unwrap();
        assert_eq!(ranks, [if group.rank() % 2 == 0 { 2.0 } else { 4.0 }; 1000]);
    });
}

#[test]
fn a_group_beside_another_has_its_ranks_and_an_engine_of_its_own() {
    let (groups, make) =
        (Group::local(3, &Options::default()).unwrap(), make_device(&Arc::default()));
    on_all(&groups, |group| {
        // One engine that cannot be made leaves all ranks as they were.
        let reason = "it has none".to_owned();
        let none = FormError::Device { rank: Rank(1), reason };
        let missing = none.clone();
        let refused = group.beside(Arc::new(move |_| Err(missing.clone()))).err();
        assert_eq!(refused, Some(none));
        for _ in 0..2 {
            let beside = group.beside(make.clone()).unwrap();
            assert_eq!((beside.rank(), beside.members()), (group.rank(), group.members()));
            let mut ones = [1f32; 1000];
            beside.run(on_device(&mut ones, Reduction::Sum)).unwrap();
            assert_eq!((ones, beside.calls(), group.calls()), ([3.0; 1000], 1, 0));
        }
        let refused = group.run(on_device(&mut [1.0], Reduction::Sum)).unwrap_err();
        assert_eq!(refused, Error::InvalidCall(InvalidCall::Memory { memory: DEVICE }));
        group.barrier().unwrap();
    });
}

#[test]
fn memory_that_an_engine_does_not_reach_is_refused() {
    let groups = Group::local(2, &Options::default()).unwrap();
    on_all(&groups, |group| {
        let refused = group.run(on_device(&mut [1.0], Reduction::Sum)).unwrap_err();
        assert_eq!(refused, Error::InvalidCall(InvalidCall::Memory { memory: DEVICE }));
        group.barrier().unwrap();
    });
}

#[test]
fn an_engine_that_would_break_the_promise_of_canonical_bits_is_refused() {
    let wires = Arc::new(Wires { careless: true, ..Wires::default() });
    let groups = start(2, &wires);
    on_all(&groups, |group| {
        let refused = group.run(on_device(&mut [1.0], Reduction::Sum)).unwrap_err();
        let expected = InvalidCall::NotCanonical { op: "all-reduce" };
        assert_eq!(refused, Error::InvalidCall(expected));
        // The algorithm that the caller asks for is what the caller gets.
        let mut one = [1.0];
        let request = on_device(&mut one, Reduction::Sum).with_algorithm(Algorithm::Ring);
        group.run(request).unwrap();
    });
}

#[test]
fn a_call_on_an_engine_ends_with_its_group() {
    let groups = start(3, &Arc::default());
    on_all(&groups, |group| match group.rank() {
        2 => {
            std::thread::sleep(Duration::from_millis(50));
            group.abort("it was enough");
        }
        _ => {
            let mut buffer = vec![1f32; 1000];
            let error = group.run(on_device(&mut buffer, Reduction::Sum)).unwrap_err();
            let Error::Aborted { peer: Rank(2), reason } = error else { panic!("{error:?}") };
            assert!(reason.contains("it was enough"), "{reason}");
        }
    });
}

/// The engine of host memory, with a defect: calls of so many elements panic on rank 0.
struct Defective(HostEngine);

const BREAKS: usize = 13;

impl Engine for Defective {
    fn reaches(&self) -> Vec<Memory> {
        self.0.reaches()
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        self.0.plan(request)
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        self.0.explain(request)
    }

    fn host(&mut self) -> &mut HostEngine {
        &mut self.0
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.count() == BREAKS && self.0.rank() == 0 {
            // For other threads to wait for the call meanwhile.
            std::thread::sleep(Duration::from_millis(50));
            panic!("a defect, on purpose");
        }
        self.0.run(call, request)
    }
}

fn start_defective(world: usize) -> Vec<Group> {
    let make: Arc<MakeEngine> = Arc::new(|host| Ok(Box::new(Defective(host)) as Box<dyn Engine>));
    start_with(world, &make)
}

fn is_defect(error: &Error) -> bool {
    matches!(error, Error::System { what: "a call", reason } if reason == "it panicked")
}

#[test]
fn a_call_that_panics_ends_its_group_with_an_error_on_every_rank() {
    let groups = start_defective(2);
    on_all(&groups, |group| {
        group.barrier().unwrap();
        let mut buffer = [1f32; BREAKS];
        let error = group.all_reduce(&mut buffer, Reduction::Sum).unwrap_err();
        assert_eq!(is_defect(&error), group.rank() == 0, "rank {}: {error}", group.rank());
        let error = group.barrier().unwrap_err();
        assert_eq!(is_defect(&error), group.rank() == 0, "rank {}: {error}", group.rank());
    });
}

#[test]
fn a_submitted_call_that_panics_ends_for_all_who_wait_and_so_do_those_after_it() {
    // Whichever thread runs the call: the progress thread, or one that waits for it.
    for runs_it in [true, false, true, false] {
        let mut groups = start_defective(2);
        let other = groups.pop().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut buffer = [1f32; BREAKS];
                other.all_reduce(&mut buffer, Reduction::Sum).unwrap_err();
            });
            let group = groups.pop().unwrap();
            let breaks = group.submit_all_reduce(vec![1f32; BREAKS], Reduction::Sum).unwrap();
            if runs_it {
                breaks.work().run_if_next();
            }
            let later: Vec<_> = (0..3).map(|_| group.submit_barrier()).collect();
            for _ in 0..2 {
                let work = breaks.work().clone();
                scope.spawn(move || assert!(is_defect(&work.wait().unwrap_err())));
            }
            // Ends the progress thread while the call is under way.
            scope.spawn(move || drop(group));
            assert!(is_defect(&breaks.wait().unwrap_err()));
            for work in later.into_iter().flatten() {
                assert!(is_defect(&work.wait().unwrap_err()));
            }
        });
    }
}

#[test]
fn a_question_whether_to_stop_that_panics_is_answered_yes() {
    let mut groups = start(2, &Arc::default());
    let late = groups.pop().unwrap();
    let group = groups.pop().unwrap();
    group.stop_waiting_if(|| panic!("a question that cannot be answered, on purpose"));
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
    late.barrier().unwrap_err();
}

#[test]
fn ranks_that_call_an_engine_differently_are_told() {
    let groups = start(2, &Arc::default());
    let errors = on_all(&groups, |group| {
        let mut buffer = vec![1f32; 1000 * (group.rank() + 1)];
        match group.rank() {
            0 => group.run(on_device(&mut buffer, Reduction::Sum)).unwrap_err(),
            _ => group.barrier().unwrap_err(),
        }
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { .. }), "{text}");
        assert!(
            text.contains("all_reduce #1 of 1000 f32") && text.contains("barrier #1"),
            "{text}"
        );
    }
}

#[test]
fn a_task_makes_calls_in_line_with_others() {
    let groups = Group::local(2, &Options::default()).unwrap();
    let groups: Vec<Arc<Group>> = groups.into_iter().map(Arc::new).collect();
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                let (tell, told) = std::sync::mpsc::channel();
                let before = group.submit_all_reduce(vec![1f32], Reduction::Sum).unwrap();
                let inside = group.clone();
                let task = group.submit_task(move || {
                    let mut sum = [1i32];
                    for _ in 0..3 {
                        inside.all_reduce(&mut sum, Reduction::Sum).unwrap();
                    }
                    tell.send(sum[0]).unwrap();
                });
                task.wait().unwrap();
                assert!(before.work().is_done());
                assert_eq!((told.recv(), task.number()), (Ok(8), None));
                group.barrier().unwrap();
                assert_eq!(group.calls(), 5);
                let broken = group.submit_task(|| panic!("for the test"));
                assert!(matches!(broken.wait(), Err(Error::System { what: "a task", .. })));
                group.barrier().unwrap();
            });
        }
    });
}
