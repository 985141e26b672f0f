"""How much of the GPU's time a profile attributes to modules, and whether its Tensor Core share is right.

Eight models with random weights run training steps under bf16 autocast, eager and compiled, and are profiled
as ``tilefit profile`` does. Printed for each: the share of the kernels' time that belongs to an operation
with a module path or to the optimizer, the share that was joined to the captured step, and the share in
Tensor Core kernels, by their names.

    PYTHONPATH=src python benchmarks/profile_attribution.py --out benchmarks/results/profile_attribution.json
    PYTHONPATH=src python benchmarks/profile_attribution.py --ncu --out benchmarks/results/profile_ncu.json

With ``--ncu`` two models run one step under Nsight Compute, and the share of the time in kernels whose tensor
pipe executed instructions stands beside the share by names. ``--device cpu`` tries everything but the
figures: tiny models, on the CPU, with pretended kernels.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tilefit.capture.targets import load
from tilefit.options import TargetOptions
from tilefit.profiling.kernel_names import read_name
from tilefit.profiling.target import profile_target, real_step

ROOT = Path(__file__).resolve().parents[1]
#: Target, sizes on the GPU, sizes of the dry run. Layers repeat, and compiling takes as long as there are
#: layers, so there are fewer of them than in the published models.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        "hf:gpt2",
        {"batch": 8, "seq": 1024, "arguments": {"n_layer": 6}},
        {"batch": 1, "seq": 16, "arguments": {"n_layer": 1}},
    ),
    "bert": (
        "hf:bert",
        {"batch": 16, "seq": 512, "arguments": {"num_hidden_layers": 4}},
        {"batch": 1, "seq": 16, "arguments": {"num_hidden_layers": 1}},
    ),
    "llama": (
        "hf:llama",
        {
            "batch": 4, "seq": 1024,
            "arguments": {
                "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 5632,
                "num_attention_heads": 16, "num_key_value_heads": 4,
            },
        },
        {
            "batch": 1, "seq": 16,
            "arguments": {
                "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
                "num_attention_heads": 2, "num_key_value_heads": 1,
            },
        },
    ),
    "t5": (
        "hf:t5",
        {"batch": 8, "seq": 512, "arguments": {"num_layers": 3}},
        {"batch": 1, "seq": 16, "arguments": {"num_layers": 1}},
    ),
    "vit": (
        "hf:vit",
        {"batch": 32, "arguments": {"num_hidden_layers": 6}},
        {"batch": 1, "arguments": {"num_hidden_layers": 1}},
    ),
    "resnet50": (
        "torchvision:resnet50",
        {"batch": 64, "channels_last": True},
        {"batch": 1, "image_size": 64},
    ),
    "convnext": ("timm:convnext_tiny", {"batch": 32}, {"batch": 1, "image_size": 32}),
    "lstm": (f"{ROOT}/examples/models.py:lstm_lm", {}, {}),
}  # fmt: skip
COUNTED = ("gpt2", "resnet50")
#: Instructions of the tensor pipe that multiply matrices, and those that do not: the pipe also runs packed
#: half-precision FMAs, so that a softmax or a batch normalization counts on it (seen on an H200, where the
#: pipe's total made 67 % of GPT-2's time "Tensor Core"). ``ncu --query-metrics`` lists a GPU's counters.
MATRIX = tuple(f"sm__inst_executed_pipe_tensor_op_{kind}.sum" for kind in ("gmma", "hmma", "imma"))
PACKED = "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum"
DURATION = "gpu__time_duration.sum"
#: Steps before the one that Nsight Compute looks at.
WARM = 3


def options_of(name: str, device: str, compiled: bool) -> tuple[str, TargetOptions]:
    target, sizes, tiny = MODELS[name]
    chosen = tiny if device == "cpu" else sizes
    return target, TargetOptions(**chosen, amp="bf16", compile=compiled)


def row(name: str, device: str, compiled: bool) -> dict[str, Any]:
    """The figures of one model."""
    start = time.perf_counter()
    target, options = options_of(name, device, compiled)
    run = profile_target(target, options, gpu="h200" if device == "cpu" else None, steps=2, skip=4, plain=3,
                         device=device)  # fmt: skip
    report = run.report
    found = report.measured
    assert found is not None
    lost: dict[str, float] = defaultdict(float)
    for step in run.steps:
        for call in step.calls:
            if call.module is None and call.phase != "optimizer":
                lost[call.name] += call.duration_ns / found.steps / 1e9
    worst = sorted(lost.items(), key=lambda item: -item[1])[:5]
    return {
        "model": name,
        "compiled": compiled,
        "step_ms": 1e3 * found.time_s,
        "overhead": found.overhead,
        "kernel_ms": 1e3 * found.kernel_s,
        "kernels": found.kernels,
        "attributed": found.attributed_s / found.kernel_s,
        "joined": 1 - found.unmatched_s / found.kernel_s,
        "tensor_core": found.tensor_core_s / found.kernel_s,
        "unknown": found.unknown_s / found.kernel_s,
        "older_path": found.older_path_s / found.kernel_s,
        "predicted_gpu_ms": 1e3 * found.predicted_gpu_s,
        "findings": [finding.code for finding in report.findings],
        "not_attributed_ms": {operation: 1e3 * took for operation, took in worst},
        "seconds": time.perf_counter() - start,
    }


# ---- against the hardware's counters ---------------------------------------------------------------


def counted_step(name: str, device: str) -> None:
    """What Nsight Compute looks at: the step after a few that warm up, between the profiler's marks."""
    target, options = options_of(name, device, compiled=False)
    loaded = load(
        target,
        TargetOptions((), options.batch, options.seq, options.image_size, True, "cpu", options.arguments),
    )
    step = real_step(loaded.model, loaded.inputs, loaded.loss, options, device)
    for _ in range(WARM):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counters(name: str) -> dict[str, Any]:
    """The Tensor Core share of one model's kernels, by name and by counter."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--metrics", ",".join((*MATRIX, PACKED, DURATION)), "--print-kernel-base", "demangled",
        sys.executable, __file__, "--step", name,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if run.returncode or not lines:
        return {"model": name, "error": (run.stdout + run.stderr)[-1500:]}
    return compared(name, "\n".join(lines))


def compared(name: str, text: str) -> dict[str, Any]:
    """What the table of Nsight Compute says beside the names; its second line holds the units."""
    table = list(csv.DictReader(io.StringIO(text)))
    total = by_name = by_counter = 0.0
    differ: dict[str, float] = defaultdict(float)
    for kernel in table[1:]:
        counts = {metric: float(kernel[metric].replace(",", "")) for metric in (*MATRIX, PACKED, DURATION)}
        took = counts[DURATION]
        used = sum(counts[metric] for metric in MATRIX) > counts[PACKED]
        named = bool(read_name(kernel["Kernel Name"]).tensor_core)
        total += took
        by_name += took * named
        by_counter += took * used
        if named != used:
            differ[f"{'named' if named else 'counted'}: {kernel['Kernel Name'][:120]}"] += took
    worst = sorted(differ.items(), key=lambda item: -item[1])[:10]
    return {
        "model": name,
        "kernels": len(table) - 1,
        "by_name": by_name / total if total else 0.0,
        "by_counter": by_counter / total if total else 0.0,
        "differ": {kernel: took / total for kernel, took in worst},
    }


# ---- the program -----------------------------------------------------------------------------------


def pretending() -> Any:
    """On the CPU: traces get kernels."""
    sys.path.insert(0, str(ROOT / "tests"))
    from pretend_gpu import pretend_file
    from tilefit.profiling import session

    read = session.read_trace

    def read_pretended(path: Path) -> Any:
        pretended = path.with_suffix(".gpu.json")
        pretended.write_text(json.dumps(pretend_file(path)))
        return read(pretended)

    return patch.object(session, "read_trace", read_pretended)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ncu", action="store_true", help="compare with Nsight Compute")
    parser.add_argument("--step", metavar="MODEL", help="what Nsight Compute runs")
    parser.add_argument("--only", choices=("eager", "compiled"), help="one half of the runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step:
        counted_step(options.step, options.device)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here; --device cpu tries the script.")
    rows = []
    if options.ncu:
        for name in COUNTED:
            rows.append(counters(name))
            print(json.dumps(rows[-1]), flush=True)
    else:
        context = pretending() if options.device == "cpu" else patch.dict(os.environ)
        with context:
            for compiled in [
                each == "compiled" for each in ("eager", "compiled") if options.only in (None, each)
            ]:
                for name in options.models or list(MODELS):
                    try:
                        rows.append(row(name, options.device, compiled))
                    except Exception as error:  # noqa: BLE001 - one model's failure is a row of the result
                        rows.append({"model": name, "compiled": compiled, "error": f"{error!r}"[:800]})
                    print(json.dumps(rows[-1]), flush=True)
                    torch.compiler.reset()
                    gc.collect()
                    if options.device == "cuda":
                        torch.cuda.empty_cache()
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
