//! Real etcd, as several nodes that can be killed, stopped and started again.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tempfile::TempDir;

use crate::Host;
use crate::lab::skip;

const PROGRAM: &str = "etcd";
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// Where a node listens on its loopback besides, without TLS, for what the lab asks it.
const ADMIN_PORT: u16 = 2377;

/// How long etcd may take to be ready, or to notice something, before that counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long one question may take.
const QUESTION: Duration = Duration::from_secs(5);

const GLANCE: Duration = Duration::from_millis(20);

/// How the nodes are to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdOptions {
    /// Whether clients connect by TLS, and show a certificate ([`EtcdCluster::certificates`]).
    pub tls: bool,
    /// The password of the user `root`; etcd then serves no client that does not name a user.
    pub root_password: Option<String>,
    /// For how many seconds a token of a user is valid, if not for etcd's five minutes.
    pub token_ttl: Option<u32>,
}

/// An etcd cluster of which every node is a process of its own. An election takes 500 ms to 1 s.
///
/// The processes end with this value; and when the thread that started them ends, however it ends.
#[derive(Debug)]
pub struct EtcdCluster<'a> {
    nodes: Vec<Node<'a>>,
    options: EtcdOptions,
    certificates: Option<EtcdCertificates>,
    folder: TempDir,
}

/// The files that a client of a cluster with TLS needs, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdCertificates {
    /// The authority that signed the certificates of the nodes.
    pub ca: PathBuf,
    /// A certificate for a client.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

#[derive(Debug)]
struct Node<'a> {
    name: String,
    place: Place<'a>,
    process: Option<Child>,
}

#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    /// On this machine, at an address of the loopback network that no other node has.
    Here(Ipv4Addr),
    On(&'a Host),
}

/// Starts `nodes` nodes on this machine, or says on stderr that the calling test is skipped because
/// etcd is not installed.
///
/// # Panics
///
/// If etcd is missing and `UNISONO_NETLAB=require`, or if it does not become ready.
pub fn etcd_or_skip(nodes: usize, options: EtcdOptions) -> Option<EtcdCluster<'static>> {
    is_installed_or_skip().then(|| EtcdCluster::start(nodes, options).expect("etcd starts"))
}

/// The same with one node on each of some hosts.
///
/// # Panics
///
/// As [`etcd_or_skip`].
pub fn etcd_on_or_skip<'a>(hosts: &[&'a Host], options: EtcdOptions) -> Option<EtcdCluster<'a>> {
    is_installed_or_skip().then(|| EtcdCluster::start_on(hosts, options).expect("etcd starts"))
}

fn is_installed_or_skip() -> bool {
    let output = Command::new(PROGRAM).arg("--version").stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => true,
        Ok(output) => panic!("`{PROGRAM} --version` ended with {}", output.status),
        Err(error) => {
            skip(&format!("cannot run {PROGRAM}: {error}"), "install Debian's etcd-server");
            false
        }
    }
}

impl EtcdCluster<'static> {
    /// Starts `nodes` nodes on this machine and returns once they have a leader.
    pub fn start(nodes: usize, options: EtcdOptions) -> io::Result<EtcdCluster<'static>> {
        let network = free_network()?;
        let places = (0..nodes).map(|node| {
            let number = u32::try_from(node + 1).expect("fewer nodes than addresses");
            Place::Here(Ipv4Addr::from_bits(network.to_bits() + number))
        });
        EtcdCluster::start_at(places.collect(), options)
    }
}

impl<'a> EtcdCluster<'a> {
    /// Starts one node on each of these hosts and returns once they have a leader.
    pub fn start_on(hosts: &[&'a Host], options: EtcdOptions) -> io::Result<EtcdCluster<'a>> {
        EtcdCluster::start_at(hosts.iter().map(|host| Place::On(host)).collect(), options)
    }

    fn start_at(places: Vec<Place<'a>>, options: EtcdOptions) -> io::Result<EtcdCluster<'a>> {
        let folder = tempfile::Builder::new().prefix("unisono-etcd-").tempdir()?;
        let addresses: Vec<IpAddr> = places.iter().map(Place::address).collect();
        let certificates = match options.tls {
            true => Some(make_certificates(folder.path(), &addresses)?),
            false => None,
        };
        let node = |(number, place)| Node { name: format!("n{number}"), place, process: None };
        let nodes = places.into_iter().enumerate().map(node).collect();
        let mut cluster = EtcdCluster { nodes, options, certificates, folder };
        for node in 0..cluster.nodes.len() {
            cluster.spawn(node)?;
        }
        for node in 0..cluster.nodes.len() {
            cluster.wait_until_healthy(node)?;
        }
        if let Some(password) = cluster.options.root_password.clone() {
            cluster.demand_users(&password)?;
        }
        Ok(cluster)
    }

    /// How many nodes there are, dead ones included.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Where clients connect, separated by commas.
    pub fn endpoints(&self) -> String {
        let nodes = 0..self.nodes.len();
        nodes.map(|node| self.endpoint(node)).collect::<Vec<_>>().join(",")
    }

    /// Where clients connect to one node.
    pub fn endpoint(&self, node: usize) -> String {
        let scheme = if self.options.tls { "https" } else { "http" };
        format!("{scheme}://{}", self.client_address(node))
    }

    /// The address at which one node listens for clients.
    pub fn client_address(&self, node: usize) -> SocketAddr {
        SocketAddr::new(self.nodes[node].place.address(), CLIENT_PORT)
    }

    /// The files for a client, if the cluster has TLS.
    pub fn certificates(&self) -> Option<&EtcdCertificates> {
        self.certificates.as_ref()
    }

    /// Kills one node with SIGKILL, and returns once it is gone.
    ///
    /// # Panics
    ///
    /// Here and below: if the node does not run, so that the fault would do nothing.
    pub fn kill(&mut self, node: usize) {
        let mut process = self.nodes[node].process.take().expect("the node runs");
        assert!(process.try_wait().unwrap().is_none(), "etcd node {node} has ended by itself");
        process.kill().expect("a child can be killed");
        process.wait().expect("a child can be waited for");
    }

    /// Stops one node with SIGSTOP: its connections stay open, and nothing is answered.
    pub fn stop(&self, node: usize) {
        self.signal(node, Signal::STOP, true);
    }

    /// Lets a stopped node go on.
    pub fn cont(&self, node: usize) {
        self.signal(node, Signal::CONT, false);
    }

    /// Starts a node that was killed again, with the data that it had, without waiting for it.
    pub fn restart(&mut self, node: usize) -> io::Result<()> {
        assert!(self.nodes[node].process.is_none(), "etcd node {node} still runs");
        self.spawn(node)
    }

    /// Waits until a node belongs to a cluster with a leader, and answers.
    pub fn wait_until_healthy(&self, node: usize) -> io::Result<()> {
        self.wait(&format!("etcd node {node} does not become healthy"), || {
            let is_healthy = |answer: String| answer.contains(r#""health":"true""#);
            self.ask(node, "GET", "/health", "").is_ok_and(is_healthy).then_some(())
        })
    }

    /// The node that leads, as soon as there is one that runs and says so.
    pub fn leader(&self) -> io::Result<usize> {
        self.wait("etcd has no leader", || {
            let leads = |node: &usize| {
                let answer = self.ask(*node, "GET", "/metrics", "").unwrap_or_default();
                answer.lines().any(|line| line == "etcd_server_is_leader 1")
            };
            (0..self.nodes.len()).filter(|node| self.is_running(*node)).find(leads)
        })
    }

    /// The process numbers of the nodes that run.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.nodes.iter().filter_map(|node| node.process.as_ref()).map(Child::id)
    }

    /// Sends a request to etcd's JSON gateway, without a user, and returns the answer.
    pub fn post(&self, node: usize, path: &str, body: &str) -> io::Result<String> {
        self.ask(node, "POST", path, body)
    }

    fn spawn(&mut self, number: usize) -> io::Result<()> {
        let peer = |node: &Node| format!("http://{}:{PEER_PORT}", node.place.address());
        let members = self.nodes.iter().map(|node| format!("{}={}", node.name, peer(node)));
        let members = members.collect::<Vec<_>>().join(",");
        let node = &self.nodes[number];
        let client = self.endpoint(number);
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(self.folder.path().join(format!("{}.log", node.name)))?;

        let mut command = match node.place {
            Place::Here(_) => Command::new(PROGRAM),
            Place::On(host) => host.command(PROGRAM),
        };
        let admin = format!("http://{}:{ADMIN_PORT}", node.place.loopback());
        command.args(["--name", &node.name, "--data-dir"]).arg(self.folder.path().join(&node.name));
        command.args(["--listen-client-urls", &format!("{client},{admin}")]);
        command.args(["--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer(node)]);
        command.args(["--initial-advertise-peer-urls", &peer(node)]);
        command.args(["--initial-cluster", &members]);
        command.args(["--heartbeat-interval", "100", "--election-timeout", "500"]);
        // A token or password costs as little time as etcd allows.
        command.args(["--logger", "zap", "--log-level", "warn", "--bcrypt-cost", "4"]);
        if let Some(seconds) = self.options.token_ttl {
            command.args(["--auth-token-ttl", &seconds.to_string()]);
        }
        if let Some(certificates) = &self.certificates {
            let file = |name: &str| self.folder.path().join(name);
            command.arg("--cert-file").arg(file("server.pem"));
            command.arg("--key-file").arg(file("server.key"));
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&certificates.ca);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // SAFETY: between fork and exec, the child may only do what a signal handler may. This makes
        // one system call; it neither allocates nor locks.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        self.nodes[number].process = Some(command.spawn()?);
        Ok(())
    }

    /// Gives `root` its password, and from then on asks every client for a user.
    fn demand_users(&self, password: &str) -> io::Result<()> {
        let user = format!(r#"{{"name":"root","password":"{password}"}}"#);
        self.post(0, "/v3/auth/user/add", &user)?;
        self.post(0, "/v3/auth/role/add", r#"{"name":"root"}"#)?;
        self.post(0, "/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#)?;
        self.post(0, "/v3/auth/enable", "{}")?;
        Ok(())
    }

    fn signal(&self, node: usize, signal: Signal, stops: bool) {
        let process = self.nodes[node].process.as_ref().expect("the node runs");
        let pid = Pid::from_child(process);
        let is_stopped = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            state.expect("a process has a state") == 'T'
        };
        assert_ne!(is_stopped(), stops, "the signal would not change etcd node {node}");
        kill_process(pid, signal).expect("a child can be sent a signal");
        let changed = || (is_stopped() == stops).then_some(());
        self.wait(&format!("the signal did not change etcd node {node}"), changed).unwrap();
    }

    fn is_running(&self, node: usize) -> bool {
        self.nodes[node].process.is_some()
    }

    /// One question over plain HTTP/1.0, whose answer ends with the connection.
    fn ask(&self, node: usize, method: &str, path: &str, body: &str) -> io::Result<String> {
        let place = self.nodes[node].place;
        let address = SocketAddr::new(place.loopback(), ADMIN_PORT);
        let ask = || {
            let mut stream = TcpStream::connect_timeout(&address, QUESTION)?;
            stream.set_read_timeout(Some(QUESTION))?;
            let length = body.len();
            let head = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n");
            stream.write_all((head + body).as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
            match head.split(' ').nth(1) {
                Some("200") => Ok(body.to_owned()),
                _ => Err(io::Error::other(answer)),
            }
        };
        match place {
            Place::Here(_) => ask(),
            Place::On(host) => host.run(ask).map_err(io::Error::other)?,
        }
    }

    fn wait<T>(&self, problem: &str, mut look: impl FnMut() -> Option<T>) -> io::Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                let logs = self.nodes.iter().map(|node| {
                    let path = self.folder.path().join(format!("{}.log", node.name));
                    format!("{}:\n{}", node.name, fs::read_to_string(path).unwrap_or_default())
                });
                let logs = logs.collect::<Vec<_>>().join("\n");
                return Err(io::Error::other(format!("{problem}\n{logs}")));
            }
            thread::sleep(GLANCE);
        }
    }
}

impl Drop for EtcdCluster<'_> {
    fn drop(&mut self) {
        for process in self.nodes.iter_mut().filter_map(|node| node.process.as_mut()) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Place<'_> {
    fn address(&self) -> IpAddr {
        match self {
            Place::Here(address) => (*address).into(),
            Place::On(host) => host.address(),
        }
    }

    fn loopback(&self) -> IpAddr {
        match self {
            Place::Here(address) => (*address).into(),
            Place::On(_) => Ipv4Addr::LOCALHOST.into(),
        }
    }
}

/// 127.x.y.0 for an x and y that no other cluster has. Every address of 127.0.0.0/8 is this machine's, so
/// that the ports can be etcd's own, which the kernel hands to no other program that asks for a free one.
fn free_network() -> io::Result<Ipv4Addr> {
    for _ in 0..100 {
        let [x, y, ..] = RandomState::new().build_hasher().finish().to_be_bytes();
        let is_free = |port| TcpListener::bind((Ipv4Addr::new(127, x.max(1), y, 1), port)).is_ok();
        if [CLIENT_PORT, PEER_PORT, ADMIN_PORT].into_iter().all(is_free) {
            return Ok(Ipv4Addr::new(127, x.max(1), y, 0));
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// An authority, a certificate for the nodes at `addresses` and one for a client, as files in `folder`.
fn make_certificates(folder: &Path, addresses: &[IpAddr]) -> io::Result<EtcdCertificates> {
    let make = || -> Result<_, rcgen::Error> {
        let mut authority = CertificateParams::new([])?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let certificate = authority.self_signed(&key)?;
        let issuer = Issuer::new(authority, key);
        let signed = |names: Vec<String>| -> Result<_, rcgen::Error> {
            let key = KeyPair::generate()?;
            let certificate = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
            Ok((certificate.pem(), key.serialize_pem()))
        };
        let addresses = addresses.iter().map(ToString::to_string).collect();
        Ok((certificate.pem(), signed(addresses)?, signed(vec!["client".to_owned()])?))
    };
    let (ca, server, client) = make().map_err(io::Error::other)?;
    let write = |name: &str, text: String| -> io::Result<PathBuf> {
        let path = folder.join(name);
        fs::write(&path, text)?;
        Ok(path)
    };
    write("server.pem", server.0)?;
    write("server.key", server.1)?;
    Ok(EtcdCertificates {
        ca: write("ca.pem", ca)?,
        cert: write("client.pem", client.0)?,
        key: write("client.key", client.1)?,
    })
}
