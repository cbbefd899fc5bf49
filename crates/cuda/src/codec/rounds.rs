//! Encodings that are [summed](unisono_codec::Summed), round by round: what a rank does between the sums.
//!
//! What is encoded and what is decoded are f32 here. How they travel is up to who sums them.

use unisono_codec::{Passage, Task, Wire};

use super::powersgd::How;
use super::randk::absorb;
use super::raw::expect_f32;
use super::{CodecError, DeviceCodec, Method};
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::stream::Stream;

impl DeviceCodec {
    /// How many sums it takes, and the type in which their elements travel; `None` if encodings are not summed.
    pub fn rounds(&self) -> Option<(usize, Wire)> {
        match self.host.passage() {
            Passage::Summed(summed) => Some((summed.rounds(), summed.wire())),
            Passage::Spans(_) | Passage::Gathered(_) => None,
        }
    }

    /// Elements of the encoding in one round; none if encodings are not summed.
    pub fn round_elements(&self, round: usize) -> usize {
        match &self.method {
            Method::Cast(_) => self.elements,
            Method::RandK(randk) => randk.chosen(self.elements),
            Method::PowerSgd(low_rank) => low_rank.round_elements(round),
            Method::Quantize(_) | Method::Sign | Method::TopK(_) => 0,
        }
    }

    /// What all ranks remember alike, if there is something, and it is there: after the first encoding, or
    /// [`DeviceCodec::remember`].
    pub fn remembered(&self) -> Option<&DeviceMemory> {
        match &self.method {
            Method::PowerSgd(low_rank) => low_rank.remembered(),
            _ => None,
        }
    }

    /// Makes this what all ranks remember alike. Waits for the stream.
    ///
    /// # Panics
    /// If the codec remembers something of another length.
    pub fn remember(&mut self, stream: &Stream, values: &[f32]) -> Result<(), CodecError> {
        match &mut self.method {
            Method::PowerSgd(low_rank) => Ok(low_rank.remember(stream, values)?),
            _ => {
                assert!(values.is_empty(), "{} remembers nothing", self.name);
                Ok(())
            }
        }
    }

    /// Submits to a stream: adds a gradient to its residual.
    ///
    /// # Safety
    /// Both are valid for as many f32 as the parameter has, on the device, until it is done; they do not overlap,
    /// and nothing else touches the residual or writes the gradient meanwhile. The stream is one of this device's
    /// context.
    pub unsafe fn absorb(
        &self,
        stream: &Stream,
        gradient: DevicePtr,
        residual: DevicePtr,
    ) -> Result<(), CodecError> {
        expect_f32(Some(gradient))?;
        expect_f32(Some(residual))?;
        // SAFETY: the caller's promise.
        unsafe { Ok(absorb(&self.codecs, stream, gradient, residual, self.elements)?) }
    }

    /// Submits to a stream: encodes `values`, a gradient or what is owed with it, for a round. `given` is the
    /// [settled](DeviceCodec::settle) mean of the round before; the first has none. What is
    /// [remembered](DeviceCodec::remember) must be there.
    ///
    /// # Safety
    /// As for [`DeviceCodec::absorb`]; `into` is valid for [`DeviceCodec::round_elements`].
    ///
    /// # Panics
    /// If the task is of another shape, or the codec is none whose encodings are summed.
    pub unsafe fn encode_round(
        &self,
        stream: &Stream,
        task: &Task<'_>,
        values: DevicePtr,
        given: Option<DevicePtr>,
        into: DevicePtr,
    ) -> Result<(), CodecError> {
        assert_eq!(task.shape, self.shape, "the shape that the codec was made for");
        expect_f32(Some(values))?;
        expect_f32(Some(into))?;
        let codecs = &self.codecs;
        // SAFETY: the caller's promise.
        unsafe {
            match (&self.method, given) {
                (Method::Cast(_), _) => stream.copy_on_device(into, values, self.elements * 4)?,
                (Method::RandK(randk), _) => randk.gather(codecs, stream, task, values, into)?,
                (Method::PowerSgd(low_rank), None) => {
                    low_rank.times(codecs, stream, values, into)?;
                }
                (Method::PowerSgd(low_rank), Some(left)) => {
                    low_rank.transposed_times(codecs, stream, values, left, into)?;
                }
                _ => panic!("encodings of {} are not summed", self.name),
            }
        }
        Ok(())
    }

    /// Submits to a stream: prepares the mean of a round that is not the last for the next, in place.
    ///
    /// # Safety
    /// As for [`DeviceCodec::encode_round`], of which `mean` is what came of `into`.
    pub unsafe fn settle(&self, stream: &Stream, mean: DevicePtr) -> Result<(), CodecError> {
        if let Method::PowerSgd(low_rank) = &self.method {
            // SAFETY: the caller's promise.
            unsafe { low_rank.settle(&self.codecs, stream, mean)? };
        }
        Ok(())
    }

    /// Submits to a stream: decodes the mean gradient from the means of all rounds, takes what that has paid from
    /// what is owed, and renews what is remembered. The means are used up.
    ///
    /// # Safety
    /// As for [`DeviceCodec::encode_round`], of which `means` are what came of every `into`; `gradient`, and `owed`,
    /// are valid for as many f32 as the parameter has. None of them overlaps another.
    ///
    /// # Panics
    /// If the task is of another shape, or the codec is none whose encodings are summed.
    pub unsafe fn decode_rounds(
        &self,
        stream: &Stream,
        task: &Task<'_>,
        means: &[DevicePtr],
        owed: Option<DevicePtr>,
        gradient: DevicePtr,
    ) -> Result<(), CodecError> {
        assert_eq!(task.shape, self.shape, "the shape that the codec was made for");
        expect_f32(Some(gradient))?;
        expect_f32(owed)?;
        let codecs = &self.codecs;
        // SAFETY: the caller's promise.
        unsafe {
            match (&self.method, means) {
                (Method::Cast(_), [mean]) => {
                    stream.copy_on_device(gradient, *mean, self.elements * 4)?;
                }
                (Method::RandK(randk), [mean]) => {
                    if self.elements > 0 {
                        stream.fill_words(gradient, 0, self.elements)?;
                    }
                    randk.scatter(codecs, stream, task, *mean, gradient)?;
                    if let Some(owed) = owed {
                        // What was sent is owed no more, whatever it was: also where it was infinite.
                        let chosen = randk.chosen(self.elements);
                        if chosen > 0 {
                            stream.fill_words(*mean, 0, chosen)?;
                        }
                        randk.scatter(codecs, stream, task, *mean, owed)?;
                    }
                }
                (Method::PowerSgd(low_rank), [left, right]) => {
                    let (left, right) = (*left, *right);
                    low_rank.expand(codecs, stream, left, right, gradient, How::Writes)?;
                    if let Some(owed) = owed {
                        low_rank.expand(codecs, stream, left, right, owed, How::Takes)?;
                    }
                    low_rank.normalize(codecs, stream, task, right)?;
                }
                _ => panic!("encodings of {} are not summed in {} rounds", self.name, means.len()),
            }
        }
        Ok(())
    }

    /// Submits to a stream: casts f32 to the 16-bit float in which they travel, or back.
    ///
    /// # Safety
    /// Both are valid for so many elements, on the device, until it is done; they do not overlap, and nothing else
    /// touches the second or writes the first meanwhile.
    pub(crate) unsafe fn cast_round(
        &self,
        stream: &Stream,
        wire: Wire,
        back: bool,
        elements: usize,
        from: DevicePtr,
        into: DevicePtr,
    ) -> Result<(), CodecError> {
        // SAFETY: the caller's promise.
        unsafe { super::powersgd::cast(&self.codecs, stream, wire, back, elements, from, into)? };
        Ok(())
    }
}
