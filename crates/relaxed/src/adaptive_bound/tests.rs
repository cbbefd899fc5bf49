use proptest::prelude::*;

use super::*;

/// Numbers in -1..1 that look random and follow from the seed.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Feeds whole windows of four workers that are blocked for a share of their time, with noisy losses.
/// `job` maps the number of the window and the bound to both.
fn feed(
    bound: &mut AdaptiveBound,
    noise: &mut Noise,
    windows: u64,
    job: impl Fn(u64, u64) -> (f64, f64),
) -> Vec<(u64, Move)> {
    let mut moves = Vec::new();
    for window in 0..windows {
        let (share, loss) = job(window, bound.bound());
        for push in 0..4 * PUSHES as u32 {
            moves.extend(
                bound
                    .observe(Observation {
                        time: window as f64,
                        worker: push % 4,
                        blocked: share,
                        wall: 1.0,
                        loss: (loss + 0.1 * noise.next()) as f32,
                    })
                    .map(|a_move| (window, a_move)),
            );
        }
    }
    moves
}

/// Four workers under the bound, on a simulated clock: after each push a worker waits until it is at
/// most the bound ahead of the slowest, then computes for as long as `compute` says. Returns the
/// share of time that workers were blocked.
fn simulate(
    bound: &mut AdaptiveBound,
    moves: &mut Vec<Move>,
    pushes: u64,
    mut compute: impl FnMut(usize) -> f64,
) -> f64 {
    #[derive(Clone, Copy)]
    enum State {
        Waits { since: f64 },
        Computes { until: f64, blocked: f64 },
    }
    let mut states = [State::Waits { since: 0.0 }; 4];
    let (mut clocks, mut pushed) = ([0u64; 4], [0.0; 4]);
    let (mut now, mut lost, mut total) = (0.0, 0.0, 0.0);
    for push in 0..pushes {
        let slowest = *clocks.iter().min().unwrap();
        for worker in 0..4 {
            if let State::Waits { since } = states[worker]
                && clocks[worker] <= slowest + bound.bound()
            {
                let until = now + compute(worker);
                states[worker] = State::Computes { until, blocked: now - since };
            }
        }
        let ready = |worker: &usize| match states[*worker] {
            State::Computes { until, .. } => until,
            State::Waits { .. } => f64::INFINITY,
        };
        let worker = (0..4).min_by(|a, b| ready(a).total_cmp(&ready(b))).unwrap();
        let State::Computes { until, blocked } = states[worker] else {
            panic!("all workers wait, even the slowest");
        };
        now = until;
        let wall = now - pushed[worker];
        (lost, total) = (lost + blocked, total + wall);
        let loss = (1.0 + 100.0 / (100.0 + push as f64)) as f32;
        moves.extend(bound.observe(Observation {
            time: now,
            worker: worker as u32,
            blocked,
            wall,
            loss,
        }));
        clocks[worker] += 1;
        pushed[worker] = now;
        states[worker] = State::Waits { since: now };
    }
    lost / total
}

#[test]
fn workers_that_stumble_get_more_room_and_equal_ones_none() {
    // Every tenth step, of any worker, takes eight times as long: room for some clocks evens that out.
    let mut noise = Noise(1);
    let mut stumbling = move |_| if noise.next() > 0.8 { 8.0 } else { 1.0 };
    let fixed = |least| AdaptiveBound::new(Limits { least, most: least });
    let narrow = simulate(&mut fixed(1), &mut Vec::new(), 20_000, &mut stumbling);

    let (mut bound, mut moves) = (AdaptiveBound::new(Limits::default()), Vec::new());
    let adapted = simulate(&mut bound, &mut moves, 20_000, &mut stumbling);
    assert!(bound.bound() >= 4, "{moves:?}");
    assert!(adapted < 0.6 * narrow, "blocked {adapted} instead of {narrow} of the time");
    assert!(moves[0].reason.contains(" % of the time") && moves[0].reason.ends_with("1 → 2"));

    // Then all become equal, but for a little.
    let mut noise = Noise(2);
    simulate(&mut bound, &mut moves, 20_000, |_| 1.0 + 0.01 * noise.next());
    assert_eq!(bound.bound(), 1, "{moves:?}");
    let last = &moves.last().unwrap().reason;
    assert!(
        last.starts_with("blocked less than 2 % of the time in 4 windows of 32 pushes"),
        "{last}"
    );
}

#[test]
fn equal_workers_stay_at_the_least() {
    let (mut bound, mut moves) = (AdaptiveBound::new(Limits::default()), Vec::new());
    let mut noise = Noise(3);
    simulate(&mut bound, &mut moves, 10_000, |_| 1.0 + 0.01 * noise.next());
    assert_eq!(moves, []);
}

#[test]
fn a_slow_worker_raises_to_the_limit() {
    let (mut bound, mut moves) = (AdaptiveBound::new(Limits::default()), Vec::new());
    simulate(&mut bound, &mut moves, 4000, |worker| if worker == 3 { 4.0 } else { 1.0 });
    let bounds: Vec<u64> = moves.iter().map(|a_move| a_move.to).collect();
    assert_eq!(bounds, [2, 4, 8, 16]);
}

#[test]
fn a_loss_that_diverges_lowers_to_the_least() {
    let limits = Limits { least: 3, ..Limits::default() };
    let (mut bound, mut noise) = (AdaptiveBound::new(limits), Noise(4));
    let blocked = 0.23;
    let falling = |window, _| (blocked, 2.0 - 0.05 * window as f64);
    let moves = feed(&mut bound, &mut noise, 20, falling);
    assert_eq!(bound.bound(), 16);
    let reason = &moves[1].1.reason;
    let start = "blocked 23 % of the time while the loss fell from 1.9";
    assert!(reason.starts_with(start) && reason.ends_with("6 → 12"), "{reason}");

    let rising = |window, _| (blocked, 1.0 + 0.1 * window as f64);
    let moves = feed(&mut bound, &mut noise, 20, rising);
    let bounds: Vec<u64> = moves.iter().map(|(_, a_move)| a_move.to).collect();
    assert_eq!(bounds[..3], [12, 6, 3], "{moves:?}");
    let reason = &moves[0].1.reason;
    assert!(reason.starts_with("the loss rose from 1.0") && reason.contains("noise"), "{reason}");
}

#[test]
fn halving_stops_at_the_least() {
    let limits = Limits { least: 3, ..Limits::default() };
    let (mut bound, mut noise) = (AdaptiveBound::new(limits), Noise(10));
    feed(&mut bound, &mut noise, 1, |_, _| (0.5, 1.0));
    feed(&mut bound, &mut noise, PATIENCE, |_, _| (0.0, 1.0));
    assert_eq!(bound.bound(), 5);
    let moves = feed(&mut bound, &mut noise, 6, |window, _| (0.05, 2.0 + window as f64));
    let bounds: Vec<u64> = moves.iter().map(|(_, a_move)| a_move.to).collect();
    assert_eq!(bounds, [4, 3], "{moves:?}");
}

#[test]
fn a_loss_that_is_no_number_lowers_at_once_and_one_that_never_was_does_not() {
    let limits = Limits::default();
    let (mut bound, mut noise) = (AdaptiveBound::new(limits), Noise(5));
    feed(&mut bound, &mut noise, 4, |_, _| (0.5, 1.0));
    assert_eq!(bound.bound(), 4);
    let moves = feed(&mut bound, &mut noise, 1, |_, _| (0.5, f64::NAN));
    assert_eq!(moves[0].1.reason, "32 of 32 losses are no numbers: 4 → 2");

    let mut bound = AdaptiveBound::new(limits);
    let moves = feed(&mut bound, &mut noise, 20, |_, _| (0.5, f64::NAN));
    assert_eq!(bound.bound(), 16);
    assert_eq!(moves[0].1.reason, "blocked 50 % of the time: 1 → 2");
}

#[test]
fn a_worse_loss_forbids_to_raise_but_not_for_ever() {
    let (mut bound, mut noise) = (AdaptiveBound::new(Limits::default()), Noise(6));
    feed(&mut bound, &mut noise, 10, |_, _| (0.0, 1.0));
    // At the least there is nothing to lower, and so nothing that the bound could do about it.
    let moves = feed(&mut bound, &mut noise, 2 * RECENT as u64, |_, _| (0.5, 3.0));
    assert!((10..=RECENT as u64).contains(&moves[0].0), "{moves:?}");
}

#[test]
fn noise_is_no_reason_to_lower() {
    let (mut bound, mut noise) = (AdaptiveBound::new(Limits::default()), Noise(7));
    feed(&mut bound, &mut noise, 20, |_, _| (0.5, 1.0));
    assert_eq!(bound.bound(), 16);
    let moves = feed(&mut bound, &mut noise, 1000, |_, _| (0.05, 1.0));
    assert!(moves.len() <= 2, "{moves:?}");
}

/// The same job for ever: moves must become rarer and rarer.
fn settles(job: impl Fn(u64) -> (f64, f64)) {
    const WINDOWS: u64 = 20_000;
    let (mut bound, mut noise) = (AdaptiveBound::new(Limits::default()), Noise(8));
    let moves = feed(&mut bound, &mut noise, WINDOWS, |_, bound| job(bound));
    let late = moves.iter().filter(|(window, _)| *window > WINDOWS / 2).count();
    assert!(moves.len() > 4, "the job does move the bound: {moves:?}");
    assert!(moves.len() <= 40 && late <= 4, "{} moves, {late} of them late", moves.len());
}

#[test]
fn it_settles_between_blocked_and_idle() {
    settles(|bound| (if bound <= 3 { 0.2 } else { 0.0 }, 1.0));
}

#[test]
fn it_settles_between_blocked_and_a_worse_loss() {
    settles(|bound| (0.2, if bound >= 6 { 2.0 } else { 1.0 }));
}

#[test]
fn after_a_long_time_of_errors_it_follows_a_job_that_changes() {
    let (mut bound, mut noise) = (AdaptiveBound::new(Limits::default()), Noise(9));
    feed(&mut bound, &mut noise, 1000, |_, bound| (0.2, if bound >= 6 { 2.0 } else { 1.0 }));
    assert!(bound.bound() < 7);
    feed(&mut bound, &mut noise, 1000, |_, _| (0.2, 1.0));
    assert_eq!(bound.bound(), 16);
    feed(&mut bound, &mut noise, 1000, |_, _| (0.0, 1.0));
    assert_eq!(bound.bound(), 1);
}

#[test]
fn windows_follow_the_number_of_workers() {
    let mut bound = AdaptiveBound::new(Limits::default());
    let mut windows = |workers: u32, pushes: u32| -> Vec<u32> {
        let observe = |push: u32| {
            let worker = push % workers;
            let loss = f32::NAN;
            bound.observe(Observation { time: 0.0, worker, blocked: 0.5, wall: 1.0, loss })
        };
        (0..pushes)
            .map(observe)
            .zip(1..)
            .filter_map(|(a_move, push)| a_move.map(|_| push))
            .collect()
    };
    assert_eq!(windows(2, 16), [16]);
    // Two windows of 48 pushes are on trial.
    assert_eq!(windows(6, 144), [144]);
    // Four have left; the first window still waits for them.
    assert_eq!(windows(2, 48 + 16 + 16), [48 + 16 + 16]);
}

fn observation() -> impl Strategy<Value = Observation> {
    let time = prop_oneof![4 => 0.0..2.0f64, 1 => any::<f64>()];
    let loss = prop_oneof![8 => 0f32..3.0, 1 => any::<f32>()];
    (0u32..5, time.clone(), time, loss).prop_map(|(worker, blocked, wall, loss)| Observation {
        time: 0.0,
        worker,
        blocked,
        wall,
        loss,
    })
}

proptest! {
    #[test]
    fn limits_hold_and_moves_follow_each_other(
        least in 0u64..6,
        most in 0u64..20,
        observations in prop::collection::vec(observation(), 0..4000),
        calm in 0f32..3.0,
    ) {
        let limits = Limits { least, most };
        let (mut bound, mut again) = (AdaptiveBound::new(limits), AdaptiveBound::new(limits));
        let mut before = least;
        for (index, &observation) in observations.iter().enumerate() {
            // Half of the time the loss is quiet, so that bounds have a chance to rise.
            let loss = if index / 400 % 2 == 0 { calm } else { observation.loss };
            let observation = Observation { loss, ..observation };
            let a_move = bound.observe(observation);
            prop_assert_eq!(&a_move, &again.observe(observation));
            if let Some(Move { from, to, reason, .. }) = a_move {
                prop_assert_eq!(from, before);
                prop_assert_ne!(to, from);
                prop_assert!(reason.ends_with(&format!(": {from} → {to}")), "{}", reason);
                before = to;
            }
            prop_assert_eq!(bound.bound(), before);
            prop_assert!((least..=most.max(least)).contains(&before));
        }
    }
}
