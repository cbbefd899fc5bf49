//! What the kernel says: the time, processes, sockets, memory.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::protocol::Residue;

/// The time on a clock that is the same in all processes.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What this process holds.
pub fn residue() -> Residue {
    let entries = |path| fs::read_dir(path).map_or(0, Iterator::count);
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    Residue {
        mappings: maps.lines().filter(|line| line.contains("/memfd:unisono")).count(),
        descriptors: entries("/proc/self/fd"),
        threads: entries("/proc/self/task"),
    }
}

/// All processes that have `variable=value` in their environment.
pub fn processes(variable: &str, value: &str) -> Vec<u32> {
    let needle = format!("{variable}={value}");
    let has = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|var| var == needle.as_bytes())
    };
    let all = fs::read_dir("/proc").expect("/proc is there").flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has).collect()
}

/// The names of all abstract Unix sockets of this network namespace.
pub fn abstract_sockets() -> Vec<String> {
    let table = fs::read_to_string("/proc/net/unix").expect("/proc is there");
    let name = |line: &str| line.split_whitespace().last()?.strip_prefix('@').map(str::to_owned);
    table.lines().filter_map(name).collect()
}

/// Files of POSIX shared memory that look like Unisono's.
pub fn shared_memory_files() -> Vec<String> {
    let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.contains("unisono")).collect()
}

/// Bytes of memory of its own that a process occupies. What it shares with others comes in huge pages, of which the first
/// touch takes 2 MiB, or in small ones.
pub fn resident(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("it has memory");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

/// Whether all threads of a process are stopped.
pub fn stands_still(pid: u32) -> bool {
    let stopped = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:\tT"))
    };
    fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs").flatten().all(stopped)
}
