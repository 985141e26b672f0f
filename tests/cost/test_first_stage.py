"""The first stage alone against the profile of an H200, function by function.

The rows of ``first_stage.jsonl`` were drawn at random by ``benchmarks/first_stage.py``: a function, an
operation, and the microseconds that the profile says.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from tilefit import gpus
from tilefit.cost.analytic import analytic
from tilefit.ops import Op

H200 = gpus.get("h200")
RATIOS: dict[str, list[float]] = defaultdict(list)
for line in (Path(__file__).parents[1] / "data" / "first_stage.jsonl").read_text().splitlines():
    function, kind, values, us = json.loads(line)
    RATIOS[function].append(1e6 * analytic(Op.of(kind, values), H200).time_s / us)


@pytest.mark.parametrize("function", RATIOS)
def test_the_first_stage_is_near_the_profile(function: str) -> None:
    assert 0.7 < median(RATIOS[function]) < 1.4
    assert all(1 / 3 < ratio < 3 for ratio in RATIOS[function])
