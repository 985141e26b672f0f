"""A process group of this process alone, for code that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def stay_alone() -> None:
    """Make the group, if there is none, for the rest of the process.

    What wraps a model for several processes must go before its group does: DDP's destructor waits forever
    otherwise.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def alone() -> Iterator[None]:
    """The group for the length of a block; one that is there already stays."""
    was_there = dist.is_initialized()
    stay_alone()
    try:
        yield
    finally:
        if not was_there:
            dist.destroy_process_group()
