"""What can be checked: from the text a user types to a model and its inputs.

The user's own code is in :mod:`~tilefit.capture.targets.user`. Of ``prefix:name`` each prefix is a module in
:mod:`tilefit.capture.targets.kinds`, whose ``load`` makes the target of a name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from unittest.mock import patch

from tilefit.capture.autocast import constructible
from tilefit.capture.naming import LIBRARIES, require_readable
from tilefit.capture.targets.base import Target
from tilefit.capture.targets.user import load_factory
from tilefit.capture.torchvision_import import tolerated
from tilefit.options import TargetOptions

__all__ = ["Target", "load"]


def load(target: str, options: TargetOptions) -> Target:
    """The model that ``target`` names.

    Args:
        target: ``file.py:factory``, ``package.module:factory``, ``hf:<model_type or config.json>``,
            ``torchvision:<name>`` or ``timm:<name>``.
        options: What to feed it.

    Raises:
        TargetError: it cannot be found, imported or built.
        UsageError: the text is not understood.
    """
    if options.input:
        options.refuse_sizes("--input says what the inputs are")
    require_readable(target)
    prefix, _, name = target.partition(":")
    with tolerated(), constructible():
        if prefix in LIBRARIES:
            made: Target = import_module(f"{__name__}.kinds.{prefix}").load(name, options)
            return made
        path, _, factory = target.rpartition(":")
        # Code that reads the command line gets none; what is on tilefit's is not for it.
        with patch.object(sys, "argv", [path]):
            return load_factory(path, factory, options)
