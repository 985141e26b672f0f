"""A function that does a whole step, made and run on the emulated GPU."""

from __future__ import annotations

import torch
from torch import nn

from tilefit import gpus
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.window import second
from tilefit.capture.sites import noting_makers
from tilefit.capture.targets.user import made_by
from tilefit.capture.torchvision_import import tolerated
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step
from tilefit.options import TargetOptions

#: What code is told that it runs on, where nobody has said: the oldest with bf16 Tensor Cores, as of
#: :data:`tilefit.capture.modes.CAPABILITY`.
_GPU = "a100-sxm-80gb"


def capture_function(target: str, options: TargetOptions) -> Step | None:
    """Capture a step that a factory returns, where the factory or the step needs more than shapes.

    This process has the emulated GPU from then on.

    Args:
        target: ``file.py:factory`` or ``package.module:factory``.
        options: How; those of a model's step have no effect.

    Returns:
        The step; None where the factory returns a model.

    Raises:
        TilefitError: the factory or the step fails, or a part of it was not seen.
    """
    path, _, name = target.rpartition(":")
    modes = ProgramModes(gpus.get(_GPU))
    with tolerated(), noting_makers(), modes.running(), torch.device("cuda"):
        made = made_by(path, name, options)
        function, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
        if isinstance(function, nn.Module) or not callable(function):
            return None
        arguments, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs or (), {})
        if isinstance(arguments, torch.Tensor):
            arguments = (arguments,)
        try:
            return second(modes, lambda: function(*arguments, **keywords), f"{path}:{name}", steps=1)
        except TilefitError:
            raise
        except Exception as error:
            raise CaptureError(f"the step raised {type(error).__name__}: {error}") from error
