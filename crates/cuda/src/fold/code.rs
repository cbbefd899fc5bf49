//! The kernels as PTX, which `scripts/check-kernels` compiles from their sources.

use unisono_collective::Dtype;

use crate::device::Capability;

/// The oldest devices that there is code for: Volta.
pub const OLDEST: Capability = Capability { major: 7, minor: 0 };

/// The first devices that round bf16 by an instruction: Ampere.
const ROUNDS_BF16: Capability = Capability { major: 8, minor: 0 };

/// The kernels of a type for devices of a generation.
pub fn ptx(dtype: Dtype, capability: Capability) -> &'static str {
    macro_rules! code {
        ($file:literal) => {
            include_str!(concat!("../../kernels/ptx/", $file, ".ptx"))
        };
    }
    match dtype {
        Dtype::F32 => code!("fold_f32_sm70"),
        Dtype::F64 => code!("fold_f64_sm70"),
        Dtype::F16 => code!("fold_f16_sm70"),
        Dtype::Bf16 if capability < ROUNDS_BF16 => code!("fold_bf16_sm70"),
        Dtype::Bf16 => code!("fold_bf16_sm80"),
        Dtype::I8 => code!("fold_i8_sm70"),
        Dtype::U8 => code!("fold_u8_sm70"),
        Dtype::I32 => code!("fold_i32_sm70"),
        Dtype::I64 => code!("fold_i64_sm70"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{FoldKernel, LIST_INPUTS};
    use super::*;

    #[test]
    fn every_kernel_is_there() {
        for capability in [OLDEST, ROUNDS_BF16] {
            for dtype in Dtype::ALL {
                let ptx = ptx(dtype, capability);
                let names = FoldKernel::all(dtype).map(|kernel| kernel.to_string());
                for name in names.chain([LIST_INPUTS.to_owned()]) {
                    assert!(ptx.contains(&format!(".entry {name}(")), "{name} for {capability}");
                }
                let entries = ptx.matches(".entry ").count();
                assert_eq!(entries, FoldKernel::all(dtype).count() + 1, "{dtype}");
            }
        }
    }

    #[test]
    fn nothing_is_fused_flushed_or_approximated() {
        let forbidden = ["fma.rn.f32", "fma.rn.f64", "mad.f32", ".ftz", ".approx", "div.full"];
        for capability in [OLDEST, ROUNDS_BF16] {
            for dtype in Dtype::ALL {
                let ptx = ptx(dtype, capability);
                let found = forbidden.into_iter().find(|&word| ptx.contains(word));
                assert_eq!(found, None, "{dtype} for {capability}");
            }
        }
    }
}
