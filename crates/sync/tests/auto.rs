//! Runs that choose their codec: all ranks choose the same, once, and say why; a resumed run goes on
//! with what was chosen.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use unisono_codec::Rules;
use unisono_collective::{Algorithm, Group, Options, Transport};
use unisono_sync::advice::{Advice, CANDIDATES};
use unisono_sync::strategy::Compression;
use unisono_sync::{Parameter, Settings, Synchronizer};

const SHARDS: usize = 4;
const STEPS: u64 = 14;

type Saved = HashMap<String, Vec<f32>>;

/// What came of a run on one rank.
#[derive(Debug, PartialEq)]
struct Trained {
    weights: Vec<Vec<u32>>,
    advice: Vec<Arc<Advice>>,
    /// The state in the beginning and in the end, at rank 0.
    saved: [Saved; 2],
    /// Bytes that this rank sent in the last step.
    sent: u64,
    /// And in each.
    by_step: Vec<u64>,
    /// Whether a codec was in force.
    encoded: Vec<Option<bool>>,
}

fn parameters() -> Vec<Parameter> {
    let matrix = |name: &str| Parameter { name: name.to_owned(), shape: vec![192, 256] };
    vec![matrix("first"), Parameter::flat("bias", 192), matrix("second")]
}

fn auto() -> Compression {
    let named = Compression::new("sign".parse().unwrap());
    Compression { rules: Rules::default(), auto: true, ..named }
}

/// Trains from what was saved, if anything was.
fn train(workers: usize, compression: Option<&Compression>, from: Option<&Saved>) -> Vec<Trained> {
    train_over(&Options::default(), Duration::ZERO, workers, compression, from)
}

/// As [`train`], in a group with these options, with shards that take a while.
fn train_over(
    options: &Options,
    compute: Duration,
    workers: usize,
    compression: Option<&Compression>,
    from: Option<&Saved>,
) -> Vec<Trained> {
    let groups = Group::local(workers, options).unwrap();
    std::thread::scope(|scope| {
        let start = |group| scope.spawn(move || worker(group, compute, compression.cloned(), from));
        let ranks: Vec<_> = groups.iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn worker(
    group: &Group,
    compute: Duration,
    compression: Option<Compression>,
    from: Option<&Saved>,
) -> Trained {
    let mut settings = Settings::new(SHARDS);
    settings.compression = compression;
    let sync = Synchronizer::new(Some(group), parameters(), settings).unwrap();
    if let Some(from) = from {
        sync.restore(group, &|name| from.get(name).cloned()).unwrap();
        sync.go_on_from(0);
    }
    let save = || {
        let mut saved = Saved::new();
        let mut each =
            |name, _, values: &[f32]| assert!(saved.insert(name, values.to_vec()).is_none());
        sync.save(group, &mut each).unwrap();
        saved
    };
    let before = save();
    let mut weights: Vec<Vec<f32>> =
        parameters().iter().map(|parameter| vec![0.5; parameter.elements()]).collect();
    let (mut advice, mut by_step, mut encoded) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..STEPS {
        let before = sync.sent();
        for _ in sync.shards() {
            let shard = sync.begin_shard();
            std::thread::sleep(compute);
            sync.begin_backward(0.0);
            for parameter in (0..weights.len()).rev() {
                let value = |(i, w): (usize, &f32)| {
                    w * 0.1 + ((i * 31 + shard * 7 + step as usize * 13) % 23) as f32 - 11.0
                };
                let gradient: Vec<f32> = weights[parameter].iter().enumerate().map(value).collect();
                sync.gradient(parameter, &gradient);
            }
            sync.end_shard();
        }
        let outcome = sync.finish(|parameter, mean| {
            weights[parameter].iter_mut().zip(mean).for_each(|(w, g)| *w -= 0.01 * g);
        });
        let outcome = outcome.unwrap();
        encoded.push(outcome.encoded);
        advice.extend(outcome.advice);
        by_step.push(sync.sent() - before);
    }
    let bits = |weights: &Vec<f32>| weights.iter().map(|w| w.to_bits()).collect();
    let weights = weights.iter().map(bits).collect();
    let sent = by_step.last().copied().unwrap_or(0);
    Trained { weights, advice, saved: [before, save()], sent, by_step, encoded }
}

#[test]
fn over_shared_memory_none_is_chosen_and_the_bits_are_those_of_dense_steps() {
    for workers in [2, 3] {
        let dense = train(workers, None, None);
        let mut shm = Options::default();
        shm.transport = Transport::Shm;
        let slow = Duration::from_millis(20);
        let trained = train_over(&shm, slow, workers, Some(&auto()), None);
        for (rank, trained) in trained.iter().enumerate() {
            let [advice] = &trained.advice[..] else { panic!("one choice: {:?}", trained.advice) };
            assert_eq!(advice.chosen, None, "{advice:?}");
            assert!(!advice.reason.is_empty());
            assert_eq!(advice.rows[0].codec, "none");
            assert!(advice.rows[1..].iter().map(|row| &row.codec[..]).eq(CANDIDATES));
            assert!(advice.rows.iter().all(|row| row.seconds > 0.0 && row.wire_bytes > 0));
            assert_eq!(trained.weights, dense[0].weights, "rank {rank} of {workers}");
        }
        assert!(trained.iter().all(|rank| rank.advice == trained[0].advice));
        assert_eq!(trained[0].saved[0]["codec.choice"], [-1.0]);
        assert_eq!(trained[0].saved[1]["codec.choice"], [0.0]);
    }
}

#[test]
fn alone_there_is_no_worker_to_send_to() {
    let trained = train(1, Some(&auto()), None);
    assert_eq!(trained[0].advice[0].reason, "there is no other worker to send to");
    assert_eq!(trained[0].weights, train(1, None, None)[0].weights);
}

#[test]
fn a_resumed_run_goes_on_with_what_was_chosen() {
    let choice = |place: f32| Saved::from([("codec.choice".to_owned(), vec![place])]);
    let dense = train(2, None, None);
    for (i, codec) in CANDIDATES.iter().enumerate() {
        let fixed = train(2, Some(&Compression::new(codec.parse().unwrap())), None);
        assert_ne!(fixed[0].weights, dense[0].weights, "{codec} makes a difference");
        // The state of a run that has just chosen: all residuals are zero.
        let mut from = fixed[0].saved[0].clone();
        from.extend(choice((i + 1) as f32));
        for (rank, resumed) in train(2, Some(&auto()), Some(&from)).iter().enumerate() {
            assert_eq!(resumed.weights, fixed[0].weights, "{codec} on rank {rank}");
            assert!(resumed.advice.is_empty(), "it is not chosen anew");
        }
    }
    let none = train(2, Some(&auto()), Some(&choice(0.0)));
    assert!(none[0].advice.is_empty());
    assert_eq!(none[0].weights, dense[0].weights);
    assert_eq!(train(2, Some(&auto()), Some(&choice(-1.0)))[0].advice.len(), 1);
}

#[test]
fn a_choice_that_was_never_made_is_refused() {
    for saved in [Saved::new(), Saved::from([("codec.choice".to_owned(), vec![7.0])])] {
        let group = Group::local(1, &Options::default()).unwrap().remove(0);
        let mut settings = Settings::new(SHARDS);
        settings.compression = Some(auto());
        let sync = Synchronizer::new(Some(&group), parameters(), settings).unwrap();
        let restored = sync.restore(&group, &|name| saved.get(name).cloned());
        assert!(restored.unwrap_err().to_string().contains("codec.choice"));
    }
}

/// What is said about bytes must be what a socket sees. Which algorithm sums them, and so how many they
/// are, a group decides by what it has measured, so the prediction must hold for each.
#[test]
fn as_many_bytes_are_sent_as_predicted() {
    let sent = |ranks: &[Trained]| ranks.iter().map(|rank| rank.sent).sum::<u64>() as f64;
    use Algorithm::{Direct, HalvingDoubling, Pairwise, Tree};
    for (algorithm, workers) in
        [(Direct, 4), (HalvingDoubling, 4), (Pairwise, 3), (Pairwise, 4), (Tree, 3), (Direct, 2)]
    {
        let mut options = Options::default();
        options.transport = Transport::Tcp;
        options.algorithm = Some(algorithm);
        let over = |compression: &Compression| {
            train_over(&options, Duration::ZERO, workers, Some(compression), None)
        };
        let advised = over(&auto());
        for row in &advised[0].advice[0].rows[1..] {
            let actual = sent(&over(&Compression::new(row.codec.parse().unwrap())));
            let predicted = row.wire_bytes as f64;
            // There are headers, and how many elements are near the top depends on the gradient.
            let close = if row.codec.starts_with("topk") { 0.25 } else { 0.1 };
            assert!(
                (actual / predicted - 1.0).abs() < close,
                "{} with {workers} workers by {algorithm}: {actual} instead of {predicted} bytes",
                row.codec
            );
        }
    }
}

#[test]
fn what_deciding_took_is_said_and_counted() {
    for trained in train(2, Some(&auto()), None) {
        let cost = trained.advice[0].cost;
        // Fifteen calls of 16 KiB each, to the other rank and back in halves.
        assert!(cost.bytes >= 15 * 2 * (16 << 10), "{cost:?}");
        assert!(cost.steps >= 8 && cost.seconds > 0.0, "{cost:?}");
        let deciding = trained.advice[0].step as usize;
        let before = trained.by_step[deciding - 1];
        // Its rank's half of them belongs to the step that was observed last, not to the next.
        assert!(trained.by_step[deciding] >= before + 15 * (16 << 10), "{:?}", trained.by_step);
        assert!(trained.by_step[deciding + 1] <= before, "{:?}", trained.by_step);
        let encoded: Vec<bool> = trained.encoded.iter().map(|encoded| encoded.unwrap()).collect();
        assert!(encoded[..=deciding].iter().all(|encoded| !encoded), "{encoded:?}");
        let chosen = trained.advice[0].chosen.is_some();
        assert!(encoded[deciding + 1..].iter().all(|encoded| *encoded == chosen), "{encoded:?}");
    }
    assert!(train(2, None, None)[0].encoded.iter().all(Option::is_none));
}
