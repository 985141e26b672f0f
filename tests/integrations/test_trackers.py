"""Reports in experiment trackers: through whatever their clients take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from tilefit.errors import UsageError
from tilefit.integrations.trackers import figures, log
from tilefit.report import Report


@pytest.fixture(scope="module")
def report() -> Report:
    return tilefit.check(nn.Linear(512, 513), torch.empty(64, 512, device="meta"), gpu="h200")


class Recording:
    """A client with some methods, which keeps what it was told."""

    def __init__(self, *methods: str) -> None:
        self.told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for name in methods:
            setattr(self, name, lambda *args, _name=name, **more: self.told.append((_name, args, more)))


def test_tensorboard(report: Report) -> None:
    writer = Recording("add_scalar", "add_text")
    written = log(report, writer, step=3)
    assert {args[0]: args[1] for name, args, _ in writer.told if name == "add_scalar"} == written
    assert {args[2] for name, args, _ in writer.told} == {3}
    assert "NTC003" in next(args[1] for name, args, _ in writer.told if name == "add_text")


@pytest.mark.parametrize("methods", [("log",), ("log_metrics",), ("log_metrics", "log_text", "log_artifact")])
def test_wandb_mlflow_and_lightning(report: Report, methods: tuple[str, ...]) -> None:
    client = Recording(*methods)
    written = log(report, client, prefix="net")
    assert client.told[0] == (methods[0], (written,), {"step": 0})
    assert written["net/h200/time_s"] == report.step.time_s
    assert written["net/h200/samples_per_s"] == pytest.approx(64 / report.step.time_s)
    assert [name for name, _, _ in client.told] == list(methods[:2])


def test_what_is_followed_is_a_number_each(report: Report) -> None:
    assert all(type(value) is float for value in figures(report).values())
    assert figures(report)["best_time_s"] <= report.step.time_s


def test_what_is_no_client_is_refused(report: Report) -> None:
    with pytest.raises(UsageError, match="object is no client"):
        log(report, object())
