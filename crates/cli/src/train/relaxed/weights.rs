//! Weights in files, for the leader to find when the workers are gone.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

/// Where a worker leaves its weights.
pub fn path(run_dir: &Path, worker: usize) -> PathBuf {
    run_dir.join(format!("weights-{worker}.f32"))
}

/// Writes weights, all at once.
pub fn write(path: &Path, weights: &[Vec<f32>]) -> anyhow::Result<()> {
    let bytes: Vec<u8> = weights.iter().flatten().flat_map(|weight| weight.to_le_bytes()).collect();
    let partial = path.with_extension("partial");
    std::fs::write(&partial, bytes)
        .and_then(|()| std::fs::rename(&partial, path))
        .with_context(|| format!("writing {}", path.display()))
}

/// Leaves the weights of one worker as those of another.
pub fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let partial = to.with_extension("partial");
    let copied = || match from == to {
        true => Ok(()),
        false => std::fs::copy(from, &partial).and_then(|_| std::fs::rename(&partial, to)),
    };
    copied().with_context(|| format!("writing {}", to.display()))
}

/// Reads weights of these lengths, and removes the file.
pub fn take(path: &Path, lengths: &[usize]) -> anyhow::Result<Vec<Vec<f32>>> {
    let weights = read(path, lengths)?;
    let _ = std::fs::remove_file(path);
    Ok(weights)
}

/// Reads weights of these lengths.
pub fn read(path: &Path, lengths: &[usize]) -> anyhow::Result<Vec<Vec<f32>>> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        bytes.len() == 4 * lengths.iter().sum::<usize>(),
        "{} does not hold the weights of this model",
        path.display()
    );
    let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut numbers = bytes.chunks_exact(4).map(number);
    Ok(lengths.iter().map(|length| numbers.by_ref().take(*length).collect()).collect())
}
