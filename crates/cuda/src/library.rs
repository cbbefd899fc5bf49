//! The functions of the CUDA driver, found at run time.
//!
//! Each is listed once, with the symbol's name and its parameters. The list becomes [`Symbols`], with a
//! method for each that makes of its status a [`CudaError`]. Symbols with a version (`_v2`) are those
//! that the headers of CUDA 12 and 13 mean by the plain name.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::error::CudaError;

/// What a function of the driver returns; 0 is success.
pub type Status = c_int;

/// `CUDA_SUCCESS`.
pub const SUCCESS: Status = 0;
/// `CUDA_ERROR_NOT_INITIALIZED`: by `cuInit`, in a child that was forked after it was called.
pub const NOT_INITIALIZED: Status = 3;
/// `CUDA_ERROR_NO_DEVICE`.
pub const NO_DEVICE: Status = 100;
/// `CUDA_ERROR_INVALID_VALUE`: of a pointer, one that the driver does not know.
pub const INVALID_VALUE: Status = 1;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: Status = 600;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub const PEER_ACCESS_ALREADY_ENABLED: Status = 704;

/// An address in device memory, or in host memory that a device reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address this many bytes further.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> DevicePtr {
        DevicePtr(self.0 + bytes as u64)
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(pub *mut c_void);

        // SAFETY: a name of something in the driver, whose functions may be called by any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            /// What a function is to replace.
            pub const NULL: $name = $name(std::ptr::null_mut());
        }
    )*};
}
handles! {
    /// A `CUcontext`.
    RawContext;
    /// A `CUstream`.
    RawStream;
    /// A `CUevent`.
    RawEvent;
    /// A `CUmodule`.
    RawModule;
    /// A `CUfunction`.
    RawFunction;
}

/// A `CUdevice`.
pub type RawDevice = c_int;

/// A `CUipcMemHandle` or a `CUipcEventHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RawHandle(pub [u8; 64]);

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
pub const HOST_MEMORY: c_uint = 1;
pub const DEVICE_MEMORY: c_uint = 2;

/// A `CUDA_MEMCPY2D`: rows of bytes from one place to another.
#[repr(C)]
pub struct Rows {
    pub from: Place,
    pub into: Place,
    pub width: usize,
    pub height: usize,
}

/// One side of such a copy.
#[repr(C)]
pub struct Place {
    pub x: usize,
    pub y: usize,
    pub memory: c_uint,
    pub host: *const c_void,
    pub device: DevicePtr,
    pub array: *mut c_void,
    pub pitch: usize,
}

macro_rules! symbols {
    ($($name:ident = $symbol:literal as $call:literal ($($parameter:ident: $type:ty),*);)*) => {
        /// Every function that is used.
        pub struct Symbols {
            $($name: unsafe extern "C" fn($($type),*) -> Status,)*
            error_name: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
            error_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
        }

        impl Symbols {
            fn resolve(name: &str, library: &Library) -> Result<Symbols, CudaError> {
                Ok(Symbols {
                    $($name: find(name, library, $symbol)?,)*
                    error_name: find(name, library, "cuGetErrorName")?,
                    error_string: find(name, library, "cuGetErrorString")?,
                })
            }

            $(
                #[doc = concat!("`", $call, "`.")]
                ///
                /// # Safety
                /// As the driver's documentation says.
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's function has")]
                pub unsafe fn $name(&self, $($parameter: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the caller's promise; `resolve` found the function of this name.
                    let status = unsafe { (self.$name)($($parameter),*) };
                    if status == SUCCESS { Ok(()) } else { Err(self.error($call, status)) }
                }
            )*
        }
    };
}
symbols! {
    init = "cuInit" as "cuInit" (flags: c_uint);
    driver_version = "cuDriverGetVersion" as "cuDriverGetVersion" (version: *mut c_int);

    device_count = "cuDeviceGetCount" as "cuDeviceGetCount" (count: *mut c_int);
    device = "cuDeviceGet" as "cuDeviceGet" (device: *mut RawDevice, ordinal: c_int);
    device_name = "cuDeviceGetName" as "cuDeviceGetName"
        (name: *mut c_char, length: c_int, device: RawDevice);
    device_uuid = "cuDeviceGetUuid_v2" as "cuDeviceGetUuid" (uuid: *mut [u8; 16], device: RawDevice);
    device_attribute = "cuDeviceGetAttribute" as "cuDeviceGetAttribute"
        (value: *mut c_int, attribute: c_int, device: RawDevice);
    device_total_memory = "cuDeviceTotalMem_v2" as "cuDeviceTotalMem"
        (bytes: *mut usize, device: RawDevice);
    device_bus_id = "cuDeviceGetPCIBusId" as "cuDeviceGetPCIBusId"
        (id: *mut c_char, length: c_int, device: RawDevice);
    device_can_access = "cuDeviceCanAccessPeer" as "cuDeviceCanAccessPeer"
        (can: *mut c_int, device: RawDevice, peer: RawDevice);

    context_retain = "cuDevicePrimaryCtxRetain" as "cuDevicePrimaryCtxRetain"
        (context: *mut RawContext, device: RawDevice);
    context_release = "cuDevicePrimaryCtxRelease_v2" as "cuDevicePrimaryCtxRelease"
        (device: RawDevice);
    context_current = "cuCtxGetCurrent" as "cuCtxGetCurrent" (context: *mut RawContext);
    context_push = "cuCtxPushCurrent_v2" as "cuCtxPushCurrent" (context: RawContext);
    context_pop = "cuCtxPopCurrent_v2" as "cuCtxPopCurrent" (context: *mut RawContext);
    context_synchronize = "cuCtxSynchronize" as "cuCtxSynchronize" ();
    context_priorities = "cuCtxGetStreamPriorityRange" as "cuCtxGetStreamPriorityRange"
        (least: *mut c_int, greatest: *mut c_int);
    context_enable_peer = "cuCtxEnablePeerAccess" as "cuCtxEnablePeerAccess"
        (peer: RawContext, flags: c_uint);

    module_load = "cuModuleLoadDataEx" as "cuModuleLoadDataEx"
        (module: *mut RawModule, image: *const c_void, options: c_uint, names: *mut c_int,
         values: *mut *mut c_void);
    module_unload = "cuModuleUnload" as "cuModuleUnload" (module: RawModule);
    module_function = "cuModuleGetFunction" as "cuModuleGetFunction"
        (function: *mut RawFunction, module: RawModule, name: *const c_char);
    launch = "cuLaunchKernel" as "cuLaunchKernel"
        (function: RawFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
         block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: RawStream,
         parameters: *mut *mut c_void, extra: *mut *mut c_void);

    memory_info = "cuMemGetInfo_v2" as "cuMemGetInfo" (free: *mut usize, total: *mut usize);
    memory_allocate = "cuMemAlloc_v2" as "cuMemAlloc" (pointer: *mut DevicePtr, bytes: usize);
    memory_free = "cuMemFree_v2" as "cuMemFree" (pointer: DevicePtr);
    memory_allocate_async = "cuMemAllocAsync" as "cuMemAllocAsync"
        (pointer: *mut DevicePtr, bytes: usize, stream: RawStream);
    memory_free_async = "cuMemFreeAsync" as "cuMemFreeAsync" (pointer: DevicePtr, stream: RawStream);
    pointer_attribute = "cuPointerGetAttribute" as "cuPointerGetAttribute"
        (value: *mut c_void, attribute: c_int, pointer: DevicePtr);
    host_allocate = "cuMemHostAlloc" as "cuMemHostAlloc"
        (pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free = "cuMemFreeHost" as "cuMemFreeHost" (pointer: *mut c_void);
    host_register = "cuMemHostRegister_v2" as "cuMemHostRegister"
        (pointer: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister" as "cuMemHostUnregister" (pointer: *mut c_void);
    host_device_pointer = "cuMemHostGetDevicePointer_v2" as "cuMemHostGetDevicePointer"
        (pointer: *mut DevicePtr, host: *mut c_void, flags: c_uint);
    memory_handle = "cuIpcGetMemHandle" as "cuIpcGetMemHandle"
        (handle: *mut RawHandle, pointer: DevicePtr);
    memory_open = "cuIpcOpenMemHandle_v2" as "cuIpcOpenMemHandle"
        (pointer: *mut DevicePtr, handle: RawHandle, flags: c_uint);
    memory_close = "cuIpcCloseMemHandle" as "cuIpcCloseMemHandle" (pointer: DevicePtr);

    copy = "cuMemcpyAsync" as "cuMemcpyAsync"
        (into: DevicePtr, from: DevicePtr, bytes: usize, stream: RawStream);
    copy_to_device = "cuMemcpyHtoDAsync_v2" as "cuMemcpyHtoDAsync"
        (into: DevicePtr, from: *const c_void, bytes: usize, stream: RawStream);
    copy_rows = "cuMemcpy2DAsync_v2" as "cuMemcpy2DAsync" (rows: *const Rows, stream: RawStream);
    copy_to_host = "cuMemcpyDtoHAsync_v2" as "cuMemcpyDtoHAsync"
        (into: *mut c_void, from: DevicePtr, bytes: usize, stream: RawStream);
    copy_on_device = "cuMemcpyDtoDAsync_v2" as "cuMemcpyDtoDAsync"
        (into: DevicePtr, from: DevicePtr, bytes: usize, stream: RawStream);
    copy_to_peer = "cuMemcpyPeerAsync" as "cuMemcpyPeerAsync"
        (into: DevicePtr, into_context: RawContext, from: DevicePtr, from_context: RawContext,
         bytes: usize, stream: RawStream);
    fill_bytes = "cuMemsetD8Async" as "cuMemsetD8Async"
        (into: DevicePtr, value: u8, count: usize, stream: RawStream);
    fill_words = "cuMemsetD32Async" as "cuMemsetD32Async"
        (into: DevicePtr, value: c_uint, count: usize, stream: RawStream);

    stream_create = "cuStreamCreateWithPriority" as "cuStreamCreateWithPriority"
        (stream: *mut RawStream, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2" as "cuStreamDestroy" (stream: RawStream);
    stream_query = "cuStreamQuery" as "cuStreamQuery" (stream: RawStream);
    stream_synchronize = "cuStreamSynchronize" as "cuStreamSynchronize" (stream: RawStream);
    stream_wait = "cuStreamWaitEvent" as "cuStreamWaitEvent"
        (stream: RawStream, event: RawEvent, flags: c_uint);
    stream_capturing = "cuStreamIsCapturing" as "cuStreamIsCapturing"
        (stream: RawStream, status: *mut c_int);

    event_create = "cuEventCreate" as "cuEventCreate" (event: *mut RawEvent, flags: c_uint);
    event_destroy = "cuEventDestroy_v2" as "cuEventDestroy" (event: RawEvent);
    event_record = "cuEventRecord" as "cuEventRecord" (event: RawEvent, stream: RawStream);
    event_query = "cuEventQuery" as "cuEventQuery" (event: RawEvent);
    event_synchronize = "cuEventSynchronize" as "cuEventSynchronize" (event: RawEvent);
    event_elapsed = "cuEventElapsedTime" as "cuEventElapsedTime"
        (milliseconds: *mut f32, start: RawEvent, end: RawEvent);
    event_handle = "cuIpcGetEventHandle" as "cuIpcGetEventHandle"
        (handle: *mut RawHandle, event: RawEvent);
    event_open = "cuIpcOpenEventHandle" as "cuIpcOpenEventHandle"
        (event: *mut RawEvent, handle: RawHandle);
}

impl Symbols {
    /// Loads a library and finds its functions. The library is never unloaded: the driver has threads
    /// and handlers of its own, and its texts are used for ever.
    pub fn load(library: &OsStr) -> Result<Symbols, CudaError> {
        let name = library.to_string_lossy();
        // SAFETY: the library is NVIDIA's driver, or what the user named in its place.
        let loaded = unsafe { Library::new(library) }.map_err(|error| CudaError::Library {
            library: name.to_string(),
            reason: reason(&error),
        })?;
        let symbols = Symbols::resolve(&name, &loaded)?;
        std::mem::forget(loaded);
        Ok(symbols)
    }

    /// The error of a call that returned this status.
    fn error(&self, call: &'static str, code: Status) -> CudaError {
        let name = self.text(self.error_name, code);
        CudaError::Call { call, code, name, meaning: self.text(self.error_string, code) }
    }

    fn text(
        &self,
        function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
        code: Status,
    ) -> &'static str {
        let mut text = std::ptr::null();
        // SAFETY: the function writes a pointer, or null for a code that it does not know.
        let status = unsafe { function(code, &mut text) };
        if status != SUCCESS || text.is_null() {
            return "an unknown error";
        }
        // SAFETY: a text of the driver, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("an unreadable error")
    }
}

fn find<F: Copy>(name: &str, library: &Library, symbol: &'static str) -> Result<F, CudaError> {
    // SAFETY: the list above has the signatures of the driver's functions.
    let found = unsafe { library.get::<F>(symbol) };
    found.map(|function| *function).map_err(|error| CudaError::Symbol {
        library: name.to_owned(),
        symbol,
        reason: reason(&error),
    })
}

/// What the loader said, without what this crate says around it.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
