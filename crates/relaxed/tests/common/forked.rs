//! What a child that was forked without `exec` has open, as a loader of data would.

/// Connected sockets that this process has, and that a child which it forks has.
pub fn connections() -> (usize, usize) {
    let (mine, highest) = (count(), 250);
    // SAFETY: the child only asks the system about descriptors and ends, which is allowed after a fork
    // of a process with threads.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "cannot fork");
    if child == 0 {
        let held = count().min(highest) as i32;
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(held) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    assert!(ended == child && libc::WIFEXITED(status), "the child did not end by itself");
    (mine, libc::WEXITSTATUS(status) as usize)
}

/// Descriptors of connected sockets.
fn count() -> usize {
    let is_connected = |descriptor: &i32| {
        // SAFETY: the address is plain bytes, and the kernel writes at most `length` of them.
        unsafe {
            let mut address: libc::sockaddr_storage = std::mem::zeroed();
            let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            libc::getpeername(*descriptor, (&raw mut address).cast(), &mut length) == 0
        }
    };
    (3..1024).filter(is_connected).count()
}
