"""Plans of a training on many GPUs, as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tilefit import console, units
from tilefit.cost.links import Fabric
from tilefit.formats import renders
from tilefit.gpus import Gpu
from tilefit.parallel.choices import TrainingSplit
from tilefit.parallel.launchers import lacks, settings
from tilefit.parallel.memory_choices import MemoryChoice
from tilefit.parallel.offers import Offer
from tilefit.parallel.planning import LEAST_SCALING, SLOW_HOST, UNEVEN, Priced

#: Splits of the table, unless all are asked for.
_ROWS = 8
#: The best on a slow host over the best, from which on it is said.
_SLOWER = 1.02
#: Share of a step that waits for its host from which on ways to launch less are told. A choice.
_LIMITED = 0.1
#: What a step consists of, in the words of the explanation.
_PARTS = {
    "compute_s": "computation",
    "recompute_s": "recomputation",
    "tensor_s": "communication within layers (of tensor-, context- and expert-parallel ranks)",
    "data_s": "communication of gradients, parameters and activations that nothing hides",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "the optimizer",
    "launch_s": "waiting for the host to launch",
    "host_s": "copies to and from the host that nothing hides",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The best splits over one kind of GPU.

    Attributes:
        fabric: The GPU, its machines and what joins them.
        ranked: Splits over all GPUs, best first.
        frontier: The best over fewer GPUs, by their number.
        price: Of a GPU for an hour; None where unknown.
        peak_flop_per_s: Of the GPU, for the utilization.
        refused: Why there is no split; empty where there are.
        slow_host_s: What the best takes on a slow host.
        uneven_s: What it takes where a rank's experts are given more than their share; 0: none are shared.
        offers: What ways to hold less would give, which nobody has asked for.
    """

    fabric: Fabric
    ranked: tuple[Priced, ...]
    frontier: tuple[tuple[int, Priced], ...]
    price: float | None
    peak_flop_per_s: float
    refused: str = ""
    slow_host_s: float = 0.0
    uneven_s: float = 0.0
    offers: tuple[Offer, ...] = ()

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self.fabric.gpu


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How to share a training over GPUs.

    Attributes:
        target: What is trained.
        gpus: How many GPUs.
        batch: Samples of a step.
        tokens: Of a sample; 0 where its inputs are none.
        parameters: Of the model.
        flop: Of the products of one sample.
        choices: One for each kind of GPU.
        epoch: Samples of an epoch; 0 where unknown.
        notes: What a reader must know.
        explain: The text says why the runner-up lost.
        launch: The text has the settings of frameworks whose names begin so; ``all`` for every one.
    """

    target: str
    gpus: int
    batch: int
    tokens: int
    parameters: int
    flop: float
    choices: tuple[Choice, ...]
    epoch: int = 0
    notes: tuple[str, ...] = ()
    explain: bool = False
    launch: str = ""

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.tokens else "samples"

    def rate(self, priced: Priced) -> float:
        """Tokens, or samples, per second."""
        return self.batch * (self.tokens or 1) / priced.time.time_s

    def utilization(self, choice: Choice, priced: Priced) -> float:
        """Model FLOP over the peak (MFU)."""
        return self.batch * self.flop / (priced.time.time_s * priced.split.gpus * choice.peak_flop_per_s)

    def cost(self, choice: Choice, priced: Priced) -> float | None:
        """Of an epoch where its size is known, else of a billion tokens or a million samples."""
        if choice.price is None:
            return None
        samples = self.epoch or (1e9 / self.tokens if self.tokens else 1e6)
        hours = samples / self.batch * priced.time.time_s / 3600
        return hours * priced.split.gpus * choice.price

    @property
    def cost_unit(self) -> str:
        """What a cost is of."""
        return "epoch" if self.epoch else "G tokens" if self.tokens else "M samples"


@renders(SplitPlan, "json")
def as_json(plan: SplitPlan) -> str:
    """JSON: times in seconds, bytes, rates per second."""
    data = {
        "schema_version": 1,
        "target": plan.target,
        "gpus": plan.gpus,
        "global_batch": plan.batch,
        "tokens_per_sample": plan.tokens,
        "parameters": plan.parameters,
        "unit": plan.unit,
        "cost_of": plan.cost_unit,
        "notes": plan.notes,
        "choices": [
            {
                "gpu": choice.gpu.name,
                "gpus_per_machine": choice.fabric.per_machine,
                "network": choice.fabric.network.name if choice.fabric.network else None,
                "price_per_gpu_hour": choice.price,
                "refused": choice.refused,
                "slow_host": {"times_as_slow": SLOW_HOST, "time_s": choice.slow_host_s},
                "memory_choices": [
                    {
                        "choices": [each.name for each in offer.choices],
                        "level": offer.level,
                        "host_bytes": offer.host_bytes,
                        "fits": offer.priced.fits,
                        **_row(plan, choice, offer.priced),
                    }
                    for offer in choice.offers
                ],
                "uneven_experts": {"times_the_share": UNEVEN, "time_s": choice.uneven_s or None},
                "splits": [_row(plan, choice, priced) for priced in choice.ranked],
                "frontier": [_row(plan, choice, priced) for _, priced in choice.frontier],
                "settings": {name: text for name, (_, text) in _settings(plan, choice).items()},
                "settings_for": {name: str(split) for name, (split, _) in _settings(plan, choice).items()},
            }
            for choice in plan.choices
        ],
    }
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _settings(plan: SplitPlan, choice: Choice) -> dict[str, tuple[TrainingSplit, str]]:
    ranked = ((each.split, each.layers) for each in choice.ranked)
    return settings(ranked, choice.fabric.per_machine, plan.tokens)


def _row(plan: SplitPlan, choice: Choice, priced: Priced) -> dict[str, Any]:
    split = priced.split
    return {
        "split": str(split),
        **asdict(split),
        "micro_batches": split.parts,
        "layers": priced.layers,
        "gpus": split.gpus,
        **asdict(priced.time),
        "exposed_s": priced.time.exposed_s,
        "rate_per_s": plan.rate(priced),
        "mfu": plan.utilization(choice, priced),
        "memory_bytes": {**asdict(priced.memory), "total": priced.memory.total},
        "cost": plan.cost(choice, priced),
    }


@renders(SplitPlan, "text")
def as_text(plan: SplitPlan, *, width: int = 80, show_all: bool = False) -> RenderableType:
    """The best splits, the frontier, what the best consists of, and its settings."""
    size = f"{units.count(plan.parameters)} parameters"
    batch = f"global batch {plan.batch}" + (f" of {plan.tokens} tokens" if plan.tokens else "")
    parts: list[RenderableType] = [
        Text.assemble((plan.target, "bold"), f", {size}, {batch}, {units.counted(plan.gpus, 'GPU')}"),
        Text(),
    ]
    for choice in plan.choices:
        parts += _choice(plan, choice, show_all=show_all)
    if len(plan.choices) > 1:
        parts += _compared(plan)
    return Group(*parts, *(Text(note, "dim") for note in plan.notes))


def _choice(plan: SplitPlan, choice: Choice, *, show_all: bool) -> Iterator[RenderableType]:
    net = choice.fabric.network
    joined = f", machines of {choice.fabric.per_machine} by {net.name}" if net else ""
    yield Text.assemble((choice.gpu.title, "bold"), joined)
    if not choice.ranked:
        yield from (Text(choice.refused), Text(), *_offered(choice))
        return
    rows = choice.ranked if show_all else choice.ranked[:_ROWS]
    yield _table(plan, choice, [("", each) for each in rows])
    yield Text()
    yield Text(_made_of(choice.ranked[0]))
    best_s = choice.ranked[0].time.time_s
    if choice.slow_host_s > _SLOWER * best_s:
        slower = units.share(choice.slow_host_s / best_s - 1)
        fewer = ", and torch.compile or larger micro-batches less"
        fewer *= choice.ranked[0].time.launch_s > _LIMITED * best_s
        yield Text(
            f"On a host that takes {SLOW_HOST:g} times as long to launch it takes {slower} longer{fewer}."
        )
    if choice.uneven_s:
        slower = units.share(choice.uneven_s / best_s - 1)
        yield Text(
            "Every rank's experts are taken to be given as many tokens: "
            f"if one rank's were given {UNEVEN:g} times their share, it would take {slower} longer."
        )
    if plan.explain:
        yield from map(Text, explained(choice.ranked))
    yield Text()
    yield from _offered(choice)
    if len(choice.frontier) > 1:
        yield Text("Strong scaling: the best split over fewer GPUs", "bold")
        yield _table(plan, choice, [(str(count), each) for count, each in choice.frontier])
        yield from (Text(said) for said in (scaling(choice), cheapest(plan, choice)) if said)
        yield Text()
    if plan.launch:
        every = _settings(plan, choice)
        chosen = [
            name for name in every if plan.launch == "all" or name.lower().startswith(plan.launch.lower())
        ]
        for name in chosen:
            split, text = every[name]
            missing = ", ".join(lacks(name, choice.ranked[0].split, plan.tokens))
            why = f" (for the best it lacks {missing})" if missing else ""
            yield Text.assemble((name, "bold"), f", {split}{why}:")
            # Settings are copied: a line stays one line.
            yield from (Text(line, no_wrap=True, overflow="ignore") for line in text.splitlines())
            yield Text()
        if not chosen:
            yield Text(f"{plan.launch} can do none of these splits; {', '.join(every) or 'none'} can.\n")


def _table(plan: SplitPlan, choice: Choice, rows: list[tuple[str, Priced]]) -> RenderableType:
    priced = choice.price is not None
    counted = any(count for count, _ in rows)
    heads = [*([">GPUs"] if counted else []), "split", ">step", f">{plan.unit}/s", ">MFU", ">GiB", ">exposed"]
    made = []
    for count, each in rows:
        cost = plan.cost(choice, each)
        made.append(
            [
                *([count] if counted else []),
                str(each.split),
                units.seconds(each.time.time_s),
                units.number(plan.rate(each)),
                f"{100 * plan.utilization(choice, each):.0f} %",
                f"{each.memory.total / 2**30:.0f}",
                units.share(each.time.exposed_s / each.time.time_s),
                *([units.number(cost)] if cost is not None else []),
            ]
        )
    return console.table(*heads, *([f">per {plan.cost_unit}"] if priced else []), rows=made)


def _offered(choice: Choice) -> Iterator[RenderableType]:
    """Ways to hold less, and what each costs or gives."""
    if not choice.offers:
        return
    fits = "With less memory" if choice.ranked else "What would make it fit"
    yield Text(f"{fits} (--memory NAME)", "bold")
    best = choice.ranked[0] if choice.ranked else None
    rows: list[list[str]] = []
    parts: dict[str, MemoryChoice] = {}
    for offer in choice.offers:
        priced = offer.priced
        parts |= {each.name: each for each in offer.choices}
        rows.append(
            [
                " ".join(each.name for each in offer.choices),
                offer.level,
                "the same" if best and priced.split == best.split else str(priced.split),
                units.seconds(priced.time.time_s),
                f"{priced.memory.total / 2**30:.0f}",
                f"{offer.host_bytes / 2**30:.0f}" if offer.host_bytes else "",
            ]
        )
    yield console.table("name", "level", "split", ">step", ">GiB", ">host GiB", rows=rows)
    yield from (Text(f"  {each.name}: {each.words} ({each.how})", "dim") for each in parts.values())
    yield Text()


def _made_of(priced: Priced) -> str:
    """Where the time of a split goes, and its memory."""
    whole, memory = priced.time.time_s, priced.memory
    spent = {name: getattr(priced.time, key) for key, name in _PARTS.items()}
    said = [f"{name} {units.share(each / whole)}" for name, each in spent.items() if each >= whole / 200]
    gib = [f"{name} {each / 2**30:.1f}" for name, each in asdict(memory).items()]
    stages = f"\nLayers of its stages: {_counted(priced.layers)}." if len(priced.layers) > 1 else ""
    return f"The best spends its time on: {', '.join(said)}.\nIt holds, in GiB: {', '.join(gib)}.{stages}"


def _counted(layers: Iterable[int]) -> str:
    """``9, 3 x 8, 7``: equal ones that follow each other, together."""
    alike = ((size, len(list(group))) for size, group in groupby(layers))
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in alike)


def explained(ranked: tuple[Priced, ...]) -> Iterator[str]:
    """Why the runner-up lost, in a sentence or two."""
    if len(ranked) < 2:
        yield "No other split fits."
        return
    best, other = ranked[:2]
    more_s = other.time.time_s - best.time.time_s
    yield (
        f"The runner-up ({other.split}) takes {units.seconds(more_s)} "
        f"({units.share(more_s / best.time.time_s)}) longer:"
    )
    gaps = {key: getattr(other.time, key) - getattr(best.time, key) for key in _PARTS}
    for key, gap_s in sorted(gaps.items(), key=lambda pair: -abs(pair[1])):
        if abs(gap_s) >= 0.02 * best.time.time_s or abs(gap_s) >= 0.2 * more_s > 0:
            sign = "more" if gap_s > 0 else "less"
            yield f"  {units.seconds(abs(gap_s))} {sign} of {_PARTS[key]}"


def scaling(choice: Choice) -> str:
    """Up to how many GPUs each doubling pays."""
    gains = {
        second: fewer.time.time_s / more.time.time_s - 1
        for (first, fewer), (second, more) in pairwise(choice.frontier)
        if second == 2 * first
    }
    last, fastest = choice.frontier[-1][0], min(choice.frontier, key=lambda each: each[1].time.time_s)[0]
    slower = f" {last} GPUs take longer than {fastest} at this global batch." * (last > fastest)
    poor = next((second // 2 for second, gain in gains.items() if gain < LEAST_SCALING), None)
    if poor is not None:
        percent = f"{100 * LEAST_SCALING:.0f} %"
        most = units.counted(poor, "GPU")
        return f"Beyond {most} at this global batch a doubling gains less than {percent}.{slower}"
    if not gains:
        return slower.strip() or "Fewer GPUs do not hold the model."
    return f"Each doubling up to {max(gains)} GPUs gains {100 * min(gains.values()):.0f} % or more.{slower}"


def cheapest(plan: SplitPlan, choice: Choice) -> str:
    """Over how many GPUs the training costs least, and what all of them cost; empty without a price."""
    costs = [(cost, n, each) for n, each in choice.frontier if (cost := plan.cost(choice, each)) is not None]
    if len(costs) < 2:
        return ""
    (least, count, best), (most, last, all_of_them) = min(costs, key=lambda each: each[:2]), costs[-1]
    if count == last:
        return f"All {last} GPUs are cheapest, too: {units.number(least)} per {plan.cost_unit}."
    return (
        f"Cheapest over {units.counted(count, 'GPU')}: {units.number(least)} per {plan.cost_unit}; "
        f"{last} cost {units.share(most / least - 1)} more and are done "
        f"{best.time.time_s / all_of_them.time.time_s:.2g} times sooner."
    )


def _compared(plan: SplitPlan) -> Iterator[RenderableType]:
    """The best of each kind of GPU, by cost where prices are known."""

    def key(pair: tuple[Choice, Priced]) -> float:
        cost = plan.cost(*pair)
        return pair[1].time.time_s if cost is None else cost

    best = sorted(((choice, choice.ranked[0]) for choice in plan.choices if choice.ranked), key=key)

    yield Text("GPUs compared", "bold")
    rows = [
        [choice.gpu.title, str(priced.split), units.seconds(priced.time.time_s)] for choice, priced in best
    ]
    heads = ["GPU", "split", ">step"]
    if any(choice.price is not None for choice, _ in best):
        heads.append(f">per {plan.cost_unit}")
        for row, pair in zip(rows, best, strict=True):
            row.append("?" if (cost := plan.cost(*pair)) is None else units.number(cost))
    yield console.table(*heads, rows=rows)
    yield Text()
