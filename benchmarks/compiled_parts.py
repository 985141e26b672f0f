"""What compiling a part of a model alone does: host time of its calls, and attention written by hand.

    PYTHONPATH=src python benchmarks/compiled_parts.py --out benchmarks/results/compiled_parts_h100.json

measures on a GPU what a call of a small RMS normalization, and of a GELU, takes the host in each pass:
written out, by PyTorch's kernel, and written out with ``compile-parts``; 24
modules in a row, the fastest of 50 turns.

    PYTHONPATH=src:tests:tests/fixes python benchmarks/compiled_parts.py --attention --out ...

asks, without a GPU, which of the ways in which the tests of ``fuse-attention`` write attention Inductor
rewrites to ``scaled_dot_product_attention`` where the module is compiled alone, in training, in fp32 and
under autocast.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from tilefit.fixes import ChangeSet, Run
from tilefit.fixes.kinds.parts import CompiledAlone

MODULES, TURNS, WIDTH = 24, 50, 64


class Norm(nn.Module):
    """Written out, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class OwnNorm(Norm):
    """PyTorch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-6)


class Gelu(nn.Module):
    """Written out, as in GPT-2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class OwnGelu(nn.Module):
    """PyTorch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


def host_us(made: Callable[[], nn.Module], compiled: bool, device: str) -> list[float]:
    """Host time of a call in the forward and in the backward pass."""
    model = nn.Sequential(*(made() for _ in range(MODULES))).to(device)
    if compiled:
        change = ChangeSet.giving((str(number) for number in range(MODULES)), CompiledAlone(), "")
        change.apply(Run(model))
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    best = [math.inf, math.inf]
    for _ in range(TURNS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        y = model(x).sum()
        middle = time.perf_counter()
        y.backward()
        end = time.perf_counter()
        best = [min(best[0], middle - start), min(best[1], end - middle)]
    return [round(1e6 * each / MODULES, 2) for each in best]


def calls(device: str) -> list[dict[str, Any]]:
    """A row for each kind of module and way to compute it."""
    rows = []
    for name, written, own in (("rms_norm", Norm, OwnNorm), ("gelu", Gelu, OwnGelu)):
        for way, made, compiled in (
            ("written", written, False),
            ("own", own, False),
            ("alone", written, True),
        ):
            forward_us, backward_us = host_us(made, compiled, device)
            rows.append({"module": name, "way": way, "forward_us": forward_us, "backward_us": backward_us})
            print(rows[-1], flush=True)
    return rows


def rewritten(graph: Any, inputs: Any, **options: Any) -> Any:
    """The two passes of a graph as Inductor divides them: behind the passes that rewrite attention."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        joint_graph_passes(graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def attention() -> list[dict[str, Any]]:
    """A row for each way to write attention."""
    import test_attention as written

    # No code is generated, which takes long and rewrites nothing more.
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        partition_fn=rewritten,
        decompositions=select_decomp_table(),
    )
    rows = []
    for core in written.WRITTEN:
        module = written.Attention(core).train()
        x = torch.randn(2, 9, written.WIDTH)
        mask = torch.ones(2, 9, dtype=torch.float32 if core is written.extended else torch.bool)
        for amp in ("", "bf16"):
            torch.compiler.reset()
            counters.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(amp)):
                y = torch.compile(module, backend=backend)(
                    x, mask if core is not written.extended else mask.float()
                )
            y.float().square().sum().backward()
            count = counters["inductor"]["fuse_attention"]
            breaks = sum(counters["graph_break"].values())
            rows.append({"attention": core.__name__, "amp": amp, "rewritten": count, "breaks": breaks})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention", action="store_true")
    options = parser.parse_args()
    rows = attention() if options.attention else calls(options.device)
    where = "cpu" if options.attention or options.device == "cpu" else torch.cuda.get_device_name()
    found = {
        "gpu": where,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
