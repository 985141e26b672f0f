"""Part `peers` of `recurrent.py`: FlashRNN, and a CUDA-graphed loop of one cuBLAS product a step.

The loop is the input projection of all steps, then per step a product and PyTorch's fused pointwise kernel of
the cell, replayed as one CUDA graph; backward is autograd's, in the same graph. FlashRNN (`pip install
flashrnn`, a peer only: none of its code is here) compiles itself with nvcc for each size, which other
processes do while the loops are timed; its first result is compared with torch's. It takes the input
projection as given: it is timed with the product that makes it, as every other contender includes it.

FlashRNN's own options choose its backend `cuda_fused`, the fastest it has for one head of these sizes. Its
extension that reads the GPU's properties does not compile with CUDA 13, which dropped some of them; PyTorch's
properties stand in for the few that are used. Its kernels are compiled as they are.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from recurrent_common import Row, Run, Setting, backend_of, problems, runs, table
from torch import Tensor, nn

BUDGET_S = 14.0
STEPS = 256


class Size(NamedTuple):
    cell: str
    hidden: int
    batch: int


LOOPS = [
    Size(cell, hidden, batch) for cell in ("lstm", "gru") for hidden in (256, 1024) for batch in (1, 16, 64)
]
FLASH = [Size("lstm", hidden, batch) for hidden, batch in ((512, 8), (768, 16), (1024, 16), (1024, 64))]


def _reason(log: str) -> str:
    """The last line of a log, without the folders of this machine."""
    last = log.strip().splitlines()[-1:] or ["no output"]
    return re.sub(r"/\S*/", "", last[0].strip())


def looped(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a layer of torch's, one product a step."""
    w_ih, w_hh, b_ih, b_hh = layer.all_weights[0]
    is_lstm = isinstance(layer, nn.LSTM)
    projected = F.linear(x, w_ih, b_ih + b_hh if is_lstm else b_ih)
    h = c = x.new_zeros((x.shape[1], w_hh.shape[1]))
    weight, outs = w_hh.t(), []
    for step in projected.unbind():
        if is_lstm:
            h, c = _lstm(step, h @ weight, c)
        else:
            h = _gru(step, torch.addmm(b_hh, h, weight), h)
        outs.append(h)
    return torch.stack(outs)


def _lstm(step: Tensor, product: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    if step.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell(step, product, c)[:2]
    i, f, g, o = (step + product).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(step: Tensor, product: Tensor, h: Tensor) -> Tensor:
    if step.is_cuda:
        return torch.ops.aten._thnn_fused_gru_cell(step, product, h)[0]
    (r, z, n), (hr, hz, hn) = step.chunk(3, -1), product.chunk(3, -1)
    z = (z + hz).sigmoid()
    return (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * h


@cache
def flash() -> Callable[..., tuple[Tensor, Tensor]]:
    """FlashRNN's function."""
    from flashrnn import flashrnn

    def properties(device_id: int) -> dict[str, int]:
        found = torch.cuda.get_device_properties(device_id)
        return {
            "maxThreadsPerBlock": 1024,  # of every CUDA GPU
            "regsPerMultiprocessor": found.regs_per_multiprocessor,
            "multiProcessorCount": found.multi_processor_count,
            "sharedMemPerBlockOptin": found.shared_memory_per_block_optin,
        }

    sys.modules["flashrnn.flashrnn.flashrnn"].get_gpu_info = properties
    # It links with -lcublas, and PyTorch's wheels have the library under its full name only.
    folder = Path(tempfile.gettempdir(), "flashrnn-libraries")
    folder.mkdir(exist_ok=True)
    for library in Path(os.environ["CUDA_LIB"]).glob("libcublas.so.*"):
        with suppress(FileExistsError):  # another process made it
            (folder / "libcublas.so").symlink_to(library)
    os.environ["LIBRARY_PATH"] = f"{folder}:{os.environ.get('LIBRARY_PATH', '')}"
    return flashrnn


def flashed(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a layer of torch's by FlashRNN, whose gates have torch's order."""
    flashrnn = flash()
    w_ih, w_hh, b_ih, b_hh = layer.all_weights[0]
    hidden = w_hh.shape[1]
    projected = F.linear(x, w_ih).view(*x.shape[:2], 4, 1, hidden).transpose(0, 1)
    out, _ = flashrnn(
        projected,
        w_hh.view(4, 1, hidden, hidden),
        (b_ih + b_hh).view(4, 1, hidden),
        function="lstm",
        backend="cuda_fused",
        dtype="bfloat16",
    )
    return out[0, :, :, 0].transpose(0, 1)


def flash_missing(setting: Setting) -> str | None:
    """Why FlashRNN does not run here; None if it may."""
    if not setting.on_gpu:
        return "it needs a GPU"
    for package in ("flashrnn", "einops", "ninja"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    if shutil.which("nvcc") is None and not Path(os.environ.get("CUDA_HOME", ""), "bin/nvcc").is_file():
        return "there is no nvcc"
    return None


@contextmanager
def flash_compilers(missing: str | None) -> Iterator[dict[Size, subprocess.Popen[bytes]]]:
    """Processes that run FlashRNN once at each size, so that its compiled extensions are on disk."""
    processes = {}
    try:
        for size in FLASH if missing is None else []:
            command = [sys.executable, __file__, *map(str, size)]
            processes[size] = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log_of(size).open("wb"), start_new_session=True
            )
        yield processes
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # nvcc too
                process.wait()


def log_of(size: Size) -> Path:
    return Path(tempfile.gettempdir(), f"flashrnn-{'-'.join(map(str, size))}.txt")


def peers(setting: Setting) -> dict[str, Any]:
    steps = 3 if setting.tiny else STEPS
    loops = [size._replace(hidden=8) for size in LOOPS[:: len(LOOPS) // 2]] if setting.tiny else LOOPS
    missing = flash_missing(setting)
    with flash_compilers(missing) as compilers:
        setting.compile_ahead(
            p for size in (*loops, *FLASH) for p in problems(size.cell, torch.bfloat16, *size[1:])
        )
        rows = [
            row
            for size in setting.within(loops)
            for row in measured(setting, size, steps, "graphed loop", looped, captured=True)
        ]
        refused = {"all": missing} if missing else {}
        for size, process in compilers.items():
            try:
                process.wait(max(setting.left_s(), 1.0))
            except subprocess.TimeoutExpired:
                refused[str(size)] = "still compiling when its time was over; a larger --budget-s waits"
                continue
            if process.returncode:
                refused[str(size)] = f"failed: {_reason(log_of(size).read_text())}"
                continue
            rows += measured(setting, size, steps, "FlashRNN", flashed, captured=False)
    print(f"\npeers: microseconds a step, bf16, {steps} steps, input product included")
    table(
        "peer|cell|hidden|batch|pass|peer us|tilefit us|tilefit captured us|ratio|peer - torch.nn|ran on",
        (
            (
                *(row[key] for key in ("peer", "cell", "hidden", "batch", "pass")),
                f"{row['peer_us']:.2f}",
                f"{row['tilefit_us']:.2f}",
                f"{row['tilefit_captured_us']:.2f}",
                f"{ratio(row):.2f}x",
                f"{row['difference']:.0e}",
                row["backend"],
            )
            for row in rows
        ),
    )
    slower = [row for row in rows if ratio(row) <= 1]
    print(f"{len(slower)} of {len(rows)} not faster than the peer (bar 0)")
    for size, reason in refused.items():
        print(f"FlashRNN, {size}: not run, {reason}")
    return {"rows": rows, "flashrnn_not_run": refused}


def ratio(row: Row) -> float:
    """The peer's time over ours, both captured where the peer is."""
    ours = "tilefit_captured_us" if row["peer_captured"] else "tilefit_us"
    return float(row["peer_us"] / row[ours])


def measured(
    setting: Setting,
    size: Size,
    steps: int,
    name: str,
    function: Callable[[nn.Module, Tensor], Tensor],
    *,
    captured: bool,
) -> Iterator[Row]:
    """A row for inference and one for training."""
    theirs, ours = setting.pair(size.cell, torch.bfloat16, size.hidden, size.hidden)
    x = setting.random(steps, size.batch, size.hidden, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    inputs = [x, *theirs.parameters()]
    with torch.no_grad():
        expected = theirs(x)[0].float()
        difference = float((function(theirs, x).float() - expected).norm() / expected.norm())

    def forward() -> object:
        with torch.no_grad():
            return function(theirs, x)

    def both() -> object:
        return torch.autograd.grad(function(theirs, x), inputs, grad)

    for kind, run in {"forward": forward, "both": both}.items():
        own = runs(ours, x, grad, kind)
        contenders: dict[str, Run] = {
            "peer": setting.captured(run) if captured else run,
            "tilefit": own,
            "tilefit_captured": setting.captured(own),
        }
        times = {f"{key}_us": us / steps for key, us in setting.interleaved(contenders, 5).items()}
        yield {
            "peer": name,
            "peer_captured": captured,
            **size._asdict(),
            "pass": kind,
            **times,
            "difference": difference,
            "backend": backend_of(ours),
        }


def compile_flash(cell: str, hidden: str, batch: str) -> None:
    setting = Setting(torch.device("cuda"), False, None, float("inf"))
    layer, _ = setting.pair(cell, torch.bfloat16, int(hidden), int(hidden))
    x = setting.random(STEPS, int(batch), int(hidden), dtype=torch.bfloat16).requires_grad_()
    flashed(layer, x).sum().backward()


if __name__ == "__main__":
    compile_flash(*sys.argv[1:])
