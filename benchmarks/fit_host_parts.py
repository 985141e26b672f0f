"""Does a host take what one scale says, or should its parts be told apart?

    PYTHONPATH=src python benchmarks/fit_host_parts.py [--count]
    PYTHONPATH=src python benchmarks/fit_host_parts.py --rows ...third_h100.jsonl --calibration ...npz

The models are those of ``host_parts.py``, most of which the cost model's host constants have never seen.
Their host times, as the model states them, are held against the measured ones, all with one scale. Then
other sums of parts are fitted: of operations, views, calls of modules, calls of Python functions, nodes of
autograd, kinds of operations. Each model is predicted by constants fitted to the others. Beside that, how far
two turns of the same model differ: no model can do better. ``--count`` counts the parts again, on shapes;
the rows ran transformers 5.17, whose T5 and Swin v2 have other operations than later ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tilefit.cost import launch
from tilefit.cost.calibration import read
from tilefit.cost.launch import KNOWN_HOST, REFERENCE_STEP_S, UNKNOWN_HOST

RESULTS = Path(__file__).parent / "results"
ROWS, COUNTS = RESULTS / "host_parts_h100.jsonl", RESULTS / "host_parts_counts.json"
#: Parts of a step, and what each may be a sum of.
PARTS = {
    "forward alone": (
        ("operations",),
        ("operations", "modules"),
        ("operations", "views"),
        ("operations", "views", "python"),
        ("operations", "views", "modules", "python"),
        ("convolutions", "products", "others", "views", "python"),
    ),
    "forward": (
        ("operations", "changes"),
        ("operations", "views"),
        ("operations", "python"),
        ("operations", "views", "python"),
        ("operations", "norms", "views", "python"),
        ("convolutions", "products", "others", "views", "python"),
    ),
    "backward": (
        ("fixed", "operations", "parameters"),
        ("fixed", "operations", "kernels", "parameters"),
        ("fixed", "operations", "kernels", "nodes"),
        ("fixed", "operations", "kernels", "nodes", "parameters"),
        ("fixed", "operations", "kernels", "views", "parameters"),
    ),
    "optimizer": (("fixed", "parameters"), ("fixed", "operations", "parameters")),
}
#: The cost model's own constants of each part, in seconds.
STATED = {
    "forward alone": {"operations": launch.ALONE_S, "kernels": launch.KERNEL_S},
    "forward": {
        "fixed": launch.FIXED_S["forward"], "operations": launch.FORWARD_S, "changes": launch.MODULE_S,
        "kernels": launch.KERNEL_S,
    },
    "backward": {
        "fixed": launch.FIXED_S["backward"], "operations": launch.BACKWARD_S, "parameters": launch.GRADIENT_S,
        "kernels": launch.KERNEL_S,
    },
    "optimizer": {
        "fixed": launch.FIXED_S["optimizer"], "operations": launch.OPTIMIZER_S, "parameters": launch.UPDATE_S,
    },
}  # fmt: skip
#: Relative errors beyond this count linearly, not squared: other processes disturbed some rows.
DISTURBED = 0.1
_Array = NDArray[np.float64]


class Python:
    """Counts calls of Python functions, without what runs operations on shapes."""

    def __init__(self) -> None:
        self.calls = self._inside = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self._inside:
            self._inside += (event == "call") - (event == "return")
        elif event == "call":
            name = frame.f_code.co_filename
            if "/torch/_" in name and not name.endswith(("_jit_internal.py", "torch/_tensor.py")):
                self._inside = 1
            else:
                self.calls += 1


def counted(target: Any, infer: bool) -> dict[str, Any]:
    """What a model's step is made of, and its host time as the cost model states it."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from whole_steps import launches

    from tilefit.capture import capture
    from tilefit.capture.aten import is_free
    from tilefit.cost import estimate_step
    from tilefit.cost.priced import priced

    class Views(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += is_free(func)
            return func(*args, **(kwargs or {}))

    run, gpu = replace(target, infer=infer), priced("h100-sxm")
    loaded = run.load("meta")
    step = capture(
        loaded.model,
        loaded.inputs,
        train=not infer,
        amp="bf16",
        loss=loaded.loss,
        channels_last=run.channels_last,
    )
    estimate = estimate_step(step, gpu, launch_scale=1.0)
    model = run.load("meta").model.train(not infer)
    entered = [0]

    def forward() -> Any:
        inputs = loaded.inputs
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if infer:
            return out
        loss = loaded.loss(out) if loaded.loss else getattr(out, "loss", out)
        return loss.mean() if loss.dim() else loss

    with torch.set_grad_enabled(not infer):
        forward()
        python, views, backward = Python(), Views(), Views()
        sys.setprofile(python)
        try:
            forward()
        finally:
            sys.setprofile(None)
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: entered.__setitem__(0, entered[0] + 1))
        with views:
            out = forward()
        nodes = 0 if infer else _nodes(out)
        if not infer:
            with backward:
                out.backward()
    return {
        "host_ms": 1e3 * estimate.host_time_s,
        "gpu_ms": 1e3 * estimate.gpu_time_s,
        "launches": launches(step, gpu),
        "names": Counter(f"{entry.phase.partition('-')[0]} {entry.name}" for entry in step.ops),
        "python": python.calls,
        "modules": entered[0],
        "views": [views.count, backward.count],
        "nodes": nodes,
    }


def _nodes(loss: torch.Tensor) -> int:
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [each for each, _ in node.next_functions]
    return len(seen)


def count() -> None:
    """Of every model and pass, to the result."""
    from host_parts import models

    found: dict[str, Any] = {}
    for run in models():
        for infer in (False, True):
            try:
                found[f"{run.label}|{infer}"] = counted(run, infer)
            except Exception as error:  # noqa: BLE001 - one model's failure is told
                print(f"{run.label}: {type(error).__name__}: {error}"[:160], flush=True)
    lines = [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in found.items()]
    COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def parts_of(told: dict[str, Any], part: str) -> dict[str, float]:
    """How many there are of each in a part of the step."""
    phase = part.partition(" ")[0]
    launches = told["launches"][phase]
    names = {name.split()[1]: n for name, n in told["names"].items() if name.startswith(phase)}

    def of(*kinds: str) -> int:
        return sum(n for name, n in names.items() if any(kind in name for kind in kinds))

    convolutions, products = of("convolution"), of("mm", "attention")
    return {
        **launches,
        "fixed": 1,
        "changes": launches["modules"],
        "modules": told["modules"],
        "views": told["views"][phase == "backward"],
        "python": told["python"],
        "nodes": told["nodes"],
        "norms": of("batch_norm"),
        "convolutions": convolutions,
        "products": products,
        "others": launches["operations"] - convolutions - products,
    }


def solved(counts: _Array, taken_us: _Array) -> _Array:
    """The nonnegative constants."""
    start = np.full(counts.shape[1], 5.0)
    found = least_squares(
        lambda x: counts @ x / taken_us - 1, start, bounds=(0, np.inf), loss="soft_l1", f_scale=DISTURBED
    )
    return np.asarray(found.x)


def scale_of(row: dict[str, Any]) -> float:
    """What a row says of the host, by today's reference; the first rows' was 9.6 ms."""
    return float(row["scale"]) * row.get("reference_s", 9.6e-3) / REFERENCE_STEP_S


def told(errors: _Array) -> str:
    off = np.abs(errors)
    return f"median {np.median(off):.1%}, nine in ten {np.quantile(off, 0.9):.0%}, worst {off.max():.0%}"


def show(part: str, number: int, turns: dict[str, list[dict[str, Any]]], counts: dict[str, Any]) -> None:
    """Fits of a part of the step."""
    rows = []
    for key, each in turns.items():
        if "launches" in counts.get(key, {}) and part.partition(" ")[0] in counts[key]["launches"]:
            least = [1e3 * min(parts[number] for parts in turn["wall_ms"]) for turn in each]
            rows.append((counts[key], float(np.exp(np.mean(np.log(least))))))
    taken_us = np.array([us for _, us in rows])
    stated_s = [sum(s * parts_of(each, part)[name] for name, s in STATED[part].items()) for each, _ in rows]
    ratios = 1e6 * np.array(stated_s) / taken_us
    print(f"{part}, {len(rows)} models, as stated, one scale: {told(ratios / np.median(ratios) - 1)}")
    for names in PARTS[part]:
        table = np.array([[parts_of(each, part)[name] for name in names] for each, _ in rows], dtype=float)
        others = [np.arange(len(rows)) != index for index in range(len(rows))]
        without = [table[i] @ solved(table[m], taken_us[m]) / taken_us[i] - 1 for i, m in enumerate(others)]
        constants = zip(names, solved(table, taken_us), strict=True)
        stated = ", ".join(f"{name} {value:.1f}" for name, value in constants)
        print(f"{part}, {len(rows)} models, left out: {told(np.array(without))}; {stated} us")


def whole(
    kind: str, turns: dict[str, list[dict[str, Any]]], counts: dict[str, Any], reference: float
) -> None:
    """Steps among others against the model as it is, with the scale that fits all of them best, and with the
    one that was said: by the reference steps meanwhile, in the median, or by a calibration."""
    pairs, repeats = [], []
    for key, each in turns.items():
        if key in counts and counts[key]["host_ms"] > counts[key]["gpu_ms"]:
            taken = [turn["sustained_ms"] for turn in each]
            pairs.append((float(np.exp(np.mean(np.log(taken)))), counts[key]["host_ms"]))
            repeats += [abs(np.log(b / a)) for a, b in pairwise(taken)]
    ratios = np.array([real / stated for real, stated in pairs])
    scale = float(np.exp(np.median(np.log(ratios))))
    known = np.mean(np.abs(np.log(ratios / reference)) <= np.log(KNOWN_HOST))
    unknown = np.mean(np.abs(np.log(ratios)) <= np.log(UNKNOWN_HOST))
    print(
        f"{kind}, {len(pairs)} steps that the host limits: {scale:.2f} times what is stated; with that, "
        f"{told(scale / ratios - 1)}; "
        f"with the {reference:.2f} that was said, {told(reference / ratios - 1)}, "
        f"in the interval {known:.0%}; in that of an unknown host {unknown:.0%}; "
        f"turns of the same step differ by {np.median(repeats or [0]):.0%} in the median"
    )


def programs(rows: list[dict[str, Any]]) -> None:
    """Whole programs, captured here, on a host as fast as the reference step said after each."""
    from program_ops import program

    from tilefit.capture.child import capture_program_in_child
    from tilefit.cost import estimate_step
    from tilefit.cost.measured import MeasuredRun
    from tilefit.cost.priced import priced
    from tilefit.ops import Step
    from tilefit.options import ProgramOptions

    errors, inside = [], []
    for row in rows:
        path, arguments, fake = program(row["program"])
        options = ProgramOptions(str(path), arguments, skip=2, fake_data=fake)
        step = capture_program_in_child(options, "h100-sxm", timeout_s=600)
        scale = scale_of(row)
        gpu = replace(priced("h100-sxm"), run=MeasuredRun(Step(()), (), (), launch_scale=scale))
        estimate, real_ms = estimate_step(step, gpu), min(row["wall_ms"])
        assert step.program is not None
        own = replace(step, program=replace(step.program, host_work=()))
        errors.append(1e3 * estimate.time_s / real_ms - 1)
        inside.append(1e3 * estimate.low_s <= real_ms <= 1e3 * estimate.high_s)
        print(
            f"{row['program']}: {real_ms:.1f} ms, predicted {1e3 * estimate.time_s:.1f} ({errors[-1]:+.0%}; "
            f"{1e3 * estimate.low_s:.1f} to {1e3 * estimate.high_s:.1f}), without its own work on the host "
            f"{1e3 * estimate_step(own, gpu).time_s:.1f}, on an unknown host "
            f"{1e3 * estimate_step(step, priced('h100-sxm')).time_s:.1f}",
            flush=True,
        )
    print(f"{len(errors)} programs: {told(np.array(errors))}, in the interval {np.mean(inside):.0%}")


def kinds(rows: list[dict[str, Any]], counts: dict[str, Any]) -> None:
    """How far what small steps say is off what models take right after: the step of ``tilefit calibrate``,
    those of other kinds that train as the models do, and all of these."""
    from host_parts import small_models

    from tilefit.capture import capture
    from tilefit.cost import estimate_step

    def stated_ms(name: str, infer: bool) -> float:
        model, inputs = small_models()[name]
        loss = None if infer else lambda out: out.float().mean()
        step = capture(model.to("meta"), (inputs.to("meta"),), train=not infer, amp="bf16", loss=loss)
        return 1e3 * estimate_step(step, "h100-sxm", launch_scale=1.0).host_time_s

    stated = {(name, infer): stated_ms(name, infer) for name in small_models() for infer in (False, True)}
    marks = [index for index, row in enumerate(rows) if row["row"] == "reference"]
    off: dict[tuple[bool, float, str], list[float]] = {}
    for begin, end in zip(marks, [*marks[1:], len(rows)], strict=True):
        taken = rows[begin]["kinds_ms"]
        said = {
            each: np.log(np.median(taken[each[0] + ", forward" * each[1]]) / ms)
            for each, ms in stated.items()
        }
        for infer in (False, True):
            ratios = [
                np.log(row["sustained_ms"] / counts[f"{row['model']}|{infer}"]["host_ms"])
                for row in rows[begin:end]
                if row["row"] == "model"
                and row["infer"] == infer
                and (key := counts.get(f"{row['model']}|{infer}"))
                and key["host_ms"] > key["gpu_ms"]
            ]
            scales = {
                "calibrate": np.log(scale_of(rows[begin])),
                "its kinds": np.mean([said[each] for each in said if each[1] == infer]),
                "all kinds": np.mean([*said.values()]),
            }
            for name, scale in scales.items() if ratios else ():
                off.setdefault((infer, rows[begin]["slow"], name), []).append(abs(scale - np.median(ratios)))
    for (infer, slow, name), errors in off.items():
        kind = "forward passes" if infer else "training"
        print(f"{kind}, host slowed {slow:g} times, by {name}: {np.mean(errors):.1%} of {len(errors)} turns")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--calibration", type=Path, help="of the slowed host: its scale, not the rows'")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--programs", action="store_true", help="predict the programs instead")
    parser.add_argument("--kinds", action="store_true", help="what small steps of other kinds say instead")
    options = parser.parse_args()
    if options.count:
        count()
    counts = json.loads(COUNTS.read_text())
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    if options.programs:
        programs([row for row in rows if row["row"] == "program" and "failure" not in row])
        return
    if options.kinds:
        kinds(rows, counts)
        return
    print("reference steps:", *(f"{r['scale']:.2f} ({r['slow']:g})" for r in rows if r["row"] == "reference"))
    for slow in sorted({row["slow"] for row in rows}, reverse=True):  # the plain host last
        turns: dict[bool, dict[str, list[dict[str, Any]]]] = {False: {}, True: {}}
        for row in rows:
            if row["row"] == "model" and row["slow"] == slow:
                turns[row["infer"]].setdefault(f"{row['model']}|{row['infer']}", []).append(row)
        reference = [scale_of(row) for row in rows if row["row"] == "reference" and row["slow"] == slow]
        said = float(np.median(reference))
        if options.calibration and slow == max(row["slow"] for row in rows):
            said = read(options.calibration).launch_scale
        for infer, kind in ((False, "training"), (True, "forward passes")):
            name = f"{kind}, host slowed {slow:g} times" if slow > 1 else kind
            whole(name, turns[infer], counts, said)
    for part, infer, number in (
        ("forward alone", True, 0),
        ("forward", False, 0),
        ("backward", False, 1),
        ("optimizer", False, 2),
    ):
        show(part, number, turns[infer], counts)


if __name__ == "__main__":
    main()
