"""A group of ranks, as `torch.distributed` wants one."""
