"""``tilefit doctor``: what this environment offers."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tilefit.cli import output
from tilefit.errors import UsageError
from tilefit.version import __version__

#: Optional packages: what each gives.
OPTIONAL = {
    "transformers": "hf: targets",
    "torchvision": "torchvision: targets",
    "timm": "timm: targets",
    "nvidia-ml-py": "finding the GPU of this machine, its clocks and its power",
    "pyarrow": "measurements as Parquet files",
}


def doctor() -> None:
    """Show the environment: Python, torch, CUDA, the GPU, optional packages and what each gives."""
    with output.progress("Looking around"):
        rows = [*_base(), *_torch(), *_packages()]
    output.stdout().print(output.facts(rows, "bold"))


def _base() -> list[tuple[str, str]]:
    return [
        ("tilefit", __version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.machine()}"),
    ]


def _torch() -> list[tuple[str, str]]:
    if find_spec("torch") is None:
        return [("torch", "not installed: models cannot be captured")]
    try:
        import torch
    except (ImportError, OSError) as error:
        return [("torch", f"does not import: {error}")]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    rows = [("torch", f"{torch.__version__}, {built}"), ("driver", _driver())]
    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none that torch can use; checks work without one: name it with --gpu")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"GPU {index}", _known(properties.name, properties.total_memory)))
    return rows


def _known(name: str, memory_bytes: int) -> str:
    from tilefit import gpus

    try:
        return f"{name}: --gpu {gpus.of_device(name, memory_bytes).name}"
    except UsageError:
        return f"{name}: its facts are not known to tilefit"


def _driver() -> str:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except FileNotFoundError:
        return "none (no nvidia-smi)"
    except (subprocess.SubprocessError, OSError) as error:
        return f"nvidia-smi failed: {error}"
    return found.stdout.strip().splitlines()[0] if found.stdout.strip() else "none"


def _packages() -> list[tuple[str, str]]:
    rows = []
    for name, gives in OPTIONAL.items():
        try:
            rows.append((name, f"{version(name)}: {gives}"))
        except PackageNotFoundError:
            rows.append((name, f"not installed; would give {gives}"))
    return rows
