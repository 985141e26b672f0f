"""Attention written by hand, as one fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from tilefit.fixes.behaviour import Behaviour, behaves
from tilefit.fixes.calls import are_exchanged, is_followed
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal
from tilefit.fixes.interior import is_watched_within
from tilefit.fixes.modules import behave, common
from tilefit.fixes.run import Run
from tilefit.fixes.scores import Fusing, are_torchs
from tilefit.rules.flow import Flow
from tilefit.rules.outside.attention_by_hand import AttentionChain, attention_chains

#: Host time that following the calls adds to a step for each attention, beside launches.
HOST_S = 66e-6


class Fused(Behaviour):
    """Attention within the module, as one call of ``scaled_dot_product_attention``."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A hook of a part would be handed scores that are not computed; one on gradients would make them an
        # argument of a ``Function``.
        if is_followed() or are_exchanged() or is_watched_within(module) or not are_torchs():
            return forward(*args, **kwargs)
        with Fusing(module) as mode:
            return mode.finished(forward(*args, **kwargs))


@dataclass(frozen=True)
class Fusion(ChangeSet):
    """Modules of one class that compute attention step by step."""

    #: A fused kernel draws its own random numbers for dropout.
    same_random_numbers: ClassVar[bool] = False

    words = "Compute the attention in {0.where} with scaled_dot_product_attention."

    def make(self, run: Run, edits: Edits) -> None:
        behave(run, edits, self.modules, Fused())


class FuseAttention(Fix):
    """Makes one ``scaled_dot_product_attention`` of attention that is written out by hand.

    The code of the model is not changed. While the block that contains the attention runs, the
    product of Q and K is put off: what would be its result notes how it is scaled, masked, cast, softmaxed
    and dropped out, and where it is multiplied by V the fused kernel does all of that at once. Whatever else
    is done to the scores makes them be computed by the calls that were made, so that other code under the
    same roof does what it did. The calls are followed while they are made: masks may be boolean or
    additive, sizes may change from call to call, and so may the course of the code.

    The same function: a number filled into masked scores must be -10000 or less, for a softmax makes zeros of
    it; where it masks a whole row, the weights are made equal, as they were. Beside a mask that was added to
    such a row the scores are lost, and still get gradients, which no fused kernel computes: in training the
    host looks at such a mask, once where layers share it, and the attention runs as it was written if there
    is such a row (a prompt padded on the left). A mask is passed on as a mask,
    unless it is made of numbers and buffers alone and found to be causal: then the kernel skips what is
    masked. Dropout drops with the same probability, but other weights from the same seed.

    Refused: modules compiled by TorchScript or whose ``forward`` was replaced. Weights that the block
    returns are computed for it, which leaves no gain; with dropout they would not be those that were used,
    and that is an error. While a part of the block has hooks, which would be handed the scores, it runs as it
    was written; so it does under ``torch.compile``, where fusing is the compiler's business.
    """

    name = "fuse-attention"
    rules = ("NTC002",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        modules = dict(context.run.model.named_modules())
        scopes: dict[str, dict[str, int]] = defaultdict(dict)
        for chain in attention_chains(Flow(context.step)):
            scope = _scope(context, chain)
            if scope in modules and not behaves(modules[scope], Fused):
                alike = scopes[context.step.modules.get(scope, "")]
                alike[scope] = alike.get(scope, 0) + 1
        for found in scopes.values():
            yield Fusion(tuple(found), host_s=HOST_S * sum(found.values()))


def _scope(context: Context, chain: AttentionChain) -> str:
    """Path of the module to change: the smallest in which all of the attention happens, or the block (an
    element of a list of modules) that this is part of, since attention modules like to return their weights,
    for blocks to ignore."""
    names = common(context.step.ops[index].site.module for index in chain.forward)
    block = max((place for place, name in enumerate(names, 1) if name.isdigit()), default=len(names))
    return ".".join(names[:block])
