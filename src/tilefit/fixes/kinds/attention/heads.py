"""PyTorch's own attention module on heads of sizes that the kernels take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.fixes.changes.behaviour import Behaviour, behaviours
from tilefit.fixes.changes.calls import PLAIN, are_exchanged, is_transformed, product_dtype
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, Refusal, RefusedError, fix, refuse
from tilefit.fixes.changes.modules import require_plain, submodule
from tilefit.fixes.kinds.padding.tensors import Channels, Places, crop, widen
from tilefit.ops import Attention
from tilefit.ops.dtypes import HALVES
from tilefit.rules.resize import pad

#: Host time that this adds to a training step for each module, beside launches: four of them, in a step that
#: then waits for the host, saved 1.0 ms less than launches and 200 us each predict, at 2.1 times those
#: (``next-word`` in ``benchmarks/results/heads_h100.json``).
HOST_S = 300e-6
#: What heads and features are padded to a multiple of: 16 bytes in half precision.
_MULTIPLE = 8


class _Call(NamedTuple):
    """The arguments of a call of ``nn.MultiheadAttention``, in its order."""

    query: Any
    key: Any
    value: Any
    key_padding_mask: Any = None
    need_weights: bool = True
    attn_mask: Any = None
    average_attn_weights: bool = True
    is_causal: bool = False


@dataclass(frozen=True)
class FittedHeads(Behaviour):
    """``nn.MultiheadAttention`` whose heads, and the features around them, are padded with zeros.

    Scores of padded heads are the same sums; what a padded column of values becomes meets weights of zero.
    """

    is_innermost = True

    def require(self, module: nn.Module, path: str) -> None:
        require_plain(module, path, nn.MultiheadAttention)
        assert isinstance(module, nn.MultiheadAttention)
        kinds = module.in_proj_weight is None, module.bias_k is not None, module.add_zero_attn
        refuse(any(kinds), f"{path} has weights of several sizes, or keys beside those it is given")
        refuse(behaviours(module), f"{path} was changed by another fix")

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert isinstance(module, nn.MultiheadAttention)
        call = _Call(*args, **kwargs)
        dtype = _dtype(module, call)
        if dtype is None or not _is_plain(module, call):
            return forward(*args, **kwargs)
        return _attended(module, dtype, call), None


def _dtype(module: nn.MultiheadAttention, call: _Call) -> torch.dtype | None:
    """The element type of the products; None where PyTorch is to compute them."""
    # In evaluation without gradients it has one kernel of its own.
    is_own = not (module.training or torch.is_grad_enabled() or torch.is_autocast_enabled())
    if is_own or call.need_weights or call.key is not call.value or is_transformed():
        return None
    if not torch.compiler.is_compiling() and are_exchanged():
        return None
    out = module.out_proj
    parameters = module.in_proj_weight, module.in_proj_bias, out.weight, out.bias
    kinds = {product_dtype(x, *parameters) for x in (call.query, call.key) if isinstance(x, torch.Tensor)}
    return kinds.pop() if len(kinds) == 1 else None


def _is_plain(module: nn.MultiheadAttention, call: _Call) -> bool:
    """Whether sizes and masks are those of a call that PyTorch accepts, of a batch."""
    query, key, width, batch = call.query, call.key, module.embed_dim, 0 if module.batch_first else 1
    if any(type(x) not in PLAIN or x.dim() != 3 or x.is_nested for x in (query, key)):
        return False
    if module.in_proj_weight.shape != (3 * width, width) or module.out_proj.weight.shape != (width, width):
        return False
    if (module.in_proj_bias is None) != (module.out_proj.bias is None):
        return False
    samples, queries, keys = query.shape[batch], query.shape[1 - batch], key.shape[1 - batch]
    masks = (
        (call.attn_mask, ((queries, keys), (samples * module.num_heads, queries, keys))),
        (call.key_padding_mask, ((samples, keys),)),
    )
    is_masked = all(mask is None or (type(mask) in PLAIN and mask.shape in sizes) for mask, sizes in masks)
    is_sized = query.shape[-1] == key.shape[-1] == width and key.shape[batch] == samples
    return is_masked and is_sized and not (call.is_causal and call.attn_mask is None)


def _attended(module: nn.MultiheadAttention, dtype: torch.dtype, call: _Call) -> torch.Tensor:
    """What the module returns: [batch, queries, width], or [queries, batch, width]."""
    heads, size = module.num_heads, module.head_dim
    head, width = _wide(size), _wide(module.embed_dim)
    inputs = (call.query,) if call.query is call.key else (call.query, call.key)
    tensors: list[tuple[torch.Tensor, Places]] = [
        (module.in_proj_weight.view(3, heads, size, -1), {2: head, 3: width}),
        (module.out_proj.weight.view(-1, heads, size), {0: width, 2: head}),
        *((x, {2: width}) for x in inputs),
    ]
    if module.in_proj_bias is not None:
        tensors += [(module.in_proj_bias.view(3, heads, size), {2: head}), (module.out_proj.bias, {0: width})]
    made = widen(tensors, dtype, watched=[t for t, _ in tensors])
    weight, out, *made = made
    first, last = made[len(inputs) :] or (None, None)
    # Of one input all at once; of two the queries of the first.
    cuts = (slice(3),) if len(inputs) == 1 else (slice(1), slice(1, 3))
    parts = [
        part.transpose(1, 2) if module.batch_first else part.permute(1, 2, 0, 3)
        for x, cut in zip(made, cuts, strict=False)
        for part in F.linear(x, weight[cut].flatten(0, 2), None if first is None else first[cut].flatten())
        .unflatten(-1, (-1, heads, head[1]))  # type: ignore[no-untyped-call]
        .unbind(-3)
    ]
    mask, dropout = _mask(module, call), module.dropout if module.training else 0.0
    query, key, value = parts
    y = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, call.is_causal and mask is None, scale=size**-0.5
    )
    y = y.transpose(1, 2) if module.batch_first else y.permute(2, 0, 1, 3)
    y = F.linear(y.flatten(-2), out.flatten(1), last)
    return crop(y, 2, width)


def _wide(size: int) -> Channels:
    return size, pad(size, _MULTIPLE)


def _mask(module: nn.MultiheadAttention, call: _Call) -> torch.Tensor | None:
    """What is added to scores, as PyTorch makes it of its two masks; none where it is known to be causal."""
    if call.is_causal and call.key_padding_mask is None:
        return None
    kind: Any = {"target_type": call.query.dtype, "check_other": False, "other_name": "", "other_type": None}
    mask = F._canonical_mask(mask=call.attn_mask, mask_name="attn_mask", **kind)
    padding = F._canonical_mask(mask=call.key_padding_mask, mask_name="key_padding_mask", **kind)
    if mask is not None and mask.dim() == 3:
        mask = mask.view(-1, module.num_heads, *mask.shape[1:])
    if padding is None:
        return mask
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding


@fix("fit-heads", "ALN001")
def fit_heads(context: Context) -> Found:
    """Computes ``nn.MultiheadAttention`` on heads that the fast kernels take.

    Heads of 50, and 500 features around them, are no multiple of 16 bytes: the projections run on slow
    kernels, and ``scaled_dot_product_attention`` copies queries, keys and values into padded ones, in every
    call. Here the weights are copied into padded ones (under autocast they are copied anyway, to be cast),
    so that the products make the padded heads themselves. Scores, their scale and the output are as before,
    and so are the parameters. Queries, keys and values are cut out of one product without copies, which is
    worth something for other sizes, too. Six layers 500 wide with ten heads took 3.8 of 13.9 ms less on an
    H100 (replayed; ``benchmarks/results/heads_h100.json``).

    Self-attention, and cross-attention to one memory, are served with masks and dropout. As PyTorch computes
    it stays a call that asks for weights, that has keys other than values, or of a single sample; in
    evaluation without gradients and autocast, PyTorch's own fused path. Dropout of weights, and of what is
    returned, draws other random numbers: the latter lies otherwise in memory, in whose order they are drawn.

    Refused: subclasses, weights of several sizes (``kdim``), ``add_bias_kv``, ``add_zero_attn``.
    """
    fused = (e for e in context.step.ops if isinstance(e.op, Attention) and e.op.dtype in HALVES)
    alike: dict[Any, list[str]] = defaultdict(list)
    for path in dict.fromkeys(entry.site.module for entry in fused):
        module = submodule(context.run.model, path)
        if isinstance(module, nn.MultiheadAttention) and not behaviours(module):
            try:
                FittedHeads().require(module, path)
                alike[module.embed_dim, module.num_heads].append(path)
            except RefusedError as refused:
                yield Refusal((path,), refused.what)
    for (width, heads), paths in alike.items():
        size, wide = _wide(width // heads)
        words = f"Compute the attention in {{}} on {heads} heads of {wide} for {size}."
        # Dropout draws in the order in which its input lies in memory.
        more: dict[str, Any] = {"host_s": HOST_S * len(paths), "same_random_numbers": False}
        yield ChangeSet.giving(paths, FittedHeads(), words, **more)
