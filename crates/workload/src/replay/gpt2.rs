//! GPT-2 in its smallest size with the names and shapes of `GPT2LMHeadModel` in Hugging Face's
//! Transformers, on sequences of 1024 tokens.
//!
//! The head that scores the next token uses the token embedding, so the last layer has no parameter
//! of its own, and the gradient of the largest is complete only when the backward pass ends.

use super::Replay;
use super::layers::Layers;

const BLOCKS: usize = 12;
const WIDTH: usize = 768;
const VOCABULARY: usize = 50_257;
const TOKENS: usize = 1024;

pub(super) fn replay() -> Replay {
    let mut layers = Layers::new();
    // Looking up an embedding multiplies nothing.
    layers.module("transformer.wte", 0, &[("weight", &[VOCABULARY, WIDTH])]);
    layers.module("transformer.wpe", 0, &[("weight", &[TOKENS, WIDTH])]);
    for block in 0..BLOCKS {
        let part = |name: &str| format!("transformer.h.{block}.{name}");
        norm(&mut layers, &part("ln_1"));
        linear(&mut layers, &part("attn.c_attn"), WIDTH, 3 * WIDTH);
        // Every token is compared with every other, and mixes their values.
        layers.compute(&part("attn"), 2 * TOKENS * TOKENS * WIDTH);
        linear(&mut layers, &part("attn.c_proj"), WIDTH, WIDTH);
        norm(&mut layers, &part("ln_2"));
        linear(&mut layers, &part("mlp.c_fc"), WIDTH, 4 * WIDTH);
        linear(&mut layers, &part("mlp.c_proj"), 4 * WIDTH, WIDTH);
    }
    norm(&mut layers, "transformer.ln_f");
    layers.compute("lm_head", TOKENS * VOCABULARY * WIDTH);
    layers.finish("gpt2")
}

/// GPT-2 keeps its weights with the inputs first.
fn linear(layers: &mut Layers, name: &str, inputs: usize, outputs: usize) {
    layers.module(name, TOKENS, &[("weight", &[inputs, outputs]), ("bias", &[outputs])]);
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
        assert_eq!(names.len(), 2 + 12 * 12 + 2);
        let first =
            ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"];
        assert_eq!(names[..3], first);
        assert_eq!(names[names.len() - 1], "transformer.ln_f.bias");
        let attention =
            replay.parameters().find(|p| p.name == "transformer.h.11.attn.c_attn.weight");
        assert_eq!(attention.map(|p| &p.shape[..]), Some(&[768, 2304][..]));
    }

    #[test]
    fn the_head_computes_much_and_holds_nothing() {
        let replay = replay();
        let head = replay.layers.last().expect("there are layers");
        assert_eq!((head.name.as_str(), head.parameters.len()), ("lm_head", 0));
        assert!(head.forward * 3.0 > 0.2, "{}", head.forward * 3.0);
    }
}
