//! A snapshot as a safetensors file, and back.
//!
//! ```text
//! ┌─────────────┬──────────────────────────────────────┬───────────────────────┐
//! │ length: u64 │ header: JSON, `length` bytes, padded │ data of all tensors … │
//! └─────────────┴──────────────────────────────────────┴───────────────────────┘
//! header: {"__metadata__":{KEY:TEXT, …}, NAME:{"dtype":…,"shape":…,"data_offsets":…}, …}
//! ```
//!
//! Beside the caller's, the metadata has the entries `unisono.format`, `unisono.step` and
//! `unisono.checksum`. The *checksum* is the BLAKE3 hash, in hexadecimal digits, of the whole file
//! with these 64 digits as zeros: no byte can change unnoticed.
//!
//! Tensors are in the order in which the safetensors library writes them, by descending alignment
//! of their type, then by name, and keys are sorted. Equal snapshots are equal files.
//!
//! The library parses headers here, but neither checks nor writes files: it adds up the lengths in
//! a header without regard to overflow, and would write to a temporary file of its own whose
//! leftovers could not be told from other files.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Serialize, Serializer};

use super::error::Attempt;
use super::snapshot::StoredTensor;
use super::{CheckpointError, Loaded, Snapshot, Tensor};

/// The version of this format.
const FORMAT: &str = "1";
/// Keys of the metadata that begin so are not the caller's.
const RESERVED: &str = "unisono.";
const FORMAT_KEY: &str = "unisono.format";
const STEP_KEY: &str = "unisono.step";
const CHECKSUM_KEY: &str = "unisono.checksum";
/// The key that the safetensors format takes for itself.
const METADATA_KEY: &str = "__metadata__";

/// What comes before the digits of the checksum in a header, after a brace or comma. It cannot come
/// up elsewhere: inside a JSON string every quote has a backslash before it, and the name of a
/// tensor has a brace after it.
const BEFORE_CHECKSUM: &[u8] = br#""unisono.checksum":""#;
const CHECKSUM_DIGITS: usize = 2 * blake3::OUT_LEN;

/// The largest header. Larger: a hostile file makes the parser use more memory. Smaller: fewer
/// tensors, of which each takes about a hundred bytes.
const MAX_HEADER: usize = 32 << 20;
/// How many bytes the length of the header takes.
const LENGTH_BYTES: usize = size_of::<u64>();
/// The header's length is a multiple of this, so that the data is aligned.
const ALIGNMENT: usize = 8;
/// Writes are gathered to this size. Larger: more memory. Smaller: more system calls where
/// tensors are small.
const WRITE_BUFFER: usize = 1 << 20;

/// A file in memory, but for the data of its tensors, which stays where it is.
#[derive(Debug)]
pub(super) struct Encoded<'a> {
    /// Length and header.
    head: Vec<u8>,
    /// In the order of the file.
    data: Vec<&'a [u8]>,
}

/// Lays out a file.
pub(super) fn encode<'a>(
    step: u64,
    snapshot: &'a Snapshot,
) -> Result<Encoded<'a>, CheckpointError> {
    check(snapshot).map_err(|flaw| CheckpointError::BadSnapshot { flaw })?;
    let mut tensors: Vec<&Tensor> = snapshot.tensors.iter().collect();
    tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));

    let step = step.to_string();
    let zeros = "0".repeat(CHECKSUM_DIGITS);
    let own = [(FORMAT_KEY, FORMAT), (STEP_KEY, &step), (CHECKSUM_KEY, &zeros)];
    let callers = snapshot.metadata.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let header = Header { metadata: callers.chain(own).collect(), tensors: &tensors };
    let mut header = serde_json::to_vec(&header).expect("strings and numbers have a JSON form");
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    if header.len() > MAX_HEADER {
        let flaw = format!("names and metadata take {} bytes of {MAX_HEADER}", header.len());
        return Err(CheckpointError::BadSnapshot { flaw });
    }

    let mut head = (header.len() as u64).to_le_bytes().to_vec();
    head.append(&mut header);
    let data: Vec<&[u8]> = tensors.iter().map(|tensor| &*tensor.data).collect();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&head);
    for data in &data {
        hasher.update(data);
    }
    checksum_in(&mut head)
        .expect("the header has a checksum")
        .copy_from_slice(hasher.finalize().to_hex().as_bytes());
    Ok(Encoded { head, data })
}

impl Encoded<'_> {
    /// Writes the file.
    pub(super) fn write(&self, file: &mut File) -> io::Result<()> {
        let mut writer = BufWriter::with_capacity(WRITE_BUFFER, file);
        writer.write_all(&self.head)?;
        for data in &self.data {
            writer.write_all(data)?;
        }
        writer.flush()
    }
}

/// Reads a file of `length` bytes. Whatever these say, it allocates no more than the file is long,
/// and what it takes to parse a header of at most [`MAX_HEADER`].
pub(super) fn decode(
    path: &Path,
    file: &mut impl Read,
    length: u64,
) -> Result<Loaded, CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: path.to_owned(), reason };
    let mut rest = length;
    let mut read = |count: u64| -> Result<Vec<u8>, CheckpointError> {
        rest = rest.checked_sub(count).ok_or_else(|| damaged("it is cut short".to_owned()))?;
        match read_exactly(file, count) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(damaged("it shrank while it was read".to_owned()))
            }
            other => other.reading(path),
        }
    };

    let mut head = read(LENGTH_BYTES as u64)?;
    let header_length = u64::from_le_bytes(head[..].try_into().expect("so many bytes were read"));
    if header_length > MAX_HEADER as u64 {
        return Err(damaged(format!("its header would have {header_length} bytes")));
    }
    head.append(&mut read(header_length)?);
    let header: Metadata = serde_json::from_slice(&head[LENGTH_BYTES..])
        .map_err(|error| damaged(format!("its header is not valid: {error}")))?;
    let data = read(header.data_len() as u64)?;
    if rest > 0 {
        let (rest, follow) =
            if rest == 1 { ("1 byte", "follows") } else { (&*format!("{rest} bytes"), "follow") };
        return Err(damaged(format!("{rest} {follow} its end")));
    }

    let Some(checksum) = checksum_in(&mut head) else {
        return Err(CheckpointError::Foreign { path: path.to_owned() });
    };
    let expected = checksum.to_vec();
    checksum.fill(b'0');
    let found = blake3::Hasher::new().update(&head).update(&data).finalize().to_hex();
    if found.as_bytes() != expected {
        return Err(damaged("its checksum is wrong".to_owned()));
    }

    let mut metadata: BTreeMap<String, String> =
        header.metadata().clone().unwrap_or_default().into_iter().collect();
    match metadata.get(FORMAT_KEY) {
        Some(format) if format == FORMAT => {}
        Some(format) => {
            return Err(CheckpointError::Newer { path: path.to_owned(), format: format.clone() });
        }
        None => return Err(damaged("it has no format".to_owned())),
    }
    let step = metadata.get(STEP_KEY).and_then(|step| step.parse().ok());
    let step = step.ok_or_else(|| damaged("it has no step".to_owned()))?;
    metadata.retain(|key, _| !key.starts_with(RESERVED));
    let tensors = header
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let range = info.data_offsets.0..info.data_offsets.1;
            (name, StoredTensor { dtype: info.dtype, shape: info.shape.clone(), range })
        })
        .collect();
    Ok(Loaded { path: path.to_owned(), step, metadata, tensors, data })
}

fn read_exactly(file: &mut impl Read, count: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(count).map_err(io::Error::other)?)?;
    file.take(count).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < count {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

/// Finds what would make a file that no reader understands, or another than was meant.
fn check(snapshot: &Snapshot) -> Result<(), String> {
    if let Some(key) = snapshot.metadata.keys().find(|key| key.starts_with(RESERVED)) {
        return Err(format!("the key {key:?} begins with {RESERVED:?}, which is reserved"));
    }
    let mut names: Vec<&str> = snapshot.tensors.iter().map(|tensor| &*tensor.name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("two tensors are named {:?}", pair[0]));
    }
    if names.contains(&METADATA_KEY) {
        return Err(format!("a tensor cannot be named {METADATA_KEY:?}"));
    }
    for tensor in &snapshot.tensors {
        if tensor.size() != Some(tensor.data.len()) {
            let Tensor { name, dtype, shape, data } = tensor;
            let length = match data.len() {
                1 => "1 byte".to_owned(),
                length => format!("{length} bytes"),
            };
            return Err(format!("{name:?} has {length}, not those of {dtype} × {shape:?}"));
        }
    }
    Ok(())
}

/// The digits of the checksum in the head of a file, if it has some.
fn checksum_in(head: &mut [u8]) -> Option<&mut [u8]> {
    let is_key = |window: &[u8]| b"{,".contains(&window[0]) && &window[1..] == BEFORE_CHECKSUM;
    let length = 1 + BEFORE_CHECKSUM.len();
    let start = head.windows(length).position(is_key)? + length;
    head.get_mut(start..start + CHECKSUM_DIGITS)
}

/// The header as JSON.
struct Header<'a> {
    metadata: BTreeMap<&'a str, &'a str>,
    /// In the order of the file.
    tensors: &'a [&'a Tensor<'a>],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(METADATA_KEY, &self.metadata)?;
        let mut start = 0;
        for tensor in self.tensors {
            let end = start + tensor.data.len();
            let info = TensorInfo {
                dtype: tensor.dtype,
                shape: tensor.shape.to_vec(),
                data_offsets: (start, end),
            };
            map.serialize_entry(&tensor.name, &info)?;
            start = end;
        }
        map.end()
    }
}
