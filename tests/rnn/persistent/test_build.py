"""The kernels compile for every GPU, without one, and are kept on disk."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rnn.persistent.capacities import A100, H200
from tilefit.rnn.cells import CELLS
from tilefit.rnn.persistent import build, choice
from tilefit.rnn.persistent.choice import chosen
from tilefit.rnn.persistent.launch import FIELDS, parameter
from tilefit.rnn.persistent.variant import LATE, Problem, Variant, variants


def nvrtc_missing() -> str | None:
    try:
        build._compiler_version()
    except build.CompilationError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(nvrtc_missing() is not None, reason=str(nvrtc_missing()))

ELEMENTS = ["bfloat16", "float16", "float32"]
KERNELS = [(cell, element, backward) for cell in CELLS for element in ELEMENTS for backward in (False, True)]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tilefit" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were compiled."""
    compiled: list[str] = []
    compile_kernel = build._compile

    def counting(kernel: str, options: list[str]) -> bytes:
        compiled.append(kernel)
        return compile_kernel(kernel, options)

    monkeypatch.setattr(build, "_compile", counting)
    return compiled


def compiled(problem: Problem, variant: Variant, capability: tuple[int, int]) -> bytes:
    options = build._options(variant.constants(problem), capability)
    return build._compile("backward" if problem.backward else "forward", options)


@needs_nvrtc
@pytest.mark.parametrize(("cell", "element", "backward"), KERNELS)
def test_every_exchange_compiles_for_hopper(cell: str, element: str, backward: bool) -> None:
    problem = Problem(CELLS[cell], element, 128, 16, 1, backward, lengths=True, resets=True)
    found: dict[tuple[int, bool], Variant] = {}
    for variant in variants(problem, H200):
        if variant.split in (1, 4):
            found.setdefault((variant.split, variant.mail), variant)
    assert set(found) == {(1, False), (1, True), (4, False)}
    for variant in found.values():
        assert compiled(problem, variant, (9, 0))


@needs_nvrtc
@pytest.mark.parametrize("backward", [False, True])
def test_copying_the_next_round_ahead_compiles(backward: bool) -> None:
    problem = Problem(CELLS["lstm"], "bfloat16", 128, 16, 1, backward, lengths=True, resets=True)
    plain, ahead = (
        compiled(
            problem, next(v for v in variants(problem, H200) if v.rounds == 2 and v.ahead == wanted), (9, 0)
        )
        for wanted in (0, LATE)
    )
    assert plain != ahead


@needs_nvrtc
@pytest.mark.parametrize("backward", [False, True])
def test_exact_fp32_compiles(backward: bool) -> None:
    problem = Problem(CELLS["gru"], "float32", 128, 16, backward=backward, strict=True)
    assert compiled(problem, next(variants(problem, A100)), (8, 0))


CAPABILITIES = [(8, 0), (8, 9), (10, 0), (12, 0)]


@needs_nvrtc
@pytest.mark.parametrize(("cell", "element", "backward"), KERNELS)
def test_without_clusters_compiles_for_every_gpu(cell: str, element: str, backward: bool) -> None:
    problem = Problem(CELLS[cell], element, 64, 8, 1, backward)
    # Each kind of GPU gets each cell, and each element type in each direction.
    others = 2 * ELEMENTS.index(element) + backward
    capability = CAPABILITIES[(list(CELLS).index(cell) + others) % len(CAPABILITIES)]
    assert compiled(problem, next(variants(problem, A100)), capability)


@needs_nvrtc
@pytest.mark.parametrize("name", [n for n in choice._measured() if re.search("/(256|1024)/1/1$", n)])
def test_measured_variants_keep_nearly_everything_in_registers(name: str) -> None:
    cell, kernel, _, hidden, tiles, _ = name.split("/")
    backward = kernel == "backward"
    problem = Problem(CELLS[cell], "bfloat16", int(hidden), int(tiles) * 8, backward=backward)
    variant = chosen(problem, H200)
    assert variant is not None
    nvrtc = build._nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(build._source(kernel).encode(), b"kernel.cu", 0, [], [])
    options = [*build._options(variant.constants(problem), (9, 0)), "--ptxas-options=-v"]
    nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.decode())
    # Some were measured to be faster with a few bytes spilled than with fewer weights in registers.
    assert [int(stores) <= 64 for stores, _ in spilled] == [True]


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_the_launch_passes_what_the_kernel_declares(kernel: str) -> None:
    declared = re.search(rf"struct {kernel.capitalize()} \{{(.*?)\n\}};", build._source(kernel), re.DOTALL)
    assert declared is not None
    lines = re.sub("//.*", "", declared[1]).split(";")
    names = [name for line in lines for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert FIELDS[kernel].split() == names
    pointers = names.index("error") + 1
    assert len(parameter(kernel, {}, 1, 2, 3, 4, 5, 6, 7)) == 8 * (
        pointers + -(-(len(names) - pointers) // 2)
    )


@needs_nvrtc
def test_a_kernel_is_compiled_once(cache: Path, compilations: list[str]) -> None:
    first = build.binary("nothing", {}, (9, 0))
    assert build.binary("nothing", {}, (9, 0)) == first
    assert compilations == ["nothing"]
    assert build.binary("nothing", {}, (8, 0)) != first
    assert build.binary("nothing", {"HIDDEN": 8}, (9, 0))
    assert compilations == ["nothing"] * 3
    assert len(list(cache.iterdir())) == 3


@needs_nvrtc
@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:-7], lambda content: content[:99] + b"?" + content[100:]],
    ids=["empty", "truncated", "tampered"],
)
def test_a_damaged_file_is_compiled_again(
    damage: Callable[[bytes], bytes], cache: Path, compilations: list[str]
) -> None:
    first = build.binary("nothing", {}, (9, 0))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert build.binary("nothing", {}, (9, 0)) == first
    assert compilations == ["nothing"] * 2
    assert file.read_bytes() == whole


@needs_nvrtc
def test_two_processes_at_once(cache: Path) -> None:
    program = (
        "import hashlib; from tilefit.rnn.persistent.build import binary;"
        "print(hashlib.sha256(binary('nothing', {}, (9, 0))).hexdigest())"
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(printed) == 1
    assert len(list(cache.iterdir())) == 1  # and no temporary file is left


@needs_nvrtc
def test_a_refused_kernel_says_what_the_compiler_said(cache: Path) -> None:
    with pytest.raises(build.CompilationError, match=r"forward kernel.*sm_90(.|\n)*CELL.*undefined"):
        build.binary("forward", {}, (9, 0))
    assert not cache.exists()


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    build._nvrtc.cache_clear()
    build._compiler_version.cache_clear()
    with pytest.raises(build.CompilationError, match=r"cuda-bindings(.|\n)*pip install cuda-bindings"):
        build.binary("nothing", {}, (9, 0))
