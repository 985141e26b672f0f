"""Whether ranks agree: one small exchange per step that is looked at closely.

The exchange goes through the key-value store that ``init_process_group`` has set up, not through a
collective: each rank leaves a few integers there, and rank 0 reads them all. It works the same with gloo
and NCCL, cannot get out of order with the training's own collectives, and a rank that has no watch or no
such step holds nobody up for long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilefit.precision.events import HalfSum, RanksDiffer
from tilefit.precision.gradients import Gradient
from tilefit.precision.ledger import Begins, Ledger, Stepped, Stepping
from tilefit.precision.lines import user_line
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import is_plain

#: How long rank 0 waits for what the others say of a step.
TIMEOUT_S = 20.0
#: Elements whose order a checksum looks at; the sum of the bits is over all.
SAMPLE = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003
_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Report:
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
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]

    def pack(self) -> bytes:
        head = struct.pack("<qdqqq", self.structure, self.scale, self.skipped, self.steps, self.data)
        values = (*self.parameters, *self.gradients)
        return head + struct.pack(f"<q{len(values)}q", len(self.parameters), *values)

    @classmethod
    def unpack(cls, data: bytes) -> _Report:
        head = struct.calcsize("<qdqqq")
        (count,) = struct.unpack_from("<q", data, head)
        values = struct.unpack_from(f"<{2 * count}q", data, head + 8)
        structure, scale, skipped, steps, batch = struct.unpack_from("<qdqqq", data)
        return cls(structure, scale, skipped, steps, batch, values[:count], values[count:])


class Ranks:
    """Compares ranks.

    Args:
        recorder: Where events go.
        ledger: Knows parameters, gradients, scalers and steps.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._before: tuple[Optimizer, tuple[int, ...], tuple[int, ...]] | None = None
        self._steps = 0
        self._data = 0
        self._same_data = 0
        self._passes = 0
        self._given_up = False
        recorder.on(Begins, self._on_backward)
        recorder.on(Stepping, self._on_stepping)
        recorder.on(Stepped, self._on_stepped)

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

        self._judge_hooks(models, passes)
        gradients = self._comparable(stepped.optimizer)
        before, self._before = self._before, None
        if before is None or before[0] is not stepped.optimizer:
            before = (stepped.optimizer, *_checksums(gradients))
        scale = float(stepped.scaler.get_scale()) if stepped.scaler is not None else 0.0
        report = _Report(
            structure=_hash([len(gradients), *(size for g in gradients for size in _shape(g))]),
            scale=scale,
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
            store.set(key.format(rank), report.pack())  # type: ignore[arg-type]  # bytes do
            return
        others = [key.format(other) for other in range(1, ranks)]
        try:
            store.wait(others, timedelta(seconds=TIMEOUT_S))
        except (RuntimeError, dist.DistStoreError):
            self._given_up = True
            self._recorder.cannot_check(
                f"some rank said nothing of step {self._recorder.step} within {TIMEOUT_S:g} s; every rank "
                "must be watched",
                "AMP023",
            )
            return
        reports = [report, *(_Report.unpack(store.get(other)) for other in others)]
        for other in others:
            store.delete_key(other)
        self._judge(reports, gradients, type(stepped.optimizer).__name__)

    # ---- what happens ----------------------------------------------------------------------

    def _on_backward(self, begins: Begins) -> None:
        if not self._recorder.looking:
            return
        self._passes += 1
        if _several_ranks():
            values = [root.detach() for root in begins.roots if isinstance(root, Tensor) and is_plain(root)]
            self._data = _hash([self._data, *(_checksum(value) for value in values)])

    def _on_stepping(self, stepping: Stepping) -> None:
        if self._recorder.looking and not self._given_up and _several_ranks():
            self._before = (stepping.optimizer, *_checksums(self._comparable(stepping.optimizer)))

    def _on_stepped(self, stepped: Stepped) -> None:
        self._steps += not stepped.skipped

    def _comparable(self, optimizer: Optimizer) -> list[Gradient]:
        """The gradients of parameters that every rank should hold alike."""
        found, left_out = [], 0
        for gradient in self._ledger.of(optimizer):
            parameter = gradient.parameter()
            if parameter is None:
                continue
            if not is_plain(parameter) or getattr(parameter, "tensor_model_parallel", False):
                left_out += 1
            else:
                found.append(gradient)
        if left_out:
            self._recorder.cannot_check(f"{left_out} sharded parameters, which ranks do not share", "AMP023")
        return found

    def _judge_hooks(self, models: Sequence[torch.nn.Module], passes: int) -> None:
        import torch.distributed as dist

        for model in models:
            for dtype in _compressed_to(model):
                event = HalfSum(
                    source=user_line(),
                    module=type(model).__name__,
                    dtype=dtype,
                    terms=dist.get_world_size() * max(1, passes),
                )
                self._recorder.emit_once(event, partial(replace, event))

    def _judge(self, reports: list[_Report], gradients: list[Gradient], name: str) -> None:
        ranks = len(reports)
        first = reports[0]
        source = user_line()

        def differ(what: str, parameter: str = "", values: tuple[float, ...] = ()) -> None:
            self._recorder.emit(
                RanksDiffer(source=source, module=name, what=what, ranks=ranks, name=parameter, values=values)
            )

        if any(report.structure != first.structure for report in reports):
            self._recorder.cannot_check("parameters that ranks hold differently by design", "AMP023")
            return
        if len({report.skipped for report in reports}) > 1:
            differ("found_inf", values=tuple(float(report.skipped) for report in reports))
        if len({report.scale for report in reports}) > 1:
            differ("scale", values=tuple(report.scale for report in reports))
        elif len({report.steps for report in reports}) > 1:
            differ("steps", values=tuple(float(report.steps) for report in reports))
        for what in ("parameters", "gradients"):
            rows = [getattr(report, what) for report in reports]
            index = next(
                (i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1), None
            )
            if index is not None:
                differ(what, self._name(gradients[index]))
                break
        same = first.data != 0 and len({report.data for report in reports}) == 1
        self._same_data = self._same_data + 1 if same else 0
        if self._same_data == 2:
            differ("data")

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


def _checksums(gradients: list[Gradient]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A checksum of each parameter, and of each gradient, 0 where there is none."""
    parameters, values = [], []
    for gradient in gradients:
        parameter = gradient.parameter()
        parameters.append(0 if parameter is None else _checksum(parameter.detach()))
        value = None if parameter is None else parameter.grad
        values.append(_checksum(value.detach()) if value is not None and is_plain(value) else 0)
    return tuple(parameters), tuple(values)


def _checksum(tensor: Tensor) -> int:
    """A number that differs where a bit or the order of the elements does. Waits for the device."""
    bits = tensor.contiguous().view(_BITS[tensor.dtype.itemsize]).reshape(-1)
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
