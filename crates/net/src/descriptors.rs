//! How many descriptors this process may have.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Makes sure that this process may have so many descriptors: raises its limit, if that is lower, as far as
/// the system allows.
///
/// # Errors
///
/// If even the hard limit is lower, or the limit cannot be raised.
pub fn ensure(needed: u64) -> io::Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if let Some(most) = maximum.filter(|most| *most < needed) {
        return Err(io::Error::other(format!(
            "{needed} open files are needed, and the limit is {most}; raise it (ulimit -n)"
        )));
    }
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })?)
}

/// Makes sure that this process may have so many descriptors more than it has.
///
/// # Errors
///
/// As [`ensure`].
pub fn ensure_more(more: u64) -> io::Result<()> {
    // Where the system does not tell how many there are, opening them will.
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return Ok(()) };
    ensure(open.count() as u64 + more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_it_goes() {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let before = current.unwrap_or(1024);
        assert!(ensure(1).is_ok());
        assert_eq!(getrlimit(Resource::Nofile).current, current, "it was high enough");
        if let Some(most) = maximum {
            assert!(ensure(most).is_ok());
            assert_eq!(getrlimit(Resource::Nofile).current, Some(most.max(before)));
            let error = ensure(most + 1).unwrap_err();
            assert!(error.to_string().contains("ulimit -n"), "{error}");
            assert!(ensure_more(1).is_ok());
            assert!(ensure_more(most).is_err());
        }
    }
}
