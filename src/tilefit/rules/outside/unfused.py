"""NTC001: unfused streaming operations."""

from __future__ import annotations

from collections import defaultdict

from tilefit.cost import StepEstimate, estimate_step
from tilefit.cost.fusion import fuse
from tilefit.cost.lowering import PAD
from tilefit.cost.uncompiled import COMPILED_SHARE
from tilefit.gpus import Gpu
from tilefit.ops import Conv, Gemm, Op, Program, Step, StepOp, Streaming
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, SAFE
from tilefit.rules.outside.graphs import is_replayable, replayed
from tilefit.units import seconds, share, size

_WORST = 3
#: Fusion and the compiler's other work are worth a word from this share of the step on.
_LEAST_SHARE = 0.005
#: What graphs save beyond is told from this share of the step on: they keep memory taken. A choice.
_GRAPHS_SHARE = 0.02
#: What AOTAutograd does to a step's parameters that are left out.
LEFT_OUT = "what the loss leaves out of the output gets gradients of zeros, not none: weight decay shrinks it"
#: What else the compiler does, by the kind of operation that gains by it.
_OTHER_WORK: dict[type[Op], str] = {
    Gemm: "padding of misaligned products",
    Conv: "layout of convolutions, NHWC",
}


class Unfused(Rule):
    """Chains of streaming operations run as one kernel each, and could be compiled into few.

    What it sees: A step that is not compiled, and what is left of its streaming operations when chains
    of pointwise operations, casts, normalisations, softmax and reductions become one kernel each. A program
    that differentiates a backward pass (`create_graph=True`: gradient penalties, MAML, equations of physics)
    is passed over: through a compiled model that is an error in PyTorch. Where less than half of a program's
    forward operations are its models', as of an agent's losses, compiling these is no change that is sure.

    Why it costs time: Such an operation costs what its bytes cost. In a chain every operation writes its
    result to memory for the next one to read it back, and every one is launched by the host. None of it uses
    the Tensor Cores, so a faster GPU hardly helps.

    Arithmetic: A chain of c pointwise operations over N half-precision elements moves about 4 c N bytes,
    compiled 4 N. The finding gives the share of the GPU's time outside matrix products, convolutions,
    attention and recurrence, the kernels and bytes before and after, and the modules where most is saved.
    The model of compilation fuses along the data flow within the forward and the backward pass, writes only
    results that are needed outside a chain, computes cheap ones again, and leaves products as they are, but
    for misaligned ones, which the compiler pads by itself where that pays: the finding says how much of the
    saving that is. A model that takes another path when it is compiled is seen on that path by
    `tilefit check --compile` alone: the encoders of transformers 5.17 then make a mask that costs them the
    fused attention (NTC005; BERT and ViT in the table below).

    Example: `model = torch.compile(model)`, or a fused form of one chain: `F.gelu(x, approximate="tanh")`,
    `F.rms_norm`.

    Source: Ansel et al., "PyTorch 2" (2024); NVIDIA, "Memory-Limited Layers User's Guide".
    """

    code = "NTC001"
    title = "streaming operations that could be fused"
    wrong = Case(
        "nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), RmsNorm(1024), nn.GELU()) for _ in range(4)))",
        "torch.empty(16384, 1024)",
        "--amp bf16",
        """
        class RmsNorm(nn.Module):
            def __init__(self, features):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(features))

            def forward(self, x):
                wide = x.float()
                return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))
        """,
    )
    right = wrong.under("--amp bf16 --compile")

    def check(self, context: Context) -> Proposals:
        step, gpu, before = context.step, context.gpu, context.estimate
        habits = {each.name for each in step.program.habits}
        if step.settings.compiled or "differentiates_backward" in habits:
            return
        fused = fuse(step)
        if _count(fused) == _count(step):
            return
        after = estimate_step(fused, gpu)
        others_s = {
            what: _time_s(kind, step, before) - _time_s(kind, fused, after)
            for kind, what in _OTHER_WORK.items()
            if kind is not Conv or _in_nhwc(fused) > _in_nhwc(step)
        }
        saved_s = before.time_s - after.time_s
        if before.gpu_time_s > before.host_time_s:  # else it is launches that are saved
            saved_s = min(saved_s, before.gpu_time_s - after.gpu_time_s - sum(others_s.values()))
        if saved_s < _LEAST_SHARE * before.time_s:
            return  # all the compiler would do is what the alignment and layout rules say
        outside_s = sum(
            e.time_s for op, e in zip(step.ops, before.ops, strict=True) if isinstance(op.op, Streaming)
        )
        saved: dict[str, float] = defaultdict(float)
        for sign, ops, estimates in ((1, step, before), (-1, fused, after)):
            for entry, estimate in zip(ops.ops, estimates.ops, strict=True):
                saved[_class(step, entry.site.module)] += sign * estimate.time_s
        ranked = sorted(saved.items(), key=lambda item: -item[1])
        least_s = _LEAST_SHARE * before.time_s
        worst = [f"{name} {seconds(time_s)}" for name, time_s in ranked[:_WORST] if time_s > least_s]
        others = "".join(
            f"; {seconds(time_s)} of the GPU time saved is the compiler's own {what}"
            for what, time_s in others_s.items()
            if time_s > least_s
        )
        moved, left_moved = _moved(step), _moved(fused)
        fewer = ", in fewer kernels" if left_moved >= moved else ""
        left = f"{_count(fused):,} {'is' if _count(fused) == 1 else 'are'} left"
        advice, safety = _advice(step.program)
        if step.left_out:
            advice, safety = f"{advice} But {LEFT_OUT}.", ADVICE
        yield Proposal(
            place=Place(),
            message=f"{_count(step):,} streaming operations take {share(outside_s / before.gpu_time_s)} of "
            f"the GPU time, outside the Tensor Cores; compiled, {left}",
            fix=advice + _replayed(fused, after, gpu),
            safety=safety,
            change=Change(step=fused, rewrite=fuse),
            arithmetic=(
                f"streaming operations move {size(moved)}; compiled {size(left_moved)}{fewer}{others}",
                f"most GPU time is saved in {', '.join(worst)}" if worst else "launches are what is saved",
            ),
        )


def _replayed(fused: Step, after: StepEstimate, gpu: Gpu) -> str:
    """What CUDA graphs save beyond, as NTC006 says of the compiled step; empty where that is nothing."""
    more_s = after.time_s - replayed(fused, gpu).time_s if is_replayable(fused, after) else 0.0
    if more_s < _GRAPHS_SHARE * after.time_s:
        return ""
    graphs = f'mode="reduce-overhead" (CUDA graphs) saves {seconds(more_s)} more'
    return f" The host still limits the compiled step: {graphs}."


def _advice(program: Program | None) -> tuple[str, str]:
    """What to write, and its level: past a compiled model its methods call its parts as they are, and what a
    program computes outside of its models is not compiled with them."""
    habits = program.habits if program else ()
    name = next((each.detail for each in habits if each.name == "called_by_a_method"), "")
    if name:
        method = name.rpartition(".")[2]
        return (
            f"Compile the method that calls its layers: model.{method} = torch.compile(model.{method}); "
            "torch.compile(model) compiles calls of the model itself, of which there are none.",
            SAFE,
        )
    if program and program.in_models < COMPILED_SHARE:
        return (
            "Make a function of what computes the loss, and compile that: @torch.compile. The models alone "
            f"are {share(program.in_models)} of the forward operations.",
            ADVICE,
        )
    if program and (program.models[1:] or program.optimizers[1:]):
        return "Compile each of the step's models: model = torch.compile(model).", SAFE
    return "Compile the model: model = torch.compile(model).", SAFE


def _class(step: Step, module: str) -> str:
    return step.modules.get(module) or module or "the model's own code"


def _streams(entry: StepOp) -> bool:
    """It is a streaming operation in its own right; a copy that pads is part of its product."""
    return isinstance(entry.op, Streaming) and entry.name != PAD


def _count(step: Step) -> int:
    return sum(map(_streams, step.ops))


def _in_nhwc(step: Step) -> int:
    return sum(op.channels_last for *_, op in step.each(Conv))


def _time_s(kind: type[Op], step: Step, estimate: StepEstimate) -> float:
    return sum(
        e.time_s
        for entry, e in zip(step.ops, estimate.ops, strict=True)
        if isinstance(entry.op, kind) or (kind is Gemm and entry.name == PAD)
    )


def _moved(step: Step) -> int:
    return sum(entry.op.moved_bytes for entry in step.ops if _streams(entry))
