"""One recurrent layer as an operator of PyTorch: ``tilefit::recurrent``.

The operator is what ``torch.compile``, ``torch.export`` and tracing see. Eager code goes around it, through
:mod:`tilefit.rnn.stack`: the machinery of operators takes the time of tens of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefit.cost.recurrent_times import CUDNN
from tilefit.rnn import cudnn, passes, products
from tilefit.rnn.cells import CELLS, Cell, Grads, Joined, Layers, Rows
from tilefit.rnn.dispatch import backend_of_layer
from tilefit.rnn.passes import ALL, NOTHING, STATES, Weights

#: x, w_ih, w_hh, b_ih, b_hh, h0 and c0: the arguments that can have gradients.
_DIFFERENTIABLE = 7


def is_traced() -> bool:
    """Whether a compiler or a dispatch mode sees what runs now."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())


def recurrent(
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Rows,
    *,
    layers: Layers,
    recompute: bool = False,
    backend: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one recurrent layer, in all its directions, where a compiler, a mode or a transform sees it.

    Args:
        x: [T, B, I]; its element type is that of the computation.
        weights: Per direction w_ih [G * H, I], w_hh [G * H, H] and, with bias, b_ih and b_hh [G * H], in
            torch's gate order and of any floating-point type.
        rows: What its rows start from, and where they end.
        layers: Which recurrence, and in how many directions.
        recompute: Save outputs and cell states for backward, and compute the gates again from them.
        backend: One that can run this, see :func:`tilefit.rnn.dispatch.choose`; empty, which only compiled
            code may give: chosen when it runs.

    Returns:
        Output [T, B, D, H] (0 beyond a row's length), final hidden and final cell state [D, B, H] (empty if
        the cell has none).
    """
    cell = layers.cell
    joined = joined_weights(weights, layers.directions, x.dtype)
    if not is_traced():  # within a transform of torch.func
        return passes.differentiable(cell, x, layer_weights(cell, joined), rows)
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, rows.h0, rows.c0, *weights)
    )
    keep = NOTHING if not needs_grad else STATES if recompute else ALL
    out, h_n, c_n, _, _ = _forward_operator(x, *joined, *rows, cell.name, keep, backend)
    return out, h_n, c_n


def joined_weights(flat: Sequence[Tensor], directions: int, dtype: torch.dtype) -> Joined:
    """w_ih, w_hh, b_ih and b_hh with the directions as their first dimension."""
    kinds = len(flat) // directions
    if directions == 1:
        joined = [weight.unsqueeze(0) for weight in flat]
    else:
        joined = [torch.stack([*flat[kind::kinds]]) for kind in range(kinds)]
    return Joined(*(weight.to(dtype) for weight in joined))


def layer_weights(cell: Cell, joined: Joined) -> Weights:
    """Weights as :mod:`tilefit.rnn.passes` takes them."""
    w_ih, w_hh, b_ih, b_hh = joined
    if b_ih is None or b_hh is None:
        return Weights(w_ih.flatten(0, 1), w_hh, None, None)
    bias, bias_n = products.biases(cell, b_ih, b_hh)
    return Weights(w_ih.flatten(0, 1), w_hh, bias.flatten(), bias_n)


def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator, with the arguments of its schema."""
    joined, rows, (cell, keep, backend) = Joined(*rest[:4]), Rows(*rest[4:8]), rest[8:]
    kind = CELLS[cell]
    chosen = backend_of_layer(x, joined.w_hh, kind, rows.lengths, rows.reset, keep != NOTHING, backend)
    with products.precision(x):
        if chosen == CUDNN:
            out, h_n, c_n = cudnn.forward(kind, x, joined, rows.h0, rows.c0)
            return out, h_n, c_n, *_nothing_saved(kind, out, keep)
        result = passes.forward(kind, chosen, keep, x, layer_weights(kind, joined), rows)
    out, saved = result.out.contiguous(), _nothing_saved(kind, result.out, NOTHING)
    assert result.h_n is not None
    return (
        out,
        result.h_n.contiguous(),
        result.c_n.contiguous() if kind.has_c else x.new_empty(0),
        result.gates.contiguous() if keep == ALL and kind.saved else saved[0],
        result.c.contiguous() if keep != NOTHING and kind.has_c else saved[1],
    )


def _nothing_saved(kind: Cell, out: Tensor, keep: str) -> tuple[Tensor, Tensor]:
    """Gates and cell states of the sizes that a forward pass saves, with nothing in them."""
    *rows, hidden = out.shape
    wide = torch.promote_types(out.dtype, torch.float32)
    saves_gates = keep == ALL and kind.saved
    saves_c = keep != NOTHING and kind.has_c
    return (
        out.new_empty((*rows, kind.saved * hidden) if saves_gates else 0),
        out.new_empty(out.shape if saves_c else 0, dtype=wide),
    )


def _backward(*given: Any) -> tuple[Tensor, ...]:
    """Gradients of x, w_ih, w_hh, b_ih, b_hh, h0 and c0, of the arguments of the schema; empty where not
    needed."""
    grads, x, joined, rows = Grads(*given[:3]), given[3], Joined(*given[4:8]), Rows(*given[8:12])
    results, (cell, keep, backend, needs) = given[12:15], given[15:]
    kind, out = CELLS[cell], results[0]
    chosen = backend_of_layer(x, joined.w_hh, kind, rows.lengths, rows.reset, True, backend)
    with products.precision(x):
        if chosen == CUDNN:
            filled = _filled(kind, out, grads)
            found = cudnn.backward(kind, filled, x, joined, rows.h0, rows.c0, needs)
        else:
            weights = layer_weights(kind, joined)
            dg, grad_h0, grad_c0 = passes.backward(kind, chosen, keep, grads, x, weights, rows, results)
            dg, out = dg.contiguous(), out.contiguous()
            bias_pairs: Any = (None, None)
            if needs[3] or needs[4]:
                pairs = (products.bias_gradients(kind, total) for total in dg.sum((0, 1)))
                bias_pairs = map(torch.stack, zip(*pairs, strict=True))
            grad_w_hh = None
            if needs[2]:
                parts = products.hidden_weight_gradient(kind, dg, out, rows)
                grad_w_hh = torch.stack([products.torch_order(kind, part) for part in parts])
            found = [
                products.input_gradient(kind, dg, weights.w_ih) if needs[0] else None,
                products.input_weight_gradient(kind, dg, x).view(joined.w_ih.shape) if needs[1] else None,
                grad_w_hh,
                *bias_pairs,
                grad_h0,
                grad_c0,
            ]
    return tuple(
        grad.contiguous() if needed and grad is not None else x.new_empty(0)
        for grad, needed in zip(found, needs, strict=True)
    )


def _filled(kind: Cell, out: Tensor, grads: Grads) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients as dense tensors: zeros where none is given."""
    grad_out, grad_hn, grad_cn = grads
    _, batch, directions, hidden = out.shape
    state = (directions, batch, hidden)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
    grad_hn = out.new_zeros(state) if grad_hn is None else grad_hn.contiguous()
    if not kind.has_c:
        return grad_out, grad_hn, None
    return grad_out, grad_hn, out.new_zeros(state) if grad_cn is None else grad_cn.contiguous()


_LAYER = (
    "Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? h0, Tensor? c0, Tensor? lengths,"
    " Tensor? reset"
)
_OPTIONS = "str cell, str keep, str backend"
_forward_operator = torch.library.custom_op(
    "tilefit::recurrent",
    _forward,
    mutates_args=(),
    schema=f"({_LAYER}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "tilefit::recurrent_backward",
    _backward,
    mutates_args=(),
    schema=(
        f"(Tensor? grad_out, Tensor? grad_hn, Tensor? grad_cn, {_LAYER}, Tensor out, Tensor gates, Tensor c,"
        f" {_OPTIONS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)


@_forward_operator.register_fake
def _(x: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, cell, keep, _ = rest
    directions, _, hidden = w_hh.shape
    out = x.new_empty((x.shape[0], x.shape[1], directions, hidden))
    state = (directions, x.shape[1], hidden)
    c_n = x.new_empty(state if CELLS[cell].has_c else 0)
    return out, x.new_empty(state), c_n, *_nothing_saved(CELLS[cell], out, keep)


@_backward_operator.register_fake
def _(grad_out: Any, grad_hn: Any, grad_cn: Any, *rest: Any) -> tuple[Tensor, ...]:
    like = partial(torch.empty_like, memory_format=torch.contiguous_format)
    both = zip(rest[:_DIFFERENTIABLE], rest[-1], strict=True)
    return tuple(like(t) if needed and t is not None else rest[0].new_empty(0) for t, needed in both)


def reference_gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Gradients that can be differentiated again: autograd's of the reference's outputs."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    both = [output for output, _ in pairs], wanted, [grad for _, grad in pairs]
    return iter(torch.autograd.grad(*both, create_graph=True, materialize_grads=True))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, _, gates, c = output
    ctx.mark_non_differentiable(gates, c)
    ctx.save_for_backward(*inputs[:9], out, gates, c)
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, *grads: Any) -> Any:
    inputs = ctx.saved_tensors[:9]
    needs = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    grads = grads[:3]
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.needs_input_grad)
    if torch.is_grad_enabled():
        wanted = [t for t, needed in zip(inputs, needs, strict=False) if needed]
        cell = CELLS[ctx.options[0]]
        x, *joined = inputs[:5]
        outputs = passes.differentiable(cell, x, layer_weights(cell, Joined(*joined)), Rows(*inputs[5:]))
        found = reference_gradients(outputs, grads, wanted)
        by_argument = [next(found) if needed else None for needed in needs]
    else:
        all_found = _backward_operator(*grads, *ctx.saved_tensors, *ctx.options, needs)
        by_argument = [grad if needed else None for grad, needed in zip(all_found, needs, strict=True)]
    return (*by_argument, *(None,) * (len(ctx.needs_input_grad) - _DIFFERENTIABLE))


_forward_operator.register_autograd(_operator_backward, setup_context=_setup)
