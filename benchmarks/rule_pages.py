"""Writes ``docs/rules``: a page per rule, and their index.

    PYTHONPATH=src python benchmarks/rule_pages.py [--only CODE]

A page has the rule's own words (its class's docstring), what tilefit prints for its wrong case, how the right
one differs, and what was measured. The cases are those of the rule's class and, of the mixed-precision rules,
the wrong loops that the tests run; each is run here. Measured figures are computed from the JSON files in
``benchmarks/results``. A page that says the same already is not touched.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import linecache
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, replace
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

# The wrong loops are the tests'.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from precision import loops, test_ranks
from precision.loops import computation, parts, protocol, storage
from tilefit.capture import child
from tilefit.cli.main import command as command_line
from tilefit.fixes.planning import registry as fixes
from tilefit.ops import Step
from tilefit.options import AnyOptions, ProgramOptions
from tilefit.precision import compare as compare_precision
from tilefit.precision import first_divergence, watch
from tilefit.precision.rules import PrecisionRule
from tilefit.precision.rules import all_rules as precision_rules
from tilefit.report import Report, loads, render
from tilefit.report.watched import Watched
from tilefit.rules import Case, Rule, all_rules
from tilefit.rules.finding import Alarm

AnyRule = Rule | PrecisionRule

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "rules"
RESULTS = ROOT / "benchmarks" / "results"
#: The loops' list is filled by importing them.
_LOOPS = (computation, protocol, storage)
#: Of a page that is compared on another machine: what rounding may change.
_NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")
#: Families whose package's name says too little.
_FAMILIES = {
    "outside": "Outside the Tensor Cores",
    "parallel": "Several GPUs",
    "dtypes": "Element types",
    "recurrent": "Recurrent layers",
    "program": "Programs",
}


# ---- the rule's words ----------------------------------------------------------------------------


def words(rule: AnyRule) -> str:
    """The docstring as Markdown, with its headings in bold."""
    text = inspect.getdoc(type(rule)) or ""
    return re.sub(r"(?m)(?<=\n\n)([A-Z][^:.\n`]{2,30}?):{1,2}(?=\s)", r"**\1:**", text)


def family(rule: AnyRule) -> str:
    """The heading of the rule's family: the package it is in."""
    if isinstance(rule, PrecisionRule):
        return "Mixed-precision training"
    package = type(rule).__module__.split(".")[2]
    return _FAMILIES.get(package, package.capitalize())


# ---- its cases -----------------------------------------------------------------------------------


def program(case: Case) -> str:
    """The file that a case is."""
    if case.program:
        return inspect.cleandoc(case.program) + "\n"
    code = inspect.cleandoc(case.code)
    whole = f"return {case.model}, {case.inputs}"
    lines = [whole] if len(whole) < 90 else ["return (", f"    {case.model},", f"    {case.inputs},", ")"]
    text = "\n    ".join(["def model():", *lines])
    known = {
        "import tilefit.nn": "tilefit.",
        "import torch": "torch.",
        "from torch import nn": "nn.",
        "from torch.nn import functional as F": "F.",
    }
    both = f"{code}\n{text}"
    imports = [line for line, name in known.items() if re.search(rf"(?<![\w.]){re.escape(name)}", both)]
    return "\n\n\n".join(filter(None, ["\n".join(imports), code, text])) + "\n"


def command(rule: Rule, case: Case) -> str:
    """The command line that checks a case."""
    gpu = [] if "--gpu" in case.options else ["--gpu h200"]
    options = [*gpu, *case.options.split(), f"--select {rule.code}"]
    name = f"{rule.code.lower()}.py"
    # What follows a program is its own.
    return " ".join(["tilefit check", *([*options, name] if case.program else [f"{name}:model", *options])])


def checked(rule: Rule, case: Case) -> Report:
    """What the command reports."""
    out = io.StringIO()

    def captured(target: str, options: AnyOptions, *more: Any, **how: Any) -> Step:
        """A process for each capture of a model would take minutes; what is reported is the same."""
        if isinstance(options, ProgramOptions):
            return in_child(target, options, *more, **how)
        return child.capture_target(target, options)

    in_child = child.capture_in_child
    here = patch.object(child, "capture_in_child", captured)
    # Nor is the profile of who runs this used, but the one that ships.
    alone = patch.dict(os.environ, {"XDG_DATA_HOME": os.devnull})
    with TemporaryDirectory() as folder, chdir(folder), here, alone, redirect_stdout(out):
        Path(f"{rule.code.lower()}.py").write_text(program(case), encoding="utf-8")
        arguments = shlex.split(command(rule, case))[1:]
        command_line(arguments[0])(
            [arguments[0], "--output-format", "json", *arguments[1:]],
            prog_name="tilefit",
            standalone_mode=False,
        )
    report = loads(out.getvalue())
    assert isinstance(report, Report)
    return report


def cases(rule: Rule) -> tuple[Report, Report]:
    """What the rule says of its wrong case, and of its right one, which must be nothing."""
    wrong, right = checked(rule, rule.wrong), checked(rule, rule.right)
    assert wrong.findings, f"{rule.code} is silent on its wrong case:\n{render(wrong)}"
    assert not right.findings, f"{rule.code} is not silent on its right case:\n{render(right)}"
    return wrong, right


def predicted(rule: Rule, wrong: Report) -> Iterator[str]:
    """The wrong case, what ``tilefit check`` prints of it, and what is otherwise in the right one."""
    yield "## Predicted"
    yield f"Run with torch {torch.__version__.partition('+')[0]}:"
    text = program(rule.wrong)
    yield f"```python\n{text}```"
    printed = "\n".join(line.rstrip() for line in render(wrong, width=80).strip().splitlines())
    yield f"```console\n$ {command(rule, rule.wrong)}\n{printed}\n```"
    sides = [f"$ {command(rule, case)}\n{program(case)}".splitlines() for case in (rule.wrong, rule.right)]
    changed = [
        line for line in unified_diff(*sides, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))
    ]
    yield "The rule is silent on:"
    yield "\n".join(["```diff", *changed, "```"])


def source(function: Callable[..., Any], module: ModuleType) -> str:
    """A function's text, and that of what it uses of its module."""
    text = inspect.getsource(function)
    used = [
        value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and re.search(rf"\b{name}\(", text)
        and name not in (function.__name__, "wrong")
    ]
    whole = "\n\n".join([*map(inspect.getsource, used), text])
    return re.sub(r"(?m)^@wrong\(.*\n", "", whole).strip()


def wrong_loop(rule: PrecisionRule) -> Iterator[str]:
    """A wrong loop of the tests, and what the debugger prints of it."""
    torch.manual_seed(0)
    if rule.code in _ELSEWHERE:
        text, report = _ELSEWHERE[rule.code]()
    else:
        # Which loops others have imported, and in which order, is not to matter.
        shown = (case for module in _LOOPS for case in loops.WRONG if case.run.__module__ == module.__name__)
        found = next(case for case in shown if case.code == rule.code)
        text = source(found.run, sys.modules[found.run.__module__])
        with watch() as run:
            found.run()
        report = run.report()
    seen = tuple(_within(alarm, text) for alarm in report.findings if alarm.code == rule.code)
    assert seen, f"{rule.code} is silent on its loop"
    report = replace(report, findings=seen, tables=(), checks=())
    yield "## Seen"
    yield "On the CPU, with tiny layers; the wrong line is marked `# here`, where it is one:"
    yield f"```python\n{text}\n```"
    yield f"```text\n{render(report, show_all=True).strip()}\n```"


def _within(alarm: Alarm, shown: str) -> Alarm:
    """An alarm with its line in the text that is shown: in its file, others' lines would move it."""
    path, _, number = alarm.source.rpartition(":")
    line = linecache.getline(str(ROOT / path), int(number)).strip()
    lines = [text.strip() for text in shown.splitlines()]
    place = f"loop.py:{lines.index(line) + 1}" if line in lines else Path(path).name
    return replace(alarm, source=place)


class Careless(torch.nn.Module):
    """Subtracts two large numbers in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) + 512) - 512


class Counting(torch.nn.Module):
    """Gives another result each time."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return x + 1e-3 * Counting.calls


def replayed(
    replay: Callable[..., Watched], layer: type[torch.nn.Module]
) -> Callable[[], tuple[str, Watched]]:
    """A model with a bad layer, under one of the replays."""

    def run() -> tuple[str, Watched]:
        x, y = parts.batch(64)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), layer(), torch.nn.Linear(16, 4))
        report = replay(model, lambda: parts.mse(model, x, y, parts.BF16))
        call = f"tilefit.precision.{replay.__name__}(model, step)  # the model's second layer is this one"
        return f"{inspect.getsource(layer)}\n\n{call}", report

    return run


def two_ranks() -> tuple[str, Watched]:
    """Two processes that train a model each."""
    name = "inner_model_called"
    text = (ROOT / "tests" / "precision" / "two_ranks.py").read_text(encoding="utf-8")
    (build,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    fields = [found for found in test_ranks._run(name)[name] if "code" in found]
    alarms = [Alarm(**{**found, "arithmetic": tuple(found["arithmetic"])}) for found in fields]  # type: ignore[arg-type]
    steps = 1 + max(alarm.first_step for alarm in alarms)
    report = Watched("two ranks", ("gloo",), steps, tuple(alarms), (), (), "")
    return ast.get_source_segment(text, build) or "", report


#: Rules that no loop of the tests shows under a watch.
_ELSEWHERE: dict[str, Callable[[], tuple[str, Watched]]] = {
    "AMP023": two_ranks,
    "AMP027": replayed(compare_precision, Careless),
    "AMP028": replayed(first_divergence, Counting),
}


# ---- what was measured ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A recorded result: the file's name and what it says."""

    name: str
    data: dict[str, Any]

    @property
    def provenance(self) -> str:
        """File, GPU, day and torch, as the file has them."""
        known = {**self.data, **self.data.get("provenance", {})}
        day = known["date"][:10] if "date" in known else "day not recorded"
        parts = (known.get("gpu", "CPU"), day, f"torch {known['torch']}")
        return f"[{self.name}](../../benchmarks/results/{self.name}): {', '.join(parts)}."


def result(name: str) -> Result:
    return Result(name, json.loads((RESULTS / name).read_text(encoding="utf-8")))


def us(row: dict[str, Any], candidate: str) -> float:
    """Median time in µs of a candidate of DeepBench's questions."""
    return float(row["candidates"][candidate]["us"][0])


def table(head: str, rows: list[tuple[Any, ...]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    columns = head.split(" | ")
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *[[str(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def compiled(eager: Result, fused: Result) -> Iterator[str]:
    """Steps of models as they are, and compiled."""

    def size(row: dict[str, Any]) -> str:
        sizes = [f"{name} {row[name]}" for name in ("batch", "seq") if row.get(name)]
        return ", ".join([row["model"], *sizes])

    after = {size(row): row for row in fused.data["rows"] if "gpu_ms" in row}
    rows = [
        (
            size(row),
            f"{row['gpu_ms']:.1f}",
            f"{after[size(row)]['gpu_ms']:.1f}",
            f"{row['predicted_gpu_ms'] - after[size(row)]['predicted_gpu_ms']:.1f}",
            f"{row['gpu_ms'] - after[size(row)]['gpu_ms']:.1f}",
        )
        for row in eager.data["rows"]
        if size(row) in after
    ]
    yield "GPU time of whole training steps, eager and under `torch.compile`:"
    yield table("model | eager ms | compiled ms | saving predicted | saving measured", rows)
    yield f"{eager.provenance} {fused.provenance}"


def first_layer(measured: Result) -> Iterator[str]:
    """A first convolution on 3, 4 and 8 channels, the copy paid."""

    def total(row: dict[str, Any], channels: int) -> float:
        times = row["us"]
        passes = times[f"forward {channels}"] + times[f"backward-weight {channels}"]
        return float(passes + times.get(f"pad {channels}", 0.0))

    yield "Forward and weight gradient in µs, with the copy that pads:"
    rows = [(row["layer"], *(f"{total(row, n):.0f}" for n in (3, 4, 8))) for row in measured.data["rows"]]
    yield table("layer | 3 channels | 4 channels | 8 channels", rows)
    yield measured.provenance


def padded(measured: Result) -> Iterator[str]:
    rows = [
        (
            f"{row['m']} x {row['n']} x {row['k']}",
            us(row, "as it is"),
            us(row, "padded"),
            f"{us(row, 'as it is') / us(row, 'padded'):.2f}",
        )
        for row in measured.data["padding"]
    ]
    yield "Products with an odd size, and padded (copies not included), in µs:"
    yield table("m x n x k | as it is | padded | times as fast", rows)
    yield measured.provenance


def odd_rows(measured: Result) -> Iterator[str]:
    rows = [
        (
            "{} -> {}".format(*row["pair"]),
            *(us(row, f"{layout} {n}") for layout in ("TN", "NT") for n in row["pair"]),
        )
        for row in measured.data["multiples"]
        if row["of"] == "batch"
    ]
    yield (
        "Mini-batch n, weight 2560 x 2560, in µs. In TN, which `F.linear` runs forward, n is contiguous "
        "nowhere; in NT it is:"
    )
    yield table("n | TN before | TN after | NT before | NT after", rows)
    yield measured.provenance


def few_rows(measured: Result) -> Iterator[str]:
    sizes = sorted((row["m"], row["k"], row["n"], us(row, "TN cublas")) for row in measured.data["shapes"])
    rows = [
        (f"{m} x {k}", "; ".join(f"{n}: {time_us:g}" for _, _, n, time_us in same))
        for (m, k), same in ((key, list(group)) for key, group in groupby(sizes, key=lambda size: size[:2]))
        if len({n for _, _, n, _ in same}) > 3
    ]
    yield "Layers of DeepBench (TN, bf16): time in µs by mini-batch."
    yield table("weight | mini-batch: µs", rows)
    yield measured.provenance


def merged(measured: Result) -> Iterator[str]:
    rows = [
        (
            f"{row['what']}: {row['parts']} of {row['m']} x {row['k']}, {row['n']} rows",
            us(row, "separate"),
            us(row, "combined"),
            f"{us(row, 'separate') / us(row, 'combined'):.2f}",
        )
        for row in measured.data["combined"]
        if row["what"] != "time steps"
    ]
    yield "Forward products of one input, apart and as one, in µs:"
    yield table("products | separate | combined | times as fast", rows)
    yield measured.provenance


def all_steps(measured: Result) -> Iterator[str]:
    rows = [
        (
            f"{row['parts']} of {row['m']} x {row['k']}, {row['n']} rows",
            us(row, "separate"),
            us(row, "combined"),
            f"{us(row, 'separate') / us(row, 'combined'):.2f}",
        )
        for row in measured.data["combined"]
        if row["what"] == "time steps"
    ]
    yield "A product per time step, and one for all of them, in µs:"
    yield table("time steps | separate | combined | times as fast", rows)
    yield measured.provenance


def quartiles(ratios: list[float]) -> str:
    return f"median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"


def larger_batches(measured: Result) -> Iterator[str]:
    """Rates of steps over the batch, at the smallest, and at the fastest that fits."""

    rows = []
    for row in measured.data["rows"]:
        rates = {int(batch): rate for batch, rate in row["exhaustive"].items()}
        smallest, best = min(rates), max(rates, key=lambda batch: rates[batch])
        kind = "training" if row["train"] else "inference"
        rows.append(
            (
                f"{row['model']}, {kind}",
                f"{smallest}: {rates[smallest]:.0f}",
                f"{best}: {rates[best]:.0f}",
                f"{rates[best] / rates[smallest]:.1f}",
            )
        )
    yield "Whole steps, at the smallest batch measured and at the fastest one in the memory allowed:"
    yield table("model | batch: samples/s | best batch: samples/s | times as fast", rows)
    yield measured.provenance


def twins(measured: Result) -> Iterator[str]:
    ratios = [us(row, "TN cublas") / us(row, "NN cublas") for row in measured.data["shapes"]]
    yield f"Time in TN over time in NN of the {len(ratios)} products of DeepBench, bf16: {quartiles(ratios)}."
    yield measured.provenance


def half_over_tf32(measured: Result) -> Iterator[str]:
    half = {(row["m"], row["n"], row["k"]): us(row, "TN cublas") for row in measured.data["shapes"]}
    ratios = [us(row, "TN") / half[row["m"], row["n"], row["k"]] for row in measured.data["tf32"]]
    yield f"Time in TF32 over time in bf16 of {len(ratios)} products of DeepBench (TN): {quartiles(ratios)}."
    yield measured.provenance


def applied(code: str, measured: Result) -> Iterator[str]:
    """What a fix that answers the rule gained in models, where it is not mixed with others'."""
    names = {fix.name for fix in fixes.all_fixes() if code in fix.rules}
    rows = [
        (
            f"{row['model']}: {fix['name']}",
            f"{row['wall_ms'][0]:.1f}",
            f"{fix['predicted_ms']:.2f}",
            f"{fix['measured_ms']:.2f}",
        )
        for row in measured.data["rows"]
        for fix in row.get("fixes", ())
        if fix["name"] in names and "measured_ms" in fix
    ]
    if rows:
        yield "Training steps of models, before and after `tilefit fix`, in ms:"
        yield table("model: fix | step before | saving predicted | saving measured", rows)
        yield measured.provenance


def converted(measured: Result) -> Iterator[str]:
    rows = [
        (
            f"{row['model']}, {row['variant']}, {row['dtype']}",
            f"{row['baseline_ms']:.1f}",
            f"{row['tilefit_ms']:.1f}",
            f"{row['baseline_ms'] / row['tilefit_ms']:.2f}",
        )
        for row in measured.data["models"]
        if row["baseline"] == "torch"
    ]
    yield "Training steps of models under autocast, by `torch.nn` and by `tilefit.nn`, in ms:"
    yield table("model | torch.nn | tilefit.nn | times as fast", rows)
    yield "Single layers: [recurrent layers](../recurrent.md#measured)."
    yield measured.provenance


def _questions(page: Callable[[Result], Iterator[str]]) -> Callable[[], Iterator[str]]:
    return lambda: page(result("deepbench_h200.json"))


#: What is measured of a rule.
_MEASURED: dict[str, Callable[[], Iterator[str]]] = {
    "ALN001": _questions(padded),
    "ALN003": _questions(odd_rows),
    "ALN005": lambda: first_layer(result("first_convolution.h200.json")),
    "BAT001": lambda: larger_batches(result("best_batch_h200.json")),
    "INT001": _questions(few_rows),
    "INT004": _questions(merged),
    "INT005": _questions(all_steps),
    "LAY003": _questions(twins),
    "NTC001": lambda: compiled(result("whole_steps.json"), result("whole_steps_compiled.json")),
    "PRC002": _questions(half_over_tf32),
    "RNN003": lambda: converted(result("recurrent_h200.json")),
}


def detected(code: str) -> Iterator[str]:
    catalogue = result("precision_catalogue.json")
    rows = [row for row in catalogue.data["wrong"] if row["code"] == code]
    if rows:
        at_line = sum(row["line"] for row in rows)
        steps = sorted({row["step"] for row in rows if row["step"] is not None})
        yield (
            f"Found at the right place in {at_line} of {len(rows)} wrong loops, first in step "
            f"{' or '.join(map(str, steps))}."
        )
        silent = catalogue.data["healthy_loops"] - catalogue.data["healthy_loops_with_a_warning_or_error"]
        yield f"Of all {catalogue.data['healthy_loops']} healthy loops, {silent} have no warning of any rule."
        yield catalogue.provenance


def measured(rule: AnyRule) -> Iterator[str]:
    yield "## Measured"
    if isinstance(rule, PrecisionRule):
        found = list(detected(rule.code))
    else:
        found = list(_MEASURED.get(rule.code, lambda: iter(()))())
        for file in sorted(RESULTS.glob("fix_gain*.json")):
            found += applied(rule.code, result(file.name))
    yield from found or ["Not measured."]


# ---- pages ---------------------------------------------------------------------------------------


def every_rule() -> list[AnyRule]:
    return [*all_rules(), *precision_rules()]


def page(rule: AnyRule, shown: Iterable[str]) -> str:
    heading = f"# {rule.code}: {rule.title}"
    written = "[All rules](README.md). Written by `benchmarks/rule_pages.py`."
    return "\n\n".join([heading, words(rule), *shown, *measured(rule), written]) + "\n"


def written(rule: AnyRule) -> str:
    """A rule's page."""
    warnings.simplefilter("ignore")
    logging.getLogger("tilefit.precision").setLevel(logging.CRITICAL)
    shown = wrong_loop(rule) if isinstance(rule, PrecisionRule) else predicted(rule, cases(rule)[0])
    return page(rule, shown)


def index() -> str:
    """The page that lists all others."""
    lines = [
        "# Rules",
        "What tilefit looks for: `tilefit check` and `tilefit profile` all but the last family, "
        "`tilefit precision` that one. `tilefit rule CODE` prints a page's text.",
    ]
    for name, group in groupby(every_rule(), key=family):
        lines.append(f"## {name}")
        lines.append("\n".join(f"- [{rule.code}]({rule.code}.md): {rule.title}" for rule in group))
    return "\n\n".join([*lines, "Written by `benchmarks/rule_pages.py`."]) + "\n"


def is_current(path: Path, text: str) -> bool:
    """A page says what it should. What training loops compute on the CPU differs in its last digits from one
    machine to the next, and how fast a loader is altogether: of their pages the words count."""
    if not path.exists():
        return False

    def same(page: str) -> str:
        varies = path.name.startswith("AMP") or "\nLoader " in page
        return " ".join(_NUMBER.sub("#", page).split()) if varies else page

    return same(path.read_text(encoding="utf-8")) == same(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="CODE", action="append", help="this rule's page; repeat for more")
    only = {code.upper() for code in parser.parse_args().only or ()}
    pages = {"README.md": index()}
    pages |= {f"{rule.code}.md": written(rule) for rule in every_rule() if not only or rule.code in only}
    changed = [name for name, text in pages.items() if not is_current(PAGES / name, text)]
    for name in changed:
        (PAGES / name).write_text(pages[name], encoding="utf-8")
    known = {"README.md", *(f"{rule.code}.md" for rule in every_rule())}
    for stale in {path.name for path in PAGES.glob("*.md")} - known:
        (PAGES / stale).unlink()
    print(f"{len(pages)} pages in {PAGES}, changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    main()
