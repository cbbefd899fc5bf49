//! Servers, workers and gossip of a job that encrypts: the same weights, and nothing of them on the wire.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use unisono_net::{HandshakeError, Token};
use unisono_netlab::Wiretap;
use unisono_relaxed::Life;
use unisono_relaxed::gossip::{Gossip, GossipConfig};
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{
    Client, ClientOptions, Files, Run, Server, ServerError, ServerOptions, Transport,
};

const TOKEN: Token = Token::from_bytes([6; 32]);
const HUNG: Duration = Duration::from_secs(120);

/// Numbers that are not found by chance, and some of their bytes.
fn secret(length: usize) -> (Vec<f32>, Vec<u8>) {
    let numbers: Vec<f32> = (0..length).map(|i| 1.0 + i as f32 * 1e-3).collect();
    let known = numbers[20..24].iter().flat_map(|number| number.to_le_bytes()).collect();
    (numbers, known)
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn options(servers: Vec<String>, token: Token) -> ClientOptions {
    ClientOptions {
        servers,
        token,
        worker: 0,
        life: Some(Life(1)),
        patience: HUNG,
        transport: Transport::Tcp,
        warm_up: 0,
        error_feedback: false,
    }
}

fn run(shapes: Vec<Vec<usize>>) -> Run {
    let mut run = Run::new(shapes, "sgd".parse().unwrap(), "async".parse().unwrap());
    (run.workers, run.shards) = (1, 1);
    run
}

/// What a worker reads from two servers after some pushes, and whether the tap saw its gradients.
fn train(encrypt: bool) -> (Vec<Vec<f32>>, bool) {
    let token = TOKEN.with_encryption(encrypt);
    let tap = Wiretap::default();
    let (mut started, mut servers) = (Vec::new(), Vec::new());
    for number in 0..2 {
        let (listener, address) = listener();
        let files = Files { number, ..Files::default() };
        let server = ServerOptions { token: token.clone(), files, recorder: None };
        started.push(Server::start(listener.into(), server).unwrap());
        servers.push(tap.before(address).unwrap().to_string());
    }
    let (gradient, known) = secret(100_000);
    let run = run(vec![vec![gradient.len()], vec![300]]);
    let zeros = |parameter: usize| vec![0.0; run.shapes[parameter].iter().product()];
    let mut client = Client::join(&run, options(servers, token), &zeros).unwrap();
    let mut weights = [zeros(0), zeros(1)];
    for _ in 0..5 {
        let gradients = [(0, vec![&gradient[..]]), (1, vec![&gradient[..300]])];
        let take = &mut |parameter: usize, start: usize, read: &[f32]| {
            weights[parameter][start..start + read.len()].copy_from_slice(read);
        };
        client.push_pull(&gradients, Measured::default(), take).unwrap();
    }
    client.leave();
    (weights.to_vec(), tap.shows(&known))
}

#[test]
fn a_push_is_not_seen_and_the_weights_are_the_same() {
    let (clear, seen) = train(false);
    assert!(seen, "the tap does not work");
    let (encrypted, seen) = train(true);
    assert!(!seen, "the gradient was seen on the wire");
    assert!(clear == encrypted);
}

#[test]
fn a_worker_and_a_server_that_disagree_about_encryption_are_told_so() {
    for encrypt in [false, true] {
        let (listener, address) = listener();
        let token = TOKEN.with_encryption(encrypt);
        let _server = Server::start(
            listener.into(),
            ServerOptions { token, files: Files::default(), recorder: None },
        )
        .unwrap();
        let other = options(vec![address.to_string()], TOKEN.with_encryption(!encrypt));
        let joined = Client::join(&run(vec![vec![3]]), other, &|_| vec![0.0; 3]);
        let Err(ServerError::Handshake { cause, .. }) = joined.map(drop) else {
            panic!("it joined, or the error does not say why not");
        };
        assert!(matches!(cause, HandshakeError::Encryption { theirs } if theirs == encrypt));
    }
}

/// Whether the tap saw the weights of two workers that average.
fn gossip(encrypt: bool) -> bool {
    let tap = Wiretap::default();
    let (listeners, addresses): (Vec<_>, Vec<_>) = (0..2).map(|_| listener()).unzip();
    let addresses: Vec<SocketAddr> =
        addresses.into_iter().map(|address| tap.before(address).unwrap()).collect();
    let (weights, known) = secret(10_000);
    let config = |(rank, listener): (u32, TcpListener)| GossipConfig {
        rank,
        life: Life(1),
        addresses: addresses.clone(),
        listener: listener.into(),
        token: TOKEN.with_encryption(encrypt),
        timeout: HUNG,
        seed: 3,
        is_cut: None,
    };
    let configs: Vec<GossipConfig> = (0..).zip(listeners).map(config).collect();
    let workers: Vec<Gossip> = std::thread::scope(|scope| {
        let start = |config| scope.spawn(|| Gossip::start(config, vec![weights.clone()]).unwrap());
        let started: Vec<_> = configs.into_iter().map(start).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let deadline = Instant::now() + HUNG;
    while workers.iter().any(|worker| worker.stats().done() == 0) {
        assert!(Instant::now() < deadline, "hung: no exchange");
        for worker in &workers {
            worker.exchange().unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Both had the same weights, so that averaging changes nothing.
    for worker in workers {
        assert!(worker.leave()[0] == weights);
    }
    tap.shows(&known)
}

#[test]
fn weights_that_gossip_exchanges_are_not_seen() {
    assert!(gossip(false), "the tap does not work");
    assert!(!gossip(true), "the weights were seen on the wire");
}
