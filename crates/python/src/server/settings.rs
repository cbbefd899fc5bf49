//! What a run is, and how its servers are reached, as Python writes it down.

use std::time::Duration;

use pyo3::prelude::*;
use unisono_codec::Rules;
use unisono_collective::{Options, Transport};
use unisono_net::Token;
use unisono_optimizer::OptimizerSpec;
use unisono_relaxed::server::{self, ClientOptions, Run};
use unisono_relaxed::spec::Level;
use unisono_relaxed::staleness::StalenessPolicy;

use super::optimizer;

/// As in `unisono/_native.pyi`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct ServerSettings {
    names: Vec<String>,
    shapes: Vec<Vec<usize>>,
    optimizer: String,
    level: String,
    stale: String,
    codec: Option<String>,
    codec_rules: Vec<String>,
    warm_up: u64,
    error_feedback: bool,
    steps: Option<u64>,
    seed: u64,
    workers: u32,
    /// The number of this worker.
    pub worker: u32,
    servers: Vec<String>,
    token: [u8; 32],
    patience: f64,
}

impl ServerSettings {
    /// The optimizer as the caller means it: its learning rate is that of one step of all workers together.
    pub fn optimizer(&self) -> Result<OptimizerSpec, String> {
        optimizer::parse(&self.optimizer)
    }

    /// What the run is, or what is wrong with it.
    pub fn run(&self) -> Result<Run, String> {
        let level: Level = self.level.parse().map_err(|error| format!("{error}"))?;
        if !level.has_servers() {
            return Err(format!(
                "{level} has no servers; use bsp, ssp:S, ssp:auto, async or downpour"
            ));
        }
        let stale: StalenessPolicy = self.stale.parse().map_err(|error| format!("{error}"))?;
        if level.is_lockstep() && stale != StalenessPolicy::Keep {
            return Err(format!("at bsp no gradient is stale: leave out {stale}"));
        }
        if self.worker >= self.workers {
            return Err(format!("rank {} is not one of {} workers", self.worker, self.workers));
        }
        let (shapes, optimizer) = (self.shapes.clone(), self.optimizer()?);
        let mut run = Run::of_steps(shapes, &optimizer, level, self.workers, self.steps);
        run.codecs = self.codecs()?;
        run.stale = stale;
        run.shards = self.workers;
        run.seed = self.seed;
        run.timeout = environment()?.timeout;
        Ok(run)
    }

    /// How the servers are reached.
    pub fn options(&self) -> Result<ClientOptions, String> {
        let patience = Duration::try_from_secs_f64(self.patience);
        Ok(ClientOptions {
            servers: self.servers.clone(),
            token: Token::from_bytes(self.token).with_encryption(environment()?.encrypt),
            worker: self.worker,
            life: None,
            patience: patience.map_err(|_| "patience is a number of seconds, from 0".to_owned())?,
            transport: match environment()?.transport {
                Transport::Tcp => server::Transport::Tcp,
                _ => server::Transport::Auto,
            },
            warm_up: self.warm_up,
            error_feedback: self.error_feedback,
        })
    }

    fn codecs(&self) -> Result<Vec<Option<unisono_codec::CodecSpec>>, String> {
        let mut rules = Rules::default();
        if let Some(codec) = self.codec.as_ref().filter(|codec| *codec != "none") {
            rules.codec = Some(codec.parse().map_err(|error| format!("{error}"))?);
        }
        for rule in &self.codec_rules {
            rules.exceptions.push(rule.parse().map_err(|error| format!("{error}"))?);
        }
        let fits = rules.expect_fits(self.names.iter().map(String::as_str));
        fits.map_err(|error| error.to_string())?;
        let parameters = self.names.iter().zip(&self.shapes);
        Ok(parameters.map(|(name, shape)| rules.codec(name, shape).cloned()).collect())
    }
}

pub(super) fn environment() -> Result<Options, String> {
    Options::from_env().map_err(|error| error.to_string())
}
