"""One recurrent layer as an operator of PyTorch: ``tilefit::recurrent``.

The operator is what ``torch.compile``, ``torch.export`` and tracing see. An eager call goes around it,
through an autograd function over the same two functions: the machinery of operators takes the time of tens of
steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefit.rnn import cudnn, products, reference
from tilefit.rnn.cells import CELLS, Cell
from tilefit.rnn.dispatch import CUDNN, PERSISTENT, backend_of_layer, persistent
from tilefit.rnn.states import final

#: What a forward pass keeps for backward: nothing; outputs and cell states; the gates too.
NOTHING, STATES, ALL = "nothing", "states", "all"

#: x, w_ih, w_hh, b_ih, b_hh, h0 and c0: the arguments that can have gradients.
_DIFFERENTIABLE = 7


def recurrent(
    x: Tensor,
    weights: Sequence[Sequence[Tensor]],
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    *,
    cell: Cell,
    recompute: bool = False,
    backend: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one recurrent layer, in all its directions, over a sequence.

    Args:
        x: [T, B, I]; its element type is that of the computation.
        weights: Per direction w_ih [G * H, I], w_hh [G * H, H] and, with bias, b_ih and b_hh [G * H], in
            torch's gate order and of any floating-point type.
        h0, c0: Initial state, [D, B, H]; None for zeros.
        lengths: int32[B], steps of each row; None: all T.
        reset: uint8[T, B]: where not 0, the state is zero before the step.
        cell: Which recurrence.
        recompute: Save outputs and cell states for backward, and compute the gates again from them.
        backend: One that can run this, see :func:`tilefit.rnn.dispatch.choose`; empty, which only compiled
            code may give: chosen when it runs.

    Returns:
        Output [T, B, D, H] (0 beyond a row's length), final hidden and final cell state [D, B, H] (empty if
        the cell has none).
    """
    flat = [weight for direction in weights for weight in direction]
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, h0, c0, *flat)
    )
    keep = NOTHING if not needs_grad else STATES if recompute else ALL
    options = (cell.name, keep, backend)
    seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    transformed = torch._C._are_functorch_transforms_active()
    if needs_grad and not seen and not transformed:
        return _Layer.apply(x, h0, c0, lengths, reset, options, len(weights), *flat)  # type: ignore[no-untyped-call, no-any-return]
    joined = _joined(flat, len(weights), x.dtype)
    if transformed and not seen:
        return _differentiable(x, *joined, h0, c0, lengths, reset, cell.name)
    forward = _forward_operator if seen else _forward
    out, h_n, c_n, _, _ = forward(x, *joined, h0, c0, lengths, reset, *options)
    return out, h_n, c_n


_Joined = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _joined(flat: Sequence[Tensor], directions: int, dtype: torch.dtype) -> _Joined:
    """w_ih, w_hh, b_ih and b_hh with the directions as their first dimension."""
    kinds = len(flat) // directions
    if directions == 1:
        joined = [weight.unsqueeze(0) for weight in flat]
    else:
        joined = [torch.stack([*flat[kind::kinds]]) for kind in range(kinds)]
    if joined[0].dtype is not dtype:
        joined = [weight.to(dtype) for weight in joined]
    return (joined[0], joined[1], None, None) if kinds == 2 else (joined[0], joined[1], joined[2], joined[3])


def _forward(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    cell: str,
    keep: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kind = CELLS[cell]
    with products.precision(x):
        if backend == CUDNN:
            out, h_n, c_n = cudnn.forward(kind, x, w_ih, w_hh, b_ih, b_hh, h0, c0)
            return out, h_n, c_n, *_nothing_saved(kind, out, keep)
        xg, bias_n = products.project(kind, x, w_ih, b_ih, b_hh)
        start_h, start_c = (h0, c0) if backend == PERSISTENT else _initial(x, w_hh, kind, h0, c0)
        result = _passes(backend).forward(
            kind, xg, w_hh, bias_n, start_h, start_c, lengths, reset, save=keep != NOTHING
        )
    out = result.out.contiguous()
    return (
        out,
        final(out, h0, lengths) if result.h_n is None else result.h_n.contiguous(),
        result.c_n.contiguous() if kind.has_c else x.new_empty(0),
        result.gates.contiguous() if keep == ALL and kind.saved else x.new_empty(0),
        result.c.contiguous() if keep != NOTHING and kind.has_c else x.new_empty(0, dtype=result.c.dtype),
    )


def _passes(backend: str) -> ModuleType:
    """Where the forward and backward functions of a backend are."""
    return persistent() if backend == PERSISTENT else reference


def _initial(
    x: Tensor, w_hh: Tensor, kind: Cell, h0: Tensor | None, c0: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The initial state as tensors: zeros where none is given."""
    if h0 is None or (kind.has_c and c0 is None):
        zeros = x.new_zeros((w_hh.shape[0], x.shape[1], w_hh.shape[-1]))
        h0 = zeros if h0 is None else h0
        c0 = zeros if c0 is None else c0
    return h0, c0 if kind.has_c else None


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


def _backward(
    grad_out: Tensor | None,
    grad_hn: Tensor | None,
    grad_cn: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    out: Tensor,
    gates: Tensor,
    c: Tensor,
    cell: str,
    keep: str,
    backend: str,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, w_ih, w_hh, b_ih, b_hh, h0 and c0; None where not needed."""
    kind = CELLS[cell]
    grad_cn = grad_cn if kind.has_c else None
    if backend != PERSISTENT:  # to its kernels, None is zeros
        state = (out.shape[2], out.shape[1], out.shape[3])
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_hn = out.new_zeros(state) if grad_hn is None else grad_hn
        grad_cn = out.new_zeros(state) if grad_cn is None and kind.has_c else grad_cn
    grad_out, grad_hn, grad_cn = (g if g is None else g.contiguous() for g in (grad_out, grad_hn, grad_cn))
    needs_x, needs_w_ih, needs_w_hh, needs_b_ih, needs_b_hh, needs_h0, needs_c0 = needs
    with products.precision(x):
        if backend == CUDNN:
            assert grad_out is not None
            assert grad_hn is not None
            return cudnn.backward(kind, grad_out, grad_hn, grad_cn, x, w_ih, w_hh, b_ih, b_hh, h0, c0, needs)
        if keep == STATES and kind.saved:
            xg, bias_n = products.project(kind, x, w_ih, b_ih, b_hh)
            gates = products.rebuilt_gates(kind, xg, w_hh, bias_n, out, h0, lengths, reset)
            del xg
        start_h, start_c = (h0, c0) if backend == PERSISTENT else _initial(x, w_hh, kind, h0, c0)
        backward: Any = _passes(backend).backward
        dg, grad_h0, grad_c0 = backward(
            kind, grad_out, grad_hn, grad_cn, (out, gates, c), w_hh, start_h, start_c, lengths, reset
        )
        dg = dg.contiguous()
        biases = products.bias_gradients(kind, dg) if needs_b_ih or needs_b_hh else (None, None)
        return [
            products.input_gradient(kind, dg, w_ih) if needs_x else None,
            products.input_weight_gradient(kind, dg, x, w_ih) if needs_w_ih else None,
            products.hidden_weight_gradient(kind, dg, out, h0, lengths, reset, w_hh) if needs_w_hh else None,
            biases[0] if needs_b_ih else None,
            biases[1] if needs_b_hh else None,
            grad_h0 if needs_h0 else None,
            grad_c0 if needs_c0 else None,
        ]


def _forward_of_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`_forward`, whose backend is chosen now, when the sizes are known."""
    *inputs, cell, keep, backend = arguments
    x, _, w_hh, *_, lengths, reset = inputs
    chosen = backend_of_layer(x, w_hh, CELLS[cell], lengths, reset, keep != NOTHING, backend)
    resolved: Any = (*inputs, cell, keep, chosen)
    return _forward(*resolved)


def _backward_of_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """:func:`_backward` by the backend of the forward pass; with empty tensors where it returns None."""
    *inputs, cell, keep, backend, needs = arguments
    x, _, w_hh, *_, lengths, reset, _, _, _ = inputs[3:]
    chosen = backend_of_layer(x, w_hh, CELLS[cell], lengths, reset, True, backend)
    resolved: Any = (*inputs, cell, keep, chosen, needs)
    gradients = _backward(*resolved)
    return tuple(x.new_empty(0) if grad is None else grad.contiguous() for grad in gradients)


_LAYER = (
    "Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? h0, Tensor? c0, Tensor? lengths,"
    " Tensor? reset"
)
_OPTIONS = "str cell, str keep, str backend"
_forward_operator = torch.library.custom_op(
    "tilefit::recurrent",
    _forward_of_operator,
    mutates_args=(),
    schema=f"({_LAYER}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "tilefit::recurrent_backward",
    _backward_of_operator,
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
    needs = rest[-1]
    x = rest[0]
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if needed and t is not None
        else x.new_empty(0)
        for t, needed in zip(rest[:_DIFFERENTIABLE], needs, strict=True)
    )


def _differentiable(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer by operations that PyTorch differentiates and transforms itself."""
    kind = CELLS[cell]
    xg, bias_n = products.project(kind, x, w_ih, b_ih, b_hh)
    start_h, start_c = _initial(x, w_hh, kind, h0, c0)
    result = reference.forward(kind, xg, w_hh, bias_n, start_h, start_c, lengths, reset, save=False)
    return result.out, final(result.out, h0, lengths), result.c_n


def _reference_gradients(
    grads: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    cell: str,
) -> Iterator[Tensor]:
    """Gradients that can be differentiated again: autograd's of the reference, run anew."""
    outputs = _differentiable(x, w_ih, w_hh, b_ih, b_hh, h0, c0, lengths, reset, cell)
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        wanted,
        [grad for _, grad in pairs],
        create_graph=True,
        materialize_grads=True,
    )
    return iter(found)


class _Layer(torch.autograd.Function):
    """The operator without its machinery; its weights are those of the module, one by one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        options: tuple[str, str, str],
        directions: int,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        joined = _joined(flat, directions, x.dtype)
        out, h_n, c_n, gates, c = _forward(x, *joined, h0, c0, lengths, reset, *options)
        ctx.save_for_backward(x, *joined, h0, c0, lengths, reset, out, gates, c, *flat)
        ctx.options, ctx.directions = options, directions
        ctx.set_materialize_grads(False)
        return out, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, *joined), (h0, c0, lengths, reset), results, flat = _parts(ctx.saved_tensors)
        needs_x, needs_h0, needs_c0, _, _, _, _, *needs_flat = ctx.needs_input_grad
        nothing = (None,) * 4
        if all(grad is None for grad in grads):
            return (None, None, None, *nothing, *(None for _ in flat))
        if torch.is_grad_enabled():
            needs = [needs_x, needs_h0, needs_c0, *needs_flat]
            wanted = [t for t, needed in zip((x, h0, c0, *flat), needs, strict=True) if needed]
            joined = _joined(flat, ctx.directions, x.dtype)
            found = _reference_gradients(grads, wanted, x, *joined, h0, c0, lengths, reset, ctx.options[0])
            first, second, third, *rest = (next(found) if needed else None for needed in needs)
            return (first, second, third, *nothing, *rest)
        kinds = len(flat) // ctx.directions
        needs_kinds = [any(needs_flat[kind::kinds]) for kind in range(kinds)] + [False] * (4 - kinds)
        needs = [needs_x, *needs_kinds, needs_h0, needs_c0]
        arguments: Any = (*grads, x, *joined, h0, c0, lengths, reset, *results, *ctx.options, needs)
        gradients: Any = _backward(*arguments)
        grad_x, *grad_kinds, grad_h0, grad_c0 = gradients
        grad_flat = (
            grad_kinds[index % kinds][index // kinds].to(weight.dtype) if needed else None
            for index, (weight, needed) in enumerate(zip(flat, needs_flat, strict=True))
        )
        return (grad_x, grad_h0, grad_c0, *nothing, *grad_flat)


def _parts(saved: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """(x and the joined weights), (state, lengths, reset), (results), weights."""
    return saved[:5], saved[5:9], saved[9:12], saved[12:]


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
        layer: Any = (*inputs, ctx.options[0])
        found = _reference_gradients(grads, wanted, *layer)
        by_argument = [next(found) if needed else None for needed in needs]
    else:
        all_found = _backward_operator(*grads, *ctx.saved_tensors, *ctx.options, needs)
        by_argument = [grad if needed else None for grad, needed in zip(all_found, needs, strict=True)]
    return (*by_argument, *(None,) * (len(ctx.needs_input_grad) - _DIFFERENTIABLE))


_forward_operator.register_autograd(_operator_backward, setup_context=_setup)
