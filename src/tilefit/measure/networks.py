"""Trains a calibration's networks; :class:`~tilefit.cost.calibration.Network` runs them without torch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from tilefit.cost.calibration import Network

_MEMBERS, _WIDTH, _HIDDEN = 8, 128, 2
#: Rows of a batch at least, and batches of an epoch at most: a training takes as long whatever was measured.
_BATCH, _BATCHES = 64, 80
#: Decoupled weight decay: what keeps 300 rows from being learnt by heart. 0.01, 0.1 and 1 gave 11.9, 11.8 and
#: 11.5 % on unseen products of an H200 after 3000.
_DECAY = 1.0
_RATE = 3e-3
#: Normalisation of an input that hardly varies, at least.
_LEAST_SCALE = 1e-2


def train(
    x: NDArray[np.float32], y: NDArray[np.float32], *, epochs: int, device: str = "cpu", seed: int = 0
) -> Network:
    """Networks that predict ``y`` and the spread of their own error from ``x``.

    Each member starts elsewhere and sees the rows in an order of its own: where they disagree, the rows did
    not decide. Minimised are the mean absolute error and Laplace's negative log-likelihood of the spread.

    Args:
        x: Inputs [rows, inputs].
        y: Logarithm of (measured / first stage) [rows].
        epochs: Passes over the rows.
        device: Where to train.
        seed: Of the starts and the orders.

    Returns:
        A network of the first stage's correction, whose domains and quantiles are yet to be set.
    """
    mean = x.mean(axis=0)
    scale = np.maximum(x.std(axis=0), _LEAST_SCALE)
    generator = torch.Generator().manual_seed(seed)
    sizes = [x.shape[1], *[_WIDTH] * _HIDDEN, 2]
    weights = [torch.randn(_MEMBERS, a, b, generator=generator) * (2 / a) ** 0.5 for a, b in pairwise(sizes)]
    weights[-1] *= 0.1
    biases = [torch.zeros(_MEMBERS, 1, b) for b in sizes[1:]]
    parameters = [each.to(device).requires_grad_() for each in (*weights, *biases)]
    weights, biases = parameters[: len(weights)], parameters[len(weights) :]
    inputs = torch.from_numpy((x - mean) / scale).float().to(device)
    wanted = torch.from_numpy(y).float().to(device)
    batch = min(max(_BATCH, len(x) // _BATCHES), len(x))
    batches = len(x) // batch
    optimizer = torch.optim.AdamW(parameters, weight_decay=_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=epochs * batches)
    for _ in range(epochs):
        orders = torch.rand(_MEMBERS, len(x), generator=generator).argsort(dim=1).to(device)
        for start in range(0, batches * batch, batch):
            chosen = orders[:, start : start + batch]
            hidden = inputs[chosen]
            for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                hidden = torch.baddbmm(bias, hidden if index == 0 else hidden.relu(), weight)
            error = (hidden[..., 0] - wanted[chosen]).abs()
            log_spread = hidden[..., 1].clamp(-6, 2)
            likelihood = error.detach() / log_spread.exp() + log_spread
            optimizer.zero_grad()
            # Of the members' sum, so that each learns as if it were alone.
            (error + 0.02 * likelihood).mean(dim=1).sum().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, _MEMBERS)
            optimizer.step()
            schedule.step()

    def rounded(tensor: torch.Tensor) -> NDArray[np.float32]:
        # As the calibration's file stores it.
        array: NDArray[np.float32] = tensor.detach().cpu().half().float().numpy()
        return array

    return Network(
        domains=frozenset(),
        low=x.min(axis=0),
        high=x.max(axis=0),
        mean=mean,
        scale=scale,
        layers=tuple((rounded(w), rounded(b)) for w, b in zip(weights, biases, strict=True)),
        quantiles=(0.0, 0.0),
        families=(),
        tiles=(),
        on_analytic=True,
        bounds=(float(y.min()), float(y.max())),
    )
