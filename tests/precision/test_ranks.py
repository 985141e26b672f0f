"""Two ranks on the CPU, with gloo: those that part are told from those that agree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_RANK = Path(__file__).parent / "two_ranks.py"


def _run(*cases: str, backend: str = "gloo") -> dict[str, list[dict[str, object]]]:
    """What rank 0 found in each case; both ranks run all the cases in one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(_RANK), backend, *cases],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (out, error), _ = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], error
    found: dict[str, list[dict[str, object]]] = json.loads(out.splitlines()[-1])
    return found


WRONG = {
    "inner_model_called": "gradients differ",
    "parameters_not_broadcast": "parameters differ",
    "clipped_on_one_rank": "gradients differ",
    "scale_per_rank": "scale differs",
    "inf_on_one_rank": "some ranks skip",
    "same_data": "every rank reads the same batch",
}
RIGHT = [
    "ddp",
    "ddp_with_a_scaler",
    "ddp_accumulates_without_sync",
    "manual_all_reduce",
    "zero_optimizer",
    "sharded_parameters",
]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, object]]]:
    return _run(*WRONG, *RIGHT, "watched_on_one_rank")


@pytest.mark.parametrize("case", WRONG)
def test_ranks_that_part_are_found(found: dict[str, list[dict[str, object]]], case: str) -> None:
    alarms = [alarm for alarm in found[case] if alarm["code"] == "AMP023"]
    assert any(WRONG[case] in str(alarm["message"]) for alarm in alarms), found[case]
    assert all("two_ranks.py" in str(alarm["source"]) for alarm in alarms)


@pytest.mark.parametrize("case", RIGHT)
def test_ranks_that_agree_are_not_accused(found: dict[str, list[dict[str, object]]], case: str) -> None:
    assert [alarm for alarm in found[case] if alarm.get("severity") != "note" and "code" in alarm] == []


def test_sharded_parameters_are_said_to_be_unchecked(found: dict[str, list[dict[str, object]]]) -> None:
    assert any("sharded" in str(entry.get("unchecked")) for entry in found["sharded_parameters"])


def test_a_rank_without_a_watch_holds_nobody_up(found: dict[str, list[dict[str, object]]]) -> None:
    assert any("every rank must be watched" in str(e.get("unchecked")) for e in found["watched_on_one_rank"])


@pytest.mark.gpu
def test_two_gpus_with_nccl() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases = [case for case in RIGHT if case != "zero_optimizer"]
    found = _run("inner_model_called", "scale_per_rank", *cases, backend="nccl")
    assert any("gradients differ" in str(alarm.get("message")) for alarm in found["inner_model_called"])
    assert any("scale differs" in str(alarm.get("message")) for alarm in found["scale_per_rank"])
    for case in cases:
        assert [a for a in found[case] if "code" in a and a["severity"] != "note"] == []
