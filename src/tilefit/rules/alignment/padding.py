"""What the alignment rules share: which sizes are misaligned, where to, and how to say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from tilefit.ops import FORWARD, Gemm, Step, Streaming
from tilefit.ops.dtypes import LINE_BYTES, TENSOR_CORE_DTYPES, elements_per_access, size_bytes
from tilefit.rules.base import Context, Replaced
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.layers import gemm
from tilefit.rules.resize import pad
from tilefit.units import share

#: A full cache line is preferred to 16 bytes unless it is slower by this share: on an H200 it measured a few
#: per cent faster, never slower.
_TIE = 0.01
#: Roles of what depends on all features together.
_TOGETHER = ("normalization", "softmax", "loss")


def is_misaligned(size: int, dtype: str) -> bool:
    """Whether rows of this many elements do not all start at a multiple of 16 bytes."""
    return dtype in TENSOR_CORE_DTYPES and size % elements_per_access(dtype) != 0


def misfit(dtype: str) -> str:
    """What is wrong with a size, in words."""
    return f"no multiple of {elements_per_access(dtype)} ({dtype}, 16 bytes)"


def counted_lines(lines: Iterable[str]) -> list[str]:
    """Each line once, with how often it came."""
    return [f"{line}, {count} times" if count > 1 else line for line, count in Counter(lines).items()]


def best_padding(
    context: Context, sizes: Iterable[int], dtype: str, resized: Callable[[Mapping[int, int]], Replaced]
) -> tuple[dict[int, int], Replaced]:
    """New sizes by old ones, and the operations they lead to: multiples of 16 bytes or of a full line."""
    sizes = tuple(sizes)
    by_line = {size: pad(size, LINE_BYTES // size_bytes(dtype)) for size in sizes}
    by_access = {size: pad(size, elements_per_access(dtype)) for size in sizes}
    line, access = resized(by_line), resized(by_access)
    if context.replaced_s(access) < (1 - _TIE) * context.replaced_s(line):
        return by_access, access
    return by_line, line


def with_zeros(step: Step, sizes: Collection[int]) -> tuple[str, str]:
    """How a trained model gets larger sizes, in words, and the change's safety: by zeros, unless they change
    what an operation makes of all features (or of a group of channels) together."""
    for entry in step.ops:
        if entry.phase != FORWARD or not isinstance(entry.op, Streaming) or "batch_norm" in entry.name:
            continue
        role, function = entry.op.role, entry.op.function
        at = 1 if function == "native_group_norm" else -1
        shapes = (ref.shape for ref in entry.inputs if not ref.parameter and len(ref.shape) > 1)
        if not any(shape[at] in sizes for shape in shapes):
            continue
        if role in _TOGETHER or (function == "mean" and entry.op.inner in sizes):
            what = role if role in _TOGETHER else "mean"
            return f"before training: zeros among trained weights would change the {what} over them", UNSAFE
    return "pad trained weights with zeros", SAFE


def misaligned_operands(op: Gemm) -> str:
    """The operands whose rows do not start at multiples of 16 bytes, as ``B and C (n = 50257)``."""
    names: dict[str, list[str]] = {}
    for operand in op.operands:
        if is_misaligned(operand.leading_dimension, op.dtype):
            names.setdefault(f"{operand.contiguous} = {operand.leading_dimension}", []).append(operand.name)
    return ", ".join(f"{' and '.join(operands)} ({size})" for size, operands in names.items())


def arithmetic(context: Context, replaced: Replaced, indices: Iterable[int]) -> tuple[str, ...]:
    """A line per distinct product: what is misaligned in it, the kernels it gets, the time it would take."""
    lines = []
    flop_before = flop_after = 0
    for index in indices:
        entry, (after,) = context.step.ops[index], replaced[index]
        op, padded = entry.op, after.op
        assert isinstance(op, Gemm)
        assert isinstance(padded, Gemm)
        flop_before, flop_after = flop_before + op.flop, flop_after + padded.flop
        reason = misaligned_operands(op)
        lines.append(
            f"{entry.phase} {op.layout} {op.shape} {op.dtype}"
            + (f": {reason} not a multiple of {elements_per_access(op.dtype)}" if reason else ": aligned")
            + f"; {context.faster(index, padded, kernels=True)}"
        )
    text = counted_lines(lines)
    if flop_before:
        text.append(f"padding adds {share(flop_after / flop_before - 1)} to their FLOP")
    return tuple(text)


def run_on(context: Context, indices: Iterable[int]) -> str:
    """How many of these products are misaligned and what they run on, for messages."""
    families = [
        context.estimate.ops[index].kernel_family
        for index in indices
        if isinstance(op := context.step.ops[index].op, Gemm) and misaligned_operands(op)
    ]
    run = "product runs" if len(families) == 1 else "products run"
    return f"{len(families)} {run} on {', '.join(sorted(set(families)))} kernels with narrow loads"


def pairs(sizes: Mapping[int, int]) -> str:
    """``50257 -> 50304 and 650 -> 656``."""
    return " and ".join(f"{old} -> {new}" for old, new in sizes.items())


def gemm_command(context: Context, index: int) -> str:
    """The command that explains one product."""
    op = gemm(context.step, index)
    sizes = f"{op.m} {op.n} {op.k}"
    return f"tilefit gemm {sizes} --dtype {op.dtype} --layout {op.layout} --gpu {context.gpu.name}"
