"""Exchanging the recurrent modules of a model for ours, and back."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from tilefit.rnn.modules import GRU, LSTM, RNN, Recurrent, configure
from tilefit.rnn.torch_nn import flatten_bf16

_Model = TypeVar("_Model", bound=nn.Module)

_OURS: dict[type[nn.Module], type[Recurrent]] = {ours.original: ours for ours in (LSTM, GRU, RNN)}


def convert(
    model: _Model, *, back: bool = False, backend: str | None = None, recompute: bool = False
) -> _Model:
    """Make every ``torch.nn.LSTM``, ``GRU`` and ``RNN`` of a model one of ours, in place.

    Each module stays the object it is, with its parameters, hooks and names, and changes its class;
    optimizers and references to it stay valid. bf16 parameters on CUDA move into one piece of memory, as
    ``torch.nn`` moves those of other types: convert before what keeps their addresses, as CUDA graphs do.
    Modules of other classes, subclasses of those three too, stay as they are.

    Args:
        model: The model; may be a recurrent module itself.
        back: Make ours ``torch.nn``'s instead.
        backend, recompute: See :class:`~tilefit.rnn.modules.Recurrent`.

    Returns:
        The model.

    Raises:
        UsageError: there is no such backend.
    """
    for module in model.modules():
        if back and type(module) in _OURS.values():
            assert isinstance(module, Recurrent)
            for name in ("backend", "recompute", "_call"):
                vars(module).pop(name, None)
            module.__class__ = module.original  # type: ignore[assignment]
        elif not back and type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
            assert isinstance(module, Recurrent)
            configure(module, backend, recompute)
            flatten_bf16(module)
    return model
