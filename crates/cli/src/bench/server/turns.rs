//! The measurement: all parts are started, and the transports and the loopback take turns, so that whatever disturbs
//! the machine disturbs all alike, and a ratio is the median over the rounds of what the two did in the same round. In
//! the end the weights of every server are compared with what the workers have pushed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;

use unisono::net::Token;
use unisono_relaxed::server::fetch_weights;

use super::model::Model;
use super::part::{Part, Process, Turn};
use super::worker::options;
use super::{ServerArgs, Way};
use crate::bench::FEWEST;

/// How long a transport's turn is. In a shorter one, the time in which only some of the workers have
/// begun or ended shows; longer ones leave fewer for the median.
const TURN: Duration = Duration::from_millis(200);

/// All parts.
pub struct Bench {
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
    pub fn start(args: &ServerArgs, model: Model) -> anyhow::Result<Bench> {
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
    pub fn measure(&mut self, seconds: f64) -> anyhow::Result<Vec<(Way, Samples)>> {
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
    pub fn verify(&self) -> anyhow::Result<()> {
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

/// What came of one transport's turns.
#[derive(Default)]
pub struct Samples {
    /// Push-pulls per second of every round.
    pub rates: Vec<f64>,
    /// Microseconds of every push-pull.
    pub each: Vec<f64>,
}
