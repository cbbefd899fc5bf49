"""Gradients that are synchronized in other ways than DDP does: encoded, less often, by shards."""
