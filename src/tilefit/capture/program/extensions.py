"""Extensions in CUDA, which programs compile as they run: here none is, and known ones are PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        set_grad_none: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(params, lr, **settings, fused=True, decoupled_weight_decay=bool(adam_w_mode))


def _use_own_adam(module: Any) -> None:
    module.FusedAdam = FusedAdam


def _compile_no_cuda(module: Any) -> None:
    compiled = module._jit_compile

    def compile_if_known(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Any:
        if any(map(module._is_cuda_file, sources)):
            raise CaptureError(
                f"the extension {name} would be compiled, and what its CUDA kernels do is not known",
                hint="Take the program's way without it, if it has one.",
            )
        return compiled(name, sources, *args, **kwargs)

    module._jit_compile = compile_if_known
