"""PRC004: upcasts on the hot path."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tilefit.ops import FORWARD, Gemm, StepOp, Streaming
from tilefit.ops.dtypes import HALVES
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, SAFE, UNSAFE
from tilefit.rules.flow import Flow, is_cast, read_from_outside, tensor_bytes
from tilefit.rules.merging import instead
from tilefit.rules.outside.attention_by_hand import attention_chains
from tilefit.units import counted, share, size

# A detour through fp32 shorter than this is a kernel launch, not memory traffic.
_LEAST_ELEMENTS = 1 << 16
_REDUCING = {"reduction", "normalization", "softmax"}
_FUSABLE = ("pointwise", "reduction", "normalization", "softmax", "copy")


class Upcasts(Rule):
    """A mixed-precision step goes back to fp32 where it need not.

    What it sees: Two things. (1) Detours: a large half-precision activation is cast to fp32 by a kernel
    of its own, a few operations stream it in fp32, and another kernel casts the result back. (2) fp32 or
    TF32 products inside a step whose other products are in half precision.

    Why it costs time: A separate cast moves 6 bytes per element and computes nothing, and all
    operations in between move 4 bytes instead of 2. A kernel that reads half, computes in fp32 registers and
    writes half gives the same precision for 4 bytes in all. An fp32 product runs without the half-precision
    Tensor Cores, 2 to 15 times slower.

    Arithmetic: A detour of one normalisation over N elements moves 6 N (cast) + 8 N (normalise) + 6 N
    (cast) bytes; fused, 4 N.

    Example: `F.rms_norm(x, (d,), weight)` on a bf16 `x` in place of `x.float()`, `pow`, `mean`, `rsqrt`,
    `mul`, `.to(bf16)`; `F.softmax(x, -1, dtype=torch.float32)` in place of `F.softmax(x.float(), -1)`.

    Source: NVIDIA, "Memory-Limited Layers User's Guide": such layers cost what their bytes cost.
    """

    code = "PRC004"
    title = "upcasts on the hot path"
    wrong = Case(
        "nn.Sequential(*(nn.Sequential(RmsNorm(2048), nn.Linear(2048, 2048)) for _ in range(3))).bfloat16()",
        "torch.empty(16384, 2048, dtype=torch.bfloat16)",
        "--infer",
        """
        class RmsNorm(nn.Module):
            def __init__(self, features):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(features))

            def forward(self, x):
                wide = x.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
                return self.weight * wide.to(x.dtype)
        """,
    )
    right = wrong.but("RmsNorm(2048)", "nn.RMSNorm(2048)")

    def check(self, context: Context) -> Proposals:
        yield from _detours(Flow(context.step))
        yield from _wide_products(context)


def _detours(flow: Flow) -> Proposals:
    step = flow.step
    by_owner: dict[str, list[tuple[list[int], StepOp]]] = defaultdict(list)
    # Attention written out by hand, or by PyTorch, is replaced as a whole (NTC002, NTC005).
    taken = {i for chain in attention_chains(flow) for i in (*chain.forward, *chain.backward)}
    taken.update(i for i, entry in enumerate(step.ops) if entry.site.fallback is not None)
    for index, entry in enumerate(step.ops):
        if index in taken or not _is_upcast(entry):
            continue
        region = _region(flow, index)
        if region is None or taken & set(region):
            continue
        taken.update(region)
        fused = _fused(flow, region)
        # The gradient of a detour belongs to the same finding.
        by_owner[step.modules.get(fused.site.module, "") or fused.site.module].append((region, fused))
    for regions in by_owner.values():
        replaced: Edits = {}
        saved = 0
        for region, fused in regions:
            replaced |= instead(region, fused, at=region[-1])
            saved += sum(step.ops[i].op.moved_bytes for i in region) - fused.op.moved_bytes
        first, fused = regions[0]
        half = step.ops[first[0]].inputs[0].dtype
        names = ", ".join(dict.fromkeys(step.ops[i].function for i in first))
        yield Proposal(
            place=Place.of(fused.site for _, fused in regions),
            message=f"{half} activations are cast to fp32 and back around {len(first)} kernels ({names})",
            fix=_advice(names, half, reduces=any(each.op.category in _REDUCING for _, each in regions)),
            safety=ADVICE if "native_" in names else SAFE,
            change=Change(replaced),
            arithmetic=(
                f"{len(regions)} detours through fp32 move {size(saved)} more than one kernel each "
                f"that reads and writes {half}",
            ),
        )


def _advice(names: str, half: str, *, reduces: bool) -> str:
    """What to do about a detour through kernels of these ``names``."""
    if "native_" in names:  # a normalisation's own kernel, to which autocast gives fp32
        return (
            "Compile the model: torch.compile fuses the casts that autocast puts around a normalization. Or "
            f"run it in {half}, weights too, in autocast(enabled=False): its kernel computes in fp32 inside."
        )
    if reduces:
        known = "F.rms_norm, F.layer_norm, F.softmax(dtype=torch.float32)"
    else:
        known = 'F.gelu(approximate="tanh"), F.silu'
    return (
        f"Use a kernel that computes in fp32 inside: {known}, or torch.compile; tilefit fix compiles the "
        "module alone."
    )


def _is_upcast(entry: StepOp) -> bool:
    if not is_cast(entry) or entry.inputs[0].parameter:
        return False
    source, result = entry.inputs[0], entry.outputs[0]
    return source.dtype in HALVES and result.dtype == "fp32" and source.elements >= _LEAST_ELEMENTS


def _region(flow: Flow, start: int) -> list[int] | None:
    """The operations from an upcast to the casts back, if nothing of the same phase leaves in between."""
    step = flow.step
    is_forward = step.ops[start].phase == FORWARD
    inside = {start}
    ends = set()
    todo = [start]
    while todo:
        current = todo.pop()
        readers = [i for i in flow.readers[current] if (step.ops[i].phase == FORWARD) == is_forward]
        if not readers:
            return None  # an fp32 result of the step itself
        for index in readers:
            entry = step.ops[index]
            if index in inside:
                continue
            if entry.op.category not in _FUSABLE:
                return None
            inside.add(index)
            if is_cast(entry) and entry.outputs[0].dtype in HALVES:
                ends.add(index)
            else:
                todo.append(index)
    kept = {ref.id for i in inside - ends for ref in step.ops[i].outputs}
    if not flow.returned.isdisjoint(kept):
        return None
    # Several normalizations, as where gradients of many layers meet, are no one kernel.
    if len({step.ops[i].site.module for i in inside if "native_" in step.ops[i].name}) > 1:
        return None
    # Where several upcasts meet, as on an fp32 residual stream, fp32 is a choice and not a detour; a cast
    # alone has nothing to be fused with.
    if not ends or len(inside) < 3 or sum(_is_upcast(step.ops[i]) for i in inside) > 1:
        return None
    return sorted(inside)


def _fused(flow: Flow, region: list[int]) -> StepOp:
    """One kernel that reads what enters a region and writes what leaves it."""
    step = flow.step
    inside = set(region)
    entries = [step.ops[i] for i in region]
    reads = read_from_outside(entries)
    ends = [e for e in entries if is_cast(e) and e.outputs[0].dtype in HALVES]
    writes = {ref.id: ref for entry in ends for ref in entry.outputs}
    # What the backward pass reads is kept, in half.
    half = ends[-1].outputs[0].dtype
    for i in region:
        if set(flow.readers[i]) - inside:
            writes.update((ref.id, replace(ref, dtype=half)) for ref in step.ops[i].outputs)
    last = ends[-1]
    largest = max(ref.elements for ref in (*reads, *writes.values()))
    roles = {entry.op.category for entry in entries}
    reduces = roles & _REDUCING
    inner = max(entry.op.inner for entry in entries if isinstance(entry.op, Streaming))
    op = Streaming(
        "normalization" if reduces else "pointwise",
        largest,
        tensor_bytes(reads),
        tensor_bytes(writes.values()),
        last.outputs[0].dtype,
        inner=inner if reduces else 0,
    )
    site = next(entry.site for entry in entries if not is_cast(entry))
    return replace(last, op=op, site=site, inputs=reads, outputs=tuple(writes.values()))


def _wide_products(context: Context) -> Proposals:
    step = context.step
    products = [(i, op) for i, entry, op in step.each(Gemm) if entry.site.fallback is None]
    halves = [op for _, op in products if op.dtype in HALVES]
    wide = [(i, op) for i, op in products if op.dtype in ("fp32", "tf32")]
    if not wide or sum(op.flop for op in halves) < sum(op.flop for _, op in wide):
        return
    half = halves[0].dtype
    by_owner: dict[str, list[tuple[int, Gemm]]] = defaultdict(list)
    for index, op in wide:
        site = step.ops[index].site
        by_owner[step.modules.get(site.module, "") or site.module].append((index, op))
    for group in by_owner.values():
        replaced = {i: (replace(step.ops[i], op=replace(op, dtype=half, out_dtype="")),) for i, op in group}
        entries = [step.ops[i] for i, _ in group]
        site = next((e.site for e in entries if e.phase == FORWARD), entries[0].site)
        part = sum(op.flop for _, op in group) / step.flop
        yield Proposal(
            place=Place.of((entry.site for entry in entries), site.source),
            message=f"{counted(len(group), 'product')} in {group[0][1].dtype} inside a {half} step",
            fix=f"Remove the cast to fp32 (or the autocast(enabled=False) region) in front of them, so that "
            f"they run in {half}.",
            safety=UNSAFE,
            change=Change(replaced),
            arithmetic=(f"{group[0][1].shape} and alike: {share(part)} of the step's FLOPs",),
        )
