"""One process of a distributed program, alone: collectives move nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

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


def install() -> None:
    """Make distributed programs run as one process, of as many as the environment says; not taken back."""
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

    def nothing(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        return _Done() if async_op else None

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            output.copy_(tensor)
        return nothing(**kwargs)

    def into(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = max(1, output.numel() // max(1, tensor.numel()))
        output.copy_(tensor.flatten().repeat(ranks)[: output.numel()].view_as(output))
        return nothing(**kwargs)

    def gather_object(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        outputs[:] = [value] * len(outputs)

    def spawn(function: Callable[..., Any], args: Any = (), *rest: Any, **kwargs: Any) -> None:
        function(0, *args)

    distributed.init_process_group = init_process_group
    for name in _NOTHING_TO_DO:
        setattr(distributed, name, nothing)
    distributed.all_gather, distributed.all_gather_object = all_gather, gather_object
    distributed.all_gather_into_tensor = distributed.reduce_scatter_tensor = into
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
