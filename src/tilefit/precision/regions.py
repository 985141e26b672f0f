"""Autocast regions: which are open, in which element types forward passes ran, and what their cache holds."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision import graph
from tilefit.precision.ledger import Begins, Running, Stepped, Tracker, Unscaled
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patch, of_all
from tilefit.precision.rules.autocast import BackwardInOtherDtype, EvalTrainMismatch, StaleWeightCache
from tilefit.precision.rules.scaler import HalfWeightsUnderAutocast, ScalerWithBf16
from tilefit.precision.tensors import HALF, name_of, parameters_of


@dataclass(slots=True)
class Region:
    """An outermost autocast region: its number, a new one where the cache is cleared; the line that entered
    it; and whether its cache is on."""

    number: int
    source: str
    cache: bool


@dataclass(slots=True)
class Cycle:
    """What has happened since the last step of any optimizer.

    Attributes:
        dtypes: Element types of the autocast regions entered with gradients on, outside of backward passes.
        source: The line that entered the last of them.
        fp16: fp16 gradients flowed through a graph that was looked at.
        hand_scaled: A loss was multiplied by something that may be a scale made by hand.
        backward_at: The line of the last backward pass.
    """

    dtypes: set[torch.dtype] = field(default_factory=set)
    source: str = ""
    fp16: bool = False
    hand_scaled: bool = False
    backward_at: str = ""


class _Here(threading.local):
    """What is open on a thread: regions, the outermost of them, and calls of ``Module.train``; and how many
    regions it has entered."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.region: Region | None = None
        self.cycle = Cycle()
        self.in_train = self.entered = 0


class Regions(Tracker):
    """Follows autocast regions.

    Attributes:
        trained: Element types of the regions forward passes with gradients ran in.
    """

    def set_up(self) -> None:
        self._here = _Here()
        self._numbers = 0
        self.trained: set[torch.dtype] = set()
        self._evaluated: dict[nn.Module, list[Any]] = {}
        self._ledger.region = self.cached_region

    def patches(self) -> list[Patch]:
        """What opens and closes regions, and begins an evaluation."""
        autocast = torch.amp.autocast_mode.autocast
        return [
            *of_all(autocast, __enter__=self._enter, __exit__=self._exit),
            (torch, "clear_autocast_cache", self._clear),
            (nn.Module, "train", self._train),
        ]

    def finish(self) -> None:
        """The models are looked at no more."""
        for model in list(self._evaluated):
            self._unhook(model)

    # ---- regions ---------------------------------------------------------------------------

    def _enter(self, autocast: Any) -> Running:
        here = self._here
        if here.region is None:
            self._numbers += 1
            here.region = Region(self._numbers, user_line(), bool(autocast._cache_enabled))
        if autocast._enabled:
            here.entered += 1
            self._recorder.facts.update(("autocast", "half precision"))
            cycle, dtype = here.cycle, autocast.fast_dtype
            if self._ledger.here.depth:
                if cycle.dtypes and dtype not in cycle.dtypes:
                    types: dict[str, Any] = {"forward": _names(cycle.dtypes), "backward": name_of(dtype)}
                    self._recorder.emit(BackwardInOtherDtype(user_line(), kind="region", name="", **types))
            elif torch.is_grad_enabled():
                cycle.dtypes.add(dtype)
                cycle.source = here.region.source
                self.trained.add(dtype)
        here.open.append(autocast)
        yield

    def _exit(self, autocast: Any, *args: Any) -> Running:
        here = self._here
        if autocast in here.open:  # it may have been entered before the watch
            here.open.remove(autocast)
        if not here.open:
            here.region = None
        yield

    def _clear(self) -> Running:
        yield
        if self._here.region is not None:
            self._numbers += 1
            self._here.region.number = self._numbers

    def cached_region(self) -> int:
        """The number of the present outermost region, 0 if there is none or its cache is off."""
        region = self._here.region
        return region.number if region is not None and region.cache else 0

    # ---- backward passes and steps ---------------------------------------------------------

    def on_begins(self, begins: Begins) -> None:
        """A backward pass begins: through weights that were stepped in this region?"""
        region, here = self._here.region, begins.here
        if region is not None and region.cache:
            stepped = [g.parameter() for g in self._ledger.gradients if g.stepped_in == region.number]
            stale = sum(map(_is_cached, stepped))
            if stale and graph.scan(begins.roots).dtypes & set(HALF):
                self._recorder.emit(StaleWeightCache(region.source, parameters=stale))
        if self._recorder.looking:
            cycle, factor = self._here.cycle, here.chain.factor
            cycle.backward_at = user_line()
            if torch.float16 in here.scan.dtypes:
                self._recorder.facts.add("fp16")
                cycle.fp16 = True
            cycle.hand_scaled |= here.unknown or factor is None or factor > 1

    def on_stepped(self, stepped: Stepped) -> None:
        """A cycle has ended."""
        cycle, emit = self._here.cycle, self._recorder.emit
        self._here.cycle = Cycle()
        if stepped.plain and cycle.fp16 and not cycle.hand_scaled:
            self._recorder.tell(Unscaled(cycle.backward_at))
        if not self._recorder.looking:
            return
        if stepped.scaler is not None and cycle.dtypes == {torch.bfloat16}:
            emit(ScalerWithBf16(self._ledger.scaler(stepped.scaler).scaled_at))
        parameters = parameters_of(stepped.optimizer)
        if any(parameter.dtype in HALF for parameter in parameters):
            self._recorder.facts.update(("half-precision weights", "half precision"))
        weights = [parameter for parameter in parameters if parameter.ndim >= 2 and parameter.requires_grad]
        half = [parameter.dtype for parameter in weights if parameter.dtype in HALF]
        if cycle.dtypes and 2 * len(half) > len(weights):
            place, dtype = (cycle.source, type(stepped.optimizer).__name__), name_of(half[0])
            emit(HalfWeightsUnderAutocast(*place, dtype=dtype, half=len(half), weights=len(weights)))

    # ---- evaluation ------------------------------------------------------------------------

    def _train(self, model: nn.Module, mode: bool = True) -> Running:
        here = self._here
        here.in_train += 1
        try:
            yield
        finally:
            here.in_train -= 1
        if not here.in_train and not torch.compiler.is_compiling():
            (self._unhook if mode else self._hook)(model)

    def _hook(self, model: nn.Module) -> None:
        """Look at the autocast state of a model's forward passes until it trains again."""
        if model in self._evaluated:
            return
        self._recorder.facts.add("evaluation")
        if is_compiled(model):
            self._recorder.cannot_check("the evaluation of a compiled model", "AMP025")
            return
        before: list[int] = []

        def entered(module: nn.Module, args: Any) -> None:
            before.append(self._here.entered)

        def left(module: nn.Module, args: Any, output: Any) -> None:
            # A model that enters regions of its own does so in training too.
            if not before or self._here.entered == before.pop():
                self._judge_evaluation(model)

        self._evaluated[model] = [
            model.register_forward_pre_hook(entered),
            model.register_forward_hook(left),
        ]

    def _unhook(self, model: nn.Module) -> None:
        for handle in self._evaluated.pop(model, ()):
            handle.remove()

    def _judge_evaluation(self, model: nn.Module) -> None:
        if not self.trained or self._ledger.here.depth or torch.compiler.is_compiling():
            return
        if not self._ledger.followed(model.parameters()):
            return
        active = [autocast.fast_dtype for autocast in self._here.open if autocast._enabled]
        weights = (p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = active[-1] if active else next(weights, torch.float32)
        if dtype not in self.trained:
            types: dict[str, Any] = {"training": _names(self.trained), "evaluation": name_of(dtype)}
            self._recorder.emit(EvalTrainMismatch(user_line(), type(model).__name__, **types))


def _names(dtypes: set[torch.dtype]) -> str:
    return "/".join(sorted(map(name_of, dtypes)))


def _is_cached(parameter: Tensor | None) -> bool:
    """Whether autocast would keep a copy of this parameter."""
    fp32 = parameter is not None and parameter.dtype == torch.float32
    return parameter is not None and fp32 and parameter.requires_grad and parameter.ndim >= 2


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    in_place = model._compiled_call_impl is not None
    return in_place or (dynamo is not None and isinstance(model, dynamo.OptimizedModule))
