"""Which way of computing a product is the fastest on this GPU, and what PyTorch's default loses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tilefit.errors import TilefitError, UsageError
from tilefit.measure import timer
from tilefit.measure.cublaslt import WORKSPACE_BYTES, Matmul
from tilefit.measure.microbenchmarks import gemm_operands, set_tf32
from tilefit.measure.pool import TORCH_DTYPES, Pool
from tilefit.ops import Gemm

#: What PyTorch runs when nobody chooses.
DEFAULT = "torch.mm"
#: Relative Frobenius distance from the product in fp32 that a result may have: a few times what rounding it
#: to its type costs.
_TOLERANCE = {"bf16": 1e-2, "fp16": 5e-3, "tf32": 5e-3, "fp32": 1e-4}
#: Algorithms asked of cuBLASLt, and ways that are timed a second time, beside the default.
ALGORITHMS = 8
FINALISTS = 3
#: A rough replay takes about this long; there are so many.
_ROUGH_S = 0.5e-3
_ROUGH_REPLAYS = 3
_MOST_CALLS = 50

#: From a, b and out to a call that does it once.
Build = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], timer.Call]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute ``out[m, n] = a[m, k] @ b[k, n]``.

    Attributes:
        name: What to call it.
        build: Makes the call.
    """

    name: str
    build: Build


@dataclass(frozen=True, slots=True)
class Choice:
    """What the ways of computing a product took.

    Attributes:
        gemm: The product.
        rough_s: Time of every way that gave the right result, from a few replays.
        final: The default and the fastest few, timed again and in turn.
        errors: Why the others do not count.
    """

    gemm: Gemm
    rough_s: dict[str, float]
    final: dict[str, timer.Timing]
    errors: dict[str, str]

    @property
    def best(self) -> str:
        """The fastest of the final round; the default where nothing is faster."""
        return min(self.final, key=lambda name: (self.final[name].median_s, name != DEFAULT))

    @property
    def regret(self) -> float:
        """Time of the default over that of the best.

        The best is chosen among those that the first round let through, and both times are of the second: a
        way that was lucky in the first is found out.
        """
        return self.final[DEFAULT].median_s / self.final[self.best].median_s

    @property
    def is_noise(self) -> bool:
        """Whether the difference is within the spread of the two times."""
        return self.final[self.best].high_s >= self.final[DEFAULT].low_s


def choose(
    gemm: Gemm, pool: Pool, device: timer.Device, ways: Sequence[Way] | None = None, *, replays: int = 15
) -> Choice:
    """Time the ways of computing a product: all of them roughly, then the fastest and the default in turn.

    Operands are cold in L2.

    Args:
        gemm: One product (no batch) of bf16, fp16, tf32 or fp32.
        pool: Operands come from here.
        device: Runs and times the calls.
        ways: What to compare, the default among it; everything there is for the pool's device if None.
        replays: Replays of the second round.

    Raises:
        UsageError: the product is of another kind.
        TilefitError: the default itself fails.
    """
    if gemm.batch > 1 or gemm.dtype not in _TOLERANCE:
        raise UsageError(
            f"no choice for {gemm.shape} {gemm.dtype}",
            hint=f"Choose for one product (batch 1) of {', '.join(_TOLERANCE)}.",
        )
    a, b = gemm_operands(gemm, pool)
    set_tf32(Gemm(gemm.m, gemm.n, gemm.k, "fp32"))
    reference = a.float() @ b.float()
    set_tf32(gemm)
    ways = list(every_way(gemm, pool.device)) if ways is None else ways
    factories = {way.name: partial(_call, way, gemm, pool) for way in ways}
    rough_s: dict[str, float] = {}
    errors: dict[str, str] = {}
    # The default first: its time says how often to repeat the others.
    for way in sorted(ways, key=lambda way: way.name != DEFAULT):
        calls = max(1, min(_MOST_CALLS, round(_ROUGH_S / rough_s[DEFAULT]))) if rough_s else 1
        try:
            if error := _error(way, gemm, a, b, reference):
                errors[way.name] = error
            else:
                rough_s[way.name] = _rough_s(factories[way.name], device, calls)
        except _failures() as failure:
            # A product that a way cannot do is no error of ours; a GPU that no longer answers is.
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            errors[way.name] = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        if DEFAULT in errors:
            raise TilefitError(f"the default failed: {errors[DEFAULT]}", where=f"{gemm.shape} {gemm.layout}")
    others = sorted((name for name in rough_s if name != DEFAULT), key=lambda name: rough_s[name])
    chosen = {name: factories[name] for name in (DEFAULT, *others[:FINALISTS])}
    return Choice(gemm, rough_s, timer.race(chosen, device, replays=replays), errors)


def every_way(gemm: Gemm, place: torch.device) -> Iterator[Way]:
    """The ways there are on a device: cuBLAS, cuBLASLt's proposals, Triton; on the CPU the default alone."""
    yield Way(DEFAULT, lambda a, b, out: lambda: torch.mm(a, b, out=out))
    if place.type != "cuda":
        return
    for library in ("cublas", "cublaslt"):
        yield Way(f"{DEFAULT}, {library}", partial(_with_library, library))
    try:
        proposed = Matmul(gemm, ALGORITHMS, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=place))
    except TilefitError as error:
        yield Way("cuBLASLt heuristics", partial(_refused, error))
    else:
        for index in range(proposed.algorithms):
            yield Way(f"cuBLASLt heuristic {index + 1}", partial(proposed.call, index))
    if gemm.dtype in ("bf16", "fp16") and importlib.util.find_spec("triton"):
        from tilefit.measure import triton_matmul

        for tile in triton_matmul.configurations(gemm.m):
            yield Way(f"Triton {triton_matmul.name(tile)}", _built(triton_matmul.matmul, tile))
        if gemm.m <= triton_matmul.SPLIT_ROWS:
            split_k = triton_matmul.SplitK(torch.cuda.get_device_properties(place).multi_processor_count)
            for split in triton_matmul.SPLITS:
                yield Way(f"Triton split-K {split[0]}x{split[1]}", _built(split_k, split))


def _built(run: Callable[..., None], configuration: object) -> Build:
    """A way that calls ``run(a, b, out, configuration)``."""
    return lambda a, b, out: lambda: run(a, b, out, configuration)


def _refused(error: TilefitError, *operands: torch.Tensor) -> timer.Call:
    """A way that is not there, to be listed with the reason."""
    raise error


def _with_library(library: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> timer.Call:
    def call() -> None:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            torch.mm(a, b, out=out)
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return call


def _call(way: Way, gemm: Gemm, pool: Pool) -> timer.Call:
    """The way on fresh operands."""
    return way.build(*gemm_operands(gemm, pool), pool.blank((gemm.m, gemm.n), TORCH_DTYPES[gemm.dtype]))


def _rough_s(factory: timer.Factory, device: timer.Device, calls: int) -> float:
    """The time of a call, from the fastest of a few short replays."""
    run = device.prepare([factory] * calls)
    run()
    return min(run() for _ in range(_ROUGH_REPLAYS)) / calls


def _error(way: Way, gemm: Gemm, a: torch.Tensor, b: torch.Tensor, reference: torch.Tensor) -> str:
    """What is wrong with the result of a way; empty where nothing is."""
    out = torch.full((gemm.m, gemm.n), float("nan"), dtype=TORCH_DTYPES[gemm.dtype], device=a.device)
    way.build(a, b, out)()
    distance = float((out.float() - reference).norm() / reference.norm())
    return "" if distance <= _TOLERANCE[gemm.dtype] else f"wrong result: relative distance {distance:.2g}"


def _failures() -> tuple[type[Exception], ...]:
    """What a way may raise for a product that it cannot do."""
    if importlib.util.find_spec("triton") is None:
        return RuntimeError, TilefitError
    from triton.errors import TritonError

    return RuntimeError, TilefitError, TritonError
