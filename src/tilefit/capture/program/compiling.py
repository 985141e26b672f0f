"""What of a program's step runs compiled: the models and the functions that it gives ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit import units
from tilefit.capture.trees import own_part, untransformed
from tilefit.cost.uncompiled import COMPILED_SHARE, beside
from tilefit.emulation.tensor import CudaTensor
from tilefit.ops import FORWARD, StepOp

#: What makes TorchScript of a module, of TorchScript other TorchScript, and a file of it.
_SCRIPTING = ("script", "trace", "trace_module", "freeze", "optimize_for_inference", "save")
_NOT_PYTORCHS = "nothing of PyTorch's own classes; torch.compile(model) does."
#: Modes of ``torch.compile`` that replay CUDA graphs.
_GRAPHED = ("reduce-overhead", "max-autotune")
#: Shares of the forward pass below and above which a few operations are beside the point: losses, metrics.
_LITTLE, _MOST = 0.1, 0.8


class Compiling:
    """Runs what is compiled as plain Python, and counts its operations in the forward pass.

    Args:
        ops: The operations of the step, which are cleared when a step begins.

    Attributes:
        whole: The whole step is to be taken for compiled.
        flex: ``flex_attention`` is compiled by itself.
        graphed: Something is compiled to be replayed from CUDA graphs.
    """

    def __init__(self, ops: Sequence[StepOp]) -> None:
        self._ops = ops
        self.whole = self.flex = self.graphed = self._scripted = False
        self._depth = self._since = 0
        self._done: list[range] = []
        #: Classes of which ``model.compile()`` was asked and does little, and what it compiles of them.
        self._left: dict[str, str] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within the block ``torch.compile`` compiles nothing."""
        torch.compiler.set_stance("force_eager")
        unscripted: Any = {name: self._unscripted(getattr(torch.jit, name)) for name in _SCRIPTING}
        # nn.Module.compile asks torch.compile as well.
        with patch.object(torch, "compile", self._compiled), patch.multiple(torch.jit, **unscripted):
            yield

    def _unscripted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """TorchScript of a module on the GPU is the module: its Python says what runs."""

        @wraps(function)
        def run(made: Any, *args: Any, **kwargs: Any) -> Any:
            is_python = isinstance(made, nn.Module) and not isinstance(made, torch.jit.ScriptModule)
            if not (is_python and is_on_gpu(made)):
                if function.__name__ == "script":  # of a class the names are looked up in the caller's frame
                    kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
                return function(made, *args, **kwargs)
            self._scripted = True
            if not hasattr(made, "save"):
                made.__dict__["save"] = lambda *args, **kwargs: None
            return made

        return run

    def _compiled(self, model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: self._compiled(function, **options)
        if options.get("disable") or options.get("backend", "inductor") != "inductor":
            return model  # other backends fuse nothing
        asked = (options.get("options") or {}).get("triton.cudagraphs", False)
        self.graphed |= options.get("mode") in _GRAPHED or bool(asked)
        if getattr(model, "__name__", "") == "flex_attention":
            self.flex = True
            return model
        if isinstance(model, nn.Module):
            model._compiled_call_impl = self._followed(model._call_impl)
            return model
        if getattr(model, "__func__", None) is nn.Module._call_impl and _is_pytorchs(model.__self__):
            called = model.__self__.forward.__name__ != "_forward_unimplemented"
            name = type(model.__self__).__name__
            self._left[name] = _NOT_PYTORCHS if called else "calls of it, of which there are none."
            self._in_place(model.__self__)
            return None  # what it is called by then
        return self._followed(model)

    def _in_place(self, model: nn.Module) -> None:
        """``model.compile()`` of a class of PyTorch's own starts in code that the compiler leaves to Python:
        no more of it is compiled than what others wrote inside."""
        for part in model.children():
            if _is_pytorchs(part):
                self._in_place(part)
            else:
                part._compiled_call_impl = self._followed(part._call_impl)

    def _followed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            # PyTorch compiles nothing that is called within a transform of torch.func.
            if self._depth or torch._C._functorch.peek_interpreter_stack() is not None:
                return function(*args, **kwargs)
            self._depth, self._since = 1, len(self._ops)
            try:
                return function(*args, **kwargs)
            finally:
                self._done.append(range(self._since, len(self._ops)))
                self._depth = 0

        return run

    def restart(self) -> None:
        """A step begins, perhaps within what is compiled."""
        self._since, self._done = 0, []

    @property
    def fuses_flex(self) -> bool:
        """Whether a call of ``flex_attention`` now is compiled."""
        return self.whole or self.flex or bool(self._depth)

    @property
    def share(self) -> float:
        """Of the forward pass's operations, those that ran compiled."""
        others = {*map(id, beside(self._ops))}
        now = range(self._since, len(self._ops) if self._depth else 0)
        inside = {index for each in (*self._done, now) for index in each}
        forward = [i for i, e in enumerate(self._ops) if e.phase == FORWARD and id(e) not in others]
        if self.whole or not forward:
            return float(self.whole)
        return sum(index in inside for index in forward) / len(forward)

    @property
    def notes(self) -> list[str]:
        """What is to be said where a part of the step is compiled."""
        notes = ["What is TorchScript runs as Python: what it fuses is not."] if self._scripted else []
        notes += [f"{name}.compile() compiles {what}" for name, what in self._left.items()]
        if _LITTLE < self.share < _MOST:
            taken = "compiled" if self.share >= COMPILED_SHARE else "not compiled"
            covered = units.share(self.share)
            notes.append(f"torch.compile covers {covered} of the forward operations: all count as {taken}.")
        return notes


def _is_pytorchs(module: nn.Module) -> bool:
    """Whether what a module computes is written in PyTorch."""
    return str(getattr(module.forward, "__module__", "")).startswith("torch.")


def is_on_gpu(module: nn.Module) -> bool:
    """Whether a module has something on the GPU: others are the host's work, such as transforms of data."""
    # Quantized weights are buffers, and so are a loss's weights of classes.
    buffers = () if isinstance(module, nn.modules.loss._Loss) else module.buffers()
    held = chain(module.parameters(), buffers)
    return any(isinstance(own_part(untransformed(each)), CudaTensor) for each in held)
