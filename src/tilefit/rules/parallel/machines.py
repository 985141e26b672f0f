"""PAR005: tensor-parallel ranks are in several machines."""

from __future__ import annotations

from dataclasses import replace

from tilefit.ops import Exchange
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.units import seconds


class AcrossMachines(Rule):
    """Ranks that share each layer are in several machines.

    What it sees: collectives of activations, which the computation waits for in every layer, whose group of
    ranks is spread over machines although a machine has as many GPUs.

    Why it costs time: between machines there is a tenth of the bandwidth of the links inside, and a message
    takes several times as long to start. Nothing hides these collectives. Sums of gradients are fewer, can
    be hidden, and are what should cross.

    Arithmetic: the step with each such group in one machine, and as many fewer ranks of the other groups in
    each.

    Example: ``init_device_mesh("cuda", (8, 2), mesh_dim_names=("tp", "dp"))`` on two machines of eight: ranks
    that share a layer are 0, 2, 4, … of both.

    Fix: make the dimension of tensor parallelism the last of the mesh, whose ranks are neighbours.

    Source: Narayanan and others, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021), takeaway 1.
    """

    code = "PAR005"
    title = "tensor-parallel ranks in several machines"
    wrong = Case.training(
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cuda", (8, 2), mesh_dim_names=("tp", "dp"))
        layers = [nn.Sequential(nn.Linear(8192, 28672), nn.GELU(), nn.Linear(28672, 8192)) for _ in range(2)]
        net = nn.Sequential(*layers).to("cuda")
        for layer in net:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        """,
        4096,
        8192,
        "--ranks 16",
    )
    right = wrong.but('(8, 2), mesh_dim_names=("tp", "dp")', '(2, 8), mesh_dim_names=("dp", "tp")')

    def check(self, context: Context) -> Proposals:
        step, streams = context.step, context.estimate.streams
        if streams is None:
            return
        program = step.program
        crossing = {
            each.group: each
            for each in program.exchanges
            if each.grows and each.per_machine < each.ranks <= program.per_machine
        }
        if not crossing:
            return
        shared = max(each.ranks for each in crossing.values())

        def inside(each: Exchange) -> Exchange:
            if each.group in crossing:
                return replace(each, per_machine=each.ranks)
            return replace(each, per_machine=max(1, min(each.ranks, program.per_machine // shared)))

        own = [i for i, each in enumerate(program.exchanges) if each.group in crossing]
        first = program.exchanges[own[0]]
        changed = replace(program, exchanges=tuple(map(inside, program.exchanges)))
        exposed_s = sum(streams.exposed_s[i] for i in own)
        yield Proposal(
            place=Place(first.site.module, first.site.source, len(own)),
            message=f"{first.ranks} ranks that share each layer are in several machines, "
            f"{first.per_machine} in each",
            fix="Make the dimension of tensor parallelism the last of the device mesh: neighbours are in one "
            "machine.",
            safety=SAFE,
            change=Change(step=replace(step, program=changed)),
            arithmetic=(f"{len(own)} collectives of activations, of which {seconds(exposed_s)} are exposed",),
        )
