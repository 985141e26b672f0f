"""Recurrent layers by persistent kernels."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tilefit.cost.recurrent_times import persistent_steps
from tilefit.fixes.changes.behaviour import Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, RefusedError, fix, in_words, refuse
from tilefit.fixes.changes.modules import require_plain, submodule
from tilefit.fixes.changes.run import Run
from tilefit.nn import convert
from tilefit.rnn.persistent import has_bindings
from tilefit.rules.recurrent.layers import layers_of_torch

_KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def persistent(modules: tuple[str, ...]) -> ChangeSet:
    """The change of recurrent layers that become those of ``tilefit.nn``."""
    words = f"Run {in_words(modules)} by persistent kernels (tilefit.nn.convert)."
    # cuDNN draws its own random numbers for dropout.
    return ChangeSet(modules, also=_converted, words=words, same_random_numbers=False)


def _converted(change: ChangeSet, run: Run, edits: Edits) -> None:
    if torch.cuda.is_available() and not has_bindings():
        raise RefusedError("the kernels need the package cuda-bindings: pip install cuda-bindings")
    for path in change.modules:
        module = submodule(run.model, path)
        refuse(type(module) not in _KINDS, f"{path or 'the model'} is no plain LSTM, GRU or RNN of torch.nn")
        require_plain(module, path, type(module))
        convert(module)
        edits.undone_by(partial(convert, module, back=True))


@fix("persistent-kernels", "RNN003")
def run_persistently(context: Context) -> Found:
    """Runs LSTMs, GRUs and RNNs by the persistent kernels of ``tilefit.nn``, where these were measured to be
    faster than cuDNN.

    The modules stay the objects they are, with their parameters, and change their class. They compute the
    same function but for rounding: under bf16 autocast in bf16, where ``torch.nn`` computes in fp16. Where
    the kernels cannot run (no CUDA GPU of the generation they were measured on, a size that does not fit)
    the layers run as before.

    Refused: subclasses of the three, parametrised weights, modules whose ``forward`` was replaced; on a
    machine with a GPU, where the package is missing that the kernels need (``pip install cuda-bindings``).
    """
    found = [
        module
        for op, places in layers_of_torch(context.step).items()
        if persistent_steps(op, context.gpu) is not None
        for module, _ in places
    ]
    modules = dict(context.run.model.named_modules())
    layers = tuple(path for path in dict.fromkeys(found) if isinstance(modules.get(path), _KINDS))
    if layers:
        yield persistent(layers)
