//! `unisono bench server`: how fast workers push gradients to a server and pull weights.
//!
//! The parts are processes of their own, as in a run: one server for every transport, and the
//! workers. Beside them is the *loopback*, the limit: a process that takes as many bytes from each
//! worker over plain TCP as a push has, encoded or not, and then sends it as many as a pull has, and does nothing else. The
//! transports and the loopback take turns, so that whatever disturbs the machine disturbs all alike,
//! and a ratio is the median over the rounds of what the two did in the same round.
//!
//! What was timed is checked. Every push adds a small integer to every weight, which f32 holds exactly,
//! so that in the end the weights are the number of pushes times that integer: one that was lost or
//! applied twice is noticed. With every pull a worker looks at both ends of each tensor, which must be
//! of the same version. With a codec, what a push adds is what the server decodes, always the same, and the
//! weights are what as many additions of it come to.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use unisono::net::Token;
use unisono::net::pace::send_unpaced_within_machine;
use unisono::optimizer::{LearningRate, OptimizerSpec};
use unisono_codec::sender::{self, Origin, Scratch, Sender};
use unisono_codec::{CodecSpec, Rounding};
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{
    Client, ClientOptions, Files, Gradient, Run, Server, ServerOptions, Transport, fetch_weights,
};
use unisono_relaxed::spec::Level;

use super::{FEWEST, expect_memory, expect_seconds, median, print, sizes};
use crate::exit::Wrong;
use unisono::insight::units::counted;

/// How long a transport's turn is. In a shorter one, the time in which only some of the workers have
/// begun or ended shows; longer ones leave fewer for the median.
const TURN: Duration = Duration::from_millis(200);

/// The changes of neighbouring weights take turns from 1 up to here.
const LARGEST_CHANGE: usize = 4;

/// From here on, f32 does not hold every integer.
const LIMIT: f32 = (1 << f32::MANTISSA_DIGITS) as f32;

/// How long to wait for a server.
const PATIENCE: Duration = Duration::from_secs(10);

/// Options of `unisono bench server`.
#[derive(Args, Clone)]
pub struct ServerArgs {
    /// How many workers push and pull at the same time.
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// The size of a tensor, in f32.
    #[arg(long, default_value = "4MiB")]
    size: String,
    /// How many tensors the model has.
    #[arg(long, default_value_t = 1)]
    tensors: usize,
    /// How gradients and weights travel, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["tcp", "shm"])]
    transport: Vec<Way>,
    /// Encode what is pushed by this codec: fp16, bf16, int8, int4 or sign.
    #[arg(long)]
    codec: Option<CodecSpec>,
    /// Let the servers keep journals in this folder, which must be new or empty.
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// Seconds to spend on each transport.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Print one JSON object per transport instead of a table.
    #[arg(long)]
    json: bool,
    /// This process is one of the parts, and is told on its input which.
    #[arg(long, hide = true)]
    as_part: bool,
}

/// How gradients and weights travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    /// Over TCP.
    Tcp,
    /// In shared memory.
    Shm,
    /// Over plain TCP, as many bytes in each direction, with no server: the limit.
    #[value(skip)]
    Loopback,
}

/// One line of the report.
#[derive(Serialize)]
struct Row {
    transport: Way,
    workers: u32,
    /// Threads that this machine can run at once.
    cores: usize,
    /// Bytes of a pull.
    bytes: usize,
    /// Bytes of a push: as many, or what the codec makes of them.
    pushed_bytes: usize,
    tensors: usize,
    codec: Option<String>,
    journal: bool,
    rounds: usize,
    push_pulls: usize,
    push_pulls_per_second: f64,
    median_us: f64,
    p99_us: f64,
    /// Of what is pulled. Without a codec, as much is pushed.
    gbs: f64,
    /// Relative to plain TCP.
    of_loopback: f64,
    /// Relative to the server over TCP, if that was measured.
    of_tcp: Option<f64>,
    verified: bool,
}

/// Measures, or is one of the parts.
pub fn run(args: ServerArgs) -> anyhow::Result<ExitCode> {
    if args.as_part {
        return be_part();
    }
    let model = args.model()?;
    if let Some(journal) = &args.journal {
        let used = std::fs::read_dir(journal).is_ok_and(|mut files| files.next().is_some());
        ensure!(
            !used,
            "--journal {}: the folder is not empty, and the servers would go on with what it holds; name \
             a new one",
            journal.display()
        );
    }
    let mut bench = Bench::start(&args, model.clone())?;
    let measured = bench.measure(args.seconds)?;
    bench.verify()?;
    report(&args, &model, &measured)
}

impl ServerArgs {
    /// The options, checked.
    fn model(&self) -> anyhow::Result<Model> {
        let bytes = sizes::parse(&self.size).context("--size").wrong_call()?;
        demand!(
            bytes > 0 && bytes.is_multiple_of(4),
            "--size {}: tensors are of f32; use a multiple of 4 bytes",
            self.size
        );
        demand!((1..=1024).contains(&self.workers), "--workers {}: use 1 to 1024", self.workers);
        demand!((1..=4096).contains(&self.tensors), "--tensors {}: use 1 to 4096", self.tensors);
        expect_seconds(self.seconds)?;
        let codec = self.codec.clone();
        if let Some(codec) = &codec {
            let is_steady = match codec {
                CodecSpec::Fp16 | CodecSpec::Bf16 | CodecSpec::Sign => true,
                CodecSpec::Int8(rounding) | CodecSpec::Int4(rounding) => {
                    *rounding == Rounding::Nearest
                }
                _ => false,
            };
            demand!(is_steady, "--codec {codec}: use fp16, bf16, int8, int4 or sign");
            let suits = codec.build().suits(&[bytes / 4]);
            demand!(suits, "--codec {codec}: makes tensors of {} no smaller", self.size);
        }
        let (elements, tensors, workers) = (bytes / 4, self.tensors, self.workers);
        let model = Model { elements, tensors, workers, codec };
        // Of every worker: gradient, weights, common memory, and what it and the others have received;
        // on the servers, versions of the weights for as many readers.
        let copies = 10 * self.workers as usize + 6;
        let needed = model.bytes().saturating_mul(copies);
        let bytes = sizes::format(model.bytes());
        let who = format!("--size: {} workers with {bytes} need", self.workers);
        expect_memory(&who, needed, "a smaller size or fewer workers")?;
        Ok(model)
    }
}

/// What is pushed and pulled.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Model {
    elements: usize,
    tensors: usize,
    workers: u32,
    codec: Option<CodecSpec>,
}

impl Model {
    /// Of a pull, and of what is pushed before it is encoded.
    fn bytes(&self) -> usize {
        self.elements.saturating_mul(4 * self.tensors)
    }

    /// Of a push.
    fn pushed_bytes(&self) -> usize {
        let encoded = |codec: &CodecSpec| codec.build().encoded_bytes(&[self.elements]);
        self.codec.as_ref().map_or(self.bytes(), |codec| self.tensors * encoded(codec))
    }

    fn run(&self) -> Run {
        let optimizer =
            OptimizerSpec::Sgd { learning_rate: LearningRate::Constant(1.0), weight_decay: 0.0 };
        let shapes = vec![vec![self.elements]; self.tensors];
        let (workers, shards) = (self.workers, self.workers);
        let codecs = vec![self.codec.clone(); self.tensors];
        Run { workers, shards, codecs, ..Run::new(shapes, optimizer, Level::Async) }
    }

    /// What every push adds to a weight.
    fn change(element: usize) -> f32 {
        (element % LARGEST_CHANGE + 1) as f32
    }

    /// The gradient of a tensor: with a learning rate of 1, weights become larger by its opposite.
    fn gradient(&self) -> Vec<f32> {
        (0..self.elements).map(|element| -Model::change(element)).collect()
    }

    /// Refuses a tensor that is not the sum of so many pushes.
    fn verify(&self, weights: &[f32], pushes: u64) -> anyhow::Result<()> {
        match &self.codec {
            None => Model::verify_exactly(weights, pushes),
            Some(codec) => self.verify_decoded(codec, weights, pushes),
        }
    }

    /// Refuses a tensor that is not what so many pushes add up to, each rounded as a server's are.
    fn verify_decoded(
        &self,
        codec: &CodecSpec,
        weights: &[f32],
        pushes: u64,
    ) -> anyhow::Result<()> {
        let (codec, mut scratch) = (codec.build(), Scratch::default());
        let shape = vec![self.elements];
        let origin = Origin { shape, parameter: 0, seed: 0, worker: 0, mean_of: 1 };
        let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; self.elements]);
        let mut sender = Sender::new(codec.clone(), origin.clone(), false);
        sender.encode(0, &self.gradient(), &mut scratch, &mut bytes);
        sender::decode(&*codec, &origin.task(0), &bytes, &mut decoded, &mut scratch)?;
        // Most elements are decoded to one of a few numbers.
        let mut sums = HashMap::new();
        for (element, (weight, change)) in weights.iter().zip(decoded).enumerate() {
            let sum = || (0..pushes).fold(0.0f32, |sum, _| sum - change);
            let expected = *sums.entry(change.to_bits()).or_insert_with(sum);
            ensure!(
                *weight == expected,
                "weight {element} is {weight} instead of {expected} after {pushes} pushes"
            );
        }
        Ok(())
    }

    /// As [`Model::verify`], without a codec.
    fn verify_exactly(weights: &[f32], pushes: u64) -> anyhow::Result<()> {
        for (element, weight) in weights.iter().enumerate() {
            ensure!(
                *weight < LIMIT,
                "a weight became {weight}, where f32 is no longer exact; use fewer --seconds"
            );
            let expected = pushes as f32 * Model::change(element);
            ensure!(
                *weight == expected,
                "weight {element} is {weight} instead of {expected} after {pushes} pushes"
            );
        }
        Ok(())
    }

    /// Refuses a tensor whose ends are of different versions.
    fn verify_ends(weights: &[f32]) -> anyhow::Result<()> {
        let version = |element: usize| weights[element] / Model::change(element);
        let (first, last) = (version(0), version(weights.len() - 1));
        ensure!(first == last, "half an update: version {first} in front, {last} at the end");
        Ok(())
    }
}

/// What a process is told to be.
#[derive(Serialize, Deserialize)]
enum Part {
    /// A server. Answers with its address.
    Server { token: String, journal: Option<PathBuf> },
    /// The limit. Answers with its address.
    Loopback { model: Model },
    /// A worker, which answers when it is connected, and then to every [`Turn`].
    Worker { model: Model, token: String, number: u32, places: Vec<(Way, SocketAddr)> },
}

/// Asks a worker to push and pull for so many seconds. It answers with the microseconds of each.
#[derive(Serialize, Deserialize)]
struct Turn {
    way: Way,
    seconds: f64,
}

/// What came of one transport's turns.
#[derive(Default)]
struct Samples {
    /// Push-pulls per second of every round.
    rates: Vec<f64>,
    /// Microseconds of every push-pull.
    each: Vec<f64>,
}

/// All parts.
struct Bench {
    model: Model,
    token: Token,
    /// The ways that take turns, and who serves them.
    places: Vec<(Way, SocketAddr)>,
    /// Kept so that they go on until the end.
    _servers: Vec<Process>,
    workers: Vec<Process>,
    /// Pushes to each server.
    pushes: Vec<u64>,
}

impl Bench {
    fn start(args: &ServerArgs, model: Model) -> anyhow::Result<Bench> {
        let token = Token::random()?;
        let mut ways = vec![Way::Loopback];
        for way in &args.transport {
            if !ways.contains(way) {
                ways.push(*way);
            }
        }
        let (mut servers, mut places) = (Vec::new(), Vec::new());
        for way in ways {
            let journal = args.journal.as_ref().map(|folder| folder.join(way.name()));
            let part = match way {
                Way::Loopback => Part::Loopback { model: model.clone() },
                _ => Part::Server { token: token.to_hex(), journal },
            };
            let mut server = Process::start(&part)?;
            places.push((way, server.answer()?));
            servers.push(server);
        }
        let start = |number| {
            let (token, places, model) = (token.to_hex(), places.clone(), model.clone());
            Process::start(&Part::Worker { model, token, number, places })
        };
        let mut workers = (0..model.workers).map(start).collect::<anyhow::Result<Vec<_>>>()?;
        workers.iter_mut().try_for_each(Process::answer::<()>)?;
        let pushes = vec![0; places.len()];
        Ok(Bench { model, token, places, _servers: servers, workers, pushes })
    }

    /// Lets all ways take turns. The first round is for warming up.
    fn measure(&mut self, seconds: f64) -> anyhow::Result<Vec<(Way, Samples)>> {
        let ways: Vec<Way> = self.places.iter().map(|(way, _)| *way).collect();
        let mut all: Vec<_> = ways.iter().map(|way| (*way, Samples::default())).collect();
        for place in 0..ways.len() {
            self.turn(place)?;
        }
        let (start, deadline) = (Instant::now(), seconds * ways.len() as f64);
        while all[0].1.rates.len() < FEWEST || start.elapsed().as_secs_f64() < deadline {
            for (place, (_, samples)) in all.iter_mut().enumerate() {
                let (rate, each) = self.turn(place)?;
                samples.rates.push(rate);
                samples.each.extend(each);
            }
        }
        Ok(all)
    }

    /// One turn of one way: push-pulls per second, and the microseconds of each.
    fn turn(&mut self, place: usize) -> anyhow::Result<(f64, Vec<f64>)> {
        let turn = Turn { way: self.places[place].0, seconds: TURN.as_secs_f64() };
        self.workers.iter_mut().try_for_each(|worker| worker.tell(&turn))?;
        let (mut each, mut longest) = (Vec::new(), f64::MIN_POSITIVE);
        for worker in &mut self.workers {
            let own: Vec<f64> = worker.answer()?;
            longest = own.iter().sum::<f64>().max(longest);
            each.extend(own);
        }
        self.pushes[place] += each.len() as u64;
        // A worker that is late is not forgiven.
        Ok((each.len() as f64 / longest * 1e6, each))
    }

    /// Compares the weights of every server with the pushes that the workers have made.
    fn verify(&self) -> anyhow::Result<()> {
        for ((way, address), pushes) in self.places.iter().zip(&self.pushes) {
            if *way == Way::Loopback {
                continue;
            }
            let options = options(*way, *address, &self.token, 0);
            let weights = fetch_weights(&self.model.run(), &options)?;
            let all = weights.iter().try_for_each(|weights| self.model.verify(weights, *pushes));
            all.with_context(|| format!("after pushes over {}", way.name()))?;
        }
        Ok(())
    }
}

/// A process that is one of the parts.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(part: &Part) -> anyhow::Result<Process> {
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

    fn tell(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(message)? + "\n";
        let input = self.input.as_mut().expect("open until the end");
        input.write_all(line.as_bytes()).context("a part of the measurement has ended")
    }

    fn answer<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
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
fn be_part() -> anyhow::Result<ExitCode> {
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
            for _ in 0..model.workers {
                let (stream, _) = listener.accept()?;
                let mut loopback = Loopback::new(stream, &model)?;
                std::thread::spawn(move || loopback.serve());
            }
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

/// One end of a plain connection that carries as many bytes as the pushes and pulls of a worker have.
struct Loopback {
    stream: TcpStream,
    pushed: Vec<u8>,
    pulled: Vec<u8>,
}

impl Loopback {
    fn new(stream: TcpStream, model: &Model) -> std::io::Result<Loopback> {
        stream.set_nodelay(true)?;
        send_unpaced_within_machine(&stream);
        let [pushed, pulled] = [model.pushed_bytes(), model.bytes()].map(|bytes| vec![1; bytes]);
        Ok(Loopback { stream, pushed, pulled })
    }

    /// At the end of the worker.
    fn push_pull(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&self.pushed)?;
        self.stream.read_exact(&mut self.pulled)
    }

    /// At the other end, until the worker leaves.
    fn serve(&mut self) -> std::io::Result<()> {
        loop {
            self.stream.read_exact(&mut self.pushed)?;
            self.stream.write_all(&self.pulled)?;
        }
    }
}

/// What a worker has.
struct Worker {
    gradient: Vec<f32>,
    /// Whether both ends of a tensor show of which version they are.
    shows_version: bool,
    weights: Vec<Vec<f32>>,
    clients: Vec<(Way, Client)>,
    loopback: Option<Loopback>,
}

impl Worker {
    fn connect(
        model: Model,
        token: Token,
        number: u32,
        places: &[(Way, SocketAddr)],
    ) -> anyhow::Result<Worker> {
        let (mut clients, mut loopback) = (Vec::new(), None);
        for (way, address) in places {
            if *way == Way::Loopback {
                loopback = Some(Loopback::new(TcpStream::connect(address)?, &model)?);
                continue;
            }
            let options = options(*way, *address, &token, number);
            let zeros = |_| vec![0.0; model.elements];
            let client = Client::join(&model.run(), options, &zeros)?;
            ensure!(client.is_shared() == (*way == Way::Shm), "no shared memory on this machine");
            clients.push((*way, client));
        }
        let weights = vec![vec![0.0; model.elements]; model.tensors];
        let shows_version = model.codec.is_none();
        Ok(Worker { gradient: model.gradient(), shows_version, weights, clients, loopback })
    }

    /// Pushes and pulls for as long as the turn lasts, and at least once: the microseconds of each.
    fn take_turn(&mut self, turn: &Turn) -> anyhow::Result<Vec<f64>> {
        let mut each = Vec::new();
        let start = Instant::now();
        let mut last = start;
        while each.is_empty() || start.elapsed().as_secs_f64() < turn.seconds {
            self.push_pull(turn.way)?;
            let now = Instant::now();
            each.push((now - last).as_secs_f64() * 1e6);
            last = now;
        }
        Ok(each)
    }

    fn push_pull(&mut self, way: Way) -> anyhow::Result<()> {
        if way == Way::Loopback {
            return Ok(self.loopback.as_mut().context("no loopback")?.push_pull()?);
        }
        let Some((_, client)) = self.clients.iter_mut().find(|(other, _)| *other == way) else {
            bail!("not connected over {}", way.name());
        };
        let gradients: Vec<Gradient<'_>> =
            (0..self.weights.len()).map(|tensor| (tensor, vec![&self.gradient[..]])).collect();
        let weights = &mut self.weights;
        let mut lend = |tensor: usize, first, count, fill: &mut dyn FnMut(&mut [f32])| {
            let last: usize = first + count;
            fill(&mut weights[tensor][first..last]);
        };
        let pushed = client.push_pull_into(&gradients, Measured::default(), &mut lend)?;
        ensure!(pushed.applied, "a push was not applied");
        match self.shows_version {
            true => self.weights.iter().try_for_each(|weights| Model::verify_ends(weights)),
            false => Ok(()),
        }
    }
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Tcp => "tcp",
            Way::Shm => "shm",
            Way::Loopback => "loopback",
        }
    }
}

fn options(way: Way, address: SocketAddr, token: &Token, worker: u32) -> ClientOptions {
    ClientOptions {
        servers: vec![address.to_string()],
        token: token.clone(),
        worker,
        life: None,
        patience: PATIENCE,
        transport: if way == Way::Tcp { Transport::Tcp } else { Transport::Auto },
        warm_up: 0,
        error_feedback: false,
    }
}

fn report(
    args: &ServerArgs,
    model: &Model,
    measured: &[(Way, Samples)],
) -> anyhow::Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if !args.json {
        result_line!(
            "{} {} {} of {}{}, one server, {}; weights verified",
            counted(model.workers as usize, "worker"),
            if model.workers == 1 { "pushes and pulls" } else { "push and pull" },
            counted(model.tensors, "tensor"),
            sizes::format(4 * model.elements),
            model
                .codec
                .as_ref()
                .map_or(String::new(), |codec| format!(", pushes encoded by {codec}")),
            counted(cores, "core")
        )?;
        result_line!(
            "{:<9} {:>12} {:>11} {:>11} {:>11} {:>12} {:>8}",
            "transport",
            "push-pulls/s",
            "median µs",
            "p99 µs",
            "GB/s pulled",
            "of loopback",
            "of tcp"
        )?;
    }
    let rates =
        |wanted: Way| measured.iter().find(|(way, _)| *way == wanted).map(|(_, s)| &s.rates);
    let loopback = rates(Way::Loopback).context("the loopback is always measured")?;
    for (way, samples) in measured {
        let mut each = samples.each.clone();
        each.sort_by(f64::total_cmp);
        let push_pulls_per_second = median(samples.rates.iter().copied());
        let row = Row {
            transport: *way,
            workers: model.workers,
            cores,
            bytes: model.bytes(),
            pushed_bytes: model.pushed_bytes(),
            tensors: model.tensors,
            codec: model.codec.as_ref().map(CodecSpec::to_string),
            journal: args.journal.is_some() && *way != Way::Loopback,
            rounds: samples.rates.len(),
            push_pulls: each.len(),
            push_pulls_per_second,
            median_us: each[each.len() / 2],
            p99_us: each[(each.len() * 99 / 100).min(each.len() - 1)],
            gbs: push_pulls_per_second * model.bytes() as f64 / 1e9,
            of_loopback: ratio(&samples.rates, loopback),
            of_tcp: rates(Way::Tcp).map(|tcp| ratio(&samples.rates, tcp)),
            // A wrong result ends the measurement with an error.
            verified: true,
        };
        print(&row, args.json, || {
            let Row { median_us, p99_us, gbs, of_loopback, of_tcp, .. } = row;
            let of_tcp = of_tcp.map_or(String::new(), |ratio| format!("{ratio:.3}"));
            format!(
                "{:<9} {push_pulls_per_second:>12.1} {median_us:>11.1} {p99_us:>11.1} {gbs:>11.3} \
                 {of_loopback:>12.3} {of_tcp:>8}",
                way.name()
            )
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The median over the rounds of one rate relative to another.
fn ratio(rates: &[f64], others: &[f64]) -> f64 {
    median(rates.iter().zip(others).map(|(rate, other)| rate / other))
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn wrong_weights_are_noticed() {
        let right = [3.0, 6.0, 9.0, 12.0, 3.0];
        assert!(Model::verify_exactly(&right, 3).is_ok());
        assert!(Model::verify_exactly(&right, 4).is_err());
        assert!(Model::verify_exactly(&[3.0, 6.0, 9.0, 12.0, 4.0], 3).is_err());
        assert!(Model::verify_exactly(&[f32::NAN], 0).is_err());
        assert!(Model::verify_exactly(&[LIMIT], 1 << 24).is_err());
        assert!(Model::verify_ends(&right).is_ok());
        assert!(Model::verify_ends(&[3.0, 6.0, 9.0, 12.0, 2.0]).is_err());
    }

    #[test]
    fn a_push_adds_the_change() {
        let model = Model { elements: 6, tensors: 1, workers: 1, codec: None };
        let weights: Vec<f32> = model.gradient().iter().map(|g| -g * 7.0).collect();
        assert!(model.verify(&weights, 7).is_ok());
        assert_eq!(model.bytes(), 24);
    }

    /// What is pushed is encoded, what is pulled is not.
    #[test]
    fn the_loopback_moves_what_a_push_and_a_pull_have() {
        let codecs = [None, Some("fp16"), Some("int8"), Some("int4"), Some("sign")];
        for codec in codecs.map(|codec| codec.map(|codec| codec.parse::<CodecSpec>().unwrap())) {
            let model = Model { elements: 5000, tensors: 3, workers: 1, codec: codec.clone() };
            let pushed = codec.map_or(60_000, |codec| {
                let origin =
                    Origin { shape: vec![5000], parameter: 0, seed: 0, worker: 0, mean_of: 1 };
                let (mut bytes, mut scratch) = (Vec::new(), Scratch::default());
                let mut sender = Sender::new(codec.build(), origin, false);
                sender.encode(0, &model.gradient(), &mut scratch, &mut bytes);
                3 * bytes.len()
            });
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let mut worker = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut server = Loopback::new(listener.accept().unwrap().0, &model).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _left = server.serve();
                    server.stream.shutdown(Shutdown::Both)
                });
                worker.write_all(&vec![1; pushed]).unwrap();
                worker.shutdown(Shutdown::Write).unwrap();
                let mut pulled = Vec::new();
                worker.read_to_end(&mut pulled).unwrap();
                assert_eq!(pulled.len(), 60_000, "{:?}", model.codec);
            });
        }
    }

    #[test]
    fn ratios_compare_what_took_turns() {
        assert_eq!(ratio(&[1.0, 8.0, 3.0], &[2.0, 8.0, 4.0]), 0.75);
        assert!(median(std::iter::empty()).is_nan());
    }
}
