"""What one GPU took, on another of its architecture.

Both run the same kernels, so that what a donor was measured to take is told apart by what limits it: the part
that its memory accounts for takes as long as the other's memory needs, and the rest, which waits for the
multiprocessors, as long as theirs at their clock. The parts overlap as they do in a product, after what a
kernel takes in any case.
"""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.constants import clock_share, constants
from tilefit.cost.estimate import TRANSFERRED, Estimate, bound
from tilefit.cost.memory import floor_s, moved_s
from tilefit.gpus import Gpu
from tilefit.ops import Op, Streaming

#: At most; what the donor took decides.
_SORT_PASSES = 10
#: By how much more than the donor's own a transferred estimate may be off, as a factor minus one, and one of
#: an operation that streams memory: so 80 % of these on one H100 are inside, and 79 % on another.
_SPREAD, _STREAMED = 0.02, 0.065


def transferred(op: Op, theirs: Estimate, donor: Gpu, gpu: Gpu) -> Estimate:
    """The estimate of an operation on a GPU, from the donor's."""
    overlap = constants(gpu).overlap
    # A sort reads and writes its keys several times over.
    passes = _SORT_PASSES if isinstance(op, Streaming) and op.role == "sort" else 1
    before_s, after_s = (passes * moved_s(op.moved_bytes, each, constants(each)) for each in (donor, gpu))
    clocks = (each.sms * each.boost_clock_hz * clock_share(each) for each in (donor, gpu))
    units = next(clocks) / next(clocks)
    fixed_s = min(constants(donor).kernel_s(donor), theirs.time_s)
    busy_s = theirs.time_s - fixed_s
    rest_s = units * (busy_s**overlap - min(before_s, busy_s) ** overlap) ** (1 / overlap)
    floor = floor_s(op, gpu)
    time_s = max(units * fixed_s + (rest_s**overlap + after_s**overlap) ** (1 / overlap), floor)
    scale, spread = time_s / theirs.time_s, _STREAMED if isinstance(op, Streaming) else _SPREAD
    math_s, memory_s = theirs.math_s * units, after_s
    return replace(
        theirs,
        time_s=time_s,
        low_s=max(floor, theirs.low_s * scale / (1 + spread)),
        high_s=theirs.high_s * scale * (1 + spread),
        bound=bound(math_s, memory_s, time_s),
        math_s=math_s,
        memory_s=memory_s,
        provenance=TRANSFERRED,
    )
