//! How ranks that do not know each other yet become a group.

use std::borrow::Cow;
use std::net::IpAddr;

use pyo3::prelude::*;
use unisono_collective::fabric::{self, Address};
use unisono_collective::{Epoch, FormError, Options};
use unisono_net::Token;
use unisono_net::interface::own_address;

use crate::error::{not_begun, not_formed};
use crate::group::Group;

/// A new secret, which the ranks of a job know and no other process.
#[pyfunction]
pub fn new_token(py: Python<'_>) -> PyResult<[u8; 32]> {
    let token = Token::random().map_err(|error| not_begun(py, error.to_string()))?;
    Ok(*token.as_bytes())
}

/// Where a rank listens before it knows the others.
#[pyclass]
pub struct Endpoint {
    /// Until it was opened.
    endpoint: Option<fabric::Endpoint>,
    address: Vec<u8>,
}

#[pymethods]
impl Endpoint {
    /// Listens on a free port of this machine's address `ip`, or of the interface that
    /// `UNISONO_INTERFACE` names.
    #[new]
    fn new(py: Python<'_>, ip: &str) -> PyResult<Endpoint> {
        let failed = |reason: String| not_begun(py, format!("cannot listen on {ip}: {reason}"));
        let address: IpAddr = ip.parse().map_err(|_| failed("not an IP address".into()))?;
        let address = own_address(address).map_err(|error| not_begun(py, error.to_string()))?;
        let endpoint =
            fabric::Endpoint::bind(address).map_err(|error| failed(error.to_string()))?;
        let address =
            postcard::to_stdvec(endpoint.address()).map_err(|error| failed(error.to_string()))?;
        Ok(Endpoint { endpoint: Some(endpoint), address })
    }

    /// What the others need to know, to be passed on as it is.
    fn address(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.address)
    }

    /// Forms the group of the ranks with these addresses, of which this is number `rank` and computes with so many
    /// threads while calls run. Once.
    #[pyo3(signature = (rank, token, addresses, computing=None))]
    fn open(
        &mut self,
        py: Python<'_>,
        rank: usize,
        token: [u8; 32],
        addresses: Vec<Vec<u8>>,
        computing: Option<usize>,
    ) -> PyResult<Group> {
        let world = addresses.len();
        if rank >= world {
            let text = format!("rank {rank} is not in a group of {world}");
            return Err(not_begun(py, text));
        }
        let mut roster: Vec<Address> = Vec::with_capacity(world);
        for (rank, address) in addresses.iter().enumerate() {
            roster.push(postcard::from_bytes(address).map_err(|_| {
                let text = "cannot be read; install the same version of unisono everywhere";
                not_begun(py, format!("the address of rank {rank} {text}"))
            })?);
        }
        let mut options = Options::from_env().map_err(|error| not_begun(py, error.to_string()))?;
        options.computing = computing.or(options.computing);
        let endpoint = self
            .endpoint
            .take()
            .ok_or_else(|| not_begun(py, "an endpoint can be opened once".into()))?;
        let formed = py.detach(|| {
            let token = Token::from_bytes(token).with_encryption(options.encrypt);
            let connector = endpoint.open(rank, token, roster);
            let connector = connector.map_err(|error| FormError::System {
                what: "accepting connections",
                reason: error.to_string(),
            })?;
            unisono_collective::Group::world(connector, Epoch::new(0), rank, world, options)
        });
        Ok(Group::new(formed.map_err(|error| not_formed(py, &error))?))
    }
}
