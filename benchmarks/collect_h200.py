"""Collect the measurements the shipped calibration of a GPU is fitted to.

Run one part after the other on the GPU, each within a time budget; another seed continues with new shapes:

    PYTHONPATH=src python benchmarks/collect_h200.py --part gemm --seed 1 --budget-s 540 --out results

What is measured: duration of the kernels of one eager call on the GPU, read from CUPTI through
``torch.profiler``; launch gaps and host time are not in it. Operands are cut from rings of random normal
data of several GiB, so a call finds nothing of its operands in L2 (``us``); where they fit in L2, the last
call is repeated on the same operands (``warm_us``). Median, least and greatest of the calls are written; the
first call of each shape is dropped. ``us`` adds the kernels of a call up. The SM clock is sampled through
NVML meanwhile.

Where kernels overlap (recurrent layers use several streams), ``us`` is the time during which at least one
ran. Recurrent layers are also timed from outside (``elapsed_us``): what an eager call takes, the host's
launches of thousands of kernels included, when nothing else is queued.

Parts that are no list of operations: ``launch`` (what a call costs the host), ``ceilings`` (copy bandwidth,
the best matrix rates in bursts and sustained, the shortest kernel and the gap between kernels) and ``method``
(the same operations by the profiler and by graph replays, cold and warm: how far the two ways of timing
agree).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import model_calls
import torch
import torch.nn.functional as F
from kernels import ClockLog, HostSession, main_kernel

from tilefit.errors import TilefitError
from tilefit.measure import streaming, suites, timer
from tilefit.measure.clocks import driver_version
from tilefit.measure.kernels import short_name
from tilefit.measure.microbenchmarks import instance
from tilefit.measure.pool import Pool
from tilefit.measure.sessions import CudaSession, Session, busy_s
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    Attention,
    Conv,
    Gemm,
    Op,
    Recurrent,
    Streaming,
)

L2_SHARE = 48 << 20  # operands below this many bytes are also timed warm
WARM_CALLS = 3
BATCH_S = 1.5  # predicted GPU time of one profiler session
BATCH_SHAPES = 400
RESULT_FIELDS = (
    "source", "us", "low_us", "high_us", "calls", "warm_us", "elapsed_us", "kernels", "kernel", "all_kernels",
    "sm_mhz", "error",
)  # fmt: skip


# --- the machine -----------------------------------------------------------------------------------


def provenance(device: torch.device) -> dict[str, Any]:
    """What the figures depend on besides the shapes."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
        facts["driver"] = driver_version()
    return facts


# --- measuring -------------------------------------------------------------------------------------


@dataclass
class Case:
    """A shape to measure: the operation (for its columns), where it is from, and how to run it."""

    op: Op
    source: str
    build: Callable[[Pool], Callable[[], object]]
    name: str = ""
    elapsed: bool = False  # also time eager calls from outside, on one set of operands


def guess_s(op: Op) -> float:
    """A rough upper guess of the time, to plan sessions and to leave out what takes too long."""
    rate = {"bf16": 5e14, "fp16": 5e14, "fp8": 8e14, "int8": 8e14, "tf32": 2.5e14, "fp32": 4e13}.get(
        op.dtype, 4e13
    )
    if isinstance(op, Gemm) and op.dtype in ("bf16", "fp16", "tf32"):
        size = 4 if op.dtype == "tf32" else 2
        misaligned = [o.leading_dimension * size % 16 for o in op.operands]
        if any(misaligned):
            odd = any(o.leading_dimension % 2 for o in op.operands)
            rate /= 6 if odd else 2.5
    elif not isinstance(op, Gemm):
        rate /= 4
    steps_s = 0.0
    if isinstance(op, Recurrent):
        steps_s = op.seq_len * op.num_layers * op.directions * 20e-6
    return op.flop / rate + op.moved_bytes / 2e12 + steps_s + 5e-6


def measure(
    cases: Sequence[Case],
    pool: Pool,
    session: Callable[[], Session],
    clocks: ClockLog,
    alone: AbstractContextManager[object],
) -> Iterator[dict[str, Any]]:
    """Measure some cases in one profiler session; a row each."""
    plan: list[tuple[Case, int, int, str]] = []  # case, cold calls, warm calls, error
    with session() as running, alone:
        for case in cases:
            guess = guess_s(case.op)
            cold = 6 if guess < 3e-4 else 4 if guess < 2e-3 else 3
            warm = WARM_CALLS if case.op.moved_bytes < L2_SHARE and not case.elapsed else 0
            done, error = 0, ""
            try:
                call = case.build(pool)
                for index in range(cold):
                    if index and not case.elapsed:
                        call = case.build(pool)
                    done += 1
                    running.call(call)
                for _ in range(warm):
                    done += 1
                    running.call(call)
            except (RuntimeError, TilefitError, ValueError, TypeError) as failure:
                error = " ".join(f"{type(failure).__name__}: {failure}".split())[:160]
            plan.append((case, cold, warm, error) if not error else (case, done, 0, error))
        if pool.device.type == "cuda":
            torch.cuda.synchronize()  # before another process has its turn
    results = running.results()
    position = 0
    for case, cold, warm, error in plan:
        calls = results[position : position + cold + warm]
        position += cold + warm
        row: dict[str, Any] = {**asdict(case.op), "source": case.source, "name": case.name, "error": error}  # type: ignore[call-overload]
        if not error and not all(calls):
            row["error"] = "no kernel ran"
        elif not error:
            # The first call pays for loading code and is dropped; the second may still find a cold
            # instruction cache, which the median ignores.
            times = [1e6 * busy_s(launches) for launches in calls[1:cold]]
            row["us"] = statistics.median(times)
            row["low_us"], row["high_us"], row["calls"] = min(times), max(times), len(times)
            if warm:
                row["warm_us"] = statistics.median(1e6 * busy_s(launches) for launches in calls[cold:])
            launches = calls[cold - 1]
            main = main_kernel([(launch.name, launch.duration_ns) for launch in launches])
            row["kernels"], row["kernel"] = len(launches), short_name(main)[:120]
            if len(launches) > 1:
                row["all_kernels"] = ";".join(short_name(launch.name)[:60] for launch in launches[:12])
            row["sm_mhz"] = clocks.sm_mhz(launches[0].start_ns)
            if case.elapsed:
                row["elapsed_us"] = elapsed_us(case.build(pool), pool.device)
        yield row


def elapsed_us(call: Callable[[], object], device: torch.device, calls: int = 3) -> float:
    """Time of an eager call, launches by the host included: median of a few, each between two events."""
    call()
    times = []
    for _ in range(calls):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def batches(cases: Iterator[Case]) -> Iterator[list[Case]]:
    """Cases grouped so that a session stays short."""
    while True:
        group, total = [], 0.0
        for case in cases:
            group.append(case)
            total += 6 * guess_s(case.op)
            if total > BATCH_S or len(group) == BATCH_SHAPES:
                break
        if not group:
            return
        yield group


class Writer:
    """Rows as gzipped CSV, appended after every session: an interruption loses one session at most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def write(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        new = not self.columns
        if new:
            self.columns = [key for key in rows[0] if key not in RESULT_FIELDS] + list(RESULT_FIELDS)
        with gzip.open(self.path, "wt" if new else "at", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if new:
                writer.writeheader()
            for row in rows:
                writer.writerow({key: _text(value) for key, value in row.items()})


def _text(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return value


# --- the parts -------------------------------------------------------------------------------------


def _case(entry: suites.Entry, name: str = "") -> Case:
    op = entry.op
    return Case(op, entry.source, lambda pool: instance(op, pool), name)


def gemm_cases(seed: int, pool: Pool) -> Iterator[Case]:
    """Products; longer than 3 ms only now and then, never longer than 25 ms."""
    rng = Random(seed)
    for entry in suites.gemms(seed):
        guess = guess_s(entry.op)
        fits = max(entry.op.read_bytes, entry.op.write_bytes) < pool.capacity_bytes
        if fits and (guess < 3e-3 or (guess < 25e-3 and rng.random() < 0.03)):
            yield _case(entry)


def conv_cases(seed: int, pool: Pool) -> Iterator[Case]:
    """Convolutions with both gradients, as cuDNN's heuristics run them."""
    for entry in suites.convs(seed):
        op = entry.op
        if max(op.read_bytes, op.write_bytes) < pool.capacity_bytes and guess_s(op) < 4e-3:
            yield _case(entry)


def tuned_conv_cases(seed: int, pool: Pool) -> Iterator[Case]:
    """The same, each once more with cuDNN's autotuning."""
    for case in conv_cases(seed, pool):
        for tuned in (False, True):

            def build(pool: Pool, op: Op = case.op, tuned: bool = tuned) -> Callable[[], object]:
                torch.backends.cudnn.benchmark = tuned
                return instance(op, pool)

            yield replace(case, build=build, name="tuned" if tuned else "")


def attention_cases(seed: int, pool: Pool) -> Iterator[Case]:
    """Attention forward and backward, by the kernel PyTorch picks; scores over 8 GB are left out, because a
    shape no fused kernel takes would write them out."""
    for entry in suites.attentions(seed):
        op = entry.op
        assert isinstance(op, Attention)
        scores_bytes = 4 * op.batch * op.num_heads * op.seq_len * op.kv_len
        whole = max(op.read_bytes, op.write_bytes, op.mask_bytes) < pool.capacity_bytes
        if whole and scores_bytes < 8 << 30 and guess_s(op) < 12e-3:
            yield _case(entry)


def streaming_cases(seed: int, pool: Pool) -> Iterator[Case]:
    """Operations that stream memory; ``name`` is the microbenchmark and its rows and columns."""
    for name, rows, inner, dtype in suites.streamings(seed):
        op = streaming.operation(name, rows, inner, dtype)
        if max(op.read_bytes, op.write_bytes) < pool.capacity_bytes // 2:
            yield Case(
                op,
                f"stream-{name}",
                partial(streaming.build, name, rows, inner, dtype),
                f"{name}:{rows}x{inner}",
            )


def recurrents(seed: int) -> Iterator[suites.Entry]:
    """Endless distinct recurrent layers in their three passes: PyTorch's conditions for cuDNN's persistent
    kernels (hidden size, batch, type, one layer, one direction) on both sides."""
    rng, seen = Random(seed), set()
    while True:
        hidden = rng.choice(
            [32, 64, 100, 128, 200, 256, 320, 384, 500, 512, 640, 650, 768, 1000, 1024, 1152, 1280]
        )
        hidden = rng.choice([hidden, hidden, hidden, 1500, 1536, 1760, 2048, 2560])
        op = Recurrent(
            rng.choices(["LSTM", "GRU", "RNN_TANH", "RNN_RELU"], [50, 32, 9, 9])[0],
            rng.choice([hidden, hidden, 80, 128, 256, 300, 512, 1024]),
            hidden,
            rng.choice([16, 25, 50, 100, 128, 150, 256, 512]),
            rng.choice([1, 2, 4, 8, 10, 16, 20, 32, 48, 64, 96, 128, 256]),
            num_layers=rng.choice([1, 1, 1, 2, 2, 3, 4]),
            bidirectional=rng.random() < 0.25,
            dtype=rng.choices(["fp16", "bf16", "tf32", "fp32"], [40, 35, 15, 10])[0],
        )
        if op not in seen:
            seen.add(op)
            for direction in (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT):
                yield suites.Entry(replace(op, direction=direction), "grid-recurrent")


def recurrent_cases(seed: int, pool: Pool) -> Iterator[Case]:
    for entry in recurrents(seed):
        if guess_s(entry.op) < 40e-3:
            yield replace(_case(entry), elapsed=True)


def call_cases(calls: Path, share: tuple[int, int], seed: int, pool: Pool) -> Iterator[Case]:
    """The memory-bound calls of real models that model_calls.py wrote down; ``name`` is the number of kernels
    a captured step says such a call launches."""
    part, parts = share
    for entry in model_calls.read(calls, seed)[part::parts]:
        if "function" in entry:
            op = Streaming(**entry["op"])
            if max(op.read_bytes, op.write_bytes) < pool.capacity_bytes // 2:
                yield Case(op, entry["source"], partial(model_calls.build, entry), str(op.kernels))


def model_conv_cases(calls: Path, share: tuple[int, int], seed: int, pool: Pool) -> Iterator[Case]:
    """The convolutions of real models that model_calls.py wrote down."""
    part, parts = share
    for entry in model_calls.read(calls, seed)[part::parts]:
        if "function" not in entry:
            op = Conv(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry["op"].items()})
            if max(op.read_bytes, op.write_bytes) < pool.capacity_bytes:
                yield _case(suites.Entry(op, entry["source"]))


PROFILED_PARTS: dict[str, Callable[[int, Pool], Iterator[Case]]] = {
    "gemm": gemm_cases,
    "conv": conv_cases,
    "conv-tuned": tuned_conv_cases,
    "attention": attention_cases,
    "streaming": streaming_cases,
    "recurrent": recurrent_cases,
}


CALL_PARTS: dict[str, Callable[[Path, tuple[int, int], int, Pool], Iterator[Case]]] = {
    "calls": call_cases,
    "conv-calls": model_conv_cases,
}


def run_profiled(
    part: str, args: argparse.Namespace, device: torch.device, clocks: ClockLog
) -> dict[str, Any]:
    pool = Pool(device, args.pool_bytes, args.seed)
    session: Callable[[], Session] = CudaSession if device.type == "cuda" else HostSession
    writer = Writer(args.out / f"{part}-{args.seed}.csv.gz")
    if part in CALL_PARTS:
        cases = CALL_PARTS[part](args.calls, tuple(map(int, args.share.split("/"))), args.seed, pool)
    else:
        cases = PROFILED_PARTS[part](args.seed, pool)
    if args.limit:
        cases = itertools.islice(cases, args.limit)
    rows_done = errors = sessions = lost = 0
    gpu_s = 0.0
    first_errors: dict[str, int] = {}
    began = time.monotonic()
    for group in batches(cases):
        if time.monotonic() - began > args.budget_s:
            break
        try:
            rows = list(measure(group, pool, session, clocks, nullcontext()))
        except TilefitError as error:  # the profiler lost records: this session's shapes are gone
            lost += len(group)
            print(f"session lost: {error}", file=sys.stderr)
            continue
        writer.write(rows)
        sessions += 1
        rows_done += len(rows)
        gpu_s += sum(row.get("us", 0) * 6e-6 for row in rows)
        for row in rows:
            if row["error"]:
                errors += 1
                first_errors[row["error"]] = first_errors.get(row["error"], 0) + 1
        if sessions % 20 == 1:
            used = time.monotonic() - began
            print(f"{used:6.1f} s  {rows_done} rows  {errors} errors  ~{gpu_s:.0f} s on the GPU", flush=True)
    for text, count in sorted(first_errors.items(), key=lambda item: -item[1])[:8]:
        print(f"{count:6d} x {text}")
    return {"rows": rows_done, "errors": errors, "lost": lost, "sessions": sessions, "file": writer.path.name}


# --- what a call costs the host --------------------------------------------------------------------


def launch_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Eager calls on tensors so small that the host is slower than the GPU, by name.

    ``x/no_grad`` runs without recording for the backward pass; ``x/forward`` records; ``x/step`` runs forward
    and backward.
    """
    bf16 = torch.bfloat16

    def tensor(*shape: int, dtype: torch.dtype = bf16, grad: bool = True) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)

    x, w, b = tensor(16, 64), tensor(64, 64), tensor(64)
    x3, wx = tensor(4, 16, 64), tensor(4, 64, 16)
    image, kernel = tensor(2, 8, 8, 8), tensor(8, 8, 3, 3)
    depth = tensor(8, 1, 3, 3)
    q = tensor(2, 4, 16, 64)
    table, ids = tensor(64, 64), torch.randint(64, (16,), device=device)
    stat, scale = torch.zeros(8, device=device), tensor(8, dtype=torch.float32)
    x32, w32 = tensor(16, 64, dtype=torch.float32), tensor(64, 64, dtype=torch.float32)
    linear = torch.nn.Linear(64, 64, device=device, dtype=bf16)
    norm = torch.nn.LayerNorm(64, device=device, dtype=bf16)
    conv = torch.nn.Conv2d(8, 8, 3, padding=1, device=device, dtype=bf16)
    lstm = torch.nn.LSTM(64, 64, device=device, dtype=bf16)
    sequence = tensor(8, 4, 64)

    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: F.linear(x, w),
        "linear_bias": lambda: F.linear(x, w, b),
        "module_linear": lambda: linear(x),
        "matmul_3d": lambda: torch.matmul(x3, w),
        "bmm": lambda: torch.bmm(x3, wx),
        "conv2d": lambda: F.conv2d(image, kernel, padding=1),
        "conv2d_depthwise": lambda: F.conv2d(image, depth, padding=1, groups=8),
        "module_conv2d": lambda: conv(image),
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        "lstm": lambda: lstm(sequence)[0],
        "layer_norm": lambda: F.layer_norm(x, (64,), b, b),
        "module_layer_norm": lambda: norm(x),
        "rms_norm": lambda: F.rms_norm(x, (64,), b),
        "batch_norm": lambda: F.batch_norm(image, stat, stat, scale, scale, training=True),
        "group_norm": lambda: F.group_norm(image, 4),
        "softmax": lambda: F.softmax(x, -1),
        "cross_entropy": lambda: F.cross_entropy(x, ids),
        "embedding": lambda: F.embedding(ids, table),
        "add": lambda: x + x,
        "mul": lambda: x * w[:16],
        "gelu": lambda: F.gelu(x),
        "relu": lambda: F.relu(x),
        "silu": lambda: F.silu(x),
        "dropout": lambda: F.dropout(x, 0.1, True),
        "sum": lambda: x.sum(),
        "mean_last": lambda: x.mean(-1),
        "max_pool2d": lambda: F.max_pool2d(image, 2),
        "cast": lambda: x32.to(bf16),
        "contiguous": lambda: w.t().contiguous(),
        "cat": lambda: torch.cat((x, x)),
        "split": lambda: x.split(32, -1)[0],
        "view": lambda: x.view(4, 4, 64),
        "transpose": lambda: x.transpose(0, 1),
        "index_select": lambda: torch.index_select(table, 0, ids),
        "pow": lambda: x.pow(2),
        "masked_fill": lambda: x.masked_fill(ids[:, None] > 3, 0.0),
    }

    def autocast_linear() -> torch.Tensor:
        with torch.autocast(device.type, dtype=bf16):
            return F.linear(x32, w32)

    forwards["autocast_linear"] = autocast_linear
    calls: dict[str, Callable[[], object]] = {}
    for name, forward in forwards.items():

        def quiet(forward: Callable[[], torch.Tensor] = forward) -> object:
            with torch.no_grad():
                return forward()

        def step(forward: Callable[[], torch.Tensor] = forward) -> object:
            out = forward()
            leaves = [x, w, b, x3, wx, image, kernel, depth, q, table, scale, x32, w32, sequence]
            return torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

        calls |= {f"{name}/no_grad": quiet, f"{name}/forward": forward, f"{name}/step": step}

    def chain() -> object:
        y = x
        for _ in range(50):
            y = y * 1.5
        return torch.autograd.grad(y, x, torch.ones_like(y))

    calls["chain_of_50_mul/step"] = chain
    for count in (1, 10, 100, 300):
        parameters = [tensor(64, 64, dtype=torch.float32) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for label, optimizer in {
            "adamw_fused": torch.optim.AdamW(parameters, lr=1e-4, fused=True),
            "adamw_foreach": torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
            "adamw_loop": torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
            "sgd_foreach": torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True),
        }.items():
            calls[f"{label}/{count}"] = optimizer.step

        def clip(parameters: list[torch.Tensor] = parameters) -> object:
            return torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        calls[f"clip_grad_norm/{count}"] = clip
    if device.type == "cuda":
        calls["empty_kernel"] = lambda: torch.cuda._sleep(1)
        calls["synchronize"] = torch.cuda.synchronize
    return calls


def run_launch(args: argparse.Namespace, device: torch.device, clocks: ClockLog) -> dict[str, Any]:
    """Host microseconds of a call, and how many GPU kernels it launches."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    session: Callable[[], Session] = CudaSession if device.type == "cuda" else HostSession
    rows = []
    calls = launch_calls(device)
    for name, call in itertools.islice(calls.items(), args.limit or None):
        row: dict[str, Any] = {"name": name}
        rows.append(row)
        try:
            for _ in range(5):
                call()
            sync()
            began = time.perf_counter()
            call()
            # Few enough that the queue (1,024 launches) never fills, long enough for the clock.
            repeats = max(3, min(100, round(2e-3 / (time.perf_counter() - began))))
            times = []
            for _ in range(9):
                sync()
                began = time.perf_counter()
                for _ in range(repeats):
                    call()
                times.append((time.perf_counter() - began) / repeats * 1e6)
            row |= {"host_us": statistics.median(times), "low_us": min(times), "high_us": max(times)}
        except RuntimeError as failure:
            row["error"] = str(failure)[:160]
    good = [row for row in rows if "error" not in row]
    profiled = [row for row in good if row["name"] != "empty_kernel"]  # that is a session's own marker
    with session() as running:
        for row in profiled:
            running.call(calls[row["name"]])
    for row, launches in zip(profiled, running.results(), strict=True):
        row["kernels"] = len(launches)
        row["gpu_us"] = 1e6 * busy_s(launches)
    with gzip.open(args.out / f"launch-{args.seed}.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, ["name", "host_us", "low_us", "high_us", "kernels", "gpu_us", "error"])
        writer.writeheader()
        writer.writerows({key: _text(value) for key, value in row.items()} for row in rows)
    for row in rows:
        print(f"{row['name']:28s} {row.get('host_us', float('nan')):8.2f} us  {row.get('kernels')} kernels")
    return {"rows": len(rows), "errors": len(rows) - len(good)}


# --- ceilings --------------------------------------------------------------------------------------


def run_ceilings(args: argparse.Namespace, device: torch.device, clocks: ClockLog) -> dict[str, Any]:
    """The best this GPU does: bytes/s by size, FLOP/s in bursts and sustained, latencies."""
    pool = Pool(device, args.pool_bytes, args.seed)
    gpu: timer.Device = timer.CudaDevice() if device.type == "cuda" else timer.HostDevice()
    small = device.type != "cuda"
    result: dict[str, Any] = {"memory": [], "gemm": [], "latency": {}}
    for power in range(16, 20 if small else 33):
        size = 2**power  # bytes of the (first) operand
        for name, moved in (("clone", 2), ("fill", 1), ("sum_all", 1), ("add", 3)):
            if size * moved > pool.capacity_bytes:
                continue
            rows = size // 2 // 1024
            for cold in (True, False):

                def build(name: str = name, rows: int = rows) -> Callable[[], object]:
                    return streaming.build(name, rows, 1024, "bf16", pool)

                timing = timer.measure(build, gpu, cold=cold)
                rate = moved * size / timing.median_s
                result["memory"].append(
                    [name, size, "cold" if cold else "warm", timing.median_s * 1e6, rate / 1e12]
                )
        print("memory", *result["memory"][-8:], sep="\n  ", flush=True)
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8", "int8"):
        sizes = (1024, 2048, 4096, 8192, 16384) if dtype in ("bf16", "fp8") else (2048, 4096, 8192)
        for size in (64,) if small else sizes:
            op = Gemm(size, size, size, dtype, "TN")

            def product(op: Gemm = op) -> Callable[[], object]:
                return instance(op, pool)

            calls = max(1, min(100, round(4e-3 / guess_s(op))))  # about 4 ms
            run = gpu.prepare([product] * calls)
            time.sleep(0 if small else 0.3)  # let the card cool down: the first replay is a burst
            began, rates = time.monotonic(), []
            while time.monotonic() - began < (0.05 if small else 1.5):
                rates.append(op.flop * calls / run() / 1e12)
            last = gpu.clocks()
            sustained = statistics.median(rates[len(rates) // 2 :])
            reading = [last.sm_mhz, last.power_w, last.throttle_reasons] if last else []
            result["gemm"].append([dtype, size, rates[0], sustained, *reading])
            print(
                "gemm [dtype, n, burst TFLOP/s, sustained TFLOP/s, MHz, W, throttle]",
                result["gemm"][-1],
                flush=True,
            )
    if device.type == "cuda":
        x = torch.randn(1024, device=device)
        with CudaSession() as session:
            for _ in range(20):
                session.call(lambda: x.zero_())
                session.call(lambda: x.mul_(1.0))
        kernels_us = [1e6 * busy_s(launches) for launches in session.results()]
        result["latency"]["fill_kernel_us"] = statistics.median(kernels_us[::2])
        result["latency"]["mul_kernel_us"] = statistics.median(kernels_us[1::2])
        for label, call in (("fill", lambda: x.zero_()), ("mul", lambda: x.mul_(1.0))):
            run = gpu.prepare([lambda call=call: call] * 1000)  # type: ignore[misc]
            result["latency"][f"{label}_in_graph_us"] = statistics.median(run() for _ in range(9)) * 1e3
    print(json.dumps(result["latency"]))
    return {"rows": len(result["memory"]) + len(result["gemm"]), **result}


def run_method(args: argparse.Namespace, device: torch.device, clocks: ClockLog) -> dict[str, Any]:
    """The same operations by the profiler and by graph replays."""
    pool = Pool(device, args.pool_bytes, args.seed)
    gpu: timer.Device = timer.CudaDevice() if device.type == "cuda" else timer.HostDevice()
    session: Callable[[], Session] = CudaSession if device.type == "cuda" else HostSession
    cases: list[Case] = []
    for part in ("gemm", "conv", "attention", "streaming"):
        cases += itertools.islice(PROFILED_PARTS[part](args.seed, pool), args.limit or 150)
    Random(args.seed).shuffle(cases)  # whatever the budget, some of each
    profiled = [
        row for group in batches(iter(cases)) for row in measure(group, pool, session, clocks, nullcontext())
    ]
    rows = []
    began = time.monotonic()
    for case, row in zip(cases, profiled, strict=True):
        if time.monotonic() - began > args.budget_s:
            break
        if not row["error"]:
            out = {"kind": case.op.kind, "name": case.name, "shape": case.op.shape, "us": row["us"]}
            out |= {"warm_us": row.get("warm_us"), "kernels": row["kernels"]}
            for label, cold in (("graph_us", True), ("graph_warm_us", False)):
                try:
                    timing = timer.measure(lambda case=case: case.build(pool), gpu, cold=cold, replays=5)  # type: ignore[misc]
                except (RuntimeError, TilefitError) as failure:
                    out["error"] = str(failure)[:100]
                    break
                out[label] = timing.median_s * 1e6
            rows.append(out)
    columns = ["kind", "name", "shape", "kernels", "us", "graph_us", "warm_us", "graph_warm_us", "error"]
    with gzip.open(args.out / f"method-{args.seed}.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({key: _text(value) for key, value in row.items()} for row in rows)
    good = [row for row in rows if "error" not in row]
    for kind in sorted({row["kind"] for row in good}):
        gaps = [row["graph_us"] - row["us"] for row in good if row["kind"] == kind]
        ratios = [row["graph_us"] / row["us"] for row in good if row["kind"] == kind and row["us"] > 50]
        ratio = statistics.median(ratios) if ratios else float("nan")
        print(f"{kind}: graph - profiler {statistics.median(gaps):.2f} us; ratio above 50 us {ratio:.3f}")
    return {"rows": len(rows), "errors": len(rows) - len(good)}


OTHER_PARTS: dict[str, Callable[[argparse.Namespace, torch.device, ClockLog], dict[str, Any]]] = {
    "launch": run_launch,
    "ceilings": run_ceilings,
    "method": run_method,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", required=True, choices=[*PROFILED_PARTS, *CALL_PARTS, *OTHER_PARTS])
    parser.add_argument("--calls", type=Path, help="what model_calls.py wrote, for the parts of that name")
    parser.add_argument("--share", default="0/1", help="of these calls: 1/4 is the second quarter")
    parser.add_argument("--seed", type=int, default=1, help="another seed measures other shapes")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--limit", type=int, default=0, help="stop after this many shapes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-bytes", type=int, default=0, help="size of a ring of random data")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    args.pool_bytes = args.pool_bytes or (8 << 30 if device.type == "cuda" else 64 << 20)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # sessions follow each other, and graphs run between them
    began = time.monotonic()
    clocks = ClockLog()
    if device.type == "cuda":
        clocks.start()
    if args.part in OTHER_PARTS:
        summary = OTHER_PARTS[args.part](args, device, clocks)
    else:
        summary = run_profiled(args.part, args, device, clocks)
    summary |= {"part": args.part, "seed": args.seed, "seconds": round(time.monotonic() - began, 1)}
    summary |= provenance(device)
    if clocks.samples:
        mhz = [sample.sm_mhz for sample in clocks.samples]
        watts = [sample.power_w for sample in clocks.samples]
        degrees = [sample.temperature_c for sample in clocks.samples]
        summary |= {
            "sm_mhz": [min(mhz), statistics.median(mhz), max(mhz)],
            "power_w": [round(min(watts)), round(statistics.median(watts)), round(max(watts))],
            "temperature_c": [min(degrees), max(degrees)],
            "throttle_reasons": sorted({sample.throttle_reasons for sample in clocks.samples}),
        }
    (args.out / f"{args.part}-{args.seed}.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
