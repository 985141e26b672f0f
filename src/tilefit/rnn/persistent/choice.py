"""Which variant runs: the measured one where the shipped table has it, else the one predicted fastest."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from tilefit.rnn.persistent.variant import Capacity, Problem, Variant, group_count, predicted_s, variants


@cache
def chosen(problem: Problem, capacity: Capacity) -> Variant | None:
    """The variant for a problem, or None where its weights do not fit on chip.

    The table was measured for bfloat16 and full mini-batch tiles; other 16-bit types, mini-batches of the
    same number of tiles (in no more groups than they have rows), ragged rows and resets run the same variant.
    Ragged rows and resets take registers too: for them as many weights are held there, and pieces in flight,
    as there should be room for.
    """
    candidates = list(variants(problem, capacity))
    if not candidates:
        return None
    measured = _measured().get(key(problem))
    if measured is not None:
        groups, *cut, ahead, held, window, pause = measured
        cut = [group_count(problem.batch, groups), *cut]
        for candidate in candidates:
            if _cut(candidate) == tuple(cut) and bool(candidate.ahead) == bool(ahead):
                if not problem.lengths and not problem.resets:
                    candidate = candidate._replace(held=held, window=window)
                return candidate._replace(ahead=ahead, pause=pause)
    return min(candidates, key=lambda variant: predicted_s(problem, variant))


def key(problem: Problem) -> str:
    """The table's name of a problem. A ReLU RNN goes by the name of a tanh RNN, which does the same work."""
    cell = "rnn_tanh" if problem.cell.name == "rnn_relu" else problem.cell.name
    kernel = "backward" if problem.backward else "forward"
    width = "32" if problem.element == "float32" else "16"
    tiles = -(-problem.batch // 8)
    return f"{cell}/{kernel}/{width}/{problem.hidden}/{tiles}/{problem.directions}"


def entry(variant: Variant) -> tuple[int, ...]:
    """What the table keeps of a variant; the rest follows from it."""
    return (*_cut(variant), variant.ahead, variant.held, variant.window, variant.pause)


def _cut(variant: Variant) -> tuple[int, ...]:
    names = ("batch_groups", "units", "split", "mail", "tiles", "rounds", "warps")
    return tuple(int(getattr(variant, name)) for name in names)


@cache
def _measured() -> dict[str, tuple[int, ...]]:
    table = files("tilefit.rnn.persistent").joinpath("h200.json")
    if not table.is_file():
        return {}
    return {name: tuple(cut) for name, cut in json.loads(table.read_text("utf-8"))["variants"].items()}
