"""Part `absolute` of `recurrent.py`: microseconds a step of our forward pass, and how far from the floor.

The floor is what a step cannot go below while its thread blocks are spread over the GPU: they must all have
met (0.91 us for 64 blocks: one atomic addition and a poll of it) and each must have read something that
another wrote (0.31 us more for 2 KiB). Both were measured on an H200 with a kernel that does nothing else.

Times are of the whole layer, input product included, replayed from a CUDA graph: all 256 steps over their
number, and the slope between 128 and 384 steps, which leaves out what a call costs once (the launch, loading
the weights).
"""

from __future__ import annotations

import torch
from recurrent_common import DTYPES, Row, Setting, problems, runs

BUDGET_S = 20.0
STEPS = (128, 256, 384)
#: Cell, hidden size, mini-batches.
SIZES = [
    ("lstm", 1024, (1, 2, 4, 8, 64)),
    ("gru", 1024, (1, 2, 4, 8, 64)),
    ("lstm", 256, (1, 2, 4, 8, 16)),
    ("gru", 256, (1, 2, 4, 8, 16)),
    ("rnn", 256, (1, 2, 4, 8, 16)),
]
#: Microseconds: 64 thread blocks meet; and each reads 2 KiB that another wrote.
BARRIER_US, READ_US = 0.906, 0.312


def absolute(setting: Setting) -> list[Row]:
    dtype = DTYPES["bf16"]
    cases = [(cell, hidden, batch) for cell, hidden, batches in SIZES for batch in batches]
    steps = (2, 3, 4) if setting.tiny else STEPS
    if setting.tiny:
        cases = [(cell, 8, batch) for cell, _, batch in cases[::5]]
    setting.compile_ahead(
        problem
        for cell, hidden, batch in cases
        for problem in problems(cell, dtype, hidden, batch, training=False)
    )
    rows = []
    for cell, hidden, batch in setting.within(cases):
        _, ours = setting.pair(cell, dtype, hidden, hidden)
        contenders = {}
        for count in steps:
            x = setting.random(count, batch, hidden, dtype=dtype)
            with torch.no_grad():
                contenders[str(count)] = setting.captured(runs(ours, x, x, "forward"))
        found = setting.interleaved(contenders, 8)
        short, middle, long = (found[str(count)] for count in steps)
        row: Row = {
            "cell": cell,
            "hidden": hidden,
            "batch": batch,
            "us_a_step": middle / steps[1],
            "slope_us": (long - short) / (steps[2] - steps[0]),
            "floor_us": BARRIER_US + READ_US,
        }
        rows.append(row)
        print(
            f"{cell:4} H{hidden:<4} B{batch:<2} {row['us_a_step']:5.2f} us, slope {row['slope_us']:5.2f}, "
            f"{row['slope_us'] - row['floor_us']:+.2f} from the floor of {row['floor_us']:.2f}",
            flush=True,
        )
    return rows
