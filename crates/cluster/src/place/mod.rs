//! Where this process stands in its job, read from what its launcher left in the environment.
//!
//! [`Place::from_vars`] is a pure function of the variables. It asks the launchers it knows, one
//! file each, from the most to the least specific: Unisono's own, torchrun, Open MPI's `mpirun`,
//! Slurm's `srun`, and process managers with PMI. Each either does not recognize the
//! environment, or says where the process stands, or says which variable is wrong and what to set.
//! A process without a launcher is a world of one.
//!
//! Only Unisono's launcher hosts a rendezvous. For the others rank 0 hosts it, on the first free
//! of a few *candidate* ports that every rank derives alike, and the others try the candidates
//! until the handshake tells them that they found their job. `MASTER_PORT` itself is never among
//! them: it belongs to the store of the framework that the same process may run.

mod open_mpi;
mod pmi;
mod slurm;
mod torchrun;
mod unisono;

use std::collections::BTreeMap;
use std::fmt;

use unisono_net::Token;

pub(crate) use unisono::{join_host_port, split_host_port};

/// Ranks of a job at most. Far more than has been tried; a number
/// beyond is a mistake, found before memory is set aside for so many.
pub const MAX_WORLD: u32 = 1 << 16;

/// Environment variables by name.
pub type Vars = BTreeMap<String, String>;

/// Where a process stands in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This process among all of them.
    pub rank: u32,
    /// How many processes the job has.
    pub world: u32,
    /// This process among those of its node.
    pub local_rank: u32,
    /// How many processes of the job its node runs.
    pub local_world: u32,
    /// The node among all nodes, where the launcher numbers them.
    pub node: Option<u32>,
    /// Where to find the others.
    pub rendezvous: Rendezvous,
    /// The job's secret, if the ranks were given one.
    pub token: Option<Token>,
    /// Tells concurrent jobs apart; the same on all ranks.
    pub job_name: String,
    /// Who started the process.
    pub launcher: Launcher,
}

/// Where the ranks of a job find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// Nowhere: there is one rank.
    Alone,
    /// At the launcher, which is listening already.
    Launcher {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
    },
    /// At rank 0, which listens on the first of the ports that it can have.
    RankZero {
        /// Name or address of rank 0's machine.
        host: String,
        /// Where rank 0 may be listening, most likely first.
        ports: Vec<u16>,
    },
}

/// Who started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `unisono run`.
    Unisono,
    /// `torchrun`, or anything else that sets its variables.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Slurm's `srun`.
    Slurm,
    /// A process manager of the PMI kind, such as MPICH's `mpiexec`.
    Pmi,
    /// No launcher: a world of one.
    None,
}

/// The environment names a launcher but does not tell this process's place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// A variable is missing; set it.
    #[error("started by {launcher}, but {variable} is not set: set it to {meaning}")]
    Missing {
        /// Who started the process.
        launcher: Launcher,
        /// The variable to set.
        variable: &'static str,
        /// What it should hold.
        meaning: &'static str,
    },
    /// A variable does not hold what it should.
    #[error("started by {launcher}, but {variable}={value} is not {meaning}")]
    Invalid {
        /// Who started the process.
        launcher: Launcher,
        /// The variable at fault.
        variable: &'static str,
        /// What it holds; redacted for secrets.
        value: String,
        /// What it should hold.
        meaning: &'static str,
    },
    /// A rank is not below its world.
    #[error(
        "started by {launcher} as {which} {rank} in a world of {world}, where ranks are below {world}"
    )]
    OutOfRange {
        /// Who started the process.
        launcher: Launcher,
        /// The rank or the local rank.
        which: &'static str,
        /// Its value.
        rank: u32,
        /// How many there are.
        world: u32,
    },
    /// More ranks than a job can have; the limit is [`MAX_WORLD`].
    #[error("started by {launcher} in a world of {world}, where {MAX_WORLD} ranks are the limit")]
    TooLarge {
        /// Who started the process.
        launcher: Launcher,
        /// How many ranks there are said to be.
        world: u32,
    },
}

impl Place {
    /// The place of this process.
    pub fn from_env() -> Result<Place, PlaceError> {
        Place::from_vars(&vars())
    }

    /// The place of a process with these variables.
    pub fn from_vars(vars: &Vars) -> Result<Place, PlaceError> {
        let recognizers =
            [unisono::place, torchrun::place, open_mpi::place, slurm::place, pmi::place];
        for recognize in recognizers {
            if let Some(place) = recognize(vars)? {
                return place.checked();
            }
        }
        Ok(Place {
            rank: 0,
            world: 1,
            local_rank: 0,
            local_world: 1,
            node: Some(0),
            rendezvous: Rendezvous::Alone,
            token: token(vars, Launcher::None)?,
            job_name: "alone".into(),
            launcher: Launcher::None,
        })
    }

    /// Whether all ranks run on one machine.
    pub fn single_node(&self) -> bool {
        self.local_world == self.world
    }

    fn checked(self) -> Result<Place, PlaceError> {
        let launcher = self.launcher;
        if self.world > MAX_WORLD {
            return Err(PlaceError::TooLarge { launcher, world: self.world });
        }
        for (which, rank, world) in
            [("rank", self.rank, self.world), ("local rank", self.local_rank, self.local_world)]
        {
            if rank >= world {
                return Err(PlaceError::OutOfRange { launcher, which, rank, world });
            }
        }
        Ok(self)
    }
}

/// The variables of this process.
pub(crate) fn vars() -> Vars {
    // Those that are not text are none of ours.
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// The token in `UNISONO_TOKEN`, for a process that need not know who launched it.
pub(crate) fn token_of(vars: &Vars) -> Result<Option<Token>, PlaceError> {
    token(vars, Launcher::None)
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Unisono => "unisono run",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Slurm => "Slurm",
            Launcher::Pmi => "a PMI process manager",
            Launcher::None => "no launcher",
        })
    }
}

/// How many ports rank 0 may try. More make it likelier that one is free; the others may have to
/// try as many before they find it.
const CANDIDATES: u16 = 16;

/// The variables as one launcher's recognizer reads them.
struct Reader<'a> {
    vars: &'a Vars,
    launcher: Launcher,
}

impl Reader<'_> {
    /// The variable, if it is set to something.
    fn text(&self, variable: &str) -> Option<&str> {
        self.vars.get(variable).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    fn number<T: std::str::FromStr>(
        &self,
        variable: &'static str,
        meaning: &'static str,
    ) -> Result<Option<T>, PlaceError> {
        let Some(value) = self.text(variable) else { return Ok(None) };
        match value.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.invalid(variable, value.into(), meaning)),
        }
    }

    fn required<T>(
        &self,
        found: Option<T>,
        variable: &'static str,
        meaning: &'static str,
    ) -> Result<T, PlaceError> {
        found.ok_or(PlaceError::Missing { launcher: self.launcher, variable, meaning })
    }

    fn count(&self, variable: &'static str, meaning: &'static str) -> Result<u32, PlaceError> {
        self.required(self.number(variable, meaning)?, variable, meaning)
    }

    fn invalid(&self, variable: &'static str, value: String, meaning: &'static str) -> PlaceError {
        PlaceError::Invalid { launcher: self.launcher, variable, value, meaning }
    }

    /// What no launcher but `torchrun` sets, and a user has to: host and ports of rank 0.
    fn required_master(&self) -> Result<(String, Vec<u16>), PlaceError> {
        let host = self.master_addr();
        let host = self.required(host, "MASTER_ADDR", "the name or address of rank 0's machine")?;
        let ports = self.ports_beside_master_port()?;
        let meaning = "a port of rank 0's machine; the 16 after it should be free";
        Ok((host, self.required(ports, "MASTER_PORT", meaning)?))
    }

    /// Host and ports of rank 0, of a job that has a name: what the user has set, or `usual` and ports that
    /// follow from the name.
    fn named_master(
        &self,
        job_name: &str,
        usual: impl FnOnce() -> Result<String, PlaceError>,
    ) -> Result<Rendezvous, PlaceError> {
        let host = self.master_addr().map_or_else(usual, Ok)?;
        let ports = self.ports_beside_master_port()?.unwrap_or_else(|| ports_of(job_name));
        Ok(Rendezvous::RankZero { host, ports })
    }

    fn master_addr(&self) -> Option<String> {
        self.text("MASTER_ADDR").map(str::to_owned)
    }

    /// The candidate ports beside `MASTER_PORT`, if that is set.
    fn ports_beside_master_port(&self) -> Result<Option<Vec<u16>>, PlaceError> {
        let master: Option<u16> = self.number("MASTER_PORT", "a port")?;
        Ok(master.map(|master| match master.checked_add(CANDIDATES) {
            Some(last) => (master + 1..=last).collect(),
            None => (master - CANDIDATES..master).collect(),
        }))
    }
}

/// The token in `UNISONO_TOKEN`, which means the same under every launcher.
fn token(vars: &Vars, launcher: Launcher) -> Result<Option<Token>, PlaceError> {
    let reader = Reader { vars, launcher };
    let Some(text) = reader.text("UNISONO_TOKEN") else { return Ok(None) };
    text.parse()
        .map(Some)
        .map_err(|_| reader.invalid("UNISONO_TOKEN", "(not shown)".into(), "64 hexadecimal digits"))
}

/// Candidate ports for a job that has a name but no port.
///
/// They lie below the range from which Linux takes ports for outgoing connections, so that only
/// another server can be in the way.
fn ports_of(job_name: &str) -> Vec<u16> {
    const FIRST: u16 = 20_000;
    const LAST: u16 = 32_767;
    let hash = blake3::hash(job_name.as_bytes());
    let number = u16::from_le_bytes([hash.as_bytes()[0], hash.as_bytes()[1]]);
    let start = FIRST + number % (LAST - FIRST - CANDIDATES);
    (start..start + CANDIDATES).collect()
}

/// Rank 0's machine when all ranks are on it.
const LOOPBACK: &str = "127.0.0.1";

#[cfg(test)]
mod tests;
