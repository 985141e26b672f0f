"""How one persistent kernel is cut to size: thread blocks, warps, clusters, and where its weights stay.

The recurrent product of one step, ``rows x depth`` by ``depth x mini-batch``, is spread over the thread
blocks of a *group*: each block finishes ``units`` hidden units. A group holds one copy of the weights;
several groups split the mini-batch (and the directions of a bidirectional layer). ``common.cuh`` has the
kernel's side of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefit.rnn.cells import Cell

#: Shared memory one block can have on compute capability 9.0, in bytes (CUDA C++ Programming Guide, table
#: "Technical Specifications per Compute Capability").
SHARED_BYTES = 227 * 1024

#: 32-bit registers of one multiprocessor, and the most one thread can have (same table).
REGISTERS = 65536
THREAD_REGISTERS = 255

#: Registers a thread needs besides weights, sums and pieces in flight: addresses, gates, loop state. Read off
#: the compiler's resource reports of this kernel's variants.
OTHER_REGISTERS = 60

#: The kernel's own numbers for cells and element types.
CELLS = {"rnn_tanh": 0, "rnn_relu": 1, "lstm": 2, "gru": 3}
ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}

#: Hidden units a block may own. Even, as two 16-bit results are published in one word.
UNITS = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)

#: Blocks that may split the depth of the product, and the largest cluster that exchanges through mailboxes.
SPLITS = (1, 2, 4, 8)
LARGEST_CLUSTER = 16


@dataclass(frozen=True)
class Problem:
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
        return 4 if self.element == "float32" else 2

    @property
    def piece(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.element_bytes


@dataclass(frozen=True)
class Variant:
    """One way to cut a :class:`Problem`; the numbers become constants of the kernel.

    Attributes:
        units: Hidden units of a block.
        blocks: Thread blocks of a group.
        split: Blocks of a cluster that split the depth of the product.
        mail: Whether the group is one cluster, whose blocks write into each other's shared memory.
        tiles: Tiles of 8 mini-batch rows in one round.
        rounds: Rounds in which a group works through its rows.
        batch_groups: Groups that split the mini-batch.
        warps: Warps of a block.
        held: Weight fragments (1 KiB a warp) in registers.
        window: 16-byte pieces each thread keeps in flight.
        ahead: With several rounds: whether each asks for the first pieces of the next before it is finished,
            which hides their latency and takes registers that could hold weights.
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
    ahead: bool

    @property
    def cluster(self) -> int:
        """Thread blocks of one cluster."""
        return self.blocks if self.mail else self.split

    def grid(self, problem: Problem) -> int:
        """Thread blocks of the launch."""
        return self.blocks * self.batch_groups * problem.directions

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

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of one block."""
        return self.kept_bytes(problem) + 2 * (self.partial_bytes(problem) + self.mail_bytes(problem))

    def constants(self, problem: Problem, *, jitter: bool = False) -> dict[str, int]:
        """What the kernel's source is compiled with."""
        return {
            "CELL": CELLS[problem.cell.name],
            "ELEMENT": ELEMENTS[problem.element],
            "HIDDEN": problem.hidden,
            "UNITS": self.units,
            "BLOCKS": self.blocks,
            "SPLIT": self.split,
            "MAIL": int(self.mail),
            "TILES": self.tiles,
            "ROUNDS": self.rounds,
            "WARPS": self.warps,
            "HELD": self.held,
            "WINDOW": self.window,
            "AHEAD": int(self.ahead),
            "STRICT": int(problem.strict),
            "LENGTHS": int(problem.lengths),
            "RESETS": int(problem.resets),
            "JITTER": int(jitter),
        }


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
    for batch_groups, rounds, tiles in _splits(-(-problem.batch // 8)):
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
                    for ahead in (False, True)[: min(rounds, 2)]:
                        fitted = _fit(
                            problem,
                            Variant(
                                units, blocks, split, mail, tiles, rounds, batch_groups, warps, 0, 0, ahead
                            ),
                            capacity.shared_bytes,
                        )
                        if fitted is not None:
                            yield fitted


def _splits(batch_tiles: int) -> list[tuple[int, int, int]]:
    """Groups, rounds and tiles of a round that cover so many tiles of 8 rows, none of them empty."""
    found = set()
    for tiles in range(1, min(batch_tiles, 8) + 1):
        parts = -(-batch_tiles // tiles)
        for rounds in range(1, min(parts, 8) + 1):
            groups = -(-parts // rounds)
            if (groups - 1) * rounds * tiles < batch_tiles and groups * (rounds - 1) * tiles < batch_tiles:
                found.add((groups, rounds, tiles))
    return sorted(found)


def _fit(problem: Problem, variant: Variant, shared_bytes: int) -> Variant | None:
    """The variant with as many weights in registers as there is surely room for; None if they do not fit."""
    row_tiles, slabs = variant.row_tiles(problem), variant.slabs(problem)
    budget = min(THREAD_REGISTERS, REGISTERS // (variant.warps * 32))
    finished = -(-variant.units * variant.tiles * 8 // (variant.warps * 32)) * variant.rounds
    pieces = slabs * variant.tiles
    window = min(pieces, 8 if variant.tiles * row_tiles <= 8 else 4)
    flight = 8 * window if pieces > window else 4 * window
    free = budget - OTHER_REGISTERS - 4 * row_tiles * variant.tiles - flight - 11 * finished
    if free < 0:
        return None
    most = min(free // 8, variant.fragments(problem))
    # Asked for ahead, the pieces of the next round come while the sums of one are still needed. Where shared
    # memory has no room for more weights, some of these registers are spilled.
    ahead = 4 * window if variant.ahead else 0
    for held in range(min(max(free - ahead, 0) // 8, most), most + 1):
        fitted = replace(variant, held=held, window=window)
        if fitted.shared_bytes(problem) <= shared_bytes:
            return fitted
    return None


#: Microseconds for one of each of :func:`work`, fitted by benchmarks/tune_persistent.py to the variants it
#: measured on an H200. Of hidden sizes left out of the fit, the variant predicted to be fastest took 4 %
#: longer than the fastest one measured (geometric mean), 27 % at most.
MICROSECONDS = {
    "through_l2": 0.601,
    "through_mail": 0.434,
    "readers": 0.0081,
    "l2_mb": 0.133,
    "mail_kib": 0.0386,
    "split": 0.302,
    "further_split": 0.0062,
    "split_ahead": 0.244,
    "product_us": 1.49,
    "kept": 0.0189,
    "sums_read": 0.0144,
    "published": 0.0882,
    "posted": 0.0024,
}


def work(problem: Problem, variant: Variant) -> dict[str, float]:
    """What one step does: the exchanges, and for each round what it reads, multiplies, adds and publishes.

    With several rounds an exchange goes on while the other rounds are worked on. ``product_us`` are
    microseconds at the rates of an H200 at 1.98 GHz: 8 clocks of a Tensor Core for each product of
    16 x 8 x 16, 33 until the next one may use its result. ``kept`` are the weight fragments that a warp reads
    from shared memory. Asking ahead was not found to save time on average: it costs the fragments whose
    registers it takes, and more where blocks split the depth.
    """
    clocks = 1980.0
    slabs, row_tiles, rounds = variant.slabs(problem), variant.row_tiles(problem), variant.rounds
    read_kib = rounds * variant.tiles * 8 * problem.depth * problem.element_bytes / variant.split / 1024
    products = slabs * 2 * row_tiles * variant.tiles * (3 if problem.strict else 1)
    product = max(8.0 * products * variant.warps / 4, 33.0 * slabs * 2)
    finished = -(-variant.units * variant.tiles * 8 // (variant.warps * 32))
    published = problem.cell.gradients if problem.backward else 1
    return {
        "through_l2": 0.0 if variant.mail else 1 / rounds,
        "through_mail": float(variant.mail),
        "readers": 0.0 if variant.mail else variant.blocks / rounds,
        "l2_mb": 0.0 if variant.mail else variant.grid(problem) * read_kib * 1024 / 1e6,
        "mail_kib": read_kib if variant.mail else 0.0,
        "split": rounds * (variant.split > 1),
        "further_split": rounds * (variant.split - 1),
        "split_ahead": rounds * (variant.split > 1 and variant.ahead),
        "product_us": rounds * product / clocks,
        "kept": rounds * max(variant.fragments(problem) - variant.held, 0),
        "sums_read": rounds * finished * variant.split * variant.warps * problem.rows_per_unit,
        "published": rounds * finished * published,
        "posted": rounds * finished * published * variant.blocks if variant.mail else 0.0,
    }


def predicted_s(problem: Problem, variant: Variant) -> float:
    """Seconds a step may take: good enough to order variants."""
    return sum(MICROSECONDS[name] * count for name, count in work(problem, variant).items()) * 1e-6
