"""Lets torchvision be imported where its compiled operations do not match the installed PyTorch.

The published wheels are built against CUDA. With a CPU build of PyTorch their compiled operations (``nms``,
``roi_align``) are missing and the import fails, and with it that of every library that looks for torchvision.
Classification and segmentation models use none of those operations.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.library


@contextmanager
def tolerated() -> Iterator[None]:
    """Within the block torchvision can be imported without the operations its build cannot load."""
    register = torch.library.register_fake

    def register_if_defined(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if isinstance(op, str) and op.startswith("torchvision::"):
            namespace, name = op.split("::")
            if not hasattr(getattr(torch.ops, namespace), name):
                return lambda function: function
        decorator: Callable[..., Any] = register(op, *args, **kwargs)
        return decorator

    with patch.object(torch.library, "register_fake", register_if_defined):
        yield


def import_transformers() -> Any:
    """transformers without torchvision, which only its image processors use and which is slow to load.

    Raises:
        ImportError: there is no transformers.
    """
    transformers = importlib.import_module("transformers")
    available = transformers.utils.is_torchvision_available
    if "torchvision" not in sys.modules and hasattr(available, "cache_clear"):  # it remembers its answer
        transformers.utils.is_timm_available()  # which asks it too, while timm loads torchvision by itself
        available.cache_clear()
        with patch.dict(sys.modules, {"torchvision": None}):  # "not installed", to whoever looks for it
            available()
    return transformers
