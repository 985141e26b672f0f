from __future__ import annotations

from dataclasses import replace

import pytest

from builders import StepBuilder, gpt2
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Gemm
from tilefit.rules.layers import inner_sizes, linears, products


@pytest.mark.parametrize("conv1d", [False, True])
def test_a_layer_owns_its_three_products(conv1d: bool) -> None:
    b = StepBuilder()
    b.linear("fc", 512, 768, 3072, conv1d=conv1d)
    step = b.step()
    (layer,) = linears(step)
    assert (layer.in_features, layer.out_features) == (768, 3072)
    assert [step.ops[i].phase for i in layer.indices] == [FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA]


@pytest.mark.parametrize("conv1d", [False, True])
def test_resizing_is_what_the_resized_layer_would_run(conv1d: bool) -> None:
    steps = []
    for out in (3072, 3000):
        b = StepBuilder()
        b.linear("fc", 512, 768, out, conv1d=conv1d)
        steps.append(b.step())
    (layer,) = linears(steps[1])
    for index, op in products(steps[1], layer):
        resized = layer.resized(op, steps[1].ops[index].phase, 768, 3072)
        assert resized == steps[0].ops[index].op


def test_layers_of_one_size_in_one_module_are_told_apart_by_their_input() -> None:
    b = StepBuilder()
    for name in ("q", "k"):
        b.linear("attn", 512, 768, 768, weight=f"attn.{name}")
    q, k = linears(b.step())
    assert len(q.backward_weight) == len(k.backward_weight) == 1


def test_batched_products_of_activations_are_no_layers() -> None:
    b = StepBuilder(training=False)
    q = b.tensor(12, 512, 64)
    b.add(Gemm(512, 512, 64, layout="TN", batch=12), "attn", inputs=(q, q))
    assert linears(b.step()) == []


def test_sizes_given_by_the_data_are_not_the_designers() -> None:
    sizes = inner_sizes(linears(gpt2(vocabulary=50304)))
    assert {size for size, _ in sizes} == {768, 3072}


def test_a_data_gradient_made_elsewhere_belongs_to_the_layer_of_its_weight() -> None:
    b = StepBuilder()
    b.linear("cell.x", 512, 768, 768)
    step = b.step()
    ops = tuple(
        replace(entry, site=replace(entry.site, module="cell.h")) if entry.phase == BACKWARD_DATA else entry
        for entry in step.ops
    )
    (layer,) = linears(replace(step, ops=ops))
    assert (layer.module, len(layer.forward), len(layer.backward_data)) == ("cell.x", 1, 1)
