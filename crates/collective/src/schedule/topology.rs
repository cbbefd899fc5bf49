//! Which ranks share a host, and which hosts a region.

/// The host of every rank, and the region of every host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// The host of every rank, numbered in order of first appearance.
    hosts: Vec<u32>,
    /// The ranks of every host, ascending.
    members: Vec<Vec<usize>>,
    /// The region of every host, numbered in order of first appearance.
    regions: Vec<u32>,
    /// The hosts of every region, ascending.
    hosts_of: Vec<Vec<usize>>,
}

impl Topology {
    /// Ranks with equal numbers share a host; the numbers mean nothing else.
    pub fn new(numbers: &[u32]) -> Topology {
        let (hosts, members) = classes(numbers);
        let (regions, hosts_of) = classes(&vec![0; members.len()]);
        Topology { hosts, members, regions, hosts_of }
    }

    /// The same ranks on the same hosts; hosts with equal numbers, of which there is one for each, share a region.
    ///
    /// # Panics
    /// If there are more numbers than hosts, or fewer.
    pub fn in_regions(self, numbers: &[u32]) -> Topology {
        assert_eq!(numbers.len(), self.hosts(), "every host is in a region");
        let (regions, hosts_of) = classes(numbers);
        Topology { regions, hosts_of, ..self }
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

    /// The number of regions.
    pub fn regions(&self) -> usize {
        self.hosts_of.len()
    }

    /// The region of a host, in `0..regions()`.
    pub fn region(&self, host: usize) -> usize {
        self.regions[host] as usize
    }

    /// The hosts of a region, ascending.
    pub fn hosts_of(&self, region: usize) -> &[usize] {
        &self.hosts_of[region]
    }

    /// The number of hosts in the smallest region.
    pub fn smallest_region(&self) -> usize {
        self.hosts_of.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Whether the hosts of two ranks share a region.
    pub fn share_region(&self, a: usize, b: usize) -> bool {
        self.regions[self.host(a)] == self.regions[self.host(b)]
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

/// The class of every item, numbered in order of first appearance, and the items of every class; items with equal numbers
/// share one.
fn classes(numbers: &[u32]) -> (Vec<u32>, Vec<Vec<usize>>) {
    let mut seen: Vec<u32> = Vec::new();
    let mut items: Vec<Vec<usize>> = Vec::new();
    let mut classes = Vec::with_capacity(numbers.len());
    for (item, number) in numbers.iter().enumerate() {
        let class = seen.iter().position(|s| s == number).unwrap_or_else(|| {
            seen.push(*number);
            items.push(Vec::new());
            seen.len() - 1
        });
        classes.push(class as u32);
        items[class].push(item);
    }
    (classes, items)
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

    #[test]
    fn hosts_share_one_region_unless_it_is_said() {
        let topology = Topology::new(&[7, 3, 7, 9]);
        assert_eq!((topology.regions(), topology.smallest_region()), (1, 3));
        let topology = topology.in_regions(&[5, 2, 5]);
        assert_eq!((topology.regions(), topology.smallest_region()), (2, 1));
        assert_eq!((topology.hosts_of(0), topology.hosts_of(1)), (&[0, 2][..], &[1][..]));
        assert!(topology.share_region(0, 3) && !topology.share_region(0, 1));
        assert_eq!(topology.region(2), 0);
    }
}
