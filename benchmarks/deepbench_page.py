"""Writes ``docs/gemm-on-h200.md`` and its plot from what ``deepbench_questions.py`` recorded.

    PYTHONPATH=src python benchmarks/deepbench_page.py

Every number on the page is computed here from ``results/deepbench_h200.json`` and, where it is there, from
``results/gemm_choice_h200.json``, which ``gemm_choice.py`` records; the columns of other GPUs are those that
DeepBench published.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, log, log2
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from tilefit.measure.clocks import THROTTLE_REASONS
from tilefit.measure.suites import deepbench_gemm

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "deepbench_h200.json"
CHOICE = ROOT / "benchmarks" / "results" / "gemm_choice_h200.json"
PAGE = ROOT / "docs" / "gemm-on-h200.md"
PLOT = ROOT / "docs" / "gemm-on-h200.svg"

LAYOUTS = ("NN", "TN", "NT")
#: A mini-batch is in a dip when a larger one takes this much less time.
DIP = 1.15
#: The knee: the smallest mini-batch at this share of the best rate.
KNEE = 0.8
#: Ratios closer to 1 are not told apart.
SAME = 1.05

Row = dict[str, Any]


# --- reading ---------------------------------------------------------------------------------------


def us(row: Row, name: str) -> float:
    """Median time of a candidate in microseconds."""
    return float(row["candidates"][name]["us"][0])


def _size(row: Row) -> tuple[int, int, int]:
    return row["m"], row["n"], row["k"]


def geometric_mean(ratios: Iterable[float]) -> float:
    return exp(fmean(log(ratio) for ratio in ratios))


def noise(result: dict[str, Any]) -> float:
    """Median over everything measured of (80th - 20th percentile) / median."""
    timings = [
        timing["us"]
        for rows in result.values()
        if isinstance(rows, list)
        for row in rows
        for timing in row["candidates"].values()
        if "us" in timing
    ]
    return median((high - low) / middle for middle, low, high in timings)


def knee(rates: dict[int, float]) -> int:
    """The smallest mini-batch that reaches 80 % of the best rate."""
    return min(n for n, rate in rates.items() if rate >= KNEE * max(rates.values()))


def dips(times: dict[int, float]) -> dict[int, int]:
    """The mini-batches for which a larger one takes clearly less time, each with the fastest such."""
    found = {}
    for n, time in times.items():
        larger = [other for other in times if other > n]
        best = min(larger, key=lambda other: times[other], default=n)
        if time > DIP * times[best]:
            found[n] = best
    return found


@dataclass(frozen=True)
class Regret:
    """What the default loses on one of DeepBench's 160 products.

    Attributes:
        layout, m, n, k: The product, in DeepBench's order.
        default_us: Time of ``torch.mm`` as it is.
        best: The fastest candidate that computes the same from the same operands, or from a weight that is
            stored in another way.
        best_us: Its time.
        kernel: What the default ran.
    """

    layout: str
    m: int
    n: int
    k: int
    default_us: float
    best: str
    best_us: float
    kernel: str

    @property
    def ratio(self) -> float:
        return self.default_us / self.best_us

    @property
    def aligned(self) -> bool:
        """Every leading dimension is a multiple of 8: 16 bytes of bf16."""
        other = self.n if self.layout == "NT" else self.k
        return self.m % 8 == 0 == other % 8


def regrets(result: dict[str, Any]) -> list[Regret]:
    """One for each of the 160 products."""
    kernel = {(*_size(r), r["layout"]): r["kernel"] for r in result["kernels"]}
    found = []
    for row in result["shapes"]:
        for layout in row["asked"]:
            # A weight may be stored transposed for nothing: NN and TN are the same product. NT has none.
            same = {"NN": ("NN", "TN"), "TN": ("TN", "NN"), "NT": ("NT",)}[layout]
            times = {
                name: us(row, name)
                for name, timing in row["candidates"].items()
                if "us" in timing
                and name.split()[0] in same
                and (name.startswith(layout) or name.split()[1] in ("cublas", "cublaslt"))
            }
            best = min(times, key=lambda name: times[name])
            size = _size(row)
            found.append(
                Regret(
                    layout,
                    *size,
                    times[f"{layout} cublas"],
                    _say(best, layout),
                    times[best],
                    kernel[*size, layout],
                )
            )
    return found


def _say(name: str, layout: str) -> str:
    """A candidate in words."""
    letters, what = name.split(" ", 1)
    what = {"cublas": "cuBLAS", "cublaslt": "cuBLASLt", "padded": "padded copy"}.get(what, what)
    what = what.replace("triton", "Triton")
    if letters != layout:
        return f"weight transposed: {letters}, {what}"
    return "default" if what == "cuBLAS" else what


def _kind(best: str) -> str:
    """The kind of alternative, without its details."""
    return "Triton" if best.startswith("Triton") else best.partition(":")[0]


# --- writing ---------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are aligned to the left."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---" if i < left else "--:" for i in range(len(head))) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def short(value: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(ratio: float) -> str:
    return f"{ratio:.0%}".replace("%", " %")


def tflops(m: int, n: int, k: int, time_us: float) -> float:
    return 2 * m * n * k / time_us / 1e6


def ratio_row(label: str, pairs: Sequence[tuple[str, float]]) -> tuple[object, ...]:
    """Label, number, geometric mean, how often above 1.1 and below 1 / 1.1, the largest ratio."""
    ratios = [ratio for _, ratio in pairs]
    size, largest = max(pairs, key=lambda pair: pair[1])
    more, less = sum(r > 1.1 for r in ratios), sum(r < 1 / 1.1 for r in ratios)
    return label, len(pairs), f"{geometric_mean(ratios):.2f}", more, less, f"{largest:.2f} ({size})"


def layouts(result: dict[str, Any]) -> Iterator[str]:
    yield "## NN, TN or NT?"
    listed = {_size(r) for r in result["shapes"] if {"NN", "TN"} <= set(r["asked"])}

    def ours(rows: list[Row], suffix: str, a: str, b: str, only: bool) -> list[tuple[str, float]]:
        return [
            (f"{r['m']}, {r['n']}, {r['k']}", us(r, a + suffix) / us(r, b + suffix))
            for r in rows
            if not only or _size(r) in listed
        ]

    rows = [
        ratio_row("**H200, bf16**, TN / NN", ours(result["shapes"], " cublas", "TN", "NN", True)),
        ratio_row("**H200, TF32**, TN / NN", ours(result["tf32"], "", "TN", "NN", True)),
    ]
    for label, column in (
        ("V100, 16 bit", "v100_mixed"),
        ("V100, fp32", "v100_fp32"),
        ("T4, 16 bit", "t4_mixed"),
        ("P100, fp32", "p100_fp32"),
        ("Titan X (Maxwell), fp32", "titanx_maxwell_fp32"),
    ):
        times: dict[tuple[int, int, int], dict[str, float]] = {}
        for entry in deepbench_gemm():
            if column in (entry.published_ms or {}):
                size = (entry.op.n, entry.op.m, entry.op.k)
                times.setdefault(size, {})[entry.op.layout] = entry.published_ms[column]
        both = [
            ("{}, {}, {}".format(*size), t["TN"] / t["NN"])
            for size, t in times.items()
            if {"TN", "NN"} <= set(t)
        ]
        rows.append(ratio_row(f"{label}, TN / NN", both))
    head = ("", "sizes", "geometric mean", "> 1.1", "< 0.91", "largest (m, n, k)")
    yield "Time of TN over NN, on the sizes that DeepBench lists in both (other GPUs: as published):"
    yield table(head, rows)
    yield (
        f"In bf16 NN and TN hardly differ any more: TN takes {rows[0][2]} times NN's time ({rows[2][2]} on "
        f"a V100). TF32 prefers TN ({rows[1][2]}), which fits the instruction set: Hopper's matrix "
        "instructions read 16-bit operands in either order, others only with k contiguous."
    )
    yield "The same over all distinct sizes of the list, for the layouts it does not ask for, too:"
    everything = [
        ratio_row(f"H200, {label}, {a} / {b}", ours(result[key], suffix, a, b, False))
        for label, key, suffix in (("bf16", "shapes", " cublas"), ("TF32", "tf32", ""))
        for a, b in (("TN", "NN"), ("NT", "NN"))
    ]
    yield table(head, everything)
    best = [
        max(us(r, f"{x} cublas") for x in ("NN", "TN")) / min(us(r, f"{x} cublas") for x in ("NN", "TN"))
        for r in result["shapes"]
    ]
    groups = []
    for label, wanted in (
        ("n ≤ 16", lambda n: n <= 16),
        ("n = 32", lambda n: n == 32),
        ("n = 64", lambda n: n == 64),
        ("n = 128", lambda n: n == 128),
        ("n ≥ 700", lambda n: n >= 700),
    ):
        part = [value for r, value in zip(result["shapes"], best, strict=True) if wanted(r["n"])]
        groups.append((label, len(part), f"{geometric_mean(part):.2f}", f"{max(part):.2f}"))
    yield "What taking the worse of NN and TN costs, by mini-batch (bf16):"
    yield table(("mini-batch", "sizes", "geometric mean", "largest"), groups)


def curve(result: dict[str, Any]) -> Iterator[str]:
    yield "## The mini-batch, 1 to 512"
    yield f"![TFLOP/s against the mini-batch]({PLOT.name})"
    yield (
        f"Weight m = k, bf16. A **knee** is the smallest mini-batch at {percent(KNEE)} of the best rate. A "
        f"mini-batch is in a **dip** when it takes {percent(DIP - 1)} more time than a larger one or worse: "
        "padding it with rows of zeros would be faster. In the plot, dips are hollow."
    )
    kernel = {(*_size(r), r["layout"]): r["kernel"] for r in result["kernels"]}
    summary, worst = [], []
    for width, layout, times in curves(result):
        rates = {n: tflops(width, n, width, time) for n, time in times.items()}
        found = dips(times)
        top = max(rates, key=lambda n: rates[n])
        summary.append(
            (
                f"{width} {layout}",
                knee(rates),
                f"{rates[top]:.0f} at {top}",
                len(found),
                _ranges(found, times),
            )
        )
        for n, better in found.items():
            names = [kernel[width, x, width, layout] for x in (n, better)]
            worst.append((times[n] / times[better], width, layout, n, better, times, names))
    yield table(("weight, layout", "knee", "best TFLOP/s", "dips", "where"), summary)
    nt = [(w, n) for w, layout, times in curves(result) if layout == "NT" for n in dips(times)]
    odd = [kernel[w, n, w, "NT"] for w, n in nt if n % 8]
    other = sum(not name.startswith("nvjet") for name in odd)
    yield (
        f"In NT the mini-batch is a leading dimension: {len(odd)} of its {len(nt)} dips are at mini-batches "
        f"that are no multiple of 8, and {other} of those {len(odd)} did not run one of the library's "
        "Hopper kernels (`nvjet`). Elsewhere the tiles differ, as the names below show."
    )
    yield "The ten deepest dips, at most two for each weight and layout:"
    seen: Counter[tuple[int, str]] = Counter()
    ranked = []
    for dip in sorted(worst, key=lambda dip: -dip[0]):
        if seen[dip[1], dip[2]] < 2:
            seen[dip[1], dip[2]] += 1
            ranked.append(dip)
    yield table(
        ("weight, layout", "kernels, in the dip → out of it", "n", "µs", "larger n", "µs", "ratio"),
        [
            (
                f"{w} {x}",
                " → ".join(f"`{name}`" for name in names),
                n,
                short(t[n]),
                to,
                short(t[to]),
                f"{r:.2f}",
            )
            for r, w, x, n, to, t, names in ranked[:10]
        ],
        left=2,
    )
    picks = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    yield "Times in µs:"
    yield table(
        ("weight, layout", *map(str, picks)),
        [(f"{width} {layout}", *(short(times[n]) for n in picks)) for width, layout, times in curves(result)],
    )


def curves(result: dict[str, Any]) -> Iterator[tuple[int, str, dict[int, float]]]:
    """Weight, layout and the times by mini-batch, ascending."""
    for width in dict.fromkeys(row["width"] for row in result["curve"]):
        rows = sorted((r for r in result["curve"] if r["width"] == width), key=lambda r: r["n"])
        for layout in LAYOUTS:
            yield width, layout, {row["n"]: us(row, layout) for row in rows}


def _ranges(some: Iterable[int], of: Iterable[int]) -> str:
    """Numbers as ranges of neighbours in ``of``."""
    order = {n: i for i, n in enumerate(of)}
    runs: list[list[int]] = []
    for n in some:
        if runs and order[n] == order[runs[-1][-1]] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs) or "–"


def multiples(result: dict[str, Any]) -> Iterator[str]:
    yield "## Multiples of 25 against multiples of 32"
    yield (
        "The time of the multiple of 25 over the time of the next multiple of 32: above 1, the *larger* "
        "product is the faster one, and padding is free."
    )
    for of, what in (
        ("batch", "Mini-batch n, weight 2560 x 2560. Only in NT is the mini-batch a leading dimension:"),
        ("width", "Layer width, m = k, mini-batch 128. The width is a leading dimension in all layouts:"),
    ):
        rows = []
        for row in result["multiples"]:
            if row["of"] == of:
                small, large = row["pair"]
                times = [us(row, f"{layout} {small}") for layout in LAYOUTS]
                ratios = [us(row, f"{x} {small}") / us(row, f"{x} {large}") for x in LAYOUTS]
                rows.append((f"{small} / {large}", *map(short, times), *(f"{r:.2f}" for r in ratios)))
        yield what
        yield table(("", *(f"{x} µs" for x in LAYOUTS), *(f"{x} ratio" for x in LAYOUTS)), rows)


def combined(result: dict[str, Any]) -> Iterator[str]:
    yield "## One product or several?"
    yield (
        "`F.linear` (TN) several times, against once with the weights stacked; for time steps, the same "
        "weight once a step against once for all steps. Launches from the host are not in these times: run "
        "eagerly, the separate products lose more."
    )
    rows = [
        (
            row["what"],
            f"{row['parts']} x ({row['m']}, {row['n']}, {row['k']})",
            short(us(row, "separate")),
            short(us(row, "combined")),
            f"{us(row, 'separate') / us(row, 'combined'):.2f}",
        )
        for row in result["combined"]
    ]
    yield table(("", "m, n, k", "separate µs", "combined µs", "gain"), rows, left=2)


def copies(result: dict[str, Any]) -> Iterator[str]:
    yield "## When does an explicit copy pay?"
    yield (
        "**A transposed weight.** A copy, once, so that the product runs in the better of NN and TN from "
        "then on, pays after *copy / (worse − better)* uses. With a small mini-batch that is more than a "
        "layer has between two updates of its weight, unless it is recurrent. All sizes where the layouts "
        f"differ by more than {percent(SAME - 1)}:"
    )
    copy = {(r["m"], r["k"]): us(r, "transpose") for r in result["transposition"]}
    rows = []
    for row in result["shapes"]:
        if (row["m"], row["k"]) not in copy:
            continue
        times = {x: us(row, f"{x} cublas") for x in ("NN", "TN")}
        worse, better = sorted(times, key=lambda x: -times[x])
        if times[worse] / times[better] > SAME:
            spent = copy[row["m"], row["k"]]
            uses = spent / (times[worse] - times[better])
            values = (times[worse], times[better], spent, uses)
            rows.append((f"{row['m']}, {row['n']}, {row['k']}", f"{worse} → {better}", *map(short, values)))
    rows.sort(key=lambda row: float(row[-1]))
    yield table(("m, n, k", "layouts", "worse µs", "better µs", "copy µs", "uses"), rows, left=2)
    yield (
        "**A padded copy.** `F.linear` (TN) whose outputs m or inputs k are not a multiple of 8, against "
        "the same padded to one. The weight is copied once an update (or stored padded: free), the input "
        "in every call when k is padded. *Gain* counts the input's copy and not the weight's; the last "
        "column is after how many calls the weight's copy is paid."
    )
    padded = []
    for row in result["padding"]:
        each = us(row, "padded") + (us(row, "copy input") if "copy input" in row["candidates"] else 0)
        before, weight = us(row, "as it is"), us(row, "copy weight")
        uses = short(weight / (before - each)) if before > each else "never"
        padded.append(
            (
                f"{row['m']}, {row['n']}, {row['k']}",
                short(before),
                short(us(row, "padded")),
                short(us(row, "copy input")) if "copy input" in row["candidates"] else "–",
                short(weight),
                f"{before / each:.2f}",
                uses,
            )
        )
    head = ("m, n, k", "as it is µs", "padded µs", "input's copy µs", "weight's copy µs", "gain", "calls")
    yield table(head, padded)


def spread_row(label: str, ratios: Sequence[float]) -> tuple[object, ...]:
    """Label, number, geometric mean, median, 90th percentile and largest, how often above 1.05 and 1.2."""
    p90 = quantiles(ratios, n=10, method="inclusive")[-1] if len(ratios) > 1 else ratios[0]
    middle = (geometric_mean(ratios), median(ratios), p90, max(ratios))
    over = sum(ratio > SAME for ratio in ratios), sum(ratio > 1.2 for ratio in ratios)
    return label, len(ratios), *(f"{value:.2f}" for value in middle), *over


SPREAD_HEAD = ("products", "number", "geometric mean", "median", "p90", "worst", "> 1.05", "> 1.2")


def regret(result: dict[str, Any]) -> Iterator[str]:
    yield "## How good is the default?"
    yield (
        "Regret: time of `torch.mm` as it is (cuBLAS) over the best of: the weight stored the other way "
        "(NN ↔ TN), cuBLASLt's first choice, reductions in fp32 only, a padded copy (the input's copy "
        "counted, the weight stored padded), and a plain Triton kernel with three or four tile sizes. The "
        "best of several noisy times is a little too good; the spread of a time is "
        f"{100 * noise(result):.1f} % in the median, and a regret below {percent(SAME - 1)} should be read "
        "as none."
    )
    found = regrets(result)
    groups: list[tuple[str, Callable[[Regret], bool]]] = [
        ("all", lambda r: True),
        ("all aligned", lambda r: r.aligned),
        ("n ≤ 16", lambda r: r.n <= 16),
        ("n = 32", lambda r: r.n == 32),
        ("n = 64", lambda r: r.n == 64),
        ("n = 128", lambda r: r.n == 128),
        ("n ≥ 700, aligned", lambda r: r.n >= 700 and r.aligned),
        ("misaligned", lambda r: not r.aligned),
    ]
    yield table(
        SPREAD_HEAD, [spread_row(label, [r.ratio for r in found if wanted(r)]) for label, wanted in groups]
    )
    winners = Counter(_kind(r.best) if r.ratio > SAME else "default, within 5 %" for r in found)
    yield "What was best: " + ", ".join(f"{what} {count}" for what, count in winners.most_common()) + "."
    for what, wanted in (("misaligned", False), ("aligned", True)):
        yield f"The ten largest among the {what} products:"
        yield table(
            ("", "m, n, k", "kernel of the default", "best", "default µs", "best µs", "regret"),
            [
                (
                    r.layout,
                    f"{r.m}, {r.n}, {r.k}",
                    f"`{r.kernel}`",
                    r.best,
                    short(r.default_us),
                    short(r.best_us),
                    f"{r.ratio:.2f}",
                )
                for r in sorted(found, key=lambda r: -r.ratio)
                if r.aligned is wanted
            ][:10],
            left=4,
        )
    yield "Not tried here: further algorithms of cuBLASLt, split-K in Triton, CUTLASS, and cold operands."


def choice(result: dict[str, Any]) -> Iterator[str]:
    """The best of every way of running a product as it is stored, cold."""
    yield "## The best of cuBLAS, cuBLASLt and Triton, cold"
    facts = result["provenance"]
    rows = [row for row in result["choices"] if "failed" not in row]
    left = facts["wanted"] - len(rows)
    yield (
        "What a better choice of kernel could gain where the operands stay as they are stored: `torch.mm` "
        "against the same with cuBLAS or cuBLASLt preferred, the algorithms that cuBLASLt's heuristics "
        "propose, the plain Triton kernel, and for at most 16 rows one that splits the contraction. "
        f"{len(rows)} products in bf16: DeepBench's, layers of language models with few rows, odd sizes. "
        "Operands are **cold in L2**. All ways are timed roughly, then the default and the three fastest "
        f"again, in turn; the regret is from the second round. Measured {facts['date'][:10]} with PyTorch "
        f"{facts['torch'].partition('+')[0]}, CUDA {facts['cuda']}, Triton {facts['triton']}."
        + (f" {left} more were not reached or failed." if left else "")
    )
    ratios = {id(row): row["regret"] for row in rows}
    groups: list[tuple[str, Callable[[Row], bool]]] = [
        ("all", lambda r: True),
        ("DeepBench, aligned", lambda r: r["source"] == "deepbench" and _is_aligned(r)),
        ("DeepBench, misaligned", lambda r: r["source"] == "deepbench" and not _is_aligned(r)),
        ("few rows", lambda r: r["source"] == "few rows"),
        ("odd sizes", lambda r: r["source"] == "odd"),
        ("n = 1", lambda r: r["n"] == 1),
        ("2 ≤ n ≤ 16", lambda r: 2 <= r["n"] <= 16),
        ("n > 16, aligned", lambda r: r["n"] > 16 and _is_aligned(r)),
    ]
    yield table(
        SPREAD_HEAD,
        [
            spread_row(label, [ratios[id(row)] for row in rows if wanted(row)])
            for label, wanted in groups
            if any(map(wanted, rows))
        ],
    )
    won = Counter(_family(r["best"]) if r["regret"] > SAME and not r["noise"] else "default" for r in rows)
    yield (
        "What was best, by more than 5 % and the spread: "
        + ", ".join(f"{what} {count}" for what, count in won.most_common())
        + "."
    )
    yield "The fifteen largest:"
    ranked = sorted(rows, key=lambda row: -row["regret"])[:15]
    yield table(
        ("", "m, n, k", "best", "default µs", "best µs", "regret"),
        [
            (
                row["layout"],
                "{}, {}, {}".format(*_size(row)),
                row["best"],
                short(row["us"]["torch.mm"][0]),
                short(row["us"][row["best"]][0]),
                f"{row['regret']:.2f}",
            )
            for row in ranked
        ],
        left=3,
    )
    failures = Counter(_family(name) for row in rows for name in row["errors"])
    if failures:
        listed = ", ".join(f"{what} {count}" for what, count in failures.most_common())
        yield f"Ways that refused a product or got it wrong, and did not count: {listed}."


def _is_aligned(row: Row) -> bool:
    """Every leading dimension is a multiple of 8: 16 bytes of bf16."""
    other = row["n"] if row["layout"] == "NT" else row["k"]
    return row["m"] % 8 == 0 == other % 8


def _family(way: str) -> str:
    """The kind of a way, without its configuration."""
    for kind in ("Triton split-K", "Triton", "cuBLASLt"):
        if way.startswith(kind):
            return kind
    return "cuBLASLt preferred" if way.endswith("cublaslt") else "cuBLAS preferred"


def every_size(result: dict[str, Any]) -> Iterator[str]:
    yield "## Every size"
    yield "DeepBench's sizes with the default (cuBLAS): µs, and TFLOP/s of the fastest layout."
    tf32 = {_size(r): r for r in result["tf32"]}
    rows = []
    for row in result["shapes"]:
        size = _size(row)
        times = [us(row, f"{layout} cublas") for layout in LAYOUTS]
        single = [us(tf32[size], layout) for layout in LAYOUTS]
        rows.append(
            (
                "{}, {}, {}".format(*size),
                " ".join(row["asked"]),
                *map(short, (*times, tflops(*size, min(times)))),
                *map(short, (*single, tflops(*size, min(single)))),
            )
        )
    head = ("m, n, k", "asked", *(f"bf16 {x}" for x in LAYOUTS), "TFLOP/s")
    yield table((*head, *(f"TF32 {x}" for x in LAYOUTS), "TFLOP/s"), rows, left=2)


def summary(result: dict[str, Any]) -> Iterator[str]:
    regretted = regrets(result)
    aligned = [r.ratio for r in regretted if r.aligned]
    misaligned = [r.ratio for r in regretted if not r.aligned]
    by_size = {tuple(row["pair"]): row for row in result["multiples"]}
    svail, wide = by_size[125, 128], by_size[2550, 2560]
    best_of_two = [
        max(us(r, f"{x} cublas") for x in ("NN", "TN")) / min(us(r, f"{x} cublas") for x in ("NN", "TN"))
        for r in result["shapes"]
    ]
    gains = [us(r, "separate") / us(r, "combined") for r in result["combined"] if r["what"] != "time steps"]
    steps = [us(r, "separate") / us(r, "combined") for r in result["combined"] if r["what"] == "time steps"]
    yield "\n".join(
        [
            f"- **Layout.** The worse of NN and TN costs {percent(geometric_mean(best_of_two) - 1)} "
            f"(geometric mean over {len(best_of_two)} sizes), at most {max(best_of_two):.2f}x; "
            f"{sum(r > 1.1 for r in best_of_two)} sizes differ by more than 10 %.",
            "- **125 or 128 rows** (2560 x 2560): "
            + ", ".join(f"{x} {us(svail, f'{x} 125'):.1f} / {us(svail, f'{x} 128'):.1f} µs" for x in LAYOUTS)
            + f". A layer 2550 wide takes {us(wide, 'TN 2550') / us(wide, 'TN 2560'):.1f}x the time of one "
            "2560 wide (TN, 128 rows).",
            "- **Combine.** One product instead of two to four of the same input: "
            f"{geometric_mean(gains):.2f}x (geometric mean), {min(gains):.2f}x to {max(gains):.2f}x. All "
            f"time steps at once: {min(steps):.1f}x to {max(steps):.1f}x.",
            f"- **Default.** On the {len(aligned)} aligned products of DeepBench `torch.mm` loses "
            f"{percent(geometric_mean(aligned) - 1)} (geometric mean; at most {max(aligned):.2f}x) to the "
            f"best alternative tried. On the {len(misaligned)} misaligned ones it takes "
            f"{geometric_mean(misaligned):.1f}x the time of the best (at most {max(misaligned):.2f}x), a "
            "padded copy.",
        ]
    )


def page(result: dict[str, Any], choices: dict[str, Any] | None = None) -> str:
    """The whole page, with the section on the choice of a library where that was measured."""
    facts = result["provenance"]
    clock, power = facts["sm_mhz"], facts["power_w"]
    bits = facts["throttle_reasons"]
    reasons = [text for bit, text in THROTTLE_REASONS.items() if any(bit & reading for reading in bits)]
    held = f" (held back at times by: {', '.join(reasons)})" if reasons else ""
    parts = [
        "<!-- Generated by benchmarks/deepbench_page.py from benchmarks/results/deepbench_h200.json. -->",
        "# Matrix products on an H200",
        "The questions that svail's *rnn_perf* and baidu-research/DeepBench asked of earlier GPUs, asked "
        f"of an {facts['gpu']} with `torch.mm`.",
        *summary(result),
        f"Measured {facts['date'][:10]} with PyTorch {facts['torch'].partition('+')[0]}, CUDA "
        f"{facts['cuda']}, Triton {facts['triton']}, driver {facts['driver']}; SM clock "
        f"{clock[0]}–{clock[2]} MHz (median {clock[1]:.0f}), power {power[0]}–{power[2]} W{held}. bf16 "
        "unless it says TF32; random normal data; CUDA-graph replays of about 1 ms on the same operands, "
        f"so that L2 is **warm** as far as they fit into its {facts['l2_bytes'] / 2**20:.0f} MiB; the "
        "candidates of a row in turn; medians of 9 replays. One run on one GPU: the same question may "
        "differ by 5 % on another day.",
        "**Convention.** Sizes and letters are DeepBench's, column-major: a weight m x k times a "
        "mini-batch k x n. Row-major PyTorch computes the same memory as n x m. `F.linear` (weight stored "
        "m x k) is **TN** as cuBLAS sees it, `x @ w` with the weight stored k x m is **NN**; **NT** is the "
        "form of a weight gradient. These are the letters of the library; DeepBench's own roles (NN "
        "forward, TN data gradient) are those of a column-major program.",
    ]
    for section in (layouts, curve, multiples, combined, copies, regret):
        parts += section(result)
    if choices:
        parts += choice(choices)
    parts += every_size(result)
    return "\n\n".join(parts) + "\n"


# --- the plot --------------------------------------------------------------------------------------

_COLOURS = {"NN": "#0072b2", "TN": "#d55e00", "NT": "#009e73"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 300, 60, 40, 60


def plot(result: dict[str, Any]) -> str:
    """An SVG: a panel for each weight, TFLOP/s against the mini-batch, knees and dips marked."""
    widths = list(dict.fromkeys(width for width, _, _ in curves(result)))
    panel = _HEIGHT + _TOP + _GAP
    body = []
    for index, width in enumerate(widths):
        lines = [
            (x, {n: tflops(w, n, w, t) for n, t in ts.items()}, dips(ts))
            for w, x, ts in curves(result)
            if w == width
        ]
        body.append(f'<g transform="translate({_LEFT},{index * panel + _TOP})">{_panel(width, lines)}</g>')
    size = f'width="{_LEFT + _WIDTH + 20}" height="{len(widths) * panel}"'
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {len(widths) * panel}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(width: int, lines: Sequence[tuple[str, dict[int, float], dict[int, int]]]) -> str:
    last = max(max(rates) for _, rates, _ in lines)
    every = [rate for _, rates, _ in lines for rate in rates.values()]
    low, high = floor(log2(min(every))), ceil(log2(max(every)))

    def x(n: int) -> float:
        return _WIDTH * log2(n) / log2(last)

    def y(rate: float) -> float:
        return _HEIGHT * (high - log2(rate)) / (high - low)

    parts = [f'<text y="-14" font-weight="bold">weight {width} x {width}, bf16, warm L2: TFLOP/s</text>']
    for power in range(low, high + 1):
        parts.append(f'<path d="M0 {y(2.0**power):.1f}H{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="-8" y="{y(2.0**power) + 4:.1f}" text-anchor="end">{2.0**power:g}</text>')
    for power in range(int(log2(last)) + 1):
        parts.append(f'<path d="M{x(2**power):.1f} 0V{_HEIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{x(2**power):.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{2**power}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 34}" text-anchor="middle">mini-batch n</text>')
    for index, (layout, rates, found) in enumerate(lines):
        colour = _COLOURS[layout]
        path = "".join(f"{'L' if i else 'M'}{x(n):.1f} {y(r):.1f}" for i, (n, r) in enumerate(rates.items()))
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        for n, rate in rates.items():
            fill = "#fff" if n in found else colour
            parts.append(
                f'<circle cx="{x(n):.1f}" cy="{y(rate):.1f}" r="2.2" fill="{fill}" stroke="{colour}">'
                f"<title>{layout} {n}: {rate:.1f} TFLOP/s</title></circle>"
            )
        at = knee(rates)
        parts.append(
            f'<path d="M{x(at):.1f} {_HEIGHT}v-{12 + 6 * index}" stroke="{colour}" stroke-width="3"/>'
            f'<text x="14" y="{18 + 16 * index}" fill="{colour}">'
            f"{layout}: knee at {at}, {len(found)} dips</text>"
        )
    return "\n".join(parts)


def recorded_choice() -> dict[str, Any] | None:
    """What ``gemm_choice.py`` recorded, if it did."""
    return json.loads(CHOICE.read_text(encoding="utf-8")) if CHOICE.is_file() else None


def main() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(page(result, recorded_choice()), encoding="utf-8")
    PLOT.write_text(plot(result), encoding="utf-8")


if __name__ == "__main__":
    main()
