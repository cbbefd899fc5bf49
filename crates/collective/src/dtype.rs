//! Element types and reductions: what a collective call is about.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of the elements of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Dtype {
    /// 32-bit IEEE float.
    F32 = 0,
    /// 64-bit IEEE float.
    F64 = 1,
    /// 16-bit IEEE float; added in f32, rounded after every addition.
    F16 = 2,
    /// bfloat16; added in f32, rounded after every addition.
    Bf16 = 3,
    /// Signed byte, wrapping.
    I8 = 4,
    /// Unsigned byte, wrapping.
    U8 = 5,
    /// Signed 32-bit integer, wrapping.
    I32 = 6,
    /// Signed 64-bit integer, wrapping.
    I64 = 7,
}

impl Dtype {
    /// Every type, in the order of their wire codes.
    pub const ALL: [Dtype; 8] = [
        Dtype::F32,
        Dtype::F64,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::I8,
        Dtype::U8,
        Dtype::I32,
        Dtype::I64,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::I8 | Dtype::U8 => 1,
        }
    }

    /// Whether the order of additions can change the result.
    pub const fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16)
    }

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::I8 => "i8",
            Dtype::U8 => "u8",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
        }
    }

    /// The type with this wire code.
    pub fn from_code(code: u8) -> Option<Dtype> {
        Dtype::ALL.get(code as usize).copied()
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Dtype {
    type Err = String;
    fn from_str(s: &str) -> Result<Dtype, String> {
        Dtype::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            format!("unknown type {s:?}; expected one of f32, f64, f16, bf16, i8, u8, i32, i64")
        })
    }
}

/// A type as the caller calls it. Data that only moves may travel as bytes, and a complex number is
/// reduced as a pair of floats: a message about the call counts in the caller's elements all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Unit(u8);

/// Names and bytes of units, by their codes on the wire. The first stands for the engine's own type.
const UNITS: [(&str, usize); 22] = [
    ("", 0),
    ("float32", 4),
    ("float64", 8),
    ("float16", 2),
    ("bfloat16", 2),
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("int64", 8),
    ("bool", 1),
    ("int16", 2),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("complex32", 4),
    ("complex64", 8),
    ("complex128", 16),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
];

impl Unit {
    /// The engine's own type.
    pub const OWN: Unit = Unit(0);

    /// The unit of this name, if there is one.
    pub fn named(name: &str) -> Option<Unit> {
        let found = UNITS.iter().skip(1).position(|(unit, _)| *unit == name)?;
        Some(Unit(found as u8 + 1))
    }

    /// Its code on the wire, below 32.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The unit with this wire code.
    pub fn from_code(code: u8) -> Option<Unit> {
        (usize::from(code) < UNITS.len()).then_some(Unit(code))
    }

    /// How many elements the caller sees where the engine has `count` of `dtype`, and their type.
    pub fn seen(self, count: u64, dtype: Dtype) -> (u64, &'static str) {
        match UNITS[usize::from(self.0)] {
            (_, 0) => (count, dtype.name()),
            (name, size) => (count.saturating_mul(dtype.size() as u64) / size as u64, name),
        }
    }
}

/// A Rust type that a collective can move and reduce.
///
/// # Safety
/// `DTYPE` must describe the type's size and arithmetic, every bit pattern must be a valid
/// value, and the type must have no padding.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The matching [`Dtype`].
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => {$(
        // SAFETY: a plain number type of the size and arithmetic that `Dtype` documents.
        unsafe impl Element for $t { const DTYPE: Dtype = Dtype::$d; }
    )*};
}
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i8 => I8, u8 => U8, i32 => I32, i64 => I64);

/// How elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Reduction {
    /// Sum, in the canonical order.
    Sum = 0,
    /// Sum, then one division by the number of ranks (integers truncate toward zero).
    Mean = 1,
    /// Smallest; a NaN anywhere gives NaN, and −0 is smaller than +0.
    Min = 2,
    /// Largest; a NaN anywhere gives NaN, and −0 is smaller than +0.
    Max = 3,
    /// Product, in the canonical order.
    Product = 4,
    /// Bitwise and; integers only.
    And = 5,
    /// Bitwise or; integers only.
    Or = 6,
    /// Bitwise exclusive or; integers only.
    Xor = 7,
}

impl Reduction {
    /// Every reduction, in the order of their wire codes.
    pub const ALL: [Reduction; 8] = [
        Reduction::Sum,
        Reduction::Mean,
        Reduction::Min,
        Reduction::Max,
        Reduction::Product,
        Reduction::And,
        Reduction::Or,
        Reduction::Xor,
    ];

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Min => "min",
            Reduction::Max => "max",
            Reduction::Product => "product",
            Reduction::And => "and",
            Reduction::Or => "or",
            Reduction::Xor => "xor",
        }
    }

    /// Whether the reduction is defined for the type.
    pub const fn supports(self, dtype: Dtype) -> bool {
        !matches!(self, Reduction::And | Reduction::Or | Reduction::Xor) || !dtype.is_float()
    }

    /// The reduction with this wire code.
    pub fn from_code(code: u8) -> Option<Reduction> {
        Reduction::ALL.get(code as usize).copied()
    }
}

impl std::fmt::Display for Reduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Reduction {
    type Err = String;
    fn from_str(s: &str) -> Result<Reduction, String> {
        Reduction::ALL.into_iter().find(|r| r.name() == s).ok_or_else(|| {
            format!("unknown reduction {s:?}; expected one of sum, mean, min, max, product, and, or, xor")
        })
    }
}
