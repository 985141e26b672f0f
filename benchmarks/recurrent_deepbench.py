"""Part `deepbench` of `recurrent.py`: DeepBench's recurrent training and inference lists.

One layer, one direction, input size = hidden size; its "vanilla" cell is the ReLU RNN. The training list is
the one in the package. The inference lists are those of baidu-research/DeepBench, commit da81ba7,
`code/kernels/rnn_problems.h` (Apache License 2.0): `inference_server_set` and `inference_device_set`.

The order is random, so that the cases that a short budget leaves out are a sample.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from recurrent_common import DTYPES, NAMES, Row, Setting, backend_of, geomean, problems, runs, table

from tilefit.cost.recurrent_times import Row as TableRow
from tilefit.measure.suites import deepbench_rnn
from tilefit.ops import FORWARD, Recurrent

BUDGET_S = 34.0
_CELLS = {"RNN_RELU": "relu", "LSTM": "lstm", "GRU": "gru"}


class Case(NamedTuple):
    list: str
    dtype: str
    cell: str
    hidden: int
    batch: int
    steps: int


def shapes() -> Iterator[tuple[str, str, int, int, int]]:
    """List, cell, hidden size, mini-batch and steps."""
    for op in (entry.op for entry in deepbench_rnn()):
        assert isinstance(op, Recurrent)
        if op.direction == FORWARD:
            yield "training", _CELLS[op.mode], op.hidden_size, op.batch, op.seq_len
    for batch in (1, 2, 4):
        for hidden, steps in ((512, 25), (1024, 25), (2048, 25), (1536, 50), (256, 150)):
            yield "inference", "lstm", hidden, batch, steps
        for hidden in (2816, 2048, 1536, 2560):
            for steps in (1500, 750, 375, 187):
                yield "inference", "gru", hidden, batch, steps
        yield "inference", "gru", 512, batch, 1
        yield "inference", "gru", 1024, batch, 1500
    yield "inference", "relu", 32, 1, 672
    yield "inference", "relu", 64, 1, 96


def deepbench(setting: Setting) -> list[Row]:
    cases = [Case(name, dtype, *shape) for name, *shape in shapes() for dtype in ("bf16", "fp16")]
    random.Random(0).shuffle(cases)
    if setting.tiny:
        cases = [case._replace(hidden=8, steps=min(case.steps, 3)) for case in cases[:12]]
    setting.compile_ahead(
        problem
        for case in cases
        for problem in problems(
            case.cell, DTYPES[case.dtype], case.hidden, case.batch, training=case.list == "training"
        )
    )
    rows = [measured(setting, case) for case in setting.within(cases)]
    summary(rows, len(cases))
    return rows


def measured(setting: Setting, case: Case) -> Row:
    dtype = DTYPES[case.dtype]
    training = case.list == "training"
    theirs, ours = setting.pair(case.cell, dtype, case.hidden, case.hidden)
    x = setting.random(case.steps, case.batch, case.hidden, dtype=dtype).requires_grad_(training)
    grad = setting.random(case.steps, case.batch, case.hidden, dtype=dtype)
    kind = "both" if training else "forward"
    contenders = {"torch": runs(theirs, x, grad, kind), "tilefit": runs(ours, x, grad, kind)}
    times = setting.interleaved(contenders, 3, warm_ups=1, close=[("torch", "tilefit")])
    per_step = {f"{name}_us_per_step": us / case.steps for name, us in times.items()}
    return {**case._asdict(), **per_step, "backend": backend_of(ours)}


def times(rows: list[Row]) -> Iterator[TableRow]:
    """As rows of the table by which tilefit chooses: of the cases in which both were timed, and in which
    cuDNN takes as long in ``torch.nn`` as in our modules: in bf16 it copies the weights there at each call.

    A ReLU RNN goes by the name of a tanh RNN, which does the same work: the table has no others.
    """
    for row in rows:
        if row["backend"] != "persistent" or row["dtype"] == "bf16":
            continue
        cell = "rnn_tanh" if row["cell"] == "relu" else NAMES[row["cell"]]
        size = (row["dtype"], row["hidden"], row["batch"], row["steps"], 1, row["list"] == "training")
        both = (round(row[f"{name}_us_per_step"], 3) for name in ("tilefit", "torch"))
        yield TableRow(cell, *size, *both, None, None)


def summary(rows: list[Row], cases: int) -> None:
    def ratio(row: Row) -> float:
        return float(row["torch_us_per_step"] / row["tilefit_us_per_step"])

    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["list"], row["cell"], row["dtype"]), []).append(row)
    lines = []
    for group, members in sorted(groups.items(), key=str):
        ratios = [ratio(row) for row in members]
        backends = Counter(row["backend"] for row in members)
        lines.append(
            (
                *group,
                len(members),
                f"{geomean(ratios):.2f}x",
                f"{min(ratios):.2f}x",
                f"{max(ratios):.2f}x",
                sum(r < 0.97 for r in ratios),
                ", ".join(f"{name} {count}" for name, count in backends.items()),
            )
        )
    print(f"\ndeepbench: {len(rows)} of {cases} cases, torch.nn's time over tilefit.nn's")
    table("list|cell|dtype|cases|geomean|least|most|below 0.97|ran on", lines)
