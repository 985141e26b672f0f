"""One process of a distributed program, alone: collectives move nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from tilefit.emulation.device import Watch
from tilefit.emulation.tensor import CudaTensor

#: What torchrun tells a process; answered to whoever asks by name, and not there for whoever looks first.
_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
_VARIABLES |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
_NOTHING_TO_DO = "all_reduce broadcast reduce barrier monitored_barrier broadcast_object_list".split()


class _Done:
    """A collective that has ended."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def install(watch: Watch) -> None:
    """Make distributed programs run as one process, of as many as the environment says; not taken back.

    Args:
        watch: Told of collectives.
    """
    distributed: Any = torch.distributed
    begin = distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size, rank = kwargs.get("world_size", -1), kwargs.get("rank", -1)
        begin(
            "fake",
            store=FakeStore(),
            rank=rank if rank >= 0 else int(os.environ["RANK"]),
            world_size=size if size > 0 else int(os.environ["WORLD_SIZE"]),
        )

    def gather_object(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        outputs[:] = [value] * len(outputs)

    def spawn(function: Callable[..., Any], args: Any = (), *rest: Any, **kwargs: Any) -> None:
        function(0, *args)

    distributed.init_process_group = init_process_group
    distributed.all_gather_object = gather_object
    _collectives(watch)
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn = spawn
    _answer_variables()


def _collectives(watch: Watch) -> None:
    """Collectives give what they would where all processes have the same."""
    distributed: Any = torch.distributed

    def told(name: str, tensors: Iterable[Any], group: Any, async_op: bool) -> _Done | None:
        sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, CudaTensor)]
        if sizes:
            ranks = distributed.get_world_size(group) if distributed.is_initialized() else 1
            watch.exchanged(name, sum(sizes), ranks, async_op)
        return _Done() if async_op else None

    def nothing(name: str) -> Callable[..., _Done | None]:
        def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> _Done | None:
            return told(name, (*args, *kwargs.values()), group, async_op)

        return call

    def all_gather(
        outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        for output in outputs:
            output.copy_(tensor)
        return told("all_gather", outputs, group, async_op)

    def into(name: str) -> Callable[..., _Done | None]:
        def call(
            output: torch.Tensor,
            given: torch.Tensor,
            *args: Any,
            group: Any = None,
            async_op: bool = False,
            **_: Any,
        ) -> _Done | None:
            ranks = max(1, output.numel() // max(1, given.numel()))
            output.copy_(given.flatten().repeat(ranks)[: output.numel()].view_as(output))
            return told(name, [max(output, given, key=torch.Tensor.numel)], group, async_op)

        return call

    for name in _NOTHING_TO_DO:
        setattr(distributed, name, nothing(name))
    distributed.all_gather = all_gather
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(distributed, name, into(name))


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
