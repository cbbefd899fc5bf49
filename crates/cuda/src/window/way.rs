//! Where the data of a call goes, and what folds it.

use std::fmt;
use std::str::FromStr;

use unisono_collective::schedule::{Source, Window};

/// Where ranks stage what others read, and what folds it. Equal on all ranks of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Way {
    /// In device memory that all ranks have opened; kernels fold it there.
    Device,
    /// In host memory; copied to the device and folded there by kernels.
    Copied,
    /// In host memory; kernels read it there, over the bus.
    Mapped,
    /// In host memory; the processor folds it there, and no kernel runs at all.
    Folded,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 4] = [Way::Device, Way::Copied, Way::Mapped, Way::Folded];

    /// The name used in settings and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Way::Device => "device",
            Way::Copied => "copied",
            Way::Mapped => "mapped",
            Way::Folded => "folded",
        }
    }

    /// Whether data is staged in host memory.
    pub const fn is_through_host(self) -> bool {
        !matches!(self, Way::Device)
    }

    /// Cells of a staging buffer that a segment takes, at least one.
    pub(super) fn cells(self, window: &Window) -> usize {
        let cells = (window.cells as usize).max(1);
        let staged = |source: &&Source| matches!(source, Source::Staged { .. });
        match self {
            Way::Device | Way::Mapped => cells,
            // What is fetched has as much room on the device as a buffer.
            Way::Copied => {
                let fetched = window
                    .folds
                    .iter()
                    .map(|fold| fold.blocks.len() * fold.inputs.iter().filter(staged).count());
                cells.max(fetched.sum())
            }
            // After the cells that others read come those of results.
            Way::Folded => cells + window.folds.iter().map(|fold| fold.blocks.len()).sum::<usize>(),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Way {
    type Err = String;

    fn from_str(text: &str) -> Result<Way, String> {
        Way::ALL.into_iter().find(|way| way.name() == text).ok_or_else(|| {
            format!("unknown way {text:?}; expected device, copied, mapped or folded")
        })
    }
}
