//! The kernels' own source, compiled for the host: order, rounding and edges need no device.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::Library;
use unisono_collective::Dtype;
use unisono_cuda::DevicePtr;
use unisono_cuda::fold::{Alignment, Arity, FoldPlan, FoldShape};

use crate::common::{Arena, Case, Machine, Outputs, check_patterns, check_type};

/// The kernels of a type, as functions of the host.
struct Host {
    library: Library,
}

/// `Call` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    output: u64,
    also: u64,
    count: u64,
    head: u64,
    divisor: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Few<const N: usize>([u64; N]);

#[derive(Clone, Copy)]
#[repr(C)]
struct Any {
    table: *const u64,
    count: u64,
    listed: [u64; 480],
}

impl Host {
    /// `None` where there is no compiler.
    fn compile(dtype: Dtype) -> Option<Host> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/without_device/kernels.cpp");
        let folder = tempfile::tempdir().unwrap();
        let library: PathBuf = folder.path().join("kernels.so");
        let mut format = dtype.name().to_owned();
        format[..1].make_ascii_uppercase();
        let mut compiler = Command::new("c++");
        compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]);
        compiler.arg(format!("-DNAME={dtype}")).arg(format!("-DFORMAT={format}"));
        compiler.arg(format!("-DFLOATS={}", u8::from(dtype.is_float())));
        compiler.arg(source).arg("-o").arg(&library);
        let Ok(status) = compiler.status() else {
            println!("SKIPPED: no C++ compiler here");
            return None;
        };
        assert!(status.success(), "the kernels of {dtype} do not compile for the host");
        // SAFETY: a library without initialisers.
        Some(Host { library: unsafe { Library::new(&library) }.unwrap() })
    }

    /// Calls a kernel for every thread of its grid.
    ///
    /// # Safety
    /// The kernel takes such inputs.
    unsafe fn launch<Inputs: Copy>(&self, plan: &FoldPlan, call: Call, inputs: Inputs) {
        let name = plan.kernel.to_string();
        // SAFETY: the functions have these types; the rest is the caller's promise.
        unsafe {
            let stand_at =
                self.library.get::<unsafe extern "C" fn(u32, u32, u32)>("stand_at").unwrap();
            let kernel =
                self.library.get::<unsafe extern "C" fn(Call, Inputs)>(name.as_str()).unwrap();
            for block in 0..plan.grid {
                for thread in 0..plan.block {
                    stand_at(block, thread, plan.grid);
                    kernel(call, inputs);
                }
            }
        }
    }
}

impl Machine for Host {
    fn fold(&mut self, case: &Case, arena: &mut Arena, inputs: &[usize], outputs: Outputs) {
        let base = arena.bytes_mut().as_mut_ptr().cast::<c_void>() as u64;
        let inputs: Vec<u64> = inputs.iter().map(|&at| base + at as u64).collect();
        let output = base + outputs.into as u64;
        let also = outputs.also.map(|at| base + at as u64);
        let addresses = inputs.iter().copied().chain([output]).chain(also);
        let alignment = Alignment::of(addresses.map(DevicePtr));
        let Case { dtype, reduction, divisor, count, .. } = *case;
        let shape =
            FoldShape::new(dtype, reduction, divisor, inputs.len(), alignment, count).unwrap();
        // Few blocks, so that each of them has work for several rounds.
        let plan = FoldPlan::with_blocks(&shape, 3);
        let divisor = divisor.filter(|&divisor| divisor > 1).map_or(0, u64::from);
        let (also, count, head) = (also.unwrap_or(0), count as u64, plan.head as u64);
        let call = Call { output, also, count, head, divisor };
        macro_rules! few {
            ($($n:literal)*) => {
                match plan.kernel.arity() {
                    // SAFETY: the kernel is for so many inputs.
                    $(Arity::Few($n) => unsafe {
                        self.launch(&plan, call, Few::<$n>(inputs[..].try_into().unwrap()));
                    },)*
                    Arity::Few(n) => panic!("no kernel for {n} inputs"),
                    // SAFETY: the kernel is for any number of inputs.
                    Arity::Any => unsafe { self.launch(&plan, call, Any::of(&inputs)) },
                }
            };
        }
        few!(1 2 3 4 5 6 7 8 16);
    }
}

impl Any {
    /// In a table, as a launch has it, if there are too many to list.
    fn of(inputs: &[u64]) -> Any {
        let mut any = Any { table: std::ptr::null(), count: inputs.len() as u64, listed: [0; 480] };
        match any.listed.get_mut(..inputs.len()) {
            Some(listed) => listed.copy_from_slice(inputs),
            None => any.table = inputs.as_ptr(),
        }
        any
    }
}

fn check_on_host(dtype: Dtype) {
    let Some(mut host) = Host::compile(dtype) else { return };
    check_type(&mut host, dtype, (1..=17).chain([31, 32, 33, 100]), &[0, 1, 7, 333]);
    check_type(&mut host, dtype, [2, 4, 9], &[8195]);
    check_type(&mut host, dtype, [480, 481, 1100], &[37]);
    if matches!(dtype, Dtype::F16 | Dtype::Bf16) {
        check_patterns(&mut host, dtype);
    }
}

macro_rules! types {
    ($($name:ident: $dtype:ident;)*) => {$(
        #[test]
        fn $name() {
            check_on_host(Dtype::$dtype);
        }
    )*};
}
types! {
    f32_on_the_host: F32;
    f64_on_the_host: F64;
    f16_on_the_host: F16;
    bf16_on_the_host: Bf16;
    i8_on_the_host: I8;
    u8_on_the_host: U8;
    i32_on_the_host: I32;
    i64_on_the_host: I64;
}
