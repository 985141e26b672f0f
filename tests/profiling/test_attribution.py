"""Kernels are given to operations, modules, lines and phases; traces made by hand."""

from __future__ import annotations

from typing import Any

from tilefit.profiling.attribution import BACKWARD, AttributedStep, Call, attribute
from tilefit.profiling.trace import collect

Event = dict[str, Any]


class Hand:
    """A trace made by hand; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.number = 0

    def host(
        self, name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 9,
                "tid": tid,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )

    def kernel(
        self,
        launched: float,
        start: float,
        took: float,
        name: str = "k",
        tid: int = 1,
        call: str = "cudaLaunchKernel",
    ) -> None:
        self.number += 1
        self.host(call, launched, launched + 1, "cuda_runtime", tid, correlation=self.number)
        self.on_gpu(start, took, name, correlation=self.number)

    def on_gpu(self, start: float, took: float, name: str = "k", **args: Any) -> None:
        self.events.append(
            {
                "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": took,
                "args": {"device": 0, "stream": 7, **args},
            }
        )  # fmt: skip

    def steps(self) -> list[AttributedStep]:
        return attribute(collect(self.events, {}))

    def calls(self) -> list[Call]:
        return [call for step in self.steps() for call in step.calls]


def module(path: str, source: str = "model.py:3") -> str:
    return f"tilefit module {path} at {source}"


def test_an_operation_is_the_outermost_that_is_not_made_of_others() -> None:
    trace = Hand()
    trace.host(module("h.0.fc"), 0, 100)
    trace.host("aten::linear", 5, 90)
    trace.host("aten::addmm", 10, 80)
    trace.host("aten::copy_", 12, 20)
    trace.kernel(14, 30, 5, "copying")
    trace.kernel(40, 50, 20, "nvjet_tst_128x128_64x4_1x2_h_bz_TNT")
    (call,) = trace.calls()
    assert (call.name, call.module, call.source, call.phase) == (
        "aten::addmm",
        "h.0.fc",
        "model.py:3",
        "forward",
    )
    assert call.duration_ns == 25_000


def test_modules_nest_and_end() -> None:
    trace = Hand()
    trace.host(module(""), 0, 100)
    trace.host(module("a"), 10, 40)
    trace.host("aten::mul", 20, 30)
    trace.kernel(22, 200, 1)
    trace.host("aten::add", 50, 60)
    trace.kernel(52, 201, 1)
    trace.host("aten::sub", 110, 120)
    trace.kernel(112, 202, 1)
    assert [(call.name, call.module) for call in trace.calls()] == [
        ("aten::mul", "a"),
        ("aten::add", ""),
        ("aten::sub", None),
    ]


def test_the_backward_pass_has_the_site_of_the_last_forward_operation_of_its_number() -> None:
    trace = Hand()
    trace.host(module("fc", "model.py:7"), 0, 50)
    # Both carry 4: the transpose made node 3, the product then makes node 4.
    trace.host("aten::t", 2, 4, **{"Sequence number": 4, "Fwd thread id": 0})
    trace.host("aten::addmm", 10, 20, **{"Sequence number": 4, "Fwd thread id": 0})
    trace.host(module("other"), 60, 80)
    trace.host("aten::mul", 61, 62, **{"Sequence number": 5, "Fwd thread id": 0})
    node = {"Sequence number": 4, "Fwd thread id": 1}
    trace.host("autograd::engine::evaluate_function: AddmmBackward0", 100, 150, tid=2, **node)
    trace.host("AddmmBackward0", 101, 149, tid=2, **node)
    trace.host("aten::mm", 110, 120, tid=2)
    trace.kernel(112, 300, 10, tid=2)
    trace.host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 160, 170, tid=2)
    trace.host("torch::autograd::AccumulateGrad", 161, 169, tid=2)
    trace.host("aten::add_", 162, 165, tid=2)
    trace.kernel(163, 320, 2, tid=2)
    product, accumulated = trace.calls()
    assert (product.module, product.source, product.phase, product.node) == (
        "fc", "model.py:7", BACKWARD, "AddmmBackward0",
    )  # fmt: skip
    assert (accumulated.name, accumulated.module, accumulated.phase) == ("aten::add_", "fc", BACKWARD)


def test_two_forward_threads_with_the_same_numbers_are_told_apart_by_the_names() -> None:
    trace = Hand()
    for tid, path, name in ((1, "one", "aten::addmm"), (2, "two", "aten::mul")):
        trace.host(module(path), 0, 50, tid=tid)
        trace.host(name, 10, 20, tid=tid, **{"Sequence number": 4, "Fwd thread id": 0})
    for start, number, name in ((100, 7, "MulBackward0"), (200, 8, "AddmmBackward0")):
        node = {"Sequence number": 4, "Fwd thread id": number}
        trace.host(f"autograd::engine::evaluate_function: {name}", start, start + 50, tid=3, **node)
        trace.host("aten::mm", start + 5, start + 10, tid=3)
        trace.kernel(start + 6, start + 20, 1, tid=3)
    assert [call.module for call in trace.calls()] == ["two", "one"]


def test_a_forward_pass_within_the_backward_pass_is_recomputed() -> None:
    trace = Hand()
    node = {"Sequence number": 4, "Fwd thread id": 1}
    trace.host("autograd::engine::evaluate_function: GeluBackward0", 0, 100, **node)
    trace.host(module("h.0"), 10, 50)
    trace.host("aten::gelu", 20, 30)
    trace.kernel(21, 40, 5)
    trace.host("aten::gelu_backward", 60, 70)
    trace.kernel(61, 80, 5)
    again, gradient = trace.calls()
    assert (again.phase, again.recomputed, again.module) == ("forward", True, "h.0")
    assert (gradient.phase, gradient.recomputed) == (BACKWARD, False)


def test_optimizer_and_python_frames() -> None:
    trace = Hand()
    trace.host("train.py(40): main", 0, 500, "python_function")
    trace.host("nn.Module: Net_0", 10, 200, "python_function")
    trace.host(
        "/x/lib/python3.11/site-packages/torch/nn/modules/linear.py(130): forward", 15, 150, "python_function"
    )
    trace.host("nn.Module: Linear_3", 20, 100, "python_function")
    trace.host("aten::mm", 30, 40)
    trace.kernel(31, 50, 5)
    trace.host("Optimizer.step#AdamW.step", 300, 400, "user_annotation")
    trace.host("aten::_foreach_add_", 310, 320)
    trace.kernel(311, 330, 5)
    product, update = trace.calls()
    assert (product.module, product.source) == ("Net_0.Linear_3", "train.py:40")
    assert (update.phase, update.name) == ("optimizer", "aten::_foreach_add_")


def test_without_the_runtime_s_events_the_external_id_finds_the_operation() -> None:
    trace = Hand()
    trace.host(module("fc"), 0, 50)
    trace.host("aten::mm", 10, 20, **{"External id": 77})
    trace.on_gpu(30, 5, **{"External id": 77})
    (call,) = trace.calls()
    assert (call.name, call.module) == ("aten::mm", "fc")


def test_a_kernel_that_no_operation_launched_stands_for_itself() -> None:
    trace = Hand()
    trace.host(module("fused"), 0, 50)
    trace.kernel(10, 20, 5, "void my_kernel<float>(float*)")
    trace.kernel(12, 30, 5, "void my_kernel<float>(float*)")
    assert [(call.name, call.module) for call in trace.calls()] == [("my_kernel", "fused")] * 2


def test_kernels_of_a_cuda_graph_stand_each_for_itself() -> None:
    trace = Hand()
    trace.host(module("model"), 0, 50)
    trace.kernel(10, 20, 5, "triton_poi_fused_add_0", call="cudaGraphLaunch")
    trace.on_gpu(30, 5, "nvjet_tst_64x8_64x16_1x1_h_bz_TNT", correlation=1)
    calls = trace.calls()
    assert [call.name for call in calls] == ["triton_poi_fused_add_0", "nvjet_tst_64x8_64x16_1x1_h_bz_TNT"]
    assert all(call.replayed and call.module == "model" for call in calls)


def test_steps_and_waits() -> None:
    trace = Hand()
    for number in range(2):
        start = 1000 * number
        trace.host(f"ProfilerStep#{number + 3}", start, start + 900, "user_annotation")
        trace.host("aten::mul", start + 10, start + 20)
        trace.kernel(start + 11, start + 30, 5)
        trace.host("aten::item", start + 100, start + 200)
        trace.host("aten::_local_scalar_dense", start + 101, start + 199)
        trace.host(
            "cudaStreamSynchronize", start + 110, start + 190, "cuda_runtime", correlation=500 + number
        )
    trace.host("aten::mul", 3000, 3010)  # after the last step
    trace.kernel(3001, 3020, 5)
    steps = trace.steps()
    assert [len(step.calls) for step in steps] == [1, 1]
    (wait,) = steps[1].waits
    assert (wait.call, wait.operation) == ("cudaStreamSynchronize", "aten::_local_scalar_dense")
    assert wait.duration_ns == 80_000
