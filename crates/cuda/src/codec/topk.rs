//! topk: the elements of largest magnitude (`kernels/topk.cu`).
//!
//! How many elements are sent is known to the device alone, so every kernel after the selection is launched for
//! as many as there can be.

use unisono_codec::spec::Values;
use unisono_codec::topk::{Plan, SAMPLED_ABOVE, Selection};
use unisono_codec::{BadEncoding, Key, Rounding};

use super::Placement;
use super::cast::Float;
use super::code::{Codecs, Family, THREADS};
use super::quantize::Quantizer;
use super::randk::Strata;
use super::raw::{Into, Owed};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::stream::Stream;

/// Elements that are counted together, as the kernels have it.
const TILE: usize = 4096;
/// Tiles that one block puts in order.
const SPAN: usize = 16;
/// Indices that share a width.
const GROUP: usize = 128;
/// Bytes of a group in the directory.
const ENTRY: usize = 2;
/// Groups whose lengths a block adds up, groups that a block unpacks, elements that it puts in their places, and zeros
/// that it writes.
const ENTRIES: usize = 1024;
const UNPACKED: usize = 32;
const SCATTERED: usize = 1024;
const ZEROS: usize = 16 * 4 * THREADS;
/// Bytes of the kernels' `State`, and where some of its fields are.
const STATE: usize = 64 + 2048 * 4;
const COUNT_AT: usize = 24;
const LENGTH_AT: usize = 40;
const DAMAGE_AT: usize = 56;
/// Bits of what is wrong, below those that say how it is.
const DAMAGE_SHIFT: u32 = 56;

/// Blocks of kernels that go over all elements only where a sample was misleading. More take longer to find
/// that there is nothing to do; fewer leave some of a large device idle.
const SECOND_BLOCKS: usize = 1024;

/// Blocks of the first kernel at the least, for what it clears.
const BEGINNING_BLOCKS: usize = 32;

/// The codec of one parameter, with its memory.
#[derive(Debug)]
pub(super) struct TopK {
    plan: Plan,
    values: ValueCodec,
    elements: usize,
    /// The most elements that are sent.
    most: usize,
    /// What the places are in.
    _memory: DeviceMemory,
    places: Places,
    /// Bytes of what was decoded last.
    decoded: usize,
}

/// How values travel.
#[derive(Clone, Copy, Debug)]
enum ValueCodec {
    F32,
    Float(Float),
    Quantized(Quantizer),
}

/// Where in its memory what is.
#[derive(Clone, Copy, Debug)]
struct Places {
    state: DevicePtr,
    /// Of the decoder.
    read: DevicePtr,
    sample: DevicePtr,
    staged_indices: DevicePtr,
    staged_values: DevicePtr,
    tiles: DevicePtr,
    /// What each span of tiles has, and twice as much room for what the exact cut takes of it.
    spans: DevicePtr,
    tallies: DevicePtr,
    indices: DevicePtr,
    values: DevicePtr,
    encoded: DevicePtr,
    directory: DevicePtr,
    blocks: DevicePtr,
    packed: DevicePtr,
    /// Of the decoder, as all below.
    parts: DevicePtr,
    sums: DevicePtr,
    runs: DevicePtr,
}

/// `ValueBytes` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ValueBytes {
    block: u32,
    scale: u32,
    bits: u32,
    unused: u32,
}

/// `Plan` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Staging {
    state: DevicePtr,
    elements: u64,
    wanted: u64,
    fewest: u64,
    most: u64,
    indices: DevicePtr,
    values: DevicePtr,
    room: u64,
    tiles: DevicePtr,
    spans: DevicePtr,
}

#[repr(C)]
struct Begin {
    staging: Staging,
    owed: Owed,
    strata: Strata,
    sample: DevicePtr,
    rank: u64,
    packed: DevicePtr,
    packed_words: u64,
    sums: DevicePtr,
    sums_words: u64,
}

#[repr(C)]
struct Mark {
    staging: Staging,
    owed: Owed,
}

#[repr(C)]
struct Count {
    staging: Staging,
    owed: Owed,
    shift: u32,
    width: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tally {
    staging: Staging,
    owed: Owed,
    tiles: DevicePtr,
    spans: DevicePtr,
}

#[repr(C)]
struct Order {
    tally: Tally,
    indices: DevicePtr,
    values: DevicePtr,
    takes: u64,
}

#[repr(C)]
struct Widths {
    state: DevicePtr,
    indices: DevicePtr,
    directory: DevicePtr,
    blocks: DevicePtr,
}

#[repr(C)]
struct Pack {
    state: DevicePtr,
    indices: DevicePtr,
    directory: DevicePtr,
    blocks: DevicePtr,
    packed: DevicePtr,
    value_bytes: ValueBytes,
}

#[repr(C)]
struct Finish {
    state: DevicePtr,
    directory: DevicePtr,
    packed: DevicePtr,
    values: DevicePtr,
    encoding: DevicePtr,
}

#[repr(C)]
struct Return {
    state: DevicePtr,
    indices: DevicePtr,
    values: DevicePtr,
    residual: DevicePtr,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Indices {
    state: DevicePtr,
    encoding: DevicePtr,
    length: u64,
    elements: u64,
    most: u64,
    value_bytes: ValueBytes,
    parts: DevicePtr,
    blocks: u64,
    into: Into,
    indices: DevicePtr,
    sums: DevicePtr,
    runs: DevicePtr,
}

#[repr(C)]
struct CopyValues {
    state: DevicePtr,
    encoding: DevicePtr,
    length: u64,
    value_bytes: ValueBytes,
    into: DevicePtr,
}

#[repr(C)]
struct Scatter {
    state: DevicePtr,
    indices: DevicePtr,
    sums: DevicePtr,
    runs: DevicePtr,
    values: DevicePtr,
    length: u64,
    elements: u64,
    into: Into,
    fault: DevicePtr,
}

impl TopK {
    pub(super) fn new(
        codecs: &Codecs,
        rate: f64,
        selection: Selection,
        values: Values,
        elements: usize,
    ) -> Result<TopK, CudaError> {
        let plan = selection.plan(rate, elements);
        let values = match values {
            Values::Fp16 => ValueCodec::Float(Float::Fp16),
            Values::Bf16 => ValueCodec::Float(Float::Bf16),
            Values::Int8 => ValueCodec::Quantized(Quantizer::Int8(Rounding::Nearest)),
            Values::Int4 => ValueCodec::Quantized(Quantizer::Int4(Rounding::Nearest)),
            // As they are.
            _ => ValueCodec::F32,
        };
        let most = plan.wanted.max(plan.most).min(elements);
        let (tiles, groups) = (elements.div_ceil(TILE), most.div_ceil(GROUP));
        let mut bytes = 0;
        let mut place = |size: usize| {
            let at = bytes;
            bytes += size.next_multiple_of(256);
            at
        };
        let state = place(STATE);
        let read = place(STATE);
        let sample = place(plan.sample.unwrap_or(0) * 4);
        let room = room(&plan, elements);
        let (staged_indices, staged_values) = (place(room * 4), place(room * 4));
        let (tile_places, tallies) = (place(tiles * 8), place(tiles * 4));
        let spans = place(3 * tiles.div_ceil(SPAN) * 4);
        let (indices, value_words, encoded) =
            (place(most * 4), place(most * 4), place(most * 4 + 4));
        let directory = place(groups * ENTRY);
        let blocks = place(groups.div_ceil(THREADS / 32) * 4);
        let packed = place(packed_bytes(elements, most));
        let parts = place(parts(most) * 4);
        let (sums, runs) = (place(groups * 4), place(groups.div_ceil(UNPACKED) * 8));
        let memory = DeviceMemory::new(codecs.context(), bytes)?;
        let at = |offset: usize| memory.pointer().offset(offset);
        let places = Places {
            state: at(state),
            read: at(read),
            sample: at(sample),
            staged_indices: at(staged_indices),
            staged_values: at(staged_values),
            tiles: at(tile_places),
            spans: at(spans),
            tallies: at(tallies),
            indices: at(indices),
            values: at(value_words),
            encoded: at(encoded),
            directory: at(directory),
            blocks: at(blocks),
            packed: at(packed),
            parts: at(parts),
            sums: at(sums),
            runs: at(runs),
        };
        let stream = Stream::new(codecs.context(), 0)?;
        // SAFETY: the memory has as many bytes, and nothing else uses it yet.
        unsafe {
            stream.fill(places.state, 0, STATE)?;
            stream.fill(places.read, 0, STATE)?;
            stream.fill(places.read.offset(DAMAGE_AT), 0xff, 8)?;
        }
        stream.synchronize()?;
        Ok(TopK { plan, values, elements, most, _memory: memory, places, decoded: 0 })
    }

    /// Bytes that an encoding has at the most.
    pub(super) fn most_bytes(&self) -> usize {
        let directory = self.most.div_ceil(GROUP) * ENTRY;
        4 + directory + packed_bytes(self.elements, self.most) + self.value_bytes().of(self.most)
    }

    fn value_bytes(&self) -> ValueBytes {
        let (block, scale, bits) = match self.values {
            ValueCodec::F32 => (1, 0, 32),
            ValueCodec::Float(_) => (1, 0, 16),
            ValueCodec::Quantized(Quantizer::Int8(_)) => (256, 2, 8),
            ValueCodec::Quantized(_) => (128, 2, 4),
        };
        ValueBytes { block, scale, bits, unused: 0 }
    }

    /// # Safety
    /// As for [`DeviceCodec::encode`](super::DeviceCodec::encode).
    pub(super) unsafe fn encode(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        key: Key,
        gradient: DevicePtr,
        residual: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CudaError> {
        let p = self.places;
        let fresh = Owed::new(Some(gradient), residual);
        // After all elements were marked, the residual is the sum.
        let marked = match residual {
            None => fresh,
            Some(residual) => Owed::new(None, Some(residual)),
        };
        // SAFETY: every place has room for as much as its kernels touch, in this parameter and of as many
        // elements as can be sent; the rest is the caller's promise.
        unsafe {
            self.begin(codecs, stream, key, fresh)?;
            let tally = match self.plan.sample {
                Some(_) => {
                    let tiles = self.elements.div_ceil(TILE);
                    let call = Mark { staging: self.staging(), owed: fresh };
                    let kernel = match residual {
                        None => "topk_mark",
                        Some(_) => "topk_mark_owed",
                    };
                    codecs.launch(stream, Family::TopK, kernel, tiles, call)?;
                    self.cut_exactly(codecs, stream, marked)?
                }
                None => self.cut_exactly(codecs, stream, fresh)?,
            };
            self.order(codecs, stream, key, Tally { owed: marked, ..tally }, residual)?;
            self.pack(codecs, stream)?;
            let values = match self.values {
                ValueCodec::F32 => p.values,
                _ => p.encoded,
            };
            let (state, directory, packed) = (p.state, p.directory, p.packed);
            let call = Finish { state, directory, packed, values, encoding };
            self.launch_most(codecs, stream, "topk_finish", call)
        }
    }

    /// What all kernels of the selection know.
    fn staging(&self) -> Staging {
        let (p, plan) = (self.places, &self.plan);
        Staging {
            state: p.state,
            elements: self.elements as u64,
            wanted: plan.wanted as u64,
            fewest: plan.fewest as u64,
            most: if plan.sample.is_some() { plan.most as u64 } else { 0 },
            indices: p.staged_indices,
            values: p.staged_values,
            room: room(plan, self.elements) as u64,
            tiles: p.tiles,
            spans: p.spans,
        }
    }

    /// Clears what sums are added to, and finds the cut of the sample, if there is one.
    ///
    /// # Safety
    /// As for `encode`.
    unsafe fn begin(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        key: Key,
        owed: Owed,
    ) -> Result<(), CudaError> {
        let (p, size) = (self.places, self.plan.sample.unwrap_or(0));
        let call = Begin {
            staging: self.staging(),
            owed,
            strata: Strata::new(key, self.elements, size),
            sample: p.sample,
            rank: SAMPLED_ABOVE.min(size) as u64,
            packed: p.packed,
            packed_words: packed_bytes(self.elements, self.most) as u64 / 4,
            sums: p.spans,
            sums_words: 3 * self.spans() as u64,
        };
        let blocks = size.div_ceil(THREADS).max(BEGINNING_BLOCKS);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::TopK, "topk_begin", blocks, call) }
    }

    /// Spans of tiles.
    fn spans(&self) -> usize {
        self.elements.div_ceil(TILE).div_ceil(SPAN)
    }

    /// Finds the cut that takes exactly as many as wanted, and counts what it takes, if it is needed.
    ///
    /// # Safety
    /// As for `encode`.
    unsafe fn cut_exactly(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        owed: Owed,
    ) -> Result<Tally, CudaError> {
        let (p, staging) = (self.places, self.staging());
        let blocks = self.elements.div_ceil(TILE).min(SECOND_BLOCKS);
        let tally =
            Tally { staging, owed, tiles: p.tallies, spans: p.spans.offset(4 * self.spans()) };
        // SAFETY: the kernels take such calls; the rest is the caller's promise.
        unsafe {
            for (shift, width) in [(20, 11), (10, 10), (0, 10)] {
                let call = Count { staging, owed, shift, width };
                codecs.launch(stream, Family::TopK, "topk_count", blocks, call)?;
            }
            codecs.launch(stream, Family::TopK, "topk_tally", blocks, tally)?;
        }
        Ok(tally)
    }

    /// Lists indices and values, and encodes these.
    ///
    /// # Safety
    /// As for `encode`.
    unsafe fn order(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        key: Key,
        tally: Tally,
        residual: Option<DevicePtr>,
    ) -> Result<(), CudaError> {
        let p = self.places;
        let (most, counted) = (self.most, Some(p.state.offset(COUNT_AT)));
        let values = Owed::new(None, Some(p.values));
        let call = Order {
            tally,
            indices: p.indices,
            values: p.values,
            takes: u64::from(matches!(self.values, ValueCodec::F32)),
        };
        // SAFETY: the kernels take such calls; the rest is the caller's promise.
        unsafe {
            codecs.launch(stream, Family::TopK, "topk_order", self.spans(), call)?;
            match self.values {
                ValueCodec::F32 => return Ok(()),
                ValueCodec::Float(float) => {
                    float.encode(codecs, stream, values, most, counted, p.encoded)?;
                }
                ValueCodec::Quantized(quantizer) => {
                    let into = p.encoded;
                    quantizer.encode(codecs, stream, key, 0, values, most, counted, into)?;
                }
            }
            let Some(residual) = residual else { return Ok(()) };
            let call = Return { state: p.state, indices: p.indices, values: p.values, residual };
            self.launch_most(codecs, stream, "topk_return", call)
        }
    }

    /// Packs the indices.
    ///
    /// # Safety
    /// As for `encode`.
    unsafe fn pack(&self, codecs: &Codecs, stream: &Stream) -> Result<(), CudaError> {
        let Places { state, indices, directory, blocks, packed, .. } = self.places;
        let value_bytes = self.value_bytes();
        let count = self.most.div_ceil(GROUP).div_ceil(THREADS / 32);
        // SAFETY: the kernels take such calls; the rest is the caller's promise.
        unsafe {
            let call = Widths { state, indices, directory, blocks };
            codecs.launch(stream, Family::TopK, "topk_widths", count, call)?;
            // The first block says how long the encoding is, even if it has nothing to pack.
            let call = Pack { state, indices, directory, blocks, packed, value_bytes };
            codecs.launch(stream, Family::TopK, "topk_pack", count.max(1), call)
        }
    }

    /// Launches a kernel with a thread for each element that may be sent; one block at least.
    ///
    /// # Safety
    /// As for `Codecs::launch`.
    unsafe fn launch_most<Call>(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        name: &str,
        call: Call,
    ) -> Result<(), CudaError> {
        let blocks = self.most.div_ceil(THREADS).max(1);
        // SAFETY: the caller's promise.
        unsafe { codecs.launch(stream, Family::TopK, name, blocks, call) }
    }

    /// Bytes of the encoding that was submitted last; waits for it.
    pub(super) fn length(&self, stream: &Stream) -> Result<usize, CudaError> {
        let mut length = 0_u64;
        let from = self.places.state.offset(LENGTH_AT);
        // SAFETY: the word is in the state, and the copy is waited for.
        unsafe { stream.copy_to_host((&raw mut length).cast(), from, 8)? };
        stream.synchronize()?;
        Ok(length as usize)
    }

    /// # Safety
    /// As for [`DeviceCodec::decode`](super::DeviceCodec::decode); `fault` is a word of eight bytes.
    #[expect(clippy::too_many_arguments, reason = "one flat call, as its caller")]
    pub(super) unsafe fn decode(
        &mut self,
        codecs: &Codecs,
        stream: &Stream,
        encoding: DevicePtr,
        length: usize,
        into: DevicePtr,
        placement: Placement,
        fault: DevicePtr,
    ) -> Result<(), CudaError> {
        self.decoded = length;
        let p = self.places;
        let Places { read: state, indices, sums, runs, parts, .. } = p;
        let (elements, value_bytes) = (self.elements as u64, self.value_bytes());
        let counted = Some(state.offset(COUNT_AT));
        let decoded = Into::new(p.values, Placement::Overwrite);
        let into = Into::new(into, placement);
        let zeros = match placement {
            Placement::Overwrite => self.elements.div_ceil(ZEROS),
            Placement::Add => 0,
        };
        let directory = self::parts(self.most);
        // SAFETY: every place has room for as many elements as can be sent, and the first kernel refuses more;
        // the rest is the caller's promise.
        unsafe {
            let call = Indices {
                state,
                encoding,
                length: length as u64,
                elements,
                most: self.most as u64,
                value_bytes,
                parts,
                blocks: directory as u64,
                into,
                indices,
                sums,
                runs,
            };
            codecs.launch(stream, Family::TopK, "topk_directory", directory + zeros, call)?;
            let blocks = self.most.div_ceil(GROUP).div_ceil(UNPACKED);
            codecs.launch(stream, Family::TopK, "topk_unpack", blocks, call)?;
            let length = length as u64;
            if !matches!(self.values, ValueCodec::F32) {
                let call = CopyValues { state, encoding, length, value_bytes, into: p.encoded };
                self.launch_most(codecs, stream, "topk_values", call)?;
            }
            let (from, most) = (p.encoded, self.most);
            let (values, length, fault) = match self.values {
                ValueCodec::F32 => (encoding, length, DevicePtr::default()),
                ValueCodec::Float(float) => {
                    float.decode(codecs, stream, from, most, counted, decoded)?;
                    (p.values, 0, DevicePtr::default())
                }
                ValueCodec::Quantized(quantizer) => {
                    quantizer.decode(codecs, stream, from, most, counted, decoded, fault)?;
                    (p.values, 0, fault)
                }
            };
            let blocks = self.most.div_ceil(SCATTERED);
            let call =
                Scatter { state, indices, sums, runs, values, length, elements, into, fault };
            codecs.launch(stream, Family::TopK, "topk_scatter", blocks, call)
        }
    }

    /// What decoders found wrong with indices; waits for them.
    pub(super) fn damage(&self, stream: &Stream) -> Result<Option<BadEncoding>, CudaError> {
        let mut damage = u64::MAX;
        let (from, bytes) = (self.places.read.offset(DAMAGE_AT), size_of_val(&damage));
        // SAFETY: the word is in the state, and the copy is waited for before it is touched again.
        unsafe {
            stream.copy_to_host((&raw mut damage).cast(), from, bytes)?;
            stream.synchronize()?;
            stream.fill(from, 0xff, bytes)?;
        }
        if damage == u64::MAX {
            return Ok(None);
        }
        let (kind, found) = (damage >> DAMAGE_SHIFT, damage & ((1 << DAMAGE_SHIFT) - 1));
        let (codec, elements) = ("topk", self.elements);
        Ok(Some(match kind {
            1 => BadEncoding::Length { codec, expected: found as usize, found: self.decoded },
            2 => BadEncoding::Count { codec, found: found as usize, elements },
            3 => BadEncoding::Field { codec, field: "group", found },
            4 => BadEncoding::Field { codec, field: "padding", found },
            _ => BadEncoding::Index { codec, index: found, elements },
        }))
    }

    /// The codec of values, in errors.
    pub(super) fn values_name(&self) -> &'static str {
        match self.values {
            ValueCodec::Quantized(Quantizer::Int8(_)) => "int8",
            ValueCodec::Quantized(_) => "int4",
            _ => "topk",
        }
    }
}

impl ValueBytes {
    fn of(self, count: usize) -> usize {
        let (block, scale, bits) = (self.block as usize, self.scale as usize, self.bits as usize);
        let rest = match count % block {
            0 => 0,
            rest => scale + (rest * bits).div_ceil(8),
        };
        count / block * (scale + block * bits / 8) + rest
    }
}

/// Elements that can be staged: more, and a sample that is off makes all elements be counted less often.
fn room(plan: &Plan, elements: usize) -> usize {
    match plan.sample {
        Some(_) => (2 * plan.wanted).max(plan.most).min(elements),
        None => 0,
    }
}

/// Blocks that add up how long the groups of as many elements are.
fn parts(count: usize) -> usize {
    count.div_ceil(GROUP).div_ceil(ENTRIES).max(1)
}

/// The most bytes that the groups of as many indices take: 3 bits each above the logarithm of the mean gap, and what
/// fills up a word.
fn packed_bytes(elements: usize, count: usize) -> usize {
    let mean = elements.checked_div(count).unwrap_or(0) + 1;
    let bits = count * (4 + mean.ilog2() as usize);
    bits.div_ceil(32) * 4 + 8
}
