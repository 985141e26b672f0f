"""NTC004: logits and loss in fp32 over a large vocabulary."""

from __future__ import annotations

from collections import defaultdict

from tilefit.ops import FORWARD, Step, StepOp, Streaming
from tilefit.ops.dtypes import HALVES, size_bytes
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import Flow, linear_calls, tensor_bytes
from tilefit.rules.layers import Linear, gemm
from tilefit.rules.merging import instead
from tilefit.units import size

#: Logits of fewer columns cost too little to look at: a choice.
LARGE_VOCABULARY = 8192
#: A tensor with this share of the logits' elements is one of their copies (a shifted target drops rows).
_SAME_SIZE = 0.9


class WideLoss(Rule):
    """The logits of a large vocabulary pass through memory in fp32 several times.

    What it sees: In training, a linear layer of at least 8192 outputs in half precision, whose result is
    widened to fp32 for a softmax and a loss, and the gradients on the way back.

    Why it costs time: The logits are the largest tensor of a language model. Cast, log-softmax, its
    gradient and the cast back each read and write all of them, and the fp32 copies are kept for the backward
    pass: they often set the peak of memory, hence the largest batch.

    Arithmetic: For N logits the chain moves 6 N (cast) + 8 N (log-softmax) + 8 N to 12 N (gradient) + 6 N
    (cast) bytes. A fused loss reads the half-precision logits twice (once for maximum and sum, once for the
    gradient, computing in fp32 registers) and writes the gradient over them: 6 N in all. Chunked over the
    rows it need not hold all logits either; that saves memory, not time, and is not in the price.

    Example: Liger Kernel's fused linear cross-entropy in place of `lm_head` and `F.cross_entropy`;
    `F.linear_cross_entropy` with chunking in recent PyTorch for the memory.

    Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024); Wijmans et al.,
    "Cut Your Losses in Large-Vocabulary Language Models" (2024).
    """

    code = "NTC004"
    title = "logits and loss in fp32 over a large vocabulary"
    wrong = Case(
        "Head()",
        "(torch.empty(8192, 64), torch.zeros(8192, dtype=torch.long))",
        "--amp bf16",
        """
        class Head(nn.Module):
            def __init__(self, features=64, vocabulary=48000):
                super().__init__()
                self.head = nn.Linear(features, vocabulary, bias=False)

            def forward(self, x, targets):
                return F.cross_entropy(self.head(x), targets)
        """,
    )
    right = wrong.but("48000", "8000")

    def check(self, context: Context) -> Proposals:
        step = context.step
        if not step.settings.training:
            return
        flow = Flow(step)
        losses: dict[tuple[str, int, int, str, int], list[list[int]]] = defaultdict(list)
        layers: dict[str, Linear] = {}
        for call in linear_calls(step):
            entry = step.ops[call.forward]
            op = gemm(step, call.forward)
            if op.n < LARGE_VOCABULARY or op.dtype not in HALVES or entry.recomputed:
                continue
            gradients = [i for i in (call.backward_data, call.backward_weight) if i is not None]
            chain = _chain(flow, call.forward, gradients, op.m * op.n) if gradients else []
            if _widened(step, chain, op.m * op.n) and any(
                step.ops[i].op.category == "softmax" for i in chain
            ):
                layers[call.layer.module] = call.layer
                losses[call.layer.module, op.m, op.n, op.dtype, len(chain)].append(chain)
        for (module, rows, vocabulary, dtype, kernels), chains in losses.items():  # of micro-batches, say
            logits, half = rows * vocabulary, size_bytes(dtype)
            fused = Streaming("loss", logits, 2 * logits * half, logits * half, dtype, inner=vocabulary)
            replaced: Edits = {}
            for chain in chains:
                kernel = StepOp(fused, FORWARD, step.ops[chain[0]].site, "fused cross entropy")
                replaced |= instead(chain, kernel)
            moved = sum(step.ops[i].op.moved_bytes for i in replaced)
            times = f", {len(chains)} times" if len(chains) > 1 else ""
            yield Proposal(
                place=Place.of([layers[module]]),
                message=f"{rows} x {vocabulary} logits pass through {kernels} kernels, in fp32{times}",
                fix="Use a fused cross-entropy that reads the logits in half precision and writes their "
                "gradient over them: compile the loss alone, as tilefit fix does (fuse-loss), or take Liger "
                "Kernel's (chunked over rows it also saves their memory).",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=(
                    f"{size(moved)} moved; fused {size(len(chains) * fused.moved_bytes)}",
                    f"copies of the logits in fp32: {size(_widened(step, chains[0], logits))} of memory, "
                    "less what is freed in between",
                ),
            )


def _widened(step: Step, chain: list[int], logits: int) -> int:
    """Bytes of the copies of logits in fp32 that a chain makes."""
    outputs = (ref for i in chain for ref in step.ops[i].outputs)
    wide = {ref.id: ref for ref in outputs if ref.dtype == "fp32" and ref.elements >= _SAME_SIZE * logits}
    return tensor_bytes(wide.values())


def _chain(flow: Flow, head: int, gradients: list[int], logits: int) -> list[int]:
    """The streaming operations over all logits, from the head's product to its gradients."""
    step = flow.step

    def is_large(index: int) -> bool:
        entry = step.ops[index]
        return isinstance(entry.op, Streaming) and any(
            ref.elements >= _SAME_SIZE * logits for ref in (*entry.inputs, *entry.outputs)
        )

    forward = flow.reachable([head], lambda i: is_large(i) and step.ops[i].phase == FORWARD)
    backward = flow.needed(gradients, lambda i: is_large(i) and step.ops[i].phase != FORWARD)
    return sorted(forward | backward)
