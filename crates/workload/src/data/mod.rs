//! Samples to learn from: where they come from, how they are cut into training and test parts, and
//! in which order they are shown.

mod digits;
mod fashion_mnist;
mod images;
mod order;
mod text;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use candle_core::{Result, Tensor};

pub use order::SampleOrder;

use images::Images;
use text::Text;

/// Where samples come from, as written on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataSpec {
    /// The handwritten digits inside the program: `digits`.
    Digits,
    /// A folder with the files of Fashion-MNIST: `fashion-mnist:DIR`.
    FashionMnist(PathBuf),
    /// A file of any kind, byte by byte: `text:FILE`.
    Text(PathBuf),
}

impl DataSpec {
    /// Reads the samples. A text is cut into windows that predict `context` bytes each; images take
    /// no notice of it.
    pub fn load(&self, context: usize) -> std::result::Result<Dataset, DataError> {
        let images = |classes, (train, test): (Images, Images)| {
            let [channels, height, width] = train.shape;
            Dataset {
                kind: Kind::Classification { channels, height, width, classes },
                samples: Samples::Images { train, test },
            }
        };
        Ok(match self {
            Self::Digits => images(10, digits::load()),
            Self::FashionMnist(folder) => {
                images(fashion_mnist::CLASSES, fashion_mnist::load(folder)?)
            }
            Self::Text(path) => {
                let (train, test) = text::load(path, context)?;
                Dataset {
                    kind: Kind::Sequence { vocabulary: text::VOCABULARY, context },
                    samples: Samples::Text { train, test },
                }
            }
        })
    }
}

impl FromStr for DataSpec {
    type Err = ParseDataError;

    fn from_str(spec: &str) -> std::result::Result<Self, ParseDataError> {
        match spec.split_once(':') {
            None if spec == "digits" => Ok(Self::Digits),
            Some(("fashion-mnist", folder)) if !folder.is_empty() => {
                Ok(Self::FashionMnist(folder.into()))
            }
            Some(("text", file)) if !file.is_empty() => Ok(Self::Text(file.into())),
            _ => Err(ParseDataError { spec: spec.into() }),
        }
    }
}

impl fmt::Display for DataSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Digits => f.write_str("digits"),
            Self::FashionMnist(folder) => write!(f, "fashion-mnist:{}", folder.display()),
            Self::Text(file) => write!(f, "text:{}", file.display()),
        }
    }
}

/// The words name no data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown data `{spec}`: use digits, fashion-mnist:DIR or text:FILE")]
pub struct ParseDataError {
    /// What was given.
    pub spec: String,
}

/// Why samples could not be read. Name other data, or mend the files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The folder lacks a file of the data set.
    #[error(
        "{} has no {file} or {file}.gz: name a folder with the four files of Fashion-MNIST (the \
         Debian package dataset-fashion-mnist puts them into /usr/share/datasets/fashion-mnist)",
        folder.display()
    )]
    NoFashionMnist {
        /// The folder that was named.
        folder: PathBuf,
        /// The first file that is missing.
        file: String,
    },

    /// The system would not read the file.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },

    /// The file is not what its name says.
    #[error("{} is damaged or something else: {problem}; download it again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// The part held out of the text is shorter than one sample.
    #[error(
        "{} has {len} {}, but a context of {context} needs at least {needed} bytes: name a \
         longer file or choose a smaller context",
        path.display(),
        if *len == 1 { "byte" } else { "bytes" }
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
        /// The context asked for.
        context: usize,
        /// The least length that this context allows.
        needed: usize,
    },

    /// A text cannot be learnt without looking at any of it.
    #[error("a context of 0 predicts nothing: choose at least 1")]
    NoContext,
}

/// What a sample looks like, and so which models fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An image, to be put into one of `classes`.
    Classification {
        /// Values per pixel.
        channels: usize,
        /// Rows of pixels.
        height: usize,
        /// Pixels per row.
        width: usize,
        /// Number of classes.
        classes: usize,
    },
    /// A row of tokens, of which each is to be predicted from those before it.
    Sequence {
        /// Number of different tokens.
        vocabulary: usize,
        /// Tokens per sample.
        context: usize,
    },
}

/// Which part of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// What a model learns from.
    Train,
    /// What it never sees, and is judged by.
    Test,
}

/// Samples in memory. Both parts have at least one.
#[derive(Debug)]
pub struct Dataset {
    kind: Kind,
    samples: Samples,
}

#[derive(Debug)]
enum Samples {
    Images { train: Images, test: Images },
    Text { train: Text, test: Text },
}

/// Some samples, on the CPU.
///
/// Of images, `inputs` is `[batch, channels, height, width]` in 0..1 (f32) and `targets` is
/// `[batch]` (u32). Of sequences, both are `[batch, context]` (u32).
#[derive(Debug, Clone)]
pub struct Batch {
    /// What a model is shown.
    pub inputs: Tensor,
    /// What it should answer.
    pub targets: Tensor,
}

impl Dataset {
    /// What a sample looks like.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The number of training samples.
    pub fn train_len(&self) -> usize {
        self.len(Split::Train)
    }

    /// The number of test samples.
    pub fn test_len(&self) -> usize {
        self.len(Split::Test)
    }

    /// The samples with these indices, in this order.
    ///
    /// An empty batch is refused, as it has no mean loss, and so is an index past the end.
    pub fn batch(&self, split: Split, indices: &[usize]) -> Result<Batch> {
        let len = self.len(split);
        if indices.is_empty() {
            candle_core::bail!("a batch needs at least one sample");
        }
        if let Some(index) = indices.iter().find(|&&index| index >= len) {
            candle_core::bail!("there is no sample {index} among {len}");
        }
        match (&self.samples, split) {
            (Samples::Images { train: part, .. }, Split::Train)
            | (Samples::Images { test: part, .. }, Split::Test) => part.batch(indices),
            (Samples::Text { train: part, .. }, Split::Train)
            | (Samples::Text { test: part, .. }, Split::Test) => part.batch(indices),
        }
    }

    fn len(&self, split: Split) -> usize {
        match (&self.samples, split) {
            (Samples::Images { train: part, .. }, Split::Train)
            | (Samples::Images { test: part, .. }, Split::Test) => part.len(),
            (Samples::Text { train: part, .. }, Split::Train)
            | (Samples::Text { test: part, .. }, Split::Test) => part.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_survive_being_written_down() {
        for text in ["digits", "fashion-mnist:/some/where", "text:a:b"] {
            assert_eq!(text.parse::<DataSpec>().unwrap().to_string(), text);
        }
        for text in ["", "digit", "digits:", "text", "text:", "fashion-mnist", "mnist:dir"] {
            let error = text.parse::<DataSpec>().unwrap_err();
            assert!(error.to_string().contains("text:FILE"));
        }
    }

    #[test]
    fn digits_come_as_images_in_the_order_asked_for() {
        let data = DataSpec::Digits.load(0).unwrap();
        assert_eq!((data.train_len(), data.test_len()), (1500, 297));
        let shape = Kind::Classification { channels: 1, height: 8, width: 8, classes: 10 };
        assert_eq!(data.kind(), shape);

        let both = data.batch(Split::Train, &[7, 3]).unwrap();
        assert_eq!((both.inputs.dims(), both.targets.dims()), (&[2, 1, 8, 8][..], &[2][..]));
        let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let alone = values(data.batch(Split::Train, &[3]).unwrap().inputs);
        assert_eq!(values(both.inputs)[64..], alone);
        assert!(alone.iter().all(|value| (0.0..=1.0).contains(value)) && alone.contains(&0.5));
    }

    #[test]
    fn a_batch_has_samples_that_exist() {
        let data = DataSpec::Digits.load(0).unwrap();
        assert!(data.batch(Split::Test, &[296]).is_ok());
        assert!(data.batch(Split::Test, &[297]).is_err());
        assert!(data.batch(Split::Train, &[]).is_err());
    }
}
