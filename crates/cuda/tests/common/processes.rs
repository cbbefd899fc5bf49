//! Ranks that are processes: copies of this program, which meet over loopback.
//!
//! A copy is told its rank by the environment. It says where it can be reached on its standard output,
//! gets the addresses of all on its standard input, and from then on says what it likes: lines that
//! begin with [`MARK`], since a test harness says things of its own.
#![allow(dead_code, reason = "every program uses another part")]

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use unisono_collective::fabric::{Address, Connector, Endpoint};
use unisono_net::Token;

const RANK: &str = "DEVICE_TEST_RANK";
const WORLD: &str = "DEVICE_TEST_WORLD";
const TOKEN: &str = "DEVICE_TEST_TOKEN";

/// Names the host of every rank by a number, as if they were on several: `0,0,1,1`.
pub const HOSTS: &str = "DEVICE_TEST_HOSTS";

/// What lines of ranks begin with.
const MARK: &str = "rank says: ";

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Processes that are ranks of one world. They are killed with it.
pub struct Ranks {
    pub processes: Vec<Child>,
    lines: Receiver<(usize, String)>,
}

impl Ranks {
    /// Starts a world of copies of this program, each with what `adapt` adds for it.
    pub fn start(world: usize, adapt: impl Fn(usize, &mut Command)) -> Outcome<Ranks> {
        let token = Token::random()?.to_hex();
        let (say, lines) = channel();
        let mut processes = Vec::new();
        for rank in 0..world {
            let mut command = Command::new(std::env::current_exe()?);
            command.env(RANK, rank.to_string()).env(WORLD, world.to_string()).env(TOKEN, &token);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            adapt(rank, &mut command);
            let mut process = command.spawn()?;
            let output = process.stdout.take().expect("piped above");
            let say = say.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    // The harness begins a line and lets the test end it.
                    let Some((_, said)) = line.split_once(MARK) else { continue };
                    if say.send((rank, said.to_owned())).is_err() {
                        return;
                    }
                }
            });
            processes.push(process);
        }
        let mut ranks = Ranks { processes, lines };
        let mut roster = vec![String::new(); world];
        for _ in 0..world {
            let (rank, address) = ranks.next(Duration::from_secs(60))?;
            roster[rank] = address;
        }
        let roster = roster.join(" ") + "\n";
        for process in &mut ranks.processes {
            process.stdin.take().expect("piped above").write_all(roster.as_bytes())?;
        }
        Ok(ranks)
    }

    /// What a rank says next.
    pub fn next(&self, within: Duration) -> Outcome<(usize, String)> {
        self.lines.recv_timeout(within).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("no rank said anything within {within:?}").into(),
            RecvTimeoutError::Disconnected => "all ranks have ended".into(),
        })
    }

    /// What each of so many ranks says next, in the order of arrival.
    pub fn hear(&self, count: usize, within: Duration) -> Outcome<Vec<(usize, String)>> {
        let deadline = Instant::now() + within;
        (0..count).map(|_| self.next(deadline.saturating_duration_since(Instant::now()))).collect()
    }

    /// Prints what ranks say until each has said `last`, within this time from one line to the next, and waits for them to
    /// end well.
    pub fn print_until(&mut self, last: &str, within: Duration) -> Outcome<()> {
        let mut done = 0;
        while done < self.processes.len() {
            match self.next(within)? {
                (_, line) if line == last => done += 1,
                (rank, line) if line.starts_with("error") => {
                    return Err(format!("rank {rank}: {line}").into());
                }
                (_, line) => println!("{line}"),
            }
        }
        match self.finish()?.as_slice() {
            [] => Ok(()),
            failed => Err(format!("ranks {failed:?} failed").into()),
        }
    }

    /// Kills a rank, so that it has no time for anything.
    pub fn kill(&mut self, rank: usize) -> Outcome<()> {
        self.processes[rank].kill()?;
        self.processes[rank].wait()?;
        Ok(())
    }

    /// Waits for all ranks to end by themselves; those that failed.
    pub fn finish(&mut self) -> Outcome<Vec<usize>> {
        let mut failed = Vec::new();
        for (rank, process) in self.processes.iter_mut().enumerate() {
            if !process.wait()?.success() {
                failed.push(rank);
            }
        }
        Ok(failed)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A rank among others.
pub struct Place {
    pub connector: Arc<dyn Connector>,
    pub rank: usize,
    pub world: usize,
}

/// Where this process is, if it is a rank.
pub fn place() -> Outcome<Option<Place>> {
    let Ok(rank) = std::env::var(RANK) else { return Ok(None) };
    let (rank, world): (usize, usize) = (rank.parse()?, std::env::var(WORLD)?.parse()?);
    let token: Token = std::env::var(TOKEN)?.parse()?;
    let endpoint = Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    say(&serde_json::to_string(endpoint.address())?.replace(' ', ""))?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let hosts = std::env::var(HOSTS).unwrap_or_default();
    let mut hosts = hosts.split(',').filter(|host| !host.is_empty());
    let roster = line.split_whitespace().map(|address| {
        let mut address: serde_json::Value = serde_json::from_str(address)?;
        if let Some(host) = hosts.next() {
            address["host"] = [host.parse::<u8>()?; 16].into_iter().collect();
        }
        Ok(serde_json::from_value(address)?)
    });
    let roster: Vec<Address> = roster.collect::<Outcome<_>>()?;
    Ok(Some(Place { connector: endpoint.open(rank, token, roster)?, rank, world }))
}

/// Says something to who started the ranks, in one piece.
pub fn say(what: &str) -> Outcome<()> {
    let line = format!("{MARK}{what}\n");
    let mut output = std::io::stdout().lock();
    output.write_all(line.as_bytes())?;
    output.flush()?;
    Ok(())
}
