"""Which backend runs what, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recurrence import assert_same, dense, dense_grads, pair, tensors
from tilefit import gpus
from tilefit.cost import recurrent_times
from tilefit.cost.recurrent_times import Row, Table
from tilefit.errors import TilefitError, UsageError
from tilefit.nn import LSTM
from tilefit.rnn import dispatch, passes, reference
from tilefit.rnn.call import Call
from tilefit.rnn.cells import Grads, Rows
from tilefit.rnn.dispatch import choose

CUDA = torch.device("cuda", 0)
COLUMNS = list(Row._fields)


def call(cell: str = "lstm", **changes: Any) -> Call:
    dtype = changes.get("dtype", torch.bfloat16)
    base = Call(
        cell, dtype, CUDA, False, 1024, 1024, 8, 256, 1, 1, 0, False, False, False, dtype, tf32=False
    )  # fmt: skip
    return base._replace(**changes)


def row(persistent_us: float | None, cudnn_us: float | None, **sizes: Any) -> list[Any]:
    """A measured size: an LSTM of 1024 units, mini-batch 8, bf16, forward, no faster in a graph."""
    default = {
        "cell": "lstm", "dtype": "bf16", "hidden": 1024, "batch": 8, "steps": 256, "directions": 1,
        "training": False, "persistent_captured_us": persistent_us, "cudnn_captured_us": cudnn_us,
    }  # fmt: skip
    values = {**default, "persistent_us": persistent_us, "cudnn_us": cudnn_us, **sizes}
    return [values[name] for name in COLUMNS]


Measure = Callable[..., None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Says what was measured on an H200, on which the persistent kernels run all but hidden size 4096."""

    def refusal(call: Call) -> str | None:
        return "the weights do not fit" if call.hidden == 4096 else None

    def measure(*rows: list[Any], gpu: str = "h200", on: str = "h200") -> None:
        (tmp_path / f"{gpu}.json").write_text(
            json.dumps({"columns": dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))}), "utf-8"
        )
        monkeypatch.setattr(dispatch, "gpu_of", lambda device: gpus.get(on))

    monkeypatch.setattr(dispatch, "persistent", lambda: SimpleNamespace(refusal=refusal))
    monkeypatch.setattr(recurrent_times, "DATA", tmp_path)
    monkeypatch.delenv("TILEFIT_RNN", raising=False)
    monkeypatch.setattr(dispatch, "_warmed_up", set())
    dispatch._choose.cache_clear()
    dispatch._table.cache_clear()
    recurrent_times.table.cache_clear()
    yield measure
    dispatch._choose.cache_clear()
    dispatch._table.cache_clear()
    recurrent_times.table.cache_clear()


def test_the_faster_one_runs(measured: Measure) -> None:
    measured(row(1.5, 10.0), row(4.0, 3.0, cell="gru"), row(7.0, 9.0, training=True))
    assert choose(call()).backend == "persistent"
    assert "1.50 us a step, cuDNN 10.00" in choose(call()).reason
    assert choose(call("gru")).backend == "cudnn"
    assert choose(call(training=True)).backend == "persistent"


def test_a_time_that_the_host_limits_must_be_clearly_shorter(measured: Measure) -> None:
    measured(row(4.0, 4.2, persistent_captured_us=4.0, cudnn_captured_us=4.2))
    assert choose(call()).backend == "cudnn"
    assert choose(call()).reason.endswith("persistent 4.00, which is too close")
    assert choose(call(captured=True)).backend == "persistent"


def test_a_captured_call_runs_what_is_faster_in_a_graph(measured: Measure) -> None:
    measured(
        row(1.5, 10.0, persistent_captured_us=1.4, cudnn_captured_us=1.2),
        row(4.0, 3.0, cell="gru", persistent_captured_us=1.0, cudnn_captured_us=2.0),
    )
    assert choose(call()).backend == "persistent"
    assert choose(call(captured=True)).backend == "cudnn"
    assert "in a CUDA graph: 1.20 us a step, persistent 1.40" in choose(call(captured=True)).reason
    assert choose(call("gru")).backend == "cudnn"
    assert choose(call("gru", captured=True)).backend == "persistent"


class Stream:
    """The current stream of the GPU: its handle, 0 for the default one, and whether it captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle, self.captures = 0, False
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.handle, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)

    def chosen(self, call: Call, backend: str | None = None) -> str:
        return choose(dispatch.in_graph(call, backend), backend).backend


def test_what_is_captured_has_warmed_up(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(row(1.5, 10.0, persistent_captured_us=1.4, cudnn_captured_us=1.2))
    stream = Stream(monkeypatch)
    assert stream.chosen(call()) == "persistent"
    stream.handle, stream.captures = 1, True
    assert stream.chosen(call()) == "persistent"  # cuDNN did not run before
    stream.captures = False
    assert stream.chosen(call()) == "cudnn"
    stream.captures = True
    assert stream.chosen(call()) == "cudnn"
    assert stream.chosen(call(steps=128)) == "persistent"
    assert stream.chosen(call(), "persistent") == "persistent"
    stream.handle, stream.captures = 0, False
    assert stream.chosen(call()) == "persistent"


def test_a_forced_backend_asks_nothing_of_the_others(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they would ask the GPU a capture may forbid."""
    measured(row(1.5, 10.0))
    stream = Stream(monkeypatch)
    stream.handle, stream.captures = 1, True
    monkeypatch.setattr(dispatch, "refusal", lambda call: pytest.fail("the persistent kernels were asked"))
    assert stream.chosen(call(), "cudnn") == "cudnn"
    monkeypatch.setenv("TILEFIT_RNN", "reference")
    assert stream.chosen(call()) == "reference"


def test_the_shipped_measurements_know_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an LSTM that our kernels run faster, but not in a CUDA graph, and of an RNN that is the opposite."""
    monkeypatch.setattr(dispatch, "persistent", lambda: SimpleNamespace(refusal=lambda *_, **__: None))
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: gpus.get("h200"))
    monkeypatch.delenv("TILEFIT_RNN", raising=False)
    dispatch._choose.cache_clear()
    dispatch._table.cache_clear()
    recurrent_times.table.cache_clear()
    wide = call(dtype=torch.float16, hidden=2048, input=2048, batch=64)
    small = call("rnn_tanh", dtype=torch.float16, hidden=256, input=256, training=True)
    found = [choose(each._replace(captured=c)).backend for each in (wide, small) for c in (False, True)]
    dispatch._choose.cache_clear()
    dispatch._table.cache_clear()
    recurrent_times.table.cache_clear()
    assert found == ["persistent", "cudnn", "cudnn", "persistent"]


def test_both_are_judged_at_one_size(measured: Measure) -> None:
    """Short calls cost the host more a step. cuDNN persists at 512 units, not at 650 and at 1536."""
    short = row(55.0, 50.0, dtype="fp16", hidden=512, batch=16, steps=25)
    long = row(24.0, 45.0, dtype="fp16", hidden=1536, batch=16, steps=50)
    measured(short, long)
    found = choose(call(dtype=torch.float16, hidden=650, batch=16, steps=35))
    assert found.backend == "persistent"
    assert found.reason.startswith("measured with 1536 units, mini-batch 16, 50 steps: 24.00 us a step")
    assert choose(call(dtype=torch.float16, hidden=640, batch=16, steps=35)).backend == "cudnn"


def test_a_single_step_with_backward_runs_by_the_cell_functions(measured: Measure) -> None:
    measured(row(1.5, 10.0), row(1.5, 10.0, training=True), row(1.5, 10.0, cell="rnn_tanh", training=True))
    step = call(steps=1, training=True)
    assert choose(step).backend == "cell"
    assert choose(call(steps=1, reset=True)).backend == "cell"
    assert choose(call(steps=1)).backend == "persistent"
    assert choose(step._replace(hidden=32)).backend == "persistent"
    assert choose(step._replace(captured=True)).backend == "persistent"
    assert choose(step._replace(steps=2)).backend == "persistent"
    assert choose(step._replace(cell="rnn_tanh")).backend == "persistent"
    assert choose(step._replace(ragged=True)).backend == "persistent"
    assert choose(step._replace(proj=16)).backend == "cudnn"
    assert choose(step._replace(device=None)).backend == "cudnn"


def test_a_single_step_runs_by_cudnn_where_nothing_was_measured(measured: Measure) -> None:
    measured(row(1.5, 10.0, training=True), on="a100-sxm-80gb")
    assert choose(call(steps=1, training=True)).backend == "cudnn"


def test_a_relu_rnn_is_taken_to_be_as_fast_as_a_tanh_rnn(measured: Measure) -> None:
    measured(row(1.2, 6.0, cell="rnn_tanh"), row(9.0, 3.0))
    assert choose(call("rnn_relu")).backend == "persistent"
    dispatch._table.cache_clear()
    recurrent_times.table.cache_clear()
    dispatch._choose.cache_clear()
    measured(row(1.2, 6.0, cell="rnn_tanh"), row(7.0, 6.0, cell="rnn_relu"))
    assert choose(call("rnn_relu")).backend == "cudnn"


def test_a_size_in_between_takes_the_nearest(measured: Measure) -> None:
    measured(row(1.5, 10.0), row(9.0, 3.0, batch=64), row(9.0, 3.0, hidden=2048))
    assert choose(call(batch=16)).backend == "persistent"
    assert choose(call(batch=40)).backend == "cudnn"
    assert choose(call(hidden=1400)).backend == "persistent"
    assert choose(call(hidden=1500)).backend == "cudnn"
    assert choose(call(hidden=32, batch=1)).backend == "persistent"


def test_nothing_beyond_what_was_measured_is_promised(measured: Measure) -> None:
    measured(row(1.5, 10.0))
    for beyond in (
        call(batch=9),
        call(hidden=1032),
        call("gru"),
        call(dtype=torch.float32),
        call(training=True),
    ):
        assert choose(beyond).backend == "cudnn"
        assert "measured" in choose(beyond).reason


def test_cudnn_is_taken_where_it_runs_the_same_algorithm(measured: Measure) -> None:
    fp16 = {"dtype": "fp16"}
    measured(
        row(2.0, 1.4, **fp16),
        row(2.0, 1.4, batch=16, **fp16),
        row(1.9, 10.0, batch=4, **fp16),
        row(1.9, 10.0),
    )
    half = {"dtype": torch.float16}
    assert choose(call(batch=16, **half)).backend == "cudnn"
    assert (
        choose(call(batch=12, **half)).backend == "persistent"
    )  # not a multiple of 8: cuDNN does not persist
    assert choose(call(layers=2, **half)).backend == "persistent"
    # Autocast to bf16: torch.nn runs fp16, and persists.
    assert choose(call(cudnn_dtype=torch.float16)).backend == "cudnn"


def test_the_kernels_are_asked_about_the_whole_call(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths and resets need room on the chip too."""

    def refusal(call: Call) -> str | None:
        return f"{call.steps} steps" if call.steps > 999 else "no room" if call.ragged or call.reset else None

    measured(row(1.5, 10.0))
    monkeypatch.setattr(dispatch, "persistent", lambda: SimpleNamespace(refusal=refusal))
    assert choose(call()).backend == "persistent"
    assert choose(call(steps=1000)) == ("cudnn", "1000 steps")
    assert choose(call(ragged=True)) == ("cudnn", "no room")
    assert choose(call(reset=True)).backend == "reference"


@pytest.mark.parametrize(("on", "backend"), [("h100-sxm", "persistent"), ("a100-sxm-80gb", "cudnn")])
def test_measurements_hold_for_the_generation(measured: Measure, on: str, backend: str) -> None:
    measured(row(1.5, 10.0), on=on)
    assert choose(call()).backend == backend


def test_refusals_are_the_reason(measured: Measure) -> None:
    measured(row(1.5, 10.0, hidden=4096))
    assert choose(call(hidden=4096)) == ("cudnn", "the weights do not fit")
    assert choose(call(device=None)).backend == "cudnn"
    assert choose(call(proj=8)).backend == "cudnn"
    assert choose(call(reset=True)).backend == "persistent"
    assert choose(call(reset=True, hidden=4096)).backend == "reference"
    with pytest.raises(TilefitError, match="no backend can run"):
        choose(call(reset=True, proj=8))


def test_a_backend_that_is_asked_for_runs_or_says_why_not(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(row(1.5, 10.0))
    assert choose(call(), "reference") == ("reference", "asked for")
    with pytest.raises(TilefitError, match="the weights do not fit"):
        choose(call(hidden=4096), "persistent")
    with pytest.raises(TilefitError, match="cannot reset"):
        choose(call(reset=True), "cudnn")
    monkeypatch.setenv("TILEFIT_RNN", "cudnn")
    assert choose(call()).backend == "cudnn"
    assert choose(call(), "persistent").backend == "persistent"  # the argument is closer
    monkeypatch.setenv("TILEFIT_RNN", "fast")
    with pytest.raises(UsageError, match="'fast'"):
        choose(call())


def test_a_backend_a_module_cannot_have_is_an_error() -> None:
    with pytest.raises(TilefitError, match="not on a CUDA device"):
        LSTM(4, 4, backend="persistent")(torch.zeros(2, 1, 4))


def test_the_choice_of_compiled_code(measured: Measure) -> None:
    x, w_hh = torch.zeros(4, 2, 8), torch.zeros(1, 32, 8)
    lstm = dispatch.CELLS["lstm"]
    assert dispatch.backend_of_layer(x, w_hh, lstm, None, None, False, "") == "reference"
    with pytest.raises(TilefitError, match="compiled code"):
        dispatch.backend_of_layer(x, w_hh, lstm, None, None, False, "cudnn")


def test_compiled_code_is_judged_once_and_calls_no_cell_functions(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operator asks at every call, and looking for the nearest size takes the time of many steps."""
    asked: list[Any] = []
    nearest = Table.nearest

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return nearest(*arguments, **options)

    measured(row(1.5, 10.0, training=True))
    monkeypatch.setattr(dispatch, "cuda_device", lambda x: CUDA)
    monkeypatch.setattr(Table, "nearest", counted)
    w_hh = torch.empty(1, 4096, 1024, dtype=torch.bfloat16, device="meta")
    for steps in (256, 1):
        x = torch.empty(steps, 8, 1024, dtype=torch.bfloat16, device="meta")
        for _ in range(3):
            found = dispatch.backend_of_layer(x, w_hh, dispatch.CELLS["lstm"], None, None, True, "")
            assert found == "persistent"
    assert len(asked) == 2


@pytest.mark.skipif(not list(recurrent_times.DATA.glob("*.json")), reason="no measurements are shipped yet")
def test_measurements_shipped_are_complete() -> None:
    for path in recurrent_times.DATA.glob("*.json"):
        content = json.loads(path.read_text("utf-8"))
        columns = content["columns"]
        rows = [Row(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        Table(rows, gpus.get(path.stem))
        for each in rows:
            times = [
                each.time_us(who, captured) for who in ("persistent", "cudnn") for captured in (False, True)
            ]
            assert min(time_us for time_us in times if not isnan(time_us)) > 0


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_kernels_are_given(
    cell: str, recompute: bool, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor is dense, of one element type, and of the size that is agreed."""
    given: list[tuple[Any, ...]] = []

    def forward(cell: Any, xg: Any, w_hh: Any, bias_n: Any, rows: Rows, *, save: bool) -> Any:
        steps, batch, directions, _ = xg.shape
        assert xg.shape == (steps, batch, directions, cell.gates * w_hh.shape[-1])
        assert (bias_n is not None) == cell.is_gru
        given.append((xg, w_hh, *rows))
        return reference.forward(cell, xg, w_hh, bias_n, dense(rows, w_hh, batch, cell), save=save)

    def backward(cell: Any, grads: Grads, results: Any, w_hh: Any, rows: Rows) -> Any:
        assert not cell.saved or results[1].shape[-1] == cell.saved * results[0].shape[-1]
        given.append((*grads, *results, w_hh, *rows))
        rows = dense(rows, w_hh, results[0].shape[1], cell)
        return reference.backward(cell, dense_grads(grads, results[0], rows), results, w_hh, rows)

    kernels = SimpleNamespace(refusal=lambda *_, **__: None, forward=forward, backward=backward)
    monkeypatch.setattr(passes, "persistent", lambda: kernels)
    monkeypatch.setattr(dispatch, "refusal", lambda call: None)
    monkeypatch.setitem(dispatch._REFUSALS, "persistent", lambda call: None)
    module, original = pair(
        cell, 4, 3, 2, bidirectional=True, batch_first=True, backend="persistent", recompute=recompute
    )
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    for each in (module, original):
        out, _ = each(x)
        out.transpose(0, 1)[1:].sum().backward()
    assert len(given) == 4
    assert all(t.is_contiguous() and t.dtype == torch.float64 for ts in given for t in ts if t is not None)
    assert_same(tensors(*module(x)), tensors(*original(x)))
    assert_same([p.grad for p in module.parameters()], [p.grad for p in original.parameters()])
