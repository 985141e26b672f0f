"""Inputs in words: made of ``input_ids: int64[16,1024]``, described in the same way, counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from tilefit.capture.dtypes import BY_NAME, DTYPES
from tilefit.capture.trees import tensors
from tilefit.errors import UsageError
from tilefit.ops import FORWARD, Attention, Conv, Gemm, Recurrent, StepOp

#: Sizes of synthesised inputs where the user gives none.
DEFAULT_TEXT_BATCH = 16
DEFAULT_IMAGE_BATCH = 64
DEFAULT_IMAGE_SIZE = 224
#: Clips, as in torchvision's own training of a 3D ResNet.
DEFAULT_CLIP_BATCH = 8
#: The share of the FLOP whose rows a batch need not divide: of tables that are computed for all samples,
#: such as relative positions. A choice.
_LEAST_ROWS = 0.001

_SPEC = re.compile(r"^\s*(?:(?P<name>[A-Za-z_]\w*)\s*:)?\s*(?P<dtype>\w+)\s*\[(?P<shape>[^\]]*)\]\s*$")
#: PyTorch's names of element types, and tilefit's, of which fp8 is that of several: the first.
_BY_NAME = {name: dtype for dtype, name in reversed(DTYPES.items())} | BY_NAME


def parse_inputs(specs: Sequence[str], device: str = "meta") -> Any:
    """Tensors as specified: a mapping if the inputs are named, else a tuple of positional arguments.

    Args:
        specs: Such as ``["input_ids: int64[16,1024]"]`` or ``["float32[32,3,224,224]"]``.
        device: ``meta`` for shapes alone; on ``cpu`` floating-point inputs are normal, integers 0 or 1.

    Raises:
        UsageError: a specification is not of that form.
    """
    named: dict[str, torch.Tensor] = {}
    positional: list[torch.Tensor] = []
    for spec in specs:
        match = _SPEC.match(spec)
        if match is None:
            raise UsageError(
                f"cannot read the input {spec!r}",
                hint='Write a name, an element type and sizes: --input "input_ids: int64[16,1024]".',
            )
        dtype = _BY_NAME.get(match["dtype"])
        if dtype is None:
            known = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
            raise UsageError(
                f"unknown element type {match['dtype']!r} in the input {spec!r}", hint=f"Use one of: {known}."
            )
        tensor = make(_sizes(match["shape"], spec), dtype, device)
        if match["name"]:
            if match["name"] in named:
                raise UsageError(f"the input {match['name']!r} is given twice")
            named[match["name"]] = tensor
        else:
            positional.append(tensor)
    if named and positional:
        raise UsageError(
            "some inputs have a name and some have none", hint="Name all of them, or none (positional)."
        )
    return named or tuple(positional)


def _sizes(text: str, spec: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text.strip() else ()
    except ValueError:
        sizes = (-1,)
    if any(size < 1 for size in sizes):
        raise UsageError(f"the sizes in the input {spec!r} are not positive whole numbers")
    return sizes


def make(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of this shape: without data on ``meta``, with harmless data elsewhere."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)


def describe_inputs(inputs: Any) -> Iterator[str]:
    """``name: dtype[sizes]`` of every tensor among the inputs."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    named: Sequence[tuple[str, Any]] = (
        list(inputs.items())
        if isinstance(inputs, Mapping)
        else [(str(i), v) for i, v in enumerate(inputs or ())]
    )
    for name, value in named:
        if isinstance(value, Mapping):
            yield from describe_inputs({f"{name}.{key}": inner for key, inner in value.items()})
            continue
        several = isinstance(value, (list, tuple))
        first = next(tensors(value), None) if several else value
        if isinstance(first, torch.Tensor):
            shapes = [t.shape for t in tensors(value) if t.dim() == first.dim()] if several else [first.shape]
            sizes = ",".join(_range(extents) for extents in zip(*shapes, strict=True))
            dtype = str(first.dtype).removeprefix("torch.")
            yield f"{name}: {f'{len(value)} x ' if several else ''}{dtype}[{sizes}]"


def _range(extents: Sequence[int]) -> str:
    least, most = min(extents), max(extents)
    return str(least) if least == most else f"{least}..{most}"


def batch_of(inputs: Any, ops: Iterable[StepOp]) -> int:
    """Samples: the length of a list of images; or of the sizes that the inputs begin with, the second one of
    what may be time-first, and the length of a list of samples of different lengths, the first that divides
    the rows of what the step multiplies. 0 for a graph, whose nodes are no samples, and of empty inputs."""
    arguments: Any = inputs.values() if isinstance(inputs, Mapping) else inputs
    ragged: list[Any] = []
    # A tensor is no list of arguments; iterating over it would make a view of every row.
    for each in arguments if isinstance(arguments, Iterable) and not isinstance(inputs, torch.Tensor) else ():
        if isinstance(each, PackedSequence):
            return int(each.batch_sizes[0])
        if isinstance(each, list) and each and all(map(_is_image, each)):
            return len(each)
        ragged += [each] * (isinstance(each, list) and _is_ragged(each))
    # Masks that serve all samples, positions and lengths come first at times.
    parts = {id(part) for each in ragged for part in each}
    shapes = [tuple(t.shape) for t in tensors(inputs) if t.numel() and t.dim() and id(t) not in parts]
    shapes = [shape for shape in shapes if len(shape) > 1] or shapes
    sizes = [shape[0] for shape in shapes if shape[0] > 1]
    if not (sizes or ragged):
        sizes = [shape[0] for shape in shapes[:1]]
    sizes += [size for shape in shapes[:1] for size in shape[1:2] if size > 1]
    sizes += map(len, ragged)
    flop: Counter[int] = Counter()
    weighed: set[tuple[int, ...]] = set()  # shapes of what is multiplied by a weight
    for entry in ops:
        if entry.phase == FORWARD:
            flop[_rows(entry)] += entry.op.flop
            if isinstance(entry.op, Gemm) and entry.parameter:
                weighed.update(ref.shape for ref in entry.inputs if not ref.parameter)
    least = (1 - _LEAST_ROWS) * flop.total()
    fitting = (size for size in sizes if sum(n for rows, n in flop.items() if not rows % size) >= least)
    batch = next(fitting, sizes[0] if sizes else 0)
    graphs = [tuple(t.shape) for t in tensors(inputs) if _is_graph(t, batch)]
    return 0 if set(graphs) - weighed and len(shapes) > 1 else batch


def _is_graph(tensor: torch.Tensor, nodes: int) -> bool:
    """Whether a tensor says which nodes are joined: each with each, or both ends of each edge."""
    sizes = tuple(tensor.shape)
    edges = tensor.dtype == torch.int64 and len(sizes) == 2 and sizes[0] == 2 != nodes
    joined = tensor.is_floating_point() and sizes == (nodes, nodes)  # integers may be tokens
    return nodes > 1 and (joined or edges)


def _rows(entry: StepOp) -> int:
    """Rows, images or sequences of a product; 0, which any size divides, of all else."""
    op = entry.op
    if isinstance(op, Gemm):
        rows = op.n if entry.is_weight_first(op.m, op.k, op.n) else op.m
        return op.batch * rows if entry.parameter or op.batch == 1 else op.batch
    return op.batch if isinstance(op, Conv | Attention | Recurrent) else 0


def _is_ragged(values: list[Any]) -> bool:
    return all(isinstance(v, torch.Tensor) and v.dim() for v in values) and len({len(v) for v in values}) > 1


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[0] in (1, 3, 4)
