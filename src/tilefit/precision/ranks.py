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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tilefit.precision.ledger import Begins, Stepped, Stepping, Tracker, scale_of
from tilefit.precision.rules.storage import LowPrecisionGradientSum, RankDrift
from tilefit.precision.tensors import is_plain, parameters_of

#: How long rank 0 waits for what the others say of a step.
TIMEOUT_S = 20.0
#: Elements whose order a checksum looks at; the sum of the bits is over all.
SAMPLE = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: What one rank says of a step: the shapes of its parameters, without which nothing can be compared; a
#: checksum of each and of its gradient; the loss scale, 0 without one; whether the scaler skipped the step;
#: the steps made so far; and a checksum of the batch, as far as it was seen, 0 where it was not.
_Report = dict[str, Any]


class Ranks(Tracker):
    """Compares ranks."""

    def set_up(self) -> None:
        self._before: tuple[Optimizer, _Report] | None = None
        self._steps = self._data = self._same_data = 0
        self._given_up = False

    def compare(self, stepped: Stepped, models: Sequence[torch.nn.Module], *, due: bool) -> None:
        """Exchange and judge, where there are several ranks.

        Args:
            stepped: The step that has ended.
            models: The models given, whose communication hooks are looked at.
            due: Every rank looks at this step: only then may one wait for another.
        """
        passes = len(self._ledger.here.cycle.passes)
        before, self._before = self._before, None
        if not due or self._given_up or not _several_ranks():
            return
        self._recorder.facts.add("several ranks")
        rank, ranks, step = dist.get_rank(), dist.get_world_size(), self._recorder.step
        for model in models:
            for dtype in _compressed_to(model):
                terms = ranks * max(1, passes)
                self.found(LowPrecisionGradientSum, None, type(model).__name__, dtype=dtype, terms=terms)
        optimizer, scaler = stepped.optimizer, stepped.scaler
        held = before[1] if before is not None and before[0] is optimizer else self._held(optimizer)
        scale = 0.0 if scaler is None else scale_of(scaler)
        report = held | {"scale": scale, "found_inf": bool(stepped.skipped), "steps": self._steps}
        report["data"], self._data = self._data, 0
        store = dist.distributed_c10d._get_default_store()
        if rank:
            store.set(f"tilefit/{step}/{rank}", json.dumps(report))
            return
        others = [f"tilefit/{step}/{other}" for other in range(1, ranks)]
        try:
            store.wait(others, timedelta(seconds=TIMEOUT_S))
        except (RuntimeError, dist.DistStoreError):
            self._given_up = True
            what = f"some rank said nothing of step {step} within {TIMEOUT_S:g} s; every rank must be watched"
            self._recorder.cannot_check(what, "AMP023")
            return
        reports = [report, *(json.loads(store.get(other)) for other in others)]
        for other in others:
            store.delete_key(other)
        self._judge(reports, optimizer)

    # ---- what happens ----------------------------------------------------------------------

    def on_begins(self, begins: Begins) -> None:
        """A backward pass begins: its losses tell one rank's batch from another's."""
        if self._recorder.looking and _several_ranks():
            values = [root for root in begins.roots if isinstance(root, Tensor) and is_plain(root)]
            self._data = hash((self._data, *map(_checksum, values)))

    def on_stepping(self, stepping: Stepping) -> None:
        """What an optimizer is about to use."""
        if self._recorder.looking and not self._given_up and _several_ranks():
            self._before = stepping.optimizer, self._held(stepping.optimizer)

    def on_stepped(self, stepped: Stepped) -> None:
        """One more step, or none."""
        self._steps += not stepped.skipped

    def _comparable(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters that every rank should hold alike."""
        every = parameters_of(optimizer)
        found = [p for p in every if is_plain(p) and not getattr(p, "tensor_model_parallel", False)]
        if len(found) < len(every):
            what = f"{len(every) - len(found)} sharded parameters, which ranks do not share"
            self._recorder.cannot_check(what, "AMP023")
        return found

    def _held(self, optimizer: Optimizer) -> _Report:
        parameters = self._comparable(optimizer)
        gradients = [None if (g := p.grad) is None or not is_plain(g) else g for p in parameters]
        sums = {"parameters": list(map(_checksum, parameters)), "gradients": list(map(_checksum, gradients))}
        return {"shapes": [list(parameter.shape) for parameter in parameters], **sums}

    def _judge(self, reports: list[_Report], optimizer: Optimizer) -> None:
        columns = {what: [report[what] for report in reports] for what in reports[0]}
        differing = {what for what, values in columns.items() if any(v != values[0] for v in values)}
        if "shapes" in differing:
            self._recorder.cannot_check("parameters that ranks hold differently by design", "AMP023")
            return
        found = partial(self.found, RankDrift, None, type(optimizer).__name__, ranks=len(reports))
        for what in ("found_inf", "scale" if "scale" in differing else "steps"):
            if what in differing:
                found(what=what, by_rank=tuple(map(float, columns[what])))
        for what in ("parameters", "gradients")[: 1 if "parameters" in differing else 2]:
            for parameter, *sums in zip(self._comparable(optimizer), *columns[what], strict=True):
                if len(set(sums)) > 1:
                    name = self._recorder.names.get(id(parameter))
                    name = name or f"a parameter of shape {list(parameter.shape)}"
                    found(what=what, name=name)
                    break
        same = "data" not in differing and columns["data"][0] != 0
        self._same_data = self._same_data + 1 if same else 0
        if self._same_data == 2:
            found(what="data")


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _compressed_to(model: torch.nn.Module) -> list[str]:
    """What the communication hooks of DistributedDataParallel cast gradients to before they are summed."""
    types = {"bf16_compress_hook": "bfloat16", "fp16_compress_hook": "float16"}
    hooks = [hook for module in model.modules() for hook, _ in getattr(module, "_comm_hooks", ())]
    return [types[name] for hook in hooks if (name := getattr(hook, "__name__", "")) in types]


def _checksum(tensor: Tensor | None) -> int:
    """A number that differs where a bit or the elements' order does; 0 for none. Waits for the device."""
    if tensor is None:
        return 0
    bits = tensor.detach().contiguous().view(_BITS[tensor.dtype.itemsize]).reshape(-1)
    sample = bits[:: max(1, bits.numel() // SAMPLE)].long()
    order = torch.arange(1, sample.numel() + 1, device=sample.device)
    # Of integers Python's hash is the same in every process.
    return hash(tuple(torch.stack([bits.sum(dtype=torch.int64), (sample * order).sum()]).tolist()))
