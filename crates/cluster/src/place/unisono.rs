//! `unisono run`: torchrun's variables, the address of the launcher's rendezvous, and the token.

use super::{Launcher, Place, PlaceError, Reader, Rendezvous, Vars, token};

pub(super) fn place(vars: &Vars) -> Result<Option<Place>, PlaceError> {
    let launcher = Launcher::Unisono;
    let reader = Reader { vars, launcher };
    let Some(rendezvous) = reader.text("UNISONO_RENDEZVOUS") else { return Ok(None) };
    let (host, port) = split_host_port(rendezvous)
        .ok_or_else(|| reader.invalid("UNISONO_RENDEZVOUS", rendezvous.into(), "HOST:PORT"))?;
    let secret = token(vars, launcher)?;
    let secret = reader.required(secret, "UNISONO_TOKEN", "the token of the launcher")?;
    let world = reader.count("WORLD_SIZE", "the number of ranks")?;
    let rendezvous = match world {
        1 => Rendezvous::Alone,
        _ => Rendezvous::Launcher { host: host.to_owned(), port },
    };
    Ok(Some(Place {
        rank: reader.count("RANK", "the rank of this process")?,
        world,
        local_rank: reader.count("LOCAL_RANK", "the rank of this process on its node")?,
        local_world: reader.count("LOCAL_WORLD_SIZE", "the number of ranks on this node")?,
        node: reader.number("GROUP_RANK", "the number of this node")?,
        // Made from the token, because addresses of the launcher differ from node to node.
        job_name: format!("unisono:{:.16}", blake3::keyed_hash(secret.as_bytes(), b"job name")),
        rendezvous,
        token: Some(secret),
        launcher,
    }))
}

/// As [`split_host_port`] reads it.
pub(crate) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// `host:port`, or `[v6 address]:port`.
pub(crate) fn split_host_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']')?,
        // A bare IPv6 address: which of its colons precedes the port cannot be told.
        None if host.contains(':') => return None,
        None => host,
    };
    if host.is_empty() {
        return None;
    }
    Some((host, port.parse().ok()?))
}
