"""PAR004: parameters are gathered twice, though there is memory to keep them."""

from __future__ import annotations

from tilefit.cost.footprint import usable_bytes
from tilefit.ops import FORWARD, OPTIMIZER
from tilefit.ops.collective import ALL_GATHER
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.exchanges import without, without_ops
from tilefit.rules.finding import SAFE
from tilefit.units import capacity, counted, seconds

#: What ``fully_shard`` copies before and behind a gathering.
_COPIES = ("aten._foreach_copy_", "aten.split_with_sizes_copy")


class GatheredAgain(Rule):
    """Sharded parameters are freed behind the forward pass and gathered again, though there is memory to keep
    them.

    What it sees: all-gathers in the backward pass of what was gathered in the forward pass already, on a GPU
    whose memory holds all of it beside what the step needs at its fullest.

    Why it costs time: each gathering sends all parameters over the links again, and copies them in and out.

    Arithmetic: the step without the all-gathers of the backward pass and their copies; its fullest moment
    with all that was gathered, against 94 % of the GPU's memory.

    Example: a model of 1 G parameters in bf16 needs 2 GB to keep them until the backward pass.

    Fix: ``fully_shard(layer, reshard_after_forward=False)``; of FSDP1 ``SHARD_GRAD_OP``.

    Source: PyTorch, ``torch.distributed.fsdp.fully_shard``; Rajbhandari and others, "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models" (2020), stages 2 and 3.
    """

    code = "PAR004"
    title = "parameters gathered twice"
    wrong = Case.training(
        """
        from torch.distributed.fsdp import fully_shard

        distributed.init_process_group("nccl")
        layers = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(6)]
        net = nn.Sequential(*layers).to("cuda")
        for layer in net:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(net)
        """,
        256,
        4096,
        "--ranks 8",
    )
    right = wrong.but("reshard_after_forward=True", "reshard_after_forward=False")

    def check(self, context: Context) -> Proposals:
        step, streams = context.step, context.estimate.streams
        if streams is None:
            return
        exchanges = step.program.exchanges
        gathers = [i for i, each in enumerate(exchanges) if each.name == ALL_GATHER and not each.grows]
        again = [i for i in gathers if exchanges[i].phase not in (FORWARD, OPTIMIZER)]
        before = [i for i in gathers if exchanges[i].phase == FORWARD]
        if not again or not before:
            return
        kept = sum(exchanges[i].bytes for i in before)
        needed = step.memory.peak_bytes + kept
        if needed > usable_bytes(context.gpu):
            return
        copies = {
            i
            for i, entry in enumerate(step.ops)
            if entry.name in _COPIES and entry.phase not in (FORWARD, OPTIMIZER)
        }
        changed = without_ops(step, copies, without(step.program, set(again)))
        taken_s = sum(streams.exchange_s[i] for i in again)
        yield Proposal(
            place=Place(exchanges[again[0]].site.module, exchanges[again[0]].site.source, len(again)),
            message=f"{counted(len(again), 'time')} a step parameters are gathered that were there in the "
            "forward pass",
            fix="Keep them: fully_shard(…, reshard_after_forward=False); of FullyShardedDataParallel "
            "ShardingStrategy.SHARD_GRAD_OP.",
            safety=SAFE,
            change=Change(step=changed),
            arithmetic=(
                f"{seconds(taken_s)} of all-gathers; to keep them makes the step need "
                f"{capacity(needed)} of {capacity(context.gpu.memory_bytes)}",
            ),
        )
