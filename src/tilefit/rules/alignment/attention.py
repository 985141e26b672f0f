"""ALN006: attention's head size and sequence length."""

from __future__ import annotations

from dataclasses import replace

from tilefit.ops import Attention, Gemm, StepOp
from tilefit.rules.alignment.padding import arithmetic, best_padding, is_misaligned, misfit, run_on
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.flow import parent
from tilefit.rules.resize import resize_streams, resized

#: Head sizes that fused kernels fill completely.
_HEAD_SIZES = (64, 128)


class AttentionSizes(Rule):
    """The head size or the sequence length does not fit the attention kernels.

    What it sees: fused attention whose head size another number of heads of the same total width would
    make faster; and attention written out as two batched products whose head size or sequence length is
    no multiple of 16 bytes, or other batched products of activations over such a size.

    Why it costs time: fused kernels are compiled for a few head sizes (64, 96, 128, 256) and fill up the
    others. Written out, the scores are a
    matrix [positions, positions] in memory, and 197 or 1500 positions (not a multiple of 8) keep the
    products on either side of the softmax off the fast kernels, exactly as in ALN001.

    Arithmetic: a head size of 80 filled up to 96 does 20 % more work than it needs. The width, heads x head
    size, is what the projections see, so that 32 heads of 80 and 20 heads of 128 cost the same elsewhere.

    Example: 2560 features in 32 heads of 80 -> 20 heads of 128 (changes what the model computes; choose it
    before training). Scores of [197, 197] -> use ``F.scaled_dot_product_attention``, or pad to 200 and mask.

    Sources: Anthony and others, "The Case for Co-Designing Model Architectures with Hardware" (2024), on
    the head size; NVIDIA, "Matrix Multiplication Background User's Guide".
    """

    code = "ALN006"
    title = "attention's head size or sequence length"
    wrong = Case(
        "SelfAttention()",
        "torch.empty(64, 577, 768)",
        "--amp bf16",
        """
        class SelfAttention(nn.Module):
            def __init__(self, width=768, heads=12):
                super().__init__()
                self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
                return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        """,
    )
    right = wrong.but("577", "584")

    def check(self, context: Context) -> Proposals:
        yield from self._heads(context)
        yield from self._written_out(context)

    def _heads(self, context: Context) -> Proposals:
        groups: dict[tuple[int, int, int], list[int]] = {}
        for index, _, op in context.step.each(Attention):
            # Grouped-query heads are shared by a ratio that another number of heads may not keep.
            is_plain = op.num_kv_heads == op.num_heads and op.value_dim == op.head_dim
            if is_plain and op.head_dim not in _HEAD_SIZES:
                groups.setdefault((op.num_heads, op.head_dim, op.seq_len), []).append(index)
        for (heads, head_dim, _), indices in groups.items():
            options = {
                other: {index: (_with_heads(context.step.ops[index], other),) for index in indices}
                for other in _other_heads(heads, head_dim)
            }
            if not options:
                continue
            best = min(options, key=lambda other: context.replaced_s(options[other]))
            size = heads * head_dim // best
            first, (after,) = context.step.ops[indices[0]], options[best][indices[0]]
            faster = context.faster(indices[0], after.op)
            yield Proposal(
                place=context.place(indices),
                message=f"{heads} heads of {head_dim} suit the attention kernels less than {best} of {size}",
                fix=f"Train with {best} heads of {size} (the same width of {heads * head_dim}).",
                safety=UNSAFE,
                change=Change(options[best]),
                arithmetic=(f"{first.phase} {first.op.shape}: {faster} with {best} heads",),
            )

    def _written_out(self, context: Context) -> Proposals:
        step = context.step
        groups: dict[tuple[int, str], list[int]] = {}
        for index, entry, op in step.each(Gemm):
            if op.batch == 1 or entry.parameter:
                continue
            for size in dict.fromkeys(operand.leading_dimension for operand in op.operands):
                if is_misaligned(size, op.dtype) and size in (op.m, op.n, op.k):
                    groups.setdefault((size, op.dtype), []).append(index)
        for (size, dtype), indices in groups.items():
            yield self._padded(context, size, dtype, indices)

    def _padded(self, context: Context, size: int, dtype: str, indices: list[int]) -> Proposal:
        step = context.step
        sizes, products = best_padding(
            context,
            [size],
            dtype,
            lambda to: {
                index: (resized(step.ops[index], to, "m", "n", "k", ld_a=0, ld_b=0),) for index in indices
            },
        )
        new = sizes[size]
        modules = {step.ops[index].site.module for index in indices}
        softmaxes = [
            entry
            for entry in step.ops
            if entry.op.category == "softmax" and {entry.site.module, parent(entry.site.module)} & modules
        ]
        if softmaxes:
            what = "attention is written out"
            fix = f"Use F.scaled_dot_product_attention; or pad {size} to {new} inside the attention"
            positions = any(ref.shape[-1:] == (size,) for entry in softmaxes for ref in entry.inputs)
            fix += " and mask the added positions." if positions else ", with zeros."
        else:
            what = "batched products run"
            fix = f"Pad {size} to {new} with zeros, and cut off what they add to the result."
        return Proposal(
            place=context.place(indices),
            message=f"{what} over {size} positions or features, {misfit(dtype)}: {run_on(context, indices)}",
            fix=fix,
            safety=SAFE,
            change=Change({**resize_streams(step, sizes), **products}),
            arithmetic=arithmetic(context, products, indices),
        )


def _other_heads(heads: int, head_dim: int) -> list[int]:
    """Numbers of heads with the same width and a head size that suits the kernels."""
    width = heads * head_dim
    return [width // size for size in _HEAD_SIZES if width % size == 0]


def _with_heads(entry: StepOp, heads: int) -> StepOp:
    op = entry.op
    assert isinstance(op, Attention)
    size = op.num_heads * op.head_dim // heads
    return replace(entry, op=replace(op, num_heads=heads, num_kv_heads=heads, head_dim=size, value_dim=size))
