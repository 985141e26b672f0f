"""What can be checked: from the text a user types to a model and its inputs.

The user's own code is in :mod:`~tilefit.capture.targets.user`. Of ``prefix:name`` each prefix is a module in
:mod:`tilefit.capture.targets.kinds`, which has it in a ``KIND``.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from unittest.mock import patch

from tilefit.capture.autocast import constructible
from tilefit.capture.targets import kinds
from tilefit.capture.targets.base import Kind, Target
from tilefit.capture.targets.user import load_factory
from tilefit.capture.torchvision_import import tolerated
from tilefit.errors import UsageError
from tilefit.options import TargetOptions

__all__ = ["PREFIXES", "Target", "load"]

#: What a target begins with that is not the user's own code.
PREFIXES = frozenset(module.name for module in pkgutil.iter_modules(kinds.__path__))


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
    prefix, colon, name = target.partition(":")
    if not colon or not name:
        *usages, last = (kind.usage for kind in sorted(map(_kind, PREFIXES), key=lambda kind: kind.place))
        raise UsageError(
            f"cannot read the target {target!r}",
            hint=f"Write file.py:factory, package.module:factory, {', '.join(usages)} or {last}.",
        )
    with tolerated(), constructible():
        if prefix in PREFIXES:
            return _kind(prefix).load(name, options)
        path, _, factory = target.rpartition(":")
        # Code that reads the command line gets none; what is on tilefit's is not for it.
        with patch.object(sys, "argv", [path]):
            return load_factory(path, factory, options)


def _kind(prefix: str) -> Kind:
    kind: Kind = import_module(f"{kinds.__name__}.{prefix}").KIND
    return kind
