"""Lists of shapes: published benchmarks, real models, and designed random grids."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
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


def _table(name: str) -> list[dict[str, str]]:
    text = resources.files("tilefit.measure").joinpath("deepbench", name).read_text()
    return list(csv.DictReader(text.splitlines()))


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
    passes = {"fwd": FORWARD, "dgrad": BACKWARD_DATA, "wgrad": BACKWARD_WEIGHT}
    entries = []
    for row in _table("conv.csv"):
        number = {key: int(row[key]) for key in list(row)[1:12]}
        times = _published(row)
        for short, direction in passes.items():
            op = Conv2d(
                number["n"],
                number["c"],
                number["k"],
                (number["h"], number["w"]),
                (number["r"], number["s"]),
                (number["stride_h"], number["stride_w"]),
                (number["pad_h"], number["pad_w"]),
                dtype=dtype,
                channels_last=channels_last,
                direction=direction,
            )
            published = {k.removesuffix(f"_{short}"): v for k, v in times.items() if k.endswith(short)}
            entries.append(Entry(op, "deepbench", published))
    return entries


def deepbench_rnn(dtype: str = "fp16") -> list[Entry]:
    """The 53 recurrent layers of DeepBench's training list, forward and backward.

    DeepBench leaves out the product of the inputs; ``torch.nn`` has no such option, so that the times here
    include it.
    """
    modes = {"vanilla": "RNN_RELU", "lstm": "LSTM", "gru": "GRU"}
    passes = {"fwd": FORWARD, "bwd_data": BACKWARD_DATA, "bwd_weights": BACKWARD_WEIGHT}
    entries = []
    for row in _table("rnn.csv"):
        hidden, times = int(row["hidden"]), _published(row)
        for short, direction in passes.items():
            op = Recurrent(
                modes[row["cell"]],
                hidden,
                hidden,
                int(row["timesteps"]),
                int(row["batch"]),
                dtype=dtype,
                direction=direction,
            )
            published = {k.removesuffix(f"_{short}"): v for k, v in times.items() if k.endswith(short)}
            entries.append(Entry(op, "deepbench", published))
    return entries


# --- real models: linear layers --------------------------------------------------------------------

#: Outputs x inputs of the linear layers, from the models' public configuration files, and the number of
#: rows (batch x tokens) of a sample: a sequence, an image's patches or a clip's frames.
LINEARS: dict[str, tuple[str, tuple[int, ...]]] = {
    "gpt2": ("2304x768 768x768 3072x768 768x3072 50257x768 50304x768", (1024,)),
    "gpt2-medium": ("3072x1024 1024x1024 4096x1024 1024x4096 50257x1024", (1024,)),
    "gpt2-large": ("3840x1280 1280x1280 5120x1280 1280x5120 50257x1280", (1024,)),
    "gpt2-xl": ("4800x1600 1600x1600 6400x1600 1600x6400 50257x1600", (1024,)),
    "bert-base": ("768x768 3072x768 768x3072 30522x768 2x768", (128, 512)),
    "bert-large": ("1024x1024 4096x1024 1024x4096 30522x1024", (128, 512)),
    "roberta-base": ("768x768 50265x768 3072x768 3x768", (512,)),
    "distilbert": ("768x768 3072x768 768x3072 28996x768", (128,)),
    "t5-small": ("512x512 2048x512 512x2048 32128x512", (512, 114)),
    "t5-base": ("768x768 3072x768 768x3072 32128x768", (512, 114)),
    "flan-t5-xl": ("2048x2048 5120x2048 2048x5120 32128x2048", (512,)),
    "bart-large": ("1024x1024 4096x1024 1024x4096 50264x1024", (1024,)),
    "whisper-tiny": ("384x384 1536x384 384x1536 51865x384", (1500, 448)),
    "whisper-base": ("512x512 2048x512 512x2048 51865x512", (1500, 448)),
    "whisper-small": ("768x768 3072x768 768x3072 51865x768", (1500, 448)),
    "whisper-large": ("1280x1280 5120x1280 1280x5120 51866x1280", (1500, 448)),
    "llama-7b": ("4096x4096 11008x4096 4096x11008 32000x4096 32001x4096 12288x4096 22016x4096", (2048, 4096)),
    "llama-13b": ("5120x5120 13824x5120 5120x13824 32000x5120", (2048, 4096)),
    "llama-70b": ("8192x8192 1024x8192 28672x8192 8192x28672 128256x8192 10240x8192", (4096, 8192)),
    "llama3-8b": ("4096x4096 1024x4096 14336x4096 4096x14336 128256x4096 6144x4096 28672x4096", (8192,)),
    "llama3.2-1b": ("2048x2048 512x2048 8192x2048 2048x8192 128256x2048", (2048,)),
    "llama3.2-3b": ("3072x3072 1024x3072 8192x3072 3072x8192 128256x3072", (2048,)),
    "llama-5461": ("2048x2048 5461x2048 2048x5461 32001x2048", (2048,)),
    "mistral-7b": ("4096x4096 1024x4096 14336x4096 4096x14336 32000x4096", (4096,)),
    "mixtral": ("4096x4096 14336x4096 4096x14336 8x4096", (4096, 1024)),
    "qwen2.5-0.5b": ("896x896 128x896 4864x896 896x4864 151936x896", (2048,)),
    "qwen2.5-1.5b": ("1536x1536 256x1536 8960x1536 1536x8960 151936x1536", (2048,)),
    "qwen2.5-7b": ("3584x3584 512x3584 18944x3584 3584x18944 152064x3584", (4096,)),
    "qwen2.5-32b": ("5120x5120 1024x5120 27648x5120 5120x27648 152064x5120", (4096,)),
    "gemma-2b": ("2048x2048 256x2048 16384x2048 2048x16384 256000x2048", (2048,)),
    "gemma2-9b": ("4096x3584 2048x3584 3584x4096 14336x3584 3584x14336 256000x3584", (4096,)),
    "phi-2": ("2560x2560 10240x2560 2560x10240 51200x2560", (2048,)),
    "phi-3-mini": ("9216x3072 3072x3072 16384x3072 3072x8192 32064x3072", (4096,)),
    "falcon-7b": ("4672x4544 4544x4544 18176x4544 4544x18176 65024x4544", (2048,)),
    "opt-1.3b": ("2048x2048 8192x2048 2048x8192 50272x2048", (2048,)),
    "pythia-410m": ("3072x1024 1024x1024 4096x1024 1024x4096 50304x1024", (2048,)),
    "bloom-560m": ("3072x1024 1024x1024 4096x1024 250880x1024", (2048,)),
    "smollm-135m": ("576x576 192x576 1536x576 576x1536 49152x576", (2048,)),
    "tinyllama": ("2048x2048 256x2048 5632x2048 2048x5632 32000x2048", (2048,)),
    "deepseek-moe": ("2048x2048 1408x2048 2048x1408 10944x2048 64x2048 102400x2048", (4096, 384)),
    "mamba-130m": ("3072x768 80x1536 1536x48 768x1536 50280x768", (2048,)),
    "rwkv-169m": ("768x768 2688x768 768x2688 50277x768", (1024,)),
    "vit-tiny": ("576x192 192x192 768x192 192x768 1000x192", (197,)),
    "vit-small": ("1152x384 384x384 1536x384 384x1536 1000x384", (197,)),
    "vit-base": ("2304x768 768x768 3072x768 768x3072 1000x768", (197, 50)),
    "vit-large": ("3072x1024 1024x1024 4096x1024 1024x4096", (197, 257)),
    "vit-huge": ("3840x1280 1280x1280 5120x1280 1280x5120", (257,)),
    "siglip-so400m": ("1152x1152 4304x1152 1152x4304", (729, 256)),
    "dinov2-giant": ("4608x1536 1536x1536 8192x1536 1536x4096", (257,)),
    "swin-tiny": (
        "288x96 96x96 384x96 96x384 576x192 768x192 192x768 192x384 1152x384 1536x384 384x1536 384x768 "
        "2304x768 3072x768",
        (3136, 784, 196, 49),
    ),
    "clip-text": ("512x512 2048x512 512x2048", (77,)),
    "wav2vec2": ("768x768 3072x768 768x3072 32x768 768x512", (499,)),
    "dit-xl": ("3456x1152 1152x1152 4608x1152 1152x4608 6912x1152 32x1152", (256, 1024)),
    "sd-unet": (
        "320x320 2560x320 320x1280 320x768 640x640 5120x640 640x2560 640x768 1280x1280 10240x1280 1280x5120",
        (4096, 1024, 256, 77),
    ),
    "sd3": ("1536x1536 4608x1536 6144x1536 1536x6144 9216x1536", (1024, 333)),
    "resnet50-head": ("1000x2048 1000x512 4096x25088 4096x4096 1000x4096 1000x1280", (1,)),
    "dlrm": ("512x13 256x512 128x256 64x256 1024x479 1024x1024 512x1024 256x512 1x256", (1,)),
    "wide-and-deep": ("1024x429 512x1024 256x512 1x256 400x1170 400x400", (1,)),
    "mlp-mnist": ("512x784 512x512 10x512 128x784 10x128", (1,)),
    "mlp-mixer": ("384x196 196x384 3072x768 768x3072", (196, 768)),
    "tabular": ("192x96 300x200 100x300 50x100", (1,)),
    "lstm-lm": ("2600x650 33278x650 1600x400 10000x200 1500x1500 10000x1500", (35, 1)),
    "conformer": ("256x256 1024x256 256x1024 5000x256 512x512 2048x512 512x2048", (374, 251)),
    "tacotron": ("1024x768 4096x1536 80x512 256x80", (1, 400)),
}

_BATCHES = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    12,
    16,
    20,
    24,
    25,
    32,
    48,
    50,
    64,
    96,
    100,
    128,
    192,
    200,
    256,
    384,
    500,
    512,
    1024,
)


def linears(model: str) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """(outputs, inputs) of a model's linear layers, and its rows per sample."""
    text, rows = LINEARS[model]
    return [(int(n), int(k)) for n, k in (pair.split("x") for pair in text.split())], rows


def linear_passes(rows: int, outputs: int, inputs: int, dtype: str) -> tuple[Gemm, Gemm, Gemm]:
    """Forward, data gradient and weight gradient of ``F.linear``."""
    forward, data, weight = (linear_pass(each, rows, outputs, inputs, dtype) for each in DIRECTIONS)
    return forward, data, weight


def model_gemm(rng: Random, max_rows: int = 65536) -> Entry:
    """A random linear layer of a random model, at a random batch, in one of its three passes."""
    model = rng.choice(list(LINEARS))
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


def _numbers(text: str, dimensions: int) -> tuple[int, ...]:
    values = tuple(map(int, text.split("x")))
    return values * dimensions if len(values) == 1 else values


def convolutions() -> dict[str, list[Conv]]:
    """The forward convolutions of real models, for one sample, by model."""
    text = resources.files("tilefit.measure").joinpath("shapes", "convolutions.txt").read_text()
    models: dict[str, list[Conv]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        model, _, shapes = line.partition(": ")
        dimensions = int(model[-2]) if "@" in model else 2
        models[model] = []
        for shape in shapes.split():
            cin, cout, size, kernel, stride, padding, *rest = shape.split(",")
            dilation, groups = rest or ("1", "1")
            models[model].append(
                Conv(
                    1,
                    int(cin),
                    int(cout),
                    _numbers(size, dimensions),
                    _numbers(kernel, dimensions),
                    _numbers(stride, dimensions),
                    _numbers(padding, dimensions),
                    _numbers(dilation, dimensions),
                    int(groups),
                )
            )
    return models


def _conv_variant(rng: Random, op: Conv, source: str) -> list[Entry]:
    """The three passes at a random batch, type and memory layout."""
    dtype = rng.choices(["bf16", "fp16", "tf32", "fp32"], [62, 14, 18, 6])[0]
    batch = rng.choice([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256])
    channels_last = len(op.input_size) > 1 and rng.random() < 0.65
    op = replace(op, batch=batch, dtype=dtype, channels_last=channels_last)
    directions = [FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT]
    if op.in_channels <= 4:  # nobody needs the gradient of an image
        directions = [FORWARD, BACKWARD_WEIGHT]
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

#: Query heads, key/value heads, head size, sequence lengths, causal.
ATTENTIONS: dict[str, tuple[int, int, int, tuple[int, ...], bool]] = {
    "gpt2": (12, 12, 64, (256, 512, 1024), True),
    "gpt2-xl": (25, 25, 64, (1024,), True),
    "bert-base": (12, 12, 64, (128, 384, 512), False),
    "bert-large": (16, 16, 64, (128, 512), False),
    "whisper-small": (12, 12, 64, (1500, 448), False),
    "llama-7b": (32, 32, 128, (512, 2048, 4096), True),
    "llama3-8b": (32, 8, 128, (2048, 4096, 8192), True),
    "llama-70b": (64, 8, 128, (2048, 4096), True),
    "llama3.2-1b": (32, 8, 64, (1024, 2048, 4096), True),
    "qwen2.5-0.5b": (14, 2, 64, (1024, 2048), True),
    "qwen2.5-7b": (28, 4, 128, (2048, 4096), True),
    "gemma-2b": (8, 1, 256, (1024, 2048), True),
    "phi-2": (32, 32, 80, (1024, 2048), True),
    "phi-3-mini": (32, 32, 96, (2048, 4096), True),
    "falcon-7b": (71, 1, 64, (2048,), True),
    "vit-base": (12, 12, 64, (197, 50, 577), False),
    "vit-large": (16, 16, 64, (197, 257), False),
    "vit-huge": (16, 16, 80, (257,), False),
    "siglip-so400m": (16, 16, 72, (256, 729), False),
    "swin-tiny": (3, 3, 32, (49,), False),
    "dit-xl": (16, 16, 72, (256, 1024), False),
    "stable-diffusion-unet": (8, 8, 40, (4096, 1024, 77), False),
    "t5-base": (12, 12, 64, (512,), False),
    "wav2vec2": (12, 12, 64, (499,), False),
}


def attentions(seed: int) -> Iterator[Entry]:
    """Endless distinct attentions: real heads and random ones, forward and backward."""
    rng, seen = Random(seed), set()
    while True:
        dtype = rng.choices(["bf16", "fp16", "fp32"], [75, 20, 5])[0]
        batch = rng.choice([1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])
        if rng.random() < 0.5:
            source = rng.choice(list(ATTENTIONS))
            heads, kv_heads, width, lengths, causal = ATTENTIONS[source]
            length = kv_len = rng.choice(lengths)
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
