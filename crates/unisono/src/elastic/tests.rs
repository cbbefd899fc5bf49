//! Handovers over real connections, and what a joiner makes of bytes that are not what they should be.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono_cluster::membership::WorkerId;
use unisono_net::{Acceptor, Admission, Token, frame};
use zerocopy::IntoBytes;

use super::donor::Donor;
use super::handover::{Asked, Handover};
use super::joiner::{Follower, Following, Heard, Lost, Unfit};
use super::server::StateServer;
use super::wire::{CHUNK, HANDOVER, Message, Refused, chunks};

const TOKEN: Token = Token::from_bytes([5; 32]);
const JOINER: WorkerId = WorkerId { number: 3, life: 1 };
const HUNG: Duration = Duration::from_secs(60);

/// Two parameters, one of them of several chunks, and a vector of the optimizer.
#[derive(Clone, Debug, PartialEq)]
struct Model {
    vectors: Vec<Vec<f32>>,
    steps: u64,
    is_complete: bool,
    /// How long an update takes.
    pause: Duration,
    kind: u8,
}

impl Model {
    fn new(fill: f32) -> Model {
        let vectors = [CHUNK + 5, 3, 2 * CHUNK].map(|length| vec![fill; length]).to_vec();
        Model { vectors, steps: 0, is_complete: false, pause: Duration::ZERO, kind: 1 }
    }

    /// The means of a step. Every third step has none of the second parameter.
    fn means(&self, step: u64) -> Vec<(usize, Vec<f32>)> {
        let number = if step.is_multiple_of(3) { 1 } else { 2 };
        (0..number).map(|p| (p, vec![step as f32 + 0.25; self.vectors[p].len()])).collect()
    }

    fn step(&mut self) -> Vec<(usize, Vec<f32>)> {
        let step = self.steps + 1;
        let means = self.means(step);
        means.iter().for_each(|(parameter, mean)| self.update(step, *parameter, mean));
        self.stepped(step).unwrap();
        means
    }
}

impl Follower for Model {
    fn fingerprint(&self) -> [u8; 32] {
        [self.kind; 32]
    }

    fn lengths(&self) -> Option<Vec<usize>> {
        Some(self.vectors.iter().map(Vec::len).collect())
    }

    fn trained(&self) -> usize {
        2
    }

    fn begin(&mut self) {
        self.is_complete = false;
    }

    fn set(&mut self, vector: usize, values: &[f32]) {
        self.vectors[vector].copy_from_slice(values);
    }

    fn complete(&mut self, steps: u64) -> Result<(), Unfit> {
        (self.steps, self.is_complete) = (steps, true);
        Ok(())
    }

    fn update(&mut self, step: u64, parameter: usize, mean: &[f32]) {
        std::thread::sleep(self.pause);
        for (weight, mean) in self.vectors[parameter].iter_mut().zip(mean) {
            *weight = *weight * 0.9 - mean / step as f32;
        }
        self.vectors[2][parameter] += step as f32;
    }

    fn stepped(&mut self, steps: u64) -> Result<(), Unfit> {
        self.steps = steps;
        Ok(())
    }
}

/// A member that trains on a thread of its own until told to stop.
struct Member {
    server: StateServer,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Model>>,
}

impl Member {
    fn start(pause: Duration) -> Member {
        let timeout = Duration::from_secs(10);
        let server = StateServer::start(Ipv4Addr::LOCALHOST.into(), TOKEN, timeout).unwrap();
        let donor = server.donor().clone();
        let mut model = Model { is_complete: true, ..Model::new(1.0) };
        donor.offer(model.fingerprint(), CHUNK + 8);
        donor.enter_epoch(&[]);
        let stop = Arc::new(AtomicBool::new(false));
        let ends = stop.clone();
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                step(&mut model, &donor);
                std::thread::sleep(pause);
            }
            model
        });
        Member { server, stop, thread: Some(thread) }
    }

    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Stops between two steps, as all members do to let others in.
    fn pause(&mut self) -> Model {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

/// A step of a member, as a worker makes it.
fn step(model: &mut Model, donor: &Donor) {
    if donor.is_asked() {
        donor.give(model.steps, model.vectors.clone());
    }
    let is_followed = donor.is_followed();
    let means = model.step();
    if is_followed {
        donor.give_means(model.steps, means);
    }
}

fn ask(address: SocketAddr, id: WorkerId, model: &mut Model) -> Asked {
    Handover::ask((&TOKEN, id), address, Duration::from_secs(10), model, &|| false).unwrap()
}

fn level(asked: Asked) -> Handover {
    match asked {
        Asked::Level(handover) => *handover,
        Asked::NotNow => panic!("not now"),
        Asked::Never => panic!("never"),
    }
}

#[test]
fn a_joiner_has_the_bits_of_its_donor_when_the_epoch_begins() {
    let mut member = Member::start(Duration::from_millis(40));
    let mut model = Model::new(0.0);
    let handover = level(ask(member.address(), JOINER, &mut model));
    assert!(model.is_complete);
    let enter = || {
        std::thread::sleep(Duration::from_millis(200));
        let trained = member.pause();
        member.server.donor().leave_epoch();
        member.server.donor().enter_epoch(&[WorkerId { number: 0, life: 0 }, JOINER]);
        trained
    };
    let trained = handover.follow(&mut model, enter, |_| true);
    assert!(trained.steps > 0);
    assert!(model == trained, "{} and {} steps", model.steps, trained.steps);
    let deadline = Instant::now() + HUNG;
    while member.server.donor().is_followed() {
        assert!(Instant::now() < deadline, "the donor holds what it has sent");
    }
}

#[test]
fn a_handover_survives_an_epoch_without_the_joiner() {
    let mut member = Member::start(Duration::from_millis(40));
    let donor = member.server.donor().clone();
    let mut model = Model::new(0.0);
    let handover = level(ask(member.address(), JOINER, &mut model));
    let enter = || {
        donor.leave_epoch();
        donor.enter_epoch(&[]);
        std::thread::sleep(Duration::from_millis(200));
        let trained = member.pause();
        donor.enter_epoch(&[JOINER]);
        trained
    };
    let trained = handover.follow(&mut model, enter, |_| true);
    assert!(model == trained);
}

/// The run is over, or goes on without the joiner: its donor lives, and makes one step after the other.
#[test]
fn a_joiner_that_is_in_no_epoch_stops_following() {
    let timeout = Duration::from_secs(600);
    let member = Member::start(Duration::from_millis(10));
    let mut model = Model::new(0.0);
    let asker = (&TOKEN, JOINER);
    let asked = Handover::ask(asker, member.address(), timeout, &mut model, &|| false).unwrap();
    let begun = Instant::now();
    level(asked).follow(&mut model, || {}, |()| false);
    assert!(begun.elapsed() < HUNG);
    assert!(model.is_complete);
}

#[test]
fn a_member_serves_one_joiner_at_a_time_and_none_between_epochs() {
    let mut member = Member::start(Duration::from_millis(40));
    let (mut first, mut second) = (Model::new(0.0), Model::new(0.0));
    let handover = level(ask(member.address(), JOINER, &mut first));
    let other = WorkerId { number: 4, life: 0 };
    assert!(matches!(ask(member.address(), other, &mut second), Asked::NotNow));
    // A joiner that is gone makes room.
    drop(handover);
    let deadline = Instant::now() + HUNG;
    while let Asked::NotNow = ask(member.address(), other, &mut second) {
        assert!(Instant::now() < deadline, "the next joiner is not served");
    }
    assert!(second.is_complete);
    member.pause();
    member.server.donor().leave_epoch();
    assert!(matches!(ask(member.address(), JOINER, &mut first), Asked::NotNow));
}

#[test]
fn a_joiner_that_has_asked_does_not_wait_for_a_member_that_leaves_its_epoch() {
    let mut member = Member::start(Duration::ZERO);
    member.pause();
    let (donor, address) = (member.server.donor().clone(), member.address());
    let asking = std::thread::spawn(move || ask(address, JOINER, &mut Model::new(0.0)));
    while !donor.is_asked() {
        std::thread::yield_now();
    }
    donor.leave_epoch();
    assert!(matches!(asking.join().unwrap(), Asked::NotNow));
}

#[test]
fn another_model_is_not_handed_over() {
    let member = Member::start(Duration::from_millis(1));
    let mut model = Model { kind: 2, ..Model::new(0.0) };
    assert!(matches!(ask(member.address(), JOINER, &mut model), Asked::Never));
    assert_eq!(model.vectors, Model::new(0.0).vectors);
}

#[test]
fn a_joiner_that_does_not_keep_up_gives_up() {
    let member = Member::start(Duration::from_millis(1));
    member.server.donor().limit(16 << 20);
    let mut model = Model { pause: Duration::from_millis(100), ..Model::new(0.0) };
    let mut asked = ask(member.address(), JOINER, &mut model);
    if let Asked::Level(handover) = asked {
        // It was level for a moment: what follows is too much for it, and ends the wait.
        handover.follow(&mut model, || {}, |_| true);
        asked = Asked::Never;
    }
    assert!(matches!(asked, Asked::Never));
    assert!(model.is_complete, "what it has is the state after some step");
}

/// What a joiner hears of a donor that is asked to do something once it is followed.
fn heard_after(then: impl Fn(&Donor)) -> Result<Heard, Lost> {
    let member = Member::start(Duration::from_millis(40));
    let mut model = Model { pause: Duration::from_millis(1), ..Model::new(0.0) };
    let mut handover = level(ask(member.address(), JOINER, &mut model));
    then(member.server.donor());
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < HUNG);
        match handover.hear(&mut model, &|| false) {
            Ok(Heard::At { .. }) => {}
            heard => return heard,
        }
    }
}

#[test]
fn a_joiner_is_told_if_no_worker_can_follow_its_donor() {
    assert!(matches!(heard_after(Donor::refuse), Ok(Heard::Never)));
}

#[test]
fn a_joiner_needs_another_donor_if_its_own_is_let_go() {
    // It gets what is in the queue, and no word that this is all: another is ahead.
    assert!(matches!(heard_after(Donor::retire), Err(Lost::Frame(_))));
}

#[test]
fn a_joiner_that_is_needed_at_once_waits_for_no_state() {
    let server =
        StateServer::start(Ipv4Addr::LOCALHOST.into(), TOKEN, Duration::from_secs(10)).unwrap();
    // It makes no step, and so gives no state.
    server.donor().offer([1; 32], 8);
    server.donor().enter_epoch(&[]);
    let (begun, mut model) = (Instant::now(), Model::new(0.0));
    let is_enough = || begun.elapsed() >= Duration::from_millis(50);
    let asker = (&TOKEN, JOINER);
    let timeout = Duration::from_secs(600);
    assert!(Handover::ask(asker, server.address(), timeout, &mut model, &is_enough).is_err());
    assert!(begun.elapsed() < HUNG);
}

#[test]
fn a_stranger_gets_nothing() {
    let member = Member::start(Duration::from_millis(1));
    let token = Token::from_bytes([6; 32]);
    let (timeout, mut model) = (Duration::from_secs(10), Model::new(0.0));
    let asker = (&token, JOINER);
    assert!(Handover::ask(asker, member.address(), timeout, &mut model, &|| false).is_err());
    assert!(!member.server.donor().is_asked() && !member.server.donor().is_followed());
    assert!(model == Model::new(0.0));
}

#[test]
fn a_donor_that_is_silent_is_given_up() {
    let listener = unisono_net::new_socket(socket2::Domain::IPV4).unwrap();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    listener.listen(1).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let mut kept = Vec::new();
    let admission = Admission::new(TOKEN, &[HANDOVER]);
    let _acceptor =
        Acceptor::start(vec![listener], admission, move |connection, _| kept.push(connection));
    let begun = Instant::now();
    let timeout = Duration::from_millis(200);
    let (asker, mut model) = ((&TOKEN, JOINER), Model::new(0.0));
    assert!(Handover::ask(asker, address, timeout, &mut model, &|| false).is_err());
    assert!(begun.elapsed() < HUNG);
}

/// The link between two hosts.
const LINK: unisono_netlab::Rate = unisono_netlab::Rate::gbit(1);

/// How much of the speed of a plain stream a handover has at least, at its best of a few, on a machine that does
/// other things as well. `docs/measurements/elastic.md` has what it has on an idle one.
const OF_PLAIN: f64 = 0.5;

#[test]
fn a_handover_fills_a_link() {
    let Some(lab) = unisono_netlab::lab_or_skip(2, unisono_netlab::Link::new(LINK)) else { return };
    let here = |run: &(dyn Fn() + Sync)| run();
    let shares = [
        (
            "1 Gbit/s",
            compare(lab.host(0).address(), &|run| lab.host(0).run(run).unwrap(), &|run| {
                lab.host(1).run(run).unwrap();
            }),
        ),
        ("loopback", compare(Ipv4Addr::LOCALHOST.into(), &here, &here)),
    ];
    for (link, (handover, plain)) in shares {
        let share = handover / plain;
        println!(
            "{link}: {:.0} MB/s, a plain stream {:.0} MB/s: {:.0} %; {:.0} % of 1 Gbit/s",
            handover / 1e6,
            plain / 1e6,
            share * 100.0,
            handover * 800.0 / LINK.as_bits_per_second() as f64,
        );
        assert!(link == "loopback" || share >= OF_PLAIN, "{link}: {share}");
    }
}

type On<'a> = &'a (dyn Fn(&(dyn Fn() + Sync)) + Sync);

/// Bytes a second of a handover from one place to another, and of a plain stream, each at its best.
fn compare(ip: std::net::IpAddr, donor: On<'_>, joiner: On<'_>) -> (f64, f64) {
    use std::io::{Read, Write};
    use std::sync::Mutex;
    let (mut handover, mut plain) = (0.0f64, 0.0f64);
    let length = 40 << 20;
    for _ in 0..4 {
        let server = Mutex::new(None);
        donor(&|| {
            let timeout = Duration::from_secs(10);
            *server.lock().unwrap() = Some(StateServer::start(ip, TOKEN, timeout).unwrap());
        });
        let server = server.into_inner().unwrap().unwrap();
        let model = Model { vectors: vec![vec![1.0; length / 4]; 3], ..Model::new(1.0) };
        server.donor().offer(model.fingerprint(), 8);
        server.donor().enter_epoch(&[]);
        let address = server.address();
        let joining =
            Mutex::new(Model { vectors: vec![vec![0.0; length / 4]; 3], ..model.clone() });
        let given = Mutex::new(Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                joiner(&|| {
                    level(ask(address, JOINER, &mut joining.lock().unwrap()));
                })
            });
            while !server.donor().is_asked() {
                std::thread::yield_now();
            }
            let copy = model.vectors.clone();
            *given.lock().unwrap() = Instant::now();
            server.donor().give(0, copy);
        });
        let seconds = given.into_inner().unwrap().elapsed().as_secs_f64();
        assert!(joining.into_inner().unwrap().vectors == model.vectors);
        handover = handover.max(3.0 * length as f64 / seconds);

        let listener = Mutex::new(None);
        donor(&|| *listener.lock().unwrap() = std::net::TcpListener::bind((ip, 0)).ok());
        let listener = listener.into_inner().unwrap().unwrap();
        let address = listener.local_addr().unwrap();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                joiner(&|| {
                    let mut from = std::net::TcpStream::connect(address).unwrap();
                    let mut into = vec![0; 4 << 20];
                    (0..3 * length / into.len()).for_each(|_| from.read_exact(&mut into).unwrap());
                })
            });
            let (mut to, _) = listener.accept().unwrap();
            let bytes = vec![1; 4 << 20];
            (0..3 * length / bytes.len()).for_each(|_| to.write_all(&bytes).unwrap());
        });
        plain = plain.max(3.0 * length as f64 / begun.elapsed().as_secs_f64());
    }
    (handover, plain)
}

/// What a donor sends: the state after `version` steps, or the means of that step.
fn sent(version: u64, opening: Message, vectors: &[Vec<f32>]) -> Vec<u8> {
    let mut bytes = frame::encode(&opening).unwrap();
    let lengths: Vec<usize> = vectors.iter().map(Vec::len).collect();
    for chunk in chunks(version, &lengths) {
        let values = vectors[chunk.vector as usize][chunk.range()].as_bytes();
        frame::append(&Message::Chunk(chunk.of(values)), &mut bytes).unwrap();
        bytes.extend_from_slice(values);
    }
    frame::append(&Message::UpTo { newest: version + 2 }, &mut bytes).unwrap();
    bytes
}

fn hear(bytes: &[u8], following: &mut Following, model: &mut Model) -> Result<Heard, Lost> {
    following.hear(&mut &bytes[..], model)
}

#[test]
fn a_joiner_believes_only_what_must_come_next() {
    let donor = Model::new(2.0);
    let state = sent(7, Message::State { version: 7 }, &donor.vectors);
    let (mut model, mut following) = (Model::new(0.0), Following::default());
    let heard = hear(&state, &mut following, &mut model).unwrap();
    assert_eq!(heard, Heard::At { steps: 7, newest: 9 });
    assert_eq!(model.vectors, donor.vectors);
    let (numbers, vectors): (Vec<usize>, Vec<Vec<f32>>) = donor.means(8).into_iter().unzip();
    let parameters: Vec<u32> = numbers.iter().map(|number| *number as u32).collect();
    let means = |version, parameters: &[u32], of| {
        let parameters = parameters.to_vec();
        sent(of, Message::Means { version, parameters }, &vectors)
    };
    let before = model.clone();
    for (bytes, why) in [
        (means(7, &parameters, 7), Refused::WrongStep),
        (means(9, &parameters, 9), Refused::WrongStep),
        // The chunks are those of another step.
        (means(8, &parameters, 7), Refused::OutOfOrder),
        (means(8, &[0, 0], 8), Refused::WrongParameters),
        (means(8, &[0, 2], 8), Refused::WrongParameters),
        (means(8, &[1, 0], 8), Refused::OutOfOrder),
        (state.clone(), Refused::OutOfTurn),
        (frame::encode(&Message::End { steps: 8 }).unwrap(), Refused::OutOfTurn),
        (frame::encode(&Message::Busy).unwrap(), Refused::OutOfTurn),
    ] {
        match hear(&bytes, &mut following, &mut model) {
            Err(Lost::Refused(refused)) => assert_eq!(refused, why),
            other => panic!("{why}: {other:?}"),
        }
        assert!(model == before, "{why}: nothing is applied of a step that is not complete");
    }
    let heard = hear(&means(8, &parameters, 8), &mut following, &mut model).unwrap();
    assert_eq!(heard, Heard::At { steps: 8, newest: 10 });
    let end = frame::encode(&Message::End { steps: 8 }).unwrap();
    assert_eq!(hear(&end, &mut following, &mut model).unwrap(), Heard::Ended);
}

#[test]
fn damaged_and_shortened_bytes_are_refused() {
    let donor = Model::new(2.0);
    let state = sent(7, Message::State { version: 7 }, &donor.vectors);
    let mut damaged = 0;
    for at in (0..state.len()).step_by(state.len() / 40) {
        let mut bytes = state.clone();
        bytes[at] ^= 0x40;
        let mut model = Model::new(0.0);
        damaged += u32::from(hear(&bytes, &mut Following::default(), &mut model).is_err());
        let mut model = Model::new(0.0);
        assert!(hear(&state[..at], &mut Following::default(), &mut model).is_err());
        assert!(!model.is_complete);
    }
    assert_eq!(damaged, 41);
}

/// A model whose lengths the joiner is told, and that may give up.
#[derive(Default)]
struct Told {
    taken: Vec<Vec<f32>>,
    /// What it has made of each state and each step.
    made: Vec<(u64, Vec<Vec<f32>>)>,
    /// The step that it does not follow.
    refused: Option<u64>,
}

impl Told {
    fn make(&mut self, steps: u64) -> Result<(), Unfit> {
        let taken = std::mem::take(&mut self.taken);
        if self.refused == Some(steps) {
            return Err(Unfit("not this one".into()));
        }
        self.made.push((steps, taken));
        Ok(())
    }
}

impl Follower for Told {
    fn fingerprint(&self) -> [u8; 32] {
        [1; 32]
    }

    fn lengths(&self) -> Option<Vec<usize>> {
        None
    }

    fn trained(&self) -> usize {
        0
    }

    fn begin(&mut self) {
        self.taken.clear();
    }

    fn set(&mut self, _vector: usize, values: &[f32]) {
        self.taken.push(values.to_vec());
    }

    fn complete(&mut self, steps: u64) -> Result<(), Unfit> {
        self.make(steps)
    }

    fn update(&mut self, _step: u64, _parameter: usize, _mean: &[f32]) {
        panic!("no means are given by parameter");
    }

    fn stepped(&mut self, steps: u64) -> Result<(), Unfit> {
        self.make(steps)
    }
}

/// What is given to a joiner after so many steps: of other lengths each time.
fn vectors(steps: u64) -> Vec<Vec<f32>> {
    let long = CHUNK + steps as usize;
    (0..=steps % 3)
        .map(|number| vec![(steps + number) as f32; if number == 1 { long } else { 5 }])
        .collect()
}

#[test]
fn a_joiner_that_knows_no_lengths_is_told_them_with_every_step() {
    let timeout = Duration::from_secs(10);
    let server = StateServer::start(Ipv4Addr::LOCALHOST.into(), TOKEN, timeout).unwrap();
    let donor = server.donor().clone();
    donor.offer([1; 32], CHUNK);
    donor.enter_epoch(&[]);
    let ends = Arc::new(AtomicBool::new(false));
    let (training, stop) = (donor.clone(), ends.clone());
    let member = std::thread::spawn(move || {
        let mut steps = 4;
        while !stop.load(Ordering::Relaxed) {
            if training.is_asked() {
                training.tell(steps, vectors(steps));
            }
            let is_followed = training.is_followed();
            std::thread::sleep(Duration::from_millis(20));
            steps += 1;
            if is_followed {
                training.tell_step(steps, vectors(steps));
            }
        }
        steps
    });
    let mut model = Told::default();
    let asker = (&TOKEN, JOINER);
    let asked = Handover::ask(asker, server.address(), timeout, &mut model, &|| false).unwrap();
    let enter = || {
        std::thread::sleep(Duration::from_millis(300));
        ends.store(true, Ordering::Relaxed);
        let steps = member.join().unwrap();
        donor.leave_epoch();
        donor.enter_epoch(&[JOINER]);
        steps
    };
    let steps = level(asked).follow(&mut model, enter, |_| true);
    let first = model.made[0].0;
    assert!(steps > first + 2);
    let expected: Vec<_> = (first..=steps).map(|steps| (steps, vectors(steps))).collect();
    assert!(model.made == expected, "{first} to {steps}");
}

#[test]
fn lengths_are_believed_only_as_far_as_something_arrives() {
    let told = |lengths: Vec<u64>| {
        let mut bytes = frame::encode(&Message::State { version: 7 }).unwrap();
        frame::append(&Message::Lengths(lengths), &mut bytes).unwrap();
        bytes
    };
    let whole = |version, opening, vectors: &[Vec<f32>]| {
        let lengths = vectors.iter().map(|values| values.len() as u64).collect();
        let mut bytes = frame::encode(&opening).unwrap();
        frame::append(&Message::Lengths(lengths), &mut bytes).unwrap();
        let opened = frame::encode(&Message::Busy).unwrap().len();
        bytes.extend_from_slice(&sent(version, Message::Busy, vectors)[opened..]);
        bytes
    };
    let hear = |bytes: &[u8], following: &mut Following, model: &mut Told| {
        following.hear(&mut &bytes[..], model)
    };
    // Nothing, or less than was announced; an announcement that is missing, or too long.
    for bytes in [
        told(vec![u64::MAX, 1]),
        told(vec![1 << 40; 1000]),
        told(vec![0; super::wire::MAX_VECTORS + 1]),
        sent(7, Message::State { version: 7 }, &vectors(7)),
    ] {
        let mut model = Told::default();
        assert!(hear(&bytes, &mut Following::default(), &mut model).is_err());
        assert!(model.made.is_empty() && model.taken.is_empty());
    }
    let (mut model, mut following) =
        (Told { refused: Some(9), ..Told::default() }, Following::default());
    let state = whole(7, Message::State { version: 7 }, &vectors(7));
    hear(&state, &mut following, &mut model).unwrap();
    let step = |version| {
        let parameters = Vec::new();
        whole(version, Message::Means { version, parameters }, &vectors(version))
    };
    // Means by parameter are not for this model.
    let means = sent(8, Message::Means { version: 8, parameters: vec![0] }, &vectors(8)[..1]);
    let refused = hear(&means, &mut following, &mut model);
    assert!(matches!(refused, Err(Lost::Refused(Refused::WrongParameters))));
    hear(&step(8), &mut following, &mut model).unwrap();
    assert!(matches!(hear(&step(9), &mut following, &mut model), Err(Lost::Unfit(_))));
    assert_eq!(model.made.iter().map(|(steps, _)| *steps).collect::<Vec<_>>(), [7, 8]);
}
