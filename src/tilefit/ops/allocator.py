"""PyTorch's caching allocator, replayed: what it reserves on the GPU for what is asked of it."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from tilefit.ops.timeline import Timeline

# The constants of c10/cuda/CUDACachingAllocator.cpp.
#: All sizes are multiples of it.
_ROUND = 512
#: Up to it, requests are served from segments of ``_SMALL_BUFFER``.
_SMALL = 1 << 20
_SMALL_BUFFER = 2 << 20
#: From it on, a segment is as large as the request, rounded to ``_ROUND_LARGE``; below, ``_LARGE_BUFFER``.
_LARGE = 10 << 20
_LARGE_BUFFER = 20 << 20
_ROUND_LARGE = 2 << 20


class _Block:
    """A part of a segment, and its neighbours in it."""

    __slots__ = ("after", "before", "is_free", "number", "size", "small")

    def __init__(self, number: int, size: int, small: bool) -> None:
        self.number, self.size, self.small = number, size, small
        self.is_free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class Allocator:
    """The allocator of one stream, with PyTorch's default settings.

    Attributes:
        allocated_bytes: Of blocks in use; ``reserved_bytes``: of the segments that blocks are cut from, which
            never shrink here.
        peak_allocated_bytes: The most that was in use at once.
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = 0
        self._numbers = count()
        # By pool: size and number of each free block, in order; the smallest that will do is taken.
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._blocks: dict[int, _Block] = {}
        self._used: dict[int, _Block] = {}

    def make(self, key: int, size_bytes: int) -> None:
        """Serve a request, which :meth:`free` knows by its key."""
        if not size_bytes:
            return
        size = -(-size_bytes // _ROUND) * _ROUND
        small = size <= _SMALL
        free = self._free[small]
        index = bisect_left(free, (size, -1))
        block = self._blocks[free.pop(index)[1]] if index < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            self._cut(block, size)
        block.is_free = False
        self._used[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: int) -> None:
        """Take back what was served, and join it with what is free beside it."""
        block = self._used.pop(key, None)
        if block is None:
            return  # it had no bytes
        self.allocated_bytes -= block.size
        if block.after is not None and block.after.is_free:
            self._join(block, block.after, block.after)
        if block.before is not None and block.before.is_free:
            self._join(block.before, block, block.before)
            block = block.before
        block.is_free = True
        insort(self._free[block.small], (block.size, block.number))

    def _block(self, size: int, small: bool) -> _Block:
        number = next(self._numbers)
        block = self._blocks[number] = _Block(number, size, small)
        return block

    def _segment(self, size: int, small: bool) -> _Block:
        whole = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if size < _LARGE:
            whole = _SMALL_BUFFER if small else _LARGE_BUFFER
        self.reserved_bytes += whole
        return self._block(whole, small)

    def _cut(self, block: _Block, size: int) -> None:
        rest = self._block(block.size - size, block.small)
        block.size = size
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        rest.is_free = True
        insort(self._free[rest.small], (rest.size, rest.number))

    def _join(self, first: _Block, second: _Block, listed: _Block) -> None:
        """Make one block of two; ``listed`` is the free one."""
        free = self._free[listed.small]
        free.pop(bisect_left(free, (listed.size, listed.number)))
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first


def replayed(timeline: Timeline) -> Allocator:
    """The allocator after a step."""
    allocator = Allocator()
    for number, _, size in timeline.changes():
        if size > 0:
            allocator.make(number, size)
        elif size:
            allocator.free(number)
    return allocator
