"""ALN007: sizes of recurrent layers."""

from __future__ import annotations

from tilefit.rules.alignment.features import Group, designed
from tilefit.rules.alignment.padding import misfit, pairs, with_zeros
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule


class RecurrentSizes(Rule):
    """The hidden or input size of a recurrent layer is not a multiple of 16 bytes.

    What it sees: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` whose hidden, projection or input (embedding) size
    is no multiple of 8 in fp16 and bf16 or 4 in TF32.

    Why it costs time: the input projection is a product over all time steps, the recurrence one per time
    step; hidden and input size are contiguous in their weights and inputs, see ALN001. The batch is
    contiguous nowhere. What cuDNN's persistent kernels ask for besides is another matter (family RNN).

    Arithmetic: an LSTM layer runs a product [steps x batch, 4 hidden, input] and, at every step,
    [batch, 4 hidden, hidden], each with both gradients.

    Example: ``nn.LSTM(650, 650)`` -> ``nn.LSTM(656, 656)`` (656 = 82 x 8). The unused units of a trained
    layer stay zero if all their weights and biases are zero.

    Sources: NVIDIA, "Recurrent Layers User's Guide", on hidden size and mini-batch.
    """

    code = "ALN007"
    title = "recurrent sizes not a multiple of 16 bytes"
    wrong = Case("nn.LSTM(1501, 1501)", "torch.empty(100, 256, 1501)", "--amp bf16")
    right = wrong.but("1501", "1536")

    def check(self, context: Context) -> Proposals:
        for group in designed(context.step):
            # A vocabulary that meets the recurrent size is ALN002's, with both sizes.
            if group.recurrent and not group.vocabularies:
                yield self._proposal(context, group)

    def _proposal(self, context: Context, group: Group) -> Proposal:
        step = context.step
        sizes, resized, streams = group.padded(context)
        how, safety = with_zeros(step, sizes)
        first = step.ops[group.recurrent[0]]
        return Proposal(
            place=context.place(group.recurrent),
            message=f"recurrent sizes of {' and '.join(map(str, sizes))} are {misfit(group.dtype)}",
            fix=(f"Change {pairs(sizes)}, also in the embedding or layer before and after it ({how})."),
            safety=safety,
            change=Change({**streams, **resized}),
            arithmetic=(
                f"{first.op.shape} {group.dtype}, all passes and the linear layers beside it: "
                f"{context.saving(resized)}",
            ),
        )
