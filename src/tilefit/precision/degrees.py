"""How a result grows when the gradients it is made of are scaled: by which power of the scale.

A gradient has degree 1. What has degree 1 again commutes with the loss scale, and may be written back to a
scaled gradient; a ratio of two norms has degree 0, a clamped one none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilefit.precision.tensors import holds_zeros

#: Operations whose result grows as their inputs do, all of which must grow alike.
_KEEP = frozenset(
    """view _unsafe_view reshape _reshape_alias flatten ravel alias detach clone _to_copy to copy _copy
    contiguous t transpose permute slice select narrow squeeze unsqueeze expand expand_as split
    split_with_sizes chunk unbind as_strided cat stack neg sum mean cumsum abs relu norm linalg_vector_norm
    max min amax amin maximum minimum view_as_real view_as_complex pin_memory index_select gather lift_fresh
    where allreduce reduce_scatter allgather
    broadcast reduce _reduce_scatter_base _allgather_base all_reduce wait_tensor""".split()
)
#: Of these, whose elements are those of several tensors, zeros grow as whatever stands beside them.
_CHOICES = frozenset(("where", "cat", "stack"))
_PRODUCTS = frozenset("mul mm bmm mv dot vdot ger matmul".split())
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "sign": 0.0, "sgn": 0.0}

#: The degree of a tensor that is not made out of gradients: None; of one that is, its degree, or NAN for
#: none.
DegreeOf = Callable[[Tensor], float | None]
NAN = float("nan")


def base_name(name: str) -> str:
    """``mul`` for ``mul_``, ``_foreach_mul`` and ``_foreach_mul_``."""
    return name.removeprefix("_foreach_").rstrip("_")


def keeps_no_value(name: str) -> bool:
    """Whether an operation's result has no more than the shape of its arguments: ``zeros_like``."""
    return name.startswith("new_") or name.endswith("_like")


def result_degree(name: str, args: tuple[Any, ...], degree_of: DegreeOf) -> float:
    """The degree of an operation's result; NaN where it does not grow with a power of the scale.

    Args:
        name: The operation, such as ``mul_``.
        args: Its positional arguments, at least one tensor among which is made out of gradients.
        degree_of: The degree of each tensor.
    """
    name = base_name(name)
    if name in _CHOICES:
        args = tuple(arg for arg in _flat(args) if not isinstance(arg, Tensor) or not holds_zeros(arg))
    if name in _KEEP:
        return _alike([d for arg in args for d in _degrees(arg, degree_of)])
    first, second = (_alike(_degrees(arg, degree_of)) for arg in (*args[:2], 0.0)[:2])
    if name in _PRODUCTS:
        return first + second
    if name in ("div", "true_divide"):
        return first - second
    if name in ("add", "sub", "lerp"):
        if isinstance(args[1], int | float):
            return first if args[1] == 0 else NAN
        return first if first == second else NAN
    if name == "pow":
        return first * args[1] if isinstance(args[1], int | float) else NAN
    if name == "masked_fill":
        return first if not any(args[2:]) else NAN
    return first * _POWERS[name] if name in _POWERS else NAN


def _degrees(argument: Any, degree_of: DegreeOf) -> list[float]:
    """The degrees of the floating-point tensors of an argument; 0 for one that is not made out of
    gradients."""
    values = argument if isinstance(argument, list | tuple) else [argument]
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return [0.0 if (degree := degree_of(tensor)) is None else degree for tensor in tensors]


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,))]


def _alike(degrees: list[float]) -> float:
    """The one degree that all have; 0 for none at all."""
    return degrees[0] if len(set(degrees)) == 1 else NAN if degrees else 0.0
