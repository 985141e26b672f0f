"""Extensions in CUDA, which programs compile as they run: here none is, and known ones are PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from tilefit.capture.program.late import changed
from tilefit.errors import CaptureError


@contextmanager
def replaced() -> Iterator[None]:
    """Within the block DeepSpeed's fused Adam is PyTorch's, and whoever compiles CUDA sources is told that
    nobody knows what they do; many then take another way."""
    changes = {
        "deepspeed.ops.adam.fused_adam": _use_own_adam,
        "torch.utils.cpp_extension": _compile_no_cuda,
    }
    with changed(changes):
        yield


class FusedAdam(torch.optim.Adam):
    """DeepSpeed's, whose one kernel does what PyTorch's does."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=bool(adam_w_mode)
        )


def _use_own_adam(module: Any) -> None:
    module.FusedAdam = FusedAdam


def _compile_no_cuda(module: Any) -> None:
    for name in ("load", "load_inline"):
        setattr(module, name, _refusing_cuda(getattr(module, name)))


def _refusing_cuda(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def loaded(name: str, *sources: Any, **options: Any) -> Any:
        given = options.get("sources") or next(iter(sources), ())
        is_cuda = any(str(file).endswith(".cu") for file in ([given] if isinstance(given, str) else given))
        if is_cuda or options.get("cuda_sources") or options.get("with_cuda"):
            raise CaptureError(
                f"the extension {name} would be compiled, and what its CUDA kernels do is not known",
                hint="Take the program's way without it, if it has one; else give the operation a fake "
                "implementation (torch.library.register_fake), or leave it out.",
            )
        return load(name, *sources, **options)

    return loaded
