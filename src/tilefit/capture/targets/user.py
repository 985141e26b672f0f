"""The user's own code: ``file.py:factory`` and ``package.module:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilefit.capture.inputs import DEFAULT_IMAGE_BATCH, DEFAULT_TEXT_BATCH, make, parse_inputs
from tilefit.capture.packages import package_of
from tilefit.capture.targets.base import (
    Target,
    build,
    guarded,
    inputs_hint,
    listed,
    named_sizes,
)
from tilefit.errors import TargetError, UsageError
from tilefit.options import TargetOptions


def load_factory(path: str, name: str, options: TargetOptions) -> Target:
    """What a factory in a file or a module of the user's makes.

    Raises:
        TargetError: there is none, or it makes no model.
    """
    factory = _factory(path, name)
    arguments = named_sizes(options.arguments, _parameters(factory), f"{path}:{name}")
    made: Any = factory
    if not callable(factory):
        raise TargetError(f"{name!r} is of type {type(factory).__name__}, which cannot be called", where=path)
    if not isinstance(factory, nn.Module):
        made = build(lambda: factory(**arguments), f"{path}:{name}", options.device)
    values = made if isinstance(made, tuple) else (made, None)
    model, inputs = values if len(values) == 2 else (None, None)
    if not isinstance(model, nn.Module) and not callable(model):
        returned = f"{len(values)} values" if len(values) != 2 else f"a value of type {type(model).__name__}"
        raise TargetError(
            f"{name} returned {returned}",
            where=path,
            hint="Return a model, (model, inputs), or a training-step callable.",
        )
    hint = ""
    if options.input:
        inputs = parse_inputs(options.input, options.device)
    elif inputs is None and isinstance(model, nn.Module):
        inputs = _inputs_by_modules(model, options, path)
        hint = inputs_hint(inputs)
    else:
        options.refuse_sizes(f"{name} makes the inputs itself")
    return Target(model, inputs, f"{Path(path).name if path.endswith('.py') else path}:{name}", hint=hint)


def made_by(path: str, name: str, options: TargetOptions) -> Any:
    """What a factory returns, called as it is.

    Raises:
        TargetError: there is none, or it fails.
    """
    factory = _factory(path, name)
    if isinstance(factory, nn.Module) or not callable(factory):
        return factory
    arguments = named_sizes(options.arguments, _parameters(factory), f"{path}:{name}")
    return guarded(lambda: factory(**arguments), f"{path}:{name}")


def _factory(path: str, name: str) -> Any:
    """What a file or a module has under this name."""
    module = _import_file(Path(path)) if _is_file(path) else _import_module(path)
    factory = getattr(module, name, None)
    if factory is None and hasattr(module, "__path__") and getattr(module, "__file__", None) is None:
        raise TargetError(f"{path} is a folder", hint="Name a file in it.")
    if factory is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = get_close_matches(name, names, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"It has: {listed(names) or 'no function'}."
        own = Path(f"{path.replace('.', os.sep)}.py")
        if own.is_file() and not own.samefile(getattr(module, "__file__", None) or os.devnull):
            hint = f"{path} is a module that Python has, not your file: write {own}:{name}."
        raise TargetError(f"{path} has no {name!r}", hint=hint)
    return factory


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    package, root = package_of(path)
    name = f"{package}.{path.stem}".removeprefix(".")
    while name in sys.modules:  # a file called like a module of a library must not take its place
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path[:0] = dict.fromkeys([str(path.parent.resolve()), str(root)])
    guarded(lambda: spec.loader.exec_module(module), f"importing {path}")  # type: ignore[union-attr]
    return module


def file_of(path: str) -> Path:
    """The file that code is in which is named by its file or its module.

    Raises:
        TargetError: there is no such module.
    """
    return Path(path if _is_file(path) else _spec(path).origin or "")


def _is_file(path: str) -> bool:
    return path.endswith(".py") or os.sep in path


def _spec(name: str) -> ModuleSpec:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise TargetError(f"there is no module {error.name!r}") from error
    if spec is None:
        raise TargetError(
            f"there is no module {name!r}",
            hint="Write file.py:factory for a file, or run where the package can be imported.",
        )
    return spec


def _import_module(name: str) -> Any:
    _spec(name)
    return guarded(lambda: importlib.import_module(name), f"importing {name}")


def _parameters(factory: Any) -> list[str] | None:
    """Names of a factory's arguments; None where it takes any."""
    if isinstance(factory, nn.Module) or not callable(factory):
        return []  # there is nothing left to construct
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return None  # a builtin that does not tell
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def _inputs_by_modules(model: nn.Module, options: TargetOptions, path: str) -> Any:
    """Inputs for a model that came without: images or tokens, if the user said which."""
    batch = options.batch
    reads_tokens = any(isinstance(m, nn.Embedding) for m in model.modules())
    if options.image_size is not None:
        options.refuse_sizes("--image-size asks for images, which have no tokens", ["seq"])
        conv = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        if reads_tokens and conv is None:
            why = "the model has an nn.Embedding and no nn.Conv2d: it takes tokens"
            options.refuse_sizes(why, ["image_size"])
        size = options.image_size
        channels = conv.in_channels if conv is not None else 3
        return (make((batch or DEFAULT_IMAGE_BATCH, channels, size, size), torch.float32, options.device),)
    if not reads_tokens:
        options.refuse_sizes("the model has no nn.Embedding, which would read tokens", ["seq"])
    elif options.seq is not None:
        return (make((batch or DEFAULT_TEXT_BATCH, options.seq), torch.int64, options.device),)
    if not inspect.signature(model.forward).parameters:
        return ()
    raise UsageError(
        f"{path} returned a model without inputs",
        hint='Return (model, inputs), or give --input "x: float32[32,3,224,224]", --image-size or --seq.',
    )
