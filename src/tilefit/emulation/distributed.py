"""One process of a distributed program, alone: collectives over one GPU move nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

#: What torchrun tells a process; answered to whoever asks by name, and not there for whoever looks first.
_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
_NOTHING_TO_DO = "all_reduce broadcast reduce barrier monitored_barrier broadcast_object_list".split()


class DistributedDataParallel(nn.Module):
    """A replica of which there is one: gradients are what they are."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.device_ids = kwargs.get("device_ids")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block gradients stay here, as they do anyway; who asks is told."""
        kept, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = kept

    join = no_sync

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is communicated."""


class _Done:
    """A collective that has ended."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def install() -> None:
    """Make distributed programs run as one process of one; it is not taken back."""
    distributed: Any = torch.distributed
    begin = distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        begin("fake", store=FakeStore(), rank=0, world_size=1)

    def nothing(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        return _Done() if async_op else None

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs[0].copy_(tensor)
        return nothing(**kwargs)

    def into(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output.copy_(tensor.view_as(output))
        return nothing(**kwargs)

    def gather_object(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        outputs[0] = value

    def spawn(function: Callable[..., Any], args: Any = (), *rest: Any, **kwargs: Any) -> None:
        function(0, *args)

    distributed.init_process_group = init_process_group
    for name in _NOTHING_TO_DO:
        setattr(distributed, name, nothing)
    distributed.all_gather, distributed.all_gather_object = all_gather, gather_object
    distributed.all_gather_into_tensor = distributed.reduce_scatter_tensor = into
    parallel: Any = nn.parallel
    parallel.DistributedDataParallel = parallel.distributed.DistributedDataParallel = DistributedDataParallel
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn = spawn
    _answer_variables()


def _answer_variables() -> None:
    kind: Any = type(os.environ)
    original = kind.__getitem__

    def getitem(environ: Any, name: str) -> str:
        try:
            return str(original(environ, name))
        except KeyError:
            if name in _VARIABLES:
                return _VARIABLES[name]
            raise

    def contains(environ: Any, name: str) -> bool:
        return environ.encodekey(name) in environ._data

    def get(environ: Any, name: str, default: Any = None) -> Any:
        return environ[name] if name in environ else default  # noqa: SIM401 - this is get

    kind.__getitem__, kind.__contains__, kind.get = getitem, contains, get
