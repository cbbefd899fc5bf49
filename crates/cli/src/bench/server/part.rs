//! The processes that a measurement consists of: how they are started, what they are told to be, and how they answer.
//! There is one server for every transport, one process for the loopback, and the workers. Every message is a line of
//! JSON on the input or output of such a process.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use anyhow::{Context, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use unisono_relaxed::server::{Files, Server, ServerOptions};

use super::model::Model;
use super::worker::Worker;
use super::{Way, loopback};

/// What a process is told to be.
#[derive(Serialize, Deserialize)]
pub enum Part {
    /// A server. Answers with its address.
    Server { token: String, journal: Option<PathBuf> },
    /// The limit. Answers with its address.
    Loopback { model: Model },
    /// A worker, which answers when it is connected, and then to every [`Turn`].
    Worker { model: Model, token: String, number: u32, places: Vec<(Way, SocketAddr)> },
}

/// Asks a worker to push and pull for so many seconds. It answers with the microseconds of each.
#[derive(Serialize, Deserialize)]
pub struct Turn {
    pub way: Way,
    pub seconds: f64,
}

/// A process that is one of the parts.
pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub fn start(part: &Part) -> anyhow::Result<Process> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["bench", "server", "--as-part"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a part of the measurement")?;
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut process = Process { input: child.stdin.take(), child, output };
        process.tell(part)?;
        Ok(process)
    }

    pub fn tell(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(message)? + "\n";
        let input = self.input.as_mut().expect("open until the end");
        input.write_all(line.as_bytes()).context("a part of the measurement has ended")
    }

    pub fn answer<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "a part of the measurement has ended");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Process {
    /// Every part ends with its input.
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Is the part that the first line of the input says.
pub fn be_part() -> anyhow::Result<ExitCode> {
    let mut orders = std::io::stdin().lines();
    let Some(order) = orders.next() else { return Ok(ExitCode::SUCCESS) };
    match serde_json::from_str(&order?)? {
        Part::Server { token, journal } => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let address = listener.local_addr()?;
            let files = Files { journal, ..Files::default() };
            let server = Server::start(
                listener.into(),
                ServerOptions { token: token.parse()?, files, recorder: None },
            )?;
            answer(&address)?;
            // Ends with the input, whose lock only another thread can wait for.
            drop(orders);
            let ended = std::thread::spawn(|| std::io::stdin().lines().for_each(drop));
            server.serve_until(|| ended.is_finished())?;
        }
        Part::Loopback { model } => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            answer(&listener.local_addr()?)?;
            loopback::serve(&listener, &model)?;
            orders.for_each(drop);
        }
        Part::Worker { model, token, number, places } => {
            let mut worker = Worker::connect(model, token.parse()?, number, &places)?;
            answer(&())?;
            for order in orders {
                answer(&worker.take_turn(&serde_json::from_str(&order?)?)?)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(message: &impl Serialize) -> anyhow::Result<()> {
    result_line!("{}", serde_json::to_string(message)?)?;
    Ok(())
}
