"""How many mistakes of the catalogue the mixed-precision debugger finds, and whom it accuses wrongly.

Runs every wrong loop of ``tests/precision/loops`` and every healthy one under a watch that knows nothing of
them, the two-rank cases, and the two replays; and the loops again on an emulated GPU. A mistake counts as
found where the right code is reported at the right line.

Run it with: python benchmarks/precision_catalogue.py
It writes benchmarks/results/precision_catalogue.json.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The loops are the tests'.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from precision import loops, test_ranks
from precision.loops import computation, fresh, parts, protocol, shapes, storage, trials, values
from tilefit.precision import compare, first_divergence, watch
from tilefit.precision.rules import all_rules

_TESTS = Path(__file__).parent.parent / "tests"
RESULT = Path(__file__).parent / "results" / "precision_catalogue.json"
_FILLED_BY = (computation, fresh, protocol, shapes, storage, trials, values)


def watched(run: loops.Loop) -> tuple[Any, ...]:
    torch.manual_seed(0)
    with watch() as w:
        run()
    return w.alarms


def wrong_loops() -> list[dict[str, Any]]:
    rows = []
    for case in loops.WRONG:
        alarms = [alarm for alarm in watched(case.run) if alarm.code == case.code]
        at_line = [alarm for alarm in alarms if int(alarm.source.rpartition(":")[2] or 0) in case.lines]
        rows.append(
            {
                "class": case.number,
                "loop": case.name,
                "code": case.code,
                "found": bool(alarms),
                "line": bool(at_line),
                "severity": at_line[0].severity if at_line else "",
                "step": at_line[0].first_step if at_line else None,
            }
        )
    return rows


def right_loops() -> list[dict[str, Any]]:
    return [
        {
            "class": case.number,
            "loop": case.name,
            "alarms": [[a.code, a.severity] for a in watched(case.run)],
        }
        for case in loops.RIGHT
    ]


def ranks() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found = test_ranks._run(*test_ranks.WRONG, *test_ranks.RIGHT)
    wrong = []
    for case, words in test_ranks.WRONG.items():
        alarms = [a for a in found[case] if words in str(a.get("message"))]
        wrong.append(
            {
                "class": 23,
                "loop": case,
                "code": "AMP023",
                "found": bool(alarms),
                "line": any("two_ranks.py" in str(a["source"]) for a in alarms),
                "severity": alarms[0]["severity"] if alarms else "",
                "step": alarms[0]["first_step"] if alarms else None,
            }
        )
    right = [
        {
            "class": 23,
            "loop": case,
            "alarms": [[a["code"], a["severity"]] for a in found[case] if "code" in a],
        }
        for case in test_ranks.RIGHT
    ]
    return wrong, right


class Careless(nn.Module):
    """Subtracts two large numbers in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + 512) - 512


class Counting(nn.Module):
    """Gives another result each time."""

    calls = count()

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * next(self.calls)


def replays() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    torch.manual_seed(0)
    x, y = parts.batch(64)
    wrong, right = [], []
    for number, replay, bad in ((27, compare, Careless), (28, first_divergence, Counting)):
        for middle in (bad(), nn.Linear(16, 16)):
            model = nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 4))

            def step(model: nn.Module = model) -> Tensor:
                return parts.mse(model, x, y, parts.BF16)

            alarms = replay(model, step).findings
            if isinstance(middle, bad):
                at = [a for a in alarms if a.module == "1"]
                wrong.append(
                    {
                        "class": number,
                        "loop": bad.__name__,
                        "code": f"AMP{number:03}",
                        "found": bool(alarms),
                        "line": bool(at),
                        "severity": at[0].severity if at else "",
                        "step": 0,
                    }
                )
            else:
                right.append(
                    {"class": number, "loop": "linear", "alarms": [[a.code, a.severity] for a in alarms]}
                )
    return wrong, right


def emulated() -> dict[str, Any]:
    """The same loops on an emulated GPU, which has no values: what needs none is to be found all the same."""
    path = os.pathsep.join((str(_TESTS.parent / "src"), str(_TESTS)))
    command = [sys.executable, "-m", "precision.emulated"]
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    needs_values = {rule.code for rule in all_rules() if rule.values}
    wrong = [row for row in rows if "code" in row]
    possible = [row for row in wrong if row["code"] not in needs_values]
    found = [row["loop"] for row in wrong if _at_its_line(row)]
    healthy = [row for row in rows if "code" not in row]
    return {
        "wrong_loops_that_need_no_values": len(possible),
        "of_these_found_at_the_line": sum(row["loop"] in found for row in possible),
        "wrong_loops_that_need_values": len(wrong) - len(possible),
        "healthy_loops": len(healthy),
        "missed": [row["loop"] for row in possible if row["loop"] not in found],
        "accused": [r["loop"] for r in healthy if any(a[1] != "note" for a in r.get("alarms", ()))],
        "raised": [row["loop"] for row in rows if "raised" in row],
    }


def _at_its_line(row: dict[str, Any]) -> bool:
    return any(code == row["code"] and line in row["lines"] for code, _, line in row.get("alarms", ()))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("tilefit.precision").setLevel(logging.CRITICAL)
    start_s = time.perf_counter()
    rank_wrong, rank_right = ranks()
    replay_wrong, replay_right = replays()
    wrong = [*wrong_loops(), *rank_wrong, *replay_wrong]
    right = [*right_loops(), *rank_right, *replay_right]
    classes = sorted({row["class"] for row in wrong})
    detected = [n for n in classes if all(row["line"] for row in wrong if row["class"] == n)]
    loud = [row for row in right if any(severity != "note" for _, severity in row["alarms"])]
    result = {
        "torch": torch.__version__,
        "classes": len(classes),
        "classes_detected_with_code_and_line": len(detected),
        "wrong_loops": len(wrong),
        "wrong_loops_found": sum(row["found"] for row in wrong),
        "wrong_loops_found_at_the_line": sum(row["line"] for row in wrong),
        "found_within_3_steps": sum(row["step"] is not None and row["step"] < 3 for row in wrong),
        "healthy_loops": len(right),
        "healthy_loops_silent": sum(not row["alarms"] for row in right),
        "healthy_loops_with_a_warning_or_error": len(loud),
        "healthy_loops_with_an_error": sum(any(s == "error" for _, s in r["alarms"]) for r in right),
        "missed": [row["loop"] for row in wrong if not row["line"]],
        "accused": [row["loop"] for row in loud],
        "time_s": round(time.perf_counter() - start_s, 1),
        "emulated": emulated(),
        "wrong": wrong,
        "right": right,
    }
    for name, value in result.items():
        if name not in ("wrong", "right"):
            print(f"{name}: {value}")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


main()
