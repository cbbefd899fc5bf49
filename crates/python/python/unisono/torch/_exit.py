"""Leaves the groups that a program did not destroy before the interpreter ends.

Their threads call back into Python, which lets nobody in once it is ending.
"""

import atexit
import weakref

# How long a program that ends waits for its calls that were started and not waited for.  Longer:
# one that the other ranks never make keeps it for longer.  Shorter: it fails if they are late.
PATIENCE = 10.0

_open: "weakref.WeakSet" = weakref.WeakSet()


def watch(group) -> None:
    """Closes the group at the end of the program, if it is still there."""
    _open.add(group)


@atexit.register
def _close_all() -> None:
    for group in list(_open):
        group._close(PATIENCE)
