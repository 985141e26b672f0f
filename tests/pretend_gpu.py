"""Turns a trace of a run on the CPU into one that looks as if every operation had launched a GPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilefit.capture.aten import is_free
from tilefit.profiling.attribution import _contexts
from tilefit.profiling.chrome import read_events
from tilefit.profiling.trace import collect

PROCESS = 4321
#: What products, convolutions and attention are called on an H200; by the operation's name.
KERNELS = {
    "aten::addmm": "nvjet_tst_128x128_64x4_1x2_h_bz_coopA_TNT",
    "aten::mm": "nvjet_tst_192x128_64x4_1x2_h_bz_coopA_NNT",
    "aten::bmm": "nvjet_tst_64x128_64x4_1x2_h_bz_coopA_NNT",
    "aten::convolution": "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "void pytorch_flash::flash_fwd_kernel<...>(x)",
}
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"


def duration_us(name: str) -> float:
    """What an operation takes on the pretended GPU."""
    return 40.0 if name in KERNELS else 4.0


def pretend(
    events: list[dict[str, Any]],
    *,
    takes_us: Callable[[str], float] = duration_us,
    kernel_of: Callable[[str], str] = lambda name: KERNELS.get(name, ELEMENTWISE),
    latency_us: float = 3.0,
) -> list[dict[str, Any]]:
    """The events, with a launch and a kernel for each operation that does work; one after the other."""
    trace = collect(events, {})
    contexts = _contexts(trace.events)
    added: list[dict[str, Any]] = []
    free_us = 0.0
    number = 0
    tids = list(dict.fromkeys((e["pid"], e["tid"]) for e in events if e["ph"] == "X"))
    for event in trace.events:
        if contexts[id(event)].operation is not event or _is_free(event.name):
            continue
        number += 1
        pid, tid = tids[event.thread]
        launch_us = event.start_ns / 1000 + 0.05
        added.append(
            {
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "tid": tid,
                "ts": launch_us, "dur": 0.5, "args": {"correlation": number, "cbid": 211},
            }
        )  # fmt: skip
        start_us = max(free_us, launch_us + latency_us)
        free_us = start_us + takes_us(event.name)
        added.append(
            {
                "ph": "X", "cat": "kernel", "name": kernel_of(event.name), "pid": 0, "tid": 7,
                "ts": start_us, "dur": takes_us(event.name),
                "args": {"device": 0, "stream": 7, "correlation": number, "External id": event.external},
            }
        )  # fmt: skip
    return [*events, *added]


def pretend_file(path: Path, gpu: str = "NVIDIA H200") -> dict[str, Any]:
    """The trace in a file as a document of a pretended GPU."""
    header: dict[str, Any] = {}
    events = list(read_events(path, header.__setitem__))
    return {**header, "deviceProperties": [{"id": 0, "name": gpu}], "traceEvents": pretend(events)}


def _is_free(name: str) -> bool:
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base else None
    if packet is None:
        return False
    return is_free(getattr(packet, packet.overloads()[0]))
