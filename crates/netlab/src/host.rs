use std::ffi::OsStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::panic;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::iproute::iproute;
use crate::lab::Switch;
use crate::link::Link;
use crate::namespace::{Door, Namespace};
use crate::relay::Relay;
use crate::{Fault, LabError};

/// The device by which every host is linked to the switch.
const DEVICE: &str = "eth0";

/// How long a link may take to carry its first packet after it came up. It takes milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for one probe before sending the next.
const PROBE_INTERVAL: Duration = Duration::from_millis(5);

/// One host of a [`Lab`](crate::Lab): a network namespace, its link, and what runs in it.
///
/// Only the network is its own. Files, users, process numbers, `/sys` and shared memory are those
/// of the machine, so programs that recognize hosts by anything but the network need to be told
/// that two hosts are two.
#[derive(Debug)]
pub struct Host {
    /// Its end of the link, where that delays or loses packets. Ends before the namespace does.
    relay: Option<Relay>,
    index: usize,
    namespace: Namespace,
    switch: Arc<Switch>,
    /// How many calls of [`Host::run`] are under way.
    calls: AtomicUsize,
}

impl Host {
    /// Makes the `index`-th host and plugs it in, without waiting for the link to come up.
    pub(crate) fn plug(
        index: usize,
        name: String,
        switch: &Arc<Switch>,
        link: &Link,
    ) -> Result<Host, LabError> {
        let namespace = Namespace::create(name)?;
        let (calls, switch) = (AtomicUsize::new(0), Arc::clone(switch));
        let mut host = Host { relay: None, index, namespace, switch, calls };
        let port = host.port();
        if let Some(path) = link.path() {
            let (here, there) = (host.namespace.door(), host.switch.door());
            let relay = Relay::start((here, DEVICE), (there, &port), path);
            host.relay = Some(relay.map_err(|source| host.os("making devices", source))?);
        }
        let (name, switch) = (host.namespace(), host.switch.namespace());
        if host.relay.is_none() {
            iproute(&format!(
                "ip -n {switch} link add {port} type veth peer name {DEVICE} netns {name}"
            ))?;
        }
        let v4 = format!("{}/{}", host.address(), Switch::PREFIX_V4);
        let v6 = format!("{}/{}", host.address_v6(), Switch::PREFIX_V6);
        iproute(&format!("ip -n {name} addr add {v4} dev {DEVICE}"))?;
        // The check for duplicates would keep the address unusable for a second.
        iproute(&format!("ip -n {name} addr add {v6} dev {DEVICE} nodad"))?;
        for line in link.shape_host(name, DEVICE) {
            iproute(&line)?;
        }
        iproute(&link.shape_switch(switch, &port))?;
        iproute(&format!("ip -n {name} link set {DEVICE} up"))?;
        iproute(&format!("ip -n {switch} link set {port} master {} up", Switch::DEVICE))?;
        Ok(host)
    }

    /// The place of the host in its lab.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The IPv4 address. Addresses repeat from lab to lab, which never meet.
    pub fn address(&self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(Switch::NETWORK_V4.to_bits() + self.number()))
    }

    /// The IPv6 address, a unique local one.
    pub fn address_v6(&self) -> IpAddr {
        let number = u128::from(self.number());
        IpAddr::V6(Ipv6Addr::from_bits(Switch::NETWORK_V6.to_bits() + number))
    }

    /// The name of the namespace, to look into a live lab with `ip netns exec`.
    pub fn namespace(&self) -> &str {
        self.namespace.name()
    }

    /// A command that runs `program` on this host. The child is the program itself, so its
    /// process number and the signals sent to it are the program's own.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let door = self.namespace.door().clone();
        // SAFETY: between fork and exec, the child may only do what a signal handler may.
        // `Door::enter` makes one system call; it neither allocates nor locks.
        unsafe { command.pre_exec(move || door.enter()) };
        command
    }

    /// Runs `work` on a thread of this process that is on this host, and waits for it.
    ///
    /// Sockets that `work` makes stay on this host when it hands them back, and threads that it
    /// starts run here too. A panic in `work` goes on in the caller.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        let _counted = CallCount::new(&self.calls);
        run_behind(self.namespace.door(), &format!("host {}", self.index), work)
            .map_err(|source| self.os("entering the namespace", source))
    }

    /// Pulls the plug: from here on, no packet reaches or leaves this host.
    ///
    /// No process is told. Connections stay open on both sides until something notices the silence;
    /// packets already delivered stay delivered.
    ///
    /// # Errors
    ///
    /// [`LabError::NoEffect`] if the link is cut already, or still up afterwards.
    pub fn cut(&self) -> Result<(), LabError> {
        if !self.is_connected()? {
            return Err(self.no_effect(Fault::Cut, "the link is cut already"));
        }
        iproute(&format!("ip -n {} link set {} down", self.switch.namespace(), self.port()))?;
        match self.is_connected()? {
            false => Ok(()),
            true => Err(self.no_effect(Fault::Cut, "the link is still up")),
        }
    }

    /// Puts the plug back in, and returns once a packet has passed.
    ///
    /// TCP connections resume at their next retransmission, which comes the later the longer the
    /// cut lasted.
    ///
    /// # Errors
    ///
    /// [`LabError::NoEffect`] if the link is not cut, or still carries nothing afterwards.
    pub fn heal(&self) -> Result<(), LabError> {
        if self.is_connected()? {
            return Err(self.no_effect(Fault::Heal, "the link is not cut"));
        }
        iproute(&format!("ip -n {} link set {} up", self.switch.namespace(), self.port()))?;
        match self.reaches_switch()? {
            true => Ok(()),
            false => Err(self.no_effect(Fault::Heal, "the link carries nothing")),
        }
    }

    /// Plugs this host into the island, whose hosts reach no others.
    pub(crate) fn separate(&self) -> Result<(), LabError> {
        if self.is_separated()? {
            return Err(self.no_effect(Fault::Separate, "it is separated already"));
        }
        self.switch.make_island()?;
        self.plug_into(Switch::ISLAND)?;
        match self.is_separated()? {
            true => Ok(()),
            false => Err(self.no_effect(Fault::Separate, "it is still connected to the others")),
        }
    }

    /// Plugs this host back into the switch.
    pub(crate) fn reunite(&self) -> Result<(), LabError> {
        self.plug_into(Switch::DEVICE)?;
        match self.reaches_switch()? {
            true => Ok(()),
            false => Err(self.no_effect(Fault::Reunite, "the link carries nothing")),
        }
    }

    pub(crate) fn is_separated(&self) -> Result<bool, LabError> {
        let (switch, port) = (self.switch.namespace(), self.port());
        let line = iproute(&format!("ip -n {switch} -o link show dev {port}"))?;
        // As in `3: p0@if2: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 … master switch state UP …`.
        let mut words = line.split_ascii_whitespace().skip_while(|word| *word != "master");
        Ok(words.nth(1) == Some(Switch::ISLAND))
    }

    fn plug_into(&self, bridge: &str) -> Result<(), LabError> {
        let (switch, port) = (self.switch.namespace(), self.port());
        iproute(&format!("ip -n {switch} link set {port} master {bridge}")).map(drop)
    }

    /// How many processes are on this host. Threads of the calling process do not count.
    pub fn processes(&self) -> Result<usize, LabError> {
        self.namespace
            .members()
            .map(|members| members.len())
            .map_err(|source| self.os("looking for processes", source))
    }

    /// Kills every process on this host with SIGKILL and returns, once all are gone, how many
    /// there were.
    ///
    /// The kernel closes their connections, as it does when programs crash, so peers that can
    /// still be reached learn of it. A host that loses power tells no other host: [`Host::cut`] first.
    ///
    /// # Errors
    ///
    /// [`LabError::NoEffect`] if there was no process to kill, or if [`Host::run`] is still at
    /// work here: the threads of this process cannot be killed.
    pub fn kill(&self) -> Result<usize, LabError> {
        if self.calls.load(Ordering::Acquire) > 0 {
            return Err(self.no_effect(Fault::Kill, "a thread of the calling process is there"));
        }
        match self.namespace.kill_all() {
            Ok(0) => Err(self.no_effect(Fault::Kill, "no process is there")),
            Ok(killed) => Ok(killed),
            Err(error) => Err(self.no_effect(Fault::Kill, error)),
        }
    }

    /// Whether the link is up.
    pub fn is_connected(&self) -> Result<bool, LabError> {
        let (switch, port) = (self.switch.namespace(), self.port());
        let line = iproute(&format!("ip -n {switch} -o link show dev {port}"))?;
        // As in `3: p0@if2: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 …`.
        let flags = line.split(['<', '>']).nth(1).unwrap_or_default();
        Ok(flags.split(',').any(|flag| flag == "LOWER_UP"))
    }

    /// Whether a packet from this host reaches the switch in reasonable time. That takes an answer
    /// to the host's question for the address of the switch, so both directions work.
    pub(crate) fn reaches_switch(&self) -> Result<bool, LabError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let probe = || -> io::Result<bool> {
            let (receiver, sender) = self.probe_sockets()?;
            while Instant::now() < deadline {
                // While the link comes up, a packet may be refused as well as lost.
                let _ = sender.send(&[0]);
                match receiver.recv(&mut [0]) {
                    Ok(_) => return Ok(true),
                    Err(error) if is_timeout(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(false)
        };
        probe().map_err(|error| self.os("probing the link", error))
    }

    fn probe_sockets(&self) -> io::Result<(UdpSocket, UdpSocket)> {
        let receiver = run_behind(self.switch.door(), "probe", || {
            UdpSocket::bind((self.switch.address(), 0))
        })??;
        receiver.set_read_timeout(Some(PROBE_INTERVAL))?;
        let sender =
            run_behind(self.namespace.door(), "probe", || UdpSocket::bind((self.address(), 0)))??;
        sender.connect(receiver.local_addr()?)?;
        Ok((receiver, sender))
    }

    /// The name of this link's device at the switch.
    fn port(&self) -> String {
        format!("p{}", self.index)
    }

    /// The number of the host within the network. A bridge has at most 1023 ports.
    fn number(&self) -> u32 {
        u32::try_from(self.index + 1).expect("a host that exists has a port on the bridge")
    }

    pub(crate) fn no_effect(&self, fault: Fault, reason: impl ToString) -> LabError {
        LabError::NoEffect { fault, host: self.index, reason: reason.to_string() }
    }

    fn os(&self, attempt: &'static str, source: io::Error) -> LabError {
        LabError::Os { attempt, host: self.index, source }
    }
}

/// Counts one call of [`Host::run`], also when it panics.
struct CallCount<'a>(&'a AtomicUsize);

impl<'a> CallCount<'a> {
    fn new(calls: &'a AtomicUsize) -> CallCount<'a> {
        calls.fetch_add(1, Ordering::AcqRel);
        CallCount(calls)
    }
}

impl Drop for CallCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Runs `work` on a new thread behind `door`: a thread that has changed its namespace is not one
/// to give back to its pool.
fn run_behind<T: Send>(door: &Door, name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, || {
            door.enter()?;
            Ok(work())
        })?;
        thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
    })
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
