//! `--config FILE`: flags that need not be typed.
//!
//! The file is TOML, and its keys are the long names of flags:
//!
//! ```toml
//! workers = 4
//! learning-rate = 1e-3
//! hidden = [128, 64]
//! codec-rule = ["embed*=none", "*.bias=none"]
//! resume = true
//! ```
//!
//! A flag that is typed wins over the file. So before the arguments are understood, those of the file
//! that were not typed are put before them; what comes after that need not know of files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::Value;
use unisono::cluster::variables::nearest;

/// The flag's name.
const CONFIG: &str = "config";

/// Gives a command the flag.
pub fn accepting(command: Command) -> Command {
    let flag = Arg::new(CONFIG)
        .long(CONFIG)
        .value_name("FILE")
        .value_parser(clap::value_parser!(PathBuf))
        .help("Take flags from this TOML file: steps = 100; those that are typed win");
    command.arg(flag).args_override_self(true)
}

/// How the program was called.
pub struct Call {
    /// All arguments, those of a file among them.
    pub arguments: Vec<OsString>,
    /// The file, if there is one.
    pub file: Option<PathBuf>,
}

impl Call {
    /// Reads the file that the arguments name, if they do.
    pub fn new(command: Command, typed: Vec<OsString>) -> anyhow::Result<Call> {
        // Whatever is wrong with what was typed will be said when it is parsed with the file's flags.
        let understood = command.clone().ignore_errors(true).try_get_matches_from(&typed).ok();
        let found = understood.as_ref().and_then(|matches| {
            let (name, matches) = matches.subcommand()?;
            let file = matches.try_get_one::<PathBuf>(CONFIG).ok()??.clone();
            Some((command.find_subcommand(name)?, matches, file))
        });
        let Some((command, matches, file)) = found else {
            return Ok(Call { arguments: typed, file: None });
        };
        let ours = read(&file)
            .and_then(|table| flags(&table, command, matches))
            .with_context(|| format!("--config {}", file.display()))?;
        let mut typed = typed.into_iter();
        // The program and the name of the command.
        let mut arguments: Vec<OsString> = typed.by_ref().take(2).collect();
        arguments.extend(ours);
        arguments.extend(without_config(typed));
        Ok(Call { arguments, file: Some(file) })
    }
}

fn read(file: &Path) -> anyhow::Result<toml::Table> {
    let text = std::fs::read_to_string(file).context("cannot be read; name a TOML file")?;
    text.parse().map_err(|error: toml::de::Error| {
        let offset = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
        let reason = error.message().lines().map(str::trim).collect::<Vec<_>>().join(" ");
        anyhow!("line {line}: {reason}")
    })
}

/// The flags of a file that were not typed.
fn flags(
    table: &toml::Table,
    command: &Command,
    typed: &ArgMatches,
) -> anyhow::Result<Vec<OsString>> {
    let known =
        |arg: &&Arg| !arg.is_hide_set() && ![CONFIG, "help"].contains(&arg.get_id().as_str());
    let mut flags = Vec::new();
    for (key, value) in table {
        let mut candidates = command.get_arguments().filter(known);
        let Some(arg) = candidates.find(|arg| arg.get_long() == Some(key)) else {
            let names = command.get_arguments().filter(known).filter_map(Arg::get_long);
            match nearest(key, names) {
                Some(meant) => bail!("there is no flag --{key}; did you mean {meant}?"),
                None => {
                    bail!("there is no flag --{key}; see unisono {} --help", command.get_name())
                }
            }
        };
        if typed.value_source(arg.get_id().as_str()) != Some(ValueSource::CommandLine) {
            flags.extend(flag(key, value, arg)?.into_iter().map(OsString::from));
        }
    }
    Ok(flags)
}

/// One key of a file as flags.
fn flag(key: &str, value: &Value, arg: &Arg) -> anyhow::Result<Vec<String>> {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return match value {
            Value::Boolean(true) => Ok(vec![format!("--{key}")]),
            Value::Boolean(false) => Ok(Vec::new()),
            _ => bail!("{key} is on or off: use true or false"),
        };
    }
    let is_list = matches!(arg.get_action(), ArgAction::Append);
    match (value, arg.get_value_delimiter()) {
        (Value::Array(values), Some(delimiter)) => {
            let texts =
                values.iter().map(|value| text(key, value)).collect::<Result<Vec<_>, _>>()?;
            ensure!(!texts.is_empty(), "{key} is empty; leave it out");
            Ok(vec![format!("--{key}={}", texts.join(&delimiter.to_string()))])
        }
        (Value::Array(values), None) if is_list => {
            values.iter().map(|value| Ok(format!("--{key}={}", text(key, value)?))).collect()
        }
        (Value::Array(_), None) => bail!("{key} has one value, not a list"),
        (value, _) => Ok(vec![format!("--{key}={}", text(key, value)?)]),
    }
}

fn text(key: &str, value: &Value) -> anyhow::Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Ok(value.to_string()),
        _ => bail!("{key} must be text, a number, true or false, or a list of those"),
    }
}

/// The arguments without the first `--config`, whose file has been read: processes that are started with
/// these arguments must not read it again, for it may have changed.
fn without_config(typed: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut typed = typed.peekable();
    let mut kept = Vec::new();
    let mut removed = false;
    while let Some(argument) = typed.next() {
        let text = argument.to_string_lossy();
        if removed || !(text == "--config" || text.starts_with("--config=")) {
            kept.push(argument);
            continue;
        }
        removed = true;
        if text == "--config" {
            typed.next();
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        let flag = |name: &'static str| Arg::new(name).long(name);
        let sub = Command::new("go")
            .arg(flag("steps").value_parser(clap::value_parser!(u32)))
            .arg(flag("rate").requires("steps"))
            .arg(flag("resume").action(ArgAction::SetTrue))
            .arg(flag("sizes").action(ArgAction::Append).value_delimiter(','))
            .arg(flag("rule").action(ArgAction::Append))
            .arg(flag("secret").hide(true))
            .arg(Arg::new("rest").num_args(0..).trailing_var_arg(true).allow_hyphen_values(true));
        Command::new("program").subcommand(accepting(sub))
    }

    /// The arguments after those of the program and the command, or the error.
    fn called(file: &str, typed: &str) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, file).unwrap();
        let typed = typed.replace("FILE", path.to_str().unwrap());
        let typed = ["program"].into_iter().chain(typed.split_whitespace()).map(OsString::from);
        let call =
            Call::new(command(), typed.collect()).map_err(|error| crate::one_line(&error))?;
        let texts: Vec<_> = call.arguments.iter().map(|text| text.to_string_lossy()).collect();
        Ok(texts[2..].join(" "))
    }

    #[test]
    fn flags_of_a_file_come_before_those_that_were_typed() {
        let file =
            "rate = -1e-3\nresume = true\nrule = [\"a=b\", \"c=d\"]\nsizes = [1, 2]\nsteps = 5";
        let all = "--rate=-0.001 --resume --rule=a=b --rule=c=d --sizes=1,2 --steps=5";
        assert_eq!(called(file, "go --config FILE").unwrap(), all);
        assert_eq!(called(file, "go --config=FILE a b").unwrap(), format!("{all} a b"));
        let rest = "--rate=-0.001 --resume --sizes=1,2 --steps 7 --rule x=y";
        assert_eq!(called(file, "go --steps 7 --config FILE --rule x=y").unwrap(), rest);
        assert_eq!(called("resume = false", "go --config FILE").unwrap(), "");
        // What only the file makes right.
        assert_eq!(called("steps = 5", "go --rate 3 --config FILE").unwrap(), "--steps=5 --rate 3");
    }

    #[test]
    fn a_program_that_is_started_keeps_its_own_flags() {
        assert_eq!(called("steps = 5", "go prog --config FILE").unwrap().split(' ').count(), 3);
        let twice = called("steps = 5", "go --config FILE prog --config other").unwrap();
        assert_eq!(twice, "--steps=5 prog --config other");
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        for (file, words) in [
            ("step = 5", "there is no flag --step; did you mean steps?"),
            ("colour = 5", "there is no flag --colour; see unisono go --help"),
            ("secret = 5", "there is no flag --secret"),
            ("config = 'x'", "there is no flag --config"),
            ("rate = 1\nsteps = ", "line 2: "),
            ("resume = 'yes'", "resume is on or off"),
            ("steps = [1, 2]", "steps has one value"),
            ("[steps]\na = 1", "steps must be text, a number"),
        ] {
            let error = called(file, "go --config FILE").unwrap_err();
            assert!(error.contains(words) && error.starts_with("--config "), "{file}: {error}");
        }
        let missing = called("", "go --config FILE-that-is-not-there").unwrap_err();
        assert!(missing.contains("cannot be read; name a TOML file"), "{missing}");
    }
}
