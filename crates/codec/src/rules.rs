//! Which parameters are compressed, and how.
//!
//! Biases and the parameters of norms are few, and small tensors are cheap to send: compressing them
//! saves nothing and costs accuracy. So a tensor is compressed if it has at least two dimensions and
//! enough elements, and if its codec makes it smaller. A [`Rule`] says otherwise for parameters whose
//! names fit a pattern.

use std::fmt;
use std::str::FromStr;

use crate::spec::{BadCodec, CodecSpec};

/// The fewest elements of a tensor that is compressed if no rule says otherwise. Smaller: more
/// parameters lose precision, for bytes that hardly count. Larger: small models stay as they are.
const SMALLEST: usize = 1024;

/// Which parameters are compressed, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    /// The codec of parameters for which there is no rule; `None` sends them as they are.
    pub codec: Option<CodecSpec>,
    /// Rules for some parameters, of which the first that fits a parameter decides.
    pub exceptions: Vec<Rule>,
}

impl Rules {
    /// One codec for all that is worth it.
    pub fn all(codec: CodecSpec) -> Rules {
        Rules { codec: Some(codec), exceptions: Vec::new() }
    }

    /// The codec of a parameter; `None` if it travels as it is.
    pub fn codec(&self, name: &str, shape: &[usize]) -> Option<&CodecSpec> {
        let codec = match self.exceptions.iter().find(|rule| rule.fits(name)) {
            Some(rule) => rule.codec.as_ref(),
            None => self.codec.as_ref().filter(|_| is_worth_it(shape)),
        };
        codec.filter(|codec| codec.build().suits(shape))
    }

    /// Whether no parameter can be compressed.
    pub fn are_none(&self) -> bool {
        self.codec.is_none() && self.exceptions.iter().all(|rule| rule.codec.is_none())
    }
}

/// What is done to parameters whose names fit a pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    pattern: String,
    codec: Option<CodecSpec>,
}

impl Rule {
    /// Parameters whose names fit `pattern`, in which `*` stands for any text, get this codec; `None`
    /// sends them as they are.
    pub fn new(pattern: impl Into<String>, codec: Option<CodecSpec>) -> Rule {
        Rule { pattern: pattern.into(), codec }
    }

    /// The codec of parameters that fit.
    pub fn codec(&self) -> Option<&CodecSpec> {
        self.codec.as_ref()
    }

    fn fits(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.ends_with(last)
    }
}

/// `PATTERN=CODEC`, or `PATTERN=none`.
impl FromStr for Rule {
    type Err = BadCodec;

    fn from_str(text: &str) -> Result<Rule, BadCodec> {
        let (pattern, codec) =
            text.split_once('=').ok_or_else(|| BadCodec::Rule { text: text.to_owned() })?;
        let codec = match codec {
            "none" => None,
            codec => Some(codec.parse()?),
        };
        Ok(Rule::new(pattern, codec))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.codec {
            Some(codec) => write!(f, "{}={codec}", self.pattern),
            None => write!(f, "{}=none", self.pattern),
        }
    }
}

/// Whether a tensor is neither a bias nor the parameter of a norm, and large enough.
fn is_worth_it(shape: &[usize]) -> bool {
    let dimensions = shape.iter().filter(|size| **size > 1).count();
    dimensions >= 2 && crate::elements(shape) >= SMALLEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_norms_and_small_tensors_are_left_alone() {
        let rules = Rules::all(CodecSpec::Sign);
        assert!(rules.codec("weight", &[64, 64]).is_some());
        assert!(rules.codec("weight", &[16, 8, 3, 3]).is_some());
        for small in [&[4096][..], &[1, 4096], &[4096, 1, 1], &[31, 33], &[]] {
            assert!(rules.codec("weight", small).is_none(), "{small:?}");
        }
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let mut rules = Rules::all(CodecSpec::Sign);
        rules.exceptions =
            ["*.bias=fp16", "embed*=none", "*.0.*eight=bf16"].map(|r| r.parse().unwrap()).into();
        let codec = |name: &str, shape: &[usize]| rules.codec(name, shape).map(ToString::to_string);
        assert_eq!(codec("layer.bias", &[10]).as_deref(), Some("fp16"));
        assert_eq!(codec("embedding", &[1000, 64]), None);
        assert_eq!(codec("block.0.weight", &[64, 64]).as_deref(), Some("bf16"));
        assert_eq!(codec("block.1.weight", &[64, 64]).as_deref(), Some("sign"));
        assert_eq!(codec("layer.biases", &[64, 64]).as_deref(), Some("sign"));
    }

    #[test]
    fn patterns_fit_whole_names() {
        let fits = |pattern: &str, name: &str| Rule::new(pattern, None).fits(name);
        assert!(fits("a", "a") && fits("*", "") && fits("a*", "a") && fits("a*c", "abc"));
        assert!(fits("*b*", "abc") && fits("a*b*c", "a-b-b-c") && fits("**", "x"));
        assert!(!fits("a", "ab") && !fits("a*c", "abd") && !fits("ab*ba", "aba"));
    }

    #[test]
    fn a_rule_without_a_codec_is_refused() {
        assert!("weight".parse::<Rule>().is_err());
        assert!("weight=zip".parse::<Rule>().is_err());
        assert_eq!("w*=topk:2%".parse::<Rule>().unwrap().to_string(), "w*=topk:2%");
    }
}
