//! The driver of this process's devices.

use std::ffi::{OsStr, OsString, c_int};
use std::sync::Arc;

use crate::device::Device;
use crate::error::CudaError;
use crate::library::{NO_DEVICE, NOT_INITIALIZED, Symbols};

/// Names the driver's library, in place of the system's.
pub const DRIVER_VARIABLE: &str = "UNISONO_CUDA_DRIVER";

/// The library's name where NVIDIA's driver is installed.
const LIBRARY: &str = "libcuda.so.1";

/// The CUDA driver: loaded, initialised, and with at least one device.
///
/// It is bound to the process that loaded it. In a child that is forked later every call fails with
/// [`CudaError::Forked`], and what is dropped there is left to the parent.
#[derive(Clone)]
pub struct Driver(Arc<Loaded>);

struct Loaded {
    library: String,
    symbols: Symbols,
    process: u32,
    devices: u32,
}

impl Driver {
    /// Loads the system's driver, or the one that `UNISONO_CUDA_DRIVER` names.
    pub fn load() -> Result<Driver, CudaError> {
        let named = std::env::var_os(DRIVER_VARIABLE).filter(|name| !name.is_empty());
        Driver::load_from(&named.unwrap_or_else(|| OsString::from(LIBRARY)))
    }

    /// Loads the driver from this library, a path or a name that the system's loader knows.
    pub fn load_from(library: &OsStr) -> Result<Driver, CudaError> {
        let symbols = Symbols::load(library)?;
        let library = library.to_string_lossy().into_owned();
        let process = std::process::id();
        // SAFETY: may be called at any time, any number of times.
        match unsafe { symbols.init(0) } {
            Err(CudaError::Call { code: NO_DEVICE, .. }) => {
                return Err(CudaError::NoDevice { library });
            }
            Err(CudaError::Call { code: NOT_INITIALIZED, .. }) => {
                return Err(CudaError::Forked { initialised_in: None, process });
            }
            initialised => initialised?,
        }
        let mut devices = 0;
        // SAFETY: the driver is initialised.
        unsafe { symbols.device_count(&mut devices)? };
        match u32::try_from(devices) {
            Ok(0) | Err(_) => Err(CudaError::NoDevice { library }),
            Ok(devices) => Ok(Driver(Arc::new(Loaded { library, symbols, process, devices }))),
        }
    }

    /// Where it was loaded from.
    pub fn library(&self) -> &str {
        &self.0.library
    }

    /// The newest version of CUDA that it serves, such as 13000 for 13.0.
    pub fn version(&self) -> Result<u32, CudaError> {
        let mut version: c_int = 0;
        // SAFETY: the driver is initialised.
        unsafe { self.call()?.driver_version(&mut version)? };
        Ok(version.unsigned_abs())
    }

    /// How many devices this process sees; at least one.
    pub fn device_count(&self) -> u32 {
        self.0.devices
    }

    /// A device by its number in this process.
    pub fn device(&self, number: u32) -> Result<Device, CudaError> {
        if number >= self.0.devices {
            return Err(CudaError::NoSuchDevice { device: number, devices: self.0.devices });
        }
        let mut raw = 0;
        // SAFETY: there is a device of this number.
        unsafe { self.call()?.device(&mut raw, number as c_int)? };
        Ok(Device::new(self.clone(), number, raw))
    }

    /// The driver's functions, in the process that they work in.
    pub(crate) fn call(&self) -> Result<&Symbols, CudaError> {
        let process = std::process::id();
        if process == self.0.process {
            Ok(&self.0.symbols)
        } else {
            Err(CudaError::Forked { initialised_in: Some(self.0.process), process })
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Driver").field(&self.0.library).finish()
    }
}
