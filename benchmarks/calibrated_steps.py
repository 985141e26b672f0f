"""Whole steps by calibrations that users would make: errors of the GPU's time before and after.

On a GPU, ``tilefit calibrate`` as users run it and steps measured beside it; without one, the comparison:

    tilefit calibrate --quick --output quick.npz; tilefit calibrate --output full.npz
    PYTHONPATH=src python benchmarks/whole_steps.py --further --turns 1 --out steps.json
    PYTHONPATH=src python benchmarks/calibrated_steps.py steps.json --gpu h100-sxm --without hf:t5 \
        --calibrations quick.npz full.npz --out benchmarks/results/calibrated_steps_h100.json

T5 runs otherwise in transformers 5.17, with which steps were measured, than in later ones. Each step is
priced as if nobody had measured the GPU, by what ships and by each calibration. The result holds both times
of each step and what each calibration says of itself; calibrations themselves are too large.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from whole_steps import captured, runs

from tilefit.cost import estimate_step
from tilefit.cost.priced import PricedGpu, as_shipped, left_out, priced
from tilefit.gpus import get

#: What a calibration says of itself, beside its networks.
ABOUT = ("date", "versions", "launch_scale", "launch_spread", "quick", "measured", "errors")
OF_NETWORKS = ("trained_rows", "held_out_rows", "kept", "errors")


def about(device: PricedGpu) -> dict[str, Any]:
    """What a calibration says of itself."""
    assert device.calibration is not None
    told = device.calibration.about
    networks = {
        kind: {name: facts[name] for name in OF_NETWORKS if name in facts}
        for kind, facts in told["networks"].items()
    }
    return {name: told[name] for name in ABOUT if name in told} | {"networks": networks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path, nargs="+", help="what whole_steps.py wrote")
    parser.add_argument("--gpu", required=True, help="the GPU of all that was measured")
    parser.add_argument("--calibrations", type=Path, nargs="+", default=[], help="of tilefit calibrate")
    parser.add_argument("--without", nargs="+", default=[], help="steps that run otherwise than is captured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = get(options.gpu)
    devices = {"nothing": left_out(gpu), "ships": as_shipped(gpu)}
    devices |= {path.stem: priced(gpu, path) for path in options.calibrations}
    rows: list[dict[str, Any]] = []
    for path in options.steps:
        recorded = json.loads(path.read_text())
        known = {run.label: run for run in runs(recorded.get("infer", False), recorded["compiled"])}
        for measured in recorded["rows"]:
            if "gpu_ms" not in measured or measured["model"] in options.without:
                continue
            step = captured(known[measured["model"]])
            found = {name: 1e3 * estimate_step(step, each).gpu_time_s for name, each in devices.items()}
            rows.append({"model": measured["model"], "gpu_ms": measured["gpu_ms"], "predicted_ms": found})
            off = "  ".join(f"{name} {ms / measured['gpu_ms'] - 1:+7.1%}" for name, ms in found.items())
            print(f"{measured['model']:46} {measured['gpu_ms']:8.2f} ms  {off}", flush=True)
    summary = {}
    for name in devices:
        errors = sorted(abs(row["predicted_ms"][name] / row["gpu_ms"] - 1) for row in rows)
        ratio = median(row["predicted_ms"][name] / row["gpu_ms"] for row in rows)
        summary[name] = {"median": median(errors), "worst": errors[-1], "ratio": ratio}
        print(
            f"{name}: error {median(errors):.1%} in the median, worst {errors[-1]:.1%}; predicted over "
            f"measured {ratio:.3f} (of {len(rows)} steps)"
        )
    if options.out:
        result = {
            "gpu": gpu.name,
            "steps": [path.name for path in options.steps],
            "calibrations": {path.stem: about(devices[path.stem]) for path in options.calibrations},
            "summary": summary,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
