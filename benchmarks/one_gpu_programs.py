"""Training programs run as they are on a GPU, beside what tilefit says of them without any.

    PYTHONPATH=src python benchmarks/one_gpu_programs.py --fix [--public FOLDER]
    PYTHONPATH=src python benchmarks/one_gpu_programs.py --predict [--public FOLDER]
    PYTHONPATH=src python benchmarks/one_gpu_programs.py --rows one_gpu_programs_h100.jsonl --seconds 240
    PYTHONPATH=src python benchmarks/one_gpu_programs.py --rows one_gpu_programs_h100.jsonl --compare

The programs are those of ``programs`` and ``programs/one_gpu`` and, where a folder with checkouts of github
pytorch/examples and karpathy/minGPT (``pytorch-examples`` and ``minGPT``) is named, some of those; their data
sets are made up. The first lets ``tilefit fix --write`` change a copy of each, the second captures all by
``tilefit check``; neither needs a GPU. What was said before any was run is kept (``before`` in
``results/one_gpu_programs.json``), beside what is said ``now``. The third runs each in a process of its own:
medians of steps back to back, the allocator's peak, and of a few profiled steps how long kernels take.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from several_gpus import PROFILED, Rows, machine
from torch.optim.optimizer import register_optimizer_step_post_hook
from two_gpu_programs import TIMED, WARM, Marks

from tilefit.capture.torchvision_import import tolerated

HERE = Path(__file__).parent
PREDICTED = HERE / "results" / "one_gpu_programs.json"
STEPS = WARM + TIMED + PROFILED + 2
OWN = {
    path.stem: (path, ["--steps", str(STEPS)])
    for path in sorted((HERE / "programs" / "one_gpu").glob("*.py"))
    if not path.stem.endswith("_fixed")
}
OWN["translator, bf16"] = (OWN["translator"][0], ["--steps", str(STEPS), "--amp"])
OWN |= {
    name: (HERE / "programs" / f"{name}.py", [])
    for name in ("contrastive", "image_transformer", "mixture", "words")
}
#: The script from pytorch-examples, its arguments. Each runs where it lies.
PUBLIC = {
    "mnist": "mnist/main.py --epochs 1",
    "mnist_rnn": "mnist_rnn/main.py --epochs 1",
    "siamese_network": "siamese_network/main.py --epochs 1",
    "vae": "vae/main.py --epochs 1",
    "dcgan": "dcgan/main.py --dataset fake --niter 1",
    "word_language_model": "word_language_model/main.py --accel --epochs 1",
    "word_language_model 2": "word_language_model/main.py --accel --epochs 1 --model Transformer --lr 5",
    "imagenet": "imagenet/main.py --dummy --epochs 1 -b 128 -j 4",
    "imagenet 2": "imagenet/main.py --dummy --epochs 1 -b 128 -j 4 -a mobilenet_v2",
    "super_resolution": "super_resolution/main.py --upscale_factor 3 --accel --nEpochs 1 --batchSize 16",
    "adder": "../minGPT/projects/adder/adder.py --trainer.max_iters=60",
    "chargpt": "../minGPT/projects/chargpt/chargpt.py --trainer.max_iters=60",
}


def cases(public: Path | None) -> dict[str, tuple[Path, list[str]]]:
    """The programs and their arguments, and those of them that are fixed."""
    found = dict(OWN)
    for name, command in PUBLIC.items() if public else ():
        script, *arguments = command.split()
        found[name] = (((public or HERE) / "pytorch-examples" / script).resolve(), arguments)
    for name, (path, arguments) in list(found.items()):
        fixed = _fixed(path)
        if fixed.exists():
            found[f"{name}, fixed"] = (fixed, arguments)
    return found


def _fixed(path: Path) -> Path:
    """Where the fixed copy of a program lies: beside it, since it may read what lies there."""
    return path.with_name(f"{path.stem}_fixed.py")


def _tilefit(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of tilefit on a program, in the program's folder."""
    source = [str(HERE.parent / "src"), *([str(path.parents[2])] if "minGPT" in path.parts else [])]
    name, *rest = arguments
    return subprocess.run(
        [sys.executable, "-m", "tilefit", name, path.name, *rest],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*source, *sys.path]), "CUDA_VISIBLE_DEVICES": ""},
    )


def fix(gpu: str, public: Path | None, jobs: int) -> None:
    """A fixed copy of each program, where there is something to fix."""

    def one(case: tuple[str, tuple[Path, list[str]]]) -> str:
        name, (path, arguments) = case
        fixed = _fixed(path)
        fixed.write_text(path.read_text())
        out = _tilefit(fixed, "fix", "--gpu", gpu, "--write", "--", *arguments)
        if fixed.read_text() == path.read_text():
            fixed.unlink()
        return f"{name}: exit {out.returncode}\n{out.stdout[-3000:]}{out.stderr[-600:]}"

    # Of programs that run twice with other arguments the first is fixed.
    first = {path: (name, (path, arguments)) for name, (path, arguments) in reversed(cases(public).items())}
    with ThreadPoolExecutor(jobs) as pool:
        for said in pool.map(one, first.values()):
            print(said, file=sys.stderr, flush=True)


# ---- data for the public programs -----------------------------------------------------------------


def _digits(folder: Path) -> None:
    folder = folder / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 60000), ("t10k", 10000)):
        pixels = (
            b"\0\0\x08\x03"
            + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
            + os.urandom(count * 784)
        )
        labels = b"\0\0\x08\x01" + count.to_bytes(4, "big") + bytes(n % 10 for n in range(count))
        for kind, data in (("images-idx3", pixels), ("labels-idx1", labels)):
            (folder / f"{name}-{kind}-ubyte").write_bytes(data)
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(b"", 1))


def _prepare(public: Path) -> None:
    """Data sets of the right sizes and kinds where the programs look for them."""
    examples, draw = public / "pytorch-examples", random.Random(0)
    # Those that name "../data" find one folder beside theirs.
    for folder in (examples / "data", examples / "mnist" / "data", public / "data"):
        _digits(folder)
    words = [f"word{n}" for n in range(33278)]
    lines = [" ".join(draw.choices(words, k=20)) for _ in range(20000)]
    lines[:1664] = [" ".join(words[n : n + 20]) for n in range(0, 33278, 20)]
    texts = examples / "word_language_model" / "data" / "wikitext-2"
    texts.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        (texts / f"{name}.txt").write_text("\n".join(lines if name == "train" else lines[:500]) + "\n")
    letters = [chr(n) for n in range(32, 97)]
    (public / "minGPT" / "projects" / "chargpt" / "input.txt").write_text(
        "".join(draw.choices(letters, k=1_000_000))
    )
    from PIL import Image

    for kind, count in (("train", 320), ("test", 40)):
        images = examples / "super_resolution" / "dataset" / "BSDS300" / "images" / kind
        images.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.frombytes("RGB", (481, 321), os.urandom(481 * 321 * 3)).save(images / f"{number}.jpg")


# ---- on the machine -------------------------------------------------------------------------------


class _Done(BaseException):
    """Ends a program when its steps are measured; no program catches it."""


def run(path: Path, arguments: list[str], device: str) -> dict[str, Any]:
    """Run a program in this process."""
    marks = Marks(device == "cuda")

    def step(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        marks(optimizer, *rest)
        if "profile" in marks.found or (device != "cuda" and "median_s" in marks.found):
            raise _Done

    hook = register_optimizer_step_post_hook(step)
    sys.path.insert(0, str(path.parent))
    if "minGPT" in path.parts:
        sys.path.insert(0, str(path.parents[2]))
    os.chdir(path.parent)
    try:
        with tolerated(), patch.object(sys, "argv", [str(path), *arguments]):
            runpy.run_path(str(path), run_name="__main__")
    except _Done:
        pass
    finally:
        hook.remove()
    return marks.found


def measured(options: argparse.Namespace) -> None:
    """All programs that the time allows, each in a fresh process."""
    rows = Rows(options.rows)
    rows.write("machine", **machine(options.device))
    if options.public:
        _prepare(options.public)
    wanted = [name for name in cases(options.public) if name.endswith(", fixed") == (options.part == "fixed")]

    def one(name: str) -> dict[str, Any]:
        left = options.seconds - (time.monotonic() - rows.began_s)
        command = [sys.executable, __file__, "--one", name, "--device", options.device]
        command += ["--public", str(options.public)] if options.public else []
        limit = max(1.0, min(options.limit, left))
        try:
            out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": "not over in its time"}
        return {"error": out.stderr[-900:]} if out.returncode else json.loads(out.stdout.splitlines()[-1])

    if options.jobs > 1:
        # What they compile is kept for the runs that count.
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, wanted))
    for name in wanted:
        if options.seconds - (time.monotonic() - rows.began_s) > 10:
            rows.write("program", name=name, **one(name))
    rows.write("end", seconds=time.monotonic() - rows.began_s)


# ---- what is predicted ----------------------------------------------------------------------------


def predict(gpu: str, public: Path | None, jobs: int) -> dict[str, Any]:
    """What ``tilefit check`` says of each program."""

    def one(case: tuple[str, tuple[Path, list[str]]]) -> dict[str, Any]:
        name, (path, arguments) = case
        out = _tilefit(path, "check", "--gpu", gpu, "--output-format", "json", "--", *arguments)
        if not out.stdout:
            return {"error": out.stderr[-900:]}
        step = json.loads(out.stdout)["step"]
        print(name, f"{step['time_s']:.6f}", file=sys.stderr, flush=True)
        times = {key: round(step[key], 7) for key in ("time_s", "gpu_time_s", "host_time_s")}
        return {**times, "peak_bytes": step["memory"]["peak_bytes"]}

    wanted = cases(public)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(wanted, pool.map(one, wanted.items()), strict=True))


def _kernels_s(row: dict[str, Any]) -> float:
    """What the kernels of a step take, without copies between host and GPU."""
    profile = row["profile"]
    copied_s = sum(time_s for name, _, time_s in profile["top"] if name.startswith("Memcpy"))
    return (profile["compute_s"] - copied_s) / profile["steps"]


def compare(path: Path) -> None:
    """A line for each program, predicted over measured, and the errors; then what the fixes gained."""
    predicted = json.loads(PREDICTED.read_text())
    rows = (json.loads(line) for line in path.read_text().splitlines())
    programs = {row["name"]: row for row in rows if row["row"] == "program" and "profile" in row}
    off: dict[str, list[float]] = defaultdict(list)
    for name, row in programs.items():
        told = [f"{name:34}"]
        for when, every in predicted.items():
            said = every.get(name, {})
            if "time_s" not in said:
                continue
            ratios = {
                "step": said["time_s"] / row["median_s"],
                "kernels": said["gpu_time_s"] / _kernels_s(row),
                "memory": said["peak_bytes"] / row["peak_bytes"],
            }
            for key, ratio in ratios.items():
                off[f"{when}, {key}"].append(abs(ratio - 1))
            told.append(when + "".join(f" {ratio:5.2f}" for ratio in ratios.values()))
        steps = f"step {1e3 * row['median_s']:.2f}, kernels {1e3 * _kernels_s(row):.2f} ms"
        print(f"{'  '.join(told)}  {steps}, {row['peak_bytes'] / 2**30:.2f} GiB")
    for key, each in off.items():
        print(f"{key}: median {statistics.median(each):.1%}, worst {max(each):.1%} of {len(each)}")
    for name, row in programs.items():
        if fixed := programs.get(f"{name}, fixed"):
            kernels, step = _kernels_s(row) / _kernels_s(fixed), row["median_s"] / fixed["median_s"]
            print(f"{name:34}fixed: kernels {kernels:.2f} times as fast, step {step:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, help="written to, or compared")
    parser.add_argument("--public", type=Path, help="folder with checkouts of the public programs")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which nothing more is begun")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds that a program may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compare", action="store_true", help="with predictions; measures nothing")
    parser.add_argument("--predict", metavar="GPU", nargs="?", const="h100-sxm", help="write predictions")
    parser.add_argument("--fix", metavar="GPU", nargs="?", const="h100-sxm", help="write fixed programs")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once; of runs, of those before")
    parser.add_argument("--part", choices=("plain", "fixed"), default="plain", help="programs that are run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.public = options.public and options.public.resolve()
    if options.one:
        print("\n" + json.dumps(run(*cases(options.public)[options.one], options.device)))
    elif options.fix:
        fix(options.fix, options.public, options.jobs)
    elif options.predict:
        known = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
        known["now" if known else "before"] = predict(options.predict, options.public, options.jobs)
        PREDICTED.write_text(json.dumps(known, indent=1) + "\n")
    elif options.rows is None:
        parser.error("--rows is missing")
    elif options.compare:
        compare(options.rows)
    else:
        measured(options)


if __name__ == "__main__":
    main()
