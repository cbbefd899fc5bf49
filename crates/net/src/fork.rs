//! Sockets that forked children do not hold open.
//!
//! A child that is forked without `exec`, such as a loader of data, starts with a copy of every
//! descriptor of its parent. As long as it lives, the parent's connections do not close when the
//! parent dies, its ports stay taken, and a shutdown in the child ends the parent's connections. So
//! the sockets of this crate are *private*: in a forked child, before it runs anything of its own,
//! an unconnected socket takes the place of each. Its number stays taken, because the child has a
//! copy of the parent's memory, whose code may still close it.
//!
//! A table says, for every descriptor number, which socket it stood for when it was made private. A
//! socket that was closed since, and whose number is used again, is not the same socket, so
//! that there is no need to take closed sockets out of the table.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FileType, fstat};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use socket2::Socket;

/// Forks wait as long as this lives, so that a socket can be made and made private in one go. The
/// thread that has it waits for nothing else meanwhile.
pub struct NoFork(#[expect(dead_code, reason = "held")] RwLockReadGuard<'static, ()>);

/// Makes forks wait.
pub fn hold_off() -> NoFork {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(watch_forks);
    NoFork(LOCK.read().unwrap_or_else(PoisonError::into_inner))
}

impl NoFork {
    /// Makes a socket private.
    pub fn make_private(&self, socket: impl AsFd) {
        enter(socket.as_fd());
    }
}

/// Makes a socket private; a child that was forked before keeps it open.
pub fn make_private(socket: impl AsFd) {
    hold_off().make_private(socket);
}

/// A second descriptor of a private socket, which is private as well: a forked child that kept either
/// open would keep the connection.
pub fn duplicate(socket: &Socket) -> std::io::Result<Socket> {
    let no_fork = hold_off();
    let copy = socket.try_clone()?;
    no_fork.make_private(&copy);
    Ok(copy)
}

/// Descriptor numbers of one part of the table. Larger: more memory for a process with few.
const PART: usize = 1024;

/// Parts of the table: with them, it has room for the highest number that Linux gives out by default
/// (`fs.nr_open`).
const PARTS: usize = 1024;

/// By descriptor number, the inode of its socket; 0 for none. Only ever grows, so that a forked child
/// can read it whatever other threads of the parent were doing.
static TABLE: [AtomicPtr<[AtomicU64; PART]>; PARTS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; PARTS];

/// Held by threads that make sockets, and exclusively during a fork.
static LOCK: RwLock<()> = RwLock::new(());

fn enter(socket: BorrowedFd<'_>) {
    let number = socket.as_raw_fd() as usize;
    let (Some(part), Some(inode)) = (TABLE.get(number / PART), inode(socket)) else {
        return log::warn!("forked children keep a socket open: its number is {number}");
    };
    let mut entries = part.load(Ordering::Acquire);
    if entries.is_null() {
        let fresh = Box::into_raw(Box::new([const { AtomicU64::new(0) }; PART]));
        let null = std::ptr::null_mut();
        entries = match part.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(winner) => {
                // SAFETY: made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                winner
            }
        };
    }
    // SAFETY: parts are never freed.
    let entries = unsafe { &*entries };
    entries[number % PART].store(inode, Ordering::Release);
}

/// What tells a socket from all others; `None` if it is none.
fn inode(descriptor: BorrowedFd<'_>) -> Option<u64> {
    let status = fstat(descriptor).ok()?;
    (FileType::from_raw_mode(status.st_mode) == FileType::Socket).then_some(status.st_ino)
}

fn watch_forks() {
    // SAFETY: the handlers are functions of this program and do what is allowed in a fork.
    let error = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
    if error != 0 {
        let error = std::io::Error::from_raw_os_error(error);
        log::warn!("forked children keep the sockets of their parent open: {error}");
    }
}

/// The lock of the fork that is under way.
struct Forking(UnsafeCell<Option<RwLockWriteGuard<'static, ()>>>);

// SAFETY: only used by the thread that forks, between taking `LOCK` exclusively and letting go.
unsafe impl Sync for Forking {}

static FORKING: Forking = Forking(UnsafeCell::new(None));

extern "C" fn before() {
    let guard = LOCK.write().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: this thread has the lock now.
    unsafe { *FORKING.0.get() = Some(guard) };
}

extern "C" fn after() {
    // SAFETY: this thread took the lock in `before`; it is moved out before it is let go.
    let guard = unsafe { (*FORKING.0.get()).take() };
    drop(guard);
}

extern "C" fn in_child() {
    let stand_in = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    for (i, part) in TABLE.iter().enumerate() {
        let entries = part.load(Ordering::Acquire);
        if entries.is_null() {
            continue;
        }
        // SAFETY: parts are never freed.
        let entries = unsafe { &*entries };
        for (j, entry) in entries.iter().enumerate() {
            let entered = entry.load(Ordering::Acquire);
            let number = (i * PART + j) as RawFd;
            // SAFETY: whether the number is that of an open descriptor is what is asked.
            let here = || inode(unsafe { BorrowedFd::borrow_raw(number) });
            if entered != 0 && here() == Some(entered) {
                replace(number, stand_in.as_ref().ok());
            }
        }
    }
    after();
}

/// Lets a descriptor stand for another socket; without one, closes it.
fn replace(number: RawFd, by: Option<&OwnedFd>) {
    // SAFETY: it is open, and this process has but the one thread that is here.
    let mut old = unsafe { OwnedFd::from_raw_fd(number) };
    let Some(by) = by else { return };
    // A number that is open can always be taken over.
    let _ = rustix::io::dup3(by, &mut old, rustix::io::DupFlags::CLOEXEC);
    std::mem::forget(old);
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Runs `inside` in a forked child, which lives until the answer is dropped. The child tells when
    /// it is done by a byte.
    struct Child {
        pid: i32,
    }

    impl Child {
        fn fork(inside: impl FnOnce()) -> Child {
            let (mut here, there) = UnixStream::pair().unwrap();
            // SAFETY: what the child does is safe after a fork: system calls only.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid == 0 {
                inside();
                let _ = rustix::io::write(&there, &[1]);
                // SAFETY: as above.
                unsafe { libc::alarm(300) };
                loop {
                    // SAFETY: as above.
                    unsafe { libc::pause() };
                }
            }
            here.read_exact(&mut [0]).unwrap();
            Child { pid }
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: plain system calls on a child of this process.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn a_child_neither_holds_nor_shuts_down_a_private_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = theirs;
        make_private(&ours);
        let number = ours.as_raw_fd();
        let child = Child::fork(|| {
            // SAFETY: the number is that of an open descriptor; plain system calls.
            unsafe {
                libc::shutdown(number, libc::SHUT_RDWR);
                libc::close(number);
            }
        });
        // Not shut down by the child.
        rustix::io::write(&ours, b"x").unwrap();
        theirs.read_exact(&mut [0]).unwrap();
        // Closed by its owner alone.
        drop(ours);
        theirs.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the child holds the socket");
        drop(child);
    }

    #[test]
    fn a_number_that_is_used_again_is_left_alone() {
        let (private, _peer) = UnixStream::pair().unwrap();
        make_private(&private);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // The other socket takes over the number of the private one.
        let mut private = OwnedFd::from(private);
        rustix::io::dup2(&ours, &mut private).unwrap();
        let number = private.as_raw_fd();
        let child = Child::fork(|| {
            // SAFETY: plain system call.
            unsafe { libc::write(number, b"x".as_ptr().cast(), 1) };
        });
        drop((ours, private));
        let mut byte = [0];
        theirs.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        drop(child);
    }
}
