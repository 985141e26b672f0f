"""Lists of shapes: published benchmarks, real models, and designed random grids."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import log2
from random import Random

from tilefit.errors import UsageError
from tilefit.measure.streaming import RECIPES
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Attention, Conv, Conv2d, Gemm, Op, Recurrent
from tilefit.ops.base import DIRECTIONS
from tilefit.ops.dtypes import elements_per_access
from tilefit.ops.gemm import linear_pass


@dataclass(frozen=True, slots=True)
class Entry:
    """One shape of a suite.

    Attributes:
        op: What to run.
        source: Where the shape is from: a model, a benchmark or a part of the grid. Shapes of one source are
            alike, so a test set is held out by source.
        published_ms: Published times by column, such as ``{"v100_mixed": 0.02}``.
    """

    op: Op
    source: str
    published_ms: dict[str, float] | None = None


# --- DeepBench -------------------------------------------------------------------------------------

# Shapes and times of baidu-research/DeepBench, commit da81ba7 (2020-08-11), Apache License 2.0.


_CONV_SIZES = ("n", "c", "k", "h", "w", "r", "s", "stride_h", "stride_w", "pad_h", "pad_w")


def _table(name: str) -> list[dict[str, str]]:
    text = resources.files("tilefit.measure").joinpath("deepbench", name).read_text()
    return list(csv.DictReader(text.splitlines()))


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(separator)))


def _published(row: dict[str, str]) -> dict[str, float]:
    return {
        key.removesuffix("_ms"): float(value) for key, value in row.items() if key.endswith("_ms") and value
    }


def deepbench_gemm(dtype: str = "bf16") -> list[Entry]:
    """The 160 products of DeepBench's training list.

    DeepBench is column-major, ``C[m, n] = op(A) op(B)``; row-major the same memory is ``C[n, m]``, so m and n
    change places and the letters stay.
    """
    entries = []
    for row in _table("gemm.csv"):
        op = Gemm(int(row["n"]), int(row["m"]), int(row["k"]), dtype=dtype, layout=row["op"])
        times = _published(row)
        for key, value in row.items():  # most columns were published as rates
            if key.endswith("_tflops") and value:
                times.setdefault(key.removesuffix("_tflops"), op.flop / float(value) / 1e9)
        entries.append(Entry(op, "deepbench", times))
    return entries


def deepbench_conv(dtype: str = "bf16", channels_last: bool = True) -> list[Entry]:
    """The 94 convolutions of DeepBench's training list, each with its two gradients."""
    entries: list[Entry] = []
    for row in _table("conv.csv"):
        n, c, k, h, w, r, s, *around = (int(row[key]) for key in _CONV_SIZES)
        op = Conv2d(n, c, k, (h, w), (r, s), (around[0], around[1]), (around[2], around[3]), dtype=dtype)
        entries += _each_pass(replace(op, channels_last=channels_last), row, ("fwd", "dgrad", "wgrad"))
    return entries


def deepbench_rnn(dtype: str = "fp16") -> list[Entry]:
    """The 53 recurrent layers of DeepBench's training list, forward and backward.

    DeepBench leaves out the product of the inputs; ``torch.nn`` has no such option, so that the times here
    include it.
    """
    modes = {"vanilla": "RNN_RELU", "lstm": "LSTM", "gru": "GRU"}
    entries: list[Entry] = []
    for row in _table("rnn.csv"):
        hidden, steps, batch = (int(row[key]) for key in ("hidden", "timesteps", "batch"))
        op = Recurrent(modes[row["cell"]], hidden, hidden, steps, batch, dtype=dtype)
        entries += _each_pass(op, row, ("fwd", "bwd_data", "bwd_weights"))
    return entries


def _each_pass(op: Conv | Recurrent, row: dict[str, str], names: Sequence[str]) -> Iterator[Entry]:
    """An operation and its two gradients, with the times that their columns have."""
    times = _published(row)
    for name, direction in zip(names, DIRECTIONS, strict=True):
        published = {k.removesuffix(f"_{name}"): v for k, v in times.items() if k.endswith(name)}
        yield Entry(replace(op, direction=direction), "deepbench", published)


# --- real models: linear layers --------------------------------------------------------------------

_BATCHES = _numbers("1 2 3 4 5 6 8 12 16 20 24 25 32 48 50 64 96 100 128 192 200 256 384 500 512 1024", " ")


@cache
def _shapes(name: str) -> dict[str, list[str]]:
    """The shapes of real models in a file, as words, by model."""
    text = resources.files("tilefit.measure").joinpath("shapes", f"{name}.txt").read_text()
    lines = (line.partition(": ") for line in text.splitlines() if not line.startswith("#"))
    return {model: shapes.split() for model, _, shapes in lines}


def linears(model: str) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """(outputs, inputs) of a model's linear layers, and its rows per sample."""
    samples, *pairs = _shapes("linears")[model]
    return [(int(n), int(k)) for n, k in (pair.split("x") for pair in pairs)], _numbers(samples, ",")


def linear_passes(rows: int, outputs: int, inputs: int, dtype: str) -> tuple[Gemm, Gemm, Gemm]:
    """Forward, data gradient and weight gradient of ``F.linear``."""
    forward, data, weight = (linear_pass(each, rows, outputs, inputs, dtype) for each in DIRECTIONS)
    return forward, data, weight


def model_gemm(rng: Random, max_rows: int = 65536) -> Entry:
    """A random linear layer of a random model, at a random batch, in one of its three passes."""
    model = rng.choice(list(_shapes("linears")))
    pairs, samples = linears(model)
    outputs, inputs = rng.choice(pairs)
    rows = rng.choice(samples) * rng.choice(_BATCHES)
    if rng.random() < 0.25:  # a generation step: one row a sample
        rows = rng.choice(_BATCHES)
    while rows > max_rows:
        rows //= 2
    op = rng.choice(linear_passes(rows, outputs, inputs, _dtype(rng)))
    if op.layout == "TN" and rng.random() < 0.4:
        op = replace(op, bias=op.dtype not in ("fp8", "int8"))
    return Entry(_legal(op), model)


# --- the designed random grid of products ----------------------------------------------------------


def _dtype(rng: Random) -> str:
    return rng.choices(["bf16", "fp16", "tf32", "fp32", "fp8", "int8"], [62, 10, 10, 6, 7, 5])[0]


def _legal(op: Gemm) -> Gemm:
    """The nearest product PyTorch can run: fp8 and int8 have their own limits."""

    def up(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    if op.dtype == "fp8":
        return replace(op, n=up(op.n, 16), k=up(op.k, 16), layout="TN", batch=1, bias=False)
    if op.dtype == "int8":
        return replace(op, m=max(op.m, 17), n=up(op.n, 8), k=up(op.k, 8), batch=1, bias=False)
    return op


def _extent(rng: Random, low: int, high: int) -> int:
    """A size, uniform in its logarithm, that is a multiple of 128, 64, 16, 8, 4, 2 or nothing."""
    size = 2 ** rng.uniform(log2(low), log2(high))
    unit = rng.choices([128, 64, 16, 8, 4, 2, 1], [18, 22, 8, 14, 8, 10, 20])[0]
    return max(unit, round(size / unit) * unit)


def grid_gemm(rng: Random) -> Entry:
    """A product of random sizes, alignments, layout and type."""
    dtype = _dtype(rng)
    layout = rng.choices(["TN", "NN", "NT", "TT"], [40, 29, 29, 2])[0]
    form = rng.choices(["square", "skinny", "deep", "batched", "view"], [50, 18, 12, 15, 5])[0]
    batch, ld_a = 1, 0
    if form == "skinny":
        m, n, k = _extent(rng, 1, 256), _extent(rng, 64, 65536), _extent(rng, 32, 16384)
        if rng.random() < 0.4:
            m, n = n, m
    elif form == "deep":
        m, n, k = _extent(rng, 8, 2048), _extent(rng, 8, 2048), _extent(rng, 1024, 262144)
    elif form == "batched":
        m, n, k = _extent(rng, 1, 4096), _extent(rng, 8, 4096), _extent(rng, 8, 1024)
        batch = round(2 ** rng.uniform(1, 9))
        if rng.random() < 0.5:  # attention written out by hand
            m, k = (
                rng.choice([49, 64, 77, 128, 196, 197, 256, 384, 512, 1024, 2048]),
                rng.choice([32, 64, 80, 96, 128]),
            )
            n = m
            if rng.random() < 0.5:
                n, k = k, n
    else:
        m, n, k = _extent(rng, 1, 65536), _extent(rng, 1, 32768), _extent(rng, 8, 32768)
    op = Gemm(m, n, k, dtype, layout, batch)
    if form == "view":  # a slice of a wider matrix, as the parts of a fused projection are
        ld_a = op.operands[0].leading_dimension * rng.choice([2, 3])
        op = replace(op, ld_a=ld_a + rng.choice([0, 0, 8, 1]))
    elif batch == 1 and layout == "TN" and rng.random() < 0.2:
        op = replace(op, bias=dtype not in ("fp8", "int8"))
    return Entry(_legal(op), f"grid-{form}")


def sweep_gemms(rng: Random, points: int = 8) -> list[Entry]:
    """A base product with one dimension moved by small steps: edges of tiles, waves and alignment."""
    base = grid_gemm(rng).op
    assert isinstance(base, Gemm)
    base = replace(base, ld_a=0)
    name = rng.choice(["m", "n", "k"])
    step = rng.choice([1, 1, 2, 4, elements_per_access(base.dtype), 16, 32, 64, 128])
    start = max(1, getattr(base, name) - step * rng.randrange(points))
    return [Entry(_legal(replace(base, **{name: start + i * step})), "grid-sweep") for i in range(points)]


def gemms(seed: int) -> Iterator[Entry]:
    """Endless distinct products: real layers, a random grid, and sweeps over one dimension."""
    rng, seen = Random(seed), set()
    while True:
        draw = rng.random()
        if draw < 0.45:
            entries = [model_gemm(rng)]
        elif draw < 0.97:
            entries = [grid_gemm(rng)]
        else:
            entries = sweep_gemms(rng)
        for entry in entries:
            if entry.op not in seen:
                seen.add(entry.op)
                yield entry


# --- convolutions ----------------------------------------------------------------------------------


def convolutions() -> dict[str, list[Conv]]:
    """The forward convolutions of real models, for one sample, by model."""
    return {
        model: [_convolution(shape, int(model[-2]) if "@" in model else 2) for shape in shapes]
        for model, shapes in _shapes("convolutions").items()
    }


def _convolution(shape: str, dimensions: int) -> Conv:
    cin, cout, size, kernel, stride, padding, dilation, groups = [*shape.split(","), "1", "1"][:8]
    spatial = [_numbers(text, "x") for text in (size, kernel, stride, padding, dilation)]
    wide = [each if len(each) > 1 else each * dimensions for each in spatial]
    return Conv(1, int(cin), int(cout), wide[0], wide[1], wide[2], wide[3], wide[4], int(groups))


def _conv_variant(rng: Random, op: Conv, source: str) -> list[Entry]:
    """The three passes at a random batch, type and memory layout."""
    dtype = rng.choices(["bf16", "fp16", "tf32", "fp32"], [62, 14, 18, 6])[0]
    batch = rng.choice([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256])
    channels_last = len(op.input_size) > 1 and rng.random() < 0.65
    op = replace(op, batch=batch, dtype=dtype, channels_last=channels_last)
    # Nobody needs the gradient of an image.
    directions = DIRECTIONS if op.in_channels > 4 else (FORWARD, BACKWARD_WEIGHT)
    return [Entry(replace(op, direction=direction), source) for direction in directions]


def grid_conv(rng: Random) -> Conv:
    """A convolution of random channels, size, kernel and stride."""
    size = rng.choice([7, 8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 224])
    most = max(16, min(2048, 32768 // size))
    cin, cout = _extent(rng, 1, most), _extent(rng, 4, most)
    kernel = rng.choices([1, 3, 5, 7], [38, 44, 10, 8])[0]
    stride = rng.choices([1, 2], [75, 25])[0]
    dilation = 2 if kernel == 3 and rng.random() < 0.06 else 1
    groups = 1
    kind = rng.random()
    if kind < 0.12:  # depthwise
        cout = groups = cin
    elif kind < 0.22:  # grouped
        groups = rng.choice([2, 4, 8, 16, 32])
        cin, cout = -(-cin // groups) * groups, -(-cout // groups) * groups
    padding = dilation * (kernel // 2) if rng.random() < 0.9 else 0
    return Conv2d(1, cin, cout, size, kernel, stride, padding, dilation, groups)


def convs(seed: int) -> Iterator[Entry]:
    """Endless distinct convolutions: real layers and a random grid, each in its passes."""
    rng, seen, models = Random(seed), set(), convolutions()
    while True:
        if rng.random() < 0.55:
            model = rng.choice(list(models))
            entries = _conv_variant(rng, rng.choice(models[model]), model)
        else:
            try:
                entries = _conv_variant(rng, grid_conv(rng), "grid-conv")
            except UsageError:  # the kernel does not fit the image
                continue
        if entries[0].op not in seen:
            seen.add(entries[0].op)
            yield from entries


# --- attention -------------------------------------------------------------------------------------


def attentions(seed: int) -> Iterator[Entry]:
    """Endless distinct attentions: real heads and random ones, forward and backward."""
    rng, seen = Random(seed), set()
    while True:
        dtype = rng.choices(["bf16", "fp16", "fp32"], [75, 20, 5])[0]
        batch = rng.choice([1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])
        if rng.random() < 0.5:
            source = rng.choice(list(_shapes("attentions")))
            *sizes, kind, lengths = _shapes("attentions")[source]
            heads, kv_heads, width = map(int, sizes)
            length = kv_len = rng.choice(_numbers(lengths, ","))
            causal = kind == "causal"
        else:
            source = "grid-attention"
            width = rng.choice(
                [16, 32, 40, 48, 64, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256, 33, 100]
            )
            heads = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 20, 25, 32, 40, 64])
            kv_heads = rng.choice([d for d in (1, 2, 4, 8, heads, heads, heads) if heads % d == 0])
            length = kv_len = _extent(rng, 16, 16384)
            causal = rng.random() < 0.5
            if rng.random() < 0.2:  # cross-attention, or a query against a cache
                kv_len, causal = _extent(rng, 16, 16384), False
                length = rng.choice([1, length])
        mask = rng.choice([1, batch]) * length * kv_len * 2 if not causal and rng.random() < 0.12 else 0
        op = Attention(
            batch,
            heads,
            length,
            width,
            kv_len=kv_len,
            num_kv_heads=kv_heads,
            is_causal=causal,
            mask_bytes=mask if dtype != "fp32" else 0,
            dropout_p=0.1 if rng.random() < 0.1 else 0.0,
            dtype=dtype,
        )
        if op not in seen:
            seen.add(op)
            yield Entry(op, source)
            if length > 1:
                yield Entry(replace(op, direction=BACKWARD_DATA), source)


# --- operations that stream memory -----------------------------------------------------------------


def streamings(seed: int) -> Iterator[tuple[str, int, int, str]]:
    """Endless distinct (microbenchmark, rows, inner, type), 4 KiB to 2 GiB."""
    rng, seen = Random(seed), set()
    weights = [
        1 if RECIPES[name].role in ("sort", "indexing", "optimizer", "loss") else 2 for name in RECIPES
    ]
    while True:
        name = rng.choices(list(RECIPES), weights)[0]
        recipe = RECIPES[name]
        elements = 2 ** rng.uniform(11, 25 if recipe.role == "sort" else 29)
        if recipe.role == "optimizer":  # a list of parameters
            rows = rng.choice([1, 2, 5, 10, 50, 148, 300])
            inner = max(8, round(elements / rows))
            case = (name, rows, inner, rng.choices(["fp32", "bf16"], [85, 15])[0])
        else:
            vocabulary = recipe.role in ("softmax", "loss")
            widths = (
                [30522, 32000, 32001, 50257, 50304, 128256, 1000] if vocabulary else [64, 96, 128, 192, 256]
            )
            inner = rng.choice(
                [*widths, 320, 384, 512, 640, 768, 1024, 1280, 1600, 2048, 2560, 3072, 4096, 5120]
            )
            if rng.random() < 0.3:
                inner = _extent(rng, 8, 32768)
            rows = max(1, round(elements / inner))
            if rng.random() < 0.7:
                rows = -(-rows // 64) * 64
            case = (name, rows, inner, rng.choices(["bf16", "fp16", "fp32"], [50, 12, 38])[0])
        if case not in seen:
            seen.add(case)
            yield case
