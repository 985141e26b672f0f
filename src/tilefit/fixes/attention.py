"""Attention written by hand, as one fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import nn

from tilefit.fixes.behaviour import Behaviour, is_replaced
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.run import Run
from tilefit.fixes.scores import Fusing
from tilefit.fixes.swap import submodule
from tilefit.rules.flow import Flow
from tilefit.rules.outside.attention_by_hand import AttentionChain, attention_chains
from tilefit.rules.sites import pattern


class Fused(Behaviour):
    """Attention within the module, as one call of ``scaled_dot_product_attention``."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with Fusing(module.buffers()) as mode:
            return mode.finished(forward(*args, **kwargs))


def put_around(run: Run, edits: Edits, paths: Iterable[str], behaviour: Behaviour) -> None:
    """Make the ``forward`` of some modules run inside a behaviour.

    Raises:
        RefusedError: one of them is compiled by TorchScript, or its ``forward`` was replaced.
    """
    modules = {path: submodule(run.model, path) for path in paths}
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise RefusedError(f"{path or 'the model'} is compiled by TorchScript")
        if is_replaced(module):
            raise RefusedError(f"the forward method of {path or 'the model'} was replaced")
    for module in modules.values():
        edits.behave(module, behaviour)


@dataclass(frozen=True)
class Fusion(ChangeSet):
    """Modules of one class that compute attention step by step."""

    #: A fused kernel draws its own random numbers for dropout.
    same_random_numbers: ClassVar[bool] = False
    saves_launches: ClassVar[bool] = False

    @property
    def summary(self) -> str:
        where = pattern(self.modules) if any(self.modules) else "the model"
        return f"Compute the attention in {where} with scaled_dot_product_attention."

    def make(self, run: Run, edits: Edits) -> None:
        put_around(run, edits, self.modules, Fused())


class FuseAttention(Fix):
    """Makes one ``scaled_dot_product_attention`` of attention that is written out by hand.

    The code of the model is not changed. While the block that contains the attention runs, the
    product of Q and K is put off: what would be its result notes how it is scaled, masked, cast, softmaxed
    and dropped out, and where it is multiplied by V the fused kernel does all of that at once. Whatever else
    is done to the scores makes them be computed by the calls that were made, so that other code under the
    same roof does what it did. The calls are followed while they are made: masks may be boolean or
    additive, sizes may change from call to call, and so may the course of the code.

    The same function: a number filled into masked scores must be -10000 or less, for a softmax makes zeros of
    it; where it masks a whole row, the weights are made equal, as they were. A mask is passed on as a mask,
    unless it is made of numbers and buffers alone and found to be causal: then the kernel skips what is
    masked. Dropout drops with the same probability, but other weights from the same seed.

    Refused: modules compiled by TorchScript or whose ``forward`` was replaced. Weights that the block
    returns are computed for it, which leaves no gain; with dropout they would not be those that were used,
    and that is an error. Under ``torch.compile`` the block runs as it was written, and fusing is the
    compiler's business.
    """

    name = "fuse-attention"
    rules = ("NTC002",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        scopes: dict[str, list[str]] = defaultdict(list)
        for chain in attention_chains(Flow(context.step)):
            scope = _scope(context, chain)
            if scope not in scopes[context.step.modules.get(scope, "")]:
                scopes[context.step.modules.get(scope, "")].append(scope)
        for modules in scopes.values():
            yield Fusion(tuple(modules))


def _scope(context: Context, chain: AttentionChain) -> str:
    """Path of the module to change: the smallest in which all of the attention happens, or the block (an
    element of a list of modules) that this is part of, since attention modules like to return their weights,
    for blocks to ignore."""
    paths = [context.step.ops[index].site.module.split(".") for index in chain.forward]
    common = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))]
    block = max((place for place, name in enumerate(common, 1) if name.isdigit()), default=len(common))
    return ".".join(common[:block])
