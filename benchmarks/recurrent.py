"""tilefit.nn.LSTM, GRU and RNN against torch.nn on the same GPU, interleaved.

    PYTHONPATH=src python benchmarks/recurrent.py grid --out grid.json
    PYTHONPATH=src python benchmarks/recurrent.py rest --out rest.json
    PYTHONPATH=src python benchmarks/recurrent.py grid rest --device cpu --tiny

Parts:
  grid          LSTM, GRU, tanh RNN x bf16, fp16 x hidden 256..2048 x mini-batch 1..64, 256 steps
  absolute      microseconds a step, and their distance to the floor of an exchange
  deepbench     DeepBench's recurrent training and inference lists
  models        whole training steps: language model, speech encoder, reinforcement learning
  memory        bytes saved for backward, what recomputing costs, small mini-batches at one activation budget
  peers         FlashRNN where it is installed, and a CUDA-graphed loop of one cuBLAS product a step
  correctness   random shapes against float64; repeated launches, bit for bit
  convergence   a small character model trained with each backend
  rest          all of them but the grid

A round times every contender once, so that a drift of the clocks hits all of them; figures are the lower
quartiles over the rounds, in microseconds a step (the layer's whole time, input product included, over its
steps). Inputs and weights are random. "captured" is the replay of a CUDA graph, without the host's launches.

A part past its budget of seconds starts nothing new and says what it left out. With `--device cpu --tiny`
everything runs at sizes that say nothing about speed, ours on the plain PyTorch reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import recurrent_absolute
import recurrent_convergence
import recurrent_correctness
import recurrent_deepbench
import recurrent_memory
import recurrent_models
import recurrent_peers
import torch
from recurrent_common import DTYPES, NAMES, Row, Setting, backend_of, copied, geomean, problems, runs

from tilefit.cost.recurrent_times import CUDNN, PERSISTENT
from tilefit.cost.recurrent_times import Row as TableRow
from tilefit.errors import TilefitError
from tilefit.nn import convert

STEPS = 256
HIDDEN = (256, 512, 768, 1024, 1536, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: PyTorch's cudnn algorithm choice: the largest hidden size its persistent kernels take.
PERSISTENT_HIDDEN = 1024
#: Seconds the grid takes on an H200, with the kernels to compile.
BUDGET_S = 120.0


def persists(cell: str, dtype: torch.dtype, hidden: int, batch: int) -> bool:
    """Whether PyTorch asks cuDNN for a persistent kernel: its rules for one layer, one direction, sm_90."""
    if dtype != torch.float16:
        return False  # measured: no kernel that keeps its weights is launched for bf16
    if hidden <= (384 if cell == "rnn" else 192):
        return True
    common = hidden <= PERSISTENT_HIDDEN and hidden % 128 == 0 and batch % 8 == 0
    if cell == "gru" or not common or batch > 128:
        return False
    return cell == "lstm" or batch < 96 or hidden < 896


def grid(setting: Setting, options: argparse.Namespace) -> list[Row]:
    cells, dtypes = options.cells.split(","), options.dtypes.split(",")
    numbers = options.hidden, options.batches, options.steps
    hiddens, batches, lengths = (list(map(int, given.split(","))) for given in numbers)
    if setting.tiny:
        hiddens, batches, lengths = [8], [1, 2], [3]
    cases = list(itertools.product(cells, dtypes, hiddens, batches, lengths))
    setting.compile_ahead(
        p for cell, dtype, hidden, batch, _ in cases for p in problems(cell, DTYPES[dtype], hidden, batch)
    )
    rows = []
    for case in setting.within(cases):
        rows.append(cell_of_grid(setting, *case, backend=options.backend))
        print(line(rows[-1]), flush=True)
    summary(rows)
    return rows


TABLE = Path(__file__).parent.parent / "src" / "tilefit" / "cost" / "data" / "recurrent" / "h200.json"


def provenance(on_gpu: bool) -> dict[str, object]:
    """What the figures were measured with."""
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def times(rows: list[Row]) -> Iterator[TableRow]:
    """The times of our kernels, and of cuDNN in our modules, as rows of the table by which these choose."""
    for row in rows:
        size = (NAMES[row["cell"]], row["dtype"], row["hidden"], row["batch"], row["steps"], 1)
        for training, kind in ((False, "forward"), (True, "both")):
            if f"{kind}_refused" not in row:
                who = ("tilefit", "fallback", "tilefit_captured", "fallback_captured")
                yield TableRow(*size, training, *(round(row[f"{kind}_{name}"], 3) for name in who))


def install(rows: Iterable[TableRow], head: dict[str, object]) -> None:
    """Writes rows into the package's table, in place of those of the same sizes."""
    sizes = TableRow._fields.index("training") + 1
    columns = json.loads(TABLE.read_text("utf-8"))["columns"] if TABLE.exists() else {}
    table = {tuple(row[:sizes]): row for row in [*zip(*columns.values(), strict=True), *rows]}
    found = zip(TableRow._fields, zip(*table.values(), strict=True), strict=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(head)[:-1] + ',\n"columns": {\n' + lines + "\n}}\n")


def cell_of_grid(
    setting: Setting, cell: str, dtype_name: str, hidden: int, batch: int, steps: int, *, backend: str
) -> Row:
    dtype = DTYPES[dtype_name]
    x = setting.random(steps, batch, hidden, dtype=dtype).requires_grad_()
    grad = setting.random(steps, batch, hidden, dtype=dtype)
    row: Row = {
        "cell": cell,
        "dtype": dtype_name,
        "hidden": hidden,
        "batch": batch,
        "steps": steps,
        "cudnn_persists": persists(cell, dtype, hidden, batch),
    }
    theirs, ours = setting.pair(cell, dtype, hidden, hidden)
    fallback = convert(copied(theirs), backend=CUDNN)
    for kind in ("forward", "both"):
        contenders = {"cudnn": runs(theirs, x, grad, kind), "tilefit": runs(ours, x, grad, kind)}
        if backend == PERSISTENT:
            contenders["fallback"] = runs(fallback, x, grad, kind)
        ours.backend = backend or setting.ours
        try:
            contenders["tilefit"]()
        except TilefitError as error:
            row[f"{kind}_refused"] = str(error)
            ours.backend = setting.ours
        if kind == "forward":
            with torch.no_grad():
                expected, found = theirs(x)[0].float(), ours(x)[0].float()
            row["difference"] = float((found - expected).norm() / expected.norm())
        for name in list(contenders):
            contenders[f"{name}_captured"] = setting.captured(contenders[name])
        row["backend_captured"] = backend_of(ours)
        pairs = [("cudnn", "tilefit"), ("cudnn_captured", "tilefit_captured")]
        for name, microseconds in setting.interleaved(contenders, 4, close=pairs).items():
            row[f"{kind}_{name}"] = microseconds / steps
    row["backend"] = backend_of(ours)
    return row


def line(row: Row) -> str:
    figures = " ".join(
        f"{kind} {row[f'{kind}_cudnn']:6.2f} {row[f'{kind}_cudnn_captured']:6.2f} | "
        f"{row[f'{kind}_tilefit']:6.2f} {row[f'{kind}_tilefit_captured']:6.2f} "
        f"x{row[f'{kind}_cudnn'] / row[f'{kind}_tilefit']:.2f}"
        for kind in ("forward", "both")
    )
    return (
        f"{row['cell']:4} {row['dtype']} H{row['hidden']:<4} B{row['batch']:<2} T{row['steps']:<3} "
        f"{'P' if row['cudnn_persists'] else ' '}{'R' if 'both_refused' in row else ' '} "
        f"{figures} diff {row['difference']:.1e}"
    )


def summary(rows: list[Row]) -> None:
    plain = [row for row in rows if not row["cudnn_persists"]]
    small = [row for row in plain if row["batch"] <= 8]
    persistent = [row for row in rows if row["cudnn_persists"]]

    def ratio(row: Row, kind: str, mode: str) -> float:
        return float(row[f"{kind}_cudnn{mode}"] / row[f"{kind}_tilefit{mode}"])

    for kind, bars in (("forward", (4.0, 6.0, 2.5)), ("both", (2.5, 3.5, 1.8))):
        least = min([ratio(r, kind, "") for r in persistent], default=float("nan"))
        print(
            f"{kind}: geomean over all {geomean(ratio(r, kind, '') for r in rows):.2f}x eager "
            f"(bar {bars[0]}), small batches where cuDNN does not persist "
            f"{geomean(ratio(r, kind, '') for r in small):.2f}x (bar {bars[1]}), captured where it does not "
            f"persist {geomean(ratio(r, kind, '_captured') for r in plain):.2f}x (bar {bars[2]}), where it "
            f"persists {geomean(ratio(r, kind, '') for r in persistent):.2f}x (least {least:.2f})"
        )
        slow = [r for r in rows if min(ratio(r, kind, ""), ratio(r, kind, "_captured")) < 0.97]
        where = [(r["cell"], r["dtype"], r["hidden"], r["batch"]) for r in slow[:20]]
        print(f"{kind}: {len(slow)} of {len(rows)} cells below 0.97x: {where}")


#: Parts by name: what runs them, and the seconds they take on an H200 where no budget is given.
PARTS: dict[str, tuple[Callable[[Setting], object], float]] = {
    "absolute": (recurrent_absolute.absolute, recurrent_absolute.BUDGET_S),
    "deepbench": (recurrent_deepbench.deepbench, recurrent_deepbench.BUDGET_S),
    "models": (recurrent_models.models, recurrent_models.BUDGET_S),
    "memory": (recurrent_memory.memory, recurrent_memory.BUDGET_S),
    "correctness": (recurrent_correctness.correctness, recurrent_correctness.BUDGET_S),
    "convergence": (recurrent_convergence.convergence, recurrent_convergence.BUDGET_S),
    "peers": (recurrent_peers.peers, recurrent_peers.BUDGET_S),
}


#: Parts whose times tilefit chooses by.
TIMES = {"grid": times, "deepbench": recurrent_deepbench.times}


def main() -> str | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=["grid", "rest", *PARTS])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    parser.add_argument("--rounds", type=int, help="times each contender is timed")
    parser.add_argument("--budget-s", type=float, help="seconds for all the parts named together")
    parser.add_argument("--out", type=Path, help="JSON, written after each part")
    parser.add_argument(
        "--install", action="store_true", help="write the times of grid or deepbench into the package's table"
    )
    of_grid = parser.add_argument_group("grid")
    of_grid.add_argument("--cells", default="lstm,gru,rnn")
    of_grid.add_argument("--dtypes", default="bf16,fp16")
    of_grid.add_argument("--hidden", default=",".join(map(str, HIDDEN)))
    of_grid.add_argument("--batches", default=",".join(map(str, BATCHES)))
    of_grid.add_argument("--steps", default=str(STEPS))
    of_grid.add_argument("--backend", default="", help="force tilefit's backend")
    options = parser.parse_args()
    parts = {"grid": (lambda setting: grid(setting, options), BUDGET_S), **PARTS}
    names = list(dict.fromkeys(n for name in options.parts for n in (PARTS if name == "rest" else [name])))
    on_gpu = options.device == "cuda"
    if options.install and not on_gpu:
        parser.error("--install writes times of a GPU: leave out --device cpu")
    if options.install and "grid" in names and options.backend != PERSISTENT:
        parser.error("--install writes the grid's times of the persistent kernels: give --backend persistent")
    document = provenance(on_gpu)
    failed: list[str] = []
    started = time.perf_counter()
    for index, name in enumerate(names):
        part, budget_s = parts[name]
        if options.budget_s is not None:
            # What is left, shared out as the parts' own budgets are.
            left_s = options.budget_s - (time.perf_counter() - started)
            budget_s *= left_s / sum(parts[later][1] for later in names[index:])
        torch.manual_seed(0)
        begun = time.perf_counter()
        setting = Setting(torch.device(options.device), options.tiny, options.rounds, budget_s)
        try:
            document[name] = part(setting)
        except Exception:  # the other parts' figures are worth having
            logging.exception("part %s failed", name)
            failed.append(name)
        else:
            if options.install and name in TIMES:
                install(TIMES[name](document[name]), provenance(on_gpu))
        document[f"{name}_s"] = time.perf_counter() - begun
        print(f"{name}: {document[f'{name}_s']:.1f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1))
    return f"failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    sys.exit(main())
