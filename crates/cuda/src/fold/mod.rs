//! Folds on the device: the bits of the host's [kernels](unisono_collective::kernel).
//!
//! A fold reads every input once and writes the result once, in the order of the canonical tree, each
//! node of which is rounded to the type. What is not specified there, which NaN a NaN is, is not here
//! either, and may differ. The kernels, and why their order is that of the tree, are in
//! `kernels/fold.cu`; [`FoldPlan`] says which of them runs.

mod code;
mod plan;

use std::ffi::c_void;
use std::sync::OnceLock;

use unisono_collective::{Dtype, Reduction};

use crate::context::Context;
use crate::device::Capability;
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::module::{Kernel, Module};
use crate::stream::Stream;

pub use code::OLDEST;
pub use plan::{Alignment, Arity, FoldKernel, FoldPlan, FoldShape, MOST_INPUTS};

/// Addresses that fit the parameters of a launch, as the kernels have it.
const LISTED: usize = 480;

/// The kernel that writes addresses into a table.
const LIST_INPUTS: &str = "list_inputs";

/// Why a fold was not submitted. Nothing has been, and no memory has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FoldError {
    /// The reduction is not defined for the type.
    #[error("{reduction} is not defined for {dtype}")]
    Undefined {
        /// The type.
        dtype: Dtype,
        /// The reduction.
        reduction: Reduction,
    },
    /// There are none, or too many.
    #[error("a fold of {inputs} inputs; it takes 1 to {most}")]
    Inputs {
        /// How many were given.
        inputs: usize,
        /// How many there may be.
        most: usize,
    },
    /// Nothing is divided by zero, and only sums and means are divided.
    #[error("{reduction} divided by {divisor}")]
    Divisor {
        /// The reduction.
        reduction: Reduction,
        /// The divisor.
        divisor: u32,
    },
    /// An address is none that an element of the type can have.
    #[error("{dtype} at the address {address:#x}, which is no multiple of {} bytes", dtype.size())]
    Misaligned {
        /// The type.
        dtype: Dtype,
        /// The address.
        address: u64,
    },
    /// The device is older than the kernels.
    #[error("a CUDA device of compute capability {capability}; folds need {oldest} or newer")]
    TooOld {
        /// What it is.
        capability: Capability,
        /// What it would have to be.
        oldest: Capability,
    },
    /// The driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The folds of a device.
#[derive(Debug)]
pub struct Folds {
    context: Context,
    capability: Capability,
    /// By the code of the type.
    types: [OnceLock<Kernels>; Dtype::ALL.len()],
}

/// The kernels of a type.
#[derive(Debug)]
struct Kernels {
    /// In the order of [`FoldKernel::all`].
    folds: Vec<(FoldKernel, Kernel)>,
    list_inputs: Kernel,
}

impl Folds {
    /// The folds of a device. The kernels of a type are loaded when they are first needed
    /// ([`Folds::prepare`]).
    pub fn load(context: &Context) -> Result<Folds, FoldError> {
        Folds::with_code_for(context, context.device().capability()?)
    }

    /// Folds by the code that devices of an older generation get. The bits are the same; a test wants to
    /// see that.
    pub fn with_code_for(context: &Context, capability: Capability) -> Result<Folds, FoldError> {
        if capability < code::OLDEST {
            return Err(FoldError::TooOld { capability, oldest: code::OLDEST });
        }
        let types = [const { OnceLock::new() }; Dtype::ALL.len()];
        Ok(Folds { context: context.clone(), capability, types })
    }

    /// Loads the kernels of a type, so that no fold does: it takes up to a second, and cannot be done
    /// while a stream records for a graph.
    pub fn prepare(&self, dtype: Dtype) -> Result<(), FoldError> {
        self.kernels(dtype).map(|_| ())
    }

    /// Submits to a stream: combines `inputs` element by element in the order of the canonical tree, and
    /// writes the result to `output`, and to `also` if that is given. `divisor` divides the root once, as on
    /// the host.
    ///
    /// # Safety
    /// Every address is valid for `count` elements on the device until the fold is done. The output may
    /// be exactly equal to any input, and overlaps nothing partially; `also` overlaps nothing. Nothing else writes
    /// the inputs or touches the outputs meanwhile. The stream is one of the context of these folds.
    #[expect(clippy::too_many_arguments, reason = "one flat call, as on the host")]
    pub unsafe fn fold(
        &self,
        stream: &Stream,
        dtype: Dtype,
        reduction: Reduction,
        divisor: Option<u32>,
        inputs: &[DevicePtr],
        output: DevicePtr,
        also: Option<DevicePtr>,
        count: usize,
    ) -> Result<(), FoldError> {
        let addresses = || inputs.iter().copied().chain([output]).chain(also);
        let misaligned = |address: &DevicePtr| !address.0.is_multiple_of(dtype.size() as u64);
        if let Some(DevicePtr(address)) = addresses().find(misaligned) {
            return Err(FoldError::Misaligned { dtype, address });
        }
        let alignment = Alignment::of(addresses());
        let shape = FoldShape::new(dtype, reduction, divisor, inputs.len(), alignment, count)?;
        let plan = FoldPlan::of(&shape);
        // SAFETY: the caller's promise, and the plan of this call.
        unsafe { self.launch(stream, &plan, &shape, inputs, (output, also), count) }
    }

    /// Submits a fold as it was planned.
    ///
    /// # Safety
    /// As for [`Folds::fold`]; the plan is one of the shape, and that is the shape of this call.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        plan: &FoldPlan,
        shape: &FoldShape,
        inputs: &[DevicePtr],
        (output, also): (DevicePtr, Option<DevicePtr>),
        count: usize,
    ) -> Result<(), FoldError> {
        if plan.grid == 0 {
            return Ok(());
        }
        let kernels = self.kernels(plan.kernel.dtype())?;
        let divisor = u64::from(shape.kernel_divisor());
        let (also, count, head) = (also.unwrap_or_default(), count as u64, plan.head as u64);
        let mut call = RawCall { output, also, count, head, divisor };
        let mut launch = |inputs: *const c_void| {
            let mut parameters = [(&raw mut call).cast(), inputs.cast_mut()];
            // SAFETY: the kernel takes a call and its inputs; the rest is the caller's promise.
            unsafe {
                kernels.fold(plan.kernel).launch(stream, plan.grid, plan.block, &mut parameters)
            }
        };
        match plan.kernel.arity() {
            Arity::Few(_) => launch(inputs.as_ptr().cast())?,
            Arity::Any if inputs.len() <= LISTED => {
                let listing = RawInputs::listing(inputs);
                launch((&raw const listing).cast())?;
            }
            Arity::Any => {
                let table = stream.allocate(size_of_val(inputs))?;
                let tabled = RawInputs::in_table(table, inputs.len());
                let listed = kernels.list(stream, inputs, table);
                let launched = listed.and_then(|()| launch((&raw const tabled).cast()));
                // SAFETY: allocated above; nothing that is submitted later uses it.
                let freed = unsafe { stream.free(table) };
                launched.and(freed)?;
            }
        }
        Ok(())
    }

    fn kernels(&self, dtype: Dtype) -> Result<&Kernels, FoldError> {
        let cell = &self.types[dtype as usize];
        if let Some(kernels) = cell.get() {
            return Ok(kernels);
        }
        // Two threads may load them at once; the second's are dropped.
        let loaded = Kernels::load(&self.context, dtype, self.capability)?;
        Ok(cell.get_or_init(|| loaded))
    }
}

impl Kernels {
    fn load(context: &Context, dtype: Dtype, capability: Capability) -> Result<Kernels, CudaError> {
        let ptx = code::ptx(dtype, capability);
        let module = Module::load(context, &format!("fold_{dtype}"), ptx)?;
        let folds = FoldKernel::all(dtype)
            .map(|kernel| Ok((kernel, module.kernel(&kernel.to_string())?)))
            .collect::<Result<_, CudaError>>()?;
        Ok(Kernels { folds, list_inputs: module.kernel(LIST_INPUTS)? })
    }

    fn fold(&self, kernel: FoldKernel) -> &Kernel {
        let found = self.folds.iter().find(|(listed, _)| *listed == kernel);
        &found.expect("a plan names a kernel of its type").1
    }

    /// Writes addresses into a table of as many entries, in the order of the stream.
    fn list(
        &self,
        stream: &Stream,
        inputs: &[DevicePtr],
        mut table: DevicePtr,
    ) -> Result<(), CudaError> {
        for (part, inputs) in inputs.chunks(LISTED).enumerate() {
            let mut first = (part * LISTED) as u64;
            let listing = RawInputs::listing(inputs);
            let mut parameters = [
                (&raw mut table).cast(),
                (&raw mut first).cast(),
                (&raw const listing).cast_mut().cast(),
            ];
            // SAFETY: the kernel takes a table, the first entry to write, and what to write.
            unsafe { self.list_inputs.launch(stream, 1, plan::BLOCK, &mut parameters)? };
        }
        Ok(())
    }
}

/// `Call` of the kernels.
#[repr(C)]
struct RawCall {
    output: DevicePtr,
    /// Null if there is no second output.
    also: DevicePtr,
    count: u64,
    head: u64,
    divisor: u64,
}

/// `Any` of the kernels.
#[repr(C)]
struct RawInputs {
    table: DevicePtr,
    count: u64,
    listed: [DevicePtr; LISTED],
}

impl RawInputs {
    fn listing(inputs: &[DevicePtr]) -> RawInputs {
        let mut listed = [DevicePtr::default(); LISTED];
        listed[..inputs.len()].copy_from_slice(inputs);
        RawInputs { table: DevicePtr::default(), count: inputs.len() as u64, listed }
    }

    fn in_table(table: DevicePtr, inputs: usize) -> RawInputs {
        let listed = [DevicePtr::default(); LISTED];
        RawInputs { table, count: inputs as u64, listed }
    }
}
