"""Compiles the kernels for the GPU found, with NVRTC, and keeps the binaries on disk.

NVRTC comes with PyTorch's CUDA builds; no compiler has to be installed. It needs no GPU: the architecture is
named.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilefit.errors import TilefitError
from tilefit.paths import cache_folder


class CompilationError(TilefitError):
    """NVRTC refused a kernel."""


def binary(kernel: str, constants: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """The machine code (a cubin) of a kernel with these constants.

    Compiled once for each combination: several processes may ask for the same one at the same time, and each
    finds either no file or a whole one.

    Args:
        kernel: ``"forward"``, ``"backward"`` or ``"nothing"``.
        constants: What the source is compiled with.
        capability: The GPU's compute capability.

    Raises:
        CompilationError: NVRTC is not installed, or refuses the source.
    """
    options = _options(constants, capability)
    digest = hashlib.sha256("\0".join([_source(kernel), _compiler_version(), *options]).encode()).hexdigest()
    path = cache_folder() / "kernels" / f"{kernel}-{digest[:32]}.cubin"
    stored = _stored(path)
    if stored is not None:
        return stored
    compiled = _compile(kernel, options)
    try:
        _store(path, compiled)
    except OSError as error:
        warnings.warn(f"kernels are compiled again in every process: {path.parent}: {error}", stacklevel=2)
    return compiled


@cache
def _source(kernel: str) -> str:
    if kernel == "nothing":
        return 'extern "C" __global__ void nothing() {}'
    folder = files("tilefit.rnn.persistent")
    return "".join(folder.joinpath(name).read_text("utf-8") for name in ("common.cuh", f"{kernel}.cu"))


def _options(constants: Mapping[str, int], capability: tuple[int, int]) -> list[str]:
    major, minor = capability
    return [
        f"--gpu-architecture=sm_{major}{minor}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in sorted(constants.items())),
    ]


@cache
def _compiler_version() -> str:
    nvrtc = _nvrtc()
    status, major, minor = nvrtc.nvrtcVersion()
    _check(status, "nvrtcVersion")
    return f"{major}.{minor}"


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilationError(
            f"the persistent kernels need the package cuda-bindings: {error}",
            hint="Install it: pip install cuda-bindings",
        ) from error
    return nvrtc


def _compile(kernel: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(_source(kernel).encode(), f"{kernel}.cu".encode(), 0, [], [])
    _check(status, "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status):
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompilationError(
                f"NVRTC {_compiler_version()} did not compile the {kernel} kernel ({status.name}) with "
                f"{' '.join(options)}:\n{log.decode(errors='replace')[:2000]}"
            )
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(status, "nvrtcGetCUBINSize")
        cubin = bytearray(size)
        (status,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        _check(status, "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _check(status: Any, call: str) -> None:
    if int(status):
        raise CompilationError(f"{call} failed: {status.name}")


def _stored(path: Path) -> bytes | None:
    """The binary on disk, or None where there is none or the file is not the one that was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, binary = content[:32], content[32:]
    return binary if hashlib.sha256(binary).digest() == digest else None


def _store(path: Path, binary: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
