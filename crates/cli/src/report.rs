//! `unisono report`: what a run was spent on.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use unisono::insight::folder::RunFolder;
use unisono::insight::relaxed::RelaxedFolder;

use crate::output;

/// What `unisono report` takes.
#[derive(Args)]
pub struct ReportArgs {
    /// The folder that a run has left.
    dir: PathBuf,
    /// Write report.html and the rest again, for a run that was killed before it could.
    #[arg(long)]
    rewrite: bool,
    /// Columns to fit it into; by default those of the terminal, and as many as it takes where there is
    /// none.
    #[arg(long, value_name = "COLUMNS")]
    width: Option<usize>,
}

/// Prints the report.
pub fn run(args: ReportArgs) -> anyhow::Result<ExitCode> {
    let width = args.width.unwrap_or_else(output::columns);
    let mut broken = None;
    let text = if RelaxedFolder::is_relaxed(&args.dir) {
        let saved = RelaxedFolder::open(&args.dir)?;
        if args.rewrite {
            saved.write()?;
        }
        broken = saved.run.ledger().err();
        saved.report().terminal(width)
    } else {
        let run = RunFolder::open(&args.dir)?;
        if let Some(summary) = &run.summary
            && summary.steps as usize != run.steps.len()
        {
            say!(
                "unisono: warning: {} has records of {} of the {} steps that its summary counts; the \
                 report is of those",
                args.dir.display(),
                run.steps.len(),
                summary.steps
            );
        }
        if args.rewrite {
            run.write()?;
        }
        run.report().terminal(width)
    };
    result_line!("{text}")?;
    if let Some(error) = broken {
        bail!("the ledger of pushes does not add up: {error}; do not trust the weights");
    }
    Ok(ExitCode::SUCCESS)
}
