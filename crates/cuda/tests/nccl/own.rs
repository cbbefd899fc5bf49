//! NCCL's own reductions, where canonical bits are switched off.

use unisono_collective::{Algorithm, Dtype, Op, Options, Reduction};
use unisono_cuda::{DeviceGroup, DevicePtr};

use crate::fake::{fake_engine, form, on_all};

fn groups(ranks: usize, canonical: bool) -> Vec<DeviceGroup> {
    let mut options = Options::default();
    options.canonical = canonical;
    let engine = fake_engine(4096, Some(Default::default()));
    let formed = form(&vec![0; ranks], &options, |_| engine.clone());
    formed.into_iter().map(|group| DeviceGroup::new(group.unwrap(), 0)).collect()
}

/// Addends whose sum depends on the order: the canonical one is 0.
const ADDENDS: [f32; 3] = [1e20, -1e20, 1.0];

/// The sum of the addends of three ranks, and the algorithm.
fn sum(group: &DeviceGroup, algorithm: Option<Algorithm>) -> (f32, Algorithm) {
    let mut buffer = [ADDENDS[group.group().rank()]; 100];
    let at = DevicePtr(buffer.as_mut_ptr() as u64);
    let request = || {
        // SAFETY: the host's memory is the device's.
        let request = unsafe { group.request(Op::AllReduce, Dtype::F32, 100, at, at, None) };
        request.unwrap().with_algorithm(algorithm)
    };
    let chosen = group.group().explain(request()).unwrap().chosen;
    group.group().run(request()).unwrap();
    assert!(buffer.iter().all(|sum| *sum == buffer[0]));
    (buffer[0], chosen)
}

#[test]
fn canonical_bits_are_the_default() {
    on_all(&groups(3, true), |group| {
        assert_eq!(sum(group, None).0, 1.0);
        // Forced by the caller, who thereby gives up the order.
        assert_eq!(sum(group, Some(Algorithm::Ring)), (0.0, Algorithm::Ring));
    });
}

#[test]
fn without_them_nccl_adds_up_floats_itself() {
    on_all(&groups(3, false), |group| {
        assert_eq!(sum(group, None), (0.0, Algorithm::Ring));
        assert_eq!(sum(group, Some(Algorithm::Pairwise)), (1.0, Algorithm::Pairwise));
        // What it has no reduction for is folded as ever.
        let mut bits = [1i32 << group.group().rank(); 10];
        let at = DevicePtr(bits.as_mut_ptr() as u64);
        // SAFETY: the host's memory is the device's.
        unsafe { group.all_reduce(at, at, 10, Dtype::I32, Reduction::Xor, None) }.unwrap();
        assert_eq!(bits, [7; 10]);
        let mut mean = [group.group().rank() as f32; 10];
        let at = DevicePtr(mean.as_mut_ptr() as u64);
        // SAFETY: the host's memory is the device's.
        unsafe { group.all_reduce(at, at, 10, Dtype::F32, Reduction::Mean, None) }.unwrap();
        assert_eq!(mean, [1.0; 10]);
    });
}
