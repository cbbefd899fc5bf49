//! `unisono report`: what a run was spent on.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use unisono::insight::folder::RunFolder;
use unisono::insight::relaxed::RelaxedFolder;

/// What `unisono report` takes.
#[derive(Args)]
pub struct ReportArgs {
    /// The folder that a run has left.
    dir: PathBuf,
    /// Write report.html and the rest again, for a run that was killed before it could.
    #[arg(long)]
    rewrite: bool,
    /// Columns of the terminal.
    #[arg(long, default_value_t = 100)]
    width: usize,
}

/// Prints the report.
pub fn run(args: ReportArgs) -> anyhow::Result<ExitCode> {
    let text = if RelaxedFolder::is_relaxed(&args.dir) {
        let saved = RelaxedFolder::open(&args.dir)?;
        if args.rewrite {
            saved.write()?;
        }
        saved.report().terminal(args.width)
    } else {
        let run = RunFolder::open(&args.dir)?;
        if args.rewrite {
            run.write()?;
        }
        run.report().terminal(args.width)
    };
    writeln!(std::io::stdout(), "{text}").context("writing the report")?;
    Ok(ExitCode::SUCCESS)
}
