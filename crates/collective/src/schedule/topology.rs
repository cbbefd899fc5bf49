//! Which ranks share a host.

/// The host of every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// The host of every rank, numbered in order of first appearance.
    hosts: Vec<u32>,
    /// The ranks of every host, ascending.
    members: Vec<Vec<usize>>,
}

impl Topology {
    /// Ranks with equal numbers share a host; the numbers mean nothing else.
    pub fn new(numbers: &[u32]) -> Topology {
        let mut seen: Vec<u32> = Vec::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut hosts = Vec::with_capacity(numbers.len());
        for (rank, number) in numbers.iter().enumerate() {
            let host = seen.iter().position(|s| s == number).unwrap_or_else(|| {
                seen.push(*number);
                members.push(Vec::new());
                seen.len() - 1
            });
            hosts.push(host as u32);
            members[host].push(rank);
        }
        Topology { hosts, members }
    }

    /// All ranks on one host.
    pub fn one_host(world: usize) -> Topology {
        Topology::new(&vec![0; world])
    }

    /// Every rank on a host of its own.
    pub fn all_apart(world: usize) -> Topology {
        Topology::new(&(0..world as u32).collect::<Vec<_>>())
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.hosts.len()
    }

    /// The number of hosts.
    pub fn hosts(&self) -> usize {
        self.members.len()
    }

    /// The host of a rank, in `0..hosts()`.
    pub fn host(&self, rank: usize) -> usize {
        self.hosts[rank] as usize
    }

    /// The ranks of a host, ascending.
    pub fn members(&self, host: usize) -> &[usize] {
        &self.members[host]
    }

    /// The number of ranks on the smallest host.
    pub fn smallest_host(&self) -> usize {
        self.members.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// The ranks of all hosts among which a hierarchy exchanges what the hosts have folded, this one and those of its place
    /// on the other hosts; none if some host has no rank in that place.
    pub fn counterparts(&self, rank: usize) -> Vec<usize> {
        let place = self.members[self.host(rank)].iter().position(|member| *member == rank);
        let place = place.filter(|place| *place < self.smallest_host());
        place.map_or(Vec::new(), |place| self.members.iter().map(|host| host[place]).collect())
    }

    /// Whether two ranks share a host.
    pub fn together(&self, a: usize, b: usize) -> bool {
        self.hosts[a] == self.hosts[b]
    }

    /// Whether all ranks share one host.
    pub fn is_one_host(&self) -> bool {
        self.members.len() <= 1
    }

    /// Whether no two ranks share a host.
    pub fn is_all_apart(&self) -> bool {
        self.members.len() == self.hosts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_by_first_appearance() {
        let topology = Topology::new(&[7, 3, 7, 9]);
        assert_eq!(topology.hosts(), 3);
        assert_eq!(topology.members(0), [0, 2]);
        assert_eq!(topology.host(3), 2);
        assert!(topology.together(0, 2) && !topology.together(0, 1));
        assert_eq!(topology.smallest_host(), 1);
        assert_eq!(topology.counterparts(1), [0, 1, 3]);
        assert_eq!(topology.counterparts(2), []);
    }
}
