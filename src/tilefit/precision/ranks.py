"""Whether ranks agree: one small exchange per step that is looked at closely.

The exchange goes through the key-value store that ``init_process_group`` has set up, not through a
collective: each rank leaves a few integers there, and rank 0 reads them all. It works the same with gloo
and NCCL, cannot get out of order with the training's own collectives, and a rank that has no watch or no
such step holds nobody up for long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilefit.precision import events
from tilefit.precision.gradients import Gradient
from tilefit.precision.ledger import Begins, Stepped, Stepping, Tracker, scale_of
from tilefit.precision.lines import user_line
from tilefit.precision.tensors import is_plain

#: How long rank 0 waits for what the others say of a step.
TIMEOUT_S = 20.0
#: Elements whose order a checksum looks at; the sum of the bits is over all.
SAMPLE = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003
_MASK = (1 << 63) - 1


class _Report(NamedTuple):
    """What one rank says of a step.

    Attributes:
        structure: A checksum of the shapes, without which nothing can be compared.
        scale: The loss scale, 0 without one.
        skipped: The scaler skipped the step.
        steps: Steps made so far.
        data: A checksum of the batch, as far as it was seen; 0 where it was not.
        parameters, gradients: A checksum of each.
    """

    structure: int
    scale: float
    skipped: int
    steps: int
    data: int
    parameters: list[int]
    gradients: list[int]


class Ranks(Tracker):
    """Compares ranks."""

    def set_up(self) -> None:
        self._before: tuple[Optimizer, list[int], list[int]] | None = None
        self._steps = self._data = self._same_data = self._passes = 0
        self._given_up = False

    def compare(self, stepped: Stepped, models: Sequence[torch.nn.Module], *, due: bool) -> None:
        """Exchange and judge, where there are several ranks.

        Args:
            stepped: The step that has ended.
            models: The models given, whose communication hooks are looked at.
            due: Every rank looks at this step: only then may one wait for another.
        """
        passes, self._passes = self._passes, 0
        if not due or self._given_up or not _several_ranks():
            self._before = None
            return
        self._recorder.facts.add("several ranks")
        import torch.distributed as dist

        self._judge_hooks(models, dist.get_world_size() * max(1, passes))
        gradients = self._comparable(stepped.optimizer)
        before, self._before = self._before, None
        if before is None or before[0] is not stepped.optimizer:
            before = (stepped.optimizer, *_checksums(gradients))
        shapes = [size for gradient in gradients for size in _shape(gradient)]
        report = _Report(
            structure=_hash([len(gradients), *shapes]),
            scale=scale_of(stepped.scaler) if stepped.scaler is not None else 0.0,
            skipped=int(bool(stepped.skipped)),
            steps=self._steps,
            data=self._data,
            parameters=before[1],
            gradients=before[2],
        )
        self._data = 0
        store = dist.distributed_c10d._get_default_store()
        key = f"tilefit/{self._recorder.step}/{{}}"
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank:
            store.set(key.format(rank), json.dumps(report))
            return
        others = [key.format(other) for other in range(1, ranks)]
        try:
            store.wait(others, timedelta(seconds=TIMEOUT_S))
        except (RuntimeError, dist.DistStoreError):
            self._given_up = True
            what = f"some rank said nothing of step {self._recorder.step} within {TIMEOUT_S:g} s"
            self._recorder.cannot_check(f"{what}; every rank must be watched", "AMP023")
            return
        reports = [report, *(_Report(*json.loads(store.get(other))) for other in others)]
        for other in others:
            store.delete_key(other)
        self._judge(reports, gradients, type(stepped.optimizer).__name__)

    # ---- what happens ----------------------------------------------------------------------

    def on_begins(self, begins: Begins) -> None:
        """A backward pass begins: its losses tell one rank's batch from another's."""
        if not self._recorder.looking:
            return
        self._passes += 1
        if _several_ranks():
            values = [root.detach() for root in begins.roots if isinstance(root, Tensor) and is_plain(root)]
            self._data = _hash([self._data, *map(_checksum, values)])

    def on_stepping(self, stepping: Stepping) -> None:
        """What an optimizer is about to use."""
        if self._recorder.looking and not self._given_up and _several_ranks():
            self._before = (stepping.optimizer, *_checksums(self._comparable(stepping.optimizer)))

    def on_stepped(self, stepped: Stepped) -> None:
        """One more step, or none."""
        self._steps += not stepped.skipped

    def _comparable(self, optimizer: Optimizer) -> list[Gradient]:
        """The gradients of parameters that every rank should hold alike."""
        followed = [(g, p) for g in self._ledger.of(optimizer) if (p := g.parameter()) is not None]
        found = [g for g, p in followed if is_plain(p) and not getattr(p, "tensor_model_parallel", False)]
        if len(found) < len(followed):
            what = f"{len(followed) - len(found)} sharded parameters, which ranks do not share"
            self._recorder.cannot_check(what, "AMP023")
        return found

    def _judge_hooks(self, models: Sequence[torch.nn.Module], terms: int) -> None:
        for model in models:
            place = user_line(), type(model).__name__
            for dtype in _compressed_to(model):
                self._recorder.emit(events.HalfSum(*place, dtype=dtype, terms=terms))

    def _judge(self, reports: list[_Report], gradients: list[Gradient], name: str) -> None:
        if len({report.structure for report in reports}) > 1:
            self._recorder.cannot_check("parameters that ranks hold differently by design", "AMP023")
            return
        place, ranks = (user_line(), name), len(reports)
        columns = {what: [getattr(report, what) for report in reports] for what in _Report._fields}

        def differ(column: str, what: str = "") -> bool:
            values = columns[column]
            differs = len(set(values)) > 1
            if differs:
                by_rank = tuple(map(float, values))
                what = what or column
                self._recorder.emit(events.RanksDiffer(*place, what=what, ranks=ranks, values=by_rank))
            return differs

        differ("skipped", "found_inf")
        if not differ("scale"):
            differ("steps")
        for what in ("parameters", "gradients"):
            rows = zip(gradients, *columns[what], strict=True)
            first = next((gradient for gradient, *sums in rows if len(set(sums)) > 1), None)
            if first is not None:
                named = self._name(first)
                event = events.RanksDiffer(*place, what=what, ranks=ranks, name=named)
                self._recorder.emit(event)
                break
        same = columns["data"][0] != 0 and len(set(columns["data"])) == 1
        self._same_data = self._same_data + 1 if same else 0
        if self._same_data == 2:
            self._recorder.emit(events.RanksDiffer(*place, what="data", ranks=ranks))

    def _name(self, gradient: Gradient) -> str:
        parameter = gradient.parameter()
        shape = "" if parameter is None else f"a parameter of shape {list(parameter.shape)}"
        return self._recorder.names.get(id(parameter), shape)


def _several_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _compressed_to(model: torch.nn.Module) -> list[str]:
    """What the communication hooks of DistributedDataParallel cast gradients to before they are summed."""
    types = {"bf16_compress_hook": "bfloat16", "fp16_compress_hook": "float16"}
    hooks = [hook for module in model.modules() for hook, _ in getattr(module, "_comm_hooks", ())]
    return [types[name] for hook in hooks if (name := getattr(hook, "__name__", "")) in types]


def _checksums(gradients: list[Gradient]) -> tuple[list[int], list[int]]:
    """A checksum of each parameter, and of each gradient, 0 where there is none."""
    parameters = [gradient.parameter() for gradient in gradients]
    values = [None if parameter is None else parameter.grad for parameter in parameters]
    plain = [None if value is None or not is_plain(value) else value for value in values]
    return list(map(_checksum, parameters)), list(map(_checksum, plain))


def _checksum(tensor: Tensor | None) -> int:
    """A number that differs where a bit or the elements' order does; 0 for none. Waits for the device."""
    if tensor is None:
        return 0
    bits = tensor.detach().contiguous().view(_BITS[tensor.dtype.itemsize]).reshape(-1)
    sample = bits[:: max(1, bits.numel() // SAMPLE)].long()
    order = torch.arange(1, sample.numel() + 1, device=sample.device)
    both = torch.stack([bits.sum(dtype=torch.int64), (sample * order).sum()]).tolist()
    return _hash(both)


def _hash(values: Sequence[int]) -> int:
    found = 17
    for value in values:
        found = (found * _PRIME + value) & _MASK
    return found


def _shape(gradient: Gradient) -> tuple[int, ...]:
    parameter = gradient.parameter()
    return () if parameter is None else tuple(parameter.shape)
