"""Which backend runs a recurrent layer.

- ``persistent``: our kernels, which keep the weights on chip for the whole sequence.
- ``cudnn``: what ``torch.nn`` runs: cuDNN on CUDA, PyTorch's own code elsewhere.
- ``cell``: PyTorch's cell functions, for a single time step of an LSTM or a GRU.
- ``reference``: plain PyTorch, step by step: right everywhere, fast nowhere.

The persistent kernels run where they can and were measured to be faster than cuDNN, outside CUDA graphs
clearly faster: :mod:`tilefit.cost.recurrent_times`. Beyond the largest hidden size or mini-batch measured,
and on a GPU that no measurements hold for, cuDNN runs.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tilefit import gpus
from tilefit.cost import recurrent_times
from tilefit.cost.recurrent_times import CUDNN, PERSISTENT, Table
from tilefit.errors import TilefitError, UsageError
from tilefit.gpus import Gpu
from tilefit.rnn.call import DTYPES, Call, allows_tf32, cuda_device
from tilefit.rnn.cells import CELLS, Cell

CELL, REFERENCE = "cell", "reference"
BACKENDS = (PERSISTENT, CUDNN, CELL, REFERENCE)

#: The environment variable that forces a backend.
VARIABLE = "TILEFIT_RNN"

_ASKED_FOR = "asked for"


class Choice(NamedTuple):
    """A backend and why."""

    backend: str
    reason: str


def choose(call: Call, backend: str | None = None) -> Choice:
    """The backend that runs a call.

    Args:
        call: What is to run.
        backend: One that must run it; without it, the environment variable ``TILEFIT_RNN`` names it, if set.

    Raises:
        TilefitError: the backend asked for cannot run the call; the error says why.
        UsageError: there is no such backend.
    """
    return _choose(call, _forced(backend))


def _forced(backend: str | None) -> str | None:
    return backend or os.environ.get(VARIABLE) or None


@lru_cache(maxsize=4096)
def _choose(call: Call, forced: str | None, *, compiled: bool = False) -> Choice:
    if forced:
        if forced not in BACKENDS:
            raise UsageError(
                f"unknown backend {forced!r} of a recurrent layer", hint=f"Use {', '.join(BACKENDS)}."
            )
        refused = _REFUSALS[forced](call)
        if refused:
            raise TilefitError(
                f"backend {forced!r} cannot run this {CELLS[call.cell].mode}: {refused}",
                hint=f"Leave out backend= and {VARIABLE} to run the best backend that can.",
            )
        return Choice(forced, _ASKED_FOR)
    measured = call.device is not None and _table(call.device) is not None
    if measured and not compiled and (by_cell := _by_cell(call)):
        return by_cell
    refused = refusal(call)
    if refused is None:
        return _faster(call)
    by_torch = _torch_refusal(call)
    if by_torch is None:
        return Choice(CUDNN, refused)
    by_reference = _reference_refusal(call)
    if by_reference is None:
        return Choice(REFERENCE, f"{refused}; and {by_torch}")
    raise TilefitError(f"no backend can run this {CELLS[call.cell].mode}: {by_torch}, and {by_reference}")


#: Hidden units from which the cell functions are chosen. Of layers of fewer their error was measured to be up
#: to 1.53 times cuDNN's, of larger ones 1.2 times at most (``benchmarks/recurrent.py correctness``).
CELL_HIDDEN = 64


def _by_cell(call: Call) -> Choice | None:
    """The cell functions, where they run a call on a GPU whose recurrent layers were measured."""
    if _cell_refusal(call) is not None or call.hidden < CELL_HIDDEN:
        return None
    if call.training and not call.captured:
        return Choice(CELL, "a single step and its backward pass, which cost the host least so")
    return Choice(CELL, "a single step, and the state is reset before it") if call.reset else None


def expected(call: Call, gpu: Gpu, backend: str | None = None) -> Choice | None:
    """The backend of a call on a GPU that is not at hand, as far as measurements tell.

    Whether a layer fits on the chip is not asked: what was measured did.

    Returns:
        None where nothing was measured, or a backend is asked for.
    """
    table = recurrent_times.table(gpu)
    if table is None or call.proj or _forced(backend):
        return None
    chosen = _by_cell(call) or _judged(call, table)
    return None if call.reset and chosen.backend == CUDNN else chosen


@cache
def persistent() -> ModuleType:
    """The package of the persistent kernels, imported when first needed."""
    from tilefit.rnn import persistent as kernels

    return kernels


def refusal(call: Call) -> str | None:
    """Why the persistent kernels cannot run a call; None if they can."""
    if call.device is None:
        return "the tensors are not on a CUDA device"
    if call.proj:
        return "a projection (proj_size) has no persistent kernel"
    return persistent().refusal(call)  # type: ignore[no-any-return]


def _torch_refusal(call: Call) -> str | None:
    if call.reset:
        return "torch.nn cannot reset the state within a sequence"
    if call.ragged and call.shapes_only:
        return "torch.nn needs the values of the lengths"
    return None


def _reference_refusal(call: Call) -> str | None:
    return "the reference has no projection (proj_size)" if call.proj else None


def _cell_refusal(call: Call) -> str | None:
    if call.cell not in ("lstm", "gru"):
        return "PyTorch's cell functions of plain RNNs make larger errors than cuDNN"
    if call.steps > 1:
        return "PyTorch's cell functions compute a single time step"
    if call.ragged:
        return "PyTorch's cell functions have no lengths"
    return "PyTorch's cell functions have no projection (proj_size)" if call.proj else None


_REFUSALS = {PERSISTENT: refusal, CUDNN: _torch_refusal, CELL: _cell_refusal, REFERENCE: _reference_refusal}


def _faster(call: Call) -> Choice:
    """Of the persistent kernels and cuDNN, the one measured to be faster."""
    if call.reset:
        return Choice(PERSISTENT, "only the persistent kernels can reset the state within a sequence")
    assert call.device is not None
    table = _table(call.device)
    if table is None:
        return Choice(CUDNN, "the persistent kernels were not measured on this GPU")
    return _judged(call, table)


def _judged(call: Call, table: Table) -> Choice:
    found = table.nearest(call.op(), DTYPES[call.dtype], training=call.training, captured=call.captured)
    if found is None:
        return Choice(CUDNN, "no size like this was measured with the persistent kernels")
    row, ours, theirs, is_faster = found
    graph = " in a CUDA graph" if call.captured else ""
    measured = f"measured with {row.hidden} units, mini-batch {row.batch}, {row.steps} steps{graph}"
    if is_faster:
        return Choice(PERSISTENT, f"{measured}: {ours:.2f} us a step, cuDNN {theirs:.2f}")
    close = ", which is too close" if ours <= theirs else ""
    return Choice(CUDNN, f"{measured}: {theirs:.2f} us a step, persistent {ours:.2f}{close}")


#: Calls that ran on a side stream by another backend than eager ones: what a capture of them may run by.
_warmed_up: set[Call] = set()


def in_graph(call: Call, backend: str | None) -> Call:
    """A call outside compiled code, ``captured`` if it becomes part of a CUDA graph or may warm up for that.

    Nothing may be captured that has not run before: a library's first call allocates memory, and a kernel's
    loads it. PyTorch asks for warm-ups on a side stream, where captures run too. So a call on one counts as
    captured; but where a captured call would run by another backend than an eager one, and none warmed up
    for it, it runs as an eager one, which may have. A backend that is asked for leaves nothing to decide.
    """
    if call.device is None or not torch._C._cuda_getCurrentRawStream(call.device.index):
        return call
    if _forced(backend):
        return call
    captured = call._replace(captured=True)
    if _choose(captured, None).backend == _choose(call, None).backend:
        return captured
    if not torch.cuda.is_current_stream_capturing():
        _warmed_up.add(captured)
    return captured if captured in _warmed_up else call


@cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The facts of a CUDA device; None if they are not known."""
    try:
        properties = torch.cuda.get_device_properties(device)
        return gpus.of_device(properties.name, properties.total_memory)
    except UsageError:
        return None


@cache
def _table(device: torch.device) -> Table | None:
    """The measurements that hold for a CUDA device."""
    gpu = gpu_of(device)
    return None if gpu is None else recurrent_times.table(gpu)


def backend_of_layer(
    x: Tensor,
    w_hh: Tensor,
    cell: Cell,
    lengths: Tensor | None,
    reset: Tensor | None,
    training: bool,
    backend: str,
) -> str:
    """The backend of one layer of compiled code, where the operator chooses when it runs.

    It chooses as for an eager call, in a CUDA graph too: forward and backward must choose alike, and only one
    of them may be captured.

    Args:
        x: [T, B, I]
        w_hh: [D, G * H, H]
        backend: One that must run it, or empty.

    Raises:
        TilefitError: the backend asked for cannot run it; cuDNN also not with lengths, which it needs on the
            host, and not without CUDA.
    """
    directions, _, hidden = w_hh.shape
    steps, batch, inputs = x.shape
    device = cuda_device(x)
    call = Call(
        cell.name, x.dtype, device, x.is_meta, inputs, hidden, batch, steps, 1, directions, 0,
        lengths is not None, reset is not None, training, x.dtype, allows_tf32(x.dtype, device),
    )  # fmt: skip
    chosen, reason = _choose(call, _forced(backend), compiled=True)
    by_cudnn = chosen == CUDNN and device is not None and lengths is None
    if by_cudnn or chosen in (PERSISTENT, REFERENCE):
        return chosen
    if reason == _ASKED_FOR:
        cannot = {
            CUDNN: "compiled code can run cuDNN on CUDA tensors only, and without lengths",
            CELL: "compiled code does not call PyTorch's cell functions",
        }
        raise TilefitError(cannot[chosen], hint=f"Leave out backend= and {VARIABLE}, or torch.compile.")
    return PERSISTENT if refusal(call) is None else REFERENCE
