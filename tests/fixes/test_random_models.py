"""Random models in random use; more of them by ``benchmarks/random_models.py``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import random_models

#: Planning a model takes twenty times as long as using it once.
MODELS, USES, PARTS = 100, 4, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_changed_models_do_what_the_plain_ones_do(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials = {seed: random_models.trial(seed, uses=USES) for seed in range(part, MODELS, PARTS)}
    assert sum(bool(trial.fixes) for trial in trials.values()) >= len(trials) // 2
    assert not {seed: trial.differences for seed, trial in trials.items() if trial.differences}
