from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from tilefit.measure import suites
from tilefit.ops import BACKWARD_DATA, FORWARD, Attention, Conv, Conv2d, Gemm


def test_deepbench_has_its_published_shapes() -> None:
    gemms, convs, layers = suites.deepbench_gemm(), suites.deepbench_conv(), suites.deepbench_rnn()
    assert (len(gemms), len(convs), len(layers)) == (160, 3 * 94, 3 * 53)


def test_deepbench_products_are_turned_to_row_major() -> None:
    # The first line of DeepBench's list: m = 1760 outputs, n = 16 samples, k = 1760, A and B not transposed.
    first = suites.deepbench_gemm()[0]
    assert first.op == Gemm(16, 1760, 1760, layout="NN")
    assert first.published_ms is not None
    assert first.published_ms["v100_mixed"] == 0.02
    assert first.published_ms["t4_mixed"] == pytest.approx(2 * 16 * 1760 * 1760 / 1.625e12 * 1e3)


def test_deepbench_convolutions_have_the_published_output_sizes() -> None:
    assert [row["out_w"] for row in suites._table("conv.csv")] == [
        str(entry.op.output_size[1])  # type: ignore[attr-defined]
        for entry in suites.deepbench_conv()
        if entry.op.direction == FORWARD  # type: ignore[attr-defined]
    ]


def test_published_times_belong_to_their_pass() -> None:
    row = suites._table("conv.csv")[0]
    forward, data, weight = suites.deepbench_conv()[:3]
    assert forward.published_ms is not None
    assert forward.published_ms["v100_mixed"] == float(row["v100_mixed_fwd_ms"])
    assert data.published_ms is not None
    assert "v100_mixed" not in data.published_ms, "not published for the first layer"
    assert weight.published_ms is not None
    assert weight.published_ms["p100_fp16"] == float(row["p100_fp16_wgrad_ms"])


def test_linear_layers_are_split_into_their_three_products() -> None:
    forward, data, weight = suites.linear_passes(16384, 50257, 768, "bf16")
    assert forward == Gemm(16384, 50257, 768, layout="TN")
    assert data == Gemm(16384, 768, 50257, layout="NN")
    assert weight == Gemm(50257, 768, 16384, layout="NT")
    assert forward.flop == data.flop == weight.flop


def test_real_models_bring_their_known_layers() -> None:
    pairs, rows = suites.linears("gpt2")
    assert (50257, 768) in pairs
    assert rows == (1024,)
    resnet = suites.convolutions()["resnet50"]
    assert Conv2d(1, 3, 64, 224, 7, 2, 3) in resnet
    assert len(suites.convolutions()) >= 20


def test_the_grid_of_products_covers_what_matters() -> None:
    ops = [entry.op for entry in islice(suites.gemms(0), 4000)]
    assert len(set(ops)) == 4000
    assert all(isinstance(op, Gemm) for op in ops)
    share = {k: v / 4000 for k, v in Counter(op.dtype for op in ops).items()}
    assert share["bf16"] > 0.5
    assert min(share.values()) > 0.02
    assert {op.layout for op in ops} == {"TN", "NN", "NT", "TT"}  # type: ignore[attr-defined]
    odd = sum(any(o.leading_dimension % 2 for o in op.operands) for op in ops)  # type: ignore[attr-defined]
    assert 0.1 < odd / 4000 < 0.5
    rows = [op.m for op in ops]  # type: ignore[attr-defined]
    assert min(rows) == 1
    assert max(rows) > 50_000


@pytest.mark.parametrize(
    ("generator", "kind"),
    [
        (suites.gemms, Gemm),
        (suites.convs, Conv),
        (suites.attentions, Attention),
    ],
)
def test_a_seed_gives_the_same_shapes_and_another_seed_others(generator, kind) -> None:  # type: ignore[no-untyped-def]
    first = [entry.op for entry in islice(generator(1), 60)]
    assert first == [entry.op for entry in islice(generator(1), 60)]
    assert len(set(first) & {entry.op for entry in islice(generator(2), 60)}) < 20
    assert all(isinstance(op, kind) for op in first)


def test_convolutions_come_with_their_gradients() -> None:
    directions = Counter(entry.op.direction for entry in islice(suites.convs(1), 3000))  # type: ignore[attr-defined]
    assert len(directions) == 3
    assert min(directions.values()) > 800
    no_image_gradient = [
        entry.op
        for entry in islice(suites.convs(1), 3000)
        if entry.op.in_channels <= 4 and entry.op.direction == BACKWARD_DATA  # type: ignore[attr-defined]
    ]
    assert no_image_gradient == []


def test_fp8_and_int8_products_are_ones_pytorch_runs() -> None:
    for entry in islice(suites.gemms(3), 3000):
        op = entry.op
        assert isinstance(op, Gemm)
        if op.dtype == "fp8":
            assert (op.n % 16, op.k % 16, op.layout, op.batch, op.bias) == (0, 0, "TN", 1, False)
        if op.dtype == "int8":
            assert op.m > 16
            assert (op.n % 8, op.k % 8, op.batch, op.bias) == (0, 0, 1, False)
