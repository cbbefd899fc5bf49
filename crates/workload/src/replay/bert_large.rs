//! BERT-large, uncased, with the names and shapes of `BertModel` in Hugging Face's Transformers, on
//! sequences of 512 tokens.

use super::Replay;
use super::layers::Layers;

const BLOCKS: usize = 24;
const WIDTH: usize = 1024;
const INNER: usize = 4 * WIDTH;
const VOCABULARY: usize = 30_522;
const TOKENS: usize = 512;

pub(super) fn replay() -> Replay {
    let mut layers = Layers::new();
    // Looking up an embedding multiplies nothing.
    for (name, rows) in [
        ("word_embeddings", VOCABULARY),
        ("position_embeddings", TOKENS),
        ("token_type_embeddings", 2),
    ] {
        layers.module(&format!("embeddings.{name}"), 0, &[("weight", &[rows, WIDTH])]);
    }
    norm(&mut layers, "embeddings.LayerNorm");
    for block in 0..BLOCKS {
        let part = |name: &str| format!("encoder.layer.{block}.{name}");
        for name in ["query", "key", "value"] {
            linear(&mut layers, &part(&format!("attention.self.{name}")), WIDTH, WIDTH, TOKENS);
        }
        // Every token is compared with every other, and mixes their values.
        layers.compute(&part("attention.self"), 2 * TOKENS * TOKENS * WIDTH);
        linear(&mut layers, &part("attention.output.dense"), WIDTH, WIDTH, TOKENS);
        norm(&mut layers, &part("attention.output.LayerNorm"));
        linear(&mut layers, &part("intermediate.dense"), WIDTH, INNER, TOKENS);
        linear(&mut layers, &part("output.dense"), INNER, WIDTH, TOKENS);
        norm(&mut layers, &part("output.LayerNorm"));
    }
    // Of all tokens, only the first is pooled.
    linear(&mut layers, "pooler.dense", WIDTH, WIDTH, 1);
    layers.finish("bert-large")
}

fn linear(layers: &mut Layers, name: &str, inputs: usize, outputs: usize, tokens: usize) {
    layers.module(name, tokens, &[("weight", &[outputs, inputs]), ("bias", &[outputs])]);
}

fn norm(layers: &mut Layers, name: &str) {
    layers.module(name, TOKENS, &[("weight", &[WIDTH]), ("bias", &[WIDTH])]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_stand_in_forward_order() {
        let replay = replay();
        let names: Vec<&str> = replay.parameters().map(|p| p.name.as_str()).collect();
        assert_eq!(names.len(), 5 + 24 * 16 + 2);
        assert_eq!(names[0], "embeddings.word_embeddings.weight");
        assert_eq!(names[5], "encoder.layer.0.attention.self.query.weight");
        assert_eq!(names[names.len() - 3], "encoder.layer.23.output.LayerNorm.bias");
        assert_eq!(names[names.len() - 1], "pooler.dense.bias");
        let intermediate =
            replay.parameters().find(|p| p.name == "encoder.layer.7.intermediate.dense.weight");
        assert_eq!(intermediate.map(|p| &p.shape[..]), Some(&[4096, 1024][..]));
    }

    #[test]
    fn embeddings_hold_much_and_compute_nothing() {
        let words = &replay().layers[0];
        assert_eq!((words.forward, words.parameters[0].elements()), (0.0, 31_254_528));
    }
}
