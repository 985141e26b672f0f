"""DeepBench's and svail's questions about matrix products, asked of this GPU.

    PYTHONPATH=src python benchmarks/deepbench_questions.py --out results/deepbench_h200.json

- ``shapes``: DeepBench's 160 products in all layouts, and what else could run them: cuBLASLt, reductions in
  fp32, a padded copy, Triton with a few tile sizes. The regret of the default follows from it.
- ``curve``: time against the mini-batch, 1 to 512, for two square weights.
- ``multiples``: mini-batches and layer widths that are multiples of 25 against the next multiple of 32.
- ``combined``: several products of the same input, or of many time steps, against one.
- ``transposition``, ``padding``: what an explicit copy costs and saves.
- ``tf32``: the 160 products in TF32; ``kernels``: which kernel the default chose.

Sizes are DeepBench's, column-major: weight m x k, mini-batch n. In row-major PyTorch C is n x m, so that NN
is ``x[n, k] @ w[k, m]``, TN ``F.linear`` with ``w[m, k]``, and NT has the mini-batch contiguous in x and m
in w.

Random normal data. Each candidate is replayed as a CUDA graph of back-to-back calls of about 1 ms on the same
operands (**warm L2**, as far as they fit in it), the candidates of a row in turn: median, 20th and 80th
percentile of 9 replays in microseconds, launch gaps inside the graph included. The result of every bf16
product of ``shapes`` and ``curve`` is compared with one in fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from collect_h200 import provenance
from kernels import ClockLog, HostSession, main_kernel

from tilefit.measure import timer
from tilefit.measure.kernels import short_name
from tilefit.measure.pool import TORCH_DTYPES
from tilefit.measure.sessions import CudaSession, Session
from tilefit.measure.suites import deepbench_gemm
from tilefit.ops import Gemm

if importlib.util.find_spec("triton"):
    from triton.errors import TritonError

    from tilefit.measure import triton_matmul
else:

    class TritonError(Exception):
        """Never raised: there is no Triton here."""


REPLAY_S = 1e-3
REPLAYS = 9
MOST_CALLS = 200
LAYOUTS = ("NN", "TN", "NT")
#: Relative Frobenius distance from the fp32 product; rounding the result to bf16 alone costs 2e-3.
TOLERANCE = 1e-2
DEFAULT = "cublas"

CURVE_WIDTHS = (2560, 4096)
CURVE = sorted({*range(1, 33), *range(40, 513, 8), *range(25, 501, 25)})
#: (multiple of 25, multiple of 32): mini-batches, then widths of the layer.
MULTIPLES_BATCH = tuple((n, -(-n // 32) * 32) for n in range(25, 501, 25))
MULTIPLES_WIDTH = tuple((25 * i, -(-25 * i // 32) * 32) for i in (21, 41, 50, 61, 81, 100, 102, 121, 164))
#: What, number of products, outputs of each, inputs, rows.
COMBINED = (
    *(("Q, K, V", 3, h, h, n) for h in (768, 1024, 2048, 4096) for n in (1, 16, 128, 512, 2048, 8192)),
    *(("LSTM gates", 4, h, h, n) for h in (512, 1024, 2048) for n in (16, 32, 64, 128)),
    *(("gate and up", 2, 11008, 4096, n) for n in (1, 16, 128, 2048)),
)
#: Time steps, mini-batch, width: the products of all time steps with one weight.
TIME_STEPS = tuple(
    (steps, n, h) for h in (1760, 2560) for steps, n in ((10, 16), (50, 16), (50, 32), (50, 64))
)
#: m, k that are misaligned, rows.
PADDING = tuple(
    (m, k, n) for m, k in ((4095, 4096), (4096, 4095), (1024, 1025), (50257, 768)) for n in (16, 256, 4096)
)


@dataclass(frozen=True)
class ChangeSet:
    """One way to do something.

    Attributes:
        call: Does it once.
        result: What it wrote, to be compared with the reference; None where there is nothing to compare.
        library: For ``torch.backends.cuda.preferred_blas_library``.
        reduced: For ``allow_bf16_reduced_precision_reduction``.
    """

    call: Callable[[], object]
    result: torch.Tensor | None = None
    library: str = "cublas"
    reduced: bool = True


class Bench:
    """Races candidates on a device and keeps the rows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.timer: timer.Device = timer.CudaDevice() if self.cuda else timer.HostDevice()
        self.generator = torch.Generator(device).manual_seed(0)

    def randn(self, *shape: int, dtype: str = "bf16") -> torch.Tensor:
        """Normal random data."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=TORCH_DTYPES[dtype])

    def blank(self, *shape: int, dtype: str = "bf16") -> torch.Tensor:
        """Zeros, to be written to."""
        return torch.zeros(shape, device=self.device, dtype=TORCH_DTYPES[dtype])

    def configure(self, candidate: ChangeSet) -> None:
        """Choose the library and how it may reduce."""
        if self.cuda:
            torch.backends.cuda.preferred_blas_library(candidate.library)
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = candidate.reduced

    def race(
        self, candidates: dict[str, ChangeSet], reference: torch.Tensor | None = None
    ) -> dict[str, dict[str, Any]]:
        """Time of each candidate in microseconds, or why it could not run."""
        found: dict[str, dict[str, Any]] = {}
        replays: dict[str, tuple[timer.Replay, int]] = {}
        for name, candidate in candidates.items():
            self.configure(candidate)
            try:
                found[name] = self._check(candidate, reference)
                if "error" not in found[name]:
                    replays[name] = self._prepare(candidate.call)
            except (RuntimeError, TritonError) as failure:
                found[name] = {"error": f"{type(failure).__name__}: {failure}"[:160]}
        samples: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(REPLAYS):
            for name, (run, calls) in replays.items():
                samples[name].append(run() / calls * 1e6)
        for name, times in samples.items():
            cuts = statistics.quantiles(times, n=5, method="inclusive")
            found[name]["us"] = [
                float(f"{value:.4g}") for value in (statistics.median(times), cuts[0], cuts[-1])
            ]
        return found

    def _check(self, candidate: ChangeSet, reference: torch.Tensor | None) -> dict[str, Any]:
        candidate.call()
        if candidate.result is None or reference is None:
            return {}
        error = float((candidate.result.float() - reference).norm() / reference.norm())
        if error < TOLERANCE:
            return {}
        return {"error": f"wrong result: relative distance {error:.2g}"}

    def _prepare(self, call: Callable[[], object]) -> tuple[timer.Replay, int]:
        single = self.timer.prepare([lambda: call])
        single()
        calls = max(1, min(MOST_CALLS, round(REPLAY_S / single())))
        run = self.timer.prepare([lambda: call] * calls)
        run()
        return run, calls


# --- operands --------------------------------------------------------------------------------------


def stored(matrix: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """The same matrix, as a view of a row-major copy of its transpose where asked for."""
    return matrix.t().contiguous().t() if transposed else matrix


def product(
    bench: Bench, a: torch.Tensor, b: torch.Tensor, library: str = "cublas", reduced: bool = True
) -> ChangeSet:
    """``torch.mm`` into memory of its own."""
    out = torch.zeros(a.shape[0], b.shape[1], device=bench.device, dtype=a.dtype)
    return ChangeSet(lambda: torch.mm(a, b, out=out), out, library, reduced)


def padded(bench: Bench, op: Gemm, a: torch.Tensor, b: torch.Tensor) -> ChangeSet | None:
    """The product with every misaligned leading dimension rounded up to 8; None where there is none.

    Activations are copied into a wider buffer in each call. A weight (not in NT) is stored padded beforehand.
    The padding stays zero, the result is a view of a wider one.
    """
    sizes = {"m": op.m, "n": op.n, "k": op.k}
    wide = sizes | {
        operand.contiguous: -(-operand.leading_dimension // 8) * 8
        for operand in op.operands
        if operand.leading_dimension % 8
    }
    if wide == sizes:
        return None
    wide_a = stored(bench.blank(wide["m"], wide["k"]), transposed=op.layout[1] == "T")
    wide_b = stored(bench.blank(wide["k"], wide["n"]), transposed=op.layout[0] == "T")
    out = bench.blank(wide["m"], wide["n"])
    inner_a, inner_b = wide_a[: op.m, : op.k], wide_b[: op.k, : op.n]
    inner_b.copy_(b)
    copy_a, copy_b = wide_a.shape != a.shape, wide_b.shape != b.shape and op.layout == "NT"
    if not copy_a:
        wide_a = a

    def call() -> None:
        if copy_a:
            inner_a.copy_(a)
        if copy_b:
            inner_b.copy_(b)
        torch.mm(wide_a, wide_b, out=out)

    return ChangeSet(call, out[: op.m, : op.n])


# --- the questions ---------------------------------------------------------------------------------


def shapes(bench: Bench, ops: Sequence[Gemm]) -> Iterable[dict[str, Any]]:
    """A row for each distinct size; ``asked``: the layouts in DeepBench's list."""
    sizes = dict.fromkeys((op.m, op.n, op.k) for op in ops)
    for rows, columns, k in sizes:
        asked = [op.layout for op in ops if (op.m, op.n, op.k) == (rows, columns, k)]
        a, b = bench.randn(rows, k), bench.randn(k, columns)
        reference = a.float() @ b.float()
        candidates = {}
        for layout in LAYOUTS:
            left = stored(a, transposed=layout[1] == "T")
            right = stored(b, transposed=layout[0] == "T")
            candidates[f"{layout} {DEFAULT}"] = product(bench, left, right)
            candidates[f"{layout} cublaslt"] = product(bench, left, right, "cublaslt")
            if layout not in asked:
                continue
            candidates[f"{layout} fp32 reduction"] = product(bench, left, right, reduced=False)
            wider = padded(bench, Gemm(rows, columns, k, layout=layout), left, right)
            if wider:
                candidates[f"{layout} padded"] = wider
            if bench.cuda:
                for configuration in triton_matmul.configurations(rows):
                    out = bench.blank(rows, columns)
                    candidates[f"{layout} triton {triton_matmul.name(configuration)}"] = ChangeSet(
                        lambda left=left, right=right, out=out, chosen=configuration: triton_matmul.matmul(
                            left, right, out, chosen
                        ),
                        out,
                    )
        found = bench.race(candidates, reference)
        yield {"m": columns, "n": rows, "k": k, "asked": asked, "candidates": found}


def tf32(bench: Bench, ops: Sequence[Gemm]) -> Iterable[dict[str, Any]]:
    """The default in all layouts, in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for rows, columns, k in dict.fromkeys((op.m, op.n, op.k) for op in ops):
        a, b = bench.randn(rows, k, dtype="tf32"), bench.randn(k, columns, dtype="tf32")
        candidates = {
            layout: product(
                bench, stored(a, transposed=layout[1] == "T"), stored(b, transposed=layout[0] == "T")
            )
            for layout in LAYOUTS
        }
        yield {"m": columns, "n": rows, "k": k, "candidates": bench.race(candidates)}
    torch.backends.cuda.matmul.allow_tf32 = False


def curve(bench: Bench, width: int, batches: Iterable[int]) -> Iterable[dict[str, Any]]:
    """The three layouts at each mini-batch, in random order."""
    weight = bench.randn(width, width)
    weights = {layout: stored(weight, transposed=layout[0] == "T") for layout in LAYOUTS}
    order = list(batches)
    random.Random(0).shuffle(order)
    for n in order:
        x = bench.randn(n, width)
        candidates = {
            layout: product(bench, stored(x, transposed=layout[1] == "T"), weights[layout])
            for layout in LAYOUTS
        }
        found = bench.race(candidates, x.float() @ weight.float())
        yield {"width": width, "n": n, "candidates": found}


def multiples(bench: Bench, pairs: Sequence[tuple[int, int]], *, of: str) -> Iterable[dict[str, Any]]:
    """A multiple of 25 and the next multiple of 32, for the mini-batch or for both widths of the layer."""
    for pair in pairs:
        candidates = {}
        for size in pair:
            n, width = (size, 2560) if of == "batch" else (128, size)
            x, weight = bench.randn(n, width), bench.randn(width, width)
            for layout in LAYOUTS:
                candidates[f"{layout} {size}"] = product(
                    bench, stored(x, transposed=layout[1] == "T"), stored(weight, transposed=layout[0] == "T")
                )
        yield {"of": of, "pair": list(pair), "candidates": bench.race(candidates)}


def combined(bench: Bench, cases: Iterable[tuple[str, int, int, int, int]]) -> Iterable[dict[str, Any]]:
    """Several ``F.linear`` of the same input against one with the weights stacked."""
    for what, parts, m, k, n in cases:
        x, weight = bench.randn(n, k), bench.randn(parts * m, k)
        pieces = [product(bench, x, piece.t()) for piece in weight.split(m)]

        def separate(pieces: list[ChangeSet] = pieces) -> None:
            for piece in pieces:
                piece.call()

        candidates = {"separate": ChangeSet(separate), "combined": product(bench, x, weight.t())}
        yield {"what": what, "parts": parts, "m": m, "k": k, "n": n, "candidates": bench.race(candidates)}


def time_steps(bench: Bench, cases: Iterable[tuple[int, int, int]]) -> Iterable[dict[str, Any]]:
    """A product for each time step against one for all of them; the weight is the same."""
    for steps, n, width in cases:
        x, weight = bench.randn(steps * n, width), bench.randn(width, width)
        pieces = [product(bench, piece, weight.t()) for piece in x.split(n)]

        def separate(pieces: list[ChangeSet] = pieces) -> None:
            for piece in pieces:
                piece.call()

        candidates = {"separate": ChangeSet(separate), "combined": product(bench, x, weight.t())}
        row = {"what": "time steps", "parts": steps, "m": width, "k": width, "n": n}
        yield row | {"candidates": bench.race(candidates)}


def transposition(bench: Bench, ops: Sequence[Gemm]) -> Iterable[dict[str, Any]]:
    """What an explicit transposition of each of DeepBench's weights takes."""
    for m, k in dict.fromkeys((op.n, op.k) for op in ops if op.layout in ("NN", "TN")):
        weight, out = bench.randn(m, k), bench.blank(k, m)
        call = ChangeSet(lambda weight=weight, out=out: out.copy_(weight.t()))
        yield {"m": m, "k": k, "candidates": bench.race({"transpose": call})}


def padding(bench: Bench, cases: Iterable[tuple[int, int, int]]) -> Iterable[dict[str, Any]]:
    """``F.linear`` with a misaligned width, its padded version, and the copies that pad."""
    for m, k, n in cases:
        wide_m, wide_k = -(-m // 8) * 8, -(-k // 8) * 8
        x, weight = bench.randn(n, k), bench.randn(m, k)
        wide_x, wide_weight = bench.blank(n, wide_k), bench.blank(wide_m, wide_k)
        wide_x[:, :k] = x
        wide_weight[:m, :k] = weight
        candidates = {
            "as it is": product(bench, x, weight.t()),
            "padded": product(bench, wide_x, wide_weight.t()),
            "copy weight": ChangeSet(lambda to=wide_weight[:m, :k], source=weight: to.copy_(source)),
        }
        if wide_k != k:
            candidates["copy input"] = ChangeSet(lambda to=wide_x[:, :k], source=x: to.copy_(source))
        yield {"m": m, "k": k, "n": n, "candidates": bench.race(candidates)}


def kernels(bench: Bench, sizes: Iterable[tuple[int, int, int]]) -> Iterable[dict[str, Any]]:
    """The main kernel of the default, by size (m, n, k) and layout. Last: a profiler may disturb others."""
    session: Session = CudaSession() if bench.cuda else HostSession()
    plan = []
    with session:
        for m, n, k in sizes:
            for layout in LAYOUTS:
                a = stored(bench.blank(n, k), transposed=layout[1] == "T")
                b = stored(bench.blank(k, m), transposed=layout[0] == "T")
                plan.append((m, n, k, layout))
                session.call(product(bench, a, b).call)
    for (m, n, k, layout), launches in zip(plan, session.results(), strict=True):
        name = short_name(main_kernel([(launch.name, launch.duration_ns) for launch in launches]))
        yield {"m": m, "n": n, "k": k, "layout": layout, "kernel": name, "candidates": {}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=0, help="rows of each question, the cheapest shapes")
    args = parser.parse_args()
    limit = args.limit or None
    device = torch.device(args.device)
    bench = Bench(device)
    clocks = ClockLog()
    if bench.cuda:
        clocks.start()
    ops = [replace(entry.op, dtype="bf16") for entry in deepbench_gemm()]
    if limit:
        ops = sorted(ops, key=lambda op: op.flop)[:limit]
    sizes = dict.fromkeys((op.n, op.m, op.k) for op in ops)
    sizes |= {(width, n, width): None for width in CURVE_WIDTHS for n in CURVE[:limit]}
    questions: dict[str, Callable[[], Iterable[Iterable[dict[str, Any]]]]] = {
        "shapes": lambda: [shapes(bench, ops)],
        "curve": lambda: [curve(bench, width, CURVE[:limit]) for width in CURVE_WIDTHS],
        "multiples": lambda: [
            multiples(bench, MULTIPLES_BATCH[:limit], of="batch"),
            multiples(bench, MULTIPLES_WIDTH[:limit], of="width"),
        ],
        "combined": lambda: [combined(bench, COMBINED[:limit]), time_steps(bench, TIME_STEPS[:limit])],
        "padding": lambda: [padding(bench, PADDING[:limit])],
        "transposition": lambda: [transposition(bench, ops)],
        "tf32": lambda: [tf32(bench, ops)],
        "kernels": lambda: [kernels(bench, sizes)],
    }
    result: dict[str, Any] = {"provenance": provenance(device)}
    result["provenance"]["triton"] = triton_matmul.triton.__version__ if bench.cuda else None
    for name, ask in questions.items():
        began = time.monotonic()
        result[name] = [row for rows in ask() for row in rows]
        seconds = time.monotonic() - began
        errors = sum("error" in timing for row in result[name] for timing in row["candidates"].values())
        print(f"{name}: {len(result[name])} rows, {errors} candidates failed, {seconds:.0f} s", flush=True)
        result["provenance"] |= _clocks(clocks)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(_dumps(result))


def _clocks(log: ClockLog) -> dict[str, Any]:
    """Least, median and greatest SM clock and power so far, and why the clock was held back."""
    samples = list(log.samples)
    if not samples:
        return {}
    mhz, watts = ([getattr(sample, name) for sample in samples] for name in ("sm_mhz", "power_w"))
    return {
        "sm_mhz": [min(mhz), statistics.median(mhz), max(mhz)],
        "power_w": [round(min(watts)), round(statistics.median(watts)), round(max(watts))],
        "throttle_reasons": sorted({sample.throttle_reasons for sample in samples}),
    }


def _dumps(result: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for name, value in result.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(row) for row in value)
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
