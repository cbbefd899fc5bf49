//! The functions of NCCL, found at run time.
//!
//! Each is listed once, with its parameters, as the headers of NCCL 2.14 and all later ones have them.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::sync::Arc;

use libloading::Library;

use super::error::{Looked, NcclError, NcclVersion};
use super::places;
use crate::library::{DevicePtr, RawStream};

/// What a function of NCCL returns, an `ncclResult_t`.
pub type Status = c_int;

/// `ncclSuccess`.
pub const SUCCESS: Status = 0;
/// `ncclInvalidUsage`: of a communicator that forms, two ranks on one device among others.
pub const INVALID_USAGE: Status = 5;
/// `ncclInProgress`: the call goes on in another thread.
pub const IN_PROGRESS: Status = 7;

/// `ncclUint8`: data that only moves.
pub const BYTES: c_int = 1;

/// The first version whose communicators need not block.
pub const OLDEST: NcclVersion = NcclVersion { major: 2, minor: 14, patch: 0 };

/// An `ncclComm_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct RawComm(pub *mut c_void);

// SAFETY: a name of something in NCCL, which is used by one thread at a time.
unsafe impl Send for RawComm {}

/// An `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// An `ncclConfig_t` as NCCL 2.14 has it. Later ones have more fields, and read only as many bytes as `size`
/// says, and of these only the fields that existed in `version`.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// The bytes that fill up the structure; `cgaClusterSize` in later versions, which do not read it.
    undefined: c_int,
}

impl Config {
    /// Of a communicator whose calls do not block.
    pub const NON_BLOCKING: Config = Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 21_400,
        blocking: 0,
        undefined: c_int::MIN,
    };
}

macro_rules! symbols {
    ($($name:ident = $symbol:literal ($($parameter:ident: $type:ty),*);)*) => {
        /// Every function that is used.
        struct Symbols {
            $($name: unsafe extern "C" fn($($type),*) -> Status,)*
            error_string: unsafe extern "C" fn(Status) -> *const c_char,
            last_error: unsafe extern "C" fn(*mut c_void) -> *const c_char,
        }

        impl Symbols {
            fn resolve(library: &Library) -> Result<Symbols, String> {
                Ok(Symbols {
                    $($name: find(library, $symbol)?,)*
                    error_string: find(library, "ncclGetErrorString")?,
                    last_error: find(library, "ncclGetLastError")?,
                })
            }
        }

        impl Nccl {
            $(
                #[doc = concat!("`", $symbol, "`. A call that goes on in another thread is no error.")]
                ///
                /// # Safety
                /// As NCCL's documentation says.
                #[allow(clippy::too_many_arguments, reason = "as many as NCCL's function has")]
                pub unsafe fn $name(&self, $($parameter: $type),*) -> Result<(), NcclError> {
                    // SAFETY: the caller's promise; `resolve` found the function of this name.
                    match unsafe { (self.0.symbols.$name)($($parameter),*) } {
                        SUCCESS | IN_PROGRESS => Ok(()),
                        code => Err(self.error($symbol, code)),
                    }
                }
            )*
        }
    };
}
symbols! {
    unique_id = "ncclGetUniqueId" (id: *mut UniqueId);
    init = "ncclCommInitRankConfig"
        (comm: *mut RawComm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config);
    async_error = "ncclCommGetAsyncError" (comm: RawComm, status: *mut Status);
    finalize = "ncclCommFinalize" (comm: RawComm);
    destroy = "ncclCommDestroy" (comm: RawComm);
    abort = "ncclCommAbort" (comm: RawComm);
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
    send = "ncclSend"
        (from: DevicePtr, count: usize, dtype: c_int, peer: c_int, comm: RawComm, stream: RawStream);
    receive = "ncclRecv"
        (into: DevicePtr, count: usize, dtype: c_int, peer: c_int, comm: RawComm, stream: RawStream);
    all_gather = "ncclAllGather"
        (from: DevicePtr, into: DevicePtr, count: usize, dtype: c_int, comm: RawComm, stream: RawStream);
    all_reduce = "ncclAllReduce"
        (from: DevicePtr, into: DevicePtr, count: usize, dtype: c_int, reduction: c_int, comm: RawComm,
         stream: RawStream);
}

/// NCCL: loaded, and new enough. It is never unloaded, for it has threads of its own.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

struct Loaded {
    library: String,
    version: NcclVersion,
    symbols: Symbols,
}

impl Nccl {
    /// Loads the first library that will do: this one if it is named, else one of the usual places.
    pub fn load(named: Option<&OsStr>) -> Result<Nccl, NcclError> {
        let candidates =
            named.map_or_else(places::candidates, |library| vec![OsString::from(library)]);
        let mut looked = Vec::new();
        let mut newest: Option<(NcclVersion, String)> = None;
        for candidate in candidates {
            let library = candidate.to_string_lossy().into_owned();
            let reason = match Nccl::load_from(&candidate) {
                Ok(nccl) => return Ok(nccl),
                Err(Unfit::Other(reason)) => reason,
                Err(Unfit::Old(version)) => {
                    if newest.as_ref().is_none_or(|(newest, _)| version > *newest) {
                        newest = Some((version, library.clone()));
                    }
                    format!("version {version}")
                }
            };
            looked.push(Looked { library, reason });
        }
        Err(match newest {
            Some((version, library)) => {
                NcclError::TooOld { library, version, oldest: OLDEST, looked }
            }
            None => NcclError::NotFound { looked },
        })
    }

    fn load_from(library: &OsStr) -> Result<Nccl, Unfit> {
        // SAFETY: the library is NVIDIA's, or what the user named in its place.
        let loaded =
            unsafe { Library::new(library) }.map_err(|error| Unfit::Other(reason(&error)))?;
        type Version = unsafe extern "C" fn(*mut c_int) -> Status;
        let version: Version = find(&loaded, "ncclGetVersion").map_err(Unfit::Other)?;
        let mut code = 0;
        // SAFETY: the function writes an integer.
        if unsafe { version(&mut code) } != SUCCESS {
            return Err(Unfit::Other("it does not tell its version".into()));
        }
        let version = NcclVersion::of_code(code);
        if version < OLDEST {
            return Err(Unfit::Old(version));
        }
        let symbols = Symbols::resolve(&loaded).map_err(Unfit::Other)?;
        std::mem::forget(loaded);
        let library = library.to_string_lossy().into_owned();
        Ok(Nccl(Arc::new(Loaded { library, version, symbols })))
    }

    /// Where it was loaded from.
    pub fn library(&self) -> &str {
        &self.0.library
    }

    /// What it is.
    pub fn version(&self) -> NcclVersion {
        self.0.version
    }

    /// The error of a call that returned this status.
    pub fn error(&self, call: &'static str, code: Status) -> NcclError {
        // SAFETY: the functions give texts of NCCL, the second one of the last error in the process.
        let (meaning, detail) = unsafe {
            let symbols = &self.0.symbols;
            (text((symbols.error_string)(code)), text((symbols.last_error)(std::ptr::null_mut())))
        };
        NcclError::Call { call, code, meaning, detail: detail.trim().to_owned() }
    }
}

/// Why a library will not do.
enum Unfit {
    Old(NcclVersion),
    Other(String),
}

/// # Safety
/// It is null or a text.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn find<F: Copy>(library: &Library, symbol: &'static str) -> Result<F, String> {
    // SAFETY: the list above has the signatures of NCCL's functions.
    let found = unsafe { library.get::<F>(symbol) };
    found.map(|function| *function).map_err(|error| format!("no {symbol}: {}", reason(&error)))
}

/// What the loader said, without what this crate says around it.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
