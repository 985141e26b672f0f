"""How many kernels a call launches on a GPU: products, convolutions and recurrent layers of random sizes.

    python benchmarks/launch_counts.py --rows rows.jsonl.gz            # on a GPU
    python benchmarks/launch_counts.py --rows rows.jsonl.gz --compare --gpu h200

The first writes a row for each call with its kernels; the second says how often the package counts as many.
Nothing is fitted to the products and convolutions with an odd number.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from program_ops import _MARK, launched
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from tilefit.cost.launch import launched as counted
from tilefit.cost.priced import resolve
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    Conv2d,
    Gemm,
    Op,
    Recurrent,
    Site,
    StepOp,
    Streaming,
    TensorRef,
)

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Elements of the largest operand, floating-point operations of the longest call, calls seen at once.
ELEMENTS, FLOP, AT_ONCE = 1 << 27, 3e11, 500
#: Sizes of layers, beside powers of two.
_WIDTHS = (
    1, 2, 3, 4, 5, 7, 10, 20, 29, 40, 48, 96, 100, 192, 200, 300, 384, 400, 500, 576, 640, 768, 784, 1000,
    1152, 1200, 1280, 1536, 2304, 3072, 5120, 8000, 10000, 12288, 30522, 33278, 50257, 50304,
)  # fmt: skip
_CHANNELS = (3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1, 10, 20)

Case = dict[str, Any]
Call = Callable[[], object]


# ---- what is called ----------------------------------------------------------------------------


def products(draw: random.Random, count: int) -> Iterator[Case]:
    """The three passes of linear layers, with and without a bias."""
    for number in range(count):
        rows = draw.choice([draw.randint(1, 4096), 2 ** draw.randint(0, 16), 128 * draw.randint(1, 128)])
        inner, outer = (
            draw.choice([draw.choice(_WIDTHS), 2 ** draw.randint(0, 13), 64 * draw.randint(1, 64)])
            for _ in "ab"
        )
        if max(rows * inner, rows * outer, inner * outer) > ELEMENTS or rows * inner * outer * 2 > FLOP:
            continue
        for dtype in DTYPES:
            for kind in ("addmm", "forward", "input", "weight"):
                yield {"op": "product", "number": number, "kind": kind, "dtype": dtype,
                       "sizes": [rows, inner, outer]}  # fmt: skip


def convolutions(draw: random.Random, count: int) -> Iterator[Case]:
    """The three passes of convolutions in two dimensions."""
    for number in range(count):
        batch = draw.choice([1, 2, 8, 16, 32, 64, 100, 128])
        ins, outs = (
            draw.choice([3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1, 10, 20]) for _ in "ab"
        )
        kernel = draw.choice([1, 1, 3, 3, 3, 4, 5, 7])
        stride = draw.choice([1, 1, 2])
        size = max(draw.choice([1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 224]), kernel)
        groups = ins if draw.random() < 0.1 and outs % ins == 0 else 1
        padding = draw.choice([0, kernel // 2])
        out = (size + 2 * padding - kernel) // stride + 1
        flop = 2 * batch * ins * outs * kernel**2 * out**2
        if max(batch * ins * size**2, batch * outs * out**2) > ELEMENTS // 2 or flop > FLOP or out < 1:
            continue
        for dtype in DTYPES:
            for nhwc in (False, True):
                for kind in ("forward", "bias", "input", "weight"):
                    yield {"op": "convolution", "number": number, "kind": kind, "dtype": dtype, "nhwc": nhwc,
                           "sizes": [batch, ins, outs, size, kernel, stride, padding, groups]}  # fmt: skip


def recurrent(draw: random.Random, count: int) -> Iterator[Case]:
    """Both passes of recurrent layers."""
    for number in range(count):
        case = {
            "steps": draw.choice([1, 2, 5, 10, 16, 28, 35, 50, 64, 100]),
            "batch": draw.choice([1, 4, 16, 20, 32, 64, 128]),
            "inputs": draw.choice([1, 28, 64, 128, 200, 256, 400, 512, 650, 1024]),
            "hidden": draw.choice([32, 51, 64, 128, 200, 256, 400, 512, 650, 1024]),
            "layers": draw.choice([1, 1, 2, 3]),
            "bidirectional": draw.random() < 0.3,
            "dropout": draw.choice([0.0, 0.0, 0.2]),
            "packed": draw.random() < 0.25,
        }
        for layer in ("LSTM", "GRU"):
            for dtype in DTYPES:
                for kind in ("forward", "backward"):
                    yield {"op": "recurrent", "number": number, "kind": kind, "layer": layer, "dtype": dtype,
                           **case}  # fmt: skip


class Callers:
    """What makes the call of each case."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        numbers = torch.randn(min(ELEMENTS, 1 << 27 if device.type == "cuda" else 1 << 22), device=device)
        self.numbers = {name: numbers.to(dtype) for name, dtype in DTYPES.items()}
        self._layers: dict[str, Any] = {}

    def tensor(self, dtype: str, *sizes: int) -> torch.Tensor:
        """Some numbers, in a row."""
        return self.numbers[dtype][: prod(sizes)].view(sizes)

    def call(self, case: Case) -> Call:
        """Of one case."""
        made: Call = getattr(self, case["op"])(case)
        return made

    def product(self, case: Case) -> Call:
        rows, inner, outer = case["sizes"]
        x, y, w = (
            self.tensor(case["dtype"], *sizes) for sizes in ((rows, inner), (rows, outer), (outer, inner))
        )
        bias = self.tensor(case["dtype"], outer)
        calls: dict[str, Call] = {
            "addmm": lambda: torch.addmm(bias, x, w.t()),
            "forward": lambda: torch.mm(x, w.t()),
            "input": lambda: torch.mm(y, w),
            "weight": lambda: torch.mm(y.t(), x),
        }
        return calls[case["kind"]]

    def convolution(self, case: Case) -> Call:
        batch, ins, outs, size, kernel, stride, padding, groups = case["sizes"]
        layout = torch.channels_last if case["nhwc"] else torch.contiguous_format
        dtype = case["dtype"]
        x = self.tensor(dtype, batch, ins, size, size).contiguous(memory_format=layout)
        w = self.tensor(dtype, outs, ins // groups, kernel, kernel).contiguous(memory_format=layout)
        out = (size + 2 * padding - kernel) // stride + 1
        y = self.tensor(dtype, batch, outs, out, out).contiguous(memory_format=layout)
        bias = self.tensor(dtype, outs) if case["kind"] == "bias" else None
        places = [stride] * 2, [padding] * 2, [1, 1]
        if case["kind"] in ("forward", "bias"):
            return lambda: functional.conv2d(x, w, bias, *places, groups)
        wanted = [case["kind"] == "input", case["kind"] == "weight", False]
        return lambda: torch.ops.aten.convolution_backward(
            y, x, w, None, *places, False, [0, 0], groups, wanted
        )

    def recurrent(self, case: Case) -> Call:
        dtype, batch, steps = case["dtype"], case["batch"], case["steps"]
        key = json.dumps({k: v for k, v in case.items() if k != "kind"})
        if key not in self._layers:
            self._layers.clear()
            layer = getattr(torch.nn, case["layer"])(
                case["inputs"], case["hidden"], case["layers"], dropout=case["dropout"],
                bidirectional=case["bidirectional"], device=self.device, dtype=DTYPES[dtype],
            )  # fmt: skip
            x: Any = self.tensor(dtype, steps, batch, case["inputs"]).clone().requires_grad_()
            if case["packed"]:
                x = torch.nn.utils.rnn.pack_padded_sequence(x, _lengths(case))
            self._layers[key] = layer, x
        layer, x = self._layers[key]
        if case["kind"] == "forward":
            return lambda: layer(x)
        y = layer(x)[0]
        y = y.data if case["packed"] else y
        grad = self.tensor(dtype, *y.shape)
        data = x.data if case["packed"] else x
        return lambda: torch.autograd.grad(y, [data, *layer.parameters()], grad, retain_graph=True)


def _lengths(case: Case) -> torch.Tensor:
    """Of packed sequences."""
    return torch.linspace(case["steps"], max(1, case["steps"] // 2), case["batch"]).long()


# ---- on a GPU ----------------------------------------------------------------------------------


def observe(cases: list[Case], rows: Path, seconds: float) -> None:
    """Write a row for each case that there is time for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    callers, began, done = Callers(device), time.perf_counter(), 0
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with gzip.open(rows, "at") as file:
        about = {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
                 "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        file.write(json.dumps(about) + "\n")
        for start in range(0, len(cases), AT_ONCE):
            if time.perf_counter() - began > seconds:
                break
            part = cases[start : start + AT_ONCE]
            kept: list[Case] = []
            with profile(activities=activities) as seen:
                for case in part:
                    tf32 = case["dtype"] == "tf32"
                    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
                    try:
                        call = callers.call(case)
                        call()
                        with record_function(f"{_MARK}{len(kept)}"):
                            call()
                    except RuntimeError as error:
                        print(f"{case}: {str(error)[:100]}", flush=True)
                        continue
                    kept.append(case)
                if device.type == "cuda":
                    torch.cuda.synchronize()
            for row in _rows(seen, kept):
                file.write(json.dumps(row) + "\n")
            done += len(kept)
            print(f"{done} of {len(cases)} after {time.perf_counter() - began:.0f} s", flush=True)


def _rows(seen: Any, cases: list[Case]) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = [each for each in spans if each.get("cat") == "kernel"]
    calls = {name: names for name, names, *_ in launched(spans, kernels)}
    for index, case in enumerate(cases):
        yield case | {"kernels": Counter(calls.get(str(index), ()))}


# ---- without one -------------------------------------------------------------------------------


def compare(rows: Path, gpu: str) -> None:
    """How often there are as many kernels as counted, and how far off the sum is, by operation and type."""
    with gzip.open(rows, "rt") as file:
        next(file)
        cases = [json.loads(line) for line in file]
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    priced = resolve(gpu)[0]
    for case in cases:
        if case["kernels"] and (case["op"] == "recurrent" or case["number"] % 2):
            entries = _entries(case)
            real = sum(case["kernels"].values())
            pairs[case["op"], case["dtype"]].append((real, sum(counted(each, priced) for each in entries)))
    for (op, dtype), each in sorted(pairs.items()):
        exact = sum(real == count for real, count in each) / len(each)
        off = sum(count for _, count in each) / sum(real for real, _ in each) - 1
        near = statistics.median(abs(count / real - 1) for real, count in each)
        print(
            f"{op:12s} {dtype}  {len(each):5d} calls  {exact:4.0%} exact  median {near:4.1%}  sum {off:+.1%}"
        )


def _entries(case: Case) -> list[StepOp]:
    """The operations that a capture would have recorded."""
    made: list[Op] = []
    dtype, kind = case["dtype"], case["kind"]
    bias = kind == "bias"
    if case["op"] == "product":
        rows, inner, outer = case["sizes"]
        made.append(
            {
                "addmm": Gemm(rows, outer, inner, dtype, "TN", bias=True),
                "forward": Gemm(rows, outer, inner, dtype, "TN"),
                "input": Gemm(rows, inner, outer, dtype, "NN"),
                "weight": Gemm(outer, inner, rows, dtype, "NT"),
            }[kind]
        )
    elif case["op"] == "convolution":
        batch, ins, outs, size, kernel, stride, padding, groups = case["sizes"]
        direction = {"input": BACKWARD_DATA, "weight": BACKWARD_WEIGHT}.get(kind, FORWARD)
        made.append(
            Conv2d(
                batch, ins, outs, (size,) * 2, (kernel,) * 2, (stride,) * 2, (padding,) * 2, groups=groups,
                dtype=dtype, channels_last=case["nhwc"], direction=direction,
            )
        )  # fmt: skip
    else:
        directions = (FORWARD,) if kind == "forward" else (BACKWARD_DATA, BACKWARD_WEIGHT)
        sizes = (case["inputs"], case["hidden"], case["steps"], case["batch"], case["layers"])
        rows = int(_lengths(case).sum()) if case["packed"] else 0
        made += [
            Recurrent(
                case["layer"], *sizes, bidirectional=case["bidirectional"], packed=case["packed"],
                dtype=dtype, direction=direction, rows=rows,
                dropout=case["dropout"] > 0 and case["layers"] > 1,
            )
            for direction in directions
        ]  # fmt: skip
        # PyTorch fills the first states, which a capture records on their own.
        made += [Streaming("copy", 1, 1, 1, dtype)] * ((kind == "forward") * (1 + (case["layer"] == "LSTM")))
    operands = tuple(TensorRef(at, (2, 2), dtype) for at in range(2 + bias))
    return [StepOp(op, FORWARD, Site("", ""), inputs=operands) for op in made]


def main() -> None:
    """Observe or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases")
    arguments = parser.parse_args()
    if arguments.compare:
        compare(arguments.rows, arguments.gpu)
        return
    draw, share = random.Random(0), arguments.share
    cases = [
        *recurrent(draw, int(40 * share)),
        *products(draw, int(400 * share)),
        *convolutions(draw, int(220 * share)),
    ]
    by: dict[str, int] = defaultdict(int)
    for case in cases:
        by[case["op"]] += 1
    print(dict(by))
    observe(cases, arguments.rows, arguments.seconds)


if __name__ == "__main__":
    main()
