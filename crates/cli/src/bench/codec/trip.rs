//! One parameter's way through a codec, onto the wire, off it and back.
//!
//! Encodings that are summed travel in a type of their own, so casting to it and back is part of the
//! way; of fp16 and bf16 it is all there is.

use half::{bf16, f16};
use unisono_codec::{BadEncoding, Codec, CodecSpec, Passage, RoundTrip, Task, Wire};

/// A codec and the casts to and from the type in which its encodings travel.
pub struct Trip<'a> {
    /// None where casting is all there is to do.
    codec: Option<RoundTrip<'a>>,
    wire: Cast,
    /// As long as an encoding that is cast. Its values do not matter for how long that takes.
    encoding: Vec<f32>,
}

impl<'a> Trip<'a> {
    /// For the parameter of a task.
    pub fn new(spec: &CodecSpec, codec: &'a dyn Codec, task: Task<'a>) -> Trip<'a> {
        let wire = match codec.passage() {
            Passage::Summed(summed) => summed.wire(),
            Passage::Spans(_) | Passage::Gathered(_) => Wire::F32,
        };
        let is_cast = matches!(spec, CodecSpec::Fp16 | CodecSpec::Bf16);
        let codec = (!is_cast).then(|| RoundTrip::new(codec, task));
        let between = match (&codec, wire) {
            (_, Wire::F32) => 0,
            (Some(codec), _) => codec.bytes() / wire.bytes(),
            (None, _) => task.elements(),
        };
        let encoding = if is_cast { Vec::new() } else { vec![1.0; between] };
        Trip { codec, wire: Cast::new(wire, between), encoding }
    }

    /// Encodes. `values` may be changed.
    pub fn encode(&mut self, values: &mut Vec<f32>) {
        match &mut self.codec {
            None => self.wire.narrow(values),
            Some(codec) => {
                codec.encode(values);
                self.wire.narrow(&self.encoding);
            }
        }
    }

    /// Whether what its encodings leave out is remembered.
    pub fn is_fed(&self) -> bool {
        self.codec.as_ref().is_some_and(RoundTrip::is_fed)
    }

    /// Encodes values and what is owed, and leaves there what is owed now.
    pub fn encode_fed(&mut self, values: &[f32], owed: &mut [f32]) {
        if let Some(codec) = &mut self.codec {
            codec.encode_fed(values, owed);
        }
    }

    /// Decodes what was encoded last.
    pub fn decode(&mut self, into: &mut [f32]) -> Result<(), BadEncoding> {
        match &mut self.codec {
            None => {
                self.wire.widen(into);
                Ok(())
            }
            Some(codec) => {
                self.wire.widen(&mut self.encoding);
                codec.decode(into)
            }
        }
    }

    /// Bytes of the encoding, as they would travel.
    pub fn bytes(&self) -> usize {
        self.codec.as_ref().map_or_else(|| self.wire.bytes(), RoundTrip::bytes)
    }
}

/// What travels, in its type.
enum Cast {
    No,
    Fp16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Cast {
    fn new(wire: Wire, elements: usize) -> Cast {
        match wire {
            Wire::F32 => Cast::No,
            Wire::Fp16 => Cast::Fp16(vec![f16::ZERO; elements]),
            Wire::Bf16 => Cast::Bf16(vec![bf16::ZERO; elements]),
        }
    }

    fn narrow(&mut self, values: &[f32]) {
        match self {
            Cast::No => {}
            Cast::Fp16(wire) => unisono_codec::fp16::encode(values, wire),
            Cast::Bf16(wire) => unisono_codec::bf16::encode(values, wire),
        }
    }

    fn widen(&self, into: &mut [f32]) {
        match self {
            Cast::No => {}
            Cast::Fp16(wire) => unisono_codec::fp16::decode(wire, into),
            Cast::Bf16(wire) => unisono_codec::bf16::decode(wire, into),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Cast::No => 0,
            Cast::Fp16(wire) => size_of_val(&wire[..]),
            Cast::Bf16(wire) => size_of_val(&wire[..]),
        }
    }
}
