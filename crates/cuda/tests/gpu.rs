//! The kernels on a device, against the host, bit by bit.
//!
//! Without a device these tests say `SKIPPED: no CUDA device` and pass; with `UNISONO_GPU=require` they
//! fail.

use unisono_collective::{Dtype, Reduction};
use unisono_cuda::fold::FoldError;
use unisono_cuda::{
    Capability, Capture, Context, DeviceMemory, DevicePtr, Driver, Event, EventKind, Folds,
    HostMemory, MemoryKind, Module, Pointer, RegisteredMemory, Stream,
};

#[path = "common/codecs.rs"]
mod codecs;
mod common;
use codecs::{Bench, Kind, lengths, with_spans};
use common::{Arena, Case, Layout, Machine, Outputs, check, check_patterns, check_type};

/// A device, and an arena of its own.
struct Gpu {
    folds: Folds,
    stream: Stream,
    memory: DeviceMemory,
}

fn context() -> Option<Context> {
    let made = Driver::load().and_then(|driver| Context::new(&driver.device(0)?));
    match made {
        Ok(context) => Some(context),
        Err(error) if std::env::var_os("UNISONO_GPU").is_some_and(|it| it == "require") => {
            panic!("{error}")
        }
        Err(error) => {
            println!("SKIPPED: no CUDA device ({error})");
            None
        }
    }
}

impl Gpu {
    fn new(context: &Context, capability: Option<Capability>) -> Gpu {
        let folds = match capability {
            Some(capability) => Folds::with_code_for(context, capability),
            None => Folds::load(context),
        };
        Gpu {
            folds: folds.unwrap(),
            stream: Stream::new(context, 0).unwrap(),
            memory: DeviceMemory::new(context, 0).unwrap(),
        }
    }
}

impl Machine for Gpu {
    fn fold(&mut self, case: &Case, arena: &mut Arena, inputs: &[usize], outputs: Outputs) {
        let bytes = arena.bytes().len();
        if self.memory.bytes() < bytes {
            self.memory = DeviceMemory::new(self.stream.context(), 2 * bytes).unwrap();
        }
        let base = self.memory.pointer();
        let inputs: Vec<DevicePtr> = inputs.iter().map(|&at| base.offset(at)).collect();
        let Case { dtype, reduction, divisor, count, .. } = *case;
        let (stream, output) = (&self.stream, base.offset(outputs.into));
        let also = outputs.also.map(|at| base.offset(at));
        // SAFETY: arena and device memory have room for the copies and every buffer of the case, and
        // the last call waits for all others.
        unsafe {
            stream.copy_to_device(base, arena.bytes().as_ptr(), bytes).unwrap();
            let folded =
                self.folds.fold(stream, dtype, reduction, divisor, &inputs, output, also, count);
            folded.unwrap();
            stream.copy_to_host(arena.bytes_mut().as_mut_ptr(), base, bytes).unwrap();
        }
        stream.synchronize().unwrap();
    }
}

fn check_on_device(dtype: Dtype) {
    let Some(context) = context() else { return };
    let mut gpu = Gpu::new(&context, None);
    check_type(&mut gpu, dtype, (1..=17).chain([31, 32, 33, 100]), &[0, 1, 7, 333, 4099]);
    check_type(&mut gpu, dtype, [480, 481, 1100], &[37]);
    // More blocks than a large device runs at once.
    for (inputs, count) in [(2, 40_000_003), (9, 10_000_003)] {
        for (reduction, divisor) in [(Reduction::Sum, None), (Reduction::Mean, Some(7))] {
            let (layout, in_place) = (Layout::Shifted, None);
            check(&mut gpu, &Case { dtype, reduction, divisor, inputs, count, layout, in_place });
        }
    }
    if matches!(dtype, Dtype::F16 | Dtype::Bf16) {
        check_patterns(&mut gpu, dtype);
    }
}

macro_rules! types {
    ($($name:ident: $dtype:ident;)*) => {$(
        #[test]
        fn $name() {
            check_on_device(Dtype::$dtype);
        }
    )*};
}
types! {
    f32_on_the_device: F32;
    f64_on_the_device: F64;
    f16_on_the_device: F16;
    bf16_on_the_device: Bf16;
    i8_on_the_device: I8;
    u8_on_the_device: U8;
    i32_on_the_device: I32;
    i64_on_the_device: I64;
}

#[test]
fn bf16_by_the_code_for_older_devices() {
    let Some(context) = context() else { return };
    let mut gpu = Gpu::new(&context, Some(Capability { major: 7, minor: 5 }));
    check_type(&mut gpu, Dtype::Bf16, [1, 2, 7, 8, 9, 16, 33], &[1, 333]);
    check_patterns(&mut gpu, Dtype::Bf16);
}

/// Gradients whose encodings are specified to the last bit.
const NUMBERS: [Kind; 4] = [Kind::Normal, Kind::Ties, Kind::Edges, Kind::Zeros];

fn check_codecs(texts: &[&str], kinds: &[Kind], large: usize) {
    let Some(context) = context() else { return };
    for shift in [0, 4] {
        let bench = Bench::new(&context, shift);
        for text in texts {
            let spec = text.parse().unwrap();
            for length in lengths(usize::MAX).chain([large]) {
                kinds.iter().for_each(|kind| bench.check(&spec, &[length], *kind));
            }
            with_spans(&spec, |spans| {
                kinds.iter().for_each(|kind| bench.check_spans(&spec, spans, *kind));
            });
        }
    }
}

#[test]
fn casts_on_the_device() {
    check_codecs(&["fp16", "bf16"], &Kind::ALL, 3_000_001);
}

#[test]
fn quantizers_on_the_device() {
    let texts =
        ["int8", "int8:stochastic", "int4", "int4:stochastic", "qsgd:2", "qsgd:5", "qsgd:8"];
    check_codecs(&texts, &Kind::ALL, 3_000_001);
}

#[test]
fn sign_on_the_device() {
    check_codecs(&["sign"], &NUMBERS, 3_000_001);
}

#[test]
fn topk_on_the_device() {
    let texts = ["topk:1%", "topk:4%,exact", "topk:0.1%", "topk:10%+int8", "topk:50%,exact+int4"];
    check_codecs(&texts, &NUMBERS, 3_000_001);
    check_codecs(&["topk:5%+fp16", "topk:5%+bf16"], &NUMBERS, 300_001);
    let Some(context) = context() else { return };
    Bench::new(&context, 4).check_many_groups();
}

#[test]
fn randk_on_the_device() {
    check_codecs(&["randk:10%", "randk:1%+fp16", "randk:50%+bf16"], &NUMBERS, 3_000_001);
}

#[test]
fn powersgd_on_the_device() {
    let Some(context) = context() else { return };
    let shapes: [&[usize]; 9] = [
        &[0, 3],
        &[1, 1],
        &[7, 300],
        &[33, 3, 5],
        &[130, 64],
        &[6, 2500],
        &[257, 40],
        &[1003, 1500],
        &[3, 100_001],
    ];
    for shift in [0, 4] {
        let bench = Bench::new(&context, shift);
        for text in ["powersgd:1", "powersgd:4", "powersgd:3+fp16", "powersgd:32+bf16"] {
            for shape in shapes {
                for kind in [Kind::Normal, Kind::Ties, Kind::Zeros] {
                    bench.check(&text.parse().unwrap(), shape, kind);
                }
            }
        }
    }
}

#[test]
fn damaged_encodings_on_the_device() {
    let Some(context) = context() else { return };
    let bench = Bench::new(&context, 0);
    for text in ["int8", "int4", "qsgd:4", "sign"] {
        for (places, byte) in [(&[1][..], 0x7f), (&[3], 0xff), (&[520, 521, 522, 523], 0xff)] {
            bench.check_damage(&text.parse().unwrap(), 5000, places, byte);
        }
    }
    for text in ["topk:1%", "topk:10%+int8"] {
        bench.check_sparse_damage(&text.parse().unwrap(), 20_000);
    }
}

#[test]
fn addresses_that_no_element_has_are_refused() {
    let Some(context) = context() else { return };
    let gpu = Gpu::new(&context, None);
    let inputs = [DevicePtr(256), DevicePtr(258)];
    let (dtype, reduction) = (Dtype::F32, Reduction::Sum);
    // SAFETY: refused before anything is submitted.
    let refused = unsafe {
        gpu.folds.fold(&gpu.stream, dtype, reduction, None, &inputs, DevicePtr(256), None, 1)
    };
    assert_eq!(refused, Err(FoldError::Misaligned { dtype, address: 258 }));
}

#[test]
fn memory_says_what_it_is() {
    let Some(context) = context() else { return };
    let number = context.device().number();
    let device = DeviceMemory::new(&context, 1 << 20).unwrap();
    let inside = device.pointer().offset(1000);
    let known = Pointer::of(&context, inside).unwrap().unwrap();
    assert_eq!((known.kind, known.device), (MemoryKind::Device, number));
    assert_eq!((known.base, known.bytes), (device.pointer(), 1 << 20));
    assert!(known.shareable);
    device.handle().unwrap();

    let pinned = HostMemory::new(&context, 4096).unwrap();
    let known = Pointer::of(&context, DevicePtr(pinned.as_ptr() as u64)).unwrap().unwrap();
    assert_eq!(known.kind, MemoryKind::Host);
    pinned.device_pointer().unwrap();

    let mut ordinary = vec![0_u8; 1 << 16];
    let address = DevicePtr(ordinary.as_ptr() as u64);
    assert_eq!(Pointer::of(&context, address), Ok(None));
    // SAFETY: the vector outlives the registration.
    let registered =
        unsafe { RegisteredMemory::new(&context, ordinary.as_mut_ptr(), ordinary.len()).unwrap() };
    registered.device_pointer().unwrap();
    drop(registered);
    let (free, total) = context.memory_info().unwrap();
    assert!(free <= total && total <= context.device().total_memory().unwrap());
}

#[test]
fn streams_and_events_keep_their_order() {
    let Some(context) = context() else { return };
    let (least, greatest) = context.priorities().unwrap();
    assert!(greatest <= least);
    let first = Stream::new(&context, least).unwrap();
    let second = Stream::new(&context, greatest).unwrap();
    assert_eq!(first.capture(), Ok(Capture::None));
    let (start, done) = (
        Event::new(&context, EventKind::Timing).unwrap(),
        Event::new(&context, EventKind::Timing).unwrap(),
    );
    const BYTES: usize = 256 << 20;
    let memory = DeviceMemory::new(&context, BYTES).unwrap();
    let mut last = 0_u8;
    // SAFETY: the memory has as many bytes, and the second stream waits for the first.
    unsafe {
        first.record(&start).unwrap();
        for byte in 0..=20 {
            first.fill(memory.pointer(), byte, BYTES).unwrap();
        }
        first.record(&done).unwrap();
        second.wait(&done).unwrap();
        second.copy_to_host(&mut last, memory.pointer().offset(BYTES - 1), 1).unwrap();
    }
    second.synchronize().unwrap();
    assert_eq!(last, 20);
    assert!(done.query().unwrap() && first.query().unwrap());
    assert!(done.seconds_since(&start).unwrap() > 0.0);
    Event::new(&context, EventKind::Interprocess).unwrap().handle().unwrap();
}

#[test]
fn the_driver_says_why_code_does_not_compile() {
    let Some(context) = context() else { return };
    let error = Module::load(&context, "nonsense", "this is no PTX").unwrap_err().to_string();
    assert!(error.contains("nonsense") && error.contains('\n'), "{error}");
}

#[test]
fn the_device_is_described() {
    let Some(context) = context() else { return };
    let device = context.device();
    let (name, uuid, bus) = (device.name(), device.uuid(), device.bus_id());
    println!("{} {} {}", name.unwrap(), uuid.unwrap(), bus.unwrap());
    println!("compute capability {}", device.capability().unwrap());
    assert!(device.multiprocessors().unwrap() > 0);
    assert!(device.driver().version().unwrap() >= 12000);
}
