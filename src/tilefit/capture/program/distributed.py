"""Programs for several GPUs, as one of their processes sees them: nothing is sent, and nobody answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.autograd import Variable

from tilefit.capture.program.late import changed
from tilefit.capture.recorder import Recorder
from tilefit.emulation.mail import ranks_of_machine
from tilefit.ops import BACKWARD_DATA
from tilefit.ops.timeline import GRADIENTS


class _Engine:
    """Autograd's engine, whose callbacks are the backward pass's, and which tells of memory."""

    def __init__(self, engine: Any, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Any) -> None:
        """Call it when the backward pass ends, of which it is a part."""

        def called() -> None:
            with self._recorder.phase(BACKWARD_DATA):
                callback()

        self._engine.queue_callback(called)


@contextmanager
def one_rank(recorder: Recorder) -> Iterator[None]:
    """Within the block a process of several runs alone; the emulated device does the rest."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.resized(storage)
        return resize(storage, size)

    with (
        patch.object(Variable, "_execution_engine", _Engine(Variable._execution_engine, recorder)),
        patch.object(torch.UntypedStorage, "resize_", resized),
    ):
        if not distributed.is_available():
            yield
            return
        from tilefit.capture.program.replica import Replica

        with (
            changed({"torch.distributed.checkpoint.default_planner": _saved_by_one}),
            patch.object(Replica, "recorded", staticmethod(lambda: len(recorder.ops))),
            patch.object(Replica, "reduces", staticmethod(partial(recorder.own, owner=GRADIENTS))),
            patch.object(nn.parallel, "DistributedDataParallel", Replica),
            patch.object(nn.parallel.distributed, "DistributedDataParallel", Replica),
        ):
            yield


def _saved_by_one(planner: Any) -> None:
    """A checkpoint that all ranks write is planned from this one's part alone, which nobody will read."""
    validate = planner._validate_global_plan
    # Errors from PyTorch 2.13 on; before, whether there are none.
    planner._validate_global_plan = lambda *plan: [] if isinstance(validate(*plan), list) else True


def ranks() -> int:
    """Processes of the program."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return distributed.get_rank() if ranks() > 1 else 0


def per_machine() -> int:
    """Of them in one machine."""
    return ranks_of_machine(ranks())


def _gathered(root: nn.Module) -> Iterator[Any]:
    """The parameters that a model's modules gather, as ``fully_shard`` holds them."""
    for module in root.modules():
        read: Any = getattr(module, "_get_fsdp_state", None)
        if read is None:
            continue
        state = read()
        # Before PyTorch 2.12 a module has one group at most.
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            yield from group.fsdp_params if group is not None else ()


def version(module: nn.Module) -> int:
    """Changes when an optimizer, or what goes a step to and fro, writes to a model's parameters; of those
    that are gathered it is that of the shards."""
    for held in _gathered(module):
        return int(held.sharded_param._version)
    return next((p._version for p in module.parameters() if p.requires_grad), 0)


def gathered_parameters(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors into which ``fully_shard`` gathers parameters, by their names."""
    for prefix, root in roots:
        paths = {id(module): path for path, module in root.named_modules()}
        for held in _gathered(root):
            of = held._module_info
            path = f"{paths.get(id(of.module), '')}.{of.param_name}".lstrip(".")
            if hasattr(held, "_unsharded_param"):
                yield prefix + path, held._unsharded_param


def split_modules(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Modules whose parameters are ``DTensor`` while they compute; gathered ones are not."""
    if not distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    roots = list(roots)
    gathered = dict(gathered_parameters(roots))
    for prefix, root in roots:
        for name, parameter in root.named_parameters():
            if isinstance(gathered.get(prefix + name, parameter), DTensor):
                yield (prefix + name).rpartition(".")[0]
