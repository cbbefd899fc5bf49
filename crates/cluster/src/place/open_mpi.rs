//! Open MPI's `mpirun`.

use super::{LOOPBACK, Launcher, Place, PlaceError, Reader, Rendezvous, Vars, token};

pub(super) fn place(vars: &Vars) -> Result<Option<Place>, PlaceError> {
    let launcher = Launcher::OpenMpi;
    let reader = Reader { vars, launcher };
    if reader.text("OMPI_COMM_WORLD_RANK").is_none() {
        return Ok(None);
    }
    let world = reader.count("OMPI_COMM_WORLD_SIZE", "the number of ranks")?;
    let local_world = reader.count("OMPI_COMM_WORLD_LOCAL_SIZE", "the number of ranks here")?;
    let identity = reader
        .text("PMIX_NAMESPACE")
        .or_else(|| reader.text("OMPI_MCA_ess_base_jobid"))
        .map(|identity| format!("mpirun:{identity}"));
    let job_name = match world {
        1 => identity.unwrap_or_else(|| "mpirun".into()),
        _ => reader.required(identity, "PMIX_NAMESPACE", "a name of this job")?,
    };
    let rendezvous = match world {
        1 => Rendezvous::Alone,
        _ => reader.named_master(&job_name, || match local_world == world {
            true => Ok(LOOPBACK.into()),
            false => reader.required(
                reader.text("OMPI_MCA_orte_hnp_uri").and_then(address_in_uri),
                "MASTER_ADDR",
                "the name or address of rank 0's machine (mpirun -x MASTER_ADDR=…)",
            ),
        })?,
    };
    Ok(Some(Place {
        rank: reader.count("OMPI_COMM_WORLD_RANK", "the rank of this process")?,
        world,
        local_rank: reader.count("OMPI_COMM_WORLD_LOCAL_RANK", "the rank of this process here")?,
        local_world,
        node: (local_world == world).then_some(0),
        rendezvous,
        token: token(vars, launcher)?,
        job_name,
        launcher,
    }))
}

/// The first address at which `mpirun` listens. It usually runs on the machine of rank 0.
///
/// The form is `jobid.0;tcp://A,B:PORT;tcp6://[C,D]:PORT`.
fn address_in_uri(uri: &str) -> Option<String> {
    let find = |scheme: &str| uri.split(';').find_map(|part| part.strip_prefix(scheme));
    let addresses = match find("tcp://") {
        Some(v4) => v4.rsplit_once(':')?.0,
        None => find("tcp6://")?.strip_prefix('[')?.split_once(']')?.0,
    };
    let first = addresses.split(',').next()?;
    first.parse::<std::net::IpAddr>().ok().map(|address| address.to_string())
}
