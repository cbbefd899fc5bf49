//! `unisono completions`: a script for a shell.

use std::process::ExitCode;

use clap::Args;
use clap_complete::{Shell, generate};

use crate::output;

/// What `unisono completions` takes.
#[derive(Args)]
#[command(after_help = "\
Load it in every new shell:
  bash  unisono completions bash >~/.local/share/bash-completion/completions/unisono
  zsh   unisono completions zsh >~/.zfunc/_unisono      (with ~/.zfunc in fpath, before compinit)
  fish  unisono completions fish >~/.config/fish/completions/unisono.fish")]
pub struct CompletionsArgs {
    /// The shell that is to load it.
    shell: Shell,
}

/// Prints the script.
pub fn run(args: CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    generate(args.shell, &mut crate::command(), "unisono", &mut script);
    output::text_out(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
