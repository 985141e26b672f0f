"""Taking every fix off a model, whoever has its plan."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from tilefit.fixes.behaviour import changes
from tilefit.fixes.fused_loss import CompiledLoss
from tilefit.nn import convert

_Model = TypeVar("_Model", bound=nn.Module)


def strip(model: _Model) -> _Model:
    """Take every fix off a model, in place, also off a deep copy or what was saved and loaded; return it.

    For what cannot be done with a changed model (``docs/fix.md`` names it), and for saving one that is to
    be loaded where tilefit is not installed. Where a plan is at hand, :meth:`Plan.undo` also takes back what
    belongs to the optimizer and to the program (``cudnn.benchmark``, TF32).

    Modules compute what their classes say, the layers of :mod:`tilefit.nn` are those of ``torch.nn``, losses
    and whatever was compiled in place are not. Parameters stay as they are.
    """
    convert(model, back=True)
    for module in model.modules():
        changed = changes(module)
        if changed is not None:
            changed.leave()
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None
        for name, value in list(vars(module).items()):
            if isinstance(value, CompiledLoss):
                setattr(module, name, value.loss)
    return model
