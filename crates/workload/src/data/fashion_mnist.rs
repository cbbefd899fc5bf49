//! Fashion-MNIST: 70 000 images of clothes, 28 × 28 pixels, in ten classes.
//!
//! A folder holds four files in the idx format, each as it is or compressed with gzip:
//!
//! ```text
//! train-images-idx3-ubyte[.gz]   train-labels-idx1-ubyte[.gz]
//! t10k-images-idx3-ubyte[.gz]    t10k-labels-idx1-ubyte[.gz]
//! ```
//!
//! An idx file begins with a big-endian magic number, whose last byte is the number of dimensions,
//! and one big-endian length per dimension; then come the bytes. MNIST itself has the same files.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::DataError;
use super::images::Images;

pub(super) const SIDE: usize = 28;
pub(super) const CLASSES: usize = 10;

/// The most samples a file may announce. Larger, a forged header could fill the memory; smaller, it
/// could refuse a real file, the largest of which has 60 000.
const MAX_SAMPLES: usize = 1_000_000;

/// Training and test images of the folder.
pub(super) fn load(folder: &Path) -> Result<(Images, Images), DataError> {
    Ok((part(folder, "train")?, part(folder, "t10k")?))
}

fn part(folder: &Path, name: &str) -> Result<Images, DataError> {
    let (_, pixels) = read(folder, &format!("{name}-images-idx3-ubyte"), [SIDE, SIDE])?;
    let (path, labels) = read(folder, &format!("{name}-labels-idx1-ubyte"), [])?;
    let images = pixels.len() / (SIDE * SIDE);
    if images != labels.len() {
        let problem = format!("{} labels for {images} images", labels.len());
        return Err(DataError::Malformed { path, problem });
    }
    if let Some(label) = labels.iter().find(|&&label| usize::from(label) >= CLASSES) {
        let problem = format!("label {label}, but there are {CLASSES} classes");
        return Err(DataError::Malformed { path, problem });
    }
    Ok(Images { shape: [1, SIDE, SIDE], white: u8::MAX, pixels, labels })
}

/// The samples of one idx file, each of `shape`, and the path where they were found.
fn read<const N: usize>(
    folder: &Path,
    name: &str,
    shape: [usize; N],
) -> Result<(PathBuf, Vec<u8>), DataError> {
    let (path, reader) = open(folder, name)?;
    match parse(reader, shape) {
        Ok(content) => Ok((path, content)),
        Err(Flaw::Read(source)) => Err(DataError::Read { path, source }),
        Err(Flaw::Content(problem)) => Err(DataError::Malformed { path, problem }),
    }
}

/// Opens the file as it is, or else its compressed form.
fn open(folder: &Path, name: &str) -> Result<(PathBuf, Box<dyn Read>), DataError> {
    let plain = folder.join(name);
    let packed = folder.join(format!("{name}.gz"));
    match File::open(&plain) {
        Ok(file) => return Ok((plain, Box::new(BufReader::new(file)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(DataError::Read { path: plain, source }),
    }
    match File::open(&packed) {
        Ok(file) => Ok((packed, Box::new(MultiGzDecoder::new(BufReader::new(file))))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(DataError::NoFashionMnist { folder: folder.into(), file: name.into() })
        }
        Err(source) => Err(DataError::Read { path: packed, source }),
    }
}

enum Flaw {
    Read(io::Error),
    Content(String),
}

/// Reads header and content, and believes a length only as far as the file bears it out.
fn parse<const N: usize>(mut reader: impl Read, shape: [usize; N]) -> Result<Vec<u8>, Flaw> {
    let magic = word(&mut reader)?;
    let expected = 0x0800 + 1 + N as u32;
    if magic != expected {
        return Err(Flaw::Content(format!(
            "it begins with {magic:#010x}, an idx file of this kind with {expected:#010x}"
        )));
    }
    let samples = word(&mut reader)? as usize;
    if samples == 0 || samples > MAX_SAMPLES {
        return Err(Flaw::Content(format!("it announces {samples} samples")));
    }
    for expected in shape {
        let length = word(&mut reader)? as usize;
        if length != expected {
            return Err(Flaw::Content(format!("images of side {length} instead of {expected}")));
        }
    }
    let len = samples * shape.iter().product::<usize>();
    let mut content = Vec::new();
    // One byte more than announced, to notice a file that is too long.
    reader.take(len as u64 + 1).read_to_end(&mut content).map_err(flaw)?;
    match content.len() {
        found if found < len => {
            Err(Flaw::Content(format!("it ends after {found} of {len} announced bytes")))
        }
        found if found > len => {
            Err(Flaw::Content(format!("it goes on after the {len} announced bytes")))
        }
        _ => Ok(content),
    }
}

fn word(reader: &mut impl Read) -> Result<u32, Flaw> {
    let mut bytes = [0; 4];
    reader.read_exact(&mut bytes).map_err(flaw)?;
    Ok(u32::from_be_bytes(bytes))
}

/// What a decoder reports about the bytes themselves is the file's fault, the rest the system's.
fn flaw(error: io::Error) -> Flaw {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Flaw::Content("it ends too early".into()),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            Flaw::Content(format!("it is no intact gzip file ({error})"))
        }
        _ => Flaw::Read(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use std::{fs, io::Write};

    fn idx(magic: u32, lengths: &[u32], content: &[u8]) -> Vec<u8> {
        let mut file = magic.to_be_bytes().to_vec();
        lengths.iter().for_each(|length| file.extend(length.to_be_bytes()));
        file.extend(content);
        file
    }

    fn images(count: usize) -> Vec<u8> {
        let pixels: Vec<u8> = (0..count * SIDE * SIDE).map(|i| i as u8).collect();
        idx(0x803, &[count as u32, 28, 28], &pixels)
    }

    fn labels(labels: &[u8]) -> Vec<u8> {
        idx(0x801, &[labels.len() as u32], labels)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).expect("a vector takes every byte");
        encoder.finish().expect("a vector takes every byte")
    }

    /// A small intact data set, whose files a test may then spoil.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name, bytes| fs::write(folder.path().join(name), bytes).unwrap();
        write("train-images-idx3-ubyte.gz", gzip(&images(3)));
        write("train-labels-idx1-ubyte.gz", gzip(&labels(&[0, 9, 5])));
        write("t10k-images-idx3-ubyte", images(1));
        write("t10k-labels-idx1-ubyte", labels(&[7]));
        folder
    }

    #[test]
    fn reads_plain_and_compressed_files() {
        let folder = folder();
        let (train, test) = load(folder.path()).unwrap();
        assert_eq!((&train.labels[..], &test.labels[..]), (&[0, 9, 5][..], &[7][..]));
        assert_eq!(train.pixels.len(), 3 * 784);
        assert_eq!(train.pixels[784], 784_u32 as u8);
    }

    #[test]
    fn says_where_to_find_what_is_missing() {
        let folder = folder();
        fs::remove_file(folder.path().join("t10k-labels-idx1-ubyte")).unwrap();
        let error = load(folder.path()).unwrap_err();
        assert!(matches!(error, DataError::NoFashionMnist { .. }));
        let text = error.to_string();
        assert!(text.contains("t10k-labels-idx1-ubyte") && text.contains("dataset-fashion-mnist"));
    }

    #[test]
    fn refuses_files_that_are_not_what_they_say() {
        let long = [images(3), vec![0]].concat();
        let spoilt: &[(&str, Vec<u8>, &str)] = &[
            ("images-idx3", labels(&[1, 2, 3]), "begins with"),
            ("images-idx3", idx(0x803, &[3, 28, 27], &[0; 3 * 28 * 27]), "side 27"),
            ("images-idx3", idx(0x803, &[u32::MAX, 28, 28], &[0; 784]), "announces"),
            ("images-idx3", idx(0x803, &[0, 28, 28], &[]), "announces 0"),
            ("images-idx3", idx(0x803, &[900_000, 28, 28], &[0; 784]), "ends after 784"),
            ("images-idx3", long, "goes on"),
            ("images-idx3", images(2), "3 labels for 2 images"),
            ("images-idx3", vec![0, 0], "ends too early"),
            ("labels-idx1", labels(&[0, 10, 5]), "label 10"),
        ];
        for (name, bytes, problem) in spoilt {
            let folder = folder();
            let path = folder.path().join(format!("train-{name}-ubyte.gz"));
            fs::write(&path, gzip(bytes)).unwrap();
            let error = load(folder.path()).unwrap_err();
            assert!(matches!(error, DataError::Malformed { .. }), "{error}");
            assert!(error.to_string().contains(problem), "{error}");
        }
    }

    #[test]
    fn refuses_broken_compression() {
        let whole = gzip(&images(3));
        for bytes in [b"not gzip at all".to_vec(), whole[..whole.len() / 2].to_vec()] {
            let folder = folder();
            fs::write(folder.path().join("train-images-idx3-ubyte.gz"), bytes).unwrap();
            let error = load(folder.path()).unwrap_err();
            assert!(matches!(error, DataError::Malformed { .. }), "{error}");
        }
    }
}
