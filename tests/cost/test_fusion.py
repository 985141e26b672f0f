from __future__ import annotations

from typing import Any

from tilefit.cost import estimate_step, fuse
from tilefit.ops import FORWARD, Gemm, Op, Site, Step, StepOp, Streaming, TensorRef

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


def test_a_result_the_backward_pass_needs_is_still_written() -> None:
    step = Step(
        (stream([1], [2]), stream([2], [3]), product([3, 9], [4]), stream([2], [5], phase="backward-data"))
    )
    fused = fuse(step)
    assert kinds(fused) == ["streaming", "gemm", "streaming"]
    assert fused.ops[0].op.write_bytes == 2 * BYTES


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
    assert first.write_bytes == 2 * BYTES
    assert last.read_bytes == 2 * BYTES


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
    step = Step((stream([1], [2]), stream([2], [3], "reduction", inner=total), stream([3, 1], [4])))
    assert kinds(fuse(step)) == ["streaming", "streaming"]


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
    assert fused.ops == step.ops
    assert fused.settings.compiled


def test_forward_and_backward_are_compiled_apart() -> None:
    step = Step((stream([1], [2]), stream([2], [3], phase="backward-data")))
    assert len(fuse(step).ops) == 2


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


def test_aligned_small_and_fp32_products_are_not_padded() -> None:
    ops = (
        Gemm(4096, 4096, 4096),
        Gemm(4095, 4096, 4096),
        Gemm(2, 4096, 4095),
        Gemm(4096, 4096, 4095, "fp32"),
    )
    step = Step(tuple(StepOp(op, FORWARD, Site()) for op in ops))
    assert [entry.op for entry in fuse(step).ops] == list(ops)
