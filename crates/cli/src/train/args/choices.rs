//! What some flags can be.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use unisono::codec::{BadCodec, CodecSpec};

/// The most servers that a run starts on one machine.
const MOST_SERVERS: usize = 256;

#[derive(Clone, Copy, ValueEnum)]
pub enum Schedule {
    /// The same rate in every step.
    Constant,
    /// A warm-up over the first tenth, then half a cosine down to a tenth.
    Cosine,
}

/// Where the weights of a relaxed run live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServersChoice {
    /// In so many processes of their own.
    Started(usize),
    /// In the workers.
    Inside,
    /// In processes that run already.
    At(Vec<String>),
}

impl FromStr for ServersChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<ServersChoice, String> {
        if text == "inside" {
            return Ok(ServersChoice::Inside);
        }
        if let Ok(count) = text.parse() {
            return match count {
                1..=MOST_SERVERS => Ok(ServersChoice::Started(count)),
                _ => Err(format!("use 1 to {MOST_SERVERS}, or inside")),
            };
        }
        let addresses: Vec<String> = text.split(',').map(str::to_owned).collect();
        match addresses.iter().all(|address| address.contains(':')) {
            true => Ok(ServersChoice::At(addresses)),
            false => Err("give a number, inside, or HOST:PORT,HOST:PORT".to_owned()),
        }
    }
}

/// What gradients are encoded by.
#[derive(Clone, Debug, PartialEq)]
pub enum CodecChoice {
    /// Nothing.
    None,
    /// What is found to be fastest.
    Auto,
    /// This one.
    Fixed(CodecSpec),
}

impl FromStr for CodecChoice {
    type Err = BadCodec;

    fn from_str(text: &str) -> Result<CodecChoice, BadCodec> {
        Ok(match text {
            "none" => CodecChoice::None,
            "auto" => CodecChoice::Auto,
            other => CodecChoice::Fixed(other.parse()?),
        })
    }
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecChoice::None => f.write_str("none"),
            CodecChoice::Auto => f.write_str("auto"),
            CodecChoice::Fixed(codec) => codec.fmt(f),
        }
    }
}
