//! Drivers that are missing, wrong, without a device, or failing. The failing one is a fake.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use libloading::Library;
use tempfile::TempDir;
use unisono_collective::{Dtype, Reduction};
use unisono_cuda::{
    Context, CudaError, DRIVER_VARIABLE, DeviceMemory, DevicePtr, Driver, Event, EventKind, Folds,
    HostMemory, Module, Pointer, Stream,
};

/// A driver of our own, and a look inside it.
struct Fake {
    folder: TempDir,
    library: Library,
}

impl Fake {
    fn build(init: i32, devices: u32) -> Fake {
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/without_device/fake_driver.c");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-w"]).arg(source).arg("-o").arg(&path);
        compiler.arg(format!("-DINIT={init}")).arg(format!("-DDEVICES={devices}"));
        assert!(compiler.status().expect("cc, which Rust links with").success());
        // SAFETY: a library without initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        Fake { folder, library }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("libcuda.so")
    }

    fn load(&self) -> Result<Driver, CudaError> {
        Driver::load_from(self.path().as_os_str())
    }

    fn context(&self) -> Context {
        Context::new(&self.load().unwrap().device(0).unwrap()).unwrap()
    }

    fn number(&self, name: &str) -> i32 {
        // SAFETY: an integer of the library, which nothing else touches meanwhile.
        unsafe { *self.place(name) }
    }

    fn place(&self, name: &str) -> *mut i32 {
        // SAFETY: an integer of the library.
        unsafe { *self.library.get::<*mut i32>(name).unwrap() }
    }

    fn fail_with(&self, status: i32) {
        // SAFETY: as above.
        unsafe { *self.place("fake_status") = status };
    }
}

#[test]
fn a_library_that_is_missing() {
    let error = Driver::load_from(OsStr::new("/nowhere/libcuda.so.1")).unwrap_err();
    let CudaError::Library { library, reason } = &error else { panic!("{error}") };
    assert_eq!(library, "/nowhere/libcuda.so.1");
    assert!(reason.contains("No such file"), "{reason}");
    assert!(error.to_string().contains("UNISONO_CUDA_DRIVER"));
}

#[test]
fn a_file_that_is_no_library() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "no library").unwrap();
    let error = Driver::load_from(file.path().as_os_str()).unwrap_err();
    assert!(matches!(error, CudaError::Library { .. }), "{error}");
}

#[test]
fn a_library_that_is_no_driver() {
    let error = Driver::load_from(OsStr::new("libm.so.6")).unwrap_err();
    let CudaError::Symbol { library, symbol, .. } = &error else { panic!("{error}") };
    assert_eq!((library.as_str(), *symbol), ("libm.so.6", "cuInit"));
}

#[test]
fn a_driver_without_a_device() {
    for fake in [Fake::build(100, 0), Fake::build(0, 0)] {
        let error = fake.load().unwrap_err();
        let CudaError::NoDevice { library } = &error else { panic!("{error}") };
        assert_eq!(library, &fake.path().to_string_lossy());
    }
}

#[test]
fn a_driver_that_a_parent_initialised() {
    let error = Fake::build(3, 1).load().unwrap_err();
    let process = std::process::id();
    assert_eq!(error, CudaError::Forked { initialised_in: None, process });
}

#[test]
fn a_device_that_is_not_there() {
    let error = Fake::build(0, 2).load().unwrap().device(2).unwrap_err();
    assert_eq!(error, CudaError::NoSuchDevice { device: 2, devices: 2 });
}

#[test]
fn a_call_that_fails_says_which_and_why() {
    let fake = Fake::build(0, 1);
    let context = fake.context();
    let error = DeviceMemory::new(&context, 1 << 41).unwrap_err();
    let expected = CudaError::Call {
        call: "cuMemAlloc",
        code: 2,
        name: "CUDA_ERROR_OUT_OF_MEMORY",
        meaning: "out of memory",
    };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
    fake.fail_with(12345);
    let error = context.synchronize().unwrap_err();
    assert!(error.to_string().contains("12345"), "{error}");
}

#[test]
fn code_that_does_not_compile_says_where() {
    let context = Fake::build(0, 1).context();
    let error = Module::load(&context, "mine", "!").unwrap_err();
    let expected = "the CUDA driver cannot load the kernels mine: CUDA_ERROR_INVALID_PTX (218)\
                    \n  ptxas: line 1: no\n  ptxas: fatal";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn what_is_made_is_ended() {
    let fake = Fake::build(0, 1);
    let context = fake.context();
    let stream = Stream::new(&context, 0).unwrap();
    let event = Event::new(&context, EventKind::Ordering).unwrap();
    let memory = (DeviceMemory::new(&context, 1).unwrap(), HostMemory::new(&context, 1).unwrap());
    let module = Module::load(&context, "mine", "").unwrap();
    let kernel = module.kernel("one").unwrap();
    // SAFETY: not used.
    let borrowed = unsafe { Stream::borrowed(&context, stream.as_raw()) };
    assert_eq!(fake.number("fake_objects"), 6);
    drop((module, borrowed));
    assert_eq!(fake.number("fake_objects"), 6, "a kernel needs its module");
    drop((kernel, memory, event));
    assert_eq!(fake.number("fake_objects"), 2);
    drop(context);
    assert_eq!(fake.number("fake_objects"), 2, "a stream needs its context");
    drop(stream);
    assert_eq!(fake.number("fake_objects"), 0);
}

#[test]
fn what_is_dropped_after_the_driver_has_ended_does_not_panic() {
    let fake = Fake::build(0, 1);
    let context = fake.context();
    let stream = Stream::new(&context, 0).unwrap();
    let event = Event::new(&context, EventKind::Timing).unwrap();
    let memory = (DeviceMemory::new(&context, 1).unwrap(), HostMemory::new(&context, 1).unwrap());
    fake.fail_with(4);
    drop((memory, event, stream, context));
}

#[test]
fn what_is_not_ready_or_not_known_is_no_error() {
    let context = Fake::build(0, 1).context();
    assert_eq!(Stream::new(&context, 0).unwrap().query(), Ok(false));
    assert_eq!(Pointer::of(&context, DevicePtr(8)), Ok(None));
}

#[test]
fn a_forked_child_is_told_so_and_calls_nothing() {
    let fake = Fake::build(0, 1);
    let (driver, context) = (fake.load().unwrap(), fake.context());
    let memory = DeviceMemory::new(&context, 1).unwrap();
    let (parent, calls, now) =
        (std::process::id(), fake.number("fake_calls"), fake.place("fake_calls"));
    // SAFETY: what the child does needs no lock that another thread could hold, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let told = |result: Result<(), CudaError>| {
            matches!(result, Err(CudaError::Forked { initialised_in: Some(of), process })
                if of == parent && process == std::process::id())
        };
        let all_told = told(driver.device(0).map(drop)) && told(context.synchronize());
        drop((memory, context, driver));
        // SAFETY: the library is still there; then the child ends.
        unsafe { libc::_exit(if all_told && *now == calls { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child from above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "what the child saw");
    assert_eq!(driver.device(0).map(drop), Ok(()));
}

#[test]
fn more_inputs_than_a_launch_lists_go_through_a_table() {
    let fake = Fake::build(0, 1);
    let context = fake.context();
    let stream = Stream::new(&context, 0).unwrap();
    let folds = Folds::load(&context).unwrap();
    folds.prepare(Dtype::F32).unwrap();
    let fold = |inputs: usize, count: usize| {
        let inputs = vec![DevicePtr(16); inputs];
        let (dtype, reduction) = (Dtype::F32, Reduction::Sum);
        // SAFETY: there is no device that could touch memory.
        unsafe {
            folds
                .fold(&stream, dtype, reduction, None, &inputs, DevicePtr(16), None, count)
                .unwrap();
        }
    };
    let objects = fake.number("fake_objects");
    for (inputs, count, launches) in [(2, 0, 0), (2, 5, 1), (480, 5, 1), (481, 5, 3), (1000, 5, 4)]
    {
        let before = fake.number("fake_launches");
        fold(inputs, count);
        assert_eq!(fake.number("fake_launches") - before, launches, "{inputs} inputs");
        assert_eq!(fake.number("fake_objects"), objects, "a table is left over");
    }
}

#[test]
fn the_variable_names_the_library() {
    let fake = Fake::build(0, 0);
    for library in [fake.path().as_os_str(), OsStr::new("/nowhere/driver.so")] {
        let mut helper = Command::new(std::env::current_exe().unwrap());
        helper.args(["--exact", "driver::says_what_loading_says", "--ignored", "--nocapture"]);
        let output = helper.env(DRIVER_VARIABLE, library).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains(&*library.to_string_lossy()), "{said}");
    }
}

#[test]
#[ignore = "a helper of `the_variable_names_the_library`"]
fn says_what_loading_says() {
    println!("{:?}", Driver::load().map(drop));
}
