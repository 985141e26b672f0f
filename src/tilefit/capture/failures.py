"""What the errors that a step raises mean for its capture."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tilefit.capture.sites import user_line
from tilefit.errors import CaptureError, TilefitError

#: What to do where the step's tensors are on several devices, or on none that is watched.
ELSEWHERE = (
    "Make the model and its tensors, without naming a device, in the factory that returns the step; "
    "or capture on the CPU: --on-cpu (on_cpu=True)."
)
#: What to do where code depends on values.
ON_CPU = "Capture with real data instead: --on-cpu (on_cpu=True), with a small batch."
#: What to do where the model refuses its inputs.
CHECK_INPUTS = "Check the shapes and element types of the inputs (--input), or the model itself."


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What an error means that is of one of ``types`` and has ``text`` in its first line.

    Attributes:
        what, hint: Of the error that says so. ``what`` may have the ``type`` of the original, the first
            ``line`` of its text, the ``sentence`` that begins it, and what stands ``before`` a colon.
        text: A regular expression, of any case.
        types: Exception types.
        on_shapes: It means so only where tensors have no values.
    """

    what: str
    hint: str
    text: str = ""
    types: tuple[type[Exception], ...] = (Exception,)
    on_shapes: bool = False


_VALUES = "the step depends on values, and only shapes are known ({type}: {sentence})"

#: The first that an error fits. Where PyTorch raises a type of its own, that decides; nearly everywhere it is
#: a bare RuntimeError, NotImplementedError or ValueError, and the text has to.
_MEANINGS = (
    # torch/csrc/jit/runtime/interpreter.cpp, around whatever an operation of a script raised.
    _Meaning(
        "the scripted or traced model does not run on shapes alone",
        ON_CPU,
        text="torchscript interpreter",
        on_shapes=True,
    ),
    # torch/_prims_common (check_same_device) on meta; c10 (common_device_check_failure) on real devices.
    _Meaning(
        "the step mixes tensors of different devices ({line})", ELSEWHERE, text="expected device|same device"
    ),
    # The dispatcher, of an operator that only the CPU has; its name comes first.
    _Meaning(
        "the model is quantised for the CPU ({before}), and no GPU runs that",
        "Give the model as it was before.",
        text="^quantized::",
    ),
    # torchvision/extension.py, when a compiled operation is called.
    _Meaning(
        f"the installed torchvision was not built for PyTorch {torch.__version__}: its compiled operations "
        "(nms, roi_align) are missing",
        "Install the two from the same place, as pytorch.org says for your machine.",
        text=r"couldn't load custom c\+\+ ops",
    ),
    # What fake tensors raise, where code computes with some of its own.
    _Meaning(
        _VALUES, ON_CPU, types=(DataDependentOutputException, DynamicOutputShapeException), on_shapes=True
    ),
    # torch/_meta_registrations.py ("The register_meta function for … raises unimplemented"), the dispatcher
    # ("no fake impl or Meta kernel registered"), c10/core/TensorImpl ("Cannot copy out of meta tensor; no
    # data!") and symbolic shapes ("Could not guard on data-dependent expression").
    _Meaning(_VALUES, ON_CPU, text="meta|data-dependent|no data", on_shapes=True),
    _Meaning("the model raised {type}: {line}", CHECK_INPUTS),
)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one without text the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def explained(error: Exception, *, on_shapes: bool) -> CaptureError:
    """What to tell the user of an error that a step raised.

    Args:
        error: As the step raised it.
        on_shapes: Its tensors had no values.
    """
    line = first_line(error)
    meaning = next(
        row
        for row in _MEANINGS
        if isinstance(error, row.types)
        and re.search(row.text, line, re.IGNORECASE)
        and (on_shapes or not row.on_shapes)
    )
    what = meaning.what.format(
        type=type(error).__name__, line=line, sentence=line.partition(". ")[0], before=line.partition(": ")[0]
    )
    return CaptureError(what, where=user_line(error), hint=meaning.hint)


def needs_device(error: TilefitError) -> bool:
    """Whether a capture failed for want of values, or of a device that the code names."""
    return error.hint in (ELSEWHERE, ON_CPU) or "not compiled with CUDA" in error.what
