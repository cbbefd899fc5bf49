//! Where a rank that is a process can be reached.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket};
use unisono_net::{Acceptor, Admission, Limits, Target, Token, new_socket};

use super::cores::CoreSet;
use super::inbox::Inbox;
use super::process::ProcessHub;
use super::{CONTROL, Connector, DATA, MEMORY, MESSAGES};

/// What connections to a rank are for.
const PURPOSES: [unisono_net::Purpose; 4] = [CONTROL, DATA, MESSAGES, MEMORY];

/// Handshakes that a rank takes part in at once, however large the job. More: more descriptors for
/// strangers. Fewer: members of a larger job are pushed out, and knock again.
const MAX_HALF_DONE: usize = 1024;

/// Which ranks can share memory: equal on ranks of one machine and one network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostId([u8; 16]);

impl HostId {
    /// This host.
    pub fn current() -> HostId {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        // That of the thread, which makes the sockets.
        let network = std::fs::read_link("/proc/thread-self/ns/net").unwrap_or_default();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&boot).update(network.as_os_str().as_encoded_bytes());
        if boot.is_empty() {
            // Without an identity of the machine, no other rank is on the same host.
            let mut random = [0; 16];
            if getrandom::fill(&mut random).is_ok() {
                hasher.update(&random);
            }
        }
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        HostId(id)
    }
}

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// Its host.
    pub host: HostId,
    /// The cores it may use. What ranks of a host have in common comes first: it travels once.
    pub cores: CoreSet,
    /// Its TCP socket.
    pub tcp: SocketAddr,
    /// Its Unix socket, in the abstract namespace.
    #[serde(with = "short")]
    pub unix: String,
}

/// What the names of all Unix sockets begin with; a number follows.
const NAME: &str = "unisono-";

/// The name of a Unix socket as the number in it.
mod short {
    use serde::de::Error as _;
    use serde::ser::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::NAME;

    pub fn serialize<S: Serializer>(name: &str, serializer: S) -> Result<S::Ok, S::Error> {
        let number = name.strip_prefix(NAME).and_then(|n| u64::from_str_radix(n, 16).ok());
        let number = number.ok_or_else(|| S::Error::custom("no name of a socket"))?;
        number.to_le_bytes().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
        let number = <[u8; 8]>::deserialize(deserializer).map_err(D::Error::custom)?;
        Ok(format!("{NAME}{:016x}", u64::from_le_bytes(number)))
    }
}

/// A rank's listening sockets, before it knows the others.
pub struct Endpoint {
    tcp: Socket,
    unix: Socket,
    address: Address,
}

impl Endpoint {
    /// Listens on a free port of `ip`, and on a Unix socket.
    pub fn bind(ip: IpAddr) -> std::io::Result<Endpoint> {
        let tcp = new_socket(Domain::for_address((ip, 0).into()))?;
        tcp.bind(&SocketAddr::from((ip, 0)).into())?;
        tcp.listen(4096)?;
        let bound = tcp.local_addr()?.as_socket();
        let bound =
            bound.ok_or_else(|| std::io::Error::other("a TCP socket without an address"))?;
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(std::io::Error::from)?;
        let name = format!("{NAME}{:016x}", u64::from_le_bytes(number));
        let unix = new_socket(Domain::UNIX)?;
        unix.bind(&Target::Unix(name.clone()).address()?)?;
        unix.listen(4096)?;
        let address =
            Address { host: HostId::current(), tcp: bound, unix: name, cores: CoreSet::current() };
        Ok(Endpoint { tcp, unix, address })
    }

    /// Where the others can reach this rank.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Starts to accept members of the job, whose addresses are known now. Whether connections are
    /// encrypted is the token's to say, and [`Options::encrypt`](crate::Options::encrypt) must agree.
    pub fn open(
        self,
        rank: usize,
        token: Token,
        roster: Vec<Address>,
    ) -> std::io::Result<Arc<dyn Connector>> {
        let inbox = Arc::new(Inbox::default());
        let deliver = inbox.clone();
        let on_connection = move |connection, who| deliver.put(rank, connection, who);
        // All ranks may knock at the same moment.
        let limits = Limits::default();
        let limits =
            Limits { half_done: roster.len().clamp(limits.half_done, MAX_HALF_DONE), ..limits };
        let admission = Admission::new(token.clone(), &PURPOSES).with_limits(limits);
        let acceptor = Acceptor::start(vec![self.tcp, self.unix], admission, on_connection)?;
        Ok(Arc::new(ProcessHub::new(rank, token, roster, inbox, acceptor)))
    }
}
