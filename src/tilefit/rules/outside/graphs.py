"""NTC006: compiled kernels that the host launches too slowly."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost import StepEstimate, estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Collective, Recurrent, Step
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.units import seconds

#: Share of the step that the GPU waits for the host, from which on graphs are worth the memory they keep.
WAITS = 0.1


class Graphs(Rule):
    """The host limits a compiled step whose kernels CUDA graphs could replay.

    What it sees: A compiled step in which the GPU waits for the host's launches for a tenth of the time or
    more. Of a step that is not compiled, NTC001 says what graphs would save beyond the compiler's fusion.
    Passed over is what no graph spans: a model that the compiler splits into parts, as one that reads a
    tensor's value, recurrent layers, and exchanges between GPUs.

    Why it costs time: Compiled or not, each kernel is launched by the host, which takes 17 to 26 µs for one
    that may run for 5. A graph is launched once for all kernels of the forward pass, and once for those of
    the backward pass.

    Arithmetic: The step is priced twice: with each launch on the host, and with none of them within the
    model, but for each pass what guards and the wrapper around it take, for each parameter the way of its
    gradient, and the optimizer as it is (NTC003 makes it one kernel). The slower of host and GPU sets the
    pace. Of 25 steps that were measured so on an H200 and an H100 the time said then was 10 % off in the
    median, more than 30 % in four, and 129 % in a short one. All became faster: by 1.07 times what was said
    in the median, eight of ten by 0.59 to 2.42 times (`benchmarks/graph_steps.py`; with the other fixes of
    these plans). What is said is said with an interval.

    Example: `model = torch.compile(model, mode="reduce-overhead")`. Inputs of other sizes are recorded anew,
    and the memory of the activations stays taken. What a call returned is written over by the next one: clone
    what is to outlive it.

    Source: Ansel et al., "PyTorch 2" (2024); PyTorch, `torch.compile`, the argument `mode`.
    """

    code = "NTC006"
    title = "compiled kernels that CUDA graphs could replay"
    wrong = Case(
        "nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(12)))",
        "torch.empty(512, 512)",
        "--amp bf16 --compile --fused-optimizer",
    )
    right = wrong.but("empty(512,", "empty(262144,")

    def check(self, context: Context) -> Proposals:
        step, before = context.step, context.estimate
        if not step.settings.compiled or not is_replayable(step, before):
            return
        after = replayed(step, context.gpu)
        yield Proposal(
            place=Place(),
            message=f"the host limits the compiled step: {seconds(before.host_time_s)} to launch it, the GPU "
            f"works for {seconds(before.gpu_time_s)}",
            fix='Replay its kernels from CUDA graphs: torch.compile(model, mode="reduce-overhead"); clone '
            "outputs that are to outlive the next call.",
            safety=SAFE,
            change=Change(step=_graphed(step), rewrite=_graphed),
            arithmetic=(
                f"replayed, the host takes {seconds(after.host_time_s)} and the GPU "
                f"{seconds(after.gpu_time_s)}",
            ),
        )


def is_replayable(step: Step, estimate: StepEstimate) -> bool:
    """Whether a compiled step is one whose host is slow enough, and whose kernels graphs can hold."""
    is_graphed = step.settings.cuda_graph or any(entry.replayed for entry in step.ops)
    return estimate.launch_share > WAITS and not is_graphed and not is_in_parts(step)


def is_in_parts(step: Step) -> bool:
    """Whether the compiler makes several parts of the model, with Python in between that no graph spans.

    Recurrent layers are such Python: the compiler does not look into them. Nor are collectives in its graphs.
    """
    return step.settings.split or any(isinstance(entry.op, Recurrent | Collective) for entry in step.ops)


def replayed(step: Step, gpu: Gpu) -> StepEstimate:
    """The price of a compiled step whose kernels are replayed from CUDA graphs."""
    return estimate_step(_graphed(step), gpu)


def _graphed(step: Step) -> Step:
    return replace(step, settings=replace(step.settings, cuda_graph=True))
