//! What a codec is called on the command line and in reports.
//!
//! `NAME[:ARGUMENT…][+VALUES]`, where arguments are separated by commas and `VALUES` is the codec of
//! the values of a sparse one: `int8`, `topk:1%`, `topk:1%,exact+int8`, `powersgd:4+bf16`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bf16::Bf16;
use crate::dgc::{Dgc, DgcSettings};
use crate::fp16::Fp16;
use crate::int4::Int4;
use crate::int8::Int8;
use crate::powersgd::PowerSgd;
use crate::qsgd::Qsgd;
use crate::randk::RandK;
use crate::sign::Sign;
use crate::topk::{Selection, TopK};
use crate::{Codec, Rounding, Spans, Wire};

/// The share of elements that `topk` sends unless it is told another.
const TOPK_RATE: f64 = 0.04;

/// The share of elements that `randk` sends unless it is told another.
const RANDK_RATE: f64 = 0.1;

/// The description of a codec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CodecSpec {
    /// 16-bit IEEE floats.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8 bits per element, and a scale per block.
    Int8(Rounding),
    /// 4 bits per element, and a scale per block.
    Int4(Rounding),
    /// So many bits per element, rounded by chance.
    Qsgd(u32),
    /// 1 bit per element, and a scale per block.
    Sign,
    /// The share of elements that are largest.
    TopK(f64, Selection, Values),
    /// A share of elements, chosen by chance, the same in all shards.
    RandK(f64, Wire),
    /// The share of elements that are largest, with momentum of their own.
    Dgc(DgcSettings, Values),
    /// A matrix of this rank.
    PowerSgd(usize, Wire),
}

/// How the values of a sparse encoding are encoded in turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Values {
    /// As they are.
    #[default]
    F32,
    /// 16-bit IEEE floats.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8 bits each.
    Int8,
    /// 4 bits each.
    Int4,
}

/// What is wrong with the description of a codec.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BadCodec {
    /// There is no such codec.
    #[error(
        "there is no codec {name}; choose fp16, bf16, int8, int4, qsgd, sign, topk, randk, dgc, powersgd, \
         or none"
    )]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The codec takes no such argument.
    #[error("{codec} takes no {argument:?}; {usage}")]
    Argument {
        /// The codec.
        codec: &'static str,
        /// What it does not take.
        argument: String,
        /// What it takes.
        usage: &'static str,
    },
    /// A rule is a pattern and a codec.
    #[error("{text:?} is no rule; write PATTERN=CODEC, such as embed*=none or *.weight=int8")]
    Rule {
        /// What was given as a rule.
        text: String,
    },
}

impl CodecSpec {
    /// Fails if a setting is out of its range. One that was parsed is not; one that came from another
    /// process may be.
    pub fn check(&self) -> Result<(), BadCodec> {
        let out_of_range = |argument: String, usage| Err(bad(self.name(), &argument, usage));
        match self {
            CodecSpec::Qsgd(bits) if !(2..=8).contains(bits) => {
                out_of_range(bits.to_string(), "give 2 to 8 bits")
            }
            CodecSpec::TopK(rate, ..)
            | CodecSpec::RandK(rate, _)
            | CodecSpec::Dgc(DgcSettings { rate, .. }, _)
                if !(1e-5..=0.5).contains(rate) =>
            {
                out_of_range(Rate(*rate).to_string(), RATE)
            }
            CodecSpec::Dgc(DgcSettings { momentum, .. }, _) if !(0.0..1.0).contains(momentum) => {
                out_of_range(format!("momentum={momentum}"), DGC)
            }
            CodecSpec::Dgc(DgcSettings { clip: Some(clip), .. }, _)
                if !clip.is_finite() || *clip <= 0.0 =>
            {
                out_of_range(format!("clip={clip}"), DGC)
            }
            CodecSpec::PowerSgd(rank, _) if !(1..=32).contains(rank) => {
                out_of_range(rank.to_string(), RANK)
            }
            _ => Ok(()),
        }
    }

    /// Makes the codec.
    ///
    /// # Panics
    ///
    /// If a setting is [out of its range](CodecSpec::check).
    pub fn build(&self) -> Arc<dyn Codec> {
        match self {
            CodecSpec::Fp16 => Arc::new(Fp16),
            CodecSpec::Bf16 => Arc::new(Bf16),
            CodecSpec::Int8(rounding) => Arc::new(Int8::new(*rounding)),
            CodecSpec::Int4(rounding) => Arc::new(Int4::new(*rounding)),
            CodecSpec::Qsgd(bits) => Arc::new(Qsgd::new(*bits)),
            CodecSpec::Sign => Arc::new(Sign),
            CodecSpec::TopK(rate, selection, values) => {
                Arc::new(TopK::new(*rate, *selection, values.build()))
            }
            CodecSpec::RandK(rate, wire) => Arc::new(RandK::new(*rate, *wire)),
            CodecSpec::Dgc(settings, values) => {
                Arc::new(Dgc::new(settings.clone(), values.build()))
            }
            CodecSpec::PowerSgd(rank, wire) => Arc::new(PowerSgd::new(*rank, *wire)),
        }
    }

    /// The name without arguments.
    pub fn name(&self) -> &'static str {
        match self {
            CodecSpec::Fp16 => "fp16",
            CodecSpec::Bf16 => "bf16",
            CodecSpec::Int8(_) => "int8",
            CodecSpec::Int4(_) => "int4",
            CodecSpec::Qsgd(_) => "qsgd",
            CodecSpec::Sign => "sign",
            CodecSpec::TopK(..) => "topk",
            CodecSpec::RandK(..) => "randk",
            CodecSpec::Dgc(..) => "dgc",
            CodecSpec::PowerSgd(..) => "powersgd",
        }
    }
}

impl Values {
    fn build(self) -> Option<Arc<dyn Spans>> {
        match self {
            Values::F32 => None,
            Values::Fp16 => Some(Arc::new(Fp16)),
            Values::Bf16 => Some(Arc::new(Bf16)),
            Values::Int8 => Some(Arc::new(Int8::new(Rounding::Nearest))),
            Values::Int4 => Some(Arc::new(Int4::new(Rounding::Nearest))),
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Values::F32 => "",
            Values::Fp16 => "+fp16",
            Values::Bf16 => "+bf16",
            Values::Int8 => "+int8",
            Values::Int4 => "+int4",
        }
    }
}

impl Wire {
    fn suffix(self) -> &'static str {
        match self {
            Wire::F32 => "",
            Wire::Fp16 => "+fp16",
            Wire::Bf16 => "+bf16",
        }
    }
}

impl FromStr for CodecSpec {
    type Err = BadCodec;

    fn from_str(text: &str) -> Result<CodecSpec, BadCodec> {
        let (head, values) = match text.split_once('+') {
            Some((head, values)) => (head, Some(values)),
            None => (text, None),
        };
        let (name, arguments) = head.split_once(':').unwrap_or((head, ""));
        let arguments: Vec<&str> = arguments.split(',').filter(|word| !word.is_empty()).collect();
        let words = Words { arguments, values };
        let spec = match name {
            "fp16" => words.none("fp16").map(|()| CodecSpec::Fp16),
            "bf16" => words.none("bf16").map(|()| CodecSpec::Bf16),
            "int8" => words.rounding("int8").map(CodecSpec::Int8),
            "int4" => words.rounding("int4").map(CodecSpec::Int4),
            "qsgd" => words.qsgd(),
            "sign" => words.none("sign").map(|()| CodecSpec::Sign),
            "topk" => words.topk(),
            "randk" => words.randk(),
            "dgc" => words.dgc(),
            "powersgd" => words.powersgd(),
            _ => Err(BadCodec::Unknown { name: name.to_owned() }),
        }?;
        spec.check().map(|()| spec)
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            CodecSpec::Fp16 | CodecSpec::Bf16 | CodecSpec::Sign => Ok(()),
            CodecSpec::Int8(rounding) | CodecSpec::Int4(rounding) => match rounding {
                Rounding::Nearest => Ok(()),
                Rounding::Stochastic => f.write_str(":stochastic"),
            },
            CodecSpec::Qsgd(bits) => write!(f, ":{bits}"),
            CodecSpec::TopK(rate, selection, values) => {
                let exact = if *selection == Selection::Exact { ",exact" } else { "" };
                write!(f, ":{}{exact}{}", Rate(*rate), values.suffix())
            }
            CodecSpec::RandK(rate, wire) => write!(f, ":{}{}", Rate(*rate), wire.suffix()),
            CodecSpec::Dgc(settings, values) => {
                let usual = DgcSettings::default();
                write!(f, ":{}", Rate(settings.rate))?;
                if settings.momentum != usual.momentum {
                    write!(f, ",momentum={}", settings.momentum)?;
                }
                if settings.nesterov {
                    f.write_str(",nesterov")?;
                }
                match settings.clip {
                    clip if clip == usual.clip => {}
                    Some(clip) => write!(f, ",clip={clip}")?,
                    None => f.write_str(",clip=none")?,
                }
                if settings.ramp != usual.ramp {
                    write!(f, ",ramp={}", settings.ramp)?;
                }
                f.write_str(values.suffix())
            }
            CodecSpec::PowerSgd(rank, wire) => write!(f, ":{rank}{}", wire.suffix()),
        }
    }
}

/// A share of the elements, in percent.
struct Rate(f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Percent of a decimal fraction, without the digits that its binary form adds.
        write!(f, "{}%", (self.0 * 1e8).round() / 1e6)
    }
}

/// The arguments of a description.
struct Words<'a> {
    arguments: Vec<&'a str>,
    values: Option<&'a str>,
}

const RATE: &str = "give the share of elements to send, from 0.001% to 50%, such as 1% or 0.01";

const DGC: &str = "write dgc:RATE[,momentum=0.9][,nesterov][,clip=NORM|none][,ramp=STEPS]";

const RANK: &str = "give a rank of 1 to 32";

impl Words<'_> {
    fn none(self, codec: &'static str) -> Result<(), BadCodec> {
        let usage = "it has no settings";
        match self.arguments.first().copied().or(self.values) {
            Some(word) => Err(bad(codec, word, usage)),
            None => Ok(()),
        }
    }

    fn rounding(mut self, codec: &'static str) -> Result<Rounding, BadCodec> {
        let mut rounding = Rounding::Nearest;
        if let Some(word) = self.arguments.first() {
            rounding = match *word {
                "nearest" => Rounding::Nearest,
                "stochastic" => Rounding::Stochastic,
                _ => return Err(bad(codec, word, "it rounds nearest or stochastic")),
            };
            self.arguments.remove(0);
        }
        self.none(codec).map(|()| rounding)
    }

    fn qsgd(mut self) -> Result<CodecSpec, BadCodec> {
        let mut bits = Qsgd::BITS;
        if let Some(word) = self.arguments.first() {
            bits = word.parse().map_err(|_| bad("qsgd", word, "give 2 to 8 bits"))?;
            self.arguments.remove(0);
        }
        self.none("qsgd").map(|()| CodecSpec::Qsgd(bits))
    }

    fn topk(self) -> Result<CodecSpec, BadCodec> {
        let (mut rate, mut selection) = (TOPK_RATE, Selection::Sampled);
        for word in &self.arguments {
            match *word {
                "exact" => selection = Selection::Exact,
                "sampled" => selection = Selection::Sampled,
                word => rate = share(word).ok_or_else(|| bad("topk", word, RATE))?,
            }
        }
        self.at_most(2, "topk", RATE)?;
        Ok(CodecSpec::TopK(rate, selection, self.sparse_values("topk")?))
    }

    fn randk(self) -> Result<CodecSpec, BadCodec> {
        let mut rate = RANDK_RATE;
        for word in &self.arguments {
            rate = share(word).ok_or_else(|| bad("randk", word, RATE))?;
        }
        self.at_most(1, "randk", RATE)?;
        Ok(CodecSpec::RandK(rate, self.wire("randk")?))
    }

    fn dgc(self) -> Result<CodecSpec, BadCodec> {
        let mut settings = DgcSettings::default();
        for word in &self.arguments {
            let wrong = || bad("dgc", word, DGC);
            match word.split_once('=') {
                None if *word == "nesterov" => settings.nesterov = true,
                None => settings.rate = share(word).ok_or_else(|| bad("dgc", word, RATE))?,
                Some(("momentum", value)) => {
                    settings.momentum = value.parse().map_err(|_| wrong())?;
                }
                Some(("clip", "none")) => settings.clip = None,
                Some(("clip", value)) => {
                    settings.clip = Some(value.parse().map_err(|_| wrong())?);
                }
                Some(("ramp", value)) => settings.ramp = value.parse().map_err(|_| wrong())?,
                Some(_) => return Err(wrong()),
            }
        }
        Ok(CodecSpec::Dgc(settings, self.sparse_values("dgc")?))
    }

    fn powersgd(self) -> Result<CodecSpec, BadCodec> {
        let mut rank = PowerSgd::RANK;
        for word in &self.arguments {
            rank = word.parse().map_err(|_| bad("powersgd", word, RANK))?;
        }
        self.at_most(1, "powersgd", RANK)?;
        Ok(CodecSpec::PowerSgd(rank, self.wire("powersgd")?))
    }

    /// Refuses words beyond so many.
    fn at_most(
        &self,
        count: usize,
        codec: &'static str,
        usage: &'static str,
    ) -> Result<(), BadCodec> {
        match self.arguments.get(count) {
            Some(word) => Err(bad(codec, word, usage)),
            None => Ok(()),
        }
    }

    fn sparse_values(&self, codec: &'static str) -> Result<Values, BadCodec> {
        Ok(match self.values {
            None => Values::F32,
            Some("fp16") => Values::Fp16,
            Some("bf16") => Values::Bf16,
            Some("int8") => Values::Int8,
            Some("int4") => Values::Int4,
            Some(word) => {
                return Err(bad(
                    codec,
                    word,
                    "after + come fp16, bf16, int8 or int4, for its values",
                ));
            }
        })
    }

    fn wire(&self, codec: &'static str) -> Result<Wire, BadCodec> {
        Ok(match self.values {
            None => Wire::F32,
            Some("fp16") => Wire::Fp16,
            Some("bf16") => Wire::Bf16,
            // Anything else cannot be summed while encoded.
            Some(word) => {
                return Err(bad(codec, word, "after + come fp16 or bf16, for its values"));
            }
        })
    }
}

fn bad(codec: &'static str, argument: &str, usage: &'static str) -> BadCodec {
    BadCodec::Argument { codec, argument: argument.to_owned(), usage }
}

/// A share of the elements: `1%` or `0.01`.
fn share(text: &str) -> Option<f64> {
    match text.strip_suffix('%') {
        Some(percent) => Some(percent.parse::<f64>().ok()? / 100.0),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_survive_the_round_trip() {
        for text in [
            "fp16",
            "bf16",
            "int8",
            "int8:stochastic",
            "int4",
            "qsgd:4",
            "sign",
            "topk:1%",
            "topk:0.1%,exact+int8",
            "randk:10%",
            "randk:12.5%+bf16",
            "dgc:0.1%",
            "dgc:0.05%,momentum=0.9,nesterov,clip=none,ramp=7+fp16",
            "powersgd:2",
            "powersgd:32+fp16",
        ] {
            let spec: CodecSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.to_string().parse(), Ok(spec));
        }
        assert_eq!("topk:0.01".parse::<CodecSpec>().unwrap().to_string(), "topk:1%");
        assert_eq!("powersgd".parse::<CodecSpec>().unwrap().to_string(), "powersgd:4");
    }

    #[test]
    fn mistakes_are_explained() {
        for (text, part) in [
            ("zip", "choose fp16"),
            ("", "choose fp16"),
            ("fp16:3", "no settings"),
            ("int8:up", "nearest or stochastic"),
            ("qsgd:9", "2 to 8"),
            ("topk:0", "0.001% to 50%"),
            ("topk:200%", "0.001% to 50%"),
            ("topk:NaN", "0.001% to 50%"),
            ("topk+zip", "after +"),
            ("randk+int8", "after +"),
            ("sign+int8", "no settings"),
            ("dgc:0.1%,momentum=1", "momentum=0.9"),
            ("dgc:0.1%,clip=-1", "clip=NORM"),
            ("powersgd:0", "1 to 32"),
            ("powersgd:2,8", "1 to 32"),
        ] {
            let error = text.parse::<CodecSpec>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
