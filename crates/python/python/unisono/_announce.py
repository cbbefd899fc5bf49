"""Tells torch that there is a backend called "unisono", when torch is imported.

A torch that looks for backends among the installed packages needs no telling.  An older one knows a
name once a package has registered it; but it runs the entry points of the group `torch.backends`
when it is imported, unless `TORCH_DEVICE_BACKEND_AUTOLOAD` is 0, and one of them is `announce`.

Every program that imports torch pays for this: so nothing is imported here, and what the backend
needs comes with the first group.
"""

import logging


def announce() -> None:
    """Registers the backend under its name, for when a program asks for it."""
    try:
        from torch import distributed as dist

        is_old = dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered")
        if is_old and "UNISONO" not in dist.Backend._plugins:
            dist.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:  # Would fail the import of torch, also of programs that do not use us.
        logging.getLogger("unisono").debug("torch was not told of the backend: %r", error)


def _create(options, _backend_options):
    from unisono.torch._backend.group import create

    return create("unisono", options)
