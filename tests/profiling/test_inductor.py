"""Kernels of compiled graphs get the modules they were made of."""

from __future__ import annotations

import pytest

from tilefit.profiling.attribution import Call
from tilefit.profiling.inductor import _base, _Origin, _path, _place


def call(name: str, *, replayed: bool = False) -> Call:
    return Call(name, "forward", None, "", 0, graph="g", replayed=replayed)


KERNELS = [
    _Origin("triton_poi_fused_gelu_0", "h.0", "m.py:1"),
    _Origin("addmm", "h.0.down", "m.py:2"),
    _Origin("triton_poi_fused_gelu_0", "h.1", "m.py:1"),
    _Origin("addmm", "h.1.down", "m.py:2"),
    _Origin("triton_per_fused_sum_1", None, ""),
]


def test_a_kernel_that_is_called_again_belongs_to_the_next_layer() -> None:
    calls = [
        call(name)
        for name in (
            "triton_poi_fused_gelu_0", "aten::addmm", "triton_poi_fused_gelu_0", "aten::addmm",
            "triton_per_fused_sum_1",
        )
    ]  # fmt: skip
    _place(calls, KERNELS)
    assert [c.module for c in calls] == ["h.0", "h.0.down", "h.1", "h.1.down", ""]
    assert calls[3].source == "m.py:2"


def test_what_the_compiler_did_not_note_stays_unknown() -> None:
    calls = [call("aten::empty"), call("aten::addmm")]
    _place(calls, KERNELS)
    assert [c.module for c in calls] == [None, "h.0.down"]


def test_a_replayed_library_kernel_lies_between_its_neighbours() -> None:
    names = [
        "triton_poi_fused_gelu_0",
        "nvjet_a",
        "splitKreduce_kernel",
        "triton_poi_fused_gelu_0",
        "nvjet_b",
    ]
    calls = [call(name, replayed=True) for name in names]
    _place(calls, KERNELS)
    assert [c.module for c in calls] == ["h.0", "h.0.down", "h.0.down", "h.1", "h.1.down"]


def test_a_graph_within_a_module_names_paths_below_it() -> None:
    (inner,) = [call("aten::addmm")]
    inner.graph_module = "encoder"
    _place([inner], KERNELS)
    assert inner.module == "encoder.h.0.down"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("L['self']", ""),
        ("L['self'].head", "head"),
        ("L['self']._modules['h']._modules['0'].mlp", "h.0.mlp"),
        ("L['self'].transformer.h[3].attn", "transformer.h.3.attn"),
        ("L['model']._orig_mod.fc", "fc"),
        ("fc.inner", "fc.inner"),
    ],
)
def test_paths(name: str, path: str) -> None:
    assert _path(name) == path


@pytest.mark.parametrize(
    ("kernel", "base"),
    [
        ("extern_kernels.addmm", "addmm"),
        ("extern_kernels.bias_addmm", "addmm"),
        ("torch.ops.aten._scaled_dot_product_flash_attention.default", "_scaled_dot_product_flash_attention"),
        ("aten.randint.low_out", "randint"),
    ],
)
def test_names_of_library_calls(kernel: str, base: str) -> None:
    assert _base(kernel) == base
