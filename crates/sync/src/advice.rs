//! Which codec would make steps shorter, if any.
//!
//! A few steps without compression are [`Observed`]: when the buckets became ready, how long they
//! were under way, when the backward pass ended, how busy the processors were. From these follows
//! the [`Link`]: what a call costs, and what a byte costs. How many bytes and calls a bucket would
//! take with a codec, and how long it is encoded and decoded, is its [`Volume`].
//!
//! A step is then *replayed* with the volumes of a candidate. Buckets become ready when they were
//! seen to, and are taken in order by one thread, which codes and moves them; the weights are updated
//! bucket by bucket, after the backward pass. Coding beside the backward pass takes processors from
//! it if there are too few for both, see [`Processors`]. What the replay of the observed steps does
//! not explain, it is [corrected](Correction) by.
//!
//! The fastest candidate is chosen if it saves enough to be worth its loss of precision. Nothing here
//! looks at a clock, so that ranks with the same observations come to the same advice.

use unisono_codec::CodecSpec;

/// What is considered, from the gentlest to the coarsest. Codecs that converge with their default
/// settings wherever dense gradients do: not `dgc`, which takes the momentum out of the optimizer's
/// hands, and not `randk`, which needs a rate and a learning rate that suit each other.
pub const CANDIDATES: [&str; 6] = ["fp16", "int8", "int4", "sign", "topk:4%", "powersgd:4"];

/// What a codec must save of a step to be chosen. Less: the choice may be an error of the prediction,
/// and costs precision for nothing. More: gains are left.
const WORTH_IT: f64 = 0.10;

/// How much slower than the fastest a gentler codec may be, and be preferred to it.
const HARDLY_SLOWER: f64 = 0.02;

/// How far the speed of the link may be corrected. Further: other errors are taken for those of the
/// link, and predictions for codecs suffer. Less: slow links, where a small error is many
/// milliseconds, are predicted worse.
const CORRECTABLE: f64 = 1.25;

/// Halvings of the range in which the link's correction is searched: to a millionth.
const BISECTIONS: usize = 20;

/// What was decided, and why. Equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The last step before the decision, counted from 0.
    pub step: u64,
    /// What was considered, "none" first.
    pub rows: Vec<Prediction>,
    /// The codec of all steps from now on; `None` if none would pay.
    pub chosen: Option<CodecSpec>,
    /// What a step without a codec took.
    pub measured_dense_seconds: f64,
    /// Why, in a sentence.
    pub reason: String,
    /// What the decision itself took, besides the steps without a codec that it rests on.
    pub cost: Cost,
}

/// What a decision took: calls that are timed, and codecs that are tried out. Of no use to training.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Steps without a codec that were observed, those that did not count included.
    pub steps: u64,
    /// Bytes that all ranks together sent for it.
    pub bytes: u64,
    /// Seconds that it took, on the slowest rank.
    pub seconds: f64,
}

/// What a step would take.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// With this codec; "none" without one.
    pub codec: String,
    /// The whole step.
    pub seconds: f64,
    /// Encoding and decoding, hidden or not.
    pub coding_seconds: f64,
    /// Bytes that all ranks together send.
    pub wire_bytes: u64,
}

/// Something that could be chosen.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The codec.
    pub codec: CodecSpec,
    /// What it makes of every bucket.
    pub volumes: Vec<Volume>,
}

/// What the exchange of a bucket takes, whatever the link.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Volume {
    /// Collective calls, one after the other.
    pub calls: f64,
    /// Bytes that leave the busiest rank.
    pub bytes: f64,
    /// Bytes that leave all ranks.
    pub all_bytes: f64,
    /// Elements that are added up on the way.
    pub folded: f64,
    /// Seconds of encoding and decoding while all ranks do so, and nothing else.
    pub coding: f64,
}

/// What steps without a codec are like. Equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The last of them, counted from 0.
    pub step: u64,
    /// Workers of the run.
    pub workers: usize,
    /// How long a step took; all times below begin with it.
    pub seconds: f64,
    /// When the last backward pass ended.
    pub computed: f64,
    /// What happened to every bucket.
    pub buckets: Vec<ObservedBucket>,
    /// What an empty call takes.
    pub latency: f64,
    /// A short call after a pause.
    pub short: Short,
    /// What a byte can cost at most; what took longer was waiting for a processor.
    pub dearest_byte: f64,
    /// What it takes to add up an element.
    pub fold: f64,
    /// Bytes that all ranks together sent.
    pub wire_bytes: u64,
    /// The processors of the machine that has the fewest for its ranks.
    pub processors: Processors,
}

/// A call of a few bytes, of which many links let some pass at once if they were idle before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Short {
    /// Bytes that leave the busiest rank.
    pub bytes: f64,
    /// How long it takes.
    pub seconds: f64,
}

/// A bucket in steps without a codec.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ObservedBucket {
    /// When the last rank had all its gradients.
    pub ready: f64,
    /// How long it was under way, neither adding up nor waiting for a rank.
    pub moving: f64,
    /// How long updating its parameters took.
    pub update: f64,
}

/// Whether processors have time for coding while the backward pass goes on.
///
/// The rule: `busy` processors are used by the backward passes of all ranks of a machine, and each
/// rank's coder wants one more. If these are more than there are `cores`, all get the same part of
/// what they want.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processors {
    /// How many there are.
    pub cores: f64,
    /// How many are used while gradients are computed.
    pub busy: f64,
    /// Ranks of the machine, each of which codes.
    pub coders: f64,
}

impl Processors {
    /// How fast the backward pass is while all ranks code, where 1 is undisturbed.
    pub fn speed(&self) -> f64 {
        (self.cores / (self.busy + self.coders)).clamp(0.01, 1.0)
    }

    /// How much longer coding takes beside the backward pass than when ranks do nothing but code.
    pub fn stretch(&self) -> f64 {
        self.cores.max(self.busy + self.coders) / self.cores.max(self.coders).max(1.0)
    }
}

/// What moving data costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds of a call, whatever it moves.
    pub call: f64,
    /// Seconds of a byte that leaves a rank.
    pub byte: f64,
    /// Bytes that pass at once after a pause in which as many could have passed.
    pub burst: f64,
}

impl Link {
    /// The link over which the observed buckets went.
    pub fn of(observed: &Observed, dense: &[Volume]) -> Link {
        let pairs = || observed.buckets.iter().zip(dense);
        // No bucket was quicker than its calls are when they are empty.
        let quickest = pairs().map(|(bucket, volume)| bucket.moving / volume.calls.max(1.0));
        let call = quickest.fold(observed.latency, f64::min).max(0.0);
        let calls: f64 = dense.iter().map(|volume| volume.calls).sum();
        let bytes: f64 = dense.iter().map(|volume| volume.bytes).sum();
        let moving: f64 = observed.buckets.iter().map(|bucket| bucket.moving).sum();
        let byte = (moving - calls * call).max(0.0) / bytes.max(1.0);
        if byte <= observed.dearest_byte {
            return Link { call, byte, burst: burst(&observed.short, observed.latency, byte) };
        }
        // What bytes cannot have cost was waiting for a processor, as any call would.
        let byte = observed.dearest_byte;
        Link { call: (moving - bytes * byte).max(0.0) / calls.max(1.0), byte, burst: 0.0 }
    }

    fn seconds(&self, volume: &Volume) -> f64 {
        volume.calls * self.call + volume.bytes * self.byte
    }

    fn scaled(&self, factor: f64) -> Link {
        Link { call: self.call * factor, byte: self.byte * factor, ..*self }
    }
}

/// What of a short call the link cannot have waited for.
fn burst(short: &Short, latency: f64, byte: f64) -> f64 {
    let waited = (short.seconds - latency).max(0.0) / byte.max(f64::MIN_POSITIVE);
    (short.bytes - waited).max(0.0)
}

/// A link on which time passes: what it saves while it is idle.
struct Idling<'a> {
    link: &'a Link,
    /// Bytes that would pass at once.
    saved: f64,
    /// When that was so.
    at: f64,
}

impl Idling<'_> {
    /// How long a bucket takes that is sent from now on.
    fn send(&mut self, now: f64, volume: &Volume) -> f64 {
        let earned = (now - self.at).max(0.0) / self.link.byte.max(f64::MIN_POSITIVE);
        let saved = (self.saved + earned).min(self.link.burst);
        let at_once = saved.min(volume.bytes);
        let seconds = self.link.seconds(volume) - at_once * self.link.byte;
        (self.saved, self.at) = (saved - at_once, now + seconds);
        seconds
    }
}

/// What the replay of the observed steps is wrong by: a part is taken for an error of the link's
/// speed, which others share in proportion to what they move. The rest, such as waiting for each
/// other, remains with any codec.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    /// What the link's costs are multiplied by.
    pub link: f64,
    /// What is added to a step.
    pub seconds: f64,
}

impl Correction {
    fn of(observed: &Observed, dense: &[Volume], link: &Link) -> Correction {
        let replayed = |factor: f64| replay(observed, dense, &link.scaled(factor));
        let (mut low, mut high) = (1.0 / CORRECTABLE, CORRECTABLE);
        // Where the link makes no difference, its speed is not the error.
        if replayed(high) - replayed(low) <= f64::EPSILON * observed.seconds {
            (low, high) = (1.0, 1.0);
        }
        for _ in 0..BISECTIONS {
            let middle = (low + high) / 2.0;
            match replayed(middle) < observed.seconds {
                true => low = middle,
                false => high = middle,
            }
        }
        let link = (low + high) / 2.0;
        Correction { link, seconds: observed.seconds - replayed(link) }
    }
}

/// Predicts a step without a codec, whose buckets have the volumes `dense`, and with each candidate,
/// and chooses.
pub fn advise(observed: &Observed, dense: &[Volume], candidates: &[Candidate]) -> Advice {
    let link = Link::of(observed, dense);
    let correction = Correction::of(observed, dense, &link);
    let link = link.scaled(correction.link);
    let predict = |codec: String, volumes: &[Volume]| Prediction {
        codec,
        seconds: (replay(observed, volumes, &link) + correction.seconds).max(0.0),
        coding_seconds: volumes.iter().map(|volume| volume.coding).sum(),
        wire_bytes: volumes.iter().map(|volume| volume.all_bytes).sum::<f64>() as u64,
    };
    let none = Prediction { wire_bytes: observed.wire_bytes, ..predict("none".to_owned(), dense) };
    let predictions: Vec<Prediction> =
        candidates.iter().map(|c| predict(c.codec.to_string(), &c.volumes)).collect();

    let shortest = predictions.iter().map(|p| p.seconds).fold(f64::INFINITY, f64::min);
    let best = predictions.iter().position(|p| p.seconds <= shortest * (1.0 + HARDLY_SLOWER));
    let worth_it = |prediction: &Prediction| prediction.seconds < none.seconds * (1.0 - WORTH_IT);
    let chosen = best.filter(|best| observed.workers > 1 && worth_it(&predictions[*best]));
    let reason = match (best, chosen) {
        _ if observed.workers < 2 => "there is no other worker to send to".to_owned(),
        (None, _) => "no parameter is large enough to be compressed".to_owned(),
        (_, Some(chosen)) => {
            let fastest = &predictions[chosen];
            let saved = percent(1.0 - fastest.seconds / none.seconds);
            format!("{} saves {saved} of the step: {}", fastest.codec, instead(fastest, &none))
        }
        (Some(best), None) => {
            let moving = |volumes: &[Volume]| volumes.iter().map(|v| link.seconds(v)).sum::<f64>();
            let saves = moving(dense) - moving(&candidates[best].volumes);
            // What would be left if nothing had to be moved.
            let idle = replay(observed, &vec![Volume::default(); dense.len()], &link);
            let idle = idle + correction.seconds;
            refusal(&none, &predictions[best], idle, saves)
        }
    };
    Advice {
        step: observed.step,
        chosen: chosen.map(|chosen| candidates[chosen].codec.clone()),
        measured_dense_seconds: observed.seconds,
        reason,
        cost: Cost::default(),
        rows: std::iter::once(none).chain(predictions).collect(),
    }
}

/// Why the best candidate does not pay.
fn refusal(none: &Prediction, best: &Prediction, idle: f64, saves: f64) -> String {
    let (codec, instead) = (&best.codec, instead(best, none));
    if idle > none.seconds * (1.0 - WORTH_IT) {
        return format!(
            "hardly anything waits for communication: with {codec} the step would take {instead}"
        );
    }
    if best.coding_seconds >= saves && best.seconds >= none.seconds {
        let (coding, saves) = (duration(best.coding_seconds), duration(saves.max(0.0)));
        return format!(
            "encoding takes longer ({coding}) than sending saves ({saves}): with {codec} the step \
             would take {instead}"
        );
    }
    if best.seconds >= none.seconds {
        return format!(
            "encoding takes processors from the backward pass: with {codec} the step would take \
             {instead}"
        );
    }
    let saved = percent(1.0 - best.seconds / none.seconds);
    format!(
        "{codec} would save {saved} of the step, which is not worth its loss of precision: {instead}"
    )
}

fn instead(with: &Prediction, without: &Prediction) -> String {
    format!("{} instead of {}", duration(with.seconds), duration(without.seconds))
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 0.001 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

/// How long a step would take whose buckets have these volumes.
fn replay(observed: &Observed, volumes: &[Volume], link: &Link) -> f64 {
    let (speed, stretch) = (observed.processors.speed(), observed.processors.stretch());
    // By how much coding has held up the backward pass, and when the last bucket was done.
    let (mut delay, mut free) = (0.0, 0.0f64);
    let mut link = Idling { link, saved: link.burst, at: 0.0 };
    let mut arrivals = Vec::with_capacity(volumes.len());
    for (bucket, volume) in observed.buckets.iter().zip(volumes) {
        let start = free.max(bucket.ready + delay);
        let left = (observed.computed + delay - start).max(0.0);
        let beside = (left / speed).min(volume.coding * stretch);
        delay += beside * (1.0 - speed);
        let after = (volume.coding - beside / stretch).max(0.0);
        free = start + beside + after + volume.folded * observed.fold;
        free += link.send(free, volume);
        arrivals.push(free);
    }
    let computed = observed.computed + delay;
    let updated =
        |now: f64, (arrival, bucket): (f64, &ObservedBucket)| now.max(arrival) + bucket.update;
    arrivals.into_iter().zip(&observed.buckets).fold(computed, updated)
}

#[cfg(test)]
mod tests;
