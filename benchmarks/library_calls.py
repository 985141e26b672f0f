"""What the host spends in each call that compiled code makes of a library, beside the reference step.

    PYTHONPATH=src python benchmarks/library_calls.py --out calls.jsonl

Calls of convolutions, their gradients, products, attention, and what generated code does around them. Each is
made many times with an idle GPU, one at a time, and many times behind a kernel that keeps the GPU busy all
the while, so that nothing waits for it. No profiler is on. Medians, with that of the reference step of
``tilefit calibrate``, which is made in turn with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilefit.measure.launch import reference_step

#: Batch, channels, height, width, channels after, filter, stride, groups, and whether it is transposed.
CONVOLUTIONS = {
    "equal parts": (4, 64, 8, 8, 64, 3, 1, 1, False),
    "first of a pose": (64, 3, 256, 192, 32, 7, 2, 1, False),
    "pointwise of a pose": (64, 32, 128, 96, 32, 1, 1, 1, False),
    "strided of a pose": (64, 64, 64, 48, 64, 3, 2, 1, False),
    "transposed of a pose": (64, 128, 16, 12, 128, 4, 2, 1, True),
    "squeezed": (128, 64, 55, 55, 16, 1, 1, 1, False),
    "diffusion": (32, 128, 16, 16, 128, 3, 1, 1, False),
    "odd": (16, 67, 64, 64, 67, 3, 1, 1, False),
    "depthwise": (64, 96, 56, 56, 96, 3, 1, 96, False),
}
TIMES = 39
TURNS = 3
#: Cycles of the GPU that a queue is kept full for: about 30 ms.
BUSY = 50_000_000

Call = Callable[[], Any]


def convolutions(device: str) -> Iterator[tuple[str, Call]]:
    aten = torch.ops.aten
    for name, (n, c, h, w, k, size, stride, groups, transposed) in CONVOLUTIONS.items():
        for layout in (torch.contiguous_format, torch.channels_last):
            shape = (c, k // groups, size, size) if transposed else (k, c // groups, size, size)
            x = torch.randn(n, c, h, w, device=device, dtype=torch.bfloat16).to(memory_format=layout)
            weight = torch.randn(shape, device=device, dtype=torch.bfloat16).to(memory_format=layout)
            pad = 1 if transposed else size // 2
            how = ([stride] * 2, [pad] * 2, [1, 1], transposed, [0, 0], groups)
            grad = torch.ones_like(aten.convolution.default(x, weight, None, *how))
            where = f"{name}, {'NHWC' if layout == torch.channels_last else 'NCHW'}"
            yield (
                f"convolution, {where}",
                lambda x=x, w=weight, a=how: aten.convolution.default(x, w, None, *a),
            )
            for kind, mask in (("both", [True, True]), ("data", [True, False]), ("weight", [False, True])):
                if kind == "both" or name in ("equal parts", "strided of a pose", "diffusion"):
                    yield (
                        f"gradients ({kind}), {where}",
                        lambda g=grad, x=x, w=weight, a=how, m=mask: aten.convolution_backward.default(
                            g, x, w, None, *a, [*m, False]
                        ),
                    )


def others(device: str) -> Iterator[tuple[str, Call]]:
    aten = torch.ops.aten
    half = {"device": device, "dtype": torch.bfloat16}
    for size in (64, 1024):
        a, b, c = (torch.randn(size, size, **half) for _ in range(3))
        yield f"mm, {size}", lambda a=a, b=b, c=c: torch.mm(a, b, out=c)
        yield f"addmm, {size}", lambda a=a, b=b, c=c: torch.addmm(a[0], a, b, out=c)
    a, b, c = (torch.randn(16, 64, 64, **half) for _ in range(3))
    yield "bmm", lambda: torch.bmm(a, b, out=c)
    q = torch.randn(8, 8, 256, 64, **half)
    for kind in ("flash", "cudnn") if device == "cuda" else ():
        forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
        backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
        if kind == "cudnn":
            call = partial(forward, q, q, q, None, True, 0.0, False)
        else:
            call = partial(forward, q, q, q, 0.0, False)
        out, log, from_q, from_k, most_q, most_k, seed, offset, *_ = call()
        yield f"attention, {kind}", call
        shape = (from_q, from_k, most_q, most_k, 0.0, False)
        rest = (log, seed, offset, None, *shape) if kind == "cudnn" else (log, *shape, seed, offset)
        yield f"attention, {kind}, gradients", partial(backward, out, q, q, q, out, *rest)
    from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda, assert_size_stride

    empty = _empty_strided_cuda if device == "cuda" else _empty_strided_cpu
    yield "empty_strided", lambda: empty((64, 64), (64, 1), torch.bfloat16)
    yield "assert_size_stride", lambda: assert_size_stride(q, (8, 8, 256, 64), (131072, 16384, 64, 1))
    yield (
        "reinterpret_tensor",
        lambda: torch._C._dynamo.guards._reinterpret_tensor(q, (64, 256, 64), (16384, 64, 1), 0),
    )
    yield "an operation in Python", lambda: a.mul(2.0)
    for count in (1, 2, 8):
        inputs = [torch.randn(64, 64, device=device) for _ in range(8)]

        @torch.compile
        def written(inputs: list[torch.Tensor], count: int = count) -> list[torch.Tensor]:
            return [x.sin() + i for i, x in enumerate(inputs[:count])]

        yield f"a compiled function that writes {count}", lambda f=written, i=inputs: f(i)


def measured(call: Call, reference: Call, device: str) -> dict[str, Any]:
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def spent_us(times: int, step: Call = call) -> float:
        start = time.perf_counter()
        for _ in range(times):
            step()
        return 1e6 * (time.perf_counter() - start) / times

    for _ in range(3):
        call()
    idle, busy, beside = [], [], []
    for _ in range(TURNS):
        synchronize()
        reference()
        synchronize()
        beside.append(spent_us(1, reference) / 1e3)
        for _ in range(TIMES // TURNS):
            synchronize()
            idle.append(spent_us(1))
        synchronize()
        if device == "cuda":
            torch.cuda._sleep(BUSY)
        busy.append(spent_us(TIMES))
    synchronize()
    return {
        "idle_us": round(statistics.median(idle), 2),
        "busy_us": round(statistics.median(busy), 2),
        "least_us": round(min(busy), 2),
        "reference_ms": round(statistics.median(beside), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("library_calls.jsonl"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    options = parser.parse_args()
    reference = reference_step(torch.device(options.device))
    for _ in range(3):
        reference()
    with options.out.open("a") as rows:
        for make in (others, convolutions):
            for name, call in make(options.device):
                if options.only in name:
                    row = {"call": name, **measured(call, reference, options.device)}
                    rows.write(json.dumps(row) + "\n")
                    rows.flush()
                    print(row, flush=True)


if __name__ == "__main__":
    main()
