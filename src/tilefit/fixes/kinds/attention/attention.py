"""Attention in fused kernels: what is written by hand is one, and masks are laid out as they take them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tilefit.fixes.changes.behaviour import Behaviour, behaves
from tilefit.fixes.changes.calls import are_exchanged, is_followed, is_transformed, is_watched_within
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, RefusedError, fix
from tilefit.fixes.changes.modules import caller, common, submodule
from tilefit.fixes.kinds.attention.scores import Fusing, are_torchs
from tilefit.ops import FORWARD
from tilefit.ops.entries import MASK
from tilefit.rules.flow import Flow
from tilefit.rules.outside.attention_by_hand import AttentionChain, attention_chains

#: Host time that following the calls adds to a step for each attention, beside launches.
HOST_S = 66e-6


@dataclass(frozen=True)
class Fused(Behaviour):
    """Attention within the module, as one call of ``scaled_dot_product_attention``."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A hook of a part would be handed scores that are not computed; one on gradients would make them an
        # argument of a ``Function``.
        if is_followed() or are_exchanged() or is_watched_within(module) or not are_torchs():
            return forward(*args, **kwargs)
        with Fusing(module) as mode:
            output = forward(*args, **kwargs)
        return mode.finished(output)


def fusing(modules: Iterable[str], host_s: float = 0.0) -> ChangeSet:
    """The change of modules that compute attention step by step."""
    words = "Compute the attention in {} with scaled_dot_product_attention."
    # A fused kernel draws its own random numbers for dropout.
    return ChangeSet.giving(modules, Fused(), words, host_s=host_s, same_random_numbers=False)


@fix("fuse-attention", "NTC002")
def fuse_attention(context: Context) -> Found:
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

    ``nn.MultiheadAttention`` that averages its weights for a caller who does not read them is followed from
    within that caller, and the average is not computed either.

    Refused: modules compiled by TorchScript or whose ``forward`` was replaced. Weights that the block
    returns are computed for it, which leaves no gain; with dropout they would not be those that were used,
    and that is an error. While a part of the block has hooks, which would be handed the scores, it runs as it
    was written; so it does under ``torch.compile``, where fusing is the compiler's business.
    """
    modules = dict(context.run.model.named_modules())
    scopes: dict[str, dict[str, int]] = defaultdict(dict)
    for chain in attention_chains(Flow(context.step)):
        scope = _scope(context, chain)
        if scope in modules and not behaves(modules[scope], Fused):
            alike = scopes[context.step.modules.get(scope, "")]
            alike[scope] = alike.get(scope, 0) + 1
    for found in scopes.values():
        yield fusing(found, HOST_S * sum(found.values()))


def _scope(context: Context, chain: AttentionChain) -> str:
    """Path of the module to change: the smallest in which all of the attention happens, or the block (an
    element of a list of modules) that this is part of, since attention modules like to return their weights,
    for blocks (or, of PyTorch's own, whoever calls it) to ignore."""
    names = common(context.step.ops[index].site.module for index in chain.forward)
    block = max((place for place, name in enumerate(names, 1) if name.isdigit()), default=len(names))
    path, model = ".".join(names[:block]), context.run.model
    try:
        is_torchs = path and isinstance(submodule(model, path), nn.MultiheadAttention)
        return caller(model, path) if is_torchs else path
    except RefusedError:  # what was captured is called otherwise, or by nothing that can be changed
        return path


# ---- masks ---------------------------------------------------------------------------------------


class _Contiguous(TorchFunctionMode):
    """Within the block, attention is given masks whose last dimension is contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **(kwargs or {})}
        mask = given.get("attn_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() > 1 and mask.stride(-1) != 1:
            given["attn_mask"] = mask.contiguous()
        return func(**given)


#: Those that ``scaled_dot_product_attention`` takes without their names.
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class WithContiguousMasks(Behaviour):
    """The module, in which attention is given masks whose last dimension is contiguous."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if is_transformed() else _Contiguous():
            return forward(*args, **kwargs)


def with_contiguous_masks(modules: Sequence[str], host_s: float = 0.0) -> ChangeSet:
    """The change of modules that hand masks to attention."""
    words = "Make the mask of the attention in {} contiguous, so that it is fused."
    # A fused kernel draws its own random numbers for dropout.
    return ChangeSet.giving(modules, WithContiguousMasks(), words, host_s=host_s, same_random_numbers=False)


@fix("contiguous-masks", "NTC005")
def make_masks_contiguous(context: Context) -> Found:
    """Makes the mask of attention contiguous where its layout keeps PyTorch from the fused kernels.

    Masks that were expanded or permuted have a last dimension that is not contiguous. While the module runs,
    calls of ``scaled_dot_product_attention`` are given a copy of such a mask that is contiguous: the same
    values. The copy is made for each call; the compiler makes it once for all.

    The encoders of transformers 5.17 make such a mask only when they are compiled: there the change is worth
    something under ``torch.compile`` alone.

    Refused: modules compiled by TorchScript or whose ``forward`` was replaced.
    """
    modules = dict(context.run.model.named_modules())
    calls = [entry.site for entry in context.step.ops if entry.phase == FORWARD and entry.site.fallback]
    paths = [site.module for site in calls if site.fallback is not None and site.fallback.reason == MASK]
    found = [p for p in dict.fromkeys(paths) if p in modules and not behaves(modules[p], WithContiguousMasks)]
    if found:
        yield with_contiguous_masks(found, HOST_S * len(found))
