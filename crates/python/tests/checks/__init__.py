"""What must hold on real processes.

A function `check_…` of a module in this folder is called on every rank of one group, and leaves the
group usable.
"""

import importlib
import pkgutil

ALL = {
    name.removeprefix("check_"): value
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__))
    for name, value in vars(importlib.import_module(f"{__name__}.{module}")).items()
    if name.startswith("check_")
}
