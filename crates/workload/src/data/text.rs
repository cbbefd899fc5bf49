//! Any file as text: every byte is a token, so the vocabulary is 256 and no file is refused for its
//! language or encoding.
//!
//! A sample is a window of `context + 1` bytes: the first `context` are the input and the last
//! `context` the targets, each byte being asked of those before it. Windows follow one another and
//! share one byte, so that a pass predicts every byte once. The last 5 % of the file are held out.

use std::fs;
use std::path::Path;

use candle_core::{Device, Result, Tensor};

use super::{Batch, DataError};

pub(super) const VOCABULARY: usize = 256;

/// One byte in this many is held out.
const TEST_SHARE: usize = 20;

/// One part of a text.
#[derive(Debug)]
pub(super) struct Text {
    bytes: Vec<u8>,
    context: usize,
}

/// The training and the test part of the file.
pub(super) fn load(path: &Path, context: usize) -> std::result::Result<(Text, Text), DataError> {
    if context == 0 {
        return Err(DataError::NoContext);
    }
    let mut bytes =
        fs::read(path).map_err(|source| DataError::Read { path: path.into(), source })?;
    let held_out = bytes.len() / TEST_SHARE;
    if held_out <= context {
        return Err(DataError::TooShort {
            path: path.into(),
            len: bytes.len(),
            context,
            needed: context.saturating_add(1).saturating_mul(TEST_SHARE),
        });
    }
    let test = bytes.split_off(bytes.len() - held_out);
    Ok((Text { bytes, context }, Text { bytes: test, context }))
}

impl Text {
    pub(super) fn len(&self) -> usize {
        (self.bytes.len() - 1) / self.context
    }

    /// `inputs` and `targets` of `[batch, context]`.
    pub(super) fn batch(&self, indices: &[usize]) -> Result<Batch> {
        let tensor = |shift: usize| {
            let tokens: Vec<u32> = indices
                .iter()
                .flat_map(|&index| &self.bytes[index * self.context + shift..][..self.context])
                .map(|&byte| byte.into())
                .collect();
            Tensor::from_vec(tokens, (indices.len(), self.context), &Device::Cpu)
        };
        Ok(Batch { inputs: tensor(0)?, targets: tensor(1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn windows_cover_the_text_and_targets_are_one_ahead() {
        let content: Vec<u8> = (0..200).collect();
        let (train, test) = load(file(&content).path(), 4).unwrap();
        assert_eq!((train.bytes.len(), test.bytes.len()), (190, 10));
        assert_eq!((train.len(), test.len()), (47, 2));
        let batch = train.batch(&[0, 46]).unwrap();
        let rows = |tensor: Tensor| tensor.to_vec2::<u32>().unwrap();
        assert_eq!(rows(batch.inputs), [[0, 1, 2, 3], [184, 185, 186, 187]]);
        assert_eq!(rows(batch.targets), [[1, 2, 3, 4], [185, 186, 187, 188]]);
    }

    #[test]
    fn says_how_long_the_text_must_be() {
        let needed = 20 * 9;
        assert!(load(file(&vec![b'a'; needed]).path(), 8).is_ok());
        let error = load(file(&vec![b'a'; needed - 1]).path(), 8).unwrap_err();
        assert!(error.to_string().contains("at least 180 bytes"), "{error}");
        let error = load(file(b"").path(), usize::MAX).unwrap_err();
        assert!(matches!(error, DataError::TooShort { .. }));
    }

    #[test]
    fn refuses_what_is_no_file_or_has_no_context() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), &folder.path().join("absent")] {
            assert!(matches!(load(path, 8), Err(DataError::Read { .. })));
        }
        assert!(matches!(load(file(b"text").path(), 0), Err(DataError::NoContext)));
    }
}
