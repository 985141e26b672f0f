"""What launching costs on this host, against the host whose constants the cost model has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tilefit.cost.launch import CALL_S
from tilefit.ops import Attention, Conv, Gemm, Op

#: Few enough calls that the launch queue (1,024 entries) never fills, and long enough for a host clock.
_CALLS, _REPEATS = 100, 9


def launch_scale(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Host time of eager calls over what :data:`tilefit.cost.launch.CALL_S` states: their geometric mean.

    Args:
        device: Where the calls run; their tensors are so small that the host is slower than the device.
        clock: Seconds.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, w = tensor(16, 64), tensor(64, 64).requires_grad_()
    image, kernel = tensor(2, 8, 8, 8), tensor(8, 8, 3, 3).requires_grad_()
    q = tensor(2, 4, 16, 64).requires_grad_()
    calls: dict[type[Op], Callable[[], object]] = {
        Gemm: lambda: F.linear(x, w),
        Conv: lambda: F.conv2d(image, kernel, padding=1),
        Attention: lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return statistics.geometric_mean(
        _host_s(call, synchronize, clock) / CALL_S[kind] for kind, call in calls.items()
    )


def _host_s(
    call: Callable[[], object], synchronize: Callable[[], object], clock: Callable[[], float]
) -> float:
    """Median host time of a call that waits for nothing."""
    for _ in range(_CALLS):
        call()
    times = []
    for _ in range(_REPEATS):
        synchronize()
        began_s = clock()
        for _ in range(_CALLS):
            call()
        times.append((clock() - began_s) / _CALLS)
    return statistics.median(times)
