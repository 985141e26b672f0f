"""LAY002: copies that only change the layout."""

from __future__ import annotations

import re

from tilefit.ops import Conv, StepOp, Streaming
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.units import seconds, size


class LayoutCopies(Rule):
    """Time goes into copies that only change how data lies in memory.

    What it sees: copies between layouts (``contiguous``, ``reshape`` of a transposed view, ``permute`` and
    copy, casts that transpose), grouped by the place they come from, where they are a visible share.

    Why it costs time: such a copy reads and writes the whole tensor and computes nothing, and because one
    side is not contiguous it reaches less of the memory's bandwidth than a plain copy.

    Arithmetic: bytes read and written over the bandwidth that strided access reaches; the gain named is all
    of it, so it is the most that can be had.

    Example: ``x.permute(0, 2, 3, 1).contiguous()`` before a ``LayerNorm`` and back after it: keep the tensor
    in channels-last memory and the permuted view is contiguous already.

    Fix: keep one layout through the layer: write the producer's output in the order the consumer reads it,
    drop ``contiguous()`` where the consumer takes strides (matrix products and fused attention do).

    Source: NVIDIA, "CUDA C++ Best Practices Guide", coalesced access to global memory.
    """

    code = "LAY002"
    title = "copies that only change the layout"
    wrong = Case(
        "Norm()",
        "torch.empty(128, 384, 56, 56)",
        "--amp bf16 --channels-last --infer",
        """
        class Norm(nn.LayerNorm):
            def __init__(self, channels=384):
                super().__init__(channels)

            def forward(self, x):
                return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
        """,
    )
    right = wrong.but(".contiguous()", "")

    def check(self, context: Context) -> Proposals:
        ops = context.step.ops
        groups: dict[tuple[str, str], list[int]] = {}
        for index, entry in enumerate(ops):
            if _only_lays_out(entry):
                place = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", entry.site.module)
                groups.setdefault((place, entry.site.source), []).append(index)
        # Copies around NCHW convolutions go away with LAY001's change.
        images = {
            ref.id
            for _, entry, op in context.step.each(Conv)
            if not op.channels_last
            for ref in (*entry.inputs, *entry.outputs)
        }
        for (_, source), indices in groups.items():
            if any(ref.id in images for i in indices for ref in (*ops[i].inputs, *ops[i].outputs)):
                continue
            moved = sum(ops[index].op.moved_bytes for index in indices)
            time_s = context.time_s(indices)
            if not time_s:
                continue  # a profiled run did without them
            many = f"{len(indices):,} copies" if len(indices) > 1 else "1 copy"
            names = ", ".join(dict.fromkeys(ops[index].name for index in indices if ops[index].name))
            yield Proposal(
                place=context.place(indices, source),
                message=f"{many} only change{'s' * (len(indices) == 1)} the layout of tensors ({names})",
                fix="Keep one layout: write the tensor in the order it is read in, without contiguous().",
                safety=ADVICE,
                change=Change(dict.fromkeys(indices, ())),
                arithmetic=(
                    f"{size(moved)} in {seconds(time_s)}: {size(moved / time_s)}/s of "
                    f"{size(context.gpu.memory_bandwidth_bytes_per_s)}/s",
                    f"{ops[indices[0]].phase}: tensors of "
                    + " -> ".join(
                        "x".join(map(str, refs[0].shape))
                        for refs in (ops[indices[0]].inputs, ops[indices[0]].outputs)
                        if refs
                    ),
                ),
            )


def _only_lays_out(entry: StepOp) -> bool:
    """A copy of one whole tensor: what joins several (``cat``) or is put into a larger one is no layout's."""
    op = entry.op
    is_copy = isinstance(op, Streaming) and op.role == "copy" and op.strided
    sizes = [[ref.elements for ref in refs] for refs in (entry.inputs, entry.outputs)]
    return is_copy and len(sizes[0]) == 1 and sizes[0] == sizes[1]
