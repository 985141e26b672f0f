"""What a target is, and what loading any kind of target takes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from tilefit.capture.failures import first_line
from tilefit.capture.inputs import describe_inputs
from tilefit.capture.sites import user_line
from tilefit.capture.torchvision_import import import_transformers
from tilefit.errors import TargetError, TilefitError


@dataclass(frozen=True, slots=True)
class Target:
    """A model ready to be captured.

    Attributes:
        model: A module, or a callable that does a whole step.
        inputs: Its arguments: a mapping, a tuple, or None.
        name: What to call it.
        loss: Makes the loss of the output, where the model does not.
        notes: What was assumed.
        hint: What to do where the model refuses its inputs; empty where nothing is known.
        shorter: What to do where it has no positions for so many tokens; likewise.
    """

    model: nn.Module | Callable[..., Any]
    inputs: Any
    name: str
    loss: Callable[[Any], torch.Tensor] | None = None
    notes: tuple[str, ...] = ()
    hint: str = ""
    shorter: str = ""


# ---- what can go wrong -------------------------------------------------------------------------


def guarded(action: Callable[[], Any], doing: str) -> Any:
    """Run the user's code; what it raises becomes one message with the line."""
    try:
        return action()
    except TilefitError:
        raise
    except (Exception, SystemExit) as error:
        raise _refusal(error, doing) from error


def _refusal(error: Exception | SystemExit, doing: str) -> TargetError:
    if isinstance(error, SystemExit):
        return TargetError(
            f"{doing} called sys.exit({'' if error.code is None else repr(error.code)})",
            where=user_line(error),
            hint="A target runs without arguments of a command line, and returns its model.",
        )
    what = f"{doing} raised {type(error).__name__}: {first_line(error)}"
    return TargetError(what, where=user_line(error), hint=_remedy(error))


def _remedy(error: Exception) -> str:
    """What to do where the user's code lacks something that is elsewhere."""
    if isinstance(error, ModuleNotFoundError):
        return f"Install it where tilefit runs ({sys.executable} -m pip install), or run where it is found."
    if isinstance(error, FileNotFoundError) and not os.path.isabs(error.filename or "/"):
        return f"Its path is relative to the folder that tilefit runs in: {os.getcwd()}"
    return ""


def build(factory: Callable[[], Any], name: str, device: str) -> Any:
    """Call a factory without allocating its weights, if it can be built that way."""
    if device == "meta":
        try:
            with torch.device("meta"):
                return factory()
        except TilefitError:
            raise
        except (Exception, SystemExit) as error:
            # Some models compute sizes or initial values with tensors; they are built for real.
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise _refusal(error, name) from error
    with torch.device("cpu"):
        return guarded(factory, name)


def library(module: str) -> Any:
    """A library that targets are taken from.

    Raises:
        TargetError: it is not there.
    """
    try:
        return import_transformers() if module == "transformers" else importlib.import_module(module)
    except ImportError as error:
        raise TargetError(
            f"{module} cannot be imported ({error})", hint=f"Install it: pip install {module}."
        ) from error


def unknown(what: str, name: str, known: Sequence[str], hint: str) -> TargetError:
    """The error for a name that is not known; its hint names some that begin with it or are spelled alike."""
    near = [other for other in known if other.startswith(name)][:3] or get_close_matches(name, known, 3)
    return TargetError(f"{what} {name!r}", hint=f"Did you mean {' or '.join(near)}?" if near else hint)


def inputs_hint(inputs: Mapping[str, Any] | tuple[Any, ...]) -> str:
    """What to do where a model does not take the inputs that were made for it."""
    return (
        f"The inputs were made for it here: {'; '.join(describe_inputs(inputs))}. Where it wants others, "
        'give each of them: --input "name: type[sizes]"; or return (model, inputs) from a factory: '
        "file.py:factory."
    )


# ---- sizes of the constructor ------------------------------------------------------------------

#: What models call the sizes that have a short name.
_SIZES = {
    "hidden": ("hidden_size", "d_model", "n_embd", "embed_dim", "dim"),
    "vocab": ("vocab_size", "n_vocab", "num_tokens"),
}
#: Sizes of the inputs, which are no arguments of a constructor.
_INPUT_SIZES = ("batch", "seq", "image_size")


def listed(names: Collection[str]) -> str:
    """The first of some names, in order."""
    return ", ".join(sorted(names)[:12]) + (", …" if len(names) > 12 else "")


def named_sizes(arguments: Mapping[str, int], known: Collection[str] | None, target: str) -> dict[str, int]:
    """The arguments under the names a target knows; where it takes any, under those given.

    Raises:
        TargetError: it knows no such argument.
    """
    named = {}
    for name, value in arguments.items():
        names = (name, *_SIZES.get(name, ()))
        match = name if known is None else next((each for each in names if each in known), "")
        if not match:
            public = [each for each in known or () if not each.startswith("_")]
            near = get_close_matches(name, [*public, *_INPUT_SIZES], 1)
            raise TargetError(
                f"{target} has no size {name!r} to set",
                hint=f"Did you mean {near[0]!r}?"
                if near
                else f"It needs an argument of this name: "
                f"def build({names[-1]}): …; it has: {listed(public) or 'none'}.",
            )
        named[match] = value
    return named
