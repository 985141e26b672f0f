"""Autocast regions: which are open, in which element types forward passes ran, and what their cache holds."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision import graph
from tilefit.precision.ledger import Begins, Region, Running, Stepped, Tracker
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patch, of_all
from tilefit.precision.rules.autocast import BackwardInOtherDtype, EvalTrainMismatch, StaleWeightCache
from tilefit.precision.rules.scaler import HalfWeightsUnderAutocast, ScalerWithBf16
from tilefit.precision.tensors import HALF, name_of, parameters_of


class Regions(Tracker):
    """Follows autocast regions.

    Attributes:
        trained: Element types of the regions forward passes with gradients ran in.
    """

    def set_up(self) -> None:
        self._numbers = self._in_train = 0
        self.trained: set[torch.dtype] = set()
        self._evaluated: dict[nn.Module, list[Any]] = {}

    def patches(self) -> list[Patch]:
        """What opens and closes regions, and begins an evaluation."""
        return [
            *of_all(torch.amp.autocast_mode.autocast, __enter__=self._enter, __exit__=self._exit),
            (torch, "clear_autocast_cache", self._clear),
            (nn.Module, "train", self._train),
        ]

    def finish(self) -> None:
        """The models are looked at no more."""
        for model in list(self._evaluated):
            self._unhook(model)

    # ---- regions ---------------------------------------------------------------------------

    def _enter(self, autocast: Any) -> Running:
        here = self._ledger.here
        cycle, dtype = here.cycle, autocast.fast_dtype
        if here.region is None:
            self._numbers += 1
            here.region = Region(self._numbers, user_line(), bool(autocast._cache_enabled))
        if autocast._enabled:
            here.entered += 1
            self._recorder.facts.update(("autocast", "half precision"))
            if not here.depth and torch.is_grad_enabled():
                cycle.dtypes.add(dtype)
                cycle.source = here.region.source
                self.trained.add(dtype)
            elif here.depth and cycle.dtypes and dtype not in cycle.dtypes:
                types = {"forward": _names(cycle.dtypes), "backward": name_of(dtype)}
                self.found(BackwardInOtherDtype, kind="region", name="", **types)
        here.regions.append(autocast)
        yield

    def _exit(self, autocast: Any, *args: Any) -> Running:
        here = self._ledger.here
        if autocast in here.regions:  # it may have been entered before the watch
            here.regions.remove(autocast)
        if not here.regions:
            here.region = None
        yield

    def _clear(self) -> Running:
        yield
        if (region := self._ledger.here.region) is not None:
            self._numbers += 1
            region.number = self._numbers

    # ---- backward passes and steps ---------------------------------------------------------

    def on_begins(self, begins: Begins) -> None:
        """A backward pass begins: through weights that were stepped in this region?"""
        here = begins.here
        if here.region is not None and here.cached_in:
            stepped = [g.parameter() for g in self._ledger.gradients if g.stepped_in == here.cached_in]
            stale = sum(map(_is_cached, stepped))
            if stale and graph.scan(begins.roots).dtypes & set(HALF):
                self.found(StaleWeightCache, here.region.source, parameters=stale)
        if self._recorder.looking:
            if torch.float16 in here.scan.dtypes:
                self._recorder.facts.add("fp16")
                here.cycle.fp16 = True
            factor = here.chain.factor
            here.cycle.hand_scaled |= here.unknown or factor is None or factor > 1

    def on_stepped(self, stepped: Stepped) -> None:
        """A cycle has ended."""
        if not self._recorder.looking:
            return
        cycle, parameters = self._ledger.here.cycle, parameters_of(stepped.optimizer)
        if stepped.scaler is not None and cycle.dtypes == {torch.bfloat16}:
            self.found(ScalerWithBf16, self._ledger.scaler(stepped.scaler).scaled_at)
        if any(parameter.dtype in HALF for parameter in parameters):
            self._recorder.facts.update(("half-precision weights", "half precision"))
        weights = [p.dtype for p in parameters if p.ndim >= 2 and p.requires_grad]
        half = [dtype for dtype in weights if dtype in HALF]
        if cycle.dtypes and 2 * len(half) > len(weights):
            name, what = type(stepped.optimizer).__name__, {"half": len(half), "weights": len(weights)}
            self.found(HalfWeightsUnderAutocast, cycle.source, name, dtype=name_of(half[0]), **what)

    # ---- evaluation ------------------------------------------------------------------------

    def _train(self, model: nn.Module, mode: bool = True) -> Running:
        self._in_train += 1
        try:
            yield
        finally:
            self._in_train -= 1
        if not self._in_train and not torch.compiler.is_compiling():
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
            before.append(self._ledger.here.entered)

        def left(module: nn.Module, args: Any, output: Any) -> None:
            # A model that enters regions of its own does so in training too.
            if not before or self._ledger.here.entered == before.pop():
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
        active = [autocast.fast_dtype for autocast in self._ledger.here.regions if autocast._enabled]
        weights = (p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = active[-1] if active else next(weights, torch.float32)
        if dtype not in self.trained:
            types = {"training": _names(self.trained), "evaluation": name_of(dtype)}
            self.found(EvalTrainMismatch, None, type(model).__name__, **types)


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
