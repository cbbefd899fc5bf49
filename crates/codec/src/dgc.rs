//! Deep Gradient Compression: the largest elements of a gradient with momentum.
//!
//! After Lin et al., *Deep Gradient Compression: Reducing the Communication Bandwidth for
//! Distributed Training*, ICLR 2018. One element of a thousand is sent, so most wait for hundreds
//! of steps in the residual. Four measures keep that from hurting:
//!
//! * **Momentum correction.** The optimizer's momentum would only see what is sent, when it is
//!   sent. Here each shard has a velocity `u` of its own, and it is the velocity that the residual
//!   `v` collects, so that what is sent late carries the momentum of all steps that it waited:
//!   `u = m·u + g` and `v = v + u`, or for Nesterov's momentum `u = m·(u + g)` and `v = v + u + g`.
//!   The optimizer then must have no momentum.
//! * **Momentum factor masking.** Where an element was sent, its velocity is set to zero with its
//!   residual: it was made of old gradients, and would go on pushing in their direction.
//! * **Local clipping.** A gradient that explodes is scaled down before it enters the residual,
//!   where it would remain for long.
//! * **Warm-up.** In the first steps, when gradients change fastest, more is sent: 25 % of the
//!   elements, then a fourth of that, in four equal stages down to 0.4 %, and then the final rate.
//!
//! The encoding is that of [`topk`](crate::topk).

use crate::randk::{assert_rate, share};
use crate::sparse::Sparse;
use crate::topk::{Selection, has_indices};
use crate::{BadEncoding, Codec, Gathered, Memory, Passage, Spans, Task, elements};
use multiversion::multiversion;
use std::sync::Arc;

/// What can be chosen about [`Dgc`].
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct DgcSettings {
    /// Which part of the elements is sent, after the warm-up.
    pub rate: f64,
    /// The factor by which velocity lasts from step to step: the optimizer's, which then must have
    /// none. 0 for none.
    pub momentum: f64,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
    /// The largest norm that the mean gradient of one parameter should have. A shard's gradient is
    /// scaled down to this, times the square root of the number of shards, for where gradients are
    /// mostly noise that is by how much a shard's is longer than the mean.
    ///
    /// The default, 100, is far above the gradients of ordinary training, and only tames those that
    /// explode. A smaller one tames more, but changes the training where gradients are often as
    /// long.
    pub clip: Option<f64>,
    /// Steps of the warm-up.
    pub ramp: u64,
}

impl Default for DgcSettings {
    fn default() -> DgcSettings {
        DgcSettings { rate: 0.04, momentum: 0.0, nesterov: false, clip: Some(100.0), ramp: 0 }
    }
}

/// Sends the largest elements of what the velocity has collected, and remembers the others.
#[derive(Clone, Debug)]
pub struct Dgc {
    settings: DgcSettings,
    sparse: Sparse,
}

impl Dgc {
    /// Values travel as they are, or as another codec encodes them; then what that leaves out stays
    /// in the residual.
    ///
    /// # Panics
    ///
    /// If the rate is not above 0 and at most 1, the momentum not at least 0 and below 1, or the
    /// clip not above 0.
    pub fn new(settings: DgcSettings, values: Option<Arc<dyn Spans>>) -> Dgc {
        let DgcSettings { rate, momentum, clip, .. } = settings;
        assert_rate(rate);
        assert!(
            (0.0..1.0).contains(&momentum),
            "momentum is at least 0 and below 1, not {momentum}"
        );
        assert!(clip.is_none_or(|clip| clip > 0.0), "a clip is above 0, not {clip:?}");
        Dgc { settings, sparse: Sparse::new("dgc", values) }
    }

    /// The part of the elements that is sent in a step.
    fn rate(&self, step: u64) -> f64 {
        const STAGES: [f64; 4] = [0.25, 0.0625, 0.015625, 0.00390625];
        let DgcSettings { rate, ramp, .. } = self.settings;
        if step >= ramp {
            return rate;
        }
        let stage = u128::from(step) * STAGES.len() as u128 / u128::from(ramp);
        rate.max(STAGES[stage as usize])
    }

    /// By what a shard's gradient is multiplied.
    fn scale(&self, shards: usize, gradient: &[f32]) -> f32 {
        let Some(clip) = self.settings.clip else { return 1.0 };
        let limit = clip * (shards as f64).sqrt();
        let norm = sum_of_squares(gradient).sqrt();
        // Scaling would turn what is not finite, and only that makes the norm so, into NaN and
        // zeros.
        if norm > limit && norm.is_finite() { (limit / norm) as f32 } else { 1.0 }
    }
}

impl Codec for Dgc {
    fn is_biased(&self) -> bool {
        true
    }

    fn suits(&self, shape: &[usize]) -> bool {
        has_indices(shape) && self.encoded_bytes(shape) < elements(shape) * 4
    }

    /// After the warm-up.
    fn encoded_bytes(&self, shape: &[usize]) -> usize {
        let elements = elements(shape);
        self.sparse.encoded_bytes(elements, share(self.settings.rate, elements))
    }

    fn passage(&self) -> Passage<'_> {
        Passage::Gathered(self)
    }
}

impl Gathered for Dgc {
    fn has_velocity(&self) -> bool {
        self.settings.momentum != 0.0
    }

    fn absorb(&self, _task: &Task, shards: usize, gradient: &[f32], memory: &mut Memory) {
        let scale = self.scale(shards, gradient);
        let momentum = self.settings.momentum as f32;
        let Memory { residual, velocity } = memory;
        if !self.has_velocity() {
            add(gradient, scale, residual);
        } else if self.settings.nesterov {
            add_nesterov(gradient, scale, momentum, velocity, residual);
        } else {
            add_velocity(gradient, scale, momentum, velocity, residual);
        }
    }

    fn encode(&self, task: &Task, shard: usize, memory: &mut Memory, into: &mut Vec<u8>) {
        let key = task.key(shard);
        let rate = self.rate(task.step);
        let indices = Selection::Sampled.largest(&memory.residual, rate, key);
        self.sparse.encode(key, &indices, &mut memory.residual, into);
        if self.has_velocity() {
            for &index in &indices {
                memory.velocity[index as usize] = 0.0;
            }
        }
    }

    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        self.sparse.decode(bytes, into)
    }
}

/// Sums whose number does not depend on the width of vectors, so that the result does not either.
const LANES: usize = 16;

/// In f64, where the squares of all f32 are finite.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2", "aarch64+neon"))]
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut sums = [0f64; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &value) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += f64::from(value) * f64::from(value);
    }
    sums.iter().sum()
}

fn add(gradient: &[f32], scale: f32, residual: &mut [f32]) {
    for (v, g) in residual.iter_mut().zip(gradient) {
        *v += g * scale;
    }
}

fn add_velocity(g: &[f32], scale: f32, momentum: f32, velocity: &mut [f32], residual: &mut [f32]) {
    for ((u, v), g) in velocity.iter_mut().zip(residual).zip(g) {
        *u = momentum * *u + g * scale;
        *v += *u;
    }
}

fn add_nesterov(g: &[f32], scale: f32, momentum: f32, velocity: &mut [f32], residual: &mut [f32]) {
    for ((u, v), g) in velocity.iter_mut().zip(residual).zip(g) {
        let g = g * scale;
        *u = momentum * (*u + g);
        *v += *u + g;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;
    use crate::sparse::tests::Halves;

    const ELEMENTS: usize = 300;

    fn task(step: u64) -> Task<'static> {
        Task { shape: &[ELEMENTS], parameter: 0, step, seed: 1 }
    }

    fn gradient(step: u64, elements: usize) -> Vec<f32> {
        let key = Key::new(step);
        (0..elements as u64).map(|i| (key.at(i) >> 40) as f32 / (1 << 21) as f32 - 4.0).collect()
    }

    fn memory(elements: usize) -> Memory {
        Memory { residual: vec![0.0; elements], velocity: vec![0.0; elements] }
    }

    /// One step as in the paper, element by element: what is sent.
    fn reference(
        DgcSettings { rate, momentum, nesterov, .. }: &DgcSettings,
        gradient: &[f32],
        u: &mut [f32],
        v: &mut [f32],
    ) -> Vec<f32> {
        let m = *momentum as f32;
        for i in 0..gradient.len() {
            if *nesterov {
                u[i] = m * (u[i] + gradient[i]);
                v[i] += u[i] + gradient[i];
            } else {
                u[i] = m * u[i] + gradient[i];
                v[i] += u[i];
            }
        }
        let mut order: Vec<usize> = (0..v.len()).collect();
        order.sort_by(|&a, &b| v[b].abs().total_cmp(&v[a].abs()).then(a.cmp(&b)));
        let mut sent = vec![0.0; v.len()];
        for &i in &order[..share(*rate, v.len())] {
            sent[i] = v[i];
            (u[i], v[i]) = (0.0, 0.0);
        }
        sent
    }

    #[test]
    fn steps_are_those_of_the_paper() {
        for (momentum, nesterov) in [(0.9, false), (0.9, true), (0.0, false), (0.0, true)] {
            let settings =
                DgcSettings { rate: 0.02, momentum, nesterov, clip: None, ..Default::default() };
            let codec = Dgc::new(settings.clone(), None);
            let mut memory = memory(if codec.has_velocity() { ELEMENTS } else { 0 });
            memory.residual.resize(ELEMENTS, 0.0);
            let (mut u, mut v) = (vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]);
            for step in 0..40 {
                let gradient = gradient(step, ELEMENTS);
                let expected = reference(&settings, &gradient, &mut u, &mut v);
                let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; ELEMENTS]);
                codec.absorb(&task(step), 4, &gradient, &mut memory);
                codec.encode(&task(step), 1, &mut memory, &mut bytes);
                codec.decode(&bytes, &mut decoded).unwrap();
                assert_eq!(decoded, expected, "step {step}, momentum {momentum}");
                assert_eq!(memory.residual, v);
                assert!(!codec.has_velocity() || memory.velocity == u);
            }
        }
    }

    #[test]
    fn a_value_codec_leaves_its_remainder_but_no_velocity() {
        let settings = DgcSettings { rate: 0.1, momentum: 0.5, clip: None, ..Default::default() };
        let codec = Dgc::new(settings, Some(Arc::new(Halves)));
        let mut memory = memory(ELEMENTS);
        codec.absorb(&task(0), 1, &gradient(0, ELEMENTS), &mut memory);
        let owed = memory.residual.clone();
        let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; ELEMENTS]);
        codec.encode(&task(0), 0, &mut memory, &mut bytes);
        codec.decode(&bytes, &mut decoded).unwrap();
        let mut sent = 0;
        for i in 0..ELEMENTS {
            assert_eq!(decoded[i] + memory.residual[i], owed[i]);
            assert_eq!(memory.velocity[i], if decoded[i] == 0.0 { owed[i] } else { 0.0 });
            sent += usize::from(decoded[i] != 0.0);
        }
        assert_eq!(sent, 30);
        assert!(
            memory.residual.iter().zip(&decoded).any(|(left, sent)| *left != 0.0 && *sent != 0.0)
        );
    }

    #[test]
    fn rates_fall_in_stages() {
        let codec = |rate, ramp| Dgc::new(DgcSettings { rate, ramp, ..Default::default() }, None);
        let rates = |codec: Dgc, steps: &[u64]| -> Vec<f64> {
            steps.iter().map(|&step| codec.rate(step)).collect()
        };
        assert_eq!(
            rates(codec(0.001, 100), &[0, 24, 25, 50, 75, 99, 100, u64::MAX]),
            [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]
        );
        assert_eq!(rates(codec(0.05, 8), &[0, 2, 4, 6, 8]), [0.25, 0.0625, 0.05, 0.05, 0.05]);
        assert_eq!(rates(codec(0.001, 1), &[0, 1]), [0.25, 0.001]);
        assert_eq!(rates(codec(0.001, 0), &[0]), [0.001]);
        assert_eq!(rates(codec(0.001, u64::MAX), &[u64::MAX - 1]), [0.00390625]);
        // The encoding follows.
        let sent = |step| {
            let mut memory = memory(ELEMENTS);
            memory.residual = gradient(0, ELEMENTS);
            let mut bytes = Vec::new();
            codec(0.01, 100).encode(&task(step), 0, &mut memory, &mut bytes);
            memory.residual.iter().filter(|&&x| x == 0.0).count()
        };
        assert_eq!((sent(0), sent(30), sent(100)), (75, 19, 3));
    }

    #[test]
    fn long_gradients_are_clipped_and_others_are_not() {
        let absorb = |clip, shards, gradient: &[f32]| {
            let codec = Dgc::new(DgcSettings { clip, ..Default::default() }, None);
            let mut memory = memory(gradient.len());
            codec.absorb(&task(0), shards, gradient, &mut memory);
            memory.residual
        };
        // Of norm 50.
        assert_eq!(absorb(Some(5.0), 4, &[30.0, 40.0]), [6.0, 8.0]);
        assert_eq!(absorb(Some(25.0), 4, &[30.0, 40.0]), [30.0, 40.0]);
        assert_eq!(absorb(None, 4, &[3e30, 4e30]), [3e30, 4e30]);
        assert_eq!(absorb(Some(100.0), 1, &[f32::MAX, 0.0]), [100.0, 0.0]);
        assert_eq!(absorb(Some(1.0), 1, &[f32::INFINITY, 2.0]), [f32::INFINITY, 2.0]);
        let visible = absorb(Some(1.0), 1, &[f32::NAN, 2.0]);
        assert!(visible[0].is_nan() && visible[1] == 2.0);
    }

    #[test]
    fn norms_are_sums_of_sixteen_lanes() {
        for elements in [0, 5, 16, 100, 1003] {
            let values = gradient(3, elements);
            let mut lanes = [0f64; 16];
            for (i, &x) in values.iter().enumerate() {
                lanes[i % 16] += f64::from(x) * f64::from(x);
            }
            let expected: f64 = lanes.iter().sum();
            assert_eq!(sum_of_squares(&values).to_bits(), expected.to_bits());
        }
    }
}
