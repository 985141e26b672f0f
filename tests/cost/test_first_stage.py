"""The first stage alone against the profile of an H200, function by function.

The rows of ``first_stage.jsonl`` were taken from steps of vision models by ``benchmarks/first_stage.py``,
evenly in the order of their times: a function, an operation, and the microseconds that the profile says.
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


#: Further off: the median of divisions, half of which are tiny, and of the batched products of 49 x 32 x 49,
#: the only ones in fp32; and one of the sums, of 20 million elements to 192.
MEDIAN, WORST = {"div": 1.5, "gemm fp32": 1.6}, {"sum": 4.0}


@pytest.mark.parametrize("function", RATIOS)
def test_the_first_stage_is_near_the_profile(function: str) -> None:
    worst = WORST.get(function, 3.0)
    assert 0.7 < median(RATIOS[function]) < MEDIAN.get(function, 1.4)
    assert all(1 / worst < ratio < worst for ratio in RATIOS[function])
