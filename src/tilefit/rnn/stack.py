"""A stack of recurrent layers in one call: what eager code runs.

At small mini-batches a call costs what the host does for it. So all layers are one autograd function, their
weights are packed by one operation, and what does not change from call to call is found once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilefit.cost.recurrent_times import PERSISTENT
from tilefit.rnn import passes, products
from tilefit.rnn.cells import PIECE_BYTES, Grads, Layers, Rows
from tilefit.rnn.operator import joined_weights, layer_weights, reference_gradients
from tilefit.rnn.packing import Gradients, Packing, Plain
from tilefit.rnn.passes import ALL, NOTHING, STATES

#: What a layer saves for backward: its input (but for the first), dropout's mask, out, gates and c.
_SAVED = 5


class How(NamedTuple):
    """How a stack runs.

    Attributes:
        layers: What the stack is made of.
        backend: ``persistent`` or ``reference``.
        keep: What the layers save for backward, see :mod:`tilefit.rnn.passes`.
        lowest: The first layer that has a gradient; those below it save nothing.
        dropout: Probability between layers, 0 outside training.
        weights: How the weights are given to the layers.
    """

    layers: Layers
    backend: str
    keep: str
    lowest: int
    dropout: float
    weights: Plain | Packing


def run(
    layers: Layers,
    x: Tensor,
    flat: Sequence[Tensor],
    rows: Rows,
    *,
    dropout: float,
    recompute: bool,
    backend: str,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layers one after another; arguments and results as of :func:`tilefit.rnn.functional.run`.

    Args:
        x: [T, B, I], in the element type of the computation, as are the states of ``rows``.
        dropout: Probability between layers, 0 outside training.
        backend: ``persistent`` or ``reference``.
        training: Backward follows.
    """
    dtype, cast = x.dtype, False
    for weight in flat:
        if weight.dtype is not dtype:
            cast = True
            break
    keep, lowest = NOTHING, 0
    if training:
        keep = STATES if recompute else ALL
        if not any(t is not None and t.requires_grad for t in (x, rows.h0, rows.c0)):
            first = next(index for index, weight in enumerate(flat) if weight.requires_grad)
            lowest = first * layers.depth // len(flat)
    piece = PIECE_BYTES // dtype.itemsize if backend == PERSISTENT else 1
    weights = _weights(layers, x.shape[2], flat[1].shape[1], piece, cast)
    how = How(layers, backend, keep, lowest, dropout, weights)
    if training:
        return _Stack.apply(how, x.contiguous(), *rows, *flat)  # type: ignore[no-untyped-call, no-any-return]
    return _forward(how, x.contiguous(), rows, flat)[0]


@lru_cache(maxsize=4096)
def _weights(layers: Layers, inputs: int, hidden: int, piece: int, cast: bool) -> Plain | Packing:
    if cast or layers.directions == 2 or hidden % piece:
        return Packing(layers, inputs, hidden, piece)
    return Plain(layers, inputs, hidden)


def one_by_one(
    layer: Callable[[Tensor, Sequence[Tensor], Rows], tuple[Tensor, Tensor, Tensor]],
    between: Callable[[Tensor, int], Tensor],
    x: Tensor,
    flat: Sequence[Tensor],
    rows: Rows,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layers one after another by operations that are traced, transformed or differentiated.

    Args:
        layer: Output [T, B, D, H] and final states of one layer, from its input, weights and rows.
        between: What becomes of a layer's input; not called for the first.
        x, flat, rows: As of :func:`run`.
        depth: How many there are.
    """
    ends: list[tuple[Tensor, Tensor]] = []
    count = len(flat) // depth
    states = 0 if rows.h0 is None else len(rows.h0) // depth
    for index in range(depth):
        part = slice(index * states, (index + 1) * states)
        h0, c0 = (s if s is None or depth == 1 else s[part] for s in rows[:2])
        x = between(x, index) if index else x
        out, h, c = layer(x, flat[index * count : (index + 1) * count], rows._replace(h0=h0, c0=c0))
        x = out.flatten(2)
        ends.append((h, c))
    h_n, c_n = ends[0] if depth == 1 else map(torch.cat, zip(*ends, strict=True))
    return x, h_n, c_n


def _forward(
    how: How, x: Tensor, rows: Rows, flat: Sequence[Tensor]
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """Output and final states, and what is saved for backward."""
    weights, hidden = how.weights, flat[1].shape[1]
    memory = weights.pack(flat, x.dtype)
    layers = weights.layers(memory, flat, biases=True)
    given = x if x.shape[2] == weights.inputs else F.pad(x, (0, weights.inputs - x.shape[2]))
    h0, c0 = _padded(rows.h0, weights.hidden), _padded(rows.c0, weights.hidden)
    saved: list[Tensor | None] = [memory, given, h0, c0]
    h0s, c0s = _by_layer(h0, len(layers)), _by_layer(c0, len(layers))
    h_n: list[Any] = []
    c_n: list[Tensor] = []
    with products.precision(x):
        for index, (layer, h, c) in enumerate(zip(layers, h0s, c0s, strict=True)):
            mask = None
            if index and how.dropout:
                given, mask = torch.native_dropout(given, how.dropout, True)
            keep = how.keep if index >= how.lowest else NOTHING
            own = Rows(h, c, rows.lengths, rows.reset)
            result = passes.forward(how.layers.cell, how.backend, keep, given, layer, own)
            # Not a view: what an autograd function returns could not be changed in place if it were one.
            out = result.out.flatten(2).data
            gates = result.gates if keep == ALL else None
            saved += [given if index else None, mask, out, gates, result.c]
            h_n.append(result.h_n)
            c_n.append(result.c_n)
            given = out
    if weights.hidden != hidden:
        out = result.out[..., :hidden].contiguous().flatten(2).data
    ends = _joined(h_n, hidden), _joined(c_n, hidden) if how.layers.cell.has_c else x.new_empty(0)
    return (out, *ends), saved


def _backward(
    how: How,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    x: Tensor,
    lengths: Tensor | None,
    reset: Tensor | None,
    flat: Sequence[Tensor],
    saved: Sequence[Any],
) -> list[Tensor | None]:
    """Gradients of x, h0, c0 and the weights; None where not needed."""
    cell, depth, directions, kinds = how.layers
    weights, hidden, count = how.weights, flat[1].shape[1], len(flat) // depth
    memory, wide_x, wide_h0, wide_c0, *rest = saved
    layers = weights.layers(memory, flat, biases=how.keep == STATES)
    sizes = (*x.shape[:2], directions)
    grad, *grad_ends = grads
    if grad is not None:
        grad = _padded(grad.reshape(*sizes, hidden), weights.hidden)
    if wide_c0 is not None:
        wide_c0 = wide_c0.to(rest[-1].dtype)  # as the cell states: once for all layers
    states = [wide_h0, wide_c0, *(_padded(end, weights.hidden) for end in grad_ends)]
    by_layer = [*zip(*(_by_layer(state, depth) for state in states), strict=True)]
    found = [Gradients(None, None, None)] * depth
    firsts: list[list[Tensor]] = []
    with products.precision(x):
        for index in range(depth - 1, how.lowest - 1, -1):
            given, mask, out, gates, c = rest[index * _SAVED : (index + 1) * _SAVED]
            given = given if index else wide_x
            out = out.view(*sizes, weights.hidden)
            h0, c0, grad_hn, grad_cn = by_layer[index]
            ends, rows = Grads(grad, grad_hn, grad_cn), Rows(h0, c0, lengths, reset)
            dg, *first = passes.backward(
                cell, how.backend, how.keep, ends, given, layers[index], rows, (out, gates, c)
            )
            firsts.insert(0, first)
            part = needs[3 + index * count : 3 + (index + 1) * count]
            needed = [any(part[kind::kinds]) for kind in range(kinds)]
            found[index] = Gradients(
                products.input_weight_gradient(cell, dg, given) if needed[0] else None,
                products.hidden_weight_gradient(cell, dg, out, rows) if needed[1] else None,
                dg.sum((0, 1)) if any(needed[2:]) else None,
            )
            grad = None
            if index > how.lowest or needs[0]:
                grad = products.input_gradient(cell, dg, layers[index].w_ih)
                if mask is not None:
                    scale = 0.0 if how.dropout == 1 else 1 / (1 - how.dropout)
                    grad = torch.ops.aten.native_dropout_backward(grad, mask, scale)
                if index:
                    grad = grad.view(*sizes, weights.hidden)
    if grad is not None and weights.inputs != x.shape[2]:
        grad = grad[..., : x.shape[2]]
    grad_h0 = _joined([h for h, _ in firsts], hidden) if needs[1] else None
    grad_c0 = _joined([c for _, c in firsts], hidden) if needs[2] else None
    return [grad, grad_h0, grad_c0, *weights.gradients(found, flat, needs[3:])]


def _differentiable(
    how: How, x: Tensor, rows: Rows, flat: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """The stack by operations that PyTorch differentiates, with the elements dropped that were dropped."""

    def layer(x: Tensor, weights: Sequence[Tensor], rows: Rows) -> Any:
        joined = joined_weights(weights, how.layers.directions, x.dtype)
        return passes.differentiable(how.layers.cell, x, layer_weights(how.layers.cell, joined), rows)

    def between(x: Tensor, index: int) -> Tensor:
        mask = masks[index]
        if mask is None:
            return x
        units = mask.view(*mask.shape[:2], how.layers.directions, -1)[..., : flat[1].shape[1]].flatten(2)
        return x * units / (1 - how.dropout) if how.dropout < 1 else torch.zeros_like(x)

    return one_by_one(layer, between, x, flat, rows, len(masks))


class _Stack(torch.autograd.Function):
    """A stack with its gradient; its weights are those of the module, one by one."""

    @staticmethod
    def forward(
        ctx: Any,
        how: How,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        results, saved = _forward(how, x, Rows(h0, c0, lengths, reset), flat)
        ctx.save_for_backward(x, h0, c0, lengths, reset, *flat, *saved)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        how: How = ctx.how
        asked = ctx.needs_input_grad
        if all(grad is None for grad in grads):
            return (None,) * len(asked)
        needs = [*asked[1:4], *asked[6:]]  # x, h0, c0 and the weights; lengths and reset have none
        x, h0, c0, lengths, reset, *rest = ctx.saved_tensors
        flat, saved = rest[: len(needs) - 3], rest[len(needs) - 3 :]
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            masks = saved[5::_SAVED]
            outputs = _differentiable(how, x, Rows(h0, c0, lengths, reset), flat, masks)
            wanted = [t for t, needed in zip((x, h0, c0, *flat), needs, strict=True) if needed]
            gradients = reference_gradients(outputs, grads, wanted)
            found = [next(gradients) if needed else None for needed in needs]
        else:
            found = _backward(how, grads, needs, x, lengths, reset, flat, saved)
        return (None, *found[:3], None, None, *found[3:])


def _padded(t: Tensor | None, width: int) -> Tensor | None:
    """With zeros to the right of each row, up to ``width``."""
    return t if t is None or t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


def _by_layer(state: Tensor | None, layers: int) -> Sequence[Tensor | None]:
    """Each layer's part of a state [layers * D, B, H]."""
    return (state,) * layers if state is None or layers == 1 else state.chunk(layers)


def _joined(states: Sequence[Tensor], hidden: int) -> Tensor:
    """States of layers as one, [layers * D, B, H], without padding."""
    first = states[0]
    if first.shape[-1] != hidden:
        return torch.cat([state[..., :hidden] for state in states])
    return first if len(states) == 1 else torch.cat([*states])
