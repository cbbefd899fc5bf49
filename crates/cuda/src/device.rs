//! A device: what it is called and what it can do.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use crate::driver::Driver;
use crate::error::CudaError;
use crate::library::RawDevice;

/// A GPU, or a part of one that its administrator split off.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Driver,
    number: u32,
    raw: RawDevice,
}

/// What tells a device from all others, on all machines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

/// The generation of a device: 9.0 is Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// Before the point.
    pub major: u32,
    /// After the point.
    pub minor: u32,
}

/// A property of a device that is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Attribute {
    /// Multiprocessors, each of which runs blocks of threads.
    Multiprocessors = 16,
    /// 1 if it shares its memory with the host.
    Integrated = 18,
    /// 0 where any number of processes may use it.
    ComputeMode = 20,
    /// The clock of its memory, in kHz.
    MemoryClock = 36,
    /// The width of its memory's bus, in bits.
    MemoryBusWidth = 37,
    /// Copies that can run beside kernels.
    CopyEngines = 40,
    /// Before the point of its [`Capability`].
    CapabilityMajor = 75,
    /// After the point of its [`Capability`].
    CapabilityMinor = 76,
    /// 1 if memory can be allocated in the order of a stream.
    MemoryPools = 115,
    /// 1 if events can be shared between processes.
    InterprocessEvents = 125,
}

impl Device {
    pub(crate) fn new(driver: Driver, number: u32, raw: RawDevice) -> Device {
        Device { driver, number, raw }
    }

    /// Its number in this process.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The driver that shows it.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// What its maker calls it.
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the array has the length that is passed, and the driver ends the text within it.
        unsafe {
            let call = self.driver.call()?;
            call.device_name(name.as_mut_ptr(), name.len() as c_int, self.raw)?;
            Ok(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// What tells it from all others.
    pub fn uuid(&self) -> Result<Uuid, CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: the driver writes 16 bytes.
        unsafe { self.driver.call()?.device_uuid(&mut uuid, self.raw)? };
        Ok(Uuid(uuid))
    }

    /// Its place on the PCI bus, such as `0000:1b:00.0`.
    pub fn bus_id(&self) -> Result<String, CudaError> {
        let mut id: [c_char; 32] = [0; 32];
        // SAFETY: the array has the length that is passed, and the driver ends the text within it.
        unsafe {
            let call = self.driver.call()?;
            call.device_bus_id(id.as_mut_ptr(), id.len() as c_int, self.raw)?;
            Ok(CStr::from_ptr(id.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// A property.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the driver writes an integer.
        unsafe { self.driver.call()?.device_attribute(&mut value, attribute as c_int, self.raw)? };
        Ok(value)
    }

    /// Its generation.
    pub fn capability(&self) -> Result<Capability, CudaError> {
        Ok(Capability {
            major: self.attribute(Attribute::CapabilityMajor)?.unsigned_abs(),
            minor: self.attribute(Attribute::CapabilityMinor)?.unsigned_abs(),
        })
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> Result<u32, CudaError> {
        Ok(self.attribute(Attribute::Multiprocessors)?.unsigned_abs())
    }

    /// Bytes of its memory.
    pub fn total_memory(&self) -> Result<usize, CudaError> {
        let mut bytes = 0;
        // SAFETY: the driver writes a size.
        unsafe { self.driver.call()?.device_total_memory(&mut bytes, self.raw)? };
        Ok(bytes)
    }

    /// Whether its kernels can reach the other's memory.
    pub fn can_access(&self, peer: &Device) -> Result<bool, CudaError> {
        let mut can = 0;
        // SAFETY: the driver writes an integer.
        unsafe { self.driver.call()?.device_can_access(&mut can, self.raw, peer.raw)? };
        Ok(can != 0)
    }

    pub(crate) fn raw(&self) -> RawDevice {
        self.raw
    }
}

impl fmt::Display for Uuid {
    /// As NVIDIA's programs write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            let dash = if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_as_elsewhere() {
        let uuid = Uuid([0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(uuid.to_string(), "GPU-12345678-9abc-def0-0102-030405060708");
    }
}
