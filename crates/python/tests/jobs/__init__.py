"""What must hold for whole jobs: ranks that die, disagree or stop, servers, other worlds.

A function `case_…` of a module in this folder starts processes of its own.
"""
