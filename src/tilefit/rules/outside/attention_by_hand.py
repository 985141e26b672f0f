"""NTC002: attention written out by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilefit.ops import BACKWARD_DATA, FORWARD, Attention, Gemm, Site, Step, StepOp, Streaming
from tilefit.rules.base import Case, Change, Context, Edits, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import Flow, distinct, read_from_outside, tensor_bytes
from tilefit.rules.merging import instead
from tilefit.units import size

#: The fused kernels stop here (PyTorch, ATen/native/transformers/cuda/sdp_utils.cpp).
_LARGEST_HEAD = 256
#: PyTorch's own module, which fuses where nobody wants its weights.
_RETURNS_WEIGHTS = "MultiheadAttention"
#: What scales, masks and adds to the scores before the softmax, and what a fused kernel does after it (names
#: without namespace and ``_``).
_BEFORE = frozenset("add sub rsub mul div where masked_fill maximum copy to_copy clone".split())
_AFTER = frozenset("native_dropout masked_fill copy to_copy clone".split())
#: What hides positions before the softmax; after it, only what is hidden already.
_MASKS = frozenset("add sub where masked_fill".split())


class AttentionByHand(Rule):
    """Attention is computed as two batched products with a softmax in between, each a kernel of its own.

    What it sees: A batched product whose result goes through scaling, masking and casts into a softmax
    over its last dimension, and from there, through dropout and casts, into a second batched product. What
    else is done to the scores, such as a soft cap by `tanh`, no fused kernel does, nor does one return them;
    but `nn.MultiheadAttention` averages its weights for a caller who does not read them.

    Why it costs time: The matrix of scores, queries x keys for every head, is written to memory and read
    back by every one of these kernels, and kept for the backward pass. A fused kernel keeps a tile of it on
    chip: its traffic is Q, K, V and the output.

    Arithmetic: Batch B, heads H, sequence S: each pass over the scores moves `B H S^2` elements, against
    `B H S d` for an operand. At S = 1024 and d = 64 one pass over the scores is 16 passes over an operand.

    Example: `F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p if self.training else 0.0)`;
    with `is_causal=True` in place of a causal mask it also skips half of the work (not counted here: a mask's
    values are not known).

    Source: Dao et al., "FlashAttention" (2022); PyTorch, `scaled_dot_product_attention`.
    """

    code = "NTC002"
    title = "attention written out by hand"
    wrong = Case(
        "SelfAttention()",
        "torch.empty(8, 1024, 1024)",
        "--amp bf16",
        """
        class SelfAttention(nn.Module):
            def __init__(self, width=1024, heads=16):
                super().__init__()
                self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
                y = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
                return self.out(y.transpose(1, 2).flatten(-2))
        """,
    )
    right = wrong.but(
        "torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v", "F.scaled_dot_product_attention(q, k, v)"
    )

    def check(self, context: Context) -> Proposals:
        flow = Flow(context.step)
        by_kernel: dict[tuple[Attention, str], list[AttentionChain]] = defaultdict(list)
        for chain in attention_chains(flow):
            site = context.step.ops[chain.softmax].site
            by_kernel[chain.fused, context.step.modules.get(site.module, "")].append(chain)
        for (fused, owner), chains in by_kernel.items():
            replaced: Edits = {}
            for chain in chains:
                replaced.update(_fused(flow, chain))
            scores = context.step.ops[chains[0].softmax].inputs[0]
            kernels = len(chains[0].forward) + len(chains[0].backward)
            yield Proposal(
                place=context.place(chain.softmax for chain in chains),
                message=f"attention runs as {kernels:,} kernels that pass the scores "
                f"{'x'.join(map(str, scores.shape))} through memory",
                fix="Call it with need_weights=False, as nobody reads its weights."
                if owner == _RETURNS_WEIGHTS
                else "Call F.scaled_dot_product_attention(q, k, v, ...) in their place.",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=(
                    f"scores: {size(scores.bytes)} for each pass of each kernel; "
                    f"fused, Q, K, V and the output: {size(fused.moved_bytes)} in all",
                ),
            )


@dataclass(frozen=True, slots=True)
class AttentionChain:
    """One attention: its operations, and the fused kernel that does the same."""

    softmax: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    fused: Attention


def attention_chains(flow: Flow) -> Iterator[AttentionChain]:
    """The attentions of a step that are written out by hand."""
    averages = _unread_averages(flow)
    for index, entry in enumerate(flow.step.ops):
        is_softmax = entry.op.category == "softmax" and entry.phase == FORWARD
        chain = _chain(flow, index, averages) if is_softmax and entry.site.fallback is None else None
        if chain is not None:
            yield chain


def _chain(flow: Flow, softmax: int, averages: set[int]) -> AttentionChain | None:
    step = flow.step
    entry = step.ops[softmax]
    scores = entry.inputs[0]
    if isinstance(entry.op, Streaming) and entry.op.strided:  # not over the last dimension
        return None

    def to_product(follow: Callable[[int], int | None], of: frozenset[str]) -> list[int] | None:
        passes = partial(_keeps_scores, scores=scores.elements, of=of)
        return flow.way(softmax, follow, _is_gemm, passes, most=9)

    def only_reader(index: int) -> int | None:
        return flow.after(index, entry.phase, averages)

    # Else scores or weights are returned to the caller, or read by something that a fused kernel does not do.
    before = to_product(flow.before, _BEFORE)
    if before is None or [only_reader(index) for index in before] != [softmax, *before[:-1]]:
        return None
    is_masked = any(step.ops[index].function in _MASKS for index in before)
    after = to_product(only_reader, _AFTER if is_masked else _AFTER - _MASKS)
    if after is None:
        return None
    first, second = _gemm(step.ops[before[-1]]), _gemm(step.ops[after[-1]])
    if first is None or second is None or max(first.k, second.n) > _LARGEST_HEAD:
        return None
    if (first.batch, first.m, first.n) != (second.batch, second.m, second.k):
        return None
    heads = scores.shape[1] if len(scores.shape) == 4 else 1
    masks = {
        ref.id: ref
        for index in (*before, *after)
        for ref in step.ops[index].inputs
        if isinstance(step.ops[index].op, Streaming)
        and index != softmax
        and len(ref.shape) >= 2
        and ref.shape[-1] == first.n
        and flow.writers[index].get(ref.id) not in (softmax, *before, *after)
    }
    fused = Attention(
        batch=first.batch // heads,
        num_heads=heads,
        seq_len=first.m,
        head_dim=first.k,
        kv_len=first.n,
        value_dim=second.n,
        mask_bytes=tensor_bytes(masks.values()),
        dropout_p=0.1 if any("dropout" in step.ops[i].name for i in after) else 0.0,
        dtype=first.dtype,
    )
    own = {*before, softmax, *after}
    own |= {i for index in own for i in flow.readers[index] if i in averages}
    forward = _with_copies(flow, own)
    backward = _backward(flow, softmax, after)
    return AttentionChain(softmax, tuple(sorted(forward)), tuple(sorted(backward)), fused)


def _unread_averages(flow: Flow) -> set[int]:
    """The averages of weights that ``nn.MultiheadAttention`` returns unless it is told not to, and nobody
    reads."""
    ops, modules = flow.step.ops, flow.step.modules
    return {
        index
        for index, entry in enumerate(ops)
        if entry.name == "aten.mean" and modules.get(entry.site.module) == _RETURNS_WEIGHTS
        if not flow.readers[index] and flow.returned.isdisjoint(ref.id for ref in entry.outputs)
    }


def _gemm(entry: StepOp) -> Gemm | None:
    op = entry.op
    return op if isinstance(op, Gemm) and not any(ref.parameter for ref in entry.inputs) else None


def _is_gemm(entry: StepOp) -> bool:
    return isinstance(entry.op, Gemm)


def _keeps_scores(entry: StepOp, scores: int, of: frozenset[str] = frozenset()) -> bool:
    """An elementwise operation or a copy over as many elements as there are scores; of these names, if any
    are given. Scores are not multiplied with each other, or with what is as large."""
    name, large = entry.function, sum(ref.elements == scores for ref in entry.inputs)
    if of and (name not in of or (name in ("mul", "div") and large > 1)):
        return False
    is_streamed = entry.op.category in ("pointwise", "copy")
    return is_streamed and any(ref.elements == scores for ref in entry.outputs)


def _with_copies(flow: Flow, own: set[int]) -> set[int]:
    """The operations and the copies that are made only for them."""
    step = flow.step
    copies = {
        writer
        for index in own
        for writer in flow.writers[index].values()
        if step.ops[writer].name == "aten.clone" and set(flow.readers[writer]) <= own
    }
    return own | copies


def _backward(flow: Flow, softmax: int, after: list[int]) -> set[int]:
    """The gradients: four products, the softmax's gradient and what lies between."""
    step = flow.step
    outputs = {ref.id for ref in step.ops[softmax].outputs}
    scores = step.ops[softmax].inputs[0].elements
    gradient = next(
        (
            index
            for index in flow.readers[softmax]
            if step.ops[index].phase == BACKWARD_DATA
            and isinstance(step.ops[index].op, Streaming)
            and "softmax" in step.ops[index].name
            and outputs & {ref.id for ref in step.ops[index].inputs}
        ),
        None,
    )
    if gradient is None:
        return set()
    own = {gradient}
    # Up to the gradient of the probabilities: dO V^T.
    index = gradient
    while not isinstance(step.ops[index].op, Gemm):
        incoming = [
            writer
            for number, writer in flow.writers[index].items()
            if number not in outputs and step.ops[writer].phase == BACKWARD_DATA
        ]
        if len(incoming) != 1:
            return set()
        index = incoming[0]
        own.add(index)
    probability_gradient = index
    # Down to the gradients of Q and K.
    products = flow.reachable(
        [gradient], lambda i: isinstance(step.ops[i].op, Gemm) or _keeps_scores(step.ops[i], scores)
    )
    down = {gradient}
    for i in sorted(products):
        if down & set(flow.writers[i].values()):
            own.add(i)
            if not isinstance(step.ops[i].op, Gemm):
                down.add(i)
    # The gradient of V reads the probabilities that the second product read, and the output's gradient.
    written = {ref.id for index in (softmax, *after[:-1]) for ref in step.ops[index].outputs}
    probabilities = {ref.id for ref in step.ops[after[-1]].inputs} & written
    output_gradient = {ref.id for ref in step.ops[probability_gradient].inputs}
    sources = {flow.writers[after[-1]][number] for number in probabilities}
    for i in {reader for source in sources for reader in flow.readers[source]}:
        entry = step.ops[i]
        is_product = isinstance(entry.op, Gemm) and entry.phase == BACKWARD_DATA
        if is_product and output_gradient & {ref.id for ref in entry.inputs}:
            own.add(i)
    return _with_copies(flow, own)


def _fused(flow: Flow, chain: AttentionChain) -> Edits:
    site = flow.step.ops[chain.softmax].site
    return in_one_kernel(flow.step, chain.forward, chain.fused, site) | in_one_kernel(
        flow.step, chain.backward, replace(chain.fused, direction=BACKWARD_DATA), site
    )


def in_one_kernel(step: Step, indices: Sequence[int], fused: Attention, site: Site) -> Edits:
    """The operations of one pass of an attention, in order, as its fused kernel, at the place of the last."""
    if not indices:
        return {}
    entries = [step.ops[index] for index in indices]
    ends = [e for e in entries if isinstance(e.op, Gemm)]
    kept = ends[-1:] if fused.direction == FORWARD else ends
    refs = read_from_outside(entries), distinct(ref for entry in kept for ref in entry.outputs)
    kernel = StepOp(fused, fused.direction, site, "aten.scaled_dot_product_attention", *refs)
    return instead(indices, kernel, at=indices[-1])
