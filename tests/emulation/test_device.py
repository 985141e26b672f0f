"""What code sees on the emulated GPU. All in one process, which is then spent."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ROWS = [True, [1000, 4], 48, True, "CaptureError"]
_CASES = Path(__file__).with_name("device_cases.py")


@cache
def _answers() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, str(_CASES)], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "answer"),
    {
        "available": True,
        "addresses": [True, 16, True],
        "writes are numbered": [True, 4, 0, 0, True],
        "saved and loaded": [True, False],
        "a parameter by the class of another": [[True, False, "cpu"], [True, False, "cuda"]],
        "moved though held weakly": ["cuda:0", True],
        "name": "NVIDIA H100 SXM 80GB",
        "capability": [9, 0],
        "memory": 85_899_345_920,
        "says cuda": ["cuda:0", True, 0],
        "takes no memory": True,
        "module keeps its parameters": [True, "cuda:0"],
        "cpu stays real": 10.0,
        "mixing raises": "RuntimeError: Expected all tensors to be on the same device",
        "sparse sums are refused": "CaptureError: add.Tensor of a sparse tensor",
        "nested tensors are the host's": [[2, 3, 4], ["CaptureError: a nested tensor "] * 3],
        "sparse product": ["cuda:0", [5, 2], [3, 2]],
        "made of its parts": [3, False, [[2, 3], [2, 3]], [4, 2], "CaptureError: the gradient of a spar"],
        "made sparse": [[6, True, [5, 3]], [6, True, [5, 3]]],
        "coalesced": [False, True, True, False],
        "rows of a table": [*_ROWS, *_ROWS],
        "types of old": [
            [
                *["torch.cuda.FloatTensor"] * 3,
                "torch.cuda.LongTensor",
                "torch.cuda.HalfTensor",
                "torch.FloatTensor",
            ],
            [True, True, True, False, False],
            ["torch.cuda.FloatTensor"] * 3,
            ["torch.FloatTensor"] * 2,
            [4],
        ],
        "checks hold": [False, 1, "RuntimeError: Expected cond to be True"],
        "weight_norm of old": "cuda",
        "numpy raises": "TypeError: can't convert cuda:0 device type tensor to numpy",
        "known value": [3, 12, 5],
        "known mask": [2, 4],
        "mask as numbers": [512, 512 * 511],
        "known sum": 6.0,
        "unknown loss": True,
        "nothing is wrong": [False, False],
        "finite": True,
        "nothing is wrong with much": [False, False, True, False, True],
        "indices within range": [True, True],
        "half of a mask": True,
        "mask assigns": [4, 4],
        "one hot counts": 64,
        "t_": [4, 3],
        "unsqueeze_": [1, 4, 3],
        "resize_": [2, 6],
        "data swap": [5],
        "assigned data": [5, "cuda:0"],
        "autocast": ["torch.float16", "torch.float32"],
        "autograd function": "cuda:0",
        "hooks": ["cuda:0", "cuda:0"],
        "thread": "cuda:0",
        "shared": ["cuda", True],
        "deepcopy": ["cuda:0", True],
        "generator": [3],
        # What large parameters would have taken is thrown away, so that shuffling is that of a real run.
        "numbers of the host": [True, False],
        # The targets and the lengths that the GPU has; three tables for each pass, one for the mean.
        "ctc": [[50, 4, 20], {"to_gpu": 7, "to_host": 2}],
        "written part by part": [[3, 12, 5], [7, 7, 1, 2], [[False, False], [False, True], [True, False]]],
        "packed": [20, 8],
        "checkpoint": [4, 4],
        "inference mode": [2, 5],
        "pinned": [True, False],
        "printed": True,
        "float tensor": "cuda:0",
        "allclose": True,
        "cumulative mean": "cuda:0",
        "lazy": [3, 7],
        "graph": [4],
        "masked select": [3, 3, 1],
        "shapes as on the CPU": [[4, 7], [3, 2], [5], "cuda:0"],
        "accelerator": "cuda:0",
        "memory is asked for": [[3 << 20, 5 << 20, 8 << 20], 8 << 20, True, [], True],
        "conjugates": [True, [5, 6], True, [5, 6]],
        "profilers": True,
        "settings of libraries": 0,
        "boxes": [True, "cuda", True],
        "built for": "13.7",
    }.items(),
)
def test_code_on_the_emulated_gpu(case: str, answer: Any) -> None:
    assert _answers()[case] == answer
