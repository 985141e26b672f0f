"""The kernels as C++: one fiber for each lane, so that they run where there is no GPU.

The source is the real one. Two things are replaced: what the CUDA language adds to C++ (``hardware.hpp``),
and the functions that contain assembly: their bodies are cut out and stand in ``instructions.hpp`` instead.
The exchange between thread blocks, its waits, the indices and the arithmetic are tested as they are; PTX
syntax, the GPU's memory model and the rounding to TF32 are not.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from tilefit.rnn.persistent import launch
from tilefit.rnn.persistent.variant import Problem, Variant

HERE = Path(__file__).parent
SOURCES = Path(launch.__file__).parent
COMPILER = ("g++", "-std=c++20", "-O1", "-w", "-fPIC", "-fvisibility=hidden")

#: Far more polls than a healthy exchange needs, and few enough for a test to wait for.
SPIN_LIMIT = 1 << 17


@cache
def missing() -> str | None:
    """Why there is no emulation here; None where there is."""
    if shutil.which(COMPILER[0]) is None:
        return "the emulation needs g++"
    probe = "#include <ucontext.h>\n_Float16 half;"
    command = [*COMPILER, "-c", "-x", "c++", "-", "-o", os.devnull]
    works = subprocess.run(command, input=probe, capture_output=True, text=True, check=False).returncode == 0
    return None if works else "the emulation needs a g++ with C++20 and _Float16 (12 or newer)"


class Outcome(NamedTuple):
    """How a launch ended.

    Attributes:
        gave_up: Whether a thread reached the spin limit.
        overran: Thread blocks that wrote past their shared memory; -1: an address was misaligned.
    """

    gave_up: bool
    overran: int


class EmulatedKernel:
    """Has what :class:`tilefit.rnn.persistent.launch.Kernel` has for launches."""

    def __init__(self, problem: Problem, variant: Variant, folder: Path) -> None:
        self.problem, self.variant = problem, variant
        self.name = "backward" if problem.backward else "forward"
        self._run = _library(self.name, variant.constants(problem, jitter=True), folder).run

    def launch(self, tensors: dict[str, torch.Tensor | None], steps: int) -> None:
        outcome = self.run(tensors, steps)
        assert outcome == Outcome(gave_up=False, overran=0), (outcome, self.problem, self.variant)

    def run(
        self,
        tensors: dict[str, torch.Tensor | None],
        steps: int,
        *,
        spin_limit: int = SPIN_LIMIT,
        missing_blocks: int = 0,
    ) -> Outcome:
        """Run all steps; the last ``missing_blocks`` of the grid never start."""
        error = torch.zeros(1, dtype=torch.int32)
        problem, variant = self.problem, self.variant
        counts = steps, problem.batch, problem.directions, variant.batch_groups, spin_limit, variant.pause
        exchanged = tensors[launch.EXCHANGED[self.name]]
        assert exchanged is not None
        exchanged.view(torch.int16).fill_(-1)
        packed = launch.parameter(self.name, tensors, error.data_ptr(), *counts)
        overran = self._run(
            ctypes.c_char_p(packed),
            self.variant.grid(self.problem),
            missing_blocks,
            self.variant.cluster,
            self.variant.warps * 32,
            self.variant.shared_bytes(self.problem),
        )
        return Outcome(bool(error.item()), overran)


def source(kernel: str, constants: dict[str, int]) -> str:
    """The kernel as one C++ file, after ``hardware.hpp``."""
    defined = {**constants, "KERNEL": kernel, "PARAMETERS": kernel.capitalize()}
    cuda = (SOURCES / "common.cuh").read_text("utf-8") + (SOURCES / f"{kernel}.cu").read_text("utf-8")
    dynamic = "extern __shared__ __align__(16) unsigned char shared[];"
    assert cuda.count(dynamic) == 1
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in defined.items()),
            _without_assembly(cuda).replace(dynamic, "unsigned char* shared = current->block->memory;"),
            (HERE / "instructions.hpp").read_text("utf-8"),
        ]
    )


def _without_assembly(cuda: str) -> str:
    """The source with functions that contain assembly only declared: without a stand-in it does not link."""
    kept, end = [], 0
    for function in re.finditer(r"^__device__ __forceinline__ [^{;]*\{", cuda, re.MULTILINE):
        body = cuda[function.end() : _end_of_block(cuda, function.end())]
        if "asm" in body:
            kept.append(cuda[end : function.end() - 1].rstrip() + ";")
            end = function.end() + len(body)
    return "".join([*kept, cuda[end:]])


def _end_of_block(text: str, start: int) -> int:
    """Behind the brace that closes the block whose first character stands at ``start``."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return start + brace.end()
    raise ValueError("a brace is not closed")


def _library(kernel: str, constants: dict[str, int], folder: Path) -> ctypes.CDLL:
    """The compiled kernel, from ``folder`` if it was compiled before."""
    hardware, text = (HERE / "hardware.hpp").read_text("utf-8"), source(kernel, constants)

    def place(name: str, *texts: str) -> Path:
        digest = hashlib.sha256("\0".join([*COMPILER, hardware, *texts]).encode()).hexdigest()
        return folder / name.format(digest[:32])

    # What every kernel begins with is compiled once: it takes longer than the rest.
    header, path = place("{}.hpp"), place(f"{kernel}-{{}}.so", text)
    if not path.exists():
        if not header.exists():
            _compiled("c++-header", hardware, Path(f"{header}.gch"))
            header.write_text(hardware)
        _compiled("c++", text, path, "-include", str(header), "-Wl,--no-undefined", "-shared")
    return ctypes.CDLL(str(path))


def _compiled(language: str, text: str, path: Path, *options: str) -> None:
    """Compile a text; the file is there at once or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built, source = Path(scratch) / path.name, Path(scratch) / "source"
        source.write_text(text, "utf-8")
        command = [*COMPILER, *options, "-x", language, str(source), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[:4000]
        built.replace(path)
