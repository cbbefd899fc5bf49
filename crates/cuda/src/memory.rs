//! Memory of devices, and memory of the host that devices reach.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use crate::context::Context;
use crate::error::CudaError;
use crate::library::{DevicePtr, INVALID_VALUE, RawHandle};

/// An allocation of device memory.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    pointer: DevicePtr,
    bytes: usize,
}

/// An allocation of device memory as other processes of the host know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHandle(pub [u8; 64]);

impl DeviceMemory {
    /// Allocates at least one byte; an address that is a multiple of 256. What is in it is not defined.
    pub fn new(context: &Context, bytes: usize) -> Result<DeviceMemory, CudaError> {
        let mut pointer = DevicePtr::default();
        // SAFETY: the context is current.
        unsafe { context.enter()?.call.memory_allocate(&mut pointer, bytes.max(1))? };
        Ok(DeviceMemory { context: context.clone(), pointer, bytes })
    }

    /// Its address.
    pub fn pointer(&self) -> DevicePtr {
        self.pointer
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What another process needs to open it. It must not be freed while one has it open.
    pub fn handle(&self) -> Result<MemoryHandle, CudaError> {
        MemoryHandle::of(&self.context, self.pointer)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated here, and this is its last use. The driver waits for what uses it.
        self.context.last(|call| unsafe { call.memory_free(self.pointer) });
    }
}

impl MemoryHandle {
    /// The handle of the whole allocation that an address is in, which [`Pointer::base`] tells.
    pub fn of(context: &Context, pointer: DevicePtr) -> Result<MemoryHandle, CudaError> {
        let mut handle = RawHandle([0; 64]);
        // SAFETY: the driver checks the address.
        unsafe { context.enter()?.call.memory_handle(&mut handle, pointer)? };
        Ok(MemoryHandle(handle.0))
    }
}

/// Device memory of another process.
#[derive(Debug)]
pub struct ImportedMemory {
    context: Context,
    pointer: DevicePtr,
}

impl ImportedMemory {
    /// Opens memory of another process. Memory that is open already has to be closed before it is
    /// opened again.
    pub fn open(context: &Context, handle: MemoryHandle) -> Result<ImportedMemory, CudaError> {
        /// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, without which the driver refuses.
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let mut pointer = DevicePtr::default();
        let entered = context.enter()?;
        // SAFETY: the driver checks the handle.
        unsafe {
            entered.call.memory_open(&mut pointer, RawHandle(handle.0), LAZY_ENABLE_PEER_ACCESS)?;
        }
        Ok(ImportedMemory { context: context.clone(), pointer })
    }

    /// The address of the allocation's first byte in this process.
    pub fn pointer(&self) -> DevicePtr {
        self.pointer
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        // SAFETY: opened here, and this is its last use.
        self.context.last(|call| unsafe { call.memory_close(self.pointer) });
    }
}

/// Host memory that stays in its place, so that devices copy from and to it at full speed, and that
/// their kernels reach.
#[derive(Debug)]
pub struct HostMemory {
    context: Context,
    pointer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory like any other, and the driver frees it on any thread.
unsafe impl Send for HostMemory {}
// SAFETY: as above; a shared reference gives out addresses only.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates at least one byte for all devices. What is in it is not defined.
    pub fn new(context: &Context, bytes: usize) -> Result<HostMemory, CudaError> {
        /// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
        const FLAGS: u32 = 1 | 2;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: the context is current.
        unsafe { context.enter()?.call.host_allocate(&mut pointer, bytes.max(1), FLAGS)? };
        let pointer = NonNull::new(pointer.cast()).expect("the driver allocated it");
        Ok(HostMemory { context: context.clone(), pointer, bytes })
    }

    /// Its address on the host.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its address on the device.
    pub fn device_pointer(&self) -> Result<DevicePtr, CudaError> {
        device_pointer(&self.context, self.pointer.as_ptr())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated here, and this is its last use.
        self.context.last(|call| unsafe { call.host_free(self.pointer.as_ptr().cast()) });
    }
}

/// Host memory of somebody else that is held in its place for as long as this lives.
#[derive(Debug)]
pub struct RegisteredMemory {
    context: Context,
    pointer: *mut u8,
}

// SAFETY: an address, which the driver forgets on any thread.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Registers memory for all devices.
    ///
    /// # Safety
    /// It stays mapped for as long as the result lives.
    pub unsafe fn new(
        context: &Context,
        pointer: *mut u8,
        bytes: usize,
    ) -> Result<RegisteredMemory, CudaError> {
        /// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
        const FLAGS: u32 = 1 | 2;
        // SAFETY: the caller's promise.
        unsafe { context.enter()?.call.host_register(pointer.cast(), bytes, FLAGS)? };
        Ok(RegisteredMemory { context: context.clone(), pointer })
    }

    /// Its address on the device.
    pub fn device_pointer(&self) -> Result<DevicePtr, CudaError> {
        device_pointer(&self.context, self.pointer)
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        // SAFETY: registered here.
        self.context.last(|call| unsafe { call.host_unregister(self.pointer.cast()) });
    }
}

fn device_pointer(context: &Context, host: *mut u8) -> Result<DevicePtr, CudaError> {
    let mut pointer = DevicePtr::default();
    // SAFETY: the driver checks the address.
    unsafe { context.enter()?.call.host_device_pointer(&mut pointer, host.cast(), 0)? };
    Ok(pointer)
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Where it is.
    pub kind: MemoryKind,
    /// The number of the device that it was allocated or registered for.
    pub device: u32,
    /// The first byte of its allocation.
    pub base: DevicePtr,
    /// The size of its allocation.
    pub bytes: usize,
    /// What tells the allocation from all that this process has, had and will have at the same address.
    pub buffer: u64,
    /// Whether it has a [`MemoryHandle`].
    pub shareable: bool,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Pinned or registered memory of the host.
    Host,
    /// Memory of a device.
    Device,
    /// Memory that moves to who uses it.
    Managed,
}

impl Pointer {
    /// What the driver knows of an address; `None` if nothing, as of ordinary memory of the host.
    pub fn of(context: &Context, pointer: DevicePtr) -> Result<Option<Pointer>, CudaError> {
        const MEMORY_TYPE: c_int = 2;
        const BUFFER_ID: c_int = 7;
        const IS_MANAGED: c_int = 8;
        const DEVICE_ORDINAL: c_int = 9;
        const IS_LEGACY_IPC_CAPABLE: c_int = 10;
        const RANGE_START: c_int = 11;
        const RANGE_SIZE: c_int = 12;
        let entered = context.enter()?;
        let attribute = |attribute: c_int| {
            // Attributes have four or eight bytes, and the lower ones come first.
            let mut value = 0_u64;
            let into = (&raw mut value).cast();
            // SAFETY: the driver writes at most eight bytes.
            unsafe { entered.call.pointer_attribute(into, attribute, pointer) }.map(|()| value)
        };
        let kind = match attribute(MEMORY_TYPE) {
            Err(CudaError::Call { code: INVALID_VALUE, .. }) => return Ok(None),
            kind => match kind? as u32 {
                0 => return Ok(None),
                _ if attribute(IS_MANAGED)? as u8 != 0 => MemoryKind::Managed,
                1 => MemoryKind::Host,
                _ => MemoryKind::Device,
            },
        };
        Ok(Some(Pointer {
            kind,
            device: attribute(DEVICE_ORDINAL)? as u32,
            base: DevicePtr(attribute(RANGE_START)?),
            bytes: attribute(RANGE_SIZE)? as usize,
            buffer: attribute(BUFFER_ID)?,
            shareable: attribute(IS_LEGACY_IPC_CAPABLE)? as u8 != 0,
        }))
    }
}
