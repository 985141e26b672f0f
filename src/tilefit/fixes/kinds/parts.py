"""Parts of a model that compute without products (activations, normalizations), each compiled for itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from tilefit.cost.lowering import is_generated
from tilefit.fixes.changes.assumed import is_torchs
from tilefit.fixes.changes.behaviour import Behaviour, behaves, behaviours, refuse
from tilefit.fixes.changes.calls import PLAIN, is_followed
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, fix
from tilefit.fixes.changes.hooks import is_watched_within
from tilefit.ops import FORWARD, OPTIMIZER

#: What a compiled call takes the host in both passes beside launches: guards, AOTAutograd's way in and out.
#: By launches alone it would save some 300 us; it saves 41 of a norm's 241, and 33 of a GELU's 195
#: (``benchmarks/results/compiled_parts_h200.json``).
HOST_S = 280e-6
#: The compiler draws other random numbers from the same seed.
_RANDOM = frozenset("native_dropout bernoulli rand_like randn_like normal multinomial".split())


#: What generates the code.
_BACKEND = "inductor"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, compiled once: a class's ``forward`` for all its modules, whose parameters are inputs."""
    return torch.compile(function, backend=_BACKEND)


@dataclass(frozen=True)
class CompiledAlone(Behaviour):
    """The module, compiled where it runs on a GPU by itself."""

    is_compiled = True

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values(), *module._parameters.values())
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        is_seen = is_followed() or (module._modules and is_watched_within(module))
        if tensors and not is_seen and all(map(_is_on_gpu, tensors)):
            return compiled(type(module).forward)(module, *args, **kwargs)
        return forward(*args, **kwargs)

    def require(self, module: nn.Module, path: str) -> None:
        super().require(module, path)
        refuse(any(map(behaviours, module.modules())), f"{path} was changed by another fix")


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and type(tensor) in PLAIN


@fix("compile-parts", "PRC004")
def compile_parts(context: Context) -> Found:
    """Compiles the parts of the model that compute without products, such as activations and normalizations.

    Written out, a GELU is eight kernels that each read and write the activations, under autocast in fp32 for
    the sake of ``pow``; an RMS norm (``pow``, ``mean``, ``rsqrt``, ``mul``, ``mul``) is six, and as many in
    the backward pass. Compiled, each is a kernel that reads and writes once and computes in fp32 in between,
    whatever function it is. A part is an outermost module whose operations the compiler makes kernels of, if
    they are more than one. All modules of a class share what is compiled, in seconds, for they differ in
    their parameters alone; nothing else of the model is changed.

    The same function: the operations are the same ones, as under ``torch.compile``. On the CPU, inside of
    what is compiled or traced, under ``torch.func`` and where hooks see what is inside, the part runs as it
    is written.

    Left alone: modules of PyTorch's own classes, and those that draw random numbers or whose values the host
    reads. Second derivatives through a compiled part are an error of PyTorch's, and so may be a second
    backward pass (``retain_graph=True``) where there was none before; the error says what to set.
    """
    ops = [entry for entry in context.step.ops if entry.phase != OPTIMIZER]
    if context.run.options.compile:  # which makes the same kernels
        return
    paths = ["", *(entry.site.module for entry in ops if entry.phase == FORWARD)]
    kernels = Counter(path for called in paths for path in _around(called))
    calls = Counter(path for last, now in pairwise(paths) for path in _around(now) - _around(last))
    others = [entry.site for entry in ops if not is_generated(entry) or entry.function in _RANDOM]
    others += [event.site for event in context.step.program.events]
    done = {path for site in others for path in _around(site.module)}
    found: dict[type[nn.Module], list[str]] = defaultdict(list)
    for path, module in context.run.model.named_modules():  # those around others come first
        if kernels[path] > calls[path] and path not in done and not is_torchs(module):
            if not behaves(module, CompiledAlone):
                found[type(module)].append(path)
            done.update(inner for inner in kernels if f"{inner}.".startswith(f"{path}."))
    for kind, parts in found.items():
        words = f"Compile {kind.__name__} alone ({len(parts)} modules)."
        host_s = HOST_S * sum(calls[path] for path in parts)
        yield ChangeSet.giving(parts, CompiledAlone(), words, host_s=host_s)


def _around(path: str) -> set[str]:
    """Paths of a module and of those that it is in, but for the model."""
    return {*accumulate(path.split("."), "{}.{}".format)} if path else set()
