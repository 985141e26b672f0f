"""Autocast: which regions are open, in which element types passes and operations ran, and what its cache
holds."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision import graph
from tilefit.precision.ledger import Begins, Ended, Region, Running, Stepped, Tracker
from tilefit.precision.lines import short, user_line
from tilefit.precision.look import Call, Observer, function_of
from tilefit.precision.patches import Patch, of_all
from tilefit.precision.rules.autocast import (
    BackwardInOtherDtype,
    CacheDropsGradients,
    EvalTrainMismatch,
    StaleWeightCache,
)
from tilefit.precision.rules.scaler import HalfWeightsUnderAutocast, ScalerWithBf16
from tilefit.precision.tensors import HALF, name_of, parameters_of

#: Operations that autocast runs in half precision.
PRODUCTS = frozenset(
    """mm addmm bmm baddbmm addbmm convolution _scaled_dot_product_flash_attention mkldnn_linear
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention linear""".split()
)
#: Frames that are searched for the forward function of a custom Function.
_FRAMES = 12


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

        def left(*call: object) -> None:
            # A model that enters regions of its own does so in training too.
            if not before or self._ledger.here.entered == before.pop():
                self._judge_evaluation(model)

        entered = model.register_forward_pre_hook(lambda *call: before.append(self._ledger.here.entered))
        self._evaluated[model] = [entered, model.register_forward_hook(left)]

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
    cast = parameter is not None and parameter.dtype == torch.float32 and parameter.ndim >= 2
    return cast and parameter is not None and parameter.requires_grad


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    in_place = model._compiled_call_impl is not None
    return in_place or (dynamo is not None and isinstance(model, dynamo.OptimizedModule))


class Products(Tracker, Observer):
    """Compares the element types of matrix products forward, backward and in recomputations."""

    def set_up(self) -> None:
        self._by_code: dict[CodeType, tuple[str, str]] = {}
        self._by_module: dict[int, str] = {}

    def wants(self, func: Any, name: str) -> bool:
        return name in PRODUCTS

    def after(self, call: Call) -> None:
        first = next((t for t in call.args if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is None:
            return
        dtype, module = name_of(first.dtype), call.look.running
        if not call.backward:
            if module is not None:
                self._by_module.setdefault(id(module), dtype)
            self._note_functions(dtype)
            return
        function = function_of(torch._C._current_autograd_node())
        if function is not None:
            forward = _unwrapped(function.forward)  # type: ignore[attr-defined]
            before, place = ("", "") if forward is None else self._by_code.get(forward.__code__, ("", ""))
            self._judge("function", function.__name__.removesuffix("Backward"), before, dtype, place)
        elif call.look.recomputes and module is not None:
            before, name = self._by_module.get(id(module), ""), call.module
            self._judge("recompute", name, before, dtype, call.source, name)

    def _judge(self, kind: str, name: str, forward: str, backward: str, *place: str) -> None:
        if forward not in ("", backward):
            types = {"forward": forward, "backward": backward}
            self.found(BackwardInOtherDtype, *place, kind=kind, name=name, **types)

    def _note_functions(self, dtype: str) -> None:
        frame: FrameType | None = sys._getframe(3)
        for _ in range(_FRAMES):
            if frame is None:
                return
            code = frame.f_code
            if code.co_name in ("forward", "decorate_fwd", "setup_context") and code not in self._by_code:
                self._by_code[code] = dtype, f"{short(code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back

    def end(self) -> None:
        self._by_code.clear()
        self._by_module.clear()


class LostGradients(Tracker, Observer):
    """Weights whose output has a gradient and which have none, after a forward pass without gradients."""

    def set_up(self) -> None:
        self._without: dict[int, int] = {}
        self._reached: dict[int, tuple[nn.Module, str, str]] = {}

    def end(self) -> None:
        self._without.clear()

    def ran(self, module: nn.Module, name: str, output: Any) -> None:
        if not self._without and torch.is_grad_enabled():
            return  # nothing ran without gradients
        here, region = self._ledger.here, self._ledger.here.cached_in
        if not region or here.depth or not any(p is not None for p in module._parameters.values()):
            return
        if not torch.is_grad_enabled():
            self._without[id(module)] = region
        elif self._without.get(id(module)) == region and isinstance(output, Tensor):
            what = {id(module): (module, name, user_line())}
            if output.requires_grad:
                output.register_hook(lambda _: self._reached.update(what))  # type: ignore[no-untyped-call]
            else:
                # Not even a graph: neither its input nor, wrongly, its weight asks for a gradient.
                self._reached |= what

    def on_ended(self, ended: Ended) -> None:
        """Whose weights got no gradient although its output did?"""
        reached, self._reached = self._reached, {}
        for module, name, source in reached.values():
            weights = list(filter(_is_cached, module.parameters(recurse=False)))
            if weights and all(weight.grad is None for weight in weights):
                self.found(CacheDropsGradients, source, name)


def _unwrapped(function: Any) -> Any:
    """The function below ``custom_fwd``, or None where there is no Python code."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if hasattr(function, "__code__") else None
