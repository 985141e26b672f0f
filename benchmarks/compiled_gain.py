"""Measure what `tilefit.optimize` gains over ``torch.compile`` alone, many models in a short time on a GPU.

    PYTHONPATH=src python benchmarks/compiled_gain.py --out DIR --budget-s 560
    PYTHONPATH=src python benchmarks/compiled_gain.py --eager --out DIR --budget-s 560

The rows of ``fix_gain.py --whole``, with ``--compiled`` or, of ``--eager`` models, without, got as
``compiled_steps.py`` gets its own: every model has a process, which plans, compiles the original and the
fixed model, and waits; one after another they are timed in turn,
while nothing else runs. A row is in ``DIR/rows.jsonl`` as soon as it is there; models that have one in a file
of ``--done`` are left out. A failure is a row too, and not done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compiled_steps import ROW, Session, lock_benchmarks, patiently, recorded, session_arguments, when_called
from fix_gain import MODELS, measured, planned

from tilefit.measure.launch import launch_scale

#: Those that no record has first, then those that compile fast; what fills the memory last.
FIRST = (
    "resnext resnet50-nhwc convnext speech odd-encoder graph autoencoder vit-mae electra odd-mlp odd-cnn "
    "attention-by-hand recommender segmenter detector deberta swin efficientnet-nhwc densenet unet "
    "lstm-lm vit gpt2 roberta bert-mlm distilbert opt resnet50-nchw mobilenet-v3-nchw bart t5 whisper-small "
    "llama-1b-odd llama-1b"
).split()


def work(name: str, options: argparse.Namespace) -> None:
    """Plan, compile, wait for the turn, time, and print the row."""
    torch.set_num_threads(1)
    lock_benchmarks()
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    patiently(
        lambda: rows.append(
            measured(
                planned(name, options.gpu, "safe", options.compiled, options.scale, options.ignore.split()),
                MODELS[name],
                options,
                alone=when_called,
            )
        )
    )
    rows[-1]["took_s"] = time.perf_counter() - start
    print(ROW + json.dumps(rows[-1]), flush=True)


def shown(row: dict[str, Any]) -> str:
    walls = " -> ".join(f"{wall_ms:.2f}" for wall_ms in row["wall_ms"])
    fixes = ", ".join(fix["name"] for fix in row["fixes"])
    return f"{row['speedup']:6.3f} ({row['predicted_speedup']:.3f} predicted)  {walls} ms  {fixes}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    session_arguments(parser, Path("compiled_gain"))
    parser.add_argument("--gpu", default="h200", help="the GPU to plan for")
    parser.add_argument("--eager", action="store_true", help="nothing is compiled as a whole")
    parser.add_argument("--models", default="", help="names, with commas between; all if empty")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="rows that exist")
    parser.add_argument("--rounds", type=int, default=6, help="at least")
    parser.add_argument("--model-s", type=float, default=3.0, help="a model's rounds take at least so long")
    parser.add_argument("--round-s", type=float, default=0.15, help="about how long one variant's turn is")
    parser.add_argument("--ignore", default="", help="fixes that no plan gets, with spaces between")
    parser.add_argument("--scale", type=float, default=0.0, help="the host's launch scale; measured if 0")
    options = parser.parse_args()
    options.compiled, options.whole = not options.eager, True
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    if options.worker:
        work(options.worker, options)
        return
    done = {row["model"] for path in options.done for row in recorded(path) if "speedup" in row}
    wanted = [name for name in options.models.split(",") if name] or FIRST
    unknown = sorted(set(wanted) - set(MODELS))
    if unknown:
        sys.exit(f"There is no model {unknown[0]}; there are {', '.join(MODELS)}.")
    scale = options.scale or launch_scale(torch.device(options.device))
    command = [__file__, "--device", options.device, "--scale", str(scale), "--gpu", options.gpu]
    command += ["--ignore", options.ignore, *(["--eager"] if options.eager else [])]
    for name in ("rounds", "model_s", "round_s"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    session = Session([name for name in wanted if name not in done], options, command, shown)
    session.finish()
    rows = recorded(session.out / "rows.jsonl")
    gains = [row["speedup"] for row in rows if row.get("fixes") and "speedup" in row]
    if gains:
        print(f"{len(gains)} models: {statistics.geometric_mean(gains):.3f} times, least {min(gains):.3f}")


if __name__ == "__main__":
    main()
