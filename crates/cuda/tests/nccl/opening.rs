//! Groups that do not form, and what is measured of those that do.

use std::path::PathBuf;

use unisono_collective::engine::Memory;
use unisono_collective::{Algorithm, Dtype, FormError, Op, Options, Rank, Reduction, Request};
use unisono_cuda::nccl::version;
use unisono_cuda::{
    CudaError, DeviceEngine, DeviceGroup, DeviceOptions, DevicePtr, Driver, NcclError, NcclOptions,
    engine, nccl_engine,
};

use crate::fake::{Kind, NCCL, fake_engine, form, library, nccl, on_all};

/// What each of three ranks is told, if each has the library and the device that are given.
fn refusals(libraries: [PathBuf; 3], devices: [u32; 3]) -> Vec<(Rank, String)> {
    let formed = form(&[0; 3], &Options::default(), |rank| {
        let (driver, device) = (library(), devices[rank]);
        let library = Some(libraries[rank].clone());
        let options = NcclOptions { library, scratch: 1024, costs: None };
        nccl_engine(move || Driver::load_from(driver.as_os_str())?.device(device), options)
    });
    let refused = |formed: Result<_, FormError>| match formed.err().expect("no group forms") {
        FormError::Device { rank, reason } => (rank, reason),
        error => panic!("{error}"),
    };
    formed.into_iter().map(refused).collect()
}

#[test]
fn a_rank_without_nccl_is_named_by_all() {
    let missing = PathBuf::from("/nowhere/libnccl.so.2");
    let libraries = [nccl(NCCL), missing.clone(), nccl(NCCL)];
    for (rank, reason) in refusals(libraries, [0; 3]) {
        assert_eq!(rank, Rank(1));
        assert!(
            reason.contains("/nowhere/libnccl.so.2 (") && reason.contains("UNISONO_NCCL"),
            "{reason}"
        );
    }
    let options = NcclOptions { library: Some(missing), ..NcclOptions::default() };
    let Err(NcclError::NotFound { looked }) = version(&options) else { panic!() };
    assert_eq!(looked.len(), 1);
}

#[test]
fn what_is_not_nccl_is_refused() {
    let options = NcclOptions { library: Some(library().into()), ..NcclOptions::default() };
    let Err(NcclError::NotFound { looked }) = version(&options) else { panic!() };
    assert!(looked[0].reason.contains("ncclGetVersion"), "{looked:?}");
}

#[test]
fn an_old_nccl_is_refused() {
    let old = nccl(Kind { version: 21_304, ..NCCL });
    for (rank, reason) in refusals([old.clone(), nccl(NCCL), nccl(NCCL)], [0; 3]) {
        assert_eq!(rank, Rank(0));
        assert!(reason.contains("is NCCL 2.13.4, and 2.14.0 or newer"), "{reason}");
    }
    let options = NcclOptions { library: Some(old), ..NcclOptions::default() };
    assert!(matches!(version(&options), Err(NcclError::TooOld { .. })));
}

#[test]
fn different_versions_are_refused() {
    let newer = nccl(Kind { version: 23_007, ..NCCL });
    for (rank, reason) in refusals([nccl(NCCL), nccl(NCCL), newer], [0; 3]) {
        assert_eq!(rank, Rank(2));
        assert_eq!(reason, "it has NCCL 2.30.7, and rank 0 has 2.28.9");
    }
}

#[test]
fn a_rank_without_its_device_is_named_by_all() {
    for (rank, reason) in refusals([NCCL; 3].map(nccl), [0, 7, 0]) {
        let cause = CudaError::NoSuchDevice { device: 7, devices: 1 }.to_string();
        assert_eq!((rank, reason), (Rank(1), cause));
    }
}

#[test]
fn ranks_that_share_a_device_are_told_what_to_do() {
    for (number, remedy) in [(22_809, "NCCL_HOSTID"), (23_007, "NCCL_MULTI_RANK_GPU_ENABLE=1")] {
        let refuses = nccl(Kind { version: number, refuses: true, ..NCCL });
        for (_, reason) in refusals([refuses.clone(), refuses.clone(), refuses], [0; 3]) {
            assert!(reason.contains(remedy) && reason.contains("ranks 0 and 1"), "{reason}");
            assert!(reason.contains("Duplicate GPU detected"), "{reason}");
        }
    }
}

#[test]
fn a_rank_that_is_alone_needs_no_nccl() {
    let driver = library();
    let library = Some(PathBuf::from("/nowhere/libnccl.so.2"));
    let engine = nccl_engine(
        move || Driver::load_from(driver.as_os_str())?.device(0),
        NcclOptions { library, ..NcclOptions::default() },
    );
    let group = form(&[0], &Options::default(), |_| engine.clone()).remove(0).unwrap();
    let mut buffer = [3f32; 5];
    let at = DevicePtr(buffer.as_mut_ptr() as u64);
    let group = DeviceGroup::new(group, 0);
    // SAFETY: the host's memory is the device's.
    unsafe { group.all_reduce(at, at, 5, Dtype::F32, Reduction::Mean, None) }.unwrap();
    assert_eq!(buffer, [3.0; 5]);
}

#[test]
fn costs_are_measured_and_explained() {
    let engine = fake_engine(1 << 20, None);
    let formed = form(&[0; 3], &Options::default(), |_| engine.clone());
    let groups: Vec<DeviceGroup> =
        formed.into_iter().map(|group| DeviceGroup::new(group.unwrap(), 0)).collect();
    let explained = on_all(&groups, |group| {
        let at = DevicePtr(4096);
        [1 << 4, 1 << 28].map(|count| {
            // SAFETY: nothing runs.
            let request = unsafe { group.request(Op::AllReduce, Dtype::F32, count, at, at, None) };
            group.group().explain(request.unwrap()).unwrap()
        })
    });
    for [small, large] in &explained {
        assert_eq!(small.chosen, Algorithm::Direct);
        assert_eq!(large.chosen, Algorithm::Pairwise);
        assert_eq!(large.candidates.len(), 2);
        assert!(large.candidates[0].seconds < large.candidates[1].seconds);
        // All ranks go by the same costs.
        assert_eq!(large.candidates[0].seconds, explained[0][1].candidates[0].seconds);
    }
}

/// Groups of ranks on two hosts that ask for this engine, with this NCCL.
fn on_two_hosts(
    engine_name: Option<DeviceEngine>,
    kind: Kind,
) -> Vec<Result<DeviceGroup, FormError>> {
    let formed = form(&[0, 0, 1], &Options::default(), |_| {
        let (driver, library) = (library(), Some(nccl(kind)));
        let nccl = NcclOptions { library, scratch: 1024, costs: None };
        let options = DeviceOptions { engine: engine_name, nccl, ..DeviceOptions::default() };
        engine(move || Driver::load_from(driver.as_os_str())?.device(0), options)
    });
    formed.into_iter().map(|group| group.map(|group| DeviceGroup::new(group, 0))).collect()
}

#[test]
fn nccl_is_one_of_the_engines() {
    let groups = on_two_hosts(Some(DeviceEngine::Nccl), NCCL).into_iter();
    let groups: Vec<DeviceGroup> = groups.map(Result::unwrap).collect();
    on_all(&groups, |group| assert_eq!(group.engine().unwrap(), "nccl"));
    for refused in on_two_hosts(Some(DeviceEngine::Nccl), Kind { refuses: true, ..NCCL }) {
        assert!(matches!(refused, Err(FormError::Device { .. })));
    }
}

#[test]
fn ranks_that_share_a_gpu_do_not_ask_nccl() {
    let groups = on_two_hosts(None, NCCL).into_iter();
    let groups: Vec<DeviceGroup> = groups.map(Result::unwrap).collect();
    on_all(&groups, |group| {
        let request = Request::sized(Op::AllToAll, Dtype::F32, 1);
        // SAFETY: a call that is only explained has no memory.
        let request = unsafe { request.in_memory(Memory::Device(0)) };
        let explained = group.group().explain(request).unwrap();
        assert_eq!(explained.engine, "hierarchical, flat by bounce");
    });
}
