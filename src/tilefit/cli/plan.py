"""``tilefit plan``: how to share a training over many GPUs, before they are rented."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tilefit.cli import output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.completion import gpu_option
from tilefit.cli.destination import Destination
from tilefit.cli.fleet import RAY, fleet_at
from tilefit.cli.option_groups import Group, grouped
from tilefit.errors import UsageError
from tilefit.options import ProgramOptions, TargetOptions, option
from tilefit.units import counted

_CLUSTER = "The GPUs"
_TRAINED = "The training"


@dataclass(frozen=True)
class Rented:
    """What the training runs on."""

    gpus: int = option(8, "How many GPUs.", metavar="N")
    nodes: int = option(
        0, "In how many machines; default: of eight GPUs each.", metavar="N", show_default=False
    )
    network: str = option(
        "infiniband", "What joins machines: efa, infiniband, roce, ethernet, …, or 8x400.", metavar="NAME"
    )
    price: tuple[str, ...] = option(
        (), "Of a GPU for an hour; NAME=PRICE where GPUs are compared; repeat.", metavar="PRICE"
    )
    ray: str | None = option(None, RAY, metavar="ADDRESS")
    store: Path | None = option(None, "Store of results; default TILEFIT_STORE.", metavar="FILE")
    epoch: int = option(0, "Samples of an epoch, for its cost.", min=0, metavar="N", show_default=False)


@dataclass(frozen=True)
class Trained:
    """What is trained on them."""

    global_batch: int | None = option(
        None, "Samples of a step, over all GPUs; default: 1024, of a program what it has.", metavar="N"
    )
    settings: tuple[str, ...] = option(
        (), "A size of the model, such as num_hidden_layers=32; repeat.", "--set", metavar="NAME=N"
    )
    layers: int = option(
        0, "Layers, where the target is built with fewer alike.", min=0, metavar="N", show_default=False
    )
    memory: tuple[str, ...] = option(
        (),
        "Hold less by loss-in-chunks, fused-loss, activations-on-host, optimizer-on-host, or, which round the"
        " update, optimizer-bf16, optimizer-8bit; repeat.",
        metavar="NAME",
    )


#: What can be told how to run a split; by the beginning of its name.
Framework = Literal["torchrun", "torchtitan", "accelerate", "deepspeed", "megatron", "all"]


@dataclass(frozen=True)
class Shown:
    """What is printed."""

    explain: bool = option(False, "Say why the runner-up lost.")
    launch: Framework | None = option(None, "Print the settings of the best split for it, or for all.")
    show_all: bool = option(False, "Every split that was kept.", "--all")


@grouped
def plan(
    context: typer.Context,
    target: step_options.Target,
    arguments: step_options.Arguments = None,
    *,
    gpu: Annotated[list[str] | None, gpu_option("GPU; repeat to compare. Default: h100-sxm.")] = None,
    rented: Annotated[Rented, Group(_CLUSTER)],
    trained: Annotated[Trained, Group(_TRAINED)],
    options: Annotated[
        TargetOptions,
        Group("The step", without=("batch", "train", "on_cpu", "channels_last", "compile", "input")),
    ],
    capture: step_options.Capture,
    program: Annotated[
        ProgramOptions, Group("A program", without=("steps", "ranks", "rank", "nodes", "network"))
    ],
    calibration: CalibrationFile = None,
    view: Annotated[Shown, Group(report_output.PANEL)],
    where: Annotated[Destination, Group(report_output.PANEL, without=("plot",))],
) -> None:
    """Plan a training on many GPUs: tilefit plan hf:llama --gpu h100-sxm --gpus 64 --network efa.

    Searches data, FSDP/ZeRO, tensor, pipeline, context and expert parallelism, schedules, micro-batches and
    checkpointing at a fixed global batch within the memory; interrupted, the same command goes on where it
    stopped. Without --amp it is trained in bf16, with fp32 copies of weights. A program trains as it does on
    one GPU: in its precision, with its optimizer.
    """
    from tilefit.cost.links import network

    own = [each.name for each in fields(Rented)]
    how = step_options.asked(context, target, options, program, arguments, own=own)
    net = network(rented.network)
    prices = report_output.prices(rented.price)
    sizes = _sizes(trained.settings)
    how.require_places(sizes)
    for name, size in sizes.items():
        how = how.at_size(name, size, varies=False)

    from tilefit.cli.bench import open_store
    from tilefit.cost.priced import resolve
    from tilefit.session.planning import Cluster, PlanSession

    cluster = Cluster(rented.gpus, rented.nodes, net, prices)
    cluster.check()
    devices = resolve(gpu or ["h100-sxm"], calibration)
    _check_prices(prices, {device.name for device in devices})
    progress = output.progress(f"Planning {target}")
    with open_store(rented.store) as store, progress as tell, fleet_at(rented.ray) as fleet:
        session = PlanSession(
            target,
            how,
            devices,
            cluster,
            trained.global_batch,
            trained.layers,
            rented.epoch,
            tuple(dict.fromkeys(trained.memory)),
            capture.timeout,
            capture.fresh,
            tell,
            fleet,
            store,
        )
        made = session.plan()
    if session.known:
        output.note(f"{counted(session.known, 'number')} of GPUs from the store; --fresh searches again")
    where.write(replace(made, explain=view.explain, launch=view.launch or ""), show_all=view.show_all)


def _check_prices(prices: Iterable[str], compared: Collection[str]) -> None:
    for name in prices:
        if name and name not in compared:
            raise UsageError(
                f"a price of {name}, which is not compared", where="--price", hint=f"Add --gpu {name}."
            )


def _sizes(texts: Iterable[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name.isidentifier() or not number.isdecimal() or not int(number):
            raise UsageError(f"cannot read --set {text}", hint="Write --set NAME=N.")
        found[name] = int(number)
    return found
