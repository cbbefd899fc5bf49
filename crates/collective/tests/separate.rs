//! Blocks that lie apart give what blocks in a row give.

mod common;

use common::{Kind, on_all};
use unisono_collective::{
    Address, Algorithm, Dtype, Error, Group, InvalidCall, Op, Options, Request,
};

const OPS: [Op; 5] = [
    Op::AllGather,
    Op::Gather { root: 1 },
    Op::Scatter { root: 2 },
    Op::ReduceScatter,
    Op::AllToAll,
];
const EACH: usize = 1000;
/// Elements between the blocks of a buffer, which no call may touch.
const GAP: usize = 3;
const UNTOUCHED: i32 = -7;

#[test]
fn blocks_may_lie_apart_in_any_order() {
    let mut ran = 0;
    for kind in Kind::ALL {
        let groups = kind.start(3, &Options::default());
        for algorithm in std::iter::once(None).chain(Algorithm::ALL.map(Some)) {
            for op in OPS {
                let done = on_all(&groups, |group| exchange(group, op, algorithm));
                assert!(done.iter().all(|&d| d == done[0]), "all ranks can do it or none");
                ran += usize::from(done[0]);
            }
        }
    }
    assert!(ran >= Kind::ALL.len() * OPS.len(), "at least by the algorithm that is chosen");
}

/// Runs an operation on blocks that lie apart wherever it has several; whether the algorithm can.
fn exchange(group: &Group, op: Op, algorithm: Option<Algorithm>) -> bool {
    let (me, world) = (group.rank(), group.size());
    let value = |from: usize, block: usize| (10 * from + block) as i32;
    // The last block comes first, and nothing is at the end of the gaps.
    let starts: Vec<usize> = (0..world).rev().map(|place| place * (EACH + GAP)).collect();
    let spread = |values: &dyn Fn(usize) -> i32| {
        let mut buffer = vec![UNTOUCHED; world * (EACH + GAP)];
        for (block, &start) in starts.iter().enumerate() {
            buffer[start..start + EACH].fill(values(block));
        }
        buffer
    };
    let one = vec![value(me, 0); EACH];
    let many = spread(&|block| value(me, block));
    let (input, mut output) = match op {
        Op::AllGather | Op::Gather { .. } => (one, spread(&|_| 0)),
        Op::AllToAll => (many, spread(&|_| 0)),
        _ => (many, vec![0; EACH]),
    };
    let located = |buffer: *mut i32, length: usize| match length > EACH {
        true => Address::Apart(starts.iter().map(|&s| buffer.wrapping_add(s).cast()).collect()),
        false => buffer.into(),
    };
    let from = located(input.as_ptr().cast_mut(), input.len());
    let into = located(output.as_mut_ptr(), output.len());
    // SAFETY: both buffers are as long as the blocks need, and live until the call has ended.
    let request = unsafe { Request::raw(op, Dtype::I32, EACH, from, into) }.unwrap();
    match group.run(request.with_algorithm(algorithm)) {
        Err(Error::InvalidCall(InvalidCall::UnsupportedAlgorithm { .. })) => return false,
        outcome => outcome.unwrap(),
    };
    let expected = match op {
        Op::AllGather => spread(&|from| value(from, 0)),
        Op::Gather { root } if me == root => spread(&|from| value(from, 0)),
        Op::AllToAll => spread(&|from| value(from, me)),
        Op::Scatter { root } => vec![value(root, me); EACH],
        Op::ReduceScatter => vec![(0..world).map(|from| value(from, me)).sum(); EACH],
        _ => spread(&|_| 0),
    };
    assert!(output == expected, "{op:?} by {algorithm:?} on rank {me}");
    true
}

#[test]
fn there_is_one_block_per_rank() {
    let groups = Kind::Local.start(2, &Options::default());
    on_all(&groups, |group| {
        let mut buffer = [0u8; 8];
        let start = buffer.as_mut_ptr();
        let apart = |starts: &[usize]| {
            Address::Apart(starts.iter().map(|&at| start.wrapping_add(at)).collect())
        };
        // SAFETY: the buffer outlives the call, which is refused.
        let request = unsafe { Request::raw(Op::AllToAll, Dtype::U8, 2, apart(&[0, 2, 4]), start) };
        let outcome = group.run(request.unwrap());
        assert!(matches!(outcome, Err(Error::InvalidCall(InvalidCall::Length { .. }))));
        // SAFETY: as above.
        let uneven = unsafe { Request::raw(Op::AllToAll, Dtype::F32, 1, apart(&[0, 6]), start) };
        let refusal = InvalidCall::Distance { dtype: Dtype::F32 };
        assert_eq!(uneven.map(drop), Err(Error::InvalidCall(refusal)));
        group.barrier().unwrap();
    });
}
