//! Ctrl-C in a call that runs on its caller's thread.
//!
//! Python handles signals on its main thread, between two instructions; a call that waits for other
//! ranks there has no instructions. So the engine asks, while it waits, whether to go on: on the
//! thread that waits, after a tenth of a second and then ten times a second. Here that thread takes
//! the interpreter's lock and lets Python handle what came. If a handler raises, as that of Ctrl-C
//! does, the group is aborted, since the others cannot finish the call without this rank, and the
//! exception is what the call ends with. A call that does not wait so long pays for none of this but
//! two writes to a variable of its thread.

use std::cell::RefCell;
use std::time::Duration;

use pyo3::prelude::*;

/// How often a wait on another thread than the engine's checks for Ctrl-C. Longer: a program ends
/// later after it. Shorter: the thread wakes up more often for no signal.
pub const CHECK_EVERY: Duration = Duration::from_millis(100);

thread_local! {
    static CALL: RefCell<Calling> = const { RefCell::new(Calling::No) };
}

/// Whether the thread has come from Python to wait for a call.
enum Calling {
    No,
    Yes,
    /// A handler of a signal raised this.
    Interrupted(PyErr),
}

/// Makes a call without the interpreter's lock; what it gives, and what a handler of a signal raised
/// meanwhile.
pub fn during<R>(call: impl FnOnce() -> R) -> (R, Option<PyErr>) {
    // A handler that makes a call is inside of another.
    let outer = CALL.replace(Calling::Yes);
    let outcome = call();
    match CALL.replace(outer) {
        Calling::Interrupted(raised) => (outcome, Some(raised)),
        Calling::Yes | Calling::No => (outcome, None),
    }
}

/// Lets Python handle signals if this thread makes a call; whether a handler raised.
pub fn interrupt() -> bool {
    if !CALL.with_borrow(|calling| matches!(calling, Calling::Yes)) {
        return false;
    }
    // An interpreter that is about to end gives no thread its lock, and handles no signals.
    match Python::try_attach(|py| py.check_signals()) {
        Some(Err(raised)) => {
            CALL.set(Calling::Interrupted(raised));
            true
        }
        Some(Ok(())) | None => false,
    }
}
