"""Pipelines and experts on 2 H100 (``two_gpu_programs.py`` measured them) as ``tilefit plan`` prices them.

Nothing was fitted to them: the model is one of ``programs/one_gpu_layers.py``, which is split.

    python benchmarks/two_gpu_plans.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

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
RESULTS = HERE / "results" / "two_gpu_plans.json"


class Case(NamedTuple):
    """A program by its name, its sizes, and the split that it is."""

    name: str
    width: int
    length: int
    layers: int
    experts: int
    split: TrainingSplit


def pipeline(name: str, width: int = 4096, length: int = 2048, parts: int = 8, samples: int = 1) -> Case:
    split = TrainingSplit(
        pipeline=2,
        micro_batches=parts,
        samples=samples,
        chunks=2 if name.startswith(("interleaved", "zero")) else 1,
        **({"gpipe": {"schedule": GPIPE}, "zero-bubble": {"schedule": ZERO_BUBBLE}}.get(name, {})),
    )
    return Case(f"pipeline.py --schedule {name}", width, length, 8, 0, split)


def mixture(name: str, width: int, length: int, experts: int) -> Case:
    return Case(name, width, length, 4, experts, TrainingSplit(data=2, samples=4, micro_batches=1, experts=2))


CASES = [
    *(pipeline(name) for name in ("1f1b", "gpipe", "interleaved", "zero-bubble")),
    pipeline("1f1b --width 1024 --length 512 --parts 4", 1024, 512, 4),
    pipeline("interleaved --width 5120 --parts 4 --samples 2", 5120, 2048, 4, 2),
    mixture("experts.py", 2048, 2048, 8),
    mixture("experts.py --width 1024 --length 512 --experts 16", 1024, 512, 16),
]


def planner(case: Case) -> Planner:
    shape = f"x: bf16[{case.split.samples},{case.length},{case.width}]"
    arguments = {"width": case.width, "experts": case.experts}
    options = TargetOptions(fused_optimizer=True, weights="bf16", input=(shape,), arguments=arguments)
    step = capture_target(f"{HERE / 'programs' / 'one_gpu_layers.py'}:Layers", options)
    # AdamW in bf16; gradients of what is shared are summed up by hand, at the end.
    framework = Framework(overlap=False, bucket_copies=0)
    fabric = Fabric(priced(gpus.get("h100-sxm")), 2)
    return Planner(Model(step, case.layers), fabric, Job(case.split.batch, Precision(2, 2, 2, 4), framework))


def main() -> None:
    measured: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        if row.get("row") == "program":
            measured[row["name"]].append((row["median_s"], row["peak_bytes"]))
    made = []
    for case in CASES:
        training = planner(case).training(case.split)
        held = [training.stage_memory(i).total - CONTEXT_BYTES for i in range(case.split.pipeline)]
        time_s, rows = training.step_s(), measured[case.name]
        made.append(
            {
                "name": case.name,
                "predicted_s": time_s,
                "measured_s": max(each for each, _ in rows),
                "time_error": time_s / max(each for each, _ in rows) - 1,
                "memory_errors": [ours / theirs - 1 for ours, (_, theirs) in zip(held, rows, strict=False)],
            }
        )
        print(case.name, f"{made[-1]['time_error']:+.1%}", [f"{e:+.1%}" for e in made[-1]["memory_errors"]])
    RESULTS.write_text(json.dumps({"rows": made}, indent=1) + "\n")
    errors = [abs(each["time_error"]) for each in made]
    memory = [abs(error) for each in made for error in each["memory_errors"]]
    for what, each in (("time", errors), ("memory", memory)):
        print(f"{what}: median {median(each):.1%}, worst {max(each):.1%}")


if __name__ == "__main__":
    main()
