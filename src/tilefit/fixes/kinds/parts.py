"""Parts of a model that compute without products (activations, normalizations), each compiled for itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import nn

from tilefit.cost.lowering import is_generated
from tilefit.fixes.changes.assumed import is_torchs
from tilefit.fixes.changes.behaviour import Behaviour, behaves, behaviours, refuse
from tilefit.fixes.changes.calls import PLAIN, are_all_watched, is_followed, is_on_gpu
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, fix
from tilefit.ops import FORWARD, OPTIMIZER

#: What a compiled call takes the host in both passes beside launches: guards, AOTAutograd's way in and out.
#: With it a part takes the host what it takes written out, and gains on the GPU alone. A norm's call took 200
#: us, and 241 written out, a GELU's 162 and 195, where launches alone say 300 us less
#: (``benchmarks/results/compiled_parts_h200.json``).
HOST_S = 350e-6
#: What generates the code.
_BACKEND = "inductor"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, compiled once: a class's ``forward`` for all its modules, whose parameters are inputs."""
    return torch.compile(function, backend=_BACKEND)


@dataclass(frozen=True)
class CompiledAlone(Behaviour):
    """The module, compiled where it runs on a GPU by itself."""

    is_innermost = True
    is_compiled = True

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        is_alone = tensors and not (is_followed() or are_all_watched())
        if is_alone and all(map(_is_on_gpu, (*tensors, *module._parameters.values()))):
            return compiled(type(module).forward)(module, *args, **kwargs)
        return forward(*args, **kwargs)

    def require(self, module: nn.Module, path: str) -> None:
        super().require(module, path)
        refuse(behaviours(module), f"{path} was changed by another fix")


@cache
def _is_random(name: str) -> bool:
    """Whether an operation draws random numbers: the compiler draws others from the same seed."""
    packet = getattr(torch.ops.aten, name.rpartition(".")[2], None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def _is_on_gpu(tensor: torch.Tensor | None) -> bool:
    return tensor is None or (is_on_gpu(tensor) and type(tensor) in PLAIN)


@fix("compile-parts", "PRC004", compiles_parts=True)
def compile_parts(context: Context) -> Found:
    """Compiles the parts of the model that compute without products, such as activations and normalizations.

    Written out, a GELU is eight kernels that each read and write the activations, under autocast in fp32 for
    the sake of ``pow``; an RMS norm (``pow``, ``mean``, ``rsqrt``, ``mul``, ``mul``) is six, and as many in
    the backward pass. Compiled, each is a kernel that reads and writes once and computes in fp32 in between,
    whatever function it is. A part is a module without parts, of several operations that the compiler makes
    kernels of. All modules of a class share what is compiled, in seconds, for they differ in their parameters
    alone; nothing else of the model is changed.

    The same function: the operations are the same ones, as under ``torch.compile``. On the CPU, inside of
    what is compiled or traced, and under ``torch.func`` the part runs as it is written; so it does where it
    would read other attributes, or call other functions, than it did.

    Left alone: modules of PyTorch's own classes, those that draw random numbers or whose values the host
    reads, those with several results (what only an unused one is made of would get gradients of zeros), and
    those whose tensors something writes to: what the compiler keeps for the backward pass may be the input or
    the result, and to write to these is an error then. Second derivatives through a compiled part are an
    error of PyTorch's, and so may be a second backward pass (``retain_graph=True``) where the first was
    without it; the error says what to set.
    """
    ops = [entry for entry in context.step.ops if entry.phase != OPTIMIZER]
    forward = [entry for entry in ops if entry.phase == FORWARD]
    kernels = Counter(entry.site.module for entry in forward)
    calls = Counter(path for path, _ in groupby(entry.site.module for entry in forward))
    written = {ref.id for entry in forward if entry.name.endswith("_") for ref in entry.outputs}
    readers: dict[int, set[str]] = defaultdict(set)
    for entry in ops:
        for ref in entry.inputs:
            readers[ref.id].add(entry.site.module)
    made = [(entry.site.module, ref.id) for entry in forward for ref in entry.outputs]
    results = Counter(path for path, number in made if readers[number] != {path})
    left = {path for path in results if results[path] > calls[path]}
    left |= {event.site.module for event in context.step.program.events}
    for entry in ops:
        is_written = entry.phase == FORWARD and any(r.id in written for r in (*entry.inputs, *entry.outputs))
        if is_written or not is_generated(entry) or _is_random(entry.name):
            left.add(entry.site.module)
    found: dict[type[nn.Module], list[str]] = defaultdict(list)
    for path, module in context.run.model.named_modules():
        if kernels[path] <= calls[path] or path in left or module._modules:
            continue
        if not is_torchs(module) and not behaves(module, CompiledAlone):
            found[type(module)].append(path)
    for kind, parts in found.items():
        words = f"Compile {kind.__name__} alone ({len(parts)} modules)."
        host_s = HOST_S * sum(calls[path] for path in parts)
        yield ChangeSet.giving(parts, CompiledAlone(), words, host_s=host_s)
