"""How results grow with the gradients they are made of: checked against scaling them."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import pytest
import torch
from torch import Tensor

from tilefit.precision.degrees import result_degree

G = torch.tensor([1.0, -2.0, 3.0])
NAN = float("nan")

CASES: list[tuple[str, tuple[object, ...], Callable[[Tensor], Tensor], float]] = [
    ("mul", (G, 2.0), lambda g: g * 2.0, 1),
    ("mul_", (G, G), lambda g: g * g, 2),
    ("div", (G, G), lambda g: g / g, 0),
    ("add", (G, G), lambda g: g + g, 1),
    ("add", (G, 0), lambda g: g + 0, 1),
    ("add", (G, 1.0), lambda g: g + 1.0, NAN),
    ("sub", (G, torch.ones(3)), lambda g: g - torch.ones(3), NAN),
    ("clamp", (G, -1.0, 1.0), lambda g: g.clamp(-1, 1), NAN),
    ("linalg_vector_norm", (G,), lambda g: g.norm(), 1),
    ("square", (G,), lambda g: g.square(), 2),
    ("pow", (G, 3), lambda g: g.pow(3), 3),
    ("rsqrt", (G.abs(),), lambda g: g.abs().rsqrt(), -0.5),
    ("reciprocal", (G,), lambda g: g.reciprocal(), -1),
    ("sign", (G,), lambda g: g.sign(), 0),
    ("sum", (G,), lambda g: g.sum(), 1),
    ("dot", (G, G), lambda g: g.dot(g), 2),
    ("cat", ([G, G],), lambda g: torch.cat([g, g]), 1),
    ("cat", ([G, torch.ones(3)],), lambda g: torch.cat([g, torch.ones(3)]), NAN),
    ("_foreach_mul_", ([G, G], 0.5), lambda g: g * 0.5, 1),
    ("masked_fill_", (G, G > 0, 0), lambda g: g.masked_fill(g > 0, 0), 1),
    ("masked_fill_", (G, G > 0, 5), lambda g: g.masked_fill(g > 0, 5), NAN),
    ("nan_to_num_", (G,), lambda g: g + 1, NAN),
]


@pytest.mark.parametrize(("name", "args", "function", "degree"), CASES, ids=lambda value: str(value)[:12])
def test_a_degree_is_the_power_of_the_scale(
    name: str, args: tuple[object, ...], function: Callable[[Tensor], Tensor], degree: float
) -> None:
    made_of_gradients = {id(G)} | {
        id(arg) for arg in args if isinstance(arg, Tensor) and arg.dtype == G.dtype
    }
    made_of_gradients -= {
        id(arg) for arg in args if isinstance(arg, Tensor) and torch.equal(arg, torch.ones(3))
    }
    found = result_degree(name, args, lambda tensor: 1.0 if id(tensor) in made_of_gradients else None)
    if isnan(degree):
        assert isnan(found)
        return
    assert found == degree
    # The scale is a power of two with a whole square root, so that this is exact.
    assert torch.equal(function(G * 16.0), function(G) * 16.0**degree)
