"""Functions that work element by element, as symbolic tracing finds them.

They make some finite number of a zero, everywhere the same, and pass a zero gradient on as zero. What is
padded with zeros may go through them: the next layer multiplies whatever they made of the padding by zero.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

#: Elementwise, without random numbers, finite and with a finite derivative at zero.
_FUNCTIONS: frozenset[Any] = frozenset(
    [
        F.relu, F.relu6, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.leaky_relu, F.hardtanh,
        F.hardswish, F.hardsigmoid, F.sigmoid, F.tanh, F.softplus, F.softsign, F.logsigmoid, F.tanhshrink,
        torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.sin, torch.cos, torch.erf, torch.exp,
        torch.square, torch.neg, torch.abs, torch.mul, torch.add, torch.sub, torch.clamp,
        operator.mul, operator.add, operator.sub, operator.neg, operator.imul, operator.iadd, operator.isub,
    ]
)  # fmt: skip
_METHODS = frozenset(
    "relu relu_ sigmoid sigmoid_ tanh tanh_ mul mul_ add add_ sub sub_ neg square exp abs clamp".split()
)
ELEMENTWISE_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid,
    nn.Tanhshrink, nn.Identity,
)  # fmt: skip
#: ``x ** n`` and ``x / n`` for a number n of at least 1.
_WITH_NUMBER: frozenset[Any] = frozenset(
    [torch.pow, operator.pow, "pow", operator.truediv, torch.div, "div", torch.true_divide]
)


def is_elementwise(node: fx.Node) -> bool:
    """Whether a call of a function or of a tensor's method is one of these."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in _WITH_NUMBER:
        number = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        return isinstance(node.args[0], fx.Node) and isinstance(number, int | float) and number >= 1
    return node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
