"""Rows of tables: what an H200 and an H100 took for random rows (`benchmarks/row_access.py`)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilefit.capture import capture
from tilefit.cost import estimate
from tilefit.ops import BACKWARD_WEIGHT, Growth, Streaming
from tilefit.ops.dtypes import size_bytes


def op(
    function: str, table: int, picked: int, inner: int, dtype: str = "fp32", kernels: int = 16
) -> Streaming:
    moved = picked * inner * size_bytes(dtype)
    role = "embedding" if function.startswith("embedding") else "indexing"
    return Streaming(
        role, picked * inner, moved, moved, dtype,
        inner=inner, kernels=kernels, function=function, picked=picked, table=table,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "table", "picked", "inner", "dtype", "h200_us", "h100_us"),
    [
        # A block for each row, whatever its length up to 4 KiB.
        ("embedding", 4_000, 1_000_000, 8, "fp32", 603, 603),
        ("embedding", 4_000, 1_000_000, 256, "bf16", 602, 603),
        # One by one.
        ("index_add", 60_000, 60_000, 256, "fp32", 116, 120),
        ("index_add", 60_000, 60_000, 256, "bf16", 134, 135),
        ("scatter_add", 60_000, 60_000, 256, "fp32", 56, 58),
        ("scatter_add", 60_000 * 256, 60_000 * 256, 1, "fp32", 127, 129),
        # Sorted; few rows get many additions each, one after another.
        ("index_put", 60_000, 60_000, 64, "fp32", 82, 85),
        ("index_put", 200, 60_000, 64, "fp32", 290, 293),
        ("index_put", 200, 1_000_000, 64, "fp32", 3917, 3918),
        # Two blocks for each row that is met; the table is zeroed.
        ("embedding_dense_backward", 60_000, 60_000, 64, "fp32", 164, 170),
        ("embedding_dense_backward", 1_000_000, 1_000_000, 256, "fp32", 3463, 3654),
        ("embedding_dense_backward", 1_000_000, 500, 256, "fp32", 243, 335),
    ],
)
def test_rows_take_about_what_was_measured(
    function: str, table: int, picked: int, inner: int, dtype: str, h200_us: float, h100_us: float
) -> None:
    made = op(function, table, picked, inner, dtype, kernels=16 if function == "index_put" else 1)
    assert estimate(made, "h200").time_s == pytest.approx(h200_us * 1e-6, rel=0.3)
    assert estimate(made, "h100-sxm").time_s == pytest.approx(h100_us * 1e-6, rel=0.3)


@given(
    st.sampled_from(["index_add", "scatter_add", "index_put", "embedding_dense_backward"]),
    st.integers(3_100, 500_000),
    st.integers(1, 500_000),
    st.sampled_from([4, 64, 1000]),
    st.sampled_from(["a100-sxm-80gb", "t4", "rtx-4090"]),
)
def test_more_rows_never_take_less(function: str, picked: int, table: int, inner: int, gpu: str) -> None:
    few = estimate(op(function, table, picked, inner), gpu)
    many = estimate(op(function, table, 2 * picked, inner), gpu)
    assert 0 < few.low_s <= few.time_s <= few.high_s
    assert few.time_s <= many.time_s * 1.0001


def test_a_captured_step_says_what_is_picked() -> None:
    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 8)

        def forward(self, numbers: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            rows = self.table(numbers).flatten(0, 1)
            return self.head(rows.new_zeros(300, 64).index_add(0, at, rows))

    numbers = torch.zeros(8, 32, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
    step = capture(Tokens(), numbers)
    found = {entry.op.function: entry.op for entry in step.ops if getattr(entry.op, "picked", 0)}
    sizes = {name: (each.picked, each.table, each.inner) for name, each in found.items()}
    assert sizes["embedding"] == sizes["embedding_dense_backward"] == (256, 5000, 64)
    assert sizes["index_add"] == (256, 300, 64)


def test_a_larger_batch_picks_more_rows_of_the_same_table() -> None:
    growth = Growth(4.0, BACKWARD_WEIGHT, read_bytes=(0, 1000))
    grown = op("embedding_dense_backward", 5000, 256, 64).on_batch(growth)
    assert (grown.picked, grown.table) == (1024, 5000)
    stays = growth._replace(read_bytes=(1000, 0))
    assert op("index_put", 169, 2401, 4).on_batch(stays).picked == 2401


@pytest.mark.parametrize(
    ("name", "table", "picked", "bag", "width", "h100_us"),
    [
        ("aten._embedding_bag", 100_000, 262_144, 1, 64, 200),
        ("aten._embedding_bag", 1_000, 262_144, 32, 16, 16),
        ("aten._embedding_bag_backward", 100_000, 262_144, 32, 64, 259),
        ("aten._embedding_bag_backward", 1_000, 8_192, 4, 16, 89),
    ],
)
def test_bags_of_rows(name: str, table: int, picked: int, bag: int, width: int, h100_us: float) -> None:
    class Bags(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.empty(table, width))

        def forward(self, at: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding_bag(at, self.table, starts)

    with torch.device("meta"):
        model = Bags()
        numbers = torch.empty(picked, dtype=torch.int64), torch.empty(picked // bag, dtype=torch.int64)
    step = capture(model, numbers)
    (found,) = (entry.op for entry in step.ops if entry.name.startswith(name) and name[-1] == entry.name[-1])
    assert estimate(found, "h100-sxm").time_s == pytest.approx(h100_us * 1e-6, rel=0.4)


def test_additions_to_the_same_row_wait_for_each_other() -> None:
    few, many = op("scatter_add", 4, 262_144, 256, "fp16"), op("scatter_add", 1_000, 262_144, 256, "fp16")
    assert estimate(few, "h100-sxm").time_s == pytest.approx(2070e-6, rel=0.4)
    assert estimate(few, "h100-sxm").time_s > 5 * estimate(many, "h100-sxm").time_s
