//! `unisono run`: start a program on several ranks.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use unisono::cluster::launch::{
    Completion, Elastic, Launch, LaunchError, Nodes, Outcome, Restarts, Servers,
};
use unisono::cluster::membership::History;
use unisono::cluster::membership::machines::{JoinError, JoinRefused};
use unisono::cluster::place::MAX_WORLD;
use unisono::net::Token;

use crate::exit::Wrong;
use crate::output;

/// What `unisono run` takes.
#[derive(Args)]
#[command(after_help = "\
Every rank finds its place in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and \
MASTER_PORT. If a rank fails, the others are ended, and its exit code is the launcher's. Lines of the \
ranks' output stay whole, up to 16 MiB each. If the reader of the output goes away, the ranks are ended.

Several nodes: start the same command on each, with its own --node-rank:
  node-a$ unisono run -n 8 --nnodes 2 --node-rank 0 --rendezvous node-a:29400 -- ./train
  node-b$ unisono run -n 8 --nnodes 2 --node-rank 1 --rendezvous node-a:29400 -- ./train
Set UNISONO_TOKEN to the same 64 hexadecimal digits on all nodes to keep strangers out.

Servers: processes of `unisono serve` beside the ranks, for ranks that do not wait for each other:
  unisono run --servers 2 -n 8 --journal /scratch/journal --restarts 100 -- ./train
They are started before the ranks, and told to end when all ranks have ended well.
  UNISONO_SERVERS    where they listen: HOST:PORT,HOST:PORT, in their order
  UNISONO_SERVER     (servers) the number of this one, from 0
  UNISONO_LISTEN_FD  (servers) the open file that listens; restarts do not close it
  UNISONO_LIFE       how often this launcher has started this rank or server before: 0, 1, 2
  UNISONO_TOKEN      what connections prove to know
A rank or server is started again if a signal killed it or it exited with an error; but not after \
exit code 2 or 64 (called wrongly), nor an error in the first second of its first life. Ranks that \
form a group must not be restarted, unless they may come and go: a group ends with the loss of a rank.

Ranks that may come and go, of programs that train by an ElasticReplica or ElasticJob:
  unisono run --elastic 1:4 -n 4 -- ./train
Machines that may come and go as well, with the same command on each:
  unisono run --elastic 2:16 --etcd http://a:2379,http://b:2379,http://c:2379 --job NAME -n 4 -- ./train
A machine whose launcher gets SIGTERM leaves the job at the end of a step, and the others go on.
When a rank is lost it is started again, and the others go on meanwhile. The result that rank 0 hands in is \
printed once, after all else.
  UNISONO_MEMBERSHIP  where this launcher coordinates the ranks: HOST:PORT")]
pub struct RunArgs {
    /// Ranks to start on this node; nodes may differ.
    #[arg(short = 'n', long = "ranks", value_name = "N", default_value_t = 1)]
    ranks: u32,
    /// How many nodes the job has.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "rendezvous")]
    nnodes: u32,
    /// Which of them this is, from 0.
    #[arg(long, value_name = "K", default_value_t = 0, requires = "rendezvous")]
    node_rank: u32,
    /// Where node 0 listens for the others.
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
    /// Let ranks be lost and come back while the others train on. MIN: the fewest with which the job goes
    /// on. MAX: the most that train at a time, while the rest wait as spares [default: all].
    #[arg(long, value_name = "MIN[:MAX]")]
    elastic: Option<String>,
    /// Share the job with other machines, which may come and go: where etcd is, with --elastic and --job.
    #[arg(long, value_name = "URL[,URL…]", requires_all = ["elastic", "job"])]
    etcd: Option<String>,
    /// The name of the job in etcd: the same on all its machines.
    #[arg(long, value_name = "NAME", requires = "etcd")]
    job: Option<String>,
    /// Seconds to wait for the other nodes [default: 300], or with --elastic for enough ranks [default: 60].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Seconds that ranks may take to end when told to, before they are killed.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    grace: u64,
    /// Servers to start beside the ranks.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=1024))]
    servers: Option<u32>,
    /// Where servers keep what must survive their restart: server K in DIR/K.
    #[arg(long, value_name = "DIR", requires = "servers")]
    journal: Option<PathBuf>,
    /// The folder in which servers record every push, for the report of `unisono train --run-dir DIR`.
    #[arg(long, value_name = "DIR", requires = "servers")]
    run_dir: Option<PathBuf>,
    /// How often ranks and servers that fail are started again, all together [default: 0, or 100 with
    /// --elastic].
    #[arg(long, value_name = "R")]
    restarts: Option<u32>,
    /// Begin every line of stdout with its rank, as lines of stderr do.
    #[arg(long)]
    prefix: bool,
    /// Bind every rank to its share of the cores, if there are as many as ranks. Good for a job
    /// that has the machine to itself.
    #[arg(long)]
    bind: bool,
    /// Do not mention ranks and servers that are started again.
    #[arg(long, short)]
    quiet: bool,
    /// Check the call and print what would be started, without starting it.
    #[arg(long)]
    dry_run: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Starts the job, stays with it, and returns what the process should exit with.
pub fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let nodes = args
        .rendezvous
        .map(|text| {
            let Some(rendezvous) = Nodes::parse_rendezvous(&text) else {
                refuse!("--rendezvous {text} is not HOST:PORT")
            };
            anyhow::Ok(Nodes { count: args.nnodes, node: args.node_rank, rendezvous })
        })
        .transpose()?;
    demand!(
        args.servers.is_none() || args.nnodes == 1,
        "--servers is for jobs of one node; for several, start `unisono serve --listen HOST:PORT` \
         where you want servers, and set UNISONO_SERVERS=HOST:PORT,HOST:PORT for the ranks"
    );
    let options = unisono::Options::from_env().wrong_call()?;
    let elastic = match &args.elastic {
        None => None,
        Some(text) => {
            demand!(
                nodes.is_none(),
                "--elastic does not go with --rendezvous and --nnodes; for several machines use --etcd and \
                 --job on each"
            );
            demand!(
                args.servers.is_none(),
                "--elastic is for ranks that form groups; ranks with --servers are restarted without it"
            );
            let (least, most) = range(text, args.ranks, args.etcd.is_some())?;
            let patience = Duration::from_secs(args.timeout.unwrap_or(60));
            Some(Elastic { least, most, timeout: options.timeout, patience })
        }
    };
    let limit = args.restarts.unwrap_or(if elastic.is_some() { 100 } else { 0 });
    let (journal, run_dir) = (args.journal.as_deref(), args.run_dir.as_deref());
    // Held until the job is over.
    let _lock = journal.map(crate::serve::lock_journal).transpose()?;
    let servers = args.servers.map(|count| servers(count, journal, run_dir)).transpose()?;
    let shared = match (&args.etcd, &args.job) {
        (Some(urls), Some(job)) => Some(crate::etcd::share(urls, job, &options)?),
        _ => None,
    };
    let launch = Launch {
        nodes,
        shared,
        token: token()?,
        encrypt: options.encrypt,
        servers,
        elastic,
        restarts: Restarts { limit },
        grace: Duration::from_secs(args.grace),
        timeout: Duration::from_secs(args.timeout.unwrap_or(300)),
        label_stdout: args.prefix,
        bind: args.bind,
        quiet: args.quiet,
        ..Launch::new(args.command, args.ranks)
    };
    match args.dry_run {
        true => dry_run(&launch),
        false => start(&launch),
    }
}

/// Reads `MIN` or `MIN:MAX`, of a job that starts so many ranks, on this machine or on several.
fn range(text: &str, ranks: u32, several: bool) -> anyhow::Result<(u32, u32)> {
    let number = |text: &str| text.parse().ok().filter(|number| *number > 0);
    let (least, most) = match text.split_once(':') {
        Some((least, most)) => (number(least), number(most)),
        None if several => (number(text), Some(MAX_WORLD)),
        None => (number(text), Some(ranks)),
    };
    let (Some(least), Some(most)) = (least, most) else {
        refuse!("--elastic {text}: use MIN or MIN:MAX, such as 1:4, in numbers of ranks from 1");
    };
    demand!(
        several || least <= ranks,
        "--elastic {text}: use a MIN of 1 to {ranks}, the ranks of -n"
    );
    demand!(least <= most, "--elastic {text}: use a MAX of at least {least}, which is MIN");
    Ok((least, most))
}

/// Says what would be started.
fn dry_run(launch: &Launch) -> anyhow::Result<ExitCode> {
    launch.check()?;
    let command: Vec<String> = launch.command.iter().map(|word| quoted(word)).collect();
    let Some(program) = find_program(Path::new(&launch.command[0])) else {
        refuse!("cannot start {}: there is no such program", command[0]);
    };
    let mut out = String::new();
    let mut line = |name: &str, value: String| writeln!(out, "{name:<14}{value}");
    line("program", program.display().to_string())?;
    line("command", command.join(" "))?;
    match &launch.nodes {
        None => line("ranks", format!("{}, on this machine", launch.ranks))?,
        Some(nodes) => {
            line("ranks", format!("{} on this node", launch.ranks))?;
            let (host, port) = &nodes.rendezvous;
            line(
                "node",
                format!("{} of {}, which meet at {host}:{port}", nodes.node, nodes.count),
            )?;
        }
    }
    if let Some(servers) = &launch.servers {
        let addresses: Vec<String> = servers.addresses().iter().map(ToString::to_string).collect();
        line("servers", format!("{}, such as at {}", addresses.len(), addresses.join(", ")))?;
    }
    if let Some(Elastic { least, most, patience, .. }) = &launch.elastic {
        let range = format!("{least} to {most} ranks train, the rest are spares");
        line("elastic", format!("{range}; ends after {} s with fewer", patience.as_secs()))?;
    }
    if let Some(shared) = &launch.shared {
        line("machine", format!("{}, which others reach at {}", shared.host, shared.ip))?;
    }
    line("restarts", format!("{} in all", launch.restarts.limit))?;
    let cores = if launch.bind { "each rank its share, if there are enough" } else { "all" };
    line("cores", cores.to_owned())?;
    line("grace", format!("{} s to end when told to", launch.grace.as_secs()))?;
    let token = match (&launch.token, &launch.shared) {
        (Some(_), _) => "of UNISONO_TOKEN",
        (None, Some(_)) => "made up by the first machine, and kept in etcd",
        (None, None) => "made up",
    };
    line("token", token.to_owned())?;
    output::text_out(&out)?;
    Ok(ExitCode::SUCCESS)
}

/// A word as a shell would have to be told it.
fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let is_plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Where the system would find a program that can be started.
fn find_program(name: &Path) -> Option<PathBuf> {
    let can_start = |path: &PathBuf| {
        let about = path.metadata();
        about.is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    if name.components().count() > 1 {
        return Some(name.to_owned()).filter(can_start);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(can_start)
}

/// Runs `command` on `ranks` ranks of this machine, which has nothing else to do.
pub fn launch_here(ranks: usize, command: Vec<OsString>) -> anyhow::Result<ExitCode> {
    let ranks = u32::try_from(ranks).context("too many ranks").wrong_call()?;
    let encrypt = unisono::Options::from_env().wrong_call()?.encrypt;
    start(&Launch { bind: true, encrypt, ..Launch::new(command, ranks) })
}

/// `unisono serve`, so many times.
fn servers(count: u32, journal: Option<&Path>, run_dir: Option<&Path>) -> anyhow::Result<Servers> {
    let program = std::env::current_exe().context("where this program is")?;
    let command = |server: u32| {
        let mut command = vec![program.clone().into_os_string(), "serve".into()];
        if let Some(folder) = journal {
            command.extend(["--journal".into(), folder.join(server.to_string()).into()]);
        }
        if let Some(folder) = run_dir {
            command.extend(["--run-dir".into(), folder.into()]);
        }
        command
    };
    Ok(Servers::bind((0..count).map(command).collect())?)
}

fn start(launch: &Launch) -> anyhow::Result<ExitCode> {
    match launch.run_elastic() {
        Ok((outcome, completion)) => {
            let Completion { result, history } = completion;
            if history.epochs > 1 && !launch.quiet {
                say!("unisono: {}", told(&history));
            }
            if let (Outcome::NoProgress { .. }, Some(shard)) = (&outcome, history.poison()) {
                say!(
                    "unisono: each rank that was lost was computing shard {shard}: look at its data"
                );
            }
            let is_complete = matches!(outcome, Outcome::Success | Outcome::Interrupted { .. });
            let Some(result) = result.filter(|_| is_complete) else {
                return Ok(ExitCode::from(outcome.exit_code()));
            };
            output::bytes_out(&result)?;
            Ok(ExitCode::SUCCESS)
        }
        // As shells do: 127 for a program that is not there, 126 for one that does not start.
        Err(LaunchError::Spawn { command, cause }) => {
            say!("unisono: cannot start {command}: {cause}");
            let missing = cause.kind() == std::io::ErrorKind::NotFound;
            Ok(ExitCode::from(if missing { 127 } else { 126 }))
        }
        // A scheduler that starts a machine once more when all is done has nothing to repeat.
        Err(LaunchError::Join(error @ JoinError::Refused(JoinRefused::Complete))) => {
            say!("unisono: {error}");
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(error.into()),
    }
}

/// What happened to the ranks of an elastic job.
fn told(history: &History) -> String {
    let History { workers_lost, workers_joined, recoveries, .. } = history;
    let times = recoveries.len();
    format!("{workers_lost} ranks lost, {workers_joined} joined; went on {times} times")
}

fn token() -> anyhow::Result<Option<Token>> {
    match std::env::var("UNISONO_TOKEN") {
        Ok(text) if !text.is_empty() => {
            text.parse().map(Some).context("UNISONO_TOKEN").wrong_call()
        }
        Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(error).context("UNISONO_TOKEN").wrong_call(),
    }
}
