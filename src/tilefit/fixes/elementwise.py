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
import torch.nn.functional as F
from torch import fx, nn

from tilefit.fixes.calls import offered, still

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
#: Functions that do the same to every channel of an image, their first argument.
CHANNELWISE_FUNCTIONS: frozenset[Any] = frozenset(
    [
        F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
        F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
        F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
        F.interpolate, torch.clone,
    ]
)  # fmt: skip
CHANNELWISE_METHODS = frozenset("clone contiguous float half bfloat16".split())
_NAMES = {each.__name__ for each in (*_FUNCTIONS, *CHANNELWISE_FUNCTIONS)} | _METHODS | CHANNELWISE_METHODS
#: Whether all that padding may go through is PyTorch's, however a ``forward`` looks it up.
are_torchs = still(offered(_NAMES))


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
    return node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
