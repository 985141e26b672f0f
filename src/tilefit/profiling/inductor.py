"""Which modules and lines the kernels of a compiled graph come from.

While Inductor generates a graph's code, every kernel it defines or calls is noted with the nodes of the graph
it was made of; they know the module and the line. In the trace the same names follow in the same order.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from tilefit.capture.sites import short_path
from tilefit.profiling.attribution import BACKWARD, AttributedStep, Call

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a kernel comes from: path below the compiled module, and line."""

    label: str
    module: str | None
    source: str


@dataclass(slots=True)
class _Graph:
    backward: bool
    kernels: list[_Origin] = field(default_factory=list)


class Compiled:
    """Remembers what the kernels of graphs that are compiled while it watches were made of."""

    def __init__(self) -> None:
        self._graphs: dict[int, _Graph] = {}
        self._kept: list[Any] = []  # graphs, so that no other gets the number of one
        self._stack = ExitStack()
        self._patched = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block compilations are followed. Compiled code is not taken from Inductor's caches."""
        if "torch._inductor.scheduler" in sys.modules:
            self._follow()
        compile_ = torch.compile

        @wraps(compile_)
        def compile_followed(*args: Any, **kwargs: Any) -> Any:
            self._follow()  # importing the compiler takes seconds, so only for a program that compiles
            return compile_(*args, **kwargs)

        with self._stack, patch.object(torch, "compile", compile_followed):
            yield

    def _follow(self) -> None:
        if self._patched:
            return
        self._patched = True
        from torch._functorch import config as functorch
        from torch._inductor import config
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.codegen.triton import TritonScheduling
        from torch._inductor.scheduler import Scheduler

        enter = self._stack.enter_context
        enter(config.patch(fx_graph_cache=False))
        enter(functorch.patch(enable_autograd_cache=False))
        for backend in (TritonScheduling, CppScheduling):
            enter(patch.object(backend, "define_kernel", self._defining(backend.define_kernel)))
        enter(patch.object(Scheduler, "codegen_extern_call", self._calling(Scheduler.codegen_extern_call)))

    def _defining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def define_kernel(backend: Any, code: Any, nodes: Any, *args: Any, **kwargs: Any) -> Any:
            name = original(backend, code, nodes, *args, **kwargs)
            self._note(str(name), [node.node for node in nodes if getattr(node, "node", None) is not None])
            return name

        return define_kernel

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def codegen_extern_call(scheduler: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
            called = node.node
            name = getattr(called, "python_kernel_name", None) or type(called).__name__
            self._note(_base(str(name)), [called])
            return original(scheduler, node, *args, **kwargs)

        return codegen_extern_call

    def _note(self, label: str, nodes: Sequence[Any]) -> None:
        from torch._inductor.virtualized import V

        graph = V.graph
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = _Graph(bool(graph.is_backward))
            self._kept.append(graph)
        sites = Counter(_site(origin) for node in nodes for origin in node.get_origins())
        known = [site for site, _ in sites.most_common() if site[0] is not None]
        module, source = known[0] if known else (None, "")
        self._graphs[id(graph)].kernels.append(_Origin(label, module, source))

    # ---- into the trace --------------------------------------------------------------------------

    def place(self, steps: Iterable[AttributedStep]) -> None:
        """Give the calls of compiled graphs the modules and lines their kernels were made of."""
        for step in steps:
            runs: dict[str, list[Call]] = defaultdict(list)
            for call in step.calls:
                if call.graph:
                    runs[call.graph].append(call)
            for calls in runs.values():
                graph = self._graph_of(calls)
                if graph is not None:
                    _place(calls, graph.kernels)

    def _graph_of(self, calls: Sequence[Call]) -> _Graph | None:
        """The graph that runs the most kernels of these names."""
        names = Counter(map(_label, calls))
        backward = calls[0].phase == BACKWARD

        def fit(graph: _Graph) -> tuple[int, int]:
            return (names & Counter(kernel.label for kernel in graph.kernels)).total(), -len(graph.kernels)

        candidates = [graph for graph in self._graphs.values() if graph.backward == backward]
        best = max(candidates, key=fit, default=None)
        return best if best is not None and fit(best)[0] else None


def _place(calls: Sequence[Call], kernels: Sequence[_Origin]) -> None:
    """Pair calls and kernels by name, in order; a replay's kernels without a name lie between the others."""
    position = 0
    labels = [kernel.label for kernel in kernels]
    generated = {label for label in labels if label.startswith(("triton_", "cpp_"))}
    for call in calls:
        label = _label(call)
        if label in labels[position:]:
            position = labels.index(label, position)
        elif not call.replayed or label in generated or position >= len(labels):
            continue
        else:
            # A library's kernel in a CUDA graph: the next call of a library, if there is one before the next
            # generated kernel; else another kernel of the last one.
            if labels[position] in generated:
                position = max(0, position - 1)
        origin = kernels[position]
        call.module = ".".join(filter(None, (call.graph_module, origin.module)))
        call.source = origin.source or call.source
        if not (call.replayed and label != origin.label):
            position += 1


def _label(call: Call) -> str:
    return call.name.rpartition("::")[2]


def _base(kernel: str) -> str:
    """``extern_kernels.addmm`` and ``torch.ops.aten.addmm.default`` are ``addmm``."""
    _, _, name = kernel.removeprefix("torch.ops.").partition(".")
    return name.partition(".")[0].removeprefix("bias_")


def _site(origin: Any) -> tuple[str | None, str]:
    """Module and line of a node of the graph; of the forward operation where it computes a gradient."""
    stack = origin.meta.get("nn_module_stack") or origin.meta.get("fwd_nn_module_stack")
    module = _path(list(stack.values())[-1][0]) if stack else None
    frames = [
        f"{short_path(found['file'])}:{found['line']}"
        for found in _FRAME.finditer(origin.meta.get("stack_trace") or "")
        if f"{torch.__path__[0]}/" not in found["file"]
    ]
    return module, frames[-1] if frames else ""


def _path(name: str) -> str:
    """``L['self']._modules['h'][0].mlp`` is ``h.0.mlp``."""
    _, bracket, rest = name.partition("]")
    if not bracket:
        return name
    dotted = _INDEX.sub(r".\1", rest)
    parts = [part for part in dotted.split(".") if part and part not in ("_modules", "_orig_mod")]
    return ".".join(parts)
