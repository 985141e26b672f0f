"""RNN001: cuDNN cannot use its persistent algorithm."""

from __future__ import annotations

from functools import partial

from tilefit.cost.cudnn import STANDARD, cudnn_algorithm
from tilefit.ops import BACKWARD_WEIGHT
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.recurrent.adaptations import advice, applied, fewest
from tilefit.rules.recurrent.layers import exchanged, recurrent_layers


class PersistentAlgorithm(Rule):
    """A recurrent layer misses a condition of cuDNN's persistent algorithm.

    What it sees: A layer for which PyTorch asks cuDNN for its standard algorithm, although a change
    of element type, sizes or module structure would let it ask for the persistent one. The finding names
    the algorithm that runs, the condition that fails, and the smallest set of changes that meets all.

    Why it costs time: The standard algorithm launches a product and a pointwise kernel for every time
    step, and every product loads the recurrent weights again. The persistent algorithm is one kernel that
    keeps the weights on chip for the whole sequence.

    Arithmetic: PyTorch asks for the persistent algorithm in fp16 only, for one layer and one direction,
    no projection, no PackedSequence, hidden size at most 1024, hidden and input size multiples of 128. On
    compute capability 8.0 and later with at least 98 SMs: never for a GRU; LSTM with a mini-batch that is a
    multiple of 8 and at most 128. On an H200 an LSTM of 1024 units at mini-batch 16 takes 2.3 us per time
    step, of 1152 units 13.7. It does not always pay: at mini-batch 128 the standard algorithm can win, and
    the rule is then silent.

    Example: Two stacked `nn.LSTM(d, d)` in place of `nn.LSTM(d, d, num_layers=2)`; mini-batch 16 in
    place of 12.

    Source: PyTorch, `aten/src/ATen/native/cudnn/RNN.cpp`, `get_algo`.
    """

    code = "RNN001"
    title = "cuDNN's persistent algorithm is out of reach"
    wrong = Case("nn.LSTM(1024, 1024)", "torch.empty(256, 12, 1024)", "--amp fp16")
    right = wrong.but("12", "16")

    def check(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        for op, places in recurrent_layers(step).items():
            algorithm, reason = cudnn_algorithm(op, gpu)
            if algorithm != STANDARD:
                continue
            directions = {step.ops[i].op.direction for _, rows in places for i in rows}  # type: ignore[attr-defined]
            changes = fewest(op, gpu, directions - {BACKWARD_WEIGHT})
            if not changes:
                continue
            replaced = exchanged(step, places, partial(applied, changes=changes))
            after = applied(op, changes)[0]
            words = advice(op, changes)
            yield Proposal(
                place=context.place(rows[0] for _, rows in places),
                message=f"cuDNN runs its {algorithm} algorithm: {reason}",
                fix=words[0].upper() + words[1:] + ".",
                safety=UNSAFE if any(change.safety == UNSAFE for change in changes) else SAFE,
                change=Change(replaced),
                arithmetic=(
                    f"{op.shape}, {op.dtype}: {algorithm}, a product and a pointwise kernel per time step",
                    f"{after.shape}, {after.dtype}: {cudnn_algorithm(after, gpu)[0]}, one kernel",
                ),
            )
