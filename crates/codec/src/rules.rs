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

    /// Fails if a rule fits none of these parameters: the user meant others.
    pub fn expect_fits<'a>(
        &self,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), UnusedRule> {
        let fits_none = |rule: &&Rule| !names.clone().any(|name| rule.fits(name));
        match self.exceptions.iter().find(fits_none) {
            None => Ok(()),
            Some(rule) => Err(UnusedRule::new(rule, names)),
        }
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

/// A rule fits no parameter of the model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the codec rule {rule} fits no parameter; {}", self.parameters())]
pub struct UnusedRule {
    /// The rule.
    pub rule: Rule,
    /// The names that are most like its pattern, the likest first: all of them, if they are few.
    pub nearest: Vec<String>,
    /// How many parameters there are.
    pub count: usize,
}

impl UnusedRule {
    /// Names in an error. More are not read; fewer may leave out the one that was meant.
    const NAMES: usize = 8;

    fn new<'a>(rule: &Rule, names: impl Iterator<Item = &'a str>) -> UnusedRule {
        let plain = rule.pattern.replace('*', "");
        let mut names: Vec<&str> = names.collect();
        let count = names.len();
        if count > UnusedRule::NAMES {
            names.sort_by_cached_key(|name| distance(&plain, name));
            names.truncate(UnusedRule::NAMES);
        }
        let nearest = names.into_iter().map(str::to_owned).collect();
        UnusedRule { rule: rule.clone(), nearest, count }
    }

    fn parameters(&self) -> String {
        let names = self.nearest.join(", ");
        match self.count {
            0 => "there is none".to_owned(),
            count if count > self.nearest.len() => {
                format!("of {count} parameters, the names most like it are {names}")
            }
            _ => format!("the parameters are {names}"),
        }
    }
}

/// Letters to insert, remove or replace to make one text of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
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
    fn a_rule_that_fits_nothing_is_refused_by_the_names_it_may_have_meant() {
        let rules = Rules { codec: None, exceptions: vec!["*=none".parse().unwrap()] };
        assert_eq!(rules.expect_fits(["a"].into_iter()), Ok(()));
        let exceptions = ["linear1*=none", "embd.*=int8"].map(|rule| rule.parse().unwrap()).into();
        let rules = Rules { codec: None, exceptions };
        let few = ["linear1.weight", "embed.weight"];
        let error = rules.expect_fits(few.into_iter()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the codec rule embd.*=int8 fits no parameter; the parameters are linear1.weight, \
             embed.weight"
        );
        let mut many: Vec<String> = (0..100).map(|i| format!("linear{i}.weight")).collect();
        many.push("embed.bias".to_owned());
        let error = rules.expect_fits(many.iter().map(String::as_str)).unwrap_err();
        assert_eq!((error.nearest[0].as_str(), error.nearest.len()), ("embed.bias", 8));
        assert!(error.to_string().contains("of 101 parameters"), "{error}");
        let error = rules.expect_fits(std::iter::empty()).unwrap_err();
        assert!(error.to_string().ends_with("there is none"), "{error}");
    }

    #[test]
    fn a_rule_without_a_codec_is_refused() {
        assert!("weight".parse::<Rule>().is_err());
        assert!("weight=zip".parse::<Rule>().is_err());
        assert_eq!("w*=topk:2%".parse::<Rule>().unwrap().to_string(), "w*=topk:2%");
    }
}
