//! How a fold is launched: which kernel, over how many blocks.
//!
//! Most elements are folded as *vectors* of 16 bytes, which is how a device reads memory quickest. A
//! vector starts at a multiple of 16 in every input and in the output. If all of them are off such a
//! multiple by the same bytes, the elements before the first one are *single*, and so are the last few
//! that fill no vector. If they are off by different bytes there is no vector, and every element is
//! single.
//!
//! A launch has as many blocks as there is work for: the device starts one as soon as another ends, which
//! keeps memory busier than blocks that go on with the work of others. Beyond what one launch can have, a
//! block does the work of several.

use std::fmt;

use unisono_collective::{Dtype, Reduction};

use super::FoldError;
use crate::library::DevicePtr;

/// Threads of a block, as the kernels have it.
pub const BLOCK: u32 = 256;

/// Blocks that one launch can have.
pub const MOST_BLOCKS: u32 = i32::MAX as u32;

/// The most inputs of one fold: the host's trees end there, and the stack of the kernel.
pub const MOST_INPUTS: usize = u16::MAX as usize;

/// Bytes of a vector.
const VECTOR: usize = 16;

/// A fold that is defined: what is to be computed, and how the memory of it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldShape {
    dtype: Dtype,
    reduction: Reduction,
    divisor: Option<u32>,
    inputs: usize,
    alignment: Alignment,
    count: usize,
}

impl FoldShape {
    /// Checks that the fold is defined. As for the host's [fold](unisono_collective::kernel::fold), a mean
    /// without a divisor is a sum.
    pub fn new(
        dtype: Dtype,
        reduction: Reduction,
        divisor: Option<u32>,
        inputs: usize,
        alignment: Alignment,
        count: usize,
    ) -> Result<FoldShape, FoldError> {
        if inputs == 0 || inputs > MOST_INPUTS {
            return Err(FoldError::Inputs { inputs, most: MOST_INPUTS });
        }
        if !reduction.supports(dtype) {
            return Err(FoldError::Undefined { dtype, reduction });
        }
        let sums = matches!(reduction, Reduction::Sum | Reduction::Mean);
        match divisor {
            Some(divisor) if divisor == 0 || !sums => {
                Err(FoldError::Divisor { reduction, divisor })
            }
            _ => Ok(FoldShape { dtype, reduction, divisor, inputs, alignment, count }),
        }
    }

    /// What the kernel divides by; 0 if it does not, as dividing by one changes no value.
    pub(super) fn kernel_divisor(&self) -> u32 {
        self.divisor.filter(|&n| n > 1).unwrap_or(0)
    }
}

/// How the inputs and the outputs of a fold lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    /// All have a multiple of 16 after this many bytes.
    Alike {
        /// Less than 16.
        bytes: u8,
    },
    /// They have not.
    Apart,
}

impl Alignment {
    /// How these addresses lie.
    pub fn of(addresses: impl IntoIterator<Item = DevicePtr>) -> Alignment {
        let mut off = addresses.into_iter().map(|DevicePtr(address)| address % VECTOR as u64);
        let first = off.next().unwrap_or(0);
        if off.all(|other| other == first) {
            let bytes = ((VECTOR as u64 - first) % VECTOR as u64) as u8;
            Alignment::Alike { bytes }
        } else {
            Alignment::Apart
        }
    }
}

/// How a fold is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldPlan {
    /// The kernel.
    pub kernel: FoldKernel,
    /// Blocks; none if there is nothing to do.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Single elements before the first vector.
    pub head: usize,
    /// Vectors of 16 bytes.
    pub vectors: usize,
}

impl FoldPlan {
    /// The plan: a block for every part of the work.
    pub fn of(shape: &FoldShape) -> FoldPlan {
        FoldPlan::with_blocks(shape, MOST_BLOCKS)
    }

    /// The plan with so many blocks, if there is work for them; for tests, and to find out what is best.
    pub fn with_blocks(shape: &FoldShape, blocks: u32) -> FoldPlan {
        let kernel = FoldKernel::of(shape.dtype, shape.reduction, shape.inputs);
        let size = shape.dtype.size();
        let head = match shape.alignment {
            Alignment::Alike { bytes } => shape.count.min(usize::from(bytes) / size),
            Alignment::Apart => shape.count,
        };
        let vectors = (shape.count - head) / (VECTOR / size);
        let singles = shape.count - vectors * (VECTOR / size);
        let tiles = vectors.div_ceil(kernel.depth() * BLOCK as usize);
        let most = tiles.max(singles.div_ceil(BLOCK as usize));
        let grid = u32::try_from(most).unwrap_or(u32::MAX).min(blocks.clamp(1, MOST_BLOCKS));
        FoldPlan { kernel, grid, block: BLOCK, head, vectors }
    }
}

/// A kernel of `kernels/fold.cu`. Its name is its [`Display`](fmt::Display).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FoldKernel {
    dtype: Dtype,
    /// Never a mean, which is a sum that is divided.
    reduction: Reduction,
    arity: Arity,
}

/// How many inputs a kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arity {
    /// So many, as the compiler knows.
    Few(u8),
    /// Any number.
    Any,
}

/// The numbers of inputs that sums of floats have kernels of their own for.
const FEW: [u8; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 16];

impl FoldKernel {
    fn of(dtype: Dtype, reduction: Reduction, inputs: usize) -> FoldKernel {
        let reduction = if reduction == Reduction::Mean { Reduction::Sum } else { reduction };
        let few = FEW.into_iter().find(|&few| usize::from(few) == inputs);
        let arity = match few {
            Some(few) if dtype.is_float() && reduction == Reduction::Sum => Arity::Few(few),
            _ => Arity::Any,
        };
        FoldKernel { dtype, reduction, arity }
    }

    /// Every kernel for a type.
    pub fn all(dtype: Dtype) -> impl Iterator<Item = FoldKernel> {
        let defined =
            move |reduction: &Reduction| *reduction != Reduction::Mean && reduction.supports(dtype);
        let any = Reduction::ALL.into_iter().filter(defined).map(move |reduction| FoldKernel {
            dtype,
            reduction,
            arity: Arity::Any,
        });
        let few = FEW.into_iter().filter(move |_| dtype.is_float()).map(move |few| FoldKernel {
            dtype,
            reduction: Reduction::Sum,
            arity: Arity::Few(few),
        });
        any.chain(few)
    }

    /// The type of its elements.
    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    /// How many inputs it is for.
    pub fn arity(self) -> Arity {
        self.arity
    }

    /// Vectors of each input that a thread reads at a time, as the kernel has it.
    fn depth(self) -> usize {
        match self.arity {
            Arity::Few(1) => 8,
            Arity::Few(2) => 4,
            Arity::Few(3 | 4) => 2,
            Arity::Few(_) | Arity::Any => 1,
        }
    }
}

impl fmt::Display for FoldKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fold_{}_{}_", self.dtype, self.reduction)?;
        match self.arity {
            Arity::Few(few) => write!(f, "{few}"),
            Arity::Any => f.write_str("any"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGNED: Alignment = Alignment::Alike { bytes: 0 };

    fn plan(dtype: Dtype, reduction: Reduction, inputs: usize, count: usize) -> FoldPlan {
        FoldPlan::of(&FoldShape::new(dtype, reduction, None, inputs, ALIGNED, count).unwrap())
    }

    #[test]
    fn sums_of_few_floats_have_kernels_of_their_own() {
        let name = |dtype, reduction, inputs| plan(dtype, reduction, inputs, 1).kernel.to_string();
        assert_eq!(name(Dtype::F32, Reduction::Sum, 2), "fold_f32_sum_2");
        assert_eq!(name(Dtype::Bf16, Reduction::Mean, 16), "fold_bf16_sum_16");
        assert_eq!(name(Dtype::F32, Reduction::Sum, 9), "fold_f32_sum_any");
        assert_eq!(name(Dtype::F16, Reduction::Max, 2), "fold_f16_max_any");
        assert_eq!(name(Dtype::I64, Reduction::Sum, 2), "fold_i64_sum_any");
        assert_eq!(name(Dtype::U8, Reduction::Xor, 1000), "fold_u8_xor_any");
    }

    #[test]
    fn blocks_grow_with_the_work_up_to_the_largest_launch() {
        let grid = |inputs, count| plan(Dtype::F32, Reduction::Sum, inputs, count).grid;
        assert_eq!(grid(2, 0), 0);
        assert_eq!(grid(2, 1), 1);
        // A block of two inputs folds 256 threads × 4 vectors × 4 elements.
        assert_eq!(grid(2, 4096), 1);
        assert_eq!(grid(2, 4100), 2);
        assert_eq!(grid(8, 4096), 4);
        assert_eq!(grid(9, 4096), 4);
        assert_eq!(grid(2, 1 << 30), 1 << 18);
        assert_eq!(grid(2, usize::MAX), MOST_BLOCKS);
    }

    #[test]
    fn every_element_is_in_a_vector_or_single() {
        for dtype in Dtype::ALL {
            for bytes in (0..16).filter(|bytes| usize::from(*bytes) % dtype.size() == 0) {
                for count in 0..200 {
                    let alignment = Alignment::Alike { bytes };
                    let shape = FoldShape::new(dtype, Reduction::Sum, None, 3, alignment, count);
                    let plan = FoldPlan::of(&shape.unwrap());
                    let within = plan.vectors * VECTOR / dtype.size();
                    assert!(plan.head + within <= count);
                    assert!(plan.head == count || plan.head * dtype.size() == usize::from(bytes));
                    assert!(count - plan.head - within < VECTOR / dtype.size());
                }
            }
            let shape = FoldShape::new(dtype, Reduction::Sum, None, 3, Alignment::Apart, 1000);
            let plan = FoldPlan::of(&shape.unwrap());
            assert_eq!((plan.head, plan.vectors, plan.grid), (1000, 0, 4));
        }
    }

    #[test]
    fn addresses_lie_alike_or_apart() {
        let of = |addresses: &[u64]| Alignment::of(addresses.iter().copied().map(DevicePtr));
        assert_eq!(of(&[32, 256]), ALIGNED);
        assert_eq!(of(&[36, 260, 4]), Alignment::Alike { bytes: 12 });
        assert_eq!(of(&[36, 256, 4]), Alignment::Apart);
    }

    #[test]
    fn folds_that_are_not_defined_are_refused() {
        let shape = |dtype, reduction, divisor, inputs| {
            FoldShape::new(dtype, reduction, divisor, inputs, ALIGNED, 1).map(|_| ())
        };
        let (float, int) = (Dtype::F32, Dtype::I32);
        assert_eq!(
            shape(float, Reduction::Xor, None, 2),
            Err(FoldError::Undefined { dtype: float, reduction: Reduction::Xor })
        );
        assert_eq!(
            shape(int, Reduction::Sum, None, 0),
            Err(FoldError::Inputs { inputs: 0, most: MOST_INPUTS })
        );
        assert_eq!(
            shape(int, Reduction::Sum, None, 65536),
            Err(FoldError::Inputs { inputs: 65536, most: MOST_INPUTS })
        );
        assert_eq!(
            shape(int, Reduction::Mean, Some(0), 2),
            Err(FoldError::Divisor { reduction: Reduction::Mean, divisor: 0 })
        );
        assert_eq!(
            shape(int, Reduction::Max, Some(2), 2),
            Err(FoldError::Divisor { reduction: Reduction::Max, divisor: 2 })
        );
        assert_eq!(shape(float, Reduction::Sum, Some(2), 65535), Ok(()));
    }
}
