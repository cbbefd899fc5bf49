//! Where NCCL may be.
//!
//! A library that the user names is the only one that counts. Otherwise one that the process has loaded
//! already comes first, such as PyTorch's: a second NCCL in a process would have its own connections and
//! threads. Then what the system's loader finds, and at last the places where pip installs NCCL for PyTorch,
//! which no loader knows: in each environment that the variables `VIRTUAL_ENV` and `CONDA_PREFIX`, or
//! the running interpreter, point to.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names NCCL's library, in place of all others.
pub const NCCL_VARIABLE: &str = "UNISONO_NCCL";

/// The library's name where it is installed.
const LIBRARY: &str = "libnccl.so.2";

/// Where pip puts it, below `site-packages`.
const IN_PIP: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Names and paths to try, best first.
pub fn candidates() -> Vec<OsString> {
    let named = std::env::var_os(NCCL_VARIABLE).filter(|name| !name.is_empty());
    if let Some(named) = named {
        return vec![named];
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut candidates: Vec<OsString> =
        loaded(&maps).into_iter().map(PathBuf::into_os_string).collect();
    candidates.push(LIBRARY.into());
    let found = prefixes().iter().flat_map(|prefix| in_prefix(prefix)).collect::<Vec<_>>();
    candidates.extend(found.into_iter().map(PathBuf::into_os_string));
    let mut unique = Vec::new();
    for candidate in candidates {
        if !unique.contains(&candidate) {
            unique.push(candidate);
        }
    }
    unique
}

/// The libraries of that name among the mapped files of a process, as `/proc/self/maps` lists them.
fn loaded(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    // The sixth field is the path, and may contain spaces.
    for path in maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])) {
        let is_nccl = Path::new(path)
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name == "libnccl.so" || name.starts_with("libnccl.so."));
        if is_nccl && !found.iter().any(|known| known == Path::new(path)) {
            found.push(path.into());
        }
    }
    found
}

/// Folders in which an environment of Python may be.
fn prefixes() -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os);
    let mut prefixes: Vec<PathBuf> = named.filter(|it| !it.is_empty()).map(PathBuf::from).collect();
    // As it was called: the interpreter of an environment is a link to another place.
    let arguments = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let called = arguments.split(|&byte| byte == 0).next().unwrap_or_default();
    let called = PathBuf::from(String::from_utf8_lossy(called).into_owned());
    let programs = [Some(called).filter(|it| it.is_absolute()), std::env::current_exe().ok()];
    for program in programs.into_iter().flatten() {
        prefixes.extend(program.parent().and_then(Path::parent).map(Path::to_owned));
    }
    prefixes
}

/// Where pip has installed it below a prefix.
fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["lib", "local/lib", "lib64"] {
        let Ok(entries) = std::fs::read_dir(prefix.join(folder)) else { continue };
        let mut versions: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                let name = path.file_name().and_then(|name| name.to_str());
                name.is_some_and(|name| name.starts_with("python3"))
            })
            .collect();
        versions.sort();
        let packages = ["site-packages", "dist-packages"];
        let libraries = versions
            .iter()
            .flat_map(|version| packages.map(|packages| version.join(packages).join(IN_PIP)));
        found.extend(libraries.filter(|library| library.exists()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loaded_library_is_found_once() {
        let maps = "7f00-7f01 r--p 00000000 fd:01 12 /opt/my env/nvidia/nccl/lib/libnccl.so.2\n\
                    7f01-7f02 r-xp 00001000 fd:01 12 /opt/my env/nvidia/nccl/lib/libnccl.so.2\n\
                    7f02-7f03 r-xp 00000000 fd:01 13 /usr/lib/libnccl-net.so\n\
                    7f03-7f04 rw-p 00000000 00:00 0 [heap]\n\
                    7f04-7f05 r-xp 00000000 fd:01 14 /usr/lib/libnccl.so.2.28.9\n";
        let expected = ["/opt/my env/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.28.9"];
        assert_eq!(loaded(maps), expected.map(PathBuf::from));
    }

    #[test]
    fn the_packages_of_every_python_are_searched() {
        let prefix = tempfile::tempdir().unwrap();
        let library = prefix.path().join("lib/python3.12/site-packages").join(IN_PIP);
        std::fs::create_dir_all(prefix.path().join("lib/python3.11/site-packages")).unwrap();
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        assert_eq!(in_prefix(prefix.path()), [""; 0].map(PathBuf::from));
        std::fs::write(&library, "").unwrap();
        assert_eq!(in_prefix(prefix.path()), [library]);
    }
}
