//! A rank: does what a [`Command`] says, with a real group.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use unisono::collective::fabric::{Endpoint, LocalHub};
use unisono::{Dtype, Element, Epoch, Error, Group, Reduction};

use super::churn::{self, churn};
use super::machine;
use super::protocol::{Call, Command, Failed, Failure, Formation, Reply, Timed};
use super::random::Random;

/// How a rank meets the others.
pub enum Meeting {
    /// As a process, over sockets that prove the job's token.
    Process,
    /// As a thread among those of this process.
    Thread(Arc<LocalHub>),
}

/// A rank at the command of a test.
pub struct Rank {
    meeting: Meeting,
    endpoint: Option<Endpoint>,
    group: Option<Group>,
    /// The group of which `group` is a part, if it is.
    world: Option<Group>,
}

/// Marks the lines of stdout that are replies, among those of the test harness.
pub const REPLY: char = '@';

/// Serves the commands on stdin.
pub fn serve_stdin() {
    env_logger::Builder::new().filter_level(log::LevelFilter::Warn).init();
    let mut rank = Rank::new(Meeting::Process);
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("the test writes lines");
        let command = serde_json::from_str(&line).expect("the test writes commands");
        rank.obey(command, &mut |reply| {
            let reply = serde_json::to_string(&reply).expect("replies are plain data");
            let written =
                std::io::stdout().lock().write_all(format!("\n{REPLY}{reply}\n").as_bytes());
            written.expect("the test reads");
        });
    }
}

impl Rank {
    pub fn new(meeting: Meeting) -> Rank {
        Rank { meeting, endpoint: None, group: None, world: None }
    }

    /// Carries out a command and answers it.
    pub fn obey(&mut self, command: Command, reply: &mut dyn FnMut(Reply)) {
        let answer = match command {
            Command::Bind { ip } => {
                let endpoint = Endpoint::bind(ip).expect("the test names an address of this host");
                let address = endpoint.address().clone();
                self.endpoint = Some(endpoint);
                Reply::Bound(address)
            }
            Command::Form(formation) => done(self.form(formation)),
            Command::Churn { seed } => {
                let started = || reply(Reply::Churning);
                let (error, calls) = churn(self.group(), seed, started);
                failed(error.into(), calls)
            }
            Command::Call(call) => done(make(self.group(), call).map_err(Failure::from)),
            Command::Settle => loop {
                if let Err(error) = self.group().barrier() {
                    break failed(error.into(), 0);
                }
            },
            Command::Digest { dtype, count } => match digest(self.group(), dtype, count) {
                Ok(digest) => Reply::Digest(digest),
                Err(error) => failed(error.into(), 0),
            },
            Command::Time { bytes, repeats } => match time(self.group(), bytes, repeats) {
                Ok(timed) => Reply::Timed(timed),
                Err(error) => failed(error.into(), 0),
            },
            Command::EndEpoch => {
                self.group().epoch().end();
                Reply::Done
            }
            Command::Split => done(self.group().split(Some(0), 0).map(drop).map_err(Failure::from)),
            Command::Subgroup { members } => {
                let world = self.world.take().or(self.group.take()).expect("there is a world");
                let formed = world.subgroup(&members).map(|group| self.group = Some(group));
                self.world = Some(world);
                done(formed.map_err(Failure::from))
            }
            Command::Leave => {
                (self.group, self.world) = (None, None);
                Reply::Residue(machine::residue())
            }
            Command::Fork => Reply::Forked(fork()),
            Command::Panic => panic!("the test asked for it"),
            Command::Inspect => Reply::Residue(machine::residue()),
        };
        reply(answer);
    }

    fn group(&self) -> &Group {
        self.group.as_ref().expect("the test forms a group first")
    }

    fn form(&mut self, formation: Formation) -> Result<(), Failure> {
        let Formation { rank, world, epoch, token, roster, settings } = formation;
        let connector = match &self.meeting {
            Meeting::Thread(hub) => hub.clone() as _,
            Meeting::Process => {
                let endpoint = self.endpoint.take().expect("the test binds first");
                let token = token.parse().expect("the test made the token");
                let opened = endpoint.open(rank, token, roster);
                opened.map_err(|error| Failure::Other(error.to_string()))?
            }
        };
        let options = settings.options();
        self.group = Some(Group::world(connector, Epoch::new(epoch), rank, world, options)?);
        Ok(())
    }
}

/// Forks a child that does nothing, without `exec`, and holds what its parent had open.
fn fork() -> u32 {
    // SAFETY: the child makes only calls that are safe after a fork of a process with threads.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
        0 => {
            // Should the test die before it can end the child, a signal does.
            // SAFETY: as above.
            unsafe { libc::alarm(300) };
            loop {
                // SAFETY: as above.
                unsafe { libc::pause() };
            }
        }
        child => child as u32,
    }
}

fn done(outcome: Result<(), Failure>) -> Reply {
    match outcome {
        Ok(()) => Reply::Done,
        Err(failure) => failed(failure, 0),
    }
}

fn failed(failure: Failure, calls: u64) -> Reply {
    Reply::Failed(Failed { failure, at: machine::now(), calls })
}

fn make(group: &Group, call: Call) -> Result<(), Error> {
    let mine = group.rank() as i64 + 1;
    match call {
        Call::AllReduce { dtype: Dtype::I64, count, reduction: Reduction::Sum } => {
            churn::checked_sum(group, count)
        }
        Call::AllReduce { dtype: Dtype::F32, count, reduction } => {
            group.all_reduce(&mut vec![mine as f32; count], reduction)
        }
        Call::AllReduce { dtype: Dtype::I32, count, reduction } => {
            group.all_reduce(&mut vec![mine as i32; count], reduction)
        }
        Call::AllReduce { .. } => panic!("no test asks a rank for {call:?}"),
        Call::AllGather { count } => {
            let mut output = vec![0; count * group.size()];
            group.all_gather(&vec![mine; count], &mut output)
        }
        Call::Broadcast { count, root } => group.broadcast(&mut vec![mine; count], root),
        Call::Reduce { count, root } => {
            let mut output = vec![0; count];
            let output = (group.rank() == root).then_some(&mut output[..]);
            group.reduce(&vec![mine; count], output, Reduction::Sum, root)
        }
        Call::Barrier => group.barrier(),
        Call::Send { to, tag, count } => group.send(&vec![mine; count], to, tag),
        Call::Receive { from, tag, count } => {
            let mut buffer = vec![0i64; count];
            group.receive(&mut buffer, from, tag)?;
            assert!(buffer.iter().all(|&value| value == from as i64 + 1));
            Ok(())
        }
    }
}

/// A hash of the bits of an all-reduce whose inputs depend on rank and position alone.
fn digest(group: &Group, dtype: Dtype, count: usize) -> Result<u64, Error> {
    fn reduced<T: Element>(
        group: &Group,
        count: usize,
        from: fn(f32) -> T,
        bits: fn(&T) -> u32,
    ) -> Result<u64, Error> {
        let mut random = Random::new(group.rank() as u64);
        // Sums of numbers of such different size depend on the order of the additions.
        let mut number = || (random.next() as i32 as f32) * 2f32.powi(random.below(20) as i32 - 30);
        let mut buffer: Vec<T> = (0..count).map(|_| from(number())).collect();
        group.all_reduce(&mut buffer, Reduction::Sum)?;
        let mut hasher = DefaultHasher::new();
        buffer.iter().map(bits).collect::<Vec<u32>>().hash(&mut hasher);
        Ok(hasher.finish())
    }
    match dtype {
        Dtype::F32 => reduced(group, count, |x| x, |x| x.to_bits()),
        Dtype::Bf16 => reduced(group, count, bf16::from_f32, |x| x.to_bits().into()),
        other => panic!("no test asks a rank for {other}"),
    }
}

/// Of an all-reduce between `n` ranks each must send `2(n − 1)/n` of its bytes.
fn time(group: &Group, bytes: usize, repeats: usize) -> Result<Timed, Error> {
    let (rank, world) = (group.rank(), group.size());
    let mut buffer = vec![0f32; bytes / size_of::<f32>()];
    let least = 2 * buffer.len() * (world - 1) / world;
    let (passed, mut received) = (vec![rank as f32; least], vec![0f32; least]);
    let only = |to: usize| -> Vec<usize> {
        (0..world).map(|other| if other == to { least } else { 0 }).collect()
    };
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let mut timed = Timed { all_reduce: Vec::new(), passing_on: Vec::new(), sent: 0 };
    for _ in 0..repeats {
        buffer.fill(rank as f32 + 1.0);
        group.barrier()?;
        let (start, before) = (Instant::now(), group.traffic().total());
        group.all_reduce(&mut buffer, Reduction::Sum)?;
        timed.all_reduce.push(start.elapsed().as_secs_f64());
        timed.sent += group.traffic().total() - before;
        let sum = (world * (world + 1) / 2) as f32;
        assert!(buffer.iter().all(|&value| value == sum), "what was timed was wrong");
        group.barrier()?;
        let start = Instant::now();
        group.all_to_all_unequal(&passed, &only(next), &mut received, &only(previous))?;
        timed.passing_on.push(start.elapsed().as_secs_f64());
        assert!(received.iter().all(|&value| value == previous as f32), "wrong, as above");
    }
    Ok(timed)
}
