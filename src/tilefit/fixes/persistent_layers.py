"""Recurrent layers by persistent kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from tilefit.cost.persistent import persistent_steps
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.modules import require_plain, submodule
from tilefit.fixes.run import Run
from tilefit.nn import convert
from tilefit.rnn.persistent import has_bindings
from tilefit.rules.recurrent.layers import layers_of_torch

_KINDS = (nn.LSTM, nn.GRU, nn.RNN)


@dataclass(frozen=True)
class Persistent(ChangeSet):
    """Recurrent layers that become those of ``tilefit.nn``."""

    #: cuDNN draws its own random numbers for dropout.
    same_random_numbers: ClassVar[bool] = False

    words = "Run {0.where} by persistent kernels (tilefit.nn.convert)."

    def make(self, run: Run, edits: Edits) -> None:
        if torch.cuda.is_available() and not has_bindings():
            raise RefusedError("the kernels need the package cuda-bindings: pip install cuda-bindings")
        modules = [submodule(run.model, path) for path in self.modules]
        for path, module in zip(self.modules, modules, strict=True):
            if type(module) not in _KINDS:
                raise RefusedError(f"{path or 'the model'} is no plain LSTM, GRU or RNN of torch.nn")
            require_plain(module, path, type(module))
        for module in modules:
            convert(module)
            edits.undone_by(partial(convert, module, back=True))


class PersistentLayers(Fix):
    """Runs LSTMs, GRUs and RNNs by the persistent kernels of ``tilefit.nn``, where these were measured to be
    faster than cuDNN.

    The modules stay the objects they are, with their parameters, and change their class. They compute the
    same function but for rounding: under bf16 autocast in bf16, where ``torch.nn`` computes in fp16. Where
    the kernels cannot run (no CUDA GPU of the generation they were measured on, a size that does not fit)
    the layers run as before.

    Refused: subclasses of the three, parametrised weights, modules whose ``forward`` was replaced; on a
    machine with a GPU, where the package is missing that the kernels need (``pip install cuda-bindings``).
    """

    name = "persistent-kernels"
    rules = ("RNN003",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        found = [
            module
            for op, places in layers_of_torch(context.step).items()
            if persistent_steps(op, context.gpu) is not None
            for module, _ in places
        ]
        modules = dict(context.run.model.named_modules())
        layers = tuple(path for path in dict.fromkeys(found) if isinstance(modules.get(path), _KINDS))
        if layers:
            yield Persistent(layers)
