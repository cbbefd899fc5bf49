//! The kernels of codecs as PTX, which `scripts/check-kernels` compiles from their sources.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use super::CodecError;
use crate::context::Context;
use crate::error::CudaError;
use crate::fold::OLDEST;
use crate::module::{Kernel, Module};
use crate::stream::Stream;

/// Threads of a block, as the kernels have it.
pub(super) const THREADS: usize = 256;

/// Kernels that are one source, and are loaded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// 16-bit floats.
    Cast,
    /// Blocks of codes.
    Quantize,
    /// Signs.
    Sign,
    /// The largest elements.
    TopK,
    /// Elements drawn at random.
    RandK,
    /// Thin matrices.
    PowerSgd,
    /// Units of gradients.
    Scale,
}

impl Family {
    const ALL: [Family; 7] = [
        Family::Cast,
        Family::Quantize,
        Family::Sign,
        Family::TopK,
        Family::RandK,
        Family::PowerSgd,
        Family::Scale,
    ];

    fn name(self) -> &'static str {
        match self {
            Family::Cast => "cast",
            Family::Quantize => "quantize",
            Family::Sign => "sign",
            Family::TopK => "topk",
            Family::RandK => "randk",
            Family::PowerSgd => "powersgd",
            Family::Scale => "scale",
        }
    }

    fn ptx(self) -> &'static str {
        macro_rules! code {
            ($file:literal) => {
                include_str!(concat!("../../kernels/ptx/", $file, "_sm70.ptx"))
            };
        }
        match self {
            Family::Cast => code!("cast"),
            Family::Quantize => code!("quantize"),
            Family::Sign => code!("sign"),
            Family::TopK => code!("topk"),
            Family::RandK => code!("randk"),
            Family::PowerSgd => code!("powersgd"),
            Family::Scale => code!("scale"),
        }
    }

    fn kernels(self) -> &'static [&'static str] {
        match self {
            Family::Cast => &[
                "cast_encode_fp16",
                "cast_encode_fp16_owed",
                "cast_decode_fp16",
                "cast_encode_bf16",
                "cast_encode_bf16_owed",
                "cast_decode_bf16",
            ],
            Family::Quantize => &[
                "quantize_encode_int8",
                "quantize_encode_int8_owed",
                "quantize_decode_int8",
                "quantize_encode_int4",
                "quantize_encode_int4_owed",
                "quantize_decode_int4",
                "quantize_encode_qsgd",
                "quantize_encode_qsgd_owed",
                "quantize_decode_qsgd",
            ],
            Family::Sign => &["sign_encode", "sign_encode_owed", "sign_decode"],
            Family::TopK => &[
                "topk_begin",
                "topk_mark",
                "topk_mark_owed",
                "topk_count",
                "topk_tally",
                "topk_order",
                "topk_widths",
                "topk_pack",
                "topk_finish",
                "topk_return",
                "topk_directory",
                "topk_unpack",
                "topk_values",
                "topk_scatter",
            ],
            Family::RandK => &["randk_absorb", "randk_encode", "randk_decode"],
            Family::PowerSgd => &[
                "powersgd_times",
                "powersgd_transposed_times",
                "powersgd_expand",
                "powersgd_settle",
                "powersgd_normalize",
            ],
            Family::Scale => {
                &["scale_measure_rows", "scale_measure_columns", "scale_divide", "scale_multiply"]
            }
        }
    }
}

/// The kernels of all codecs of a device, each family loaded when it is first needed. A clone is the same.
#[derive(Clone, Debug)]
pub struct Codecs(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    /// By the number of the family; their kernels in the order of [`Family::kernels`].
    families: [OnceLock<Vec<Kernel>>; Family::ALL.len()],
}

impl Codecs {
    /// The codecs of a device.
    pub fn load(context: &Context) -> Result<Codecs, CodecError> {
        let capability = context.device().capability()?;
        if capability < OLDEST {
            return Err(CodecError::TooOld { capability, oldest: OLDEST });
        }
        let families = [const { OnceLock::new() }; Family::ALL.len()];
        Ok(Codecs(Arc::new(Loaded { context: context.clone(), families })))
    }

    /// The device that they are of.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Loads a family, so that no call does: it takes a fraction of a second.
    pub(super) fn prepare(&self, family: Family) -> Result<&[Kernel], CudaError> {
        let cell = &self.0.families[family as usize];
        if let Some(kernels) = cell.get() {
            return Ok(kernels);
        }
        let module = Module::load(&self.0.context, family.name(), family.ptx())?;
        let names = family.kernels().iter();
        let kernels = names.map(|name| module.kernel(name)).collect::<Result<_, _>>()?;
        // Two threads may load them at once; the second's are dropped.
        Ok(cell.get_or_init(|| kernels))
    }

    /// Submits `blocks` blocks of a kernel; nothing if there are none.
    ///
    /// # Safety
    /// The kernel is one of the family and takes such a call; what that names is valid until it is done,
    /// and the stream is one of this device's context.
    pub(super) unsafe fn launch<Call>(
        &self,
        stream: &Stream,
        family: Family,
        name: &str,
        blocks: usize,
        mut call: Call,
    ) -> Result<(), CudaError> {
        if blocks == 0 {
            return Ok(());
        }
        let kernels = self.prepare(family)?;
        let number = family.kernels().iter().position(|listed| *listed == name);
        let kernel = &kernels[number.expect("a kernel of the family")];
        // More blocks than a launch can have would be more elements than a device has memory for.
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let mut parameters = [(&raw mut call).cast::<c_void>()];
        // SAFETY: the kernel takes one value of this type; the rest is the caller's promise.
        unsafe { kernel.launch(stream, blocks, THREADS as u32, &mut parameters) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_there() {
        for family in Family::ALL {
            let ptx = family.ptx();
            for name in family.kernels() {
                assert!(name.starts_with(family.name()), "{name}");
                assert!(ptx.contains(&format!(".entry {name}(")), "{name}");
            }
            assert_eq!(ptx.matches(".entry ").count(), family.kernels().len(), "{family:?}");
        }
    }

    #[test]
    fn nothing_is_fused_flushed_or_approximated() {
        for family in Family::ALL {
            for word in ["mad.f32", ".ftz", ".approx", "div.full"] {
                assert!(!family.ptx().contains(word), "{word} in {family:?}");
            }
        }
    }
}
