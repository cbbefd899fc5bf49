//! The staging memory of one rank.

use super::STAGING_BUFFERS;
use crate::error::FormError;
use crate::options::Options;
use crate::window::region::Region;

/// Bytes of one staging buffer.
pub fn staging_buffer(options: &Options) -> usize {
    (options.staging / STAGING_BUFFERS / 4096 * 4096).max(4096)
}

/// Makes a region with the staging buffers of one rank.
///
/// The kernel gives a file in memory all the pages it asks for, and kills somebody when there are
/// none left. So who asks for more than there is gets an error here.
pub fn create_region(options: &Options) -> Result<Region, FormError> {
    let bytes = STAGING_BUFFERS * staging_buffer(options);
    if let Some(available) = available_memory()
        && bytes as u64 > available
    {
        let reason = format!("only {available} bytes are available");
        return Err(FormError::Staging { bytes, reason });
    }
    Region::create(STAGING_BUFFERS, staging_buffer(options))
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
        let with = |staging| create_region(&Options { staging, ..Options::default() });
        assert!(matches!(with(1 << 50), Err(FormError::Staging { .. })));
        assert!(with(1 << 20).is_ok());
    }
}
