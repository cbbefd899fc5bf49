//! Gradients that are encoded, exchanged and decoded on devices, without one: their means, and what is remembered, have
//! the bits of the host's strategy. So have, in `sums`, the means over shards that ranks have added up.

use std::collections::BTreeMap;
use std::sync::Once;

use unisono_collective::{Group, Options};
use unisono_cuda::exchange::{
    DeviceGradient, Encoded, Exchange, ExchangeError, Exchanged, Remembered,
};
use unisono_cuda::{CodecError, Context, DeviceGroup, DeviceMemory, DevicePtr, Driver, Stream};
use unisono_sync::shards::Shards;
use unisono_sync::strategy::{Compressed, Compression, Remembered as OnHost, Strategy};
use unisono_sync::{Parameter, Settings, Synchronizer};

#[path = "../window/fake.rs"]
#[allow(dead_code, reason = "worlds only")]
mod fake;
#[path = "../common/families.rs"]
mod families;
mod sums;

/// One of every kind, with every way to travel.
const CODECS: [&str; 17] = [
    "fp16",
    "bf16",
    "int8",
    "int8:stochastic",
    "int4",
    "qsgd:3",
    "sign",
    "topk:5%",
    "topk:5%,exact",
    "topk:5%+int8",
    "topk:2%+bf16",
    "randk:10%",
    "randk:10%+bf16",
    "powersgd:2",
    "powersgd:1+fp16",
    "powersgd:4+bf16",
    "none",
];

/// Has a gradient on some ranks in some steps, and sometimes nowhere.
const RARE: usize = 3;

fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 6] = [&[40, 70], &[70], &[16, 8, 3, 3], &[64, 33], &[9, 999], &[3, 5]];
    let parameter =
        |(i, shape): (usize, &&[usize])| Parameter { name: format!("p{i}"), shape: shape.to_vec() };
    shapes.iter().enumerate().map(parameter).collect()
}

fn noise(seed: u64) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// The gradient of a rank: rows and columns differ in size, and so do steps.
fn gradient(step: u64, rank: usize, parameter: usize, elements: usize) -> Option<Vec<f32>> {
    if parameter == RARE && (step % 3 == 1 || (step % 3 == 2 && rank > 0)) {
        return None;
    }
    let seed = ((step * 100 + rank as u64) * 10 + parameter as u64) * 20_000;
    let size = |i: usize| 10f32.powi((i / 50 % 5) as i32 - 3) * (1 + step % 4) as f32;
    Some((0..elements).map(|i| noise(seed + i as u64) * size(i)).collect())
}

#[derive(Clone, Copy)]
struct Case {
    codec: &'static str,
    /// A rule for one of the parameters.
    rule: Option<&'static str>,
    warm_up: u64,
    error_feedback: bool,
}

impl Case {
    fn of(codec: &'static str) -> Case {
        Case { codec, rule: None, warm_up: 0, error_feedback: true }
    }

    /// Past the next measurement of the usual size, for codecs to which it matters.
    fn steps(self) -> u64 {
        if ["int", "qsgd", "sign"].iter().any(|name| self.codec.starts_with(name)) { 18 } else { 6 }
    }

    fn compression(self) -> Compression {
        let mut compression = Compression::new("fp16".parse().unwrap());
        compression.rules.codec = match self.codec {
            "none" => None,
            codec => Some(codec.parse().unwrap()),
        };
        compression.rules.exceptions = self.rule.iter().map(|rule| rule.parse().unwrap()).collect();
        let (warm_up, error_feedback) = (self.warm_up, self.error_feedback);
        Compression { warm_up, error_feedback, seed: 7, ..compression }
    }
}

type Saved = BTreeMap<String, Vec<f32>>;

/// The means of every step that had any, and what rank 0 saves in the end.
#[derive(Debug, Default)]
struct Outcome {
    means: Vec<BTreeMap<usize, Vec<f32>>>,
    saved: Saved,
}

fn on_host(world: usize, case: Case) -> Vec<Outcome> {
    let groups = Group::local(world, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .iter()
            .map(|group| {
                scope.spawn(move || {
                    let (listed, rank) = (parameters(), group.rank());
                    let mut settings = Settings::new(world);
                    settings.compression = Some(case.compression());
                    let host = Synchronizer::new(Some(group), listed.clone(), settings).unwrap();
                    let mut outcome = Outcome::default();
                    for step in 0..case.steps() {
                        host.begin_shard();
                        host.begin_backward(0.0);
                        for (number, parameter) in listed.iter().enumerate() {
                            if let Some(own) = gradient(step, rank, number, parameter.elements()) {
                                host.gradient(number, own.as_slice());
                            }
                        }
                        host.end_shard();
                        let mut means = BTreeMap::new();
                        host.finish(|number, mean| drop(means.insert(number, mean.to_vec())))
                            .unwrap();
                        outcome.means.push(means);
                    }
                    let save = &mut |name: String, _: usize, values: &[f32]| {
                        outcome.saved.insert(name, values.to_vec());
                    };
                    host.save(group, save).unwrap();
                    outcome
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank on its device.
struct Worker {
    exchange: Exchange,
    /// Knows what is encoded, and under which names it is saved.
    host: Compressed,
    context: Context,
    stream: Stream,
}

impl Worker {
    fn new(group: Group, case: Case) -> Result<Worker, ExchangeError> {
        let driver = Driver::load_from(fake::library().as_os_str()).unwrap();
        let context = Context::new(&driver.device(0).unwrap()).unwrap();
        let (listed, shards) = (parameters(), Shards::new(group.size(), group.size()).unwrap());
        let host = Compressed::new(group, shards, &listed, case.compression());
        let exchanged = |(number, parameter): (usize, &Parameter)| Exchanged {
            shape: parameter.shape.clone(),
            codec: host.encoding(number).map(|(spec, feeds_back, relative)| Encoded {
                spec: spec.clone(),
                feeds_back,
                relative,
            }),
        };
        let exchanged: Vec<_> = listed.iter().enumerate().map(exchanged).collect();
        let group = DeviceGroup::new(host.group().unwrap().clone(), 0);
        let exchange = Exchange::new(group, &context, &exchanged, case.warm_up, 7)?;
        let stream = Stream::new(&context, 0).unwrap();
        Ok(Worker { exchange, host, context, stream })
    }

    fn copied(&self, values: &[f32]) -> DeviceMemory {
        // Not aligned for vectors: gradients are where their bucket has them.
        let memory = DeviceMemory::new(&self.context, values.len() * 4 + 4).unwrap();
        // SAFETY: the memory has as many bytes, and the copy is waited for.
        unsafe {
            let (into, from) = (memory.pointer().offset(4), values.as_ptr().cast());
            self.stream.copy_to_device(into, from, values.len() * 4).unwrap();
        }
        self.stream.synchronize().unwrap();
        memory
    }

    fn read(&self, from: DevicePtr, count: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        // SAFETY: there are as many, and the copy is waited for.
        unsafe {
            self.stream.copy_to_host(values.as_mut_ptr().cast(), from, count * 4).unwrap();
        }
        self.stream.synchronize().unwrap();
        values
    }

    /// Two buckets, the last parameters first.
    fn step(&mut self, step: u64) -> Result<BTreeMap<usize, Vec<f32>>, ExchangeError> {
        let (listed, rank) = (parameters(), self.exchange.group().group().rank());
        let mut means = BTreeMap::new();
        for bucket in [3..listed.len(), 0..3] {
            let own = |number: usize| gradient(step, rank, number, listed[number].elements());
            let zeros = |number: usize| vec![-0.0; listed[number].elements()];
            let numbers: Vec<usize> = bucket.rev().collect();
            let memory: Vec<DeviceMemory> = numbers
                .iter()
                .map(|number| self.copied(&own(*number).unwrap_or_else(|| zeros(*number))))
                .collect();
            let flags: Vec<f32> =
                numbers.iter().map(|number| f32::from(u8::from(own(*number).is_some()))).collect();
            let used = self.copied(&flags);
            let used = numbers.contains(&RARE).then(|| used.pointer().offset(4));
            let gradients: Vec<DeviceGradient> = numbers
                .iter()
                .zip(&memory)
                .map(|(number, memory)| DeviceGradient {
                    parameter: *number,
                    pointer: memory.pointer().offset(4),
                })
                .collect();
            // SAFETY: the memory has as many elements, and is there until the stream has come to the end.
            let exchanged = unsafe { self.exchange.exchange(step, &gradients, used, &self.stream) };
            self.stream.synchronize().unwrap();
            for (of, used) in gradients.iter().zip(exchanged?) {
                if used {
                    let count = listed[of.parameter].elements();
                    means.insert(of.parameter, self.read(of.pointer, count));
                }
            }
        }
        Ok(means)
    }

    fn save(&mut self) -> Saved {
        for parameter in 0..parameters().len() {
            let own = self.exchange.remembered(parameter, &self.stream).unwrap();
            let Remembered { residual, mean, common, scale } = own;
            self.host.remember(parameter, OnHost { residual, mean, common, scale });
        }
        let (mut saved, group) = (Saved::new(), self.host.group().unwrap().clone());
        let save = &mut |name: String, _: usize, values: &[f32]| {
            saved.insert(name, values.to_vec());
        };
        self.host.save(&group, save).unwrap();
        saved
    }

    fn restore(&mut self, saved: &Saved) {
        let group = self.host.group().unwrap().clone();
        self.host.restore(&group, &|name| saved.get(name).cloned()).unwrap();
        for parameter in 0..parameters().len() {
            let OnHost { residual, mean, common, scale } = self.host.remembered(parameter);
            let own = Remembered { residual, mean, common, scale };
            self.exchange.remember(parameter, &own, &self.stream).unwrap();
        }
    }
}

/// The groups of a world of threads over the driver whose device is the host.
fn groups(world: usize) -> Vec<Group> {
    static COMPILED: Once = Once::new();
    COMPILED.call_once(|| families::compile_into(fake::library().parent().unwrap()));
    let (hub, epoch) =
        (unisono_collective::fabric::LocalHub::new(world), unisono_collective::Epoch::new(0));
    // Both kinds of schedules.
    let costs = if world == 3 { fake::TWO_ROUNDS } else { fake::ONE_ROUND };
    let make = fake::fake_engine(fake::window(1 << 14, costs));
    std::thread::scope(|scope| {
        let form = |rank| {
            let (hub, epoch, make) = (hub.clone(), epoch.clone(), make.clone());
            scope.spawn(move || {
                Group::with_engine(hub, epoch, rank, world, Options::default(), make).unwrap()
            })
        };
        let ranks: Vec<_> = (0..world).map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn on_ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let (groups, body) = (groups(world), &body);
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || body(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn on_devices(world: usize, case: Case) -> Vec<Outcome> {
    on_ranks(world, |group| {
        let mut worker = Worker::new(group, case).unwrap();
        let means = (0..case.steps()).map(|step| worker.step(step).unwrap()).collect();
        Outcome { means, saved: worker.save() }
    })
}

fn assert_same(here: &Outcome, there: &Outcome, what: &str) {
    for (step, (here, there)) in here.means.iter().zip(&there.means).enumerate() {
        assert_eq!(here.keys().collect::<Vec<_>>(), there.keys().collect::<Vec<_>>(), "{what}");
        for (parameter, mean) in here {
            assert_bits(mean, &there[parameter], &format!("{what}, step {step}, p{parameter}"));
        }
    }
    assert_eq!(here.means.len(), there.means.len(), "{what}");
    let names = |of: &Outcome| of.saved.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(here), names(there), "{what}");
    for (name, values) in &here.saved {
        assert_bits(values, &there.saved[name], &format!("{what}, {name}"));
    }
}

fn assert_bits(here: &[f32], there: &[f32], what: &str) {
    assert_eq!(here.len(), there.len(), "{what}");
    for (i, (here, there)) in here.iter().zip(there).enumerate() {
        assert_eq!(here.to_bits(), there.to_bits(), "{what}, element {i}: {here} and {there}");
    }
}

fn compare(world: usize, case: Case) {
    let (host, devices) = (on_host(world, case), on_devices(world, case));
    for (rank, (host, device)) in host.iter().zip(&devices).enumerate() {
        assert_same(host, device, &format!("{} rank {rank} of {world}", case.codec));
    }
    let has_state = !["none", "fp16", "bf16"].contains(&case.codec);
    assert_eq!(devices[0].saved.is_empty(), !has_state, "{}", case.codec);
}

#[test]
fn means_have_the_bits_of_the_host_alone() {
    CODECS.iter().for_each(|codec| compare(1, Case::of(codec)));
}

#[test]
fn means_have_the_bits_of_the_host_on_two_ranks() {
    CODECS.iter().for_each(|codec| compare(2, Case::of(codec)));
}

#[test]
fn means_have_the_bits_of_the_host_on_three_ranks() {
    CODECS.iter().for_each(|codec| compare(3, Case::of(codec)));
}

#[test]
fn means_have_the_bits_of_the_host_on_four_ranks() {
    CODECS.iter().for_each(|codec| compare(4, Case::of(codec)));
}

#[test]
fn settings_mean_the_same_as_on_the_host() {
    for codec in ["int8", "int8:stochastic", "topk:5%", "randk:10%", "powersgd:2"] {
        let case = Case::of(codec);
        compare(3, Case { warm_up: 3, rule: Some("p0=sign"), ..case });
    }
}

#[test]
fn nothing_is_owed_without_error_feedback() {
    for codec in ["int4", "sign", "topk:5%", "randk:10%", "powersgd:2"] {
        let case = Case { error_feedback: false, ..Case::of(codec) };
        let (host, devices) = (on_host(3, case), on_devices(3, case));
        for (host, device) in host.iter().zip(&devices) {
            assert_same(host, device, codec);
            assert!(device.saved.keys().all(|name| !name.contains("residual")), "{codec}");
        }
    }
}

#[test]
fn a_run_goes_on_from_what_was_saved() {
    for codec in ["int8", "topk:5%", "randk:10%", "powersgd:2"] {
        let case = Case { warm_up: 2, ..Case::of(codec) };
        let whole = on_devices(3, case);
        let half = on_ranks(3, |group| {
            let mut worker = Worker::new(group, case).unwrap();
            (0..4).for_each(|step| drop(worker.step(step).unwrap()));
            worker.save()
        });
        let rest = on_ranks(3, |group| {
            let mut worker = Worker::new(group, case).unwrap();
            worker.restore(&half[0]);
            let means = (4..case.steps()).map(|step| worker.step(step).unwrap()).collect();
            Outcome { means, saved: worker.save() }
        });
        for (whole, rest) in whole.iter().zip(&rest) {
            let means = whole.means[4..].to_vec();
            assert_same(&Outcome { means, saved: whole.saved.clone() }, rest, codec);
        }
    }
}

#[test]
fn codecs_without_kernels_are_refused() {
    on_ranks(1, |group| {
        let refused = Worker::new(group, Case::of("dgc:1%")).map(|_| ());
        let error = refused.unwrap_err();
        assert!(matches!(error, ExchangeError::Codec(CodecError::NotOnDevice { .. })), "{error:?}");
    });
}

#[test]
fn a_rank_that_leaves_is_named() {
    let errors = on_ranks(3, |group| {
        let rank = group.rank();
        let mut worker = Worker::new(group, Case::of("int8")).unwrap();
        worker.step(0).unwrap();
        if rank == 1 {
            return None;
        }
        Some((1..18).find_map(|step| worker.step(step).err()).expect("rank 1 is gone"))
    });
    for error in errors.into_iter().flatten() {
        let ExchangeError::Group(error) = error else { panic!("{error:?}") };
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
