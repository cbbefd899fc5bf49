//! Process managers that set `PMI_RANK` and `PMI_SIZE`, such as MPICH's `mpiexec`.
//!
//! They give the ranks no name of the job, so the ranks need to be told where to meet.

use super::{Launcher, Place, PlaceError, Reader, Rendezvous, Vars, token};

pub(super) fn place(vars: &Vars) -> Result<Option<Place>, PlaceError> {
    let launcher = Launcher::Pmi;
    let reader = Reader { vars, launcher };
    let (Some(_), Some(_)) = (reader.text("PMI_RANK"), reader.text("PMI_SIZE")) else {
        return Ok(None);
    };
    let rank = reader.count("PMI_RANK", "the rank of this process")?;
    let world = reader.count("PMI_SIZE", "the number of ranks")?;
    let (local_rank, local_world) = match world {
        1 => (0, 1),
        _ => (
            reader.count("MPI_LOCALRANKID", "the rank of this process on its node")?,
            reader.count("MPI_LOCALNRANKS", "the number of ranks on this node")?,
        ),
    };
    let (rendezvous, job_name) = match world {
        1 => (Rendezvous::Alone, "pmi".to_owned()),
        _ => {
            let (host, ports) = reader.required_master()?;
            let job_name = format!("pmi:{host}:{}", ports[0]);
            (Rendezvous::RankZero { host, ports }, job_name)
        }
    };
    Ok(Some(Place {
        rank,
        world,
        local_rank,
        local_world,
        node: (local_world == world).then_some(0),
        rendezvous,
        token: token(vars, launcher)?,
        job_name,
        launcher,
    }))
}
