"""NTC005: attention that PyTorch runs unfused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import cast

from tilefit.ops import BACKWARD_DATA, FORWARD, Attention, Fallback
from tilefit.ops.entries import DIMENSIONS, MASK
from tilefit.rules.base import Case, Change, Context, Edits, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, SAFE
from tilefit.rules.outside.attention_by_hand import in_one_kernel
from tilefit.units import size


class UnfusedAttention(Rule):
    """`F.scaled_dot_product_attention` is called, and takes none of its fused kernels.

    What it sees: A call whose query, key and value have other than 4 dimensions, or one of whose operands,
    the mask above all, has a last dimension that is not contiguous in memory. PyTorch then computes the
    attention from single operations, without a word.

    Why it costs time: Those operations run in fp32, whatever the operands are: two batched products
    outside the half-precision Tensor Cores, and the matrix of scores, queries x keys for every head, passed
    through memory in 4 bytes per element and kept for the backward pass. The fused kernel is priced with
    the bytes of a contiguous mask; the copy that makes it so, once for all layers, is not counted.

    Arithmetic: Batch B, heads H, sequence S: a pass over the fp32 scores moves `4 B H S^2` bytes, the
    contiguous mask of bools, once for all heads, `B S^2`.

    Example: `mask = mask.contiguous()` where the mask is made, before the layers: a mask that was expanded
    (`torch.ones(n, 1, dtype=torch.bool).expand(n, n)`) repeats one column with stride 0, a bias that was
    permuted (the relative positions of T5) has its heads beside each other. `q.unsqueeze(1)` adds the
    dimension of heads to 3 dimensions. The encoders of transformers 5.17, without a mask given, make such
    a mask when they are compiled: `attention_mask=torch.ones(batch, length)` makes a contiguous one.

    Source: PyTorch, `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `attention.cpp`
    (`_scaled_dot_product_attention_math`).
    """

    code = "NTC005"
    title = "attention that PyTorch runs unfused"
    wrong = Case(
        "NothingMasked()",
        "torch.empty(8, 1024, 1024)",
        "--amp bf16",
        """
        class NothingMasked(nn.Module):
            def __init__(self, width=1024, heads=16):
                super().__init__()
                self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
                n = x.shape[1]
                mask = torch.ones(n, 1, dtype=torch.bool, device=x.device).expand(n, n)
                return F.scaled_dot_product_attention(q, k, v, mask)
        """,
    )
    right = wrong.but(".expand(n, n)", ".expand(n, n).contiguous()")

    def check(self, context: Context) -> Proposals:
        step = context.step
        calls: dict[Fallback, list[int]] = defaultdict(list)
        for index, entry in enumerate(step.ops):
            call = entry.site.fallback
            if call is not None and isinstance(call.fused, Attention):
                calls[call].append(index)
        by_reason: dict[tuple[Attention, str, str], list[list[int]]] = defaultdict(list)
        for call, indices in calls.items():
            owner = step.modules.get(step.ops[indices[0]].site.module, "")
            by_reason[cast("Attention", call.fused), call.reason, owner].append(indices)
        for (fused, reason, _), groups in by_reason.items():
            replaced: Edits = {}
            for indices in groups:
                site = replace(step.ops[indices[0]].site, fallback=None)
                for direction in (FORWARD, BACKWARD_DATA):
                    own = [i for i in indices if (step.ops[i].phase == FORWARD) == (direction == FORWARD)]
                    replaced |= in_one_kernel(step, own, replace(fused, direction=direction), site)
            scores = 4 * fused.batch * fused.num_heads * fused.seq_len * fused.kv_len
            why = (
                "its operands do not have 4 dimensions"
                if reason == DIMENSIONS
                else f"the last dimension of its {reason} is not contiguous"
            )
            yield Proposal(
                place=context.place(indices[0] for indices in groups),
                message=f"scaled_dot_product_attention runs as {len(groups[0])} kernels in fp32, not as a "
                f"fused one: {why}",
                fix=_advice(reason),
                safety=SAFE if reason == MASK else ADVICE,
                change=Change(replaced),
                arithmetic=(
                    f"scores: {size(scores)} for each pass of each kernel; "
                    f"fused, Q, K, V, the mask and the output: {size(fused.moved_bytes)} in all",
                ),
            )


def _advice(reason: str) -> str:
    if reason == DIMENSIONS:
        return "Give query, key and value as [batch, heads, length, width]: unsqueeze(1) adds the heads."
    if reason == MASK:
        return (
            "Make the mask contiguous once, before the layers: mask = mask.contiguous(). Where the layers "
            "are given the mask, as bools or with 4 dimensions, tilefit fix does it at run time "
            "(contiguous-masks)."
        )
    return f"Make it contiguous: {reason} = {reason}.contiguous()."
