//! What can go wrong below a fold.

/// A device cannot be used, or a call of its driver failed.
///
/// After `Call` the context may be unusable: an error of a kernel, such as a wrong address, shows in some
/// later call and in every one after that.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no such library, or it is none.
    #[error(
        "the CUDA driver {library} cannot be loaded ({reason}); install NVIDIA's driver, or name its \
         library in UNISONO_CUDA_DRIVER"
    )]
    Library {
        /// Its name or path.
        library: String,
        /// What the loader said.
        reason: String,
    },
    /// The library is not a CUDA driver, or too old a one.
    #[error(
        "{library} has no function {symbol} ({reason}); a CUDA driver of version 12.0 or newer has it"
    )]
    Symbol {
        /// Its name or path.
        library: String,
        /// What it lacks.
        symbol: &'static str,
        /// What the loader said.
        reason: String,
    },
    /// The driver is there and no device is, or none that `CUDA_VISIBLE_DEVICES` lets this process see.
    #[error("the CUDA driver {library} shows this process no device")]
    NoDevice {
        /// The driver's name or path.
        library: String,
    },
    /// The process sees fewer devices.
    #[error("there is no CUDA device {device}: this process sees {devices}, numbered from 0")]
    NoSuchDevice {
        /// The number that was asked for.
        device: u32,
        /// How many there are.
        devices: u32,
    },
    /// CUDA does not work in a child that was forked after its parent had initialised it.
    #[error(
        "process {process} was forked after CUDA was initialised{}, and cannot use it; start the \
         process anew (spawn) instead, or fork before CUDA is used",
        initialised_in.map(|parent| format!(" in process {parent}")).unwrap_or_default()
    )]
    Forked {
        /// The process that initialised it, if that was done here.
        initialised_in: Option<u32>,
        /// This process.
        process: u32,
    },
    /// The driver refused a call, or reports that an earlier one failed.
    #[error("{call} failed: {name} ({code}), {meaning}")]
    Call {
        /// Which function of the driver.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// The driver's name of that code.
        name: &'static str,
        /// The driver's description of it.
        meaning: &'static str,
    },
    /// The driver cannot turn kernels into code of the device: it is older than their PTX, or the
    /// device is.
    #[error("the CUDA driver cannot load the kernels {module}: {name} ({code}){log}")]
    Compile {
        /// Which kernels.
        module: String,
        /// What the driver returned.
        code: i32,
        /// The driver's name of that code.
        name: &'static str,
        /// What its compiler said, each line after a line break.
        log: String,
    },
}
