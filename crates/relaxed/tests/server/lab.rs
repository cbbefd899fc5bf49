//! Servers, workers, and what tests have in common.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use unisono::recording::relaxed::ServerRecorder;
use unisono_insight::RunInfo;
use unisono_insight::relaxed::RelaxedRun;
use unisono_insight::relaxed::folder::RelaxedFolder;
use unisono_net::{Dialer, Introduction, Target, Token};
use unisono_optimizer::{LearningRate, OptimizerSpec};
use unisono_relaxed::events::Recorder;
use unisono_relaxed::server::link::Link;
use unisono_relaxed::server::wire::{Measured, Reply, Report, Request, SERVER, Setup};
use unisono_relaxed::server::{
    Client, ClientOptions, Files, Gradient, Pushed, Run, Server, ServerError, ServerOptions,
    Transport, fetch_weights, layout, reports,
};
use unisono_relaxed::{Clock, Life};

pub const TOKEN: Token = Token::from_bytes([5; 32]);

/// Far longer than anything here takes, but for a test that hangs.
pub const HUNG: Duration = Duration::from_secs(60);

/// A time that no test reaches: who waits for it, hangs.
pub const NEVER: Duration = Duration::from_secs(3600);

pub const TRANSPORTS: [Transport; 2] = [Transport::Tcp, Transport::Auto];

/// The servers of a run.
pub struct Lab {
    pub addresses: Vec<SocketAddr>,
    pub servers: Vec<Option<Server>>,
    pub transport: Transport,
    /// Where the servers record the run, if they do.
    pub records: Option<PathBuf>,
}

impl Lab {
    /// So many servers, without files.
    pub fn start(servers: usize, transport: Transport) -> Lab {
        let mut lab = Lab::idle(servers, transport);
        (0..servers).for_each(|number| lab.serve(Files { number, ..Files::default() }));
        lab
    }

    /// So many addresses, at which no server listens yet.
    pub fn idle(servers: usize, transport: Transport) -> Lab {
        let free = |_| TcpListener::bind("127.0.0.1:0").unwrap();
        // All at once, so that they differ.
        let listeners: Vec<TcpListener> = (0..servers).map(free).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        Lab { addresses, servers: (0..servers).map(|_| None).collect(), transport, records: None }
    }

    /// Has all servers that start from now on record the run in a new folder.
    pub fn record(&mut self, dir: &Path, run: &Run) {
        run_folder(dir, run);
        self.records = Some(dir.to_owned());
    }

    /// Starts the server of this number.
    pub fn serve(&mut self, files: Files) {
        let number = files.number;
        let listener = listener(self.addresses[number]);
        let options = server_options(files, self.records.as_deref());
        let server = Server::start(listener, options).unwrap();
        self.servers[number] = Some(server);
    }

    pub fn options(&self, worker: u32) -> ClientOptions {
        ClientOptions {
            servers: self.addresses.iter().map(SocketAddr::to_string).collect(),
            token: TOKEN,
            worker,
            life: Some(Life(1)),
            patience: HUNG,
            transport: self.transport,
            warm_up: 0,
            error_feedback: true,
        }
    }

    /// A worker that brings zeros.
    pub fn client(&self, run: &Run, worker: u32) -> Client {
        self.try_client(run, self.options(worker)).unwrap()
    }

    pub fn try_client(&self, run: &Run, options: ClientOptions) -> Result<Client, ServerError> {
        let client = Client::join(run, options, &|parameter| zeros(run, parameter))?;
        assert_eq!(client.is_shared(), self.transport == Transport::Auto);
        Ok(client)
    }

    pub fn weights(&self, run: &Run) -> Vec<Vec<f32>> {
        fetch_weights(run, &self.options(0)).unwrap()
    }

    pub fn reports(&self, run: &Run) -> Vec<Report> {
        reports(run, &self.options(0)).unwrap()
    }

    /// Waits until the first server reports what is wanted.
    pub fn wait_for(&self, run: &Run, what: &str, wanted: impl Fn(&Report) -> bool) {
        wait_until(what, || wanted(&self.reports(run)[0]));
    }

    /// A connection that proves the token, and on which a test may then say anything.
    pub fn stranger(&self, server: usize, worker: u32, life: u64) -> Link {
        Link::over(self.knock(server, worker, life))
    }

    pub fn knock(&self, server: usize, worker: u32, life: u64) -> Socket {
        let address = self.addresses[server];
        let introduction = Introduction {
            purpose: SERVER,
            epoch: life,
            group: 0,
            from: worker,
            to: server as u32,
            channel: 0,
        };
        let dialer = Dialer::new(&TOKEN, Instant::now() + HUNG);
        let connection = dialer.dial(Target::Tcp(address), introduction).unwrap();
        let socket = connection.socket().try_clone().unwrap();
        socket.set_read_timeout(Some(HUNG)).unwrap();
        socket
    }

    /// A worker that has entered, and then says nothing of its own accord, not even that it lives.
    pub fn quiet(&self, run: &Run, worker: u32, clock: u64) -> Link {
        let mut link = self.stranger(0, worker, 1);
        let request = Request::Join { run: setup(run, 1).fingerprint() };
        let reply = call(&mut link, &request, &[]);
        assert!(matches!(reply, Some(Reply::Joined { .. })), "{reply:?}");
        assert_eq!(
            call(&mut link, &Request::Enter { clock: Clock(clock) }, &[]),
            Some(Reply::Done)
        );
        link
    }
}

pub fn call(link: &mut Link, request: &Request, parts: &[&[u8]]) -> Option<Reply> {
    link.send(request, parts).unwrap();
    link.receive().unwrap()
}

pub fn listener(address: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    // The one before may not be gone yet.
    wait_until("the address is free", || socket.bind(&address.into()).is_ok());
    socket.listen(128).unwrap();
    socket
}

/// A run of one parameter with a weight for each worker, which counts its pushes.
pub fn counting(level: &str, workers: u32) -> Run {
    let mut run = Run::new(vec![vec![workers as usize]], descent(1.0), level.parse().unwrap());
    (run.workers, run.shards, run.timeout) = (workers, workers, NEVER);
    run
}

/// Plain descent.
pub fn descent(rate: f64) -> OptimizerSpec {
    "sgd".parse::<OptimizerSpec>().unwrap().with_learning_rate(LearningRate::Constant(rate))
}

pub fn zeros(run: &Run, parameter: usize) -> Vec<f32> {
    vec![0.0; run.shapes[parameter].iter().product()]
}

/// What the first server of so many is set up with.
pub fn setup(run: &Run, servers: usize) -> Setup {
    Setup {
        pieces: layout::spread(&run.shapes, servers).remove(0),
        optimizer: run.optimizer,
        level: run.level,
        stale: run.stale,
        total: run.total,
        workers: run.workers,
        shards: run.shards,
        codecs: vec![None; layout::spread(&run.shapes, servers)[0].len()],
        seed: run.seed,
        timeout_ms: run.timeout.as_millis() as u64,
    }
}

/// The worker of a run that counts.
pub struct Counter {
    pub client: Client,
    one: Vec<f32>,
    /// How many pushes of each worker its weights contain.
    pub seen: Vec<u64>,
}

impl Counter {
    pub fn join(lab: &Lab, run: &Run, worker: u32) -> Counter {
        Counter::new(lab.client(run, worker), run, worker)
    }

    pub fn new(client: Client, run: &Run, worker: u32) -> Counter {
        let workers = run.workers as usize;
        let mut one = vec![0.0; workers];
        one[worker as usize] = 1.0;
        Counter { client, one, seen: vec![0; workers] }
    }

    pub fn pull(&mut self) -> Result<(), ServerError> {
        let seen = &mut self.seen;
        self.client.pull(None, &mut |_, start, weights| see(seen, start, weights))
    }

    pub fn push(&mut self) -> Result<Pushed, ServerError> {
        let gradients = [(0, vec![&self.one[..]])];
        self.client.push(&gradients, Measured::default())
    }

    pub fn push_pull(&mut self) -> Result<Pushed, ServerError> {
        let (gradients, seen): ([Gradient<'_>; 1], _) = ([(0, vec![&self.one])], &mut self.seen);
        let take = &mut |_: usize, start: usize, weights: &[f32]| see(seen, start, weights);
        self.client.push_pull(&gradients, Measured::default(), take)
    }
}

fn see(seen: &mut [u64], start: usize, weights: &[f32]) {
    for (count, weight) in seen[start..].iter_mut().zip(weights) {
        assert!(*weight <= 0.0 && weight.fract() == 0.0, "{weight} is no count");
        *count = -weight as u64;
    }
}

/// The counts in weights.
pub fn counts(weights: &[Vec<f32>]) -> Vec<u64> {
    let mut seen = vec![0; weights[0].len()];
    see(&mut seen, 0, &weights[0]);
    seen
}

/// Runs this on a thread of its own, and panics if it hangs.
pub fn within<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    let thread = std::thread::spawn(move || {
        let _ = send.send(run());
    });
    match receive.recv_timeout(2 * HUNG) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a result is sent"),
        },
    }
}

pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < HUNG, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How a server is served that records the run there, if anywhere.
pub fn server_options(files: Files, records: Option<&Path>) -> ServerOptions {
    let recorder = |dir| -> Box<dyn Recorder> { Box::new(ServerRecorder::new(dir, files.number)) };
    ServerOptions { token: TOKEN, recorder: records.map(recorder), files }
}

/// A folder for the records of a run.
pub fn run_folder(dir: &Path, run: &Run) {
    let info = RunInfo {
        name: "test".into(),
        strategy: run.level.to_string(),
        workers: run.workers as usize,
        ..RunInfo::default()
    };
    RelaxedFolder::create(dir, &info).unwrap();
}

/// What the folder of a run records.
pub fn recorded(dir: &Path) -> RelaxedRun {
    RelaxedFolder::open(dir).unwrap().run
}
