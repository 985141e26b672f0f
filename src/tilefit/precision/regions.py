"""Autocast regions: which are open, in which element types forward passes ran, and what their cache "
"still holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision import graph
from tilefit.precision.events import (
    BackwardDtype,
    EvaluationDtype,
    HalfWeights,
    ScalerUsed,
    StaleCache,
    UnscaledHalf,
)
from tilefit.precision.ledger import Ledger, Stepped
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches, with_subclasses
from tilefit.precision.recorder import Recorder

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Region:
    """An outermost autocast region.

    Attributes:
        number: Its number, from 1 on; a new one where the cache is cleared.
        source: The line that entered it.
        cache: Its cache is on.
    """

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


class Regions:
    """Follows autocast regions.

    Args:
        recorder: Where events go.
        ledger: Knows the backward passes and the steps.
        patches: Where replaced attributes are kept.
        fp16_values: Gives what was measured of fp16 gradients in this step: values, and shares of them that
            are subnormal and zero.

    Attributes:
        trained: Element types of the regions forward passes with gradients ran in.
    """

    def __init__(
        self,
        recorder: Recorder,
        ledger: Ledger,
        patches: Patches,
        fp16_values: Callable[[], tuple[int, float, float]],
    ) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._patches = patches
        self._fp16_values = fp16_values
        self._open: list[Any] = []
        self._inside: Any = None
        self._region: Region | None = None
        self._numbers = 0
        self._cycle = Cycle()
        self.trained: set[torch.dtype] = set()
        self._in_train = 0
        self._evaluated: dict[nn.Module, list[Any]] = {}
        self._entered = 0
        ledger.region = self.cached_region
        ledger.on_backward.append(self._on_backward)
        ledger.on_stepped.append(self._on_stepped)

    def start(self) -> None:
        """Begin."""
        for autocast in with_subclasses(torch.amp.autocast_mode.autocast):
            if "__enter__" in vars(autocast):
                self._patches.wrap(autocast, "__enter__", self._around_enter)
                self._patches.wrap(autocast, "__exit__", self._around_exit)
        self._patches.wrap(torch, "clear_autocast_cache", self._around_clear)
        self._patches.wrap(nn.Module, "train", self._around_train)

    def stop(self) -> None:
        """End."""
        for model in list(self._evaluated):
            self._unhook(model)

    # ---- regions ---------------------------------------------------------------------------

    def _around_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(autocast: Any) -> Any:
            if self._inside is autocast:  # a subclass's method calls the one of its base
                return original(autocast)
            self._inside = autocast
            try:
                self._enter(autocast)
                self._open.append(autocast)
                return original(autocast)
            finally:
                self._inside = None

        return enter

    def _around_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(autocast: Any, *args: Any) -> Any:
            if self._inside is autocast:
                return original(autocast, *args)
            self._inside = autocast
            try:
                if autocast in self._open:  # it may have been entered before the watch
                    self._open.remove(autocast)
                if not self._open:
                    self._region = None
                return original(autocast, *args)
            finally:
                self._inside = None

        return leave

    def _enter(self, autocast: Any) -> None:
        enabled, dtype = bool(autocast._enabled), autocast.fast_dtype
        source = ""
        if self._region is None:
            source = user_line()
            self._numbers += 1
            self._region = Region(self._numbers, source, bool(autocast._cache_enabled))
        if not enabled:
            return
        self._entered += 1
        if self._ledger.depth:
            self._entered_going_back(dtype, source or user_line())
        elif torch.is_grad_enabled():
            self._cycle.dtypes.add(dtype)
            self._cycle.source = self._region.source
            if len(self.trained) < len(_HALF):
                self.trained.add(dtype)

    def _entered_going_back(self, dtype: torch.dtype, source: str) -> None:
        if self._cycle.dtypes and dtype not in self._cycle.dtypes:
            forward = "/".join(sorted(map(name_of, self._cycle.dtypes)))
            self._recorder.emit_once(
                ("region", source),
                lambda: BackwardDtype(
                    source=source, kind="region", name="", forward=forward, backward=name_of(dtype)
                ),
            )

    def _around_clear(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear_autocast_cache() -> None:
            original()
            if self._region is not None:
                self._numbers += 1
                self._region.number = self._numbers

        return clear_autocast_cache

    def cached_region(self) -> int:
        """The number of the present outermost region, 0 if there is none or its cache is off."""
        return self._region.number if self._region is not None and self._region.cache else 0

    # ---- backward passes and steps ---------------------------------------------------------

    def _on_backward(self, roots: Sequence[Tensor] | None) -> None:
        if roots is None:
            return
        number = self.cached_region()
        if number:
            stale = [
                gradient
                for gradient in self._ledger.gradients
                if gradient.stepped_in == number and _is_cached(gradient.parameter())
            ]
            if stale and graph.scan(roots).dtypes & set(_HALF):
                region = self._region
                assert region is not None
                self._recorder.emit_once(
                    ("stale", region.source),
                    lambda: StaleCache(source=region.source, parameters=len(stale)),
                )
        if not self._recorder.looking:
            return
        self._cycle.backward_at = user_line()
        if torch.float16 in self._cycle.dtypes:
            self._cycle.fp16 |= torch.float16 in self._ledger.scan.dtypes
            factor = self._ledger.chain.factor
            self._cycle.hand_scaled |= factor is None or factor > 1

    def _on_stepped(self, stepped: Stepped) -> None:
        cycle, optimizer = self._cycle, stepped.optimizer
        self._cycle = Cycle()
        if not cycle.dtypes:
            return
        if stepped.scaler is not None and self._recorder.looking:
            source = self._ledger.scaler(stepped.scaler).scaled_at
            dtypes = frozenset(map(name_of, cycle.dtypes))
            self._recorder.emit_once(
                ("scaler", source, dtypes), lambda: ScalerUsed(source=source, dtypes=dtypes)
            )
        if stepped.plain and cycle.fp16 and not cycle.hand_scaled:
            values, subnormal, zero = self._fp16_values()
            self._recorder.emit(
                UnscaledHalf(source=cycle.backward_at, values=values, subnormal=subnormal, zero=zero)
            )
        if self._recorder.looking:
            self._judge_weights(optimizer, cycle, stepped.scaler is not None)

    def _judge_weights(self, optimizer: torch.optim.Optimizer, cycle: Cycle, scaler: bool) -> None:
        weights = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.ndim >= 2 and parameter.requires_grad
        ]
        half = [parameter for parameter in weights if parameter.dtype in _HALF]
        if 2 * len(half) > len(weights):
            self._recorder.emit_once(
                ("half weights", cycle.source),
                lambda: HalfWeights(
                    source=cycle.source,
                    module=type(optimizer).__name__,
                    dtype=name_of(half[0].dtype),
                    half=len(half),
                    weights=len(weights),
                    scaler=scaler,
                ),
            )

    # ---- evaluation ------------------------------------------------------------------------

    def _around_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(model: nn.Module, mode: bool = True) -> Any:
            self._in_train += 1
            try:
                result = original(model, mode)
            finally:
                self._in_train -= 1
            if not self._in_train and not torch.compiler.is_compiling():
                if mode:
                    self._unhook(model)
                else:
                    self._hook(model)
            return result

        return train

    def _hook(self, model: nn.Module) -> None:
        """Look at the autocast state of a model's forward passes until it trains again."""
        if model in self._evaluated:
            return
        if is_compiled(model):
            self._recorder.cannot_check("AMP025: the evaluation of a compiled model")
            return
        before: list[int] = []

        def entered(module: nn.Module, args: Any) -> None:
            before.append(self._entered)

        def left(module: nn.Module, args: Any, output: Any) -> None:
            active = [a for a in self._open if a._enabled]
            inside = self._entered != before.pop() if before else False
            self._judge_evaluation(model, active, inside)

        self._evaluated[model] = [
            model.register_forward_pre_hook(entered),
            model.register_forward_hook(left),
        ]

    def _unhook(self, model: nn.Module) -> None:
        for handle in self._evaluated.pop(model, ()):
            handle.remove()

    def _judge_evaluation(self, model: nn.Module, active: list[Any], inside: bool) -> None:
        # A model that enters regions of its own does so in training too.
        if inside or not self.trained or self._ledger.depth or torch.compiler.is_compiling():
            return
        if not any(self._knows(parameter) for parameter in model.parameters()):
            return
        training = "/".join(sorted(map(name_of, self.trained)))
        evaluation = name_of(active[-1].fast_dtype) if active else name_of(_weight_dtype(model))
        source = user_line()
        if evaluation not in training:
            self._recorder.emit_once(
                ("evaluation", source, evaluation),
                lambda: EvaluationDtype(
                    source=source, module=type(model).__name__, training=training, evaluation=evaluation
                ),
            )

    def _knows(self, parameter: Tensor) -> bool:
        return any(gradient.parameter() is parameter for gradient in self._ledger.gradients)


@cache
def name_of(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def _is_cached(parameter: Tensor | None) -> bool:
    """Whether autocast would keep a copy of this parameter."""
    return (
        parameter is not None
        and parameter.dtype == torch.float32
        and parameter.requires_grad
        and parameter.ndim >= 2
    )


def _weight_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return model._compiled_call_impl is not None or (
        dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    )
