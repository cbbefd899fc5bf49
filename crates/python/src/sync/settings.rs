//! What a replica is told once, as Python says it.

use std::collections::HashSet;

use pyo3::prelude::*;
use unisono_codec::Rules;
use unisono_sync::Parameter;
use unisono_sync::strategy::Compression;

/// Whether gradients travel in fewer bytes, and how. `unisono/torch/_gradients/codec.py` makes one.
#[derive(Clone, Debug, FromPyObject)]
pub struct CodecSettings {
    /// A codec, `none` or `auto`.
    codec: String,
    /// Exceptions, as `PATTERN=CODEC`.
    rules: Vec<String>,
    warm_up: u64,
    error_feedback: bool,
    seed: u64,
}

impl CodecSettings {
    /// The library's form of it, or what is wrong with it. Nothing if nothing is ever encoded.
    pub fn compression(&self) -> Result<Option<Compression>, String> {
        let auto = self.codec == "auto";
        let codec = match self.codec.as_str() {
            "auto" | "none" => None,
            text => Some(text.parse().map_err(|error| format!("{error}"))?),
        };
        let rules = self.rules.iter().map(|rule| rule.parse().map_err(|error| format!("{error}")));
        let rules = Rules { codec, exceptions: rules.collect::<Result<_, String>>()? };
        if rules.are_none() && !auto {
            return Ok(None);
        }
        Ok(Some(Compression {
            rules,
            auto,
            warm_up: self.warm_up,
            error_feedback: self.error_feedback,
            relative: None,
            seed: self.seed,
        }))
    }
}

/// The parameters of a model from their names and shapes, or what is wrong with them.
pub fn parameters(listed: Vec<(String, Vec<usize>)>) -> Result<Vec<Parameter>, String> {
    let mut names = HashSet::new();
    for (name, shape) in &listed {
        if !names.insert(name.as_str()) {
            return Err(format!("two parameters are called {name:?}"));
        }
        let elements = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        if elements.is_none_or(|elements| elements > isize::MAX as usize / size_of::<f32>()) {
            return Err(format!("{name:?} has more elements than there can be"));
        }
    }
    Ok(listed.into_iter().map(|(name, shape)| Parameter { name, shape }).collect())
}
