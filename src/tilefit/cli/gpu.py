"""``tilefit gpu``: the facts of a GPU, or the list of those known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilefit.cli import output
from tilefit.cli.completion import gpu_names

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tilefit.gpus import Gpu


def gpu(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Such as h200; all when left out.",
            show_default=False,
            autocompletion=gpu_names,
        ),
    ] = None,
) -> None:
    """Show a GPU's facts, where each is from, and its ops:byte ratios; without a name, list the GPUs."""
    from tilefit import gpus

    console = output.stdout()
    if name is None:
        console.print(_list([gpus.get(known) for known in gpus.names()]))
    else:
        device = gpus.get(name)
        if others := gpus.variants(name):
            listed = ", ".join(f"{other.title} (--gpu {other.name})" for other in others)
            print(f"{name} is taken as the {device.title}. Others: {listed}")
        console.print(_facts(device))


def _list(devices: list[Gpu]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tilefit import units

    # What the fast 16-bit type is: bf16 from Ampere on, fp16 before.
    fast = ((device, "bf16" if device.supports("bf16") else "fp16") for device in devices)
    rows = (
        (
            device.name,
            device.title.removeprefix("NVIDIA "),
            units.capacity(device.memory_bytes),
            f"{units.size(device.memory_bandwidth_bytes_per_s)}/s",
            units.number(device.peak_flop_per_s(dtype) / 1e12),
            f"{device.ops_per_byte(dtype):.0f}",
        )
        for device, dtype in fast
    )
    table = output.table("name", "product", ">memory", ">bandwidth", ">TFLOP/s", ">ops:byte", rows=rows)
    table.columns[0].no_wrap = True  # it is copied after --gpu
    return Group(
        table, Text("\nTFLOP/s: dense peak of the 16-bit type, ops:byte: over the bandwidth", style="dim")
    )


def _facts(device: Gpu) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tilefit import units

    major, minor = device.compute_capability
    known = (
        ("architecture", f"{device.architecture}, compute capability {major}.{minor}", "compute_capability"),
        ("SMs", str(device.sms), "sms"),
        ("boost clock", f"{device.boost_clock_hz / 1e9:.3f} GHz", "boost_clock_hz"),
        ("memory", units.capacity(device.memory_bytes), "memory_bytes"),
        ("bandwidth", f"{units.size(device.memory_bandwidth_bytes_per_s)}/s", "memory_data_rate_bits_per_s"),
        ("L2", units.capacity(device.l2_bytes), "l2_bytes"),
        (
            "shared memory",
            f"{units.capacity(device.shared_memory_bytes_per_sm)} per SM",
            "shared_memory_bytes_per_sm",
        ),
        (
            "link to others",
            f"{device.link}, {units.size(device.link_bandwidth_bytes_per_s)}/s both ways"
            if device.link
            else "unknown",
            "link",
        ),
    )
    rows = (
        (Text(label, "dim"), value, Text(device.sources.get(key, ""), "dim")) for label, value, key in known
    )
    facts = output.table("", "", "source", rows=rows)
    types = sorted(device.flop_per_clock_per_sm.items(), key=lambda pair: -pair[1])
    rates = (
        (name, str(clock), units.rate(device.peak_flop_per_s(name)), f"{device.ops_per_byte(name):.1f}")
        for name, clock in types
    )
    peaks = output.table("dtype", ">FLOP/clock/SM", ">dense peak", ">ops:byte", rows=rates)
    title = Text.assemble((device.title, "bold"), f"  --gpu {device.name}")
    note = Text(
        "ops:byte is the dense peak over the bandwidth: below it an operation waits for memory.",
        style="dim",
    )
    source = Text(f"FLOP per clock: {device.sources.get('flop_per_clock_per_sm', '')}", style="dim")
    return Group(title, Text(), facts, Text(), peaks, Text(), note, source)
