"""Write docs/fixes-on-h200.md: what the fixes gained on real models, eager and under the compiler.

    PYTHONPATH=src python benchmarks/fix_page.py

From what ``fix_gain.py`` wrote, in ``results``: ``fix_gain_whole_h200.json`` (eager; another on an H100),
``fix_gain_repeat_h200.json`` (longer runs of what varied; another on an H100), ``fix_gain_h200.json`` (of it
the gains of single fixes) and ``fix_gain_compiled_h200.json`` (another on an H100).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fix_gain import MODELS, is_foreseen

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "fixes-on-h200.md"

Row = dict[str, Any]


def recorded(name: str) -> list[Row]:
    """The measured rows, in the order of the models."""
    rows = json.loads((RESULTS / name).read_text())["rows"]
    by_model = {row["model"]: row for row in rows if "speedup" in row}
    return [by_model[model] for model in MODELS if model in by_model]


def fixes(row: Row) -> list[str]:
    return list(dict.fromkeys(fix["name"] for fix in row["fixes"]))


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def pair(values: list[float], form: str = ".3g") -> str:
    return f"{values[0]:{form}} → {values[-1]:{form}}"


def cells(row: Row) -> str:
    wall, memory = row["wall_ms"], pair(row["step_gib"], ".2f")
    if {"cuda-graph", "compile"} & {*fixes(row)}:
        memory = f"{row['step_gib'][0]:.2f} → kept by graphs"
    faster = f"{wall[0] / wall[-1]:.2f}" if row["fixes"] else "measured against itself"
    name = row["model"] + " \\*" * row.get("earlier_plan", False)
    return " | ".join([name, pair(wall), faster, pair(row["gpu_ms"]), memory])


def eager(rows: list[Row]) -> Iterator[str]:
    yield "| model | step, ms | times as fast | GPU, ms | memory of a step, GiB | fixes |"
    yield "| --- | --: | --: | --: | --: | --- |"
    for row in rows:
        yield f"| {cells(row)} | {listed(fixes(row))} |"


def compiled(rows: list[Row], without: dict[str, Row]) -> Iterator[str]:
    yield (
        "| model | step, ms | times as fast | GPU, ms | memory of a step, GiB | fixes | what the compiler "
        "leaves nothing to do for |"
    )
    yield "| --- | --: | --: | --: | --: | --- | --- |"
    for row in rows:
        made = fixes(row)
        spared = [name for name in fixes(without[row["model"]]) if name not in made and name != "cuda-graph"]
        yield f"| {cells(row)} | {listed(made)} | {listed(spared)} |"


def foreseen(rows: list[Row]) -> str:
    all_fixes = [fix for row in rows for fix in row["fixes"]]
    clear = [fix for fix in all_fixes if not fix["is_noise"]]
    on_gpu = [
        is_foreseen(before - after, was - now, row["gpu_ms"][0])
        for row in rows
        for before, after, was, now in zip(
            row["predicted_gpu_ms"],
            row["predicted_gpu_ms"][1:],
            row["gpu_ms"],
            row["gpu_ms"][1:],
            strict=False,
        )
    ]
    return (
        f"Of {len(all_fixes)} gains, {len(clear)} were larger than the noise of the host; of these "
        f"{sum(fix['foreseen'] for fix in clear)} had been predicted within 25 % or 2 % of the step. Of the "
        f"GPU's time, which the host does not disturb, {sum(on_gpu)} of {len(on_gpu)}."
    )


def whole(rows: list[Row]) -> str:
    gains = [row["speedup"] for row in rows if row["fixes"]]
    slower = [row for row in rows if row["fixes"] and row["speedup"] < 0.99]
    again = recorded("fix_gain_repeat_h200.json")
    told = [
        f" {row['model']} is slower, {row['speedup']:.2f}, on a host that launches "
        f"{row['launch_scale']:.1f} times as slowly as the model assumes; its GPU time is "
        f"{row['gpu_ms'][0] / row['gpu_ms'][-1]:.2f} times as short."
        + "".join(
            f" In a longer run on another host it was {longer['speedup']:.2f} times as fast."
            for longer in again
            if longer["model"] == row["model"]
        )
        for row in slower
    ]
    return (
        f"{len(rows)} models, measured by plans that were made without measuring: "
        f"{statistics.geometric_mean(gains):.2f} times as fast in the geometric mean." + "".join(told)
    )


def on_an_h100(rows: list[Row]) -> str:
    slower = [f"{row['model']} {row['speedup']:.3f}" for row in rows if row["speedup"] < 0.99]
    gain = statistics.geometric_mean(row["speedup"] for row in rows)
    longer = [f"{row['model']} {row['speedup']:.3f}" for row in recorded("fix_gain_repeat_h100.json")]
    return (
        f"On an H100, on a host as noisy as [its rows](../benchmarks/results/fix_gain_whole_h100.json) tell, "
        f"{len(rows)} were {gain:.2f} times as fast in the geometric mean; below 0.99: {', '.join(slower)}. "
        "[In longer runs](../benchmarks/results/fix_gain_repeat_h100.json), with the plans that were made "
        f"then: {', '.join(longer)}."
    )


def over_the_compiler(rows: list[Row]) -> str:
    gains = [row["speedup"] for row in rows]
    newest = max(row["date"][:10] for row in rows)
    today = [row["speedup"] for row in rows if row["date"][:10] == newest]
    return (
        f"{len(rows)} models: {statistics.geometric_mean(gains):.2f} times as fast as compiled alone in the "
        f"geometric mean, at least {min(gains):.2f}; {len(today)} of them were measured on {newest} "
        f"({statistics.geometric_mean(today):.2f}), the others before, with the plans of then."
    )


def over_the_compiler_on_an_h100(rows: list[Row]) -> str:
    gains = [row["speedup"] for row in rows]
    return (
        f"On an H100, [{len(rows)} models](../benchmarks/results/fix_gain_compiled_h100.json) were "
        f"{statistics.geometric_mean(gains):.2f} times as fast as compiled alone, at least {min(gains):.3f}."
    )


_FROM = """\
Training steps of real models under bf16 autocast with AdamW, before and after what
`tilefit.optimize(..., level="safe")` does; both ran in turn. Written by `benchmarks/fix_page.py` from
[fix_gain_whole_h200.json](../benchmarks/results/fix_gain_whole_h200.json),
[fix_gain_h200.json](../benchmarks/results/fix_gain_h200.json) and
[fix_gain_compiled_h200.json](../benchmarks/results/fix_gain_compiled_h200.json), where the versions,
dates and single rounds are. Where the GPU takes much less than the step, the host limits the step, and
other work on the machine disturbed it. Of a model with a * the plan had other fixes when it was measured
than it has now."""

_COMPILED = """\
Before: `torch.compile(model)` alone, which pads misaligned products by itself. After: with the plan made
for a model that is to be compiled; in it, `compile` is the mode `reduce-overhead` (CUDA graphs). The
last column has the fixes of the eager plan that the compiled one does without: there the compiler does
the job, or leaves too little to gain."""


def page() -> str:
    rows = recorded("fix_gain_h200.json")
    now = recorded("fix_gain_whole_h200.json")
    by_model = {row["model"]: row for row in now}
    under = recorded("fix_gain_compiled_h200.json")
    return "\n".join(
        [
            *("# Fixes on an H200", "", _FROM, ""),
            *("## Eager", "", whole(now), "", *eager(now), ""),
            "Single fixes were measured one after another before, on 24 of these models. " + foreseen(rows),
            "",
            on_an_h100(recorded("fix_gain_whole_h100.json")),
            "",
            *(
                "## Under `torch.compile`",
                "",
                _COMPILED,
                "",
                over_the_compiler(under),
                "",
                *compiled(under, by_model),
                "",
                over_the_compiler_on_an_h100(recorded("fix_gain_compiled_h100.json")),
                "",
            ),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
