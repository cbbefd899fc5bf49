//! The staging memory of the ranks of one host, in one piece.

use std::os::fd::AsFd;
use std::sync::Arc;

use unisono_net::memory::Memory;

use super::STAGING_BUFFERS;
use crate::error::FormError;
use crate::options::Options;
use crate::schedule::Topology;
use crate::window::region::Region;

/// Bytes of staging memory that all ranks of a host have together at most, unless the user says how much
/// each is to have. Larger: more memory, and a large group forms later. Smaller: shorter segments for the
/// ranks of a crowded host.
const HOST_STAGING: usize = 512 << 20;

/// Bytes of one staging buffer, equal on all ranks.
pub fn staging_buffer(options: &Options, topology: &Topology) -> usize {
    let crowded = (0..topology.hosts()).map(|host| topology.members(host).len()).max().unwrap_or(1);
    let most = match options.staging {
        Options::STAGING => HOST_STAGING / crowded,
        _ => usize::MAX,
    };
    (options.staging.min(most) / STAGING_BUFFERS / 4096 * 4096).max(4096)
}

/// The memory of one host of a group.
pub struct HostMemory<'a> {
    /// The ranks of the host.
    pub members: &'a [usize],
    me: usize,
    /// Bytes of a staging buffer.
    buffer: usize,
}

impl<'a> HostMemory<'a> {
    /// The memory of the host of rank `me`.
    pub fn of(options: &Options, topology: &'a Topology, me: usize) -> HostMemory<'a> {
        let members = topology.members(topology.host(me));
        HostMemory { members, me, buffer: staging_buffer(options, topology) }
    }

    /// Which of the host's ranks this one is.
    pub fn place(&self) -> usize {
        self.members.iter().position(|m| *m == self.me).expect("a rank is on its own host")
    }

    /// Makes it.
    ///
    /// The kernel gives a file in memory all the pages it asks for, and kills a process when there are
    /// none left. So a rank that asks for more than there is gets an error here.
    pub fn create(&self) -> Result<Arc<Memory>, FormError> {
        let bytes = self.bytes();
        if let Some(available) = available_memory()
            && bytes as u64 > available
        {
            let reason = format!("only {available} bytes are available");
            return Err(FormError::Staging { bytes, reason });
        }
        self.mapped(Memory::create(bytes))
    }

    /// Maps what another rank has made.
    pub fn open(&self, file: impl AsFd) -> Result<Arc<Memory>, FormError> {
        self.mapped(Memory::open_writable(file, self.bytes()))
    }

    /// The regions of all ranks in it.
    pub fn regions(&self, memory: &Arc<Memory>) -> Vec<Region> {
        let region = |place| Region::new(memory.clone(), place, STAGING_BUFFERS, self.buffer);
        (0..self.members.len()).map(region).collect()
    }

    fn bytes(&self) -> usize {
        self.members.len().saturating_mul(Region::bytes(STAGING_BUFFERS, self.buffer))
    }

    fn mapped(&self, memory: std::io::Result<Memory>) -> Result<Arc<Memory>, FormError> {
        let failed = |e: std::io::Error| {
            let reason = e.to_string();
            FormError::Staging { bytes: self.bytes(), reason }
        };
        memory.map(Arc::new).map_err(failed)
    }
}

/// Bytes of memory that this process can expect to get, as far as the system tells.
pub fn available_memory() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| in_meminfo(&text));
    let group = read("/proc/self/cgroup").and_then(|text| {
        let path = text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        // Without a limit, the file says "max".
        read(&format!("/sys/fs/cgroup{path}/memory.max"))?.trim().parse().ok()
    });
    machine.into_iter().chain(group).min()
}

fn in_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read() {
        let text = "MemTotal:       24573300 kB\nMemAvailable:   20000000 kB\nBuffers: 1 kB\n";
        assert_eq!(in_meminfo(text), Some(20_000_000 * 1024));
        assert_eq!(in_meminfo("MemTotal: 1 kB"), None);
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let pair = Topology::new(&[0, 0]);
        let with =
            |staging| HostMemory::of(&Options { staging, ..Options::default() }, &pair, 0).create();
        assert!(matches!(with(1 << 50), Err(FormError::Staging { .. })));
        assert!(with(1 << 20).is_ok());
    }

    #[test]
    fn the_ranks_of_a_crowded_host_share_what_there_is() {
        let each = |ranks: usize, options: &Options| {
            let topology = Topology::new(&vec![0; ranks]);
            STAGING_BUFFERS * staging_buffer(options, &topology)
        };
        let default = Options::default();
        assert_eq!(each(2, &default), each(64, &default));
        assert!(each(1024, &default) * 1024 <= HOST_STAGING);
        let asked = Options { staging: 4 << 20, ..Options::default() };
        assert_eq!(each(1024, &asked), each(2, &asked));
    }
}
