//! `torchrun`, and other launchers that set the variables of PyTorch's `env://`.

use super::{LOOPBACK, Launcher, Place, PlaceError, Reader, Rendezvous, Vars, token};

pub(super) fn place(vars: &Vars) -> Result<Option<Place>, PlaceError> {
    let launcher = Launcher::Torchrun;
    let reader = Reader { vars, launcher };
    if reader.text("RANK").is_none() {
        return Ok(None);
    }
    let rank = reader.count("RANK", "the rank of this process")?;
    let world = reader.count("WORLD_SIZE", "the number of ranks")?;
    let (local_rank, local_world) = local(&reader, rank, world)?;
    let (rendezvous, address) = match world {
        1 => (Rendezvous::Alone, String::new()),
        _ => {
            let (host, ports) = reader.required_master()?;
            let address = format!("{host}:{}", reader.text("MASTER_PORT").unwrap_or_default());
            (Rendezvous::RankZero { host, ports }, address)
        }
    };
    // A restart is another job: its ranks must not meet those of the attempt before.
    let run = reader.text("TORCHELASTIC_RUN_ID").unwrap_or("none");
    let attempt = reader.text("TORCHELASTIC_RESTART_COUNT").unwrap_or("0");
    Ok(Some(Place {
        rank,
        world,
        local_rank,
        local_world,
        node: reader.number("GROUP_RANK", "the number of this node")?,
        rendezvous,
        token: token(vars, launcher)?,
        job_name: format!("torchrun:{run}:{attempt}:{address}"),
        launcher,
    }))
}

/// Ranks started by hand often lack the local variables; on one machine they are the global ones.
fn local(reader: &Reader<'_>, rank: u32, world: u32) -> Result<(u32, u32), PlaceError> {
    let unset = reader.text("LOCAL_RANK").is_none() && reader.text("LOCAL_WORLD_SIZE").is_none();
    let on_loopback =
        world == 1 || matches!(reader.text("MASTER_ADDR"), Some(LOOPBACK | "localhost" | "::1"));
    if unset && on_loopback {
        return Ok((rank, world));
    }
    Ok((
        reader.count("LOCAL_RANK", "the rank of this process on its node")?,
        reader.count("LOCAL_WORLD_SIZE", "the number of ranks on this node")?,
    ))
}
