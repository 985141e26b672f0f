"""What the loops are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Where the loops run; their tensors are on the default device.
DEVICE = "cpu"
FP16, BF16 = torch.float16, torch.bfloat16


def lstm(model: nn.LSTM, *inputs: object) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What an LSTM returns, by PyTorch's operations: where oneDNN takes fp16, it cannot train one in it.

    It takes fp16 on CPUs with AVX512-FP16 or AMX.
    """
    with torch.backends.mkldnn.flags(enabled=False):
        return model(*inputs)


def net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 4)


def autocast(dtype: torch.dtype = FP16, **kw: object) -> torch.autocast:
    return torch.autocast(DEVICE, dtype=dtype, **kw)  # type: ignore[arg-type]


def scaler(**kw: object) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, **kw)  # type: ignore[arg-type]


def mse(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype = FP16) -> Tensor:
    with autocast(dtype):
        return nn.functional.mse_loss(model(x).float(), y)
