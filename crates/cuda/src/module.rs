//! Code for a device.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use crate::context::Context;
use crate::error::CudaError;
use crate::library::{RawFunction, RawModule};
use crate::stream::Stream;

/// Kernels that the driver has compiled for a device. A clone is the same module, which lives as long as
/// any of them and its kernels.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    raw: RawModule,
}

/// A function of a [`Module`] that a device runs.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Module,
    raw: RawFunction,
}

impl Module {
    /// Has the driver compile PTX, which takes a second the first time: it keeps what it has compiled in
    /// the user's home. `name` is for messages.
    pub fn load(context: &Context, name: &str, ptx: &str) -> Result<Module, CudaError> {
        /// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
        const OPTIONS: [c_int; 2] = [5, 6];
        let fault = |code, name_of_code, log: &str| CudaError::Compile {
            module: name.to_owned(),
            code,
            name: name_of_code,
            log: log.trim_end().lines().map(|line| format!("\n  {line}")).collect(),
        };
        let image = CString::new(ptx).map_err(|_| fault(0, "no text", ""))?;
        let mut log = vec![0_u8; 8192];
        let mut options = OPTIONS;
        // Of a size, the driver takes the pointer for the value.
        let mut values = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
        let mut raw = RawModule::NULL;
        let entered = context.enter()?;
        // SAFETY: the text ends with a zero, and there are as many values as options, of their kinds.
        let loaded = unsafe {
            entered.call.module_load(
                &mut raw,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        loaded.map_err(|error| match error {
            CudaError::Call { code, name, .. } => {
                let said = log.split(|&byte| byte == 0).next().unwrap_or_default();
                fault(code, name, &String::from_utf8_lossy(said))
            }
            other => other,
        })?;
        Ok(Module(Arc::new(Loaded { context: context.clone(), raw })))
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let unknown = |_| CudaError::Call {
            call: "cuModuleGetFunction",
            code: crate::library::INVALID_VALUE,
            name: "CUDA_ERROR_INVALID_VALUE",
            meaning: "the name has a zero in it",
        };
        let name = CString::new(name).map_err(unknown)?;
        let mut raw = RawFunction::NULL;
        let entered = self.0.context.enter()?;
        // SAFETY: the module is alive, and the name ends with a zero.
        unsafe { entered.call.module_function(&mut raw, self.0.raw, name.as_ptr())? };
        Ok(Kernel { module: self.clone(), raw })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded here, and its kernels are gone: each has a clone of the module.
        self.context.last(|call| unsafe { call.module_unload(self.raw) });
    }
}

impl Kernel {
    /// Submits `grid` blocks of `block` threads to a stream.
    ///
    /// # Safety
    /// The parameters are pointers to values of the kernel's parameters, in their order; what the kernel
    /// reaches stays valid until it is done; the stream is one of the module's context.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: u32,
        block: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let entered = self.module.0.context.enter()?;
        let extra = std::ptr::null_mut();
        // SAFETY: the caller's promise; the driver copies the parameters before it returns.
        unsafe {
            let parameters = parameters.as_mut_ptr();
            entered.call.launch(
                self.raw,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                stream.raw(),
                parameters,
                extra,
            )
        }
    }
}
