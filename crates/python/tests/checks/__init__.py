"""What must hold on real processes.

A function `check_…` of a module in this folder is called on every rank of one group, and leaves the
group usable.
"""
