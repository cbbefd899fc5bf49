//! Reads a model from a file. The format is described in the [parent](super).

use std::collections::HashSet;
use std::fs;
use std::time::Duration;

use super::{Layer, Parameter, Replay, ReplayError};

/// The most milliseconds of one pass of a layer: an hour, far beyond any use, and far from what
/// could overflow.
const MAX_MS: f64 = 3_600_000.0;

pub(super) fn load(path: &str) -> Result<Replay, ReplayError> {
    let text = fs::read_to_string(path)
        .map_err(|source| ReplayError::Read { path: path.into(), source })?;
    let mut layers = parse(&text).map_err(|(line, problem)| ReplayError::Line {
        path: path.into(),
        line,
        problem,
    })?;
    let total: f64 = layers.iter().map(|layer| layer.forward + layer.backward).sum();
    let empty = |missing| Err(ReplayError::Empty { path: path.into(), missing });
    if layers.iter().all(|layer| layer.parameters.is_empty()) {
        return empty("parameter");
    }
    if total == 0.0 {
        return empty("layer that takes time");
    }
    for layer in &mut layers {
        layer.forward /= total;
        layer.backward /= total;
    }
    let compute = Some(Duration::from_secs_f64(total / 1000.0));
    Ok(Replay { name: path.into(), layers, compute })
}

/// The layers with their times in milliseconds, or the number of a wrong line and what is wrong.
fn parse(text: &str) -> Result<Vec<Layer>, (usize, String)> {
    let mut layers: Vec<Layer> = Vec::new();
    let mut names = HashSet::new();
    let mut elements: usize = 0;
    for (index, line) in text.lines().enumerate() {
        let wrong = |problem| (index + 1, problem);
        let content = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = content.split_whitespace().collect();
        match words[..] {
            [] => {}
            ["layer", name, forward, backward] => layers.push(Layer {
                name: name.into(),
                parameters: Vec::new(),
                forward: time(forward).map_err(wrong)?,
                backward: time(backward).map_err(wrong)?,
            }),
            ["layer", ..] => {
                return Err(wrong("write `layer NAME FORWARD_MS BACKWARD_MS`".into()));
            }
            [name, dimensions] => {
                let Some(layer) = layers.last_mut() else {
                    return Err(wrong("write a `layer` line before the first parameter".into()));
                };
                if !names.insert(name) {
                    return Err(wrong(format!("parameter {name} occurs twice: rename one")));
                }
                let (shape, size) = shape(dimensions).map_err(wrong)?;
                elements = elements
                    .checked_add(size)
                    .ok_or_else(|| wrong("the model is too large for this machine".into()))?;
                layer.parameters.push(Parameter { name: name.into(), shape });
            }
            _ => return Err(wrong("write `PARAMETER SHAPE`, as in `fc.weight 10x64`".into())),
        }
    }
    Ok(layers)
}

fn time(word: &str) -> Result<f64, String> {
    match word.parse() {
        Ok(time) if (0.0..=MAX_MS).contains(&time) => Ok(time),
        _ => Err(format!("`{word}` is no time: write milliseconds from 0 to {MAX_MS}")),
    }
}

/// A shape and the number of values it holds.
fn shape(word: &str) -> Result<(Vec<usize>, usize), String> {
    let wrong = || format!("`{word}` is no shape: write sizes of at least 1, as in `64x3x7x7`");
    let mut sizes = Vec::new();
    let mut elements: usize = 1;
    for part in word.split('x') {
        // `parse` alone would take `+1`.
        let digits = part.bytes().all(|byte| byte.is_ascii_digit());
        let size = part.parse().ok().filter(|&size: &usize| digits && size > 0);
        let size = size.ok_or_else(wrong)?;
        elements = elements.checked_mul(size).ok_or_else(wrong)?;
        sizes.push(size);
    }
    Ok((sizes, elements))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(text: &str) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.txt");
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap().to_string();
        (folder, path)
    }

    #[test]
    fn reads_layers_shapes_and_shares() {
        let (_folder, path) = write(
            "# a model\n\n\
             layer conv 1 2  # the first\n\
             \tconv.weight 4x3x3x3\r\n\
             conv.bias 4\n\
             layer relu 0.5 0.5\n\
             layer fc 2 4\n\
             fc.weight 10x4\n",
        );
        let replay = load(&path).unwrap();
        assert_eq!(replay.compute, Some(Duration::from_millis(10)));
        assert_eq!(replay.elements(), 108 + 4 + 40);
        let names: Vec<&str> = replay.parameters().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["conv.weight", "conv.bias", "fc.weight"]);
        assert_eq!(replay.layers[0].parameters[0].shape, [4, 3, 3, 3]);
        let shares: Vec<_> = replay.layers.iter().map(|l| (l.forward, l.backward)).collect();
        assert_eq!(shares, [(0.1, 0.2), (0.05, 0.05), (0.2, 0.4)]);
    }

    #[test]
    fn names_the_wrong_line() {
        let wrong = [
            ("w 3", 1, "before the first"),
            ("layer a 1", 1, "FORWARD_MS"),
            ("layer a 1 2 3", 1, "FORWARD_MS"),
            ("layer a 1 -2", 1, "`-2` is no time"),
            ("layer a NaN 2", 1, "`NaN` is no time"),
            ("layer a 1 inf", 1, "`inf` is no time"),
            ("layer a 1 1\n#\nw", 3, "PARAMETER SHAPE"),
            ("layer a 1 1\nw 3 4", 2, "PARAMETER SHAPE"),
            ("layer a 1 1\nw 3x0", 2, "`3x0` is no shape"),
            ("layer a 1 1\nw 3x", 2, "`3x` is no shape"),
            ("layer a 1 1\nw +3", 2, "`+3` is no shape"),
            ("layer a 1 1\nw 4294967296x4294967296x4294967296", 2, "is no shape"),
            ("layer a 1 1\nw 18446744073709551615\nv 1", 3, "too large"),
            ("layer a 1 1\nw 3\nlayer b 1 1\nw 3", 4, "occurs twice"),
        ];
        for (text, line, problem) in wrong {
            let (_folder, path) = write(text);
            let error = load(&path).unwrap_err();
            let message = error.to_string();
            assert!(message.contains(&format!("model.txt:{line}: ")), "{message}");
            assert!(message.contains(problem), "{message}");
        }
    }

    #[test]
    fn refuses_files_without_a_model() {
        for text in ["", "# nothing\n", "layer a 1 1", "layer a 0 0\nw 3"] {
            let (_folder, path) = write(text);
            assert!(matches!(load(&path), Err(ReplayError::Empty { .. })), "{text}");
        }
        let error = load("resnet51").unwrap_err();
        assert!(error.to_string().contains("resnet50, bert-large, gpt2"), "{error}");
    }
}
