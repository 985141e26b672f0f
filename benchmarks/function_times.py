"""Functions that take far longer than their bytes: the time of each call on a GPU, over a grid of sizes.

Concatenations of contiguous and of sliced tensors, softmaxes over vocabularies, attention in fp32, bags of
embeddings, CTC, additions at few places, and convolutions onto one pixel. Between calls the L2 cache is
overwritten. What is priced is the same call as it is captured.

    PYTHONPATH=src python benchmarks/function_times.py --kernels --out function_times_h200.jsonl
    python benchmarks/function_times.py --measured benchmarks/results/function_times_h200.jsonl.gz
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import kernel_times
import torch
from torch import Tensor

from tilefit.capture import capture
from tilefit.ops import Op
from tilefit.options import StepOptions

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATH = ("fp32", "bf16")
Make = Callable[..., Tensor]
#: Of a function: the names of its sizes, and its values of each.
GRIDS: dict[str, tuple[dict[str, tuple[Any, ...]], int]] = {}
CALLS: dict[str, Callable[..., tuple[Callable[..., object], list[Tensor]]]] = {}


def grid(cases: int, **sizes: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Enter a function with the values of its sizes, of whose product so many cases are drawn."""

    def enter(call: Any) -> Any:
        GRIDS[call.__name__], CALLS[call.__name__] = (sizes, cases), call
        return call

    return enter


def _floats(make: Make, *shape: int, dtype: str) -> Tensor:
    return make(shape, DTYPES[dtype])


def _numbers(device: torch.device, below: int, *shape: int) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.randint(below, shape, device=device, generator=torch.Generator(device).manual_seed(0))


@grid(110, rows=(512, 8192, 65536, 524288), width=(16, 32, 64, 192, 768), parts=(2, 3), sliced=(False, True),
      dtype=MATH)  # fmt: skip
def cat(device: torch.device, rows: int, width: int, parts: int, sliced: bool, dtype: str) -> Any:
    """Along the last dimension: tensors of their own, or slices of a wider one, as rotary positions have."""
    of = [
        torch.zeros(rows, width * (1 + sliced), dtype=DTYPES[dtype], device=device)[:, :width]
        for _ in range(parts)
    ]
    return lambda *tensors: aten.cat(list(tensors), -1), of


@grid(40, batch=(4, 32), channels=(16, 64, 100), pixels=(196, 3136, 12544), sliced=(False, True), dtype=MATH)
def cat_channels(
    device: torch.device, batch: int, channels: int, pixels: int, sliced: bool, dtype: str
) -> Any:
    """Along the channels of NCHW."""
    of = [
        torch.zeros(batch, channels, pixels * (1 + sliced), dtype=DTYPES[dtype], device=device)[..., :pixels]
        for _ in range(2)
    ]
    return lambda *tensors: aten.cat(list(tensors), 1), of


VOCABULARIES = (512, 1000, 4096, 8000, 10000, 16384, 32000, 32768, 50257, 50304, 128256)


@grid(60, rows=(32, 512, 2048, 8192), width=VOCABULARIES, dtype=MATH)
def log_softmax(device: torch.device, rows: int, width: int, dtype: str) -> Any:
    x = torch.zeros(rows, width, dtype=DTYPES[dtype], device=device)
    return lambda x: aten._log_softmax(x, -1, False), [x]


@grid(60, rows=(32, 512, 2048, 8192), width=VOCABULARIES, dtype=MATH)
def log_softmax_backward(device: torch.device, rows: int, width: int, dtype: str) -> Any:
    x = torch.zeros(rows, width, dtype=DTYPES[dtype], device=device)
    return lambda g, y: aten._log_softmax_backward_data(g, y, -1, g.dtype), [x, x.clone()]


@grid(24, rows=(512, 8192), width=VOCABULARIES, dtype=MATH)
def softmax(device: torch.device, rows: int, width: int, dtype: str) -> Any:
    x = torch.zeros(rows, width, dtype=DTYPES[dtype], device=device)
    return lambda x: aten._softmax(x, -1, False), [x]


def _attended(device: torch.device, batch: int, heads: int, length: int, width: int) -> list[Tensor]:
    return [torch.zeros(batch, heads, length, width, device=device) for _ in range(3)]


@grid(40, batch=(1, 8, 32), heads=(4, 12), length=(32, 64, 128, 256, 512, 1024), width=(32, 64, 128),
      causal=(False, True))  # fmt: skip
def attention(device: torch.device, batch: int, heads: int, length: int, width: int, causal: bool) -> Any:
    """In fp32, forward."""

    def call(*qkv: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)

    return call, _attended(device, batch, heads, length, width)


@grid(50, batch=(1, 8, 32), heads=(4, 12), length=(32, 64, 128, 256, 512, 1024), width=(32, 64, 128),
      causal=(False, True))  # fmt: skip
def attention_backward(
    device: torch.device, batch: int, heads: int, length: int, width: int, causal: bool
) -> Any:
    """In fp32, backward."""
    qkv = [x.requires_grad_() for x in _attended(device, batch, heads, length, width)]
    if device.type == "meta":
        return None, qkv  # captured as a training step
    out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)
    grad = torch.zeros_like(out)
    return lambda *each: torch.autograd.grad(out, each, grad, retain_graph=True), qkv


def _bags(device: torch.device, table: int, indices: int, bag: int, width: int) -> list[Tensor]:
    weight = torch.zeros(table, width, device=device)
    starts = torch.arange(0, indices, bag, device="cpu").to(device)
    return [weight, _numbers(device, table, indices), starts]


@grid(30, table=(1000, 100_000, 1_000_000), indices=(2048, 8192, 65536, 262144), bag=(1, 4, 32),
      width=(16, 64, 128))  # fmt: skip
def embedding_bag(device: torch.device, table: int, indices: int, bag: int, width: int) -> Any:
    return lambda *each: aten._embedding_bag(*each), _bags(device, table, indices, bag, width)


@grid(60, table=(1000, 100_000, 1_000_000), indices=(2048, 8192, 65536, 262144), bag=(1, 4, 32),
      width=(16, 64, 128))  # fmt: skip
def embedding_bag_backward(device: torch.device, table: int, indices: int, bag: int, width: int) -> Any:
    weight, at, starts = _bags(device, table, indices, bag, width)
    if device.type == "meta":
        return None, [weight, at, starts]
    out, offset2bag, size, most = aten._embedding_bag(weight, at, starts)
    grad = torch.zeros_like(out)

    def call(*_: Tensor) -> Tensor:
        return aten._embedding_bag_backward(
            grad, at, starts, offset2bag, size, most, table, False, 0, False, None
        )

    return call, []


def _spoken(device: torch.device, steps: int, batch: int, classes: int, length: int) -> Any:
    probabilities = torch.zeros(steps, batch, classes, device=device)
    targets = _numbers(device, classes - 1, batch, length) + 1
    return probabilities, targets, [steps] * batch, [length] * batch


@grid(30, steps=(50, 200, 800), batch=(4, 16, 64), classes=(29, 128, 1000), length=(10, 40, 100))
def ctc_loss(device: torch.device, steps: int, batch: int, classes: int, length: int) -> Any:
    probabilities, targets, lasting, lengths = _spoken(device, steps, batch, classes, length)
    return lambda p, t: aten._ctc_loss(p, t, lasting, lengths, 0, True), [probabilities, targets]


@grid(30, steps=(50, 200, 800), batch=(4, 16, 64), classes=(29, 128, 1000), length=(10, 40, 100))
def ctc_loss_backward(device: torch.device, steps: int, batch: int, classes: int, length: int) -> Any:
    probabilities, targets, lasting, lengths = _spoken(device, steps, batch, classes, length)
    if device.type == "meta":
        return None, [probabilities, targets]
    grad = torch.zeros(batch, device=device)
    loss, alpha = aten._ctc_loss(probabilities, targets, lasting, lengths, 0, True)

    def call(*each: Tensor) -> Tensor:
        return aten._ctc_loss_backward(grad, *each, lasting, lengths, loss, alpha, 0, True)

    return call, [probabilities, targets]


@grid(60, table=(4, 64, 1000, 20_000, 500_000), rows=(2048, 32768, 262144), width=(1, 8, 64, 256),
      dtype=("fp32", "bf16", "fp16"))  # fmt: skip
def scatter_add(device: torch.device, table: int, rows: int, width: int, dtype: str) -> Any:
    """Of rows whole, few places among them."""
    into = torch.zeros(table, width, dtype=DTYPES[dtype], device=device)
    what = torch.zeros(rows, width, dtype=DTYPES[dtype], device=device)
    at = _numbers(device, table, rows)
    return lambda t, i, w: t.scatter_add_(0, i[:, None].expand_as(w), w), [into, at, what]


def _onto_a_pixel(device: torch.device, batch: int, wide: int, narrow: int, side: int, dtype: str) -> Any:
    """A convolution of wide channels and as large a filter as the image onto one pixel of the others."""
    image = torch.zeros(batch, wide, side, side, dtype=DTYPES[dtype], device=device)
    pixel = torch.zeros(batch, narrow, 1, 1, dtype=DTYPES[dtype], device=device)
    weight = torch.zeros(narrow, wide, side, side, dtype=DTYPES[dtype], device=device)
    return image, pixel, weight


_PIXEL = {
    "batch": (16, 64, 256), "wide": (128, 256, 512), "narrow": (1, 64, 100, 128, 256), "side": (3, 4, 7),
    "dtype": MATH,
}  # fmt: skip


@grid(40, **_PIXEL)
def pixel_forward(device: torch.device, **sizes: Any) -> Any:
    image, _, weight = _onto_a_pixel(device, **sizes)
    return lambda x, w: torch.conv2d(x, w), [image, weight]


@grid(40, **_PIXEL)
def pixel_transposed(device: torch.device, **sizes: Any) -> Any:
    _, pixel, weight = _onto_a_pixel(device, **sizes)
    return lambda x, w: torch.conv_transpose2d(x, w), [pixel, weight]


@grid(40, **_PIXEL)
def pixel_weight_gradient(device: torch.device, **sizes: Any) -> Any:
    image, pixel, weight = _onto_a_pixel(device, **sizes)
    kept = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
    return lambda g, x, w: aten.convolution_backward(g, x, w, *kept)[1], [pixel, image, weight]


@grid(70, batch=(64, 1024, 16384), m=(1, 7, 16, 49, 64, 196, 576), n=(6, 64, 192, 768, 1536),
      k=(6, 64, 192, 512, 1024), dtype=("bf16", "fp16", "fp32"))  # fmt: skip
def shared_product(device: torch.device, batch: int, m: int, n: int, k: int, dtype: str) -> Any:
    """Products of one matrix with each of many, as linear layers make of transposed inputs."""
    x = torch.zeros(batch, m, k, dtype=DTYPES[dtype], device=device)
    weight = torch.zeros(n, k, dtype=DTYPES[dtype], device=device)
    return lambda x, w: torch.bmm(x, w.t().expand(batch, k, n)), [x, weight]


@grid(60, batch=(16, 128), channels=(16, 64, 256, 1024), side=(7, 14, 56, 112), last=(False, True),
      dtype=("bf16", "fp16", "fp32"))  # fmt: skip
def applied_norm(device: torch.device, batch: int, channels: int, side: int, dtype: str, last: bool) -> Any:
    """A batch norm in inference."""
    x = torch.zeros(batch, channels, side, side, dtype=DTYPES[dtype], device=device)
    x = x.to(memory_format=torch.channels_last) if last else x
    of = [torch.ones(channels, device=device) for _ in range(4)]
    return lambda x, *of: torch.nn.functional.batch_norm(x, *of), [x, *of]


def cases(largest: int) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """A draw of each function's grid, all shuffled, so that wherever it is cut off there is some of all."""
    drawn = []
    for name, (sizes, count) in GRIDS.items():
        every = [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]
        drawn += [
            {"function": name} | each for each in random.Random(0).sample(every, min(count, len(every)))
        ]
    random.Random(1).shuffle(drawn)
    for case in drawn:
        if _elements(case) <= largest and _reaches(case):
            yield case, partial(_call, case)


def _reaches(case: dict[str, Any]) -> bool:
    """Whether a sequence is long enough for its targets, repetitions apart."""
    return case.get("length", 0) <= case.get("steps", case.get("length", 0)) // 2 or "width" in case


def _elements(case: dict[str, Any]) -> int:
    """Of the largest tensor, the result of a product among them."""
    made = CALLS[case["function"]](torch.device("meta"), **_sizes(case))[1]
    return max(case.get("batch", 1) * case.get("m", 1) * case.get("n", 1), *(each.numel() for each in made))


def _sizes(case: dict[str, Any]) -> dict[str, Any]:
    names = GRIDS[case["function"]][0]
    return {name: case[name] for name in names}


def _call(case: dict[str, Any], device: torch.device) -> Callable[[], object]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    call, tensors = CALLS[case["function"]](device, **_sizes(case))
    return partial(call, *tensors)


class _Called(torch.nn.Module):
    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> object:
        return self.call(*tensors)


def op_of(case: dict[str, Any]) -> Op:
    """The last operation that the captured call records."""
    call, tensors = CALLS[case["function"]](torch.device("meta"), **_sizes(case))
    if call is None:
        return _gradient(case, tensors)
    step = capture(_Called(call), tuple(tensors), options=StepOptions(train=False, tf32=True))
    return step.ops[-1].op


class _Attention(torch.nn.Module):
    def __init__(self, case: dict[str, Any], tensors: list[Tensor]) -> None:
        super().__init__()
        self.qkv, self.causal = torch.nn.ParameterList(tensors), case["causal"]

    def forward(self, x: Tensor) -> Tensor:
        qkv = [x + parameter for parameter in self.qkv]
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=self.causal)


class _Bags(torch.nn.Module):
    def __init__(self, case: dict[str, Any], tensors: list[Tensor]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(tensors[0])

    def forward(self, at: Tensor, starts: Tensor) -> Tensor:
        return torch.nn.functional.embedding_bag(at, self.table, starts)


class _Spoken(torch.nn.Module):
    def __init__(self, case: dict[str, Any], tensors: list[Tensor]) -> None:
        super().__init__()
        self.probabilities = torch.nn.Parameter(tensors[0])
        self.lengths = [case["steps"]] * case["batch"], [case["length"]] * case["batch"]

    def forward(self, targets: Tensor) -> Tensor:
        return torch.nn.functional.ctc_loss(self.probabilities, targets, *self.lengths)


_TRAINED = {
    "attention_backward": (_Attention, "attention_backward"),
    "embedding_bag_backward": (_Bags, "embedding_bag_backward"),
    "ctc_loss_backward": (_Spoken, "ctc_loss_backward"),
}


def _gradient(case: dict[str, Any], tensors: list[Tensor]) -> Op:
    """That of the backward pass of a training step."""
    model, name = _TRAINED[case["function"]]
    inputs = tuple(tensors[1:]) if model is not _Attention else (torch.empty(1, device="meta"),)
    on_cpu = model is _Spoken  # its kernels read the lengths
    if on_cpu:
        tensors = [torch.zeros(each.shape, dtype=each.dtype) for each in tensors]
        inputs = (tensors[1] + 1,)
    options = StepOptions(train=True, tf32=True, on_cpu=on_cpu)
    step = capture(model(case, tensors), inputs, options=options)
    return next(entry.op for entry in step.ops if name in entry.name)


if __name__ == "__main__":
    kernel_times.run(__doc__.splitlines()[0], cases, op_of, lambda case: case["function"])
