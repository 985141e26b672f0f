"""Pipelines and experts on 2 H100 (``two_gpu_programs.py`` measured them) as ``tilefit plan`` prices them.

Nothing was fitted to them: the model is one of ``programs/one_gpu_layers.py``, which is split. What is
predicted of some was written before they were measured (``--predict``).

    python benchmarks/two_gpu_plans.py
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from several_gpus import SCALES

from tilefit import gpus
from tilefit.capture.child import capture_target
from tilefit.cost.links import Fabric
from tilefit.cost.priced import priced
from tilefit.options import TargetOptions
from tilefit.parallel.blocks import Framework, Model
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.planning import Job, Planner
from tilefit.parallel.schedule import GPIPE, ZERO_BUBBLE
from tilefit.parallel.training import CONTEXT_BYTES

HERE = Path(__file__).parent
MEASURED = HERE / "results" / "two_gpu_programs_h100.jsonl"
HELD_MEASURED = [
    MEASURED.with_name(f"two_gpu_programs_{name}_h100.jsonl") for name in ("held", "uneven", "uneven_again")
]
RESULTS = HERE / "results" / "two_gpu_plans.json"
PREDICTED = RESULTS.with_name("two_gpu_plans_predicted.json")


class Case(NamedTuple):
    """A program by its name, its sizes, and the split that it is."""

    name: str
    width: int
    length: int
    layers: int
    experts: int
    split: TrainingSplit
    imbalance: float = 1.0


def pipeline(name: str, width: int = 4096, length: int = 2048, parts: int = 8, samples: int = 1) -> Case:
    split = TrainingSplit(
        pipeline=2,
        micro_batches=parts,
        samples=samples,
        chunks=2 if name.startswith(("interleaved", "zero")) else 1,
        **({"gpipe": {"schedule": GPIPE}, "zero-bubble": {"schedule": ZERO_BUBBLE}}.get(name, {})),
    )
    return Case(f"pipeline.py --schedule {name}", width, length, 8, 0, split)


def mixture(name: str, width: int, length: int, experts: int, samples: int = 4, layers: int = 4) -> Case:
    split = TrainingSplit(data=2, samples=samples, micro_batches=1, experts=2)
    # Every token chooses the first expert and any other, or any two; a rank has half of them.
    imbalance = 1 + (experts / 2 - 1) / (experts - 1) if "--uneven" in name else 1.0
    return Case(name, width, length, layers, experts, split, imbalance)


CASES = [
    *(pipeline(name) for name in ("1f1b", "gpipe", "interleaved", "zero-bubble")),
    pipeline("1f1b --width 1024 --length 512 --parts 4", 1024, 512, 4),
    pipeline("interleaved --width 5120 --parts 4 --samples 2", 5120, 2048, 4, 2),
    mixture("experts.py", 2048, 2048, 8),
    mixture("experts.py --width 1024 --length 512 --experts 16", 1024, 512, 16),
]
HELD = [
    mixture("experts.py --width 4096 --length 1024 --experts 4", 4096, 1024, 4),
    mixture("experts.py --length 4096 --experts 16 --samples 2", 2048, 4096, 16, samples=2),
    mixture(
        "experts.py --width 3072 --length 1024 --experts 8 --samples 8 --layers 3", 3072, 1024, 8, 8, layers=3
    ),
    mixture("experts.py --dropless --width 3072 --length 1024 --experts 4", 3072, 1024, 4),
    mixture("experts.py --dropless --uneven --width 3072 --length 1024 --experts 4", 3072, 1024, 4),
    mixture("experts.py --dropless --uneven --length 4096 --samples 2", 2048, 4096, 8, samples=2),
]


def planner(case: Case, scale: float | None = None) -> Planner:
    """Prices a case; on a host that launches in ``scale`` of the time assumed, else as its GPU's calibration
    has it."""
    shape = f"x: bf16[{case.split.samples},{case.length},{case.width}]"
    arguments = {"width": case.width, "experts": case.experts}
    options = TargetOptions(fused_optimizer=True, weights="bf16", input=(shape,), arguments=arguments)
    step = capture_target(f"{HERE / 'programs' / 'one_gpu_layers.py'}:Layers", options)
    # AdamW in bf16; gradients of what is shared are summed up by hand, at the end.
    framework = Framework(overlap=False, bucket_copies=0, imbalance=case.imbalance)
    gpu = priced(gpus.get("h100-sxm"))
    if scale is not None:
        gpu = replace(gpu, calibration=replace(gpu.calibration, launch_scale=scale))
    return Planner(
        Model(step, case.layers), Fabric(gpu, 2), Job(case.split.batch, Precision(2, 2, 2, 4), framework)
    )


def predict() -> dict[str, Any]:
    """Times by scale, and bytes, of what is held out."""
    made: dict[str, Any] = json.loads(PREDICTED.read_text()) | {"scales": SCALES}
    for case in HELD:
        if case.name in made:  # what was said before it was measured stands
            continue
        memory = planner(case).training(case.split).memory()
        times = [planner(case, scale).training(case.split).step_s() for scale in SCALES]
        made[case.name] = {"times_s": times, "bytes": memory.total - CONTEXT_BYTES}
    return made


def measured(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each program's ranks."""
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row.get("row") == "program":
            made[row["name"]].append(row)
    return made


def compared() -> list[dict[str, Any]]:
    """Every case beside what was measured."""
    known = measured(MEASURED)
    for path in HELD_MEASURED:
        known |= {name: rows for name, rows in measured(path).items() if name not in known}
    before = json.loads(PREDICTED.read_text())
    made = []
    for case in [*CASES, *HELD]:
        if not (rows := known[case.name]):
            continue
        scale = max((row["launch_scale"] for row in rows if "launch_scale" in row), default=None)
        training = planner(case, scale).training(case.split)
        held = [training.stage_memory(i).total - CONTEXT_BYTES for i in range(case.split.pipeline)]
        time_s, measured_s = training.step_s(), max(row["median_s"] for row in rows)
        made.append(
            {
                "name": case.name,
                "predicted_s": time_s,
                "measured_s": measured_s,
                "time_error": time_s / measured_s - 1,
                "memory_errors": [
                    ours / row["peak_bytes"] - 1 for ours, row in zip(held, rows, strict=False)
                ],
            }
        )
        if old := before.get(case.name):
            old_s = float(np.interp(scale or 1.0, before["scales"], old["times_s"]))
            made[-1]["time_error_before"] = old_s / measured_s - 1
            made[-1]["memory_errors_before"] = [old["bytes"] / row["peak_bytes"] - 1 for row in rows]
        print(*made[-1].values())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="write what is predicted of the held out")
    if parser.parse_args().predict:
        PREDICTED.write_text(json.dumps(predict(), indent=1) + "\n")
        return
    made = compared()
    RESULTS.write_text(json.dumps({"rows": made}, indent=1) + "\n")
    errors = [abs(each["time_error"]) for each in made]
    memory = [abs(error) for each in made for error in each["memory_errors"]]
    for what, each in (("time", errors), ("memory", memory)):
        print(f"{what}: median {median(each):.1%}, worst {max(each):.1%}")


if __name__ == "__main__":
    main()
