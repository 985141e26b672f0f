"""How one persistent kernel is cut to size: thread blocks, warps, clusters, and where its weights stay.

The recurrent product of one step, ``rows x depth`` by ``depth x mini-batch``, is spread over the thread
blocks of a *group*: each block finishes ``units`` hidden units. A group holds one copy of the weights;
several groups split the mini-batch (and the directions of a bidirectional layer). ``common.cuh`` has the
kernel's side of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilefit.rnn.cells import PIECE_BYTES, Cell

#: Shared memory one block can have on compute capability 9.0, in bytes (CUDA C++ Programming Guide, table
#: "Technical Specifications per Compute Capability").
SHARED_BYTES = 227 * 1024

#: 32-bit registers of one multiprocessor, and the most one thread can have (same table).
REGISTERS = 65536
THREAD_REGISTERS = 255

#: Registers a thread needs besides weights, sums and pieces in flight: addresses, gates, loop state; more for
#: several tiles of a round that is not copied ahead, and for ragged rows or resets. Read off the compiler's
#: resource reports of this kernel's variants; of the variants of 449 random problems, 37 spill, by at most 60
#: bytes but for one (156).
OTHER_REGISTERS = 44
TILES_REGISTERS = 32
RAGGED_REGISTERS = 16

#: The kernel's own numbers for cells and element types.
CELLS = {"rnn_tanh": 0, "rnn_relu": 1, "lstm": 2, "gru": 3}
ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}

#: Hidden units a block may own. Even, as two 16-bit results are published in one word.
UNITS = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)

#: The default of :attr:`Variant.ahead`: when all partial sums have been handed over.
LATE = 2

#: The default of :attr:`Variant.pause`, about the median of the tuned ones; with fewer hidden units, as many.
PAUSE = 450

#: Blocks that may split the depth of the product, and the largest cluster that exchanges through mailboxes.
SPLITS = (1, 2, 4, 8)
LARGEST_CLUSTER = 16


class Problem(NamedTuple):
    """One layer's recurrence: what a kernel is cut for.

    ``hidden`` and ``batch`` are the sizes the kernel sees (``hidden`` padded to 16 bytes); ``element`` is
    ``"bfloat16"``, ``"float16"`` or ``"float32"``, which is multiplied as TF32, or with ``strict`` as three
    TF32 products that keep its precision; ``backward`` says which of the two kernels.
    """

    cell: Cell
    element: str
    hidden: int
    batch: int
    directions: int = 1
    backward: bool = False
    lengths: bool = False
    resets: bool = False
    strict: bool = False

    @property
    def rows_per_unit(self) -> int:
        """Rows of the product that belong to one hidden unit."""
        return 1 if self.backward else self.cell.gates

    @property
    def depth(self) -> int:
        """Elements of the vector that the step multiplies by."""
        return self.hidden * self.cell.gates if self.backward else self.hidden

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self.element == "float32" else 2

    @property
    def piece(self) -> int:
        """Elements of 16 bytes."""
        return PIECE_BYTES // self.element_bytes


class Variant(NamedTuple):
    """One way to cut a :class:`Problem`; the numbers become constants of the kernel.

    Attributes:
        units: Hidden units of a block.
        blocks: Thread blocks of a group.
        split: Blocks of a cluster that split the depth of the product.
        mail: Whether the group is one cluster, whose blocks write into each other's shared memory.
        tiles: Tiles of 8 mini-batch rows in one round.
        rounds: Rounds in which a group works through its rows.
        batch_groups: Groups that split the mini-batch, each with as many rows, but for the last. More of them
            than there are tiles of rows leave part of each tile empty, but each block reads less.
        warps: Warps of a block.
        held: Weight fragments (1 KiB a warp) in registers.
        window: 16-byte pieces each thread keeps in flight.
        ahead: With several rounds: when the next round's pieces are copied to shared memory while one is
            finished (``AHEAD`` in ``common.cuh``), which hides their latency and takes room that could hold
            weights; 0: they are not.
        pause: With one round: clocks between publishing and asking for what the other blocks publish.
    """

    units: int
    blocks: int
    split: int
    mail: bool
    tiles: int
    rounds: int
    batch_groups: int
    warps: int
    held: int
    window: int
    ahead: int
    pause: int

    @property
    def cluster(self) -> int:
        """Thread blocks of one cluster."""
        return self.blocks if self.mail else self.split

    def grid(self, problem: Problem) -> int:
        """Thread blocks of the launch."""
        return self.blocks * self.batch_groups * problem.directions

    def rows(self, problem: Problem) -> int:
        """Mini-batch rows of a group."""
        return -(-problem.batch // self.batch_groups)

    def row_tiles(self, problem: Problem) -> int:
        """Tiles of 16 rows that a block multiplies."""
        return -(-self.split * self.units * problem.rows_per_unit // 16)

    def slabs(self, problem: Problem) -> int:
        """Slabs of the depth (64 bytes) that one warp multiplies."""
        slabs = -(-problem.depth * problem.element_bytes // 64)
        return -(-slabs // (self.split * self.warps))

    def fragments(self, problem: Problem) -> int:
        """Weight fragments of one warp."""
        return self.row_tiles(problem) * self.slabs(problem)

    def chains(self, problem: Problem) -> int:
        """Sums that the products of one result are added to in turn; two where few would have to wait."""
        return 2 if self.row_tiles(problem) * self.tiles < 4 else 1

    def kept_bytes(self, problem: Problem) -> int:
        """Shared memory of a block's weights."""
        return self.warps * max(self.fragments(problem) - self.held, 0) * 1024

    def partial_bytes(self, problem: Problem) -> int:
        """Shared memory of one buffer of partial sums."""
        rows = self.units * problem.rows_per_unit
        stride = rows + (20 - rows % 16) % 16
        return self.split * self.warps * self.tiles * 8 * stride * 4

    def mail_bytes(self, problem: Problem) -> int:
        """Shared memory of one mailbox."""
        stride = -(-problem.depth * problem.element_bytes // 128) * 128 + 64
        return self.rounds * self.tiles * 8 * stride if self.mail else 0

    def copied_bytes(self, problem: Problem) -> int:
        """Shared memory of the pieces that are copied ahead."""
        return self.slabs(problem) * self.tiles * self.warps * 32 * 16 if self.ahead else 0

    def finished(self, problem: Problem) -> int:
        """Results of a round that one thread finishes."""
        return -(-self.units * self.tiles * 8 // (self.warps * 32))

    def needed_bytes(self, problem: Problem) -> int:
        """Shared memory of what the results of one step need, where that is not in registers."""
        if self.rounds == 1 and (problem.backward or not self.mail):
            return 0
        if problem.backward:
            each = {"lstm": 5 * problem.element_bytes + 8, "gru": 6 * problem.element_bytes}
            bytes_each = each.get(problem.cell.name, 2 * problem.element_bytes)
        else:
            bytes_each = problem.cell.gates * problem.element_bytes
        return self.rounds * self.finished(problem) * self.warps * 32 * bytes_each

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of one block."""
        doubled = self.partial_bytes(problem) + self.mail_bytes(problem) + self.needed_bytes(problem)
        return self.kept_bytes(problem) + 2 * doubled + self.copied_bytes(problem)

    def constants(self, problem: Problem, *, jitter: bool = False) -> dict[str, int]:
        """What the kernel's source is compiled with."""
        own = {name: getattr(problem, name) for name in ("hidden", "strict", "lengths", "resets")}
        own |= {name: getattr(self, name) for name in self._fields if name not in ("batch_groups", "pause")}
        own |= {"cell": CELLS[problem.cell.name], "element": ELEMENTS[problem.element], "jitter": jitter}
        return {name.upper(): int(value) for name, value in own.items()}


@dataclass(frozen=True)
class Capacity:
    """What of a GPU can run at once.

    Attributes:
        multiprocessors: How many it has.
        clusters: Clusters of 2, 3, ... thread blocks that can run at once, one block on each multiprocessor
            (`cuOccupancyMaxActiveClusters`); empty where the GPU has no clusters.
        shared_bytes: Shared memory one block can have.
    """

    multiprocessors: int
    clusters: tuple[int, ...] = ()
    shared_bytes: int = SHARED_BYTES

    def blocks(self, cluster: int) -> int:
        """Thread blocks that can run at once, in clusters of that size."""
        if cluster == 1:
            return self.multiprocessors
        return self.clusters[cluster - 2] * cluster if cluster - 2 < len(self.clusters) else 0


def variants(problem: Problem, capacity: Capacity) -> Iterator[Variant]:
    """Every variant whose weights fit on the chip."""
    most_groups = capacity.multiprocessors // problem.directions
    for batch_groups, rounds, tiles in _splits(problem.batch, most_groups):
        groups = batch_groups * problem.directions
        for units in UNITS:
            for split, mail in [(split, False) for split in SPLITS] + [(1, True)]:
                blocks = -(-problem.hidden // units)
                blocks = -(-blocks // split) * split
                cluster = blocks if mail else split
                if (blocks - split) * units >= problem.hidden or groups * blocks > capacity.blocks(cluster):
                    continue
                if split > 1 and units * problem.rows_per_unit % 8:
                    continue
                if mail and (not capacity.clusters or units % problem.piece or cluster > LARGEST_CLUSTER):
                    continue
                for warps in (4, 8, 16):
                    for ahead in (0, LATE)[: 2 if rounds > 1 and not mail else 1]:
                        pause = 0 if rounds > 1 or mail else min(problem.hidden, PAUSE)
                        numbers = units, blocks, split, mail, tiles, rounds, batch_groups, warps, 0, 0, ahead
                        fitted = _fit(problem, Variant(*numbers, pause), capacity.shared_bytes)
                        if fitted is not None:
                            yield fitted


def group_count(batch: int, groups: int) -> int:
    """Groups that split so many rows evenly, none of them empty: at most ``groups``."""
    return -(-batch // -(-batch // groups))


def _splits(batch: int, most_groups: int) -> Iterator[tuple[int, int, int]]:
    """Groups, rounds and tiles of a round that cover so many rows, none of them empty."""
    for groups in range(1, min(batch, most_groups) + 1):
        if groups != group_count(batch, groups):
            continue
        group_tiles = -(-batch // (groups * 8))
        for tiles in range(1, min(group_tiles, 8) + 1):
            rounds = -(-group_tiles // tiles)
            if rounds <= 8:
                yield groups, rounds, tiles


def _fit(problem: Problem, variant: Variant, shared_bytes: int) -> Variant | None:
    """The variant with as many weights in registers as there should be room for; None if they do not fit."""
    row_tiles, slabs = variant.row_tiles(problem), variant.slabs(problem)
    budget = min(THREAD_REGISTERS, REGISTERS // (variant.warps * 32))
    finished = variant.finished(problem) * variant.rounds
    pieces = slabs * variant.tiles
    sums = 4 * row_tiles * variant.tiles * variant.chains(problem)
    each = 11 if variant.rounds == 1 else 8
    others = OTHER_REGISTERS + each * finished
    if variant.tiles > 1 and not variant.ahead:
        others += TILES_REGISTERS
    if problem.lengths or problem.resets:
        others += RAGGED_REGISTERS
    # What is copied ahead comes from shared memory, whose latency few loads hide.
    for window in (8, 4) if variant.tiles * row_tiles <= 8 and not variant.ahead else (4,):
        window = min(pieces, window)
        flight = 8 * window if pieces > window else 4 * window
        free = budget - others - sums - flight
        if free < 0:
            continue
        fitted = variant._replace(held=min(free // 8, variant.fragments(problem)), window=window)
        if fitted.shared_bytes(problem) <= shared_bytes:
            return fitted
    return None


#: Microseconds for one of each of :func:`work`, fitted by benchmarks/tune_persistent.py to the variants it
#: measured on an H200. Of hidden sizes left out of the fit, the variant predicted to be fastest took 4 %
#: longer than the fastest one measured (geometric mean), 42 % at most.
MICROSECONDS = {
    "through_l2": 0.405,
    "through_mail": 0.316,
    "readers": 0.0049,
    "read_kib": 0.0145,
    "not_ahead": 0.198,
    "mail_kib": 0.0472,
    "split": 0.619,
    "product_us": 1.16,
    "kept": 0.00911,
    "sums_read": 0.0107,
    "published": 0.0736,
}


def work(problem: Problem, variant: Variant) -> dict[str, float]:
    """What one step does: the exchanges, and for each round what it reads, multiplies, adds and publishes.

    With several rounds an exchange goes on while the other rounds are worked on; what a round reads it waits
    for, where it was not copied ahead. What one block reads counts, not what all read. ``product_us`` are
    microseconds at the rates of an H200 at 1.98 GHz: 8 clocks of a Tensor Core for each product of
    16 x 8 x 16, 33 until the next one may use its result. ``kept`` are the weight fragments that a warp reads
    from shared memory.
    """
    clocks = 1980.0
    slabs, row_tiles, rounds = variant.slabs(problem), variant.row_tiles(problem), variant.rounds
    read_kib = variant.rows(problem) * problem.depth * problem.element_bytes / variant.split / 1024
    products = slabs * 2 * row_tiles * variant.tiles * (3 if problem.strict else 1)
    product = max(8.0 * products * variant.warps / 4, 33.0 * slabs * 2 / variant.chains(problem))
    finished = variant.finished(problem)
    published = problem.cell.gradients if problem.backward else 1
    return {
        "through_l2": 0.0 if variant.mail else 1 / rounds,
        "through_mail": float(variant.mail),
        "readers": 0.0 if variant.mail else variant.blocks / rounds,
        "read_kib": 0.0 if variant.mail else read_kib,
        "not_ahead": rounds * (rounds > 1 and not variant.ahead),
        "mail_kib": read_kib if variant.mail else 0.0,
        "split": rounds * (variant.split > 1),
        "product_us": rounds * product / clocks,
        "kept": rounds * max(variant.fragments(problem) - variant.held, 0),
        "sums_read": rounds * finished * variant.split * variant.warps * problem.rows_per_unit,
        "published": rounds * finished * published,
    }


def predicted_s(problem: Problem, variant: Variant) -> float:
    """Seconds a step may take: good enough to order variants."""
    return sum(MICROSECONDS[name] * count for name, count in work(problem, variant).items()) * 1e-6
