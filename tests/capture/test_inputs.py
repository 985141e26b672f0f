"""Inputs by specification."""

from __future__ import annotations

import pytest
import torch

from tilefit.capture.inputs import make, parse_inputs
from tilefit.errors import UsageError


def test_named_inputs_are_a_mapping() -> None:
    inputs = parse_inputs(["input_ids: int64[16,1024]", "mask:bool[16, 1024]"])
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in inputs.items()} == {
        "input_ids": ((16, 1024), torch.int64, "meta"),
        "mask": ((16, 1024), torch.bool, "meta"),
    }


def test_inputs_without_names_are_positional_and_a_scalar_has_no_sizes() -> None:
    inputs = parse_inputs(["bf16[2,3]", "float64[]", "half[4]", "long[1]", "double[2]", "fp8[5]"])
    assert [(tuple(t.shape), t.dtype) for t in inputs] == [
        ((2, 3), torch.bfloat16), ((), torch.float64), ((4,), torch.float16), ((1,), torch.int64),
        ((2,), torch.float64), ((5,), torch.float8_e4m3fn),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["int64"], "cannot read the input"),
        (["x: int64(2,3)"], "cannot read the input"),
        (["2x: int64[2]"], "cannot read the input"),
        (["x: int65[2,3]"], "unknown element type 'int65'"),
        (["x: int64[2,a]"], "not positive whole numbers"),
        (["x: int64[2,0]"], "not positive whole numbers"),
        (["x: int64[2,-1]"], "not positive whole numbers"),
        (["x: int64[2,,3]"], "not positive whole numbers"),
        (["x: int64[2]", "int64[2]"], "some have none"),
        (["x: int64[2]", "x: int64[3]"], "given twice"),
    ],
)
def test_a_wrong_specification_is_told(specs: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_inputs(specs)


def test_the_known_element_types_are_listed() -> None:
    with pytest.raises(UsageError) as caught:
        parse_inputs(["x: int65[2]"])
    assert "bfloat16" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_real_inputs_are_harmless_values(dtype: torch.dtype) -> None:
    values = make((100,), dtype, "cpu")
    assert values.dtype == dtype
    if not dtype.is_floating_point:
        assert set(values.tolist()) <= {0, 1}  # a valid index into any table
    else:
        assert values.float().std() > 0.5
