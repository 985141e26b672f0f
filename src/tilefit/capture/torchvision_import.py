"""Lets torchvision be imported where its compiled operations do not match the installed PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.library


def make_importable() -> None:
    """Import torchvision, if there is one, without the operations that its CUDA build cannot load.

    The published wheels are built against CUDA. With a CPU build of PyTorch their compiled operations
    (``nms``, ``roi_align``) are missing and the import fails, and with it that of every library that looks
    for torchvision. Classification and segmentation models use none of those operations.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    register = torch.library.register_fake

    def register_if_defined(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if isinstance(op, str) and op.startswith("torchvision::"):
            namespace, name = op.split("::")
            if not hasattr(getattr(torch.ops, namespace), name):
                return lambda function: function
        decorator: Callable[..., Any] = register(op, *args, **kwargs)
        return decorator

    with patch.object(torch.library, "register_fake", register_if_defined):
        importlib.import_module("torchvision")
