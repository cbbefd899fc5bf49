//! The format by itself, in memory.

use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};

use super::*;

fn small() -> Snapshot<'static> {
    let mut snapshot = Snapshot::new();
    snapshot.set("seed", 7);
    snapshot.set("text", "line\nbreak, \u{1f} and \"quotes\"");
    snapshot.tensors = vec![
        tensor("mask", Dtype::U8, &[3], &[1, 0, 1]),
        Tensor::from_f32("weights", &[2usize, 1][..], &[1.5, -2.0]),
        Tensor::from_f32("bias", vec![], &[0.25]),
        tensor("nothing", Dtype::F16, &[4, 0], &[]),
    ];
    snapshot
}

fn tensor<'a>(name: &'a str, dtype: Dtype, shape: &'a [usize], data: &'a [u8]) -> Tensor<'a> {
    Tensor { name: name.into(), dtype, shape: shape.into(), data: data.into() }
}

fn bytes(step: u64, snapshot: &Snapshot) -> Vec<u8> {
    let encoded = encode(step, snapshot).unwrap();
    [&[&encoded.head[..]], &encoded.data[..]].concat().concat()
}

fn read(mut bytes: &[u8]) -> Result<Loaded, CheckpointError> {
    let length = bytes.len() as u64;
    decode(Path::new("a file"), &mut bytes, length)
}

/// A file with any header and data; the checksum, if the header has a place for it, is right.
fn forge(header: &str, data: &[u8]) -> Vec<u8> {
    let mut head = (header.len() as u64).to_le_bytes().to_vec();
    head.extend(header.bytes());
    if let Some(checksum) = checksum_in(&mut head) {
        checksum.fill(b'0');
    }
    let hash = blake3::Hasher::new().update(&head).update(data).finalize().to_hex();
    if let Some(checksum) = checksum_in(&mut head) {
        checksum.copy_from_slice(hash.as_bytes());
    }
    [&head, data].concat()
}

#[test]
fn what_was_written_is_read() {
    let snapshot = small();
    let loaded = read(&bytes(200, &snapshot)).unwrap();
    assert_eq!(loaded.step(), 200);
    assert_eq!(loaded.metadata(), &snapshot.metadata);
    let mut tensors = snapshot.tensors.clone();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(loaded.tensors().collect::<Vec<_>>(), tensors);
    assert_eq!(loaded.tensor("weights").unwrap().to_f32().unwrap(), [1.5, -2.0]);
    assert_eq!(loaded.tensor("mask").unwrap().to_f32(), None);
    assert_eq!(loaded.tensor("none"), None);
    assert_eq!(loaded.value::<u64>("seed").unwrap(), 7);
    for key in ["text", "none", STEP_KEY] {
        let error = loaded.value::<u64>(key).unwrap_err();
        assert!(matches!(error, CheckpointError::Entry { .. }), "{error}");
    }
}

#[test]
fn other_readers_of_the_format_understand_the_file() {
    let bytes = bytes(200, &small());
    let (length, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(length % ALIGNMENT, 0);
    assert_eq!(header.offset_keys(), ["bias", "weights", "nothing", "mask"]);
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!((&*metadata["seed"], &*metadata[STEP_KEY]), ("7", "200"));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for tensor in small().tensors {
        let view = file.tensor(&tensor.name).unwrap();
        assert_eq!(view.dtype(), tensor.dtype);
        assert_eq!((view.shape(), view.data()), (&*tensor.shape, &*tensor.data));
    }
}

#[test]
fn equal_snapshots_are_equal_files() {
    let mut other = small();
    other.tensors.reverse();
    assert_eq!(bytes(3, &small()), bytes(3, &other));
    assert_ne!(bytes(3, &small()), bytes(4, &small()));
}

#[test]
fn an_empty_snapshot_is_a_snapshot() {
    let loaded = read(&bytes(0, &Snapshot::new())).unwrap();
    assert_eq!((loaded.step(), loaded.metadata().len(), loaded.tensors().len()), (0, 0, 0));
}

#[test]
fn every_change_of_a_byte_is_noticed() {
    let good = bytes(200, &small());
    for position in 0..good.len() {
        for change in 1..=255 {
            let mut bad = good.clone();
            bad[position] ^= change;
            assert!(read(&bad).is_err(), "byte {position} changed by {change:#x}");
        }
    }
    read(&good).unwrap();
}

#[test]
fn every_other_length_is_noticed() {
    let good = bytes(200, &small());
    for length in 0..good.len() {
        let error = read(&good[..length]).unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{length}: {error}");
    }
    let error = read(&[&good[..], b"\0"].concat()).unwrap_err();
    assert!(error.to_string().contains("1 byte follows its end"), "{error}");
    // The length of the file may be out of date, too.
    let error = decode(Path::new("a file"), &mut &good[..9], good.len() as u64).unwrap_err();
    assert!(error.to_string().contains("shrank"), "{error}");
}

#[test]
fn texts_that_look_like_the_checksum_are_not_taken_for_it() {
    let mut snapshot = small();
    for key in ["a\"unisono.checksum", "\\\"unisono.checksum", ",\"unisono.checksum"] {
        snapshot.set(key, format!("{{{}{}\"", ",\"unisono.checksum\":\"", "0".repeat(64)));
    }
    snapshot.tensors.push(tensor("unisono.checksum", Dtype::U8, &[1], &[9]));
    let loaded = read(&bytes(1, &snapshot)).unwrap();
    assert_eq!(loaded.metadata(), &snapshot.metadata);
}

#[test]
fn files_of_others_are_told_from_damaged_ones() {
    let foreign = safetensors::serialize([("a", &small_view())], None).unwrap();
    let error = read(&foreign).unwrap_err();
    assert!(matches!(error, CheckpointError::Foreign { .. }), "{error}");

    let checksum = format!(r#""unisono.checksum":"{}""#, "0".repeat(64));
    let newer = forge(&format!(r#"{{"__metadata__":{{"unisono.format":"2",{checksum}}}}}"#), &[]);
    let error = read(&newer).unwrap_err();
    assert!(matches!(&error, CheckpointError::Newer { format, .. } if format == "2"), "{error}");
}

fn small_view() -> safetensors::tensor::TensorView<'static> {
    safetensors::tensor::TensorView::new(Dtype::U8, vec![2], &[1, 2]).unwrap()
}

#[test]
fn hostile_headers_are_refused_before_anything_is_allocated_for_them() {
    let huge = usize::MAX / 8;
    let mut entries = String::new();
    for index in 0..8 {
        let (start, end) = (index * huge, (index + 1) * huge);
        entries += &format!(
            r#""{index}":{{"dtype":"U8","shape":[{huge}],"data_offsets":[{start},{end}]}},"#
        );
    }
    let end = u64::MAX;
    let last = 8 * huge;
    let overflowing = format!(
        r#"{{{entries}"8":{{"dtype":"U8","shape":[{}],"data_offsets":[{last},{end}]}}}}"#,
        end - last as u64
    );
    let headers = [
        overflowing,
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}"#.to_owned(),
        r#"{"a":{"dtype":"U8","shape":[1000000000000],"data_offsets":[0,1000000000000]}}"#
            .to_owned(),
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}"#.to_owned(),
        "[".repeat(1 << 20),
        r#"{"a":"#.repeat(1 << 18),
        r#"{"__metadata__":{"unisono.checksum":"00"}}"#.to_owned(),
        "{}".to_owned(),
        String::new(),
    ];
    for header in headers {
        let error = read(&forge(&header, &[1, 2, 3, 4])).unwrap_err();
        let shown: String = header.chars().take(100).collect();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{shown}: {error}");
    }
    for length in [u64::MAX, u64::MAX - 7, MAX_HEADER as u64 + 1, 1 << 40] {
        let bytes = [&length.to_le_bytes()[..], b"{}"].concat();
        let error = read(&bytes).unwrap_err();
        assert!(error.to_string().contains("header would have"), "{error}");
    }
}

#[test]
fn snapshots_that_no_file_can_hold_are_refused() {
    let one = || tensor("a", Dtype::U8, &[1], &[1]);
    let with = |tensors: Vec<Tensor<'static>>| Snapshot { tensors, ..Snapshot::new() };
    let mut reserved = Snapshot::new();
    reserved.set("unisono.step", 1);
    let mut large = Snapshot::new();
    large.set("a", "x".repeat(MAX_HEADER));
    let bad = [
        (reserved, "reserved"),
        (large, "names and metadata take"),
        (with(vec![one(), one()]), "two tensors are named \"a\""),
        (with(vec![tensor("__metadata__", Dtype::U8, &[1], &[1])]), "cannot be named"),
        (with(vec![tensor("a", Dtype::F32, &[2], &[0; 7])]), "\"a\" has 7 bytes"),
        (with(vec![tensor("a", Dtype::F4, &[1], &[0])]), "\"a\" has 1 byte,"),
        (with(vec![tensor("a", Dtype::U8, &[usize::MAX, 2], &[])]), "\"a\" has 0 bytes"),
    ];
    for (snapshot, flaw) in bad {
        let error = encode(1, &snapshot).unwrap_err();
        assert!(matches!(error, CheckpointError::BadSnapshot { .. }), "{error}");
        assert!(error.to_string().contains(flaw), "{error}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn damaged_headers_with_a_right_checksum_are_read_without_panic(
        position in any::<prop::sample::Index>(),
        cut in 0usize..20,
        inserted in "[0-9a-z{}\\[\\]\",:]{0,20}",
        data in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let header = r#"{"__metadata__":{"unisono.checksum":"CHECKSUM","unisono.format":"1","unisono.step":"7"},"a":{"dtype":"U16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"U8","shape":[],"data_offsets":[12,13]}}"#;
        let mut header = header.replace("CHECKSUM", &"0".repeat(64));
        let start = position.index(header.len());
        header.replace_range(start..(start + cut).min(header.len()), &inserted);
        // Whether it is good is its business; its tensors must be inside the file.
        if let Ok(loaded) = read(&forge(&header, &data)) {
            let total: usize = loaded.tensors().map(|tensor| tensor.data.len()).sum();
            prop_assert_eq!(total, data.len());
        }
    }
}
