"""Functions that work element by element, as symbolic tracing finds them.

They make some finite number of a zero, everywhere the same, and pass a zero gradient on as zero. What is
padded with zeros may go through them: the next layer multiplies whatever they made of the padding by zero.
That number is computed when a module is traced, and must be a small one: infinity in any element type, times
zero, would be no number.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from tilefit.fixes.changes.calls import offered, still

#: Elementwise, without random numbers, finite and with a finite derivative at zero; wherever they are found.
_NAMES = frozenset(
    """abs add add_ celu clamp cos elu erf exp gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish
    mul mul_ neg relu relu6 relu_ selu sigmoid sigmoid_ silu sin softplus softsign square sub sub_ tanh tanh_
    tanhshrink""".split()
)
_OPERATORS = "mul add sub neg imul iadd isub".split()
_FUNCTIONS = frozenset((*offered(_NAMES).values(), *(getattr(operator, name) for name in _OPERATORS)))
#: Dropout with a probability of zero.
ELEMENTWISE_MODULES: tuple[type[nn.Module], ...] = tuple(
    getattr(nn, name)
    for name in """ReLU ReLU6 GELU SiLU Mish ELU CELU SELU LeakyReLU Hardtanh Hardswish Hardsigmoid Sigmoid
    Tanh Softplus Softsign LogSigmoid Tanhshrink Identity Dropout""".split()
)
#: ``x ** n`` and ``x / n`` for a number n of at least 1.
_WITH_NUMBER: frozenset[Any] = frozenset(
    [torch.pow, operator.pow, "pow", operator.truediv, torch.div, "div", torch.true_divide]
)
#: Methods that keep every element.
KEEPING_METHODS = frozenset("clone contiguous float half bfloat16".split())
#: Whether all that padding may go through is PyTorch's, however a ``forward`` looks it up.
are_torchs = still(offered(_NAMES | KEEPING_METHODS))


#: What the padding may become on its way: far from the largest number of any element type.
_LARGEST = 64.0


def of_padding(node: fx.Node, module: nn.Module | None, padding: Mapping[fx.Node, float]) -> float | None:
    """What a call makes of padding; None if it is no elementwise function, or makes too much of it.

    Args:
        node: A call of a function, a method or a module.
        module: The module.
        padding: The padding of each tensor among its arguments.
    """
    if not (isinstance(module, ELEMENTWISE_MODULES) if module is not None else _is_elementwise(node)):
        return None
    with torch.no_grad():
        found = 0.0
        # In a pool zeros may have joined what it was.
        for each in (dict.fromkeys(padding, 0.0), padding):
            scalars = partial(_scalar, each)
            args, kwargs = fx.map_arg(node.args, scalars), fx.map_arg(node.kwargs, scalars)
            if module is not None:
                value = module(*args, **kwargs)
            elif node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
            found = float(value)
            if not abs(found) <= _LARGEST:
                return None
    return found


def _scalar(padding: Mapping[fx.Node, float], node: fx.Node) -> torch.Tensor:
    return torch.tensor(padding[node], dtype=torch.float64, device="cpu")


def _is_elementwise(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in _WITH_NUMBER:
        number = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        return isinstance(node.args[0], fx.Node) and isinstance(number, int | float) and number >= 1
    return node.target in (_FUNCTIONS if node.op == "call_function" else _NAMES)
