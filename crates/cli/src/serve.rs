//! `unisono serve`: one of the parameter servers.

use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use socket2::{Domain, Socket, Type};
use unisono::Options;
use unisono::cluster::worker::{Worker, inherited_listener};
use unisono::net::Token;
use unisono::recording::relaxed::ServerRecorder;
use unisono::relaxed::events::Recorder;
use unisono::relaxed::server::journal::{JournalError, Lock};
use unisono::relaxed::server::{Files, Server, ServerOptions};

use crate::exit::{Wrong, WrongCall};

/// What `unisono serve` takes.
#[derive(Args)]
#[command(after_help = "\
`unisono run --servers S` and `unisono train --strategy ssp:3 --servers S` start servers by themselves. \
Beyond one machine, start them where you want them, all with the same UNISONO_TOKEN:
  server-a$ unisono serve --listen server-a:4000 --server 0 --journal journal-0
  server-b$ unisono serve --listen server-b:4000 --server 1 --journal journal-1
  workers$  unisono train --strategy ssp:3 --servers server-a:4000,server-b:4000")]
pub struct ServeArgs {
    /// Where to listen; by default at the socket that a launcher has opened.
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Which of the servers this is, from 0.
    #[arg(long, env = "UNISONO_SERVER", value_name = "K", default_value_t = 0)]
    server: usize,
    /// The folder in which updates are written down before they are acknowledged. A server that is
    /// started again with it goes on where it was.
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// Wait until every update is on the disk, so that none is lost if the machine goes down.
    #[arg(long, requires = "journal")]
    sync: bool,
    /// The folder of the run, in which every push is recorded.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
}

/// Serves until it is told to stop.
pub fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }
    let listener = match &args.listen {
        Some(address) => listen(address)?,
        None => inherited()?.ok_or_else(|| {
            WrongCall::new(
                "nowhere to listen: give --listen HOST:PORT, or let `unisono run` start it"
                    .to_owned(),
            )
        })?,
    };
    let files =
        Files { number: args.server, journal: args.journal, sync: args.sync, snapshot_after: None };
    let mut recorder: Option<Box<dyn Recorder>> = None;
    if let Some(dir) = &args.run_dir {
        // Workers of another machine cannot make it.
        std::fs::create_dir_all(dir)
            .with_context(|| format!("--run-dir {}: name another folder", dir.display()))
            .wrong_call()?;
        recorder = Some(Box::new(ServerRecorder::new(dir, args.server)));
    }
    let server = Server::start(listener, ServerOptions { token: token()?, files, recorder })?;
    server.serve_until(|| stop.load(Ordering::Relaxed))?;
    Ok(ExitCode::SUCCESS)
}

/// Keeps others from leading a run with a journal, until it is dropped.
pub fn lock_journal(journal: &Path) -> anyhow::Result<Lock> {
    match Lock::take(journal, Duration::ZERO) {
        Ok(lock) => Ok(lock),
        Err(error @ JournalError::InUse { .. }) => bail!("--journal: {error}"),
        Err(error) => Err(error)
            .with_context(|| format!("--journal {}: name another folder", journal.display())),
    }
}

/// The token of the job.
pub fn token() -> anyhow::Result<Token> {
    let token = Worker::from_env().and_then(|worker| worker.token()).wrong_call()?;
    Ok(token.with_encryption(Options::from_env().wrong_call()?.encrypt))
}

/// The socket that a launcher has opened for this process, if it has.
pub fn inherited() -> anyhow::Result<Option<Socket>> {
    inherited_listener().wrong_call()
}

fn listen(address: &str) -> anyhow::Result<Socket> {
    let bind = || -> std::io::Result<Socket> {
        let unknown = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let at = address.to_socket_addrs()?.next().ok_or_else(unknown)?;
        let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&at.into())?;
        socket.listen(128)?;
        Ok(socket)
    };
    bind()
        .with_context(|| format!("--listen {address}: give HOST:PORT, a free port of this machine"))
        .wrong_call()
}
