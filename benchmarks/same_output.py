"""Whether two checkouts print the same: every command, on ten targets, in every format.

    python benchmarks/same_output.py before --source ../old/src
    python benchmarks/same_output.py after
    python benchmarks/same_output.py --compare before after

Each call runs the commands with the sources of one checkout, at 80 columns, with folders of its own for the
user's data and caches, and writes what they print, with the exit code, into a folder. ``--compare`` lists the
outputs that differ, and by which lines.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKS = {
    "gpt2": ["hf:gpt2", "--gpu", "h200", "--batch", "16", "--seq", "1024", "--amp", "bf16"],
    "bert": ["hf:bert", "--gpu", "a100-sxm-80gb", "--batch", "8", "--seq", "128", "--amp", "fp16"],
    "t5": ["hf:t5", "--gpu", "l4", "--batch", "4", "--seq", "128", "--infer"],
    "llama": ["hf:llama", "--gpu", "h100-sxm", "--batch", "1", "--seq", "512", "--amp", "bf16", "--compile"],
    "resnet": [
        "torchvision:resnet50",
        "--gpu",
        "a100-sxm-80gb",
        "--gpu",
        "l4",
        "--batch",
        "32",
        "--amp",
        "bf16",
    ],
    "mobilenet": ["torchvision:mobilenet_v3_large", "--gpu", "h200", "--channels-last", "--amp", "bf16"],
    "vit": [
        "timm:vit_base_patch16_224",
        "--gpu",
        "v100-sxm2-16gb",
        "--batch",
        "8",
        "--amp",
        "fp16",
        "--compile",
    ],
    "convnext": ["timm:convnext_tiny", "--gpu", "rtx-4090", "--batch", "16", "--fused-optimizer", "--tf32"],
    "cnn": ["examples/models.py:odd_cnn", "--gpu", "h200"],
    "train": ["examples/train.py:build", "--gpu", "h200", "--amp", "bf16", "--optimizer", "sgd"],
}
FORMATS = ["markdown", "concise", "html", "sarif", "github", "junit", "text"]
OTHERS = {
    "split": [
        "check",
        "hf:gpt2",
        "--gpu",
        "h200",
        "--tensor-parallel",
        "4",
        "--data-parallel",
        "2",
        "--batch",
        "16",
    ],
    "split-pipeline": [
        "check",
        "hf:gpt2",
        "--gpu",
        "h200",
        "--pipeline-parallel",
        "2",
        "--micro-batches",
        "4",
    ],
    "all": ["check", "hf:gpt2", "--gpu", "h200", "--batch", "4", "--all", "--ops"],
    "selected": [
        "check",
        "hf:gpt2",
        "--gpu",
        "h200",
        "--batch",
        "4",
        "--select",
        "ALN,NTC",
        "--ignore",
        "ALN005",
    ],
    "fix": ["fix", "examples/train.py:build", "--gpu", "h200", "--amp", "bf16"],
    "fix-json": ["fix", "examples/train.py:build", "--gpu", "h200", "--output-format", "json"],
    "fix-markdown": [
        "fix",
        "torchvision:alexnet",
        "--gpu",
        "h200",
        "--batch",
        "8",
        "--output-format",
        "markdown",
    ],
    "fix-diff": [
        "fix",
        "examples/train.py:build",
        "--gpu",
        "h200",
        "--amp",
        "bf16",
        "--diff",
        "--level",
        "unsafe",
    ],
    "sweep": [
        "sweep",
        "torchvision:alexnet",
        "--over",
        "batch=8..64",
        "--over",
        "gpu=h200,l4",
        "--amp",
        "bf16",
    ],
    "sweep-json": [
        *("sweep", "hf:gpt2", "--over", "batch=2,4", "--over", "compile=off,on", "--gpu", "h200"),
        *("--output-format", "json", "--seq", "128"),
    ],
    "sweep-csv": [
        *("sweep", "hf:gpt2", "--best-batch", "--gpu", "h200", "--seq", "128", "--output-format", "csv"),
    ],
    "curve": ["curve", "torchvision:alexnet", "--batch", "1:64", "--gpu", "h200", "--amp", "bf16"],
    "curve-gemm": [
        "curve",
        "gemm",
        "1:512",
        "4096",
        "4096",
        "--gpu",
        "h200",
        "--layout",
        "TN",
        "--layout",
        "NN",
    ],
    "curve-linear": [
        *(
            "curve",
            "linear",
            "--rows",
            "16384",
            "--in",
            "768",
            "--out",
            "50200:50300",
            "--gpu",
            "a100-sxm-80gb",
        ),
        *("--output-format", "json"),
    ],
    "gemm": ["gemm", "16384", "50257", "768", "--gpu", "h200"],
    "gemm-fp32": [
        "gemm",
        "1000",
        "1000",
        "1000",
        "--gpu",
        "v100-sxm2-16gb",
        "--dtype",
        "fp32",
        "--layout",
        "NT",
    ],
    "gpu": ["gpu"],
    "gpu-h200": ["gpu", "h200"],
    "rules": ["rules"],
    "rule": ["rule", "ALN002"],
    "rule-amp": ["rule", "AMP006"],
    "no-gpu": ["check", "hf:gpt2"],
    "unknown-gpu": ["check", "hf:gpt2", "--gpu", "h20"],
    "unknown-rule": ["check", "hf:gpt2", "--gpu", "h200", "--select", "ALX"],
    "no-file": ["check", "train.py:build", "--gpu", "h200"],
    "no-effect": ["check", "hf:gpt2", "--gpu", "h200", "--infer", "--fused-optimizer"],
    "no-target": ["check", "gpt2", "--gpu", "h200"],
    "fix-two-gpus": ["fix", "hf:gpt2", "--diff", "--gpu", "h200"],
    "profile-no-trace": ["profile", "trace.json"],
}
HELP = ["check", "fix", "sweep", "curve", "profile", "bench", "gemm", "compare", "report", "precision"]


def run(source: Path, folder: Path) -> None:
    """Write what every command prints with the package below ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="same-output-"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(source.resolve()),
        "COLUMNS": "80",
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TILEFIT_STORE": str(home / "store.db"),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def printed(name: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "tilefit", *arguments]
        done = subprocess.run(
            command, capture_output=True, cwd=ROOT, env=environment, check=False, stdin=subprocess.DEVNULL
        )
        end = f"\n--- exit {done.returncode}; stderr:\n".encode()
        (folder / name).write_bytes(done.stdout + end + done.stderr)
        print(name, done.returncode, flush=True)

    for name, arguments in CHECKS.items():
        report = folder / f"{name}.json"
        printed(f"check-{name}", ["check", *arguments, "--output-file", str(report)])
        for form in FORMATS if report.exists() else []:
            printed(f"report-{name}.{form}", ["report", str(report), "--output-format", form])
    printed("compare", ["compare", str(folder / "gpt2.json"), str(folder / "bert.json")])
    printed(
        "compare-json",
        ["compare", str(folder / "gpt2.json"), str(folder / "gpt2.json"), "--output-format", "json"],
    )
    for name, arguments in OTHERS.items():
        printed(name, arguments)
    for verb in HELP:
        printed(f"help-{verb}", [verb, "--help"])


def compare(first: Path, second: Path) -> int:
    """Print how the outputs of two runs differ; how many do."""
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir()})
    different = 0
    for name in names:
        texts = []
        for folder in (first, second):
            text = (folder / name).read_text(errors="replace") if (folder / name).exists() else ""
            texts.append(text.replace(str(folder), "FOLDER").splitlines())
        if texts[0] != texts[1]:
            different += 1
            print(f"=== {name}")
            for line in list(difflib.unified_diff(*texts, lineterm="", n=0))[2:40]:
                print(line[:240])
    print(f"{len(names) - different} of {len(names)} outputs are the same")
    return different


def main() -> None:
    """Run, or compare two runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--compare", action="store_true")
    asked = parser.parse_args()
    if asked.compare:
        sys.exit(bool(compare(*asked.folder)))
    run(asked.source, asked.folder[0].resolve())


if __name__ == "__main__":
    main()
