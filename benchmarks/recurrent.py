"""tilefit.nn.LSTM, GRU and RNN against torch.nn on the same GPU, interleaved.

    PYTHONPATH=src python benchmarks/recurrent.py grid --out grid.json
    PYTHONPATH=src python benchmarks/recurrent.py models memory peers correctness convergence --out rest.json

Parts:
  grid          LSTM, GRU, tanh RNN x bf16, fp16 x hidden 256..2048 x mini-batch 1..64, 256 steps
  deepbench     DeepBench's recurrent training and inference lists
  models        whole training steps: language model, speech encoder, reinforcement learning
  memory        bytes saved for backward, and what recomputing costs; small mini-batches at one activation budget
  peers         FlashRNN where it is installed, and a CUDA-graphed loop of one cuBLAS product a step
  correctness   random shapes against float64; repeated launches, bit for bit
  convergence   a small character model trained with each backend

A round times every contender once, so that a drift of the clocks hits all of them; figures are medians over the
rounds, in microseconds a step (the layer's whole time, input product included, over its steps). Inputs and weights
are random. "captured" is the replay of a CUDA graph, which takes the host's launches out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import tilefit.nn as tnn
from tilefit.errors import TilefitError
from tilefit.rnn.cells import CELLS as KERNEL_CELLS
from tilefit.rnn.persistent import build, launch
from tilefit.rnn.persistent.choice import chosen
from tilefit.rnn.persistent.variant import Problem

STEPS = 256
HIDDEN = (256, 512, 768, 1024, 1536, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CELLS = {"lstm": (nn.LSTM, tnn.LSTM, {}), "gru": (nn.GRU, tnn.GRU, {}), "rnn": (nn.RNN, tnn.RNN, {})}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: PyTorch's cudnn algorithm choice: the largest hidden size its persistent kernels take.
PERSISTENT_HIDDEN = 1024

Run = Callable[[], object]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def pair(
    cell: str, dtype: torch.dtype, inputs: int, hidden: int, **options: object
) -> tuple[nn.Module, nn.Module]:
    """torch's layer and tilefit's, with the same weights."""
    theirs, ours, extra = CELLS[cell]
    reference = theirs(inputs, hidden, **extra, **options).cuda().to(dtype)
    layer = ours(inputs, hidden, **extra, **options).cuda().to(dtype)
    layer.load_state_dict(reference.state_dict())
    return reference, layer


def runs(layer: nn.Module, x: Tensor, grad: Tensor, kind: str) -> Run:
    parameters = list(layer.parameters())
    if kind == "forward":

        def forward() -> object:
            with torch.no_grad():
                return layer(x)[0]

        return forward

    def both() -> object:
        out = layer(x)[0]
        return torch.autograd.grad(out, [x, *parameters], grad)

    return both


def captured(run: Run) -> Run:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def interleaved(contenders: dict[str, Run], rounds: int = 4) -> dict[str, float]:
    """Median microseconds of each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, run in contenders.items():
        run()
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def persists(cell: str, dtype: torch.dtype, hidden: int, batch: int) -> bool:
    """Whether PyTorch asks cuDNN for a persistent kernel here (its rules for one layer, one direction, sm_90)."""
    if hidden <= (384 if cell == "rnn" else 192):
        return True
    common = dtype == torch.float16 and hidden <= PERSISTENT_HIDDEN and hidden % 128 == 0 and batch % 8 == 0
    if cell == "gru" or not common or batch > 128:
        return False
    return cell == "lstm" or batch < 96 or hidden < 896


def compile_ahead(options: argparse.Namespace) -> None:
    """Compiles what the grid needs, on all processors: a user meets one or two kernels, the grid hundreds."""
    capacity, capability = launch.capacity(0), torch.cuda.get_device_capability()
    jobs = set()
    names = {"lstm": "lstm", "gru": "gru", "rnn": "rnn_tanh"}
    for cell in options.cells.split(","):
        for dtype in options.dtypes.split(","):
            for hidden in map(int, options.hidden.split(",")):
                for batch in map(int, options.batches.split(",")):
                    for backward in (False, True):
                        element = str(DTYPES[dtype]).removeprefix("torch.")
                        problem = Problem(KERNEL_CELLS[names[cell]], element, hidden, batch, 1, backward)
                        variant = chosen(problem, capacity)
                        if variant is not None:
                            jobs.add(
                                (
                                    "backward" if backward else "forward",
                                    tuple(variant.constants(problem).items()),
                                )
                            )
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, [(name, dict(constants), capability) for name, constants in jobs]))


def compile_one(job: tuple[str, dict[str, int], tuple[int, int]]) -> None:
    build.binary(*job)


def grid(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    compile_ahead(options)
    started = time.perf_counter()
    for cell in options.cells.split(","):
        for dtype_name in options.dtypes.split(","):
            for hidden in map(int, options.hidden.split(",")):
                for batch in map(int, options.batches.split(",")):
                    if time.perf_counter() - started > options.budget_s:
                        print("out of time", flush=True)
                        return rows
                    rows.append(cell_of_grid(cell, dtype_name, hidden, batch, options))
                    print(line(rows[-1]), flush=True)
    summary(rows)
    if options.install:
        install(rows)
    return rows


TABLE = Path(__file__).parent.parent / "src" / "tilefit" / "rnn" / "data" / "h200.json"


def install(rows: list[dict[str, object]]) -> None:
    """Writes the table from which tilefit chooses between its kernels and cuDNN."""
    columns = "cell dtype hidden batch steps directions training persistent_us cudnn_us".split()
    table = []
    for row in rows:
        if "refused" in row:
            continue
        cell = "rnn_tanh" if row["cell"] == "rnn" else row["cell"]
        for training, kind in ((False, "forward"), (True, "both")):
            head = [cell, row["dtype"], row["hidden"], row["batch"], row["steps"], 1, training]
            table.append(
                [*head, round(float(row[f"{kind}_tilefit"]), 3), round(float(row[f"{kind}_cudnn"]), 3)]
            )  # type: ignore[arg-type]
    lines = ",\n".join(json.dumps(entry) for entry in table)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text('{"columns": ' + json.dumps(columns) + ',\n"rows": [\n' + lines + "\n]}\n")


def cell_of_grid(
    cell: str, dtype_name: str, hidden: int, batch: int, options: argparse.Namespace, steps: int = STEPS
) -> dict[str, object]:
    dtype = DTYPES[dtype_name]
    x = random(steps, batch, hidden, dtype=dtype).requires_grad_()
    grad = random(steps, batch, hidden, dtype=dtype)
    row: dict[str, object] = {
        "cell": cell,
        "dtype": dtype_name,
        "hidden": hidden,
        "batch": batch,
        "steps": steps,
        "cudnn_persists": persists(cell, dtype, hidden, batch),
    }
    theirs, ours = pair(cell, dtype, hidden, hidden)
    if options.backend:
        ours.backend = options.backend
    try:
        with torch.no_grad():
            ours(x)
        torch.autograd.grad(ours(x)[0], [x, *ours.parameters()], grad)
    except TilefitError as error:
        row["refused"] = str(error)
        ours.backend = None
    with torch.no_grad():
        expected, found = theirs(x)[0].float(), ours(x)[0].float()
        row["difference"] = float((found - expected).norm() / expected.norm())
    for kind in ("forward", "both"):
        contenders = {"cudnn": runs(theirs, x, grad, kind), "tilefit": runs(ours, x, grad, kind)}
        for name in list(contenders):
            contenders[f"{name}_captured"] = captured(contenders[name])
        for name, microseconds in interleaved(contenders, options.rounds).items():
            row[f"{kind}_{name}"] = microseconds / steps
    row["backend"] = backend_of(ours)
    return row


def backend_of(layer: nn.Module) -> str:
    return str(layer.explain().backend)


def line(row: dict[str, object]) -> str:
    figures = " ".join(
        f"{kind} {row[f'{kind}_cudnn']:6.2f} {row[f'{kind}_cudnn_captured']:6.2f} | "
        f"{row[f'{kind}_tilefit']:6.2f} {row[f'{kind}_tilefit_captured']:6.2f} "
        f"x{row[f'{kind}_cudnn'] / row[f'{kind}_tilefit']:.2f}"
        for kind in ("forward", "both")
    )
    return (
        f"{row['cell']:4} {row['dtype']} H{row['hidden']:<4} B{row['batch']:<2} "
        f"{'P' if row['cudnn_persists'] else ' '}{'R' if 'refused' in row else ' '} "
        f"{figures} diff {row['difference']:.1e}"
    )


def geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else float("nan")


def summary(rows: list[dict[str, object]]) -> None:
    plain = [row for row in rows if not row["cudnn_persists"]]
    small = [row for row in plain if int(str(row["batch"])) <= 8]
    persistent = [row for row in rows if row["cudnn_persists"]]

    def ratio(row: dict[str, object], kind: str, mode: str) -> float:
        return float(row[f"{kind}_cudnn{mode}"]) / float(row[f"{kind}_tilefit{mode}"])  # type: ignore[arg-type]

    for kind, bars in (("forward", (4.0, 6.0, 2.5)), ("both", (2.5, 3.5, 1.8))):
        print(
            f"{kind}: geomean over all {geomean([ratio(r, kind, '') for r in rows]):.2f}x eager (bar {bars[0]}), "
            f"small batches where cuDNN does not persist {geomean([ratio(r, kind, '') for r in small]):.2f}x "
            f"(bar {bars[1]}), captured where it does not persist "
            f"{geomean([ratio(r, kind, '_captured') for r in plain]):.2f}x (bar {bars[2]}), where it persists "
            f"{geomean([ratio(r, kind, '') for r in persistent]):.2f}x (least "
            f"{min([ratio(r, kind, '') for r in persistent], default=float('nan')):.2f})"
        )
        slow = [r for r in rows if min(ratio(r, kind, ""), ratio(r, kind, "_captured")) < 0.97]
        print(
            f"{kind}: {len(slow)} of {len(rows)} cells below 0.97x: {[(r['cell'], r['dtype'], r['hidden'], r['batch']) for r in slow][:20]}"
        )


PARTS = {"grid": grid}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--cells", default="lstm,gru,rnn")
    parser.add_argument("--dtypes", default="bf16,fp16")
    parser.add_argument("--hidden", default=",".join(map(str, HIDDEN)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--backend", default="", help="force tilefit's backend")
    parser.add_argument("--install", action="store_true", help="write the dispatch table into the package")
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    document: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for part in options.parts:
        document[part] = PARTS[part](options)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    sys.exit(main())
