"""Part `correctness` of `recurrent.py`: random shapes against float64, and repeated launches bit for bit.

Shapes: the error of a tensor is the norm of its difference from that of `torch.nn` in float64 on the same
values, over the latter's norm. Ours is that of the persistent kernels, and of single steps by PyTorch's cell
functions, for the outputs, final states and all gradients; the ratio is to that of `torch.nn` (cuDNN) in the
same element type, of which no less is taken than a quarter of the type's epsilon: what rounding an exact
result to it costs.

Norms are of the tensors of several draws of weights and inputs together, how many is fixed by the shape. A
few elements' rounding errors are chance: so is, in one draw, how near to zero a tensor of one element is, by
which its error is divided. A ReLU RNN's gradient jumps where a state rounds to the other side of zero: a
handful of such states, one's or the other's, make nearly all of the pooled error. Of ReLU RNNs the error is
therefore the median of the draws' errors; the pooled ones are recorded too.

Launches: kernels run again and again on a few sets of random inputs in random order, so that the memory they
get holds what other launches left, and must repeat each set's first result bit for bit; also when compiled
with random delays.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from recurrent_common import CELLS, DTYPES, NAMES, Row, Setting, copied, problems, table
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tilefit.errors import TilefitError
from tilefit.rnn import reference
from tilefit.rnn.cells import CELLS as KERNEL_CELLS
from tilefit.rnn.cells import Grads, Rows
from tilefit.rnn.persistent import layer as persistent_layer
from tilefit.rnn.persistent.launch import Kernel, LaunchError

BUDGET_S = 90.0
#: Shapes of several steps by the persistent kernels, and of one step by PyTorch's cell functions.
SHAPES, SINGLE_STEPS = 60, 16
#: Draws of weights and inputs: at least, and together with at least this many hidden units; of a ReLU RNN 16
#: times as many.
DRAWS, UNITS = 4, 64
LAUNCHES = 10_000
BAR = 1.5


@dataclass(frozen=True)
class Case:
    cell: str
    dtype: str
    hidden: int
    inputs: int
    batch: int
    steps: int
    layers: int
    bidirectional: bool
    bias: bool
    ragged: bool
    initial: bool
    backend: str


def cases(setting: Setting) -> list[Case]:
    several = shapes(setting, 8 if setting.tiny else SHAPES, random.Random(0))
    source = random.Random(1)
    single = shapes(setting, 4 if setting.tiny else SINGLE_STEPS, source)
    steps = [
        replace(case, cell=source.choice(["lstm", "gru"]), steps=1, ragged=False, backend="cell")
        for case in single
    ]
    return [*steps, *several]


def shapes(setting: Setting, count: int, source: random.Random) -> list[Case]:
    """Random shapes for the persistent kernels; without a GPU, for the reference."""

    def spread(largest: int) -> int:
        """1 to ``largest``, evenly by its logarithm."""
        return max(1, round(largest ** source.random()))

    return [
        Case(
            cell=source.choice(sorted(CELLS)),
            dtype=source.choice(sorted(DTYPES)),
            hidden=spread(12 if setting.tiny else 2304),
            inputs=spread(12 if setting.tiny else 512),
            batch=spread(4 if setting.tiny else 128),
            steps=source.randint(1, 4 if setting.tiny else 40),
            layers=source.randint(1, 4),
            bidirectional=source.random() < 0.4,
            bias=source.random() < 0.8,
            ragged=source.random() < 0.4,
            initial=source.random() < 0.7,
            backend="persistent" if setting.on_gpu else "reference",
        )
        for _ in range(count)
    ]


def correctness(setting: Setting) -> dict[str, Any]:
    planned = cases(setting)
    setting.compile_ahead(
        problem
        for case in planned
        if case.backend == "persistent"
        for problem in problems(
            case.cell,
            DTYPES[case.dtype],
            case.hidden,
            case.batch,
            directions=1 + case.bidirectional,
            lengths=case.ragged,
        )
    )
    launches = repeated(setting)
    rows: list[Row] = [compared(setting, case) for case in setting.within(planned)]
    ran = [row for row in rows if "refused" not in row]
    print(f"\ncorrectness: {len(ran)} of {len(planned)} random shapes, error over torch.nn's (bar {BAR})")
    lines = []
    for dtype in sorted(DTYPES):
        for kind in ("outputs", "gradients"):
            found = [
                (ratio, name, row)
                for row in ran
                if row["dtype"] == dtype
                for name, ratio in row["ratios"].items()
                if name.startswith("grad") == (kind == "gradients")
            ]
            if found:
                ratio, name, row = max(found, key=lambda entry: entry[0])
                over = len({id(row) for ratio, _, row in found if not ratio <= BAR})
                where = (
                    f"{name}, {row['cell']} H{row['hidden']} B{row['batch']} T{row['steps']} L{row['layers']}"
                )
                median = statistics.median(ratio for ratio, _, _ in found)
                lines.append((dtype, kind, f"{median:.2f}", f"{ratio:.2f}", where, over))
    table("dtype|of|median|worst|where|shapes over the bar", lines)
    for reason in sorted({row["refused"] for row in rows if "refused" in row}):
        print(f"not run by the persistent kernels: {reason}")
    print("\nrepeated launches")
    table(
        "cell|hidden|batch|kernels|launches|different",
        (
            [launch[key] for key in ("cell", "hidden", "batch", "kernels", "launches", "different")]
            for launch in launches
        ),
    )
    return {"shapes": rows, "launches": launches}


def compared(setting: Setting, case: Case) -> Row:
    """Errors over those of torch.nn, by tensor."""
    torch.manual_seed(case.hidden * 1000 + case.batch)
    dtype = DTYPES[case.dtype]
    draws = max(DRAWS, math.ceil(UNITS / case.hidden))
    if case.cell == "relu":
        draws = max(16 * DRAWS, math.ceil(16 * UNITS / case.hidden))
    if setting.tiny:
        draws = 2
    squares: dict[str, list[list[float]]] = {}
    for _ in range(draws):
        try:
            drawn = draw(setting, case)
        except LaunchError:
            raise
        except TilefitError as refusal:
            return {**asdict(case), "refused": str(refusal)}
        for name, found in drawn.items():
            squares.setdefault(name, []).append(found)
    floor = torch.finfo(dtype).eps / 4
    row: Row = {**asdict(case), "draws": draws}
    errors = {name: pooled(found) for name, found in squares.items()}
    if case.cell == "relu":
        row["pooled_errors"] = errors
        errors = {name: medians(found) for name, found in squares.items()}
    row["errors"] = errors
    return row | {"ratios": {name: own / max(other, floor) for name, (own, other) in errors.items()}}


def pooled(squares: list[list[float]]) -> list[float]:
    """Our error and torch.nn's, of all draws together; ``squares`` are those of :func:`draw`."""
    own, other, exact = map(sum, zip(*squares, strict=True))
    return [(square / (exact or 1.0)) ** 0.5 for square in (own, other)]


def medians(squares: list[list[float]]) -> list[float]:
    """The medians of both errors, of the draws in which the right tensor is not zero."""
    each = [pooled([square]) for square in squares if square[2]]
    return [statistics.median(errors) for errors in zip(*each, strict=True)] if each else [0.0, 0.0]


def draw(setting: Setting, case: Case) -> dict[str, list[float]]:
    """By tensor, the squared norms of our error, of torch.nn's and of what is right; values are new."""
    dtype = DTYPES[case.dtype]
    theirs, ours = setting.pair(
        case.cell,
        dtype,
        case.inputs,
        case.hidden,
        num_layers=case.layers,
        bidirectional=case.bidirectional,
        bias=case.bias,
    )
    ours.backend = case.backend
    x = setting.random(case.steps, case.batch, case.inputs, dtype=dtype)
    state = (case.layers * (1 + case.bidirectional), case.batch, case.hidden)
    states = [setting.random(*state, dtype=dtype).tanh() for _ in range(2 if case.cell == "lstm" else 1)]
    lengths = torch.randint(1, case.steps + 1, (case.batch,)) if case.ragged else None
    data = [x, *states] if case.initial else [x]
    found = results(ours, data, lengths)
    baseline = results(theirs, data, lengths)
    expected = results(copied(theirs).double(), data, lengths)
    return {
        name: torch.stack(
            [
                part.square().sum()
                for part in (found[name].double() - exact, baseline[name].double() - exact, exact)
            ]
        ).tolist()
        for name, exact in expected.items()
    }


def results(layer: nn.Module, data: list[Tensor], lengths: Tensor | None) -> dict[str, Tensor]:
    """Outputs, final states and all gradients of a random weighted sum of them, by name."""
    dtype = next(layer.parameters()).dtype
    x, *states = (t.to(dtype).detach().requires_grad_() for t in data)
    hx: Any = None if not states else tuple(states) if len(states) == 2 else states[0]
    if lengths is None:
        out, ends = layer(x, hx)
    elif hasattr(layer, "backend"):
        out, ends = layer(x, hx, lengths=lengths)
    else:
        packed, ends = layer(pack_padded_sequence(x, lengths, enforce_sorted=False), hx)
        out = pad_packed_sequence(packed, total_length=len(x))[0]
    found = {"out": out, "h": ends[0], "c": ends[1]} if isinstance(ends, tuple) else {"out": out, "h": ends}
    generator = torch.Generator(out.device).manual_seed(1)
    weights = [
        torch.randn(t.shape, generator=generator, device=t.device).to(data[0].dtype).to(dtype)
        for t in found.values()
    ]
    inputs = dict(zip(("x", "h0", "c0"), (x, *states), strict=False)) | dict(layer.named_parameters())
    grads = torch.autograd.grad(list(found.values()), list(inputs.values()), weights)
    return {
        name: t.detach()
        for name, t in (*found.items(), *zip((f"grad {name}" for name in inputs), grads, strict=True))
    }


# --- repeated launches -----------------------------------------------------------------------------

REPEATED = [("lstm", 256, 8), ("lstm", 1024, 16), ("gru", 1024, 4), ("gru", 512, 40), ("rnn", 2048, 64)]


def repeated(setting: Setting) -> list[Row]:
    """Launches that differ from the first with the same inputs, by kernel."""
    sizes = [("lstm", 8, 2), ("gru", 8, 2)] if setting.tiny else REPEATED
    steps, count = (3, 40) if setting.tiny else (64, LAUNCHES)
    kinds = ["plain", "random delays"] if setting.on_gpu else ["reference"]
    for jitter in (False, True):
        planned = (problem for size in sizes for problem in problems(size[0], torch.bfloat16, *size[1:]))
        setting.compile_ahead(planned, jitter=jitter)
    each = count // (2 * len(sizes) * len(kinds))
    return [row for size in sizes for row in _repeated(setting, size, steps, kinds, each)]


@contextmanager
def _delayed(active: bool) -> Iterator[None]:
    """Within the block the kernels are compiled with random delays."""
    plain = persistent_layer._kernel
    kernels: dict[Any, Kernel] = {}

    def delayed(*key: Any) -> Kernel:
        if key not in kernels:
            kernel = plain(*key)
            kernels[key] = Kernel(kernel.problem, kernel.variant, kernel.device, jitter=True)
        return kernels[key]

    if active:
        persistent_layer._kernel = delayed
    try:
        yield
    finally:
        persistent_layer._kernel = plain


def _repeated(
    setting: Setting, size: tuple[str, int, int], steps: int, kinds: list[str], each: int
) -> list[Row]:
    """``each`` forward and as many backward launches of each kind of kernel."""
    name, hidden, batch = size
    cell = KERNEL_CELLS[NAMES[name]]
    passes = persistent_layer if setting.on_gpu else reference
    dtype = torch.bfloat16

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return setting.random(*shape, dtype=dtype, scale=scale)

    w_hh = values(1, cell.gates * hidden, hidden, scale=hidden**-0.5)
    bias_n = values(1, hidden) if cell.is_gru else None
    sets = [
        {
            "xg": values(steps, batch, 1, cell.gates * hidden),
            "h0": values(1, batch, hidden).tanh(),
            "c0": values(1, batch, hidden) if cell.has_c else None,
            "grads": [values(steps, batch, 1, hidden), values(1, batch, hidden), values(1, batch, hidden)],
        }
        for _ in range(6)
    ]

    def run(inputs: dict[str, Any], saved: Any) -> tuple[Any, Any]:
        """A forward pass, and a backward pass from the first results."""
        rows = Rows(inputs["h0"], inputs["c0"])
        ahead = passes.forward(cell, inputs["xg"], w_hh, bias_n, rows, save=True)
        kept = saved or (ahead.out, ahead.gates, ahead.c)
        grad_out, grad_h, grad_c = inputs["grads"]
        grads = Grads(grad_out, grad_h, grad_c if cell.has_c else None)
        back = passes.backward(cell, grads, kept, w_hh, rows)
        return ahead, back

    first = [run(inputs, None) for inputs in sets]
    source, rows = random.Random(0), []
    for kind in kinds:
        different = torch.zeros((), dtype=torch.long, device=setting.device)
        with _delayed(kind == "random delays"):
            for _ in range(each):
                index = source.randrange(len(sets))
                expected = first[index]
                found = run(sets[index], (expected[0].out, expected[0].gates, expected[0].c))
                for own, right in zip(found, expected, strict=True):
                    unlike = [
                        (a.view(torch.uint8) != b.view(torch.uint8)).any()
                        for a, b in zip(own, right, strict=True)
                        if a is not None and a.numel()
                    ]
                    different += torch.stack(unlike).any()
        rows.append(
            {
                "cell": name,
                "hidden": hidden,
                "batch": batch,
                "kernels": kind,
                "launches": 2 * each,
                "different": int(different),
            }
        )
    return rows
