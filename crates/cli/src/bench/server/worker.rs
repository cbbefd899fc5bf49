//! A worker: its connections to the servers and to the loopback, and the pushes and pulls that are timed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use unisono::net::Token;
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{Client, ClientOptions, Gradient, Transport};

use super::Way;
use super::loopback::Loopback;
use super::model::Model;
use super::part::Turn;

/// How long to wait for a server.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a worker has.
pub struct Worker {
    gradient: Vec<f32>,
    /// Whether both ends of a tensor show of which version they are.
    shows_version: bool,
    weights: Vec<Vec<f32>>,
    clients: Vec<(Way, Client)>,
    loopback: Option<Loopback>,
}

impl Worker {
    pub fn connect(
        model: Model,
        token: Token,
        number: u32,
        places: &[(Way, SocketAddr)],
    ) -> anyhow::Result<Worker> {
        let (mut clients, mut loopback) = (Vec::new(), None);
        for (way, address) in places {
            if *way == Way::Loopback {
                loopback = Some(Loopback::connect(*address, &model)?);
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
    pub fn take_turn(&mut self, turn: &Turn) -> anyhow::Result<Vec<f64>> {
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

/// How a worker reaches the server at an address.
pub fn options(way: Way, address: SocketAddr, token: &Token, worker: u32) -> ClientOptions {
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
