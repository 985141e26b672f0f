"""What NVIDIA's own tools say of the emulated GPU: ``pynvml`` and the command ``nvidia-smi``."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tilefit.emulation.device import Watch
from tilefit.gpus import Gpu

_DRIVER = "580.0"
#: Answers what is queried as CSV, by the names of ``nvidia-smi --help-query-gpu``; without a query, who is
#: there. It is another process than the program's, so that it knows of nothing that the GPU does.
_COMMAND = """#!{python} -I
import sys
facts, count = {facts!r}, {count}
given = dict(each.partition("=")[::2] for each in sys.argv[1:])
names = next((v.split(",") for k, v in given.items() if k.startswith("--query-")), [])
form = given.get("--format", "")
if "--query-gpu" in given and "noheader" not in form:
    print(", ".join(names))
for index in range(count if "--query-gpu" in given or not names else 0):
    known = {{"index": (str(index), ""), **facts}}
    said = [known.get(name.strip(), ("[N/A]", "")) for name in names or ["index", "name", "memory.total"]]
    print(", ".join(value if "nounits" in form else value + unit for value, unit in said))
"""


def answer(module: ModuleType, gpu: Gpu, watch: Watch) -> None:
    """Let ``pynvml`` answer as ``gpu`` would; of what nobody knows it says 0."""
    size = int(gpu.memory_bytes)

    def memory(*args: Any) -> SimpleNamespace:
        used = watch.memory()[0]
        return SimpleNamespace(total=size, used=used, free=size - used, reserved=0, version=2)

    known: dict[str, Any] = {
        "nvmlDeviceGetCount": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "nvmlDeviceGetName": gpu.title,
        "nvmlDeviceGetCudaComputeCapability": gpu.compute_capability,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlSystemGetDriverVersion": _DRIVER,
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
    }
    for name in [each for each in dir(module) if each.startswith("nvml")]:
        setattr(module, name, partial(_said, known.get(name, 0)))
    module.nvmlDeviceGetMemoryInfo = memory  # type: ignore[attr-defined]


def _said(answer: Any, *args: Any) -> Any:
    return answer


def put_command(folder: Path, gpu: Gpu) -> None:
    """Let who calls ``nvidia-smi`` be answered by a file in a folder."""
    total = f"{gpu.memory_bytes / (1 << 20):.0f}"
    facts = {"name": (gpu.title, ""), "gpu_name": (gpu.title, ""), "driver_version": (_DRIVER, "")}
    facts |= {"memory.total": (total, " MiB"), "memory.free": (total, " MiB"), "memory.used": ("0", " MiB")}
    facts |= {"utilization.gpu": ("0", " %"), "utilization.memory": ("0", " %")}
    facts |= {"temperature.gpu": ("0", ""), "power.draw": ("0.00", " W")}
    facts |= {"compute_cap": (".".join(map(str, gpu.compute_capability)), "")}
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    command = folder / "bin" / "nvidia-smi"
    command.parent.mkdir(exist_ok=True)
    command.write_text(_COMMAND.format(python=sys.executable, facts=facts, count=count))
    command.chmod(0o755)
    os.environ["PATH"] = f"{command.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
