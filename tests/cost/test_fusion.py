from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from tilefit.capture.targets import load
from tilefit.cost import estimate_step, fuse
from tilefit.cost.launch import begin_s
from tilefit.cost.streaming import GENERATED
from tilefit.ops import (
    FORWARD,
    Attention,
    Conv,
    Fallback,
    Gemm,
    HostEvent,
    Memory,
    Op,
    Settings,
    Site,
    Step,
    StepOp,
    Streaming,
    TensorRef,
)
from tilefit.ops.entries import MASK
from tilefit.ops.program import WAIT, Program
from tilefit.options import TargetOptions

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "inductor_kernels.json"
ROWS, WIDTH = 8192, 1024
BYTES = ROWS * WIDTH * 2


def tensor(number: int) -> TensorRef:
    return TensorRef(number, (ROWS, WIDTH), "bf16")


def stream(
    reads: list[int], writes: list[int], role: str = "pointwise", phase: str = FORWARD, **more: Any
) -> StepOp:
    op = Streaming(role, ROWS * WIDTH, BYTES * len(reads), BYTES * len(writes), "bf16", **more)
    return entry(op, reads, writes, phase, role)


def entry(op: Op, reads: list[int], writes: list[int], phase: str = FORWARD, name: str = "") -> StepOp:
    return StepOp(
        op, phase, Site("block"), f"aten.{name}", tuple(map(tensor, reads)), tuple(map(tensor, writes))
    )


def product(reads: list[int], writes: list[int]) -> StepOp:
    return entry(Gemm(ROWS, WIDTH, WIDTH), reads, writes, name="mm")


def kinds(step: Step) -> list[str]:
    return [op.op.kind for op in step.ops]


def test_a_chain_reads_its_inputs_and_writes_its_result_once() -> None:
    step = Step((stream([1, 2], [3]), stream([3], [4]), stream([4, 1], [5]), product([5, 9], [6])))
    fused = fuse(step)
    assert kinds(fused) == ["streaming", "gemm"]
    chain = fused.ops[0].op
    assert (chain.read_bytes, chain.write_bytes) == (2 * BYTES, BYTES)
    assert chain.flop == sum(op.op.flop for op in step.ops[:3])
    assert [ref.id for ref in fused.ops[0].inputs] == [1, 2]
    assert [ref.id for ref in fused.ops[0].outputs] == [5]
    assert estimate_step(fused, "h200").gpu_time_s < estimate_step(step, "h200").gpu_time_s


def test_the_backward_pass_computes_again_what_was_cheap() -> None:
    step = Step(
        (stream([1], [2]), stream([2], [3]), product([3, 9], [4]), stream([2, 4], [5], phase="backward-data"))
    )
    fused = fuse(step)
    assert kinds(fused) == ["streaming", "gemm", "streaming"]
    assert fused.ops[0].op.write_bytes == BYTES  # for the product alone
    assert [ref.id for ref in fused.ops[2].inputs] == [1, 4]  # 1 in place of 2
    assert fused.ops[2].op.read_bytes == 2 * BYTES


@pytest.mark.parametrize(("read", "kept"), [((), [3]), ((1, 2), [1, 2])])
def test_the_smaller_of_a_result_and_what_it_is_made_of_is_kept(
    read: tuple[int, ...], kept: list[int]
) -> None:
    """Of a sum of two tensors the sum, unless both are kept anyway."""
    fused = fuse(
        Step(
            (
                *(product([8], [1]), product([8], [2]), stream([1, 2], [3]), stream([3], [4])),
                *(product([4], [5]), stream([3, 5, *read], [6], phase="backward-data")),
            )
        )
    )
    assert [ref.id for ref in fused.ops[-1].inputs if ref.id != 5] == kept
    assert [ref.id for ref in fused.ops[2].outputs] == [*([3] if kept == [3] else []), 4]


def test_a_gather_by_an_expanded_index_reads_whole_rows() -> None:
    """Which need not be looked for element by element, neither read nor added to."""
    table, rows = TensorRef(1, (64, 64, WIDTH), "bf16"), TensorRef(3, (64, 1536, WIDTH), "bf16")
    index = TensorRef(2, (64, 1536, WIDTH), "int64")

    def steps(index_bytes: int) -> tuple[float, float]:
        read = Streaming("indexing", rows.elements, rows.bytes + index_bytes, rows.bytes, "bf16",
                         function="gather")  # fmt: skip
        added = replace(read, read_bytes=table.bytes + index_bytes + rows.bytes, function="scatter_add")
        forward = StepOp(read, FORWARD, Site(), "aten.gather", (table, index), (rows,))
        backward = StepOp(
            added, "backward-data", Site(), "aten.scatter_add", (table, index, rows), (replace(table, id=9),)
        )
        return tuple(fuse(Step((each,))).ops[-1].op.flop for each in (forward, backward))

    for expanded, whole in zip(steps(index.bytes // WIDTH), steps(index.bytes), strict=True):
        assert expanded < 0.3 * whole


@pytest.mark.parametrize(
    ("role", "more"),
    [
        ("pointwise", {"function": "bernoulli"}),
        ("softmax", {"function": "_softmax", "inner": WIDTH}),
        ("reduction", {"function": "sum", "inner": WIDTH}),
    ],
)
def test_random_numbers_and_sums_are_kept_for_the_backward_pass(role: str, more: dict[str, Any]) -> None:
    step = Step(
        (stream([1], [2], role, **more), stream([2, 1], [3]), stream([2], [4], phase="backward-data"))
    )
    forward, backward = fuse(step).ops
    assert forward.op.write_bytes == 2 * BYTES
    assert backward.op.read_bytes == BYTES


def test_of_dropout_the_mask_is_kept() -> None:
    kept = TensorRef(20, (ROWS, WIDTH), "bool")
    drop = Streaming("pointwise", ROWS * WIDTH, BYTES, BYTES + BYTES // 2, "bf16", function="native_dropout")
    dropped = StepOp(drop, FORWARD, Site("block"), "", (tensor(1),), (tensor(2), kept))
    forward, _, backward = fuse(
        Step((dropped, product([2, 9], [3]), stream([2], [4], phase="backward-data")))
    ).ops
    assert forward.op.write_bytes == BYTES + BYTES // 2
    assert backward.op.read_bytes == BYTES  # the product's operand lies in memory
    forward, backward = fuse(Step((dropped, stream([2], [3]), stream([2], [4], phase="backward-data")))).ops
    assert forward.op.write_bytes == BYTES + BYTES // 2  # 3, and the mask
    assert backward.op.read_bytes == BYTES + BYTES // 2


def test_a_layer_norm_keeps_its_normalised_input() -> None:
    def wide(number: int) -> TensorRef:
        return TensorRef(number, (ROWS, WIDTH), "fp32")

    def norm(reads: list[int], writes: list[int], phase: str, function: str) -> StepOp:
        op = Streaming(
            "normalization",
            ROWS * WIDTH,
            2 * BYTES * len(reads),
            2 * BYTES,
            "fp32",
            inner=WIDTH,
            function=function,
        )
        return StepOp(op, phase, Site("norm"), "", tuple(map(wide, reads)), tuple(map(wide, writes)))

    step = Step(
        (
            stream([1, 2], [3]),
            norm([3], [4], FORWARD, "native_layer_norm"),
            product([4, 9], [5]),
            norm([6, 3], [7], "backward-data", "native_layer_norm_backward"),
        )
    )
    forward, _, backward = fuse(step).ops
    assert forward.op.write_bytes == 2 * BYTES + 2 * BYTES  # the product's operand, and the normalised sum
    assert backward.op.read_bytes == 2 * 2 * BYTES
    assert backward.op.kernels == 1  # without a scale and a shift


def test_a_sum_across_rows_is_a_kernel_of_two_stages() -> None:
    across = StepOp(
        Streaming("reduction", ROWS * WIDTH, BYTES, 2 * WIDTH, "bf16", strided=True, function="sum"),
        "backward-weight",
        Site("block"),
        "aten.sum",
        (tensor(2),),
        (TensorRef(7, (WIDTH,), "bf16"),),
    )
    cast = entry(
        Streaming("copy", WIDTH, 2 * WIDTH, 4 * WIDTH, "bf16"), [], [], "backward-weight", "_to_copy"
    )
    cast = replace(cast, inputs=across.outputs, outputs=(TensorRef(8, (WIDTH,), "fp32"),))
    step = Step((stream([1], [2], phase="backward-data"), product([2, 9], [3]), across, cast))
    _, _, summed = fuse(step).ops
    assert (summed.op.kernels, summed.op.read_bytes, summed.op.write_bytes) == (2, BYTES, 4 * WIDTH)


def test_backward_products_run_in_the_type_of_autocast() -> None:
    def operand(number: int, dtype: str = "fp32") -> TensorRef:
        return TensorRef(number, (ROWS, WIDTH), dtype)

    widen = Streaming("copy", ROWS * WIDTH, BYTES, 2 * BYTES, "bf16", function="_to_copy")
    multiply = Gemm(ROWS, WIDTH, WIDTH, "fp32")
    ops = (
        StepOp(widen, FORWARD, Site(), "", (operand(1, "bf16"),), (operand(2),)),
        StepOp(multiply, FORWARD, Site(), "aten.bmm", (operand(2), operand(9)), (operand(3),)),
        StepOp(multiply, "backward-data", Site(), "aten.bmm", (operand(2), operand(9)), (operand(4),)),
        StepOp(widen, "backward-data", Site(), "", (operand(4),), (operand(5),)),
    )
    assert [op.op.dtype for op in fuse(Step(ops)).ops if isinstance(op.op, Gemm)] == ["fp32", "fp32"]
    fused = fuse(Step(ops, settings=Settings(amp="bf16"))).ops
    assert [op.op.dtype for op in fused if isinstance(op.op, Gemm)] == ["fp32", "bf16"]
    widened, _, constant, _, last = (op.op for op in fused)
    # One kernel widens for the product and narrows again; what no kernel made is cast before it is used.
    assert (widened.read_bytes, widened.write_bytes) == (BYTES, 3 * BYTES)
    assert (constant.read_bytes, constant.write_bytes) == (2 * BYTES, BYTES)
    assert last.read_bytes == BYTES


def test_the_gradient_of_an_embedding_is_added_into_zeros() -> None:
    table = TensorRef(8, (50257, WIDTH), "fp32")
    scatter = StepOp(
        Streaming("embedding", 50257 * WIDTH, BYTES, BYTES, "fp32", inner=WIDTH, kernels=30,
                  function="embedding_dense_backward"),
        "backward-weight", Site("wte"), "aten.embedding_dense_backward", (tensor(2),), (table,),
    )  # fmt: skip
    zeros, added = fuse(Step((stream([1], [2], phase="backward-data"), scatter))).ops
    assert (zeros.op.read_bytes, zeros.op.write_bytes) == (0, 50257 * WIDTH * 4)
    assert (added.op.read_bytes, added.op.write_bytes) == (BYTES, 2 * BYTES)


#: Of so many channels that the compiler lays it out in NHWC.
WIDE = Conv(8, 128, 128, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))


def adding(
    function: str,
    table: TensorRef,
    *inputs: TensorRef,
    strided_by: str = "pointwise",
    conv: Conv = WIDE,
) -> list[StepOp]:
    """What makes a gradient, and its addition at indexed places, fused, beside a convolution."""
    made = Streaming(strided_by, 1, 2, 2, "fp32", function="made")
    added = Streaming("indexing", 1, 2, 2, "fp32", function=function)
    read_again = Streaming("pointwise", 1, 2, 2, "fp32", function="mul")
    steps = (
        StepOp(conv, FORWARD, Site()),
        StepOp(made, "backward-data", Site(), "aten.made", (), (inputs[-1],)),
        StepOp(added, "backward-data", Site(), f"aten.{function}", inputs, (table,)),
        StepOp(read_again, "backward-data", Site(), "aten.mul", (table,), (replace(table, id=99),)),
    )
    return list(fuse(Step(steps)).ops)[1:]


def test_additions_are_made_with_what_is_added_and_waited_for() -> None:
    table, index = TensorRef(1, (192, 512, 384), "bf16"), TensorRef(2, (192, 384, 384), "int64")
    grad = TensorRef(3, (192, 384, 384), "bf16")
    names = [op.name for op in adding("scatter_add", table, table, index, grad)]
    assert names == ["aten.zeros", "fused(made, scatter_add)", "aten.mul"]
    # A table that nothing wrote is cleared, another one is copied.
    size = 192 * 512 * 384 * 2
    write = StepOp(Gemm(8, 8, 8), FORWARD, Site(), "aten.mm", (), (table,))
    op = Streaming("indexing", 1, size, size, "bf16", function="scatter_add")
    add = StepOp(op, FORWARD, Site(), "aten.scatter_add", (table, index, grad), (replace(table, id=9),))
    cleared, copied = (fuse(Step(ops)).ops[-2].op for ops in ((add,), (write, add)))
    assert (cleared.read_bytes, cleared.write_bytes) == (0, size)
    assert (copied.read_bytes, copied.write_bytes) == (size, size)


@pytest.mark.parametrize(("readers", "moved"), [(0, 3 * BYTES), (1, 6 * BYTES)])
def test_what_is_written_to_in_part_is_copied_where_it_is_read(readers: int, moved: int) -> None:
    """All of it, half of it in place from elsewhere, and perhaps a reader of the whole."""
    half = replace(tensor(2), shape=(ROWS // 2, WIDTH))
    part = Streaming("pointwise", ROWS * WIDTH // 2, BYTES // 2, BYTES // 2, "bf16", function="copy")
    write = StepOp(part, FORWARD, Site("block"), "aten.copy_", (replace(half, id=3),), (half,))
    fused = fuse(Step((stream([1], [2]), write, *readers * [stream([2], [4])])))
    assert sum(each.op.moved_bytes for each in fused.ops) == moved


def test_an_interpolation_adds_to_a_table_for_each_corner() -> None:
    grad, result = TensorRef(3, (8, 64, 128, 128), "fp32"), TensorRef(1, (8, 64, 64, 64), "fp32")
    size = 8 * 64 * 64 * 64 * 4
    near, between = (adding(f"upsample_{mode}2d_backward", result, grad) for mode in ("nearest", "bilinear"))
    # All but one of the tables are read beside the one that is the result.
    assert [(op[0].op.read_bytes, op[0].op.write_bytes) for op in (near, between)] == [
        (0, size),
        (3 * size, 4 * size),
    ]
    assert between[1].op.flop == pytest.approx(4 * near[1].op.flop)
    # The gradient of a loss lies as its labels do, so that neighbours add to neighbours.
    loss = adding("upsample_bilinear2d_backward", result, grad, strided_by="loss")
    assert loss[1].op.flop < between[1].op.flop / 4


def test_additions_of_images_cost_by_the_layout_whoever_chose_it() -> None:
    grad, result = TensorRef(3, (8, 64, 128, 128), "fp32"), TensorRef(1, (8, 64, 64, 64), "fp32")
    narrowing = Conv(8, 192, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))

    def flop(conv: Conv) -> float:
        return adding("upsample_bilinear2d_backward", result, grad, conv=conv)[1].op.flop

    # The compiler leaves this one in NCHW, where neighbours add to neighbours; the program may not.
    assert flop(narrowing) < flop(replace(narrowing, channels_last=True)) / 4


@pytest.mark.parametrize(
    ("function", "dtype", "left"),
    [
        ("index_add", "bf16", True),
        ("index_add_", "bf16", True),
        ("index_add", "fp32", False),
        ("index_put", "bf16", False),
    ],
)
def test_the_compiler_leaves_additions_of_rows_of_bf16_to_aten(function: str, dtype: str, left: bool) -> None:
    table, index, grad = (
        TensorRef(1, (512, 64), dtype),
        TensorRef(2, (4096,), "int64"),
        TensorRef(3, (4096, 64), dtype),
    )
    made = Streaming("pointwise", 1, 2, 2, "fp32", function="made")
    added = Streaming("indexing", 1, 2, 2, dtype, function=function)
    steps = (
        StepOp(made, FORWARD, Site(), "aten.made", (), (grad,)),
        StepOp(added, FORWARD, Site(), f"aten.{function}", (table, index, grad), (replace(table, id=9),)),
    )
    names = [entry.name for entry in fuse(Step(steps)).ops]
    assert (f"aten.{function}" in names and "aten.zeros" not in names) == left


def test_an_addition_costs_by_how_threads_meet() -> None:
    def flop(row: int, places: int, dtype: str = "fp32") -> float:
        table, grad = TensorRef(1, (places, row), dtype), TensorRef(3, (ROWS, row), dtype)
        ops = adding("index_put", table, table, TensorRef(2, (ROWS,), "int64"), grad)
        return ops[1].op.flop / (ROWS * row)

    # Long rows are added as they are written; of short ones each addition counts, those that meet most.
    assert flop(64, ROWS) < flop(1, ROWS) < flop(1, ROWS, "bf16") < flop(1, 4)


@pytest.mark.parametrize(("rank", "last"), [(1, False), (2, True), (3, False)])
def test_only_images_run_in_nhwc(rank: int, last: bool) -> None:
    conv = Conv(8, 128, 128, *(((size,) * rank) for size in (32, 3, 1, 1, 1)))
    fused = fuse(Step((StepOp(conv, FORWARD, Site()),))).ops[0].op
    assert isinstance(fused, Conv)
    assert fused.channels_last == last


def test_images_run_in_nhwc_unless_a_convolution_speaks_against_it() -> None:
    def layout(*channels: tuple[int, int], groups: int = 1) -> bool:
        ops = [
            StepOp(Conv(8, a, b, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1), groups), FORWARD, Site())
            for a, b in channels
        ]
        return all(op.op.channels_last for op in fuse(Step(tuple(ops))).ops if isinstance(op.op, Conv))

    assert layout((64, 128), (128, 128))
    assert not layout((64, 64), (32, 64))  # all small
    assert not layout((64, 128), (256, 128))  # fewer channels out than in
    assert not layout((64, 128), (128, 128), groups=2)
    assert layout((128, 128), (128, 128), groups=128)


def test_only_what_is_written_takes_memory() -> None:
    ops = (stream([1], [2]), stream([2], [3]), stream([3], [4]), product([4, 9], [5]))
    last = replace(product([6, 9], [7]), phase="backward-data")
    backward = (stream([5, 4], [6], phase="backward-data"), last)
    before = Memory(parameter_bytes=100, gradient_bytes=50, peak_bytes=10 * BYTES)
    memory = fuse(Step((*ops, *backward), memory=before)).memory
    assert memory.saved_bytes == 2 * BYTES  # 4 and 5
    assert memory.peak_bytes == 100 + 3 * BYTES


def test_what_pads_a_product_takes_memory_from_when_its_operand_is_made() -> None:
    def peak_bytes(width: int) -> int:
        """Of logits and the gradient made of them, which two products read."""
        shapes = {1: (ROWS, 768), 2: (width, 768), 5: (width, 768), 6: (ROWS, 768)}
        tensors = {n: TensorRef(n, shapes.get(n, (ROWS, width)), "bf16") for n in range(1, 7)}
        made = (
            (Gemm(ROWS, width, 768, layout="TN"), [1, 2], [3], FORWARD),
            (stream([3], [4]).op, [3], [4], "backward-data"),
            (Gemm(width, 768, ROWS, layout="NT"), [4, 1], [5], "backward-weight"),
            (Gemm(ROWS, 768, width), [4, 2], [6], "backward-data"),
        )
        ops = [
            StepOp(op, phase, Site(), "", tuple(tensors[n] for n in reads), tuple(tensors[n] for n in writes))
            for op, reads, writes, phase in made
        ]
        return fuse(Step(tuple(ops))).memory.peak_bytes

    logits_bytes = ROWS * 50264 * 2
    assert peak_bytes(50264) == pytest.approx(2 * logits_bytes, rel=0.05)
    # Both products read one copy of the gradient, beside the gradient and what it was made of.
    assert peak_bytes(50257) == pytest.approx(3 * logits_bytes, rel=0.05)


def test_what_attention_makes_and_does_not_return_is_not_kept() -> None:
    def saved_bytes(number: int) -> int:
        call = Fallback(0, Attention(8, 16, 512, 64), MASK)
        site = Site("attention", fallback=call)
        ops = (stream([1], [2]), stream([2], [3], "copy"), product([2, 9], [4]), stream([4], [5]))
        inside = [replace(op, site=site) if i < number else op for i, op in enumerate(ops)]
        return fuse(Step(tuple(inside))).memory.saved_bytes

    assert saved_bytes(0) == saved_bytes(2) == 2 * BYTES  # 3 and 5
    assert saved_bytes(3) == saved_bytes(4) == BYTES


def test_arithmetic_comes_on_top_of_the_traffic() -> None:
    def time_s(function: str) -> float:
        step = fuse(Step((stream([1], [2], function=function),)))
        return estimate_step(step, "h200").gpu_time_s

    assert time_s("gelu") > 1.1 * time_s("relu")


def test_who_computes_again_pays_for_it_once_more() -> None:
    forward = (stream([1], [2], function="gelu"), stream([2], [3]), product([3], [5]))
    step = fuse(Step((*forward, stream([2, 6], [4], phase="backward-data"))))
    backward = step.ops[-1]
    assert {ref.id for ref in backward.inputs} == {1, 6}
    assert backward.op.flop == step.ops[0].op.flop > 10 * ROWS * WIDTH


def test_a_residual_that_waits_for_a_product_starts_a_new_kernel() -> None:
    # h = x + a; n = norm(h); p = mm(n); h + p
    step = Step(
        (
            stream([1, 2], [3]),
            stream([3], [4], "normalization", inner=WIDTH),
            product([4, 9], [5]),
            stream([3, 5], [6]),
        )
    )
    fused = fuse(step)
    assert kinds(fused) == ["streaming", "gemm", "streaming"]
    first, _, last = (op.op for op in fused.ops)
    assert isinstance(first, Streaming)
    assert first.role == "pointwise"  # a generated kernel
    # The sum is computed again from its terms: no more is read than it would take to write and read it.
    assert first.write_bytes == BYTES
    assert last.read_bytes == 3 * BYTES


def test_a_later_member_is_computed_before_the_first_reader_outside() -> None:
    # The third operation reads only what was there before the product did.
    step = Step((stream([1], [2]), product([2, 9], [3]), stream([2, 1], [4]), product([4, 9], [5])))
    fused = fuse(step)
    assert kinds(fused) == ["streaming", "gemm", "gemm"]
    assert fused.ops[0].op.read_bytes == BYTES
    assert fused.ops[0].op.write_bytes == 2 * BYTES


def test_in_place_operations_keep_their_versions_apart() -> None:
    # relu_ twice on the same memory: one read, one write.
    step = Step((stream([1], [1]), stream([1], [1]), product([1, 9], [2])))
    chain = fuse(step).ops[0].op
    assert (chain.read_bytes, chain.write_bytes) == (BYTES, BYTES)


def test_a_reduction_over_everything_ends_its_chain() -> None:
    total = ROWS * WIDTH
    summed = stream([2], [3], "reduction", inner=total)
    summed = replace(summed, outputs=(TensorRef(3, (1,), "bf16"),))
    added = replace(stream([3, 1], [4]), inputs=(TensorRef(3, (1,), "bf16"), tensor(1)))
    fused = fuse(Step((stream([1], [2]), summed, added)))
    assert kinds(fused) == ["streaming", "streaming"]
    # What is summed is computed where it is summed.
    assert fused.ops[0].op.read_bytes == BYTES
    assert fused.ops[0].op.write_bytes < BYTES


def test_products_optimizer_and_lone_operations_stay() -> None:
    step = Step(
        (
            product([1, 9], [2]),
            stream([2], [3]),
            stream([3, 9], [9], "optimizer", phase="optimizer"),
            stream([9], [8], phase="optimizer"),
        )
    )
    fused = fuse(step)
    assert [(op.op.moved_bytes, op.name) for op in fused.ops] == [
        (o.op.moved_bytes, o.name) for o in step.ops
    ]
    assert [op.op.kind for op in fused.ops] == [op.op.kind for op in step.ops]
    assert fused.settings.compiled


def test_forward_and_backward_are_compiled_apart() -> None:
    step = Step((stream([1], [2]), product([2, 9], [5]), stream([2], [3], phase="backward-data")))
    assert kinds(fuse(step)) == ["streaming", "gemm", "streaming"]


def test_what_only_another_kernel_computes_again_is_made_by_none() -> None:
    step = Step((stream([1], [2]), stream([2], [3], phase="backward-data")))
    (kernel,) = fuse(step).ops
    assert (kernel.op.read_bytes, kernel.op.write_bytes) == (BYTES, BYTES)
    kept = fuse(replace(step, returned=(2,)))  # the caller reads it
    assert [op.op.write_bytes for op in kept.ops] == [BYTES, BYTES]


def _generated(model: nn.Module, *shape: int, names: str = "") -> list[Streaming]:
    """What is generated for a training step, of kernels with one of these in their name."""
    with torch.device("meta"):
        step = fuse(capture(model, torch.empty(shape, device="meta"), amp="bf16", compile=True))
    return [
        op.op
        for op in step.ops
        if isinstance(op.op, Streaming)
        and op.op.function == GENERATED
        and any(name in op.name for name in names.split())
    ]


@pytest.mark.parametrize(
    ("shape", "dims", "kernels"),
    [
        ((8192, 512), 0, 2),  # across rows
        ((128, 512), 0, 1),  # few of them
        ((8192, 16384), 0, 1),  # for many results
        ((64, 1 << 16), 1, 2),  # few long rows
        ((64, 8192), 1, 1),
        ((512, 1 << 16), 1, 1),
        ((8192,), 0, 1),  # to one number
        ((16384,), 0, 2),
    ],
)
def test_sums_are_split_where_the_results_are_too_few_to_fill_the_gpu(
    shape: tuple[int, ...], dims: int, kernels: int
) -> None:
    """As Inductor's ``reduction_split_factor`` has it for 132 multiprocessors."""

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(dims)

    (total,) = fuse(capture(Sum(), torch.empty(shape, device="meta"), train=False, compile=True)).ops
    assert total.op.kernels == kernels


@pytest.mark.parametrize(
    ("norm", "shape", "forward", "backward"),
    [
        (nn.BatchNorm1d(512), (64, 512, 64), 2, 2),  # as many channels as fill the GPU
        (nn.BatchNorm1d(64), (64, 64, 1024), 4, 4),
        (nn.BatchNorm1d(64), (8192, 64), 4, 4),  # vectors
        (nn.BatchNorm1d(64), (128, 64), 2, 2),
        (nn.LayerNorm(64), (8192, 64), 1, 4),
        (nn.LayerNorm(64, elementwise_affine=False), (8192, 64), 1, 1),
    ],
)
def test_norms_take_as_many_kernels_as_their_sums_have_stages(
    norm: nn.Module, shape: tuple[int, ...], forward: int, backward: int
) -> None:
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), norm, nn.Tanh())
    assert [op.kernels for op in _generated(model, *shape, names="_norm")] == [forward, backward]


def test_running_statistics_are_no_matter_of_the_backward_pass() -> None:
    with torch.device("meta"):
        step = capture(nn.BatchNorm2d(8), torch.empty(2, 8, 4, 4), compile=True)
    norm = next(entry for entry in step.ops if entry.name == "aten.native_batch_norm")
    running = {ref.id for ref in norm.inputs[3:]}
    assert len(running) == 2
    passes = [entry for entry in fuse(step).ops if entry.phase.startswith("backward")]
    assert passes
    assert running.isdisjoint(ref.id for entry in passes for ref in entry.inputs)


def test_additions_at_places_that_are_data_meet_less_than_at_distances() -> None:
    class Biases(nn.Module):
        def __init__(self, of_distances: bool) -> None:
            super().__init__()
            self.table, self.of_distances = nn.Embedding(32, 8), of_distances

        def forward(self, places: torch.Tensor) -> torch.Tensor:
            index = torch.arange(256, device=places.device)
            apart = (index - index[:, None]).clamp(0, 31).expand(len(places), -1, -1)
            return self.table(apart if self.of_distances else places)

    def flop(of_distances: bool) -> float:
        with torch.device("meta"):
            places = torch.empty(8, 256, 256, dtype=torch.long)
            step = fuse(capture(Biases(of_distances), places, compile=True))
        return max(entry.op.flop for entry in step.ops if "embedding_dense_backward" in entry.name)

    assert flop(False) < flop(True) / 4


def test_a_kernel_has_rows_of_one_kind() -> None:
    class Sides(nn.Module):
        def __init__(self, *sides: int) -> None:
            super().__init__()
            self.sides = sides

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for side in self.sides:
                x = x.softmax(side)
            return x

    def kernels(*sides: int) -> int:
        step = capture(Sides(*sides), torch.empty(64, 64, device="meta"), train=False, compile=True)
        return len(fuse(step).ops)

    assert (kernels(1), kernels(1, 1), kernels(0, 1, 0)) == (1, 1, 3)


def test_sums_so_far_across_rows_touch_every_element_by_itself() -> None:
    class Sums(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.dim = dim

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return (x.exp().cumsum(self.dim) * 0.5) + table

    x, table = torch.empty(512, 8192, device="meta"), torch.empty(8192, device="meta")
    across, along = (
        fuse(capture(Sums(dim), (x, table), train=False, compile=True)).ops[0].op for dim in (0, 1)
    )
    assert (along.read_bytes, along.write_bytes) == (x.nbytes + table.nbytes, x.nbytes)
    # What is small beside is read like anything else.
    assert across.read_bytes - table.nbytes == across.write_bytes > 6 * x.nbytes


def test_a_biased_convolution_is_written_once_more_before_a_norm() -> None:
    def moved(bias: bool, *after: nn.Module) -> int:
        conv = nn.Conv2d(16, 64, 3, padding=1, bias=bias)
        ops = _generated(nn.Sequential(conv, *after), 8, 16, 64, 64, names="add batch_norm relu")
        return sum(op.moved_bytes for op in ops)

    size = 2 * 8 * 64 * 64 * 64
    with torch.device("meta"):
        extra = moved(True, nn.BatchNorm2d(64)) - moved(False, nn.BatchNorm2d(64))
        assert extra >= 0.95 * size
        # Nothing else reads what the addition makes.
        assert moved(True, nn.ReLU()) == pytest.approx(moved(False, nn.ReLU()), rel=0.05)


def test_norms_side_by_side_go_over_what_they_share_twice_together() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(16, 64, 1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = (norm(conv(x)) for conv, norm in zip(self.convs, self.norms, strict=True))
            return (a + b).relu()

    with torch.device("meta"):
        kernels = _generated(Block(), 8, 16, 64, 64, names="batch_norm_backward")
    size = 2 * 8 * 64 * 64 * 64
    # Twice the gradient, the activation and both inputs of the norms; the gradient may be of another type.
    assert sum(op.read_bytes for op in kernels) <= 12 * size


def test_pooling_reads_what_it_pools_from_memory() -> None:
    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    with torch.device("meta"):
        (pooling,) = _generated(
            nn.Sequential(model, nn.MaxPool2d(2)), 8, 16, 64, 64, names="max_pool2d_with_indices"
        )[:1]
    size = 8 * 64 * 64 * 64
    assert pooling.read_bytes >= 2 * size
    assert pooling.write_bytes == (2 + 1) * size / 4  # with an offset of a byte each


def test_each_of_many_parts_is_written_to_its_place_by_a_kernel() -> None:
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x * k for k in range(self.count)])

    def kernels(count: int) -> int:
        model = Joined()
        model.count = count
        step = capture(model, torch.empty(64, 64, device="meta"), train=False, compile=True)
        return sum(op.op.kernels for op in fuse(step).ops)

    assert (kernels(4), kernels(20)) == (1, 20)


@pytest.mark.parametrize("activation", [nn.LeakyReLU, nn.ELU, nn.Mish, nn.LogSigmoid])
def test_gradients_of_activations_are_generated(activation: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), activation(), nn.Linear(256, 256))
    step = fuse(capture(model, torch.empty(512, 256, device="meta"), amp="bf16", compile=True))
    left = [op.name for op in step.ops if isinstance(op.op, Streaming) and op.op.function != GENERATED]
    assert all("foreach" in name for name in left)


def test_a_misaligned_product_is_padded_at_the_price_of_copies() -> None:
    # The weight gradient of a vocabulary of 50257: A is dY transposed, m is contiguous in it.
    odd = StepOp(Gemm(50257, 768, 16384, layout="NT"), "backward-weight", Site("lm_head"))
    copy, padded = fuse(Step((odd,))).ops
    assert padded.op == Gemm(50264, 768, 16384, layout="NT")
    assert (copy.op.read_bytes, copy.op.write_bytes) == (50257 * 16384 * 2, 50264 * 16384 * 2)
    gain = (
        estimate_step(Step((odd,)), "h200").gpu_time_s / estimate_step(fuse(Step((odd,))), "h200").gpu_time_s
    )
    assert gain > 2


def test_both_operands_of_a_square_product_are_copied() -> None:
    square = TensorRef(1, (4095, 4095), "bf16"), TensorRef(2, (4095, 4095), "bf16")
    odd = StepOp(Gemm(4095, 4095, 4095), FORWARD, Site("fc"), "aten.mm", square)
    assert kinds(fuse(Step((odd,)))) == ["streaming", "streaming", "gemm"]


def test_aligned_small_and_fp32_products_are_not_padded() -> None:
    ops = (
        Gemm(4096, 4096, 4096),
        Gemm(4095, 4096, 4096),
        Gemm(2, 4096, 4095),
        Gemm(4096, 4096, 4095, "fp32"),
    )
    step = Step(tuple(StepOp(op, FORWARD, Site()) for op in ops))
    assert [entry.op for entry in fuse(step).ops] == list(ops)


def test_long_chains_are_not_computed_again_from_their_beginning() -> None:
    ops = [stream([i], [i + 1]) for i in range(1, 2000)]
    step = Step((*ops, stream([2000], [2001], phase="backward-data")))
    forward, backward = fuse(step).ops
    assert forward.op.write_bytes == BYTES
    assert backward.op.read_bytes == BYTES
    assert backward.inputs[0].id > 1900


def test_what_uses_a_tensor_again_behind_a_product_is_kept_for_the_backward_pass() -> None:
    """As PyTorch's partitioner has it: an addition to a residual stream is not made again."""
    first, norm, again = stream([1], [2]), stream([2], [3]), stream([2, 5], [6])
    after = stream([6], [7]), stream([7], [8], phase="backward-data")
    step = Step((first, norm, product([3, 9], [5]), again, *after))
    assert [ref.id for ref in fuse(step).ops[-1].inputs] == [6]
    before = Step((first, again, norm, product([3, 9], [4]), *after))
    assert [ref.id for ref in fuse(before).ops[-1].inputs] == [1, 5]


def test_complex_numbers_are_left_to_aten_and_copied_where_a_part_is_written() -> None:
    wave = TensorRef(1, (64, 1024), "complex64")
    size = wave.bytes
    op = Streaming("pointwise", wave.elements, size, size, "complex64", function="mul")
    part = Streaming("pointwise", wave.elements // 2, size // 2, size // 2, "complex64", function="copy")
    names = "aten.mul", "aten.mul", "aten.copy_", "aten.mul"
    half = replace(wave, id=2, shape=(32, 1024))
    entries = [
        StepOp(each, FORWARD, Site(), name, (replace(wave, id=read),), (written,))
        for name, each, read, written in zip(
            names,
            (op, op, part, op),
            (1, 1, 3, 2),
            (replace(wave, id=2), replace(wave, id=3), half, replace(wave, id=4)),
            strict=True,
        )
    ]
    fused = fuse(Step(tuple(entries)))
    assert [entry.name for entry in fused.ops] == [*names[:2], "aten.clone", *names[2:]]
    assert fused.ops[2].op.moved_bytes == 2 * size


@pytest.mark.parametrize("model", ["mobilenet_v3_large", "resnet50"])
def test_kernels_and_traffic_are_about_what_inductor_schedules(model: str) -> None:
    """As ``benchmarks/inductor_kernels.py`` recorded it."""
    rows = json.loads(RECORDED.read_text())["rows"]
    generated = next(row for row in rows if row["model"] == f"torchvision:{model}")["generated"]
    shapes = load(f"torchvision:{model}", TargetOptions(batch=128))
    step = fuse(capture(shapes.model, shapes.inputs, amp="bf16", loss=shapes.loss, compile=True))
    ours = [entry.op for entry in step.ops if entry.op.kind == "streaming" and entry.phase != "optimizer"]
    kernels = sum(count for *_, count in generated)
    moved = sum((read + write) * count for _, _, read, write, _, count in generated)
    assert sum(op.kernels for op in ours) == pytest.approx(kernels, rel=0.2)
    assert sum(op.moved_bytes for op in ours) == pytest.approx(moved, rel=0.12)


@pytest.mark.parametrize("train", [False, True])
def test_given_statistics_are_applied_in_the_kernel_that_goes_on_with_the_result(train: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(64), nn.ReLU())
    step = capture(model, torch.empty(8, 64, 32, 32, device="meta"), train=train, compile=True)
    norm = next(entry.op for entry in fuse(step).ops if entry.name == "fused(native_batch_norm, relu)")
    assert isinstance(norm, Streaming)
    size = 8 * 64 * 32 * 32 * 4
    # Statistics are made by a kernel of their own, and the input is read once more to apply them.
    assert norm.kernels == (2 if train else 1)
    assert norm.read_bytes == pytest.approx((2 if train else 1) * size, rel=0.01)


def test_what_the_compiler_leaves_to_pytorch_stays_as_it_is() -> None:
    """The gradient of a table of bags is sorted and added by two dozen kernels, compiled or not."""
    bag = nn.EmbeddingBag(1000, 16, mode="sum")
    step = capture(bag, (torch.zeros(64, 4, dtype=torch.long),), optimizer="none")
    bags = [
        [entry.op for entry in each.ops if "embedding_bag" in getattr(entry.op, "function", "")]
        for each in (step, fuse(step))
    ]
    assert len(bags[0]) == 2
    assert bags[0] == bags[1]


def test_a_module_that_reads_values_in_a_loop_is_not_compiled() -> None:
    ops = [
        replace(op, site=Site(module))
        for number, module in enumerate(("mixture", "mixture.expert", "first", "second", "third"))
        for op in (stream([3 * number], [3 * number + 1]), stream([3 * number + 1], [3 * number + 2]))
    ]
    read = HostEvent(1, WAIT, "nonzero", Site("mixture", "model.py:7"), within=True)

    def generated(*events: HostEvent, passes: int = 1) -> list[str]:
        program = Program("train.py", "a batch", events=events, micro_batches=passes)
        kernels = fuse(Step(ops=tuple(ops), settings=Settings(training=False), program=program)).ops
        return [kernel.site.module for kernel in kernels if getattr(kernel.op, "function", "") == GENERATED]

    every = ["mixture", "mixture.expert", "first", "second", "third"]
    assert generated(read) == generated(read, read, passes=2) == every
    assert generated(read, read) == every[2:]
    del ops[6:]
    assert generated(read, read) == []  # most of it is left to Python


def test_a_module_that_runs_a_recurrent_layer_is_not_compiled() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm = nn.LSTM(64, 64, batch_first=True), nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.lstm(x)[0].sigmoid()).tanh()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = Words()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(x).relu().mul(2).exp()

    with torch.device("meta"):
        step, around = (capture(model, torch.empty(8, 16, 64)) for model in (Words(), Around()))
    as_it_is = fuse(step)
    assert (as_it_is.ops, as_it_is.memory) == (step.ops, step.memory)
    assert not as_it_is.settings.compiled
    compiled = fuse(around)
    assert compiled.settings.compiled
    names = [entry.name for entry in compiled.ops]
    assert "aten.sigmoid" in names  # of Words, alone
    # The host pays what it does without the compiler, for modules and gradients too.
    left = [
        entry for entry in compiled.ops if entry.site.module.startswith("words") and entry.phase == FORWARD
    ]
    eager = replace(compiled, settings=replace(compiled.settings, compiled=False), ops=tuple(left))
    without = replace(compiled, ops=tuple(left))
    spent = [
        estimate_step(each, "h100-sxm").host_time_s - begin_s(FORWARD, each) for each in (eager, without)
    ]
    assert spent[0] == pytest.approx(spent[1])
    assert any("relu" in name and "exp" in name for name in names)


def test_joined_tensors_are_kept_and_a_softmax_is_computed_again() -> None:
    class Model(nn.Module):
        def __init__(self, joins: bool) -> None:
            super().__init__()
            self.joins, self.weight = joins, nn.Parameter(torch.empty(1024, 1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight
            y = torch.cat([y, y], -1) if self.joins else y.softmax(-1)
            return y.sin() @ y.mT

    with torch.device("meta"):
        joined, softmax = (
            fuse(capture(Model(joins), torch.empty(4096, 1024), amp="bf16")) for joins in (True, False)
        )
    product_bytes = 4096 * 1024 * 2
    assert joined.memory.saved_bytes > 3 * product_bytes
    assert softmax.memory.peak_bytes > 0


def test_between_norm_and_activation_nothing_is_kept() -> None:
    """As AOTAutograd's partitioner saves: of convolution, batch norm and SiLU the first result and the last,
    also where the activation writes in place."""

    def saved_bytes(inplace: bool) -> int:
        conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        model = nn.Sequential(conv, nn.BatchNorm2d(64), nn.SiLU(inplace), nn.Conv2d(64, 64, 1, bias=False))
        return fuse(capture(model.to("meta"), torch.empty(64, 64, 32, 32, device="meta"))).memory.saved_bytes

    result_bytes = 64 * 64 * 32 * 32 * 4
    assert saved_bytes(inplace=False) == saved_bytes(inplace=True)
    assert saved_bytes(inplace=False) == pytest.approx(2 * result_bytes, rel=0.02)


def test_the_optimizer_takes_what_it_takes_without_the_compiler() -> None:
    model = nn.Linear(4096, 4096, bias=False)
    eager = capture(model.to("meta"), torch.empty(1, 4096, device="meta"))
    weight_bytes = 4096 * 4096 * 4
    assert fuse(eager).memory.peak_bytes == eager.memory.peak_bytes > 4.5 * weight_bytes
