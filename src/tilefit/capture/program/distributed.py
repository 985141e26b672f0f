"""Programs for several GPUs, as one of their processes sees them: nothing is sent, and nobody answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import distributed, nn

from tilefit.ops.program import Exchange
from tilefit.units import counted, size


class OneReplica(nn.Module):
    """``DistributedDataParallel`` without the sum over the others: its module, and the names it has.

    Attributes:
        require_backward_grad_sync: The next backward pass would sum the gradients.
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block gradients are accumulated alone."""
        kept, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = kept


@contextmanager
def one_rank() -> Iterator[None]:
    """Within the block a model has one replica; the emulated device does the rest."""
    with (
        patch.object(nn.parallel, "DistributedDataParallel", OneReplica),
        patch.object(nn.parallel.distributed, "DistributedDataParallel", OneReplica),
    ):
        yield


def rank_notes(exchanges: Iterable[Exchange]) -> list[str]:
    """What a reader must know of a step that others take part in, which calls these collectives."""
    if not distributed.is_available() or not distributed.is_initialized():
        return []
    ranks = distributed.get_world_size()
    if ranks == 1:
        return []
    told = f"The step is that of one of {ranks} processes; what they send each other takes no time here"
    kinds: dict[tuple[str, int, bool], list[int]] = {}
    for each in exchanges:
        kinds.setdefault((each.name, each.ranks, each.overlaps), []).append(each.bytes)
    calls = [
        f"{name} {counted(len(sizes), 'time')}, {size(sum(sizes))} over {over} GPUs{', overlapped' * later}"
        for (name, over, later), sizes in kinds.items()
    ]
    return [f"{told}: {'; '.join(calls)}." if calls else f"{told}."]
