"""The capture leaves everything as it was, and says what is wrong where it cannot go on."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as nn_module

from alone import alone
from capturing import Lines, captured, entries, names, products, rows
from tilefit.capture import capture
from tilefit.errors import CaptureError, UsageError
from tilefit.ops import FORWARD, Conv, Gemm, Step


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


# ---- nothing is changed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"train": False}, {"on_cpu": True}, {"channels_last": True, "amp": "fp16"}]
)
def test_the_model_is_not_changed(options: dict[str, Any]) -> None:
    model = _model().eval()
    model[0].weight.requires_grad_(False)
    kept = copy.deepcopy(model.state_dict())
    pointers = [p.data_ptr() for p in model.parameters()]
    capture(model, torch.randn(2, 3, 8, 8), **options)
    assert not model.training
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [False, *[True] * 5]
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert model[0].weight.is_contiguous()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks


def test_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    x = torch.randn(4, 4)
    kept = torch.get_rng_state(), random.getstate()
    captured(lambda self, x: F.dropout(x, 0.5) + random.random(), x, on_cpu=True, train=False)
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert random.getstate() == kept[1]


def test_a_model_too_large_for_this_machine_is_captured() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20, bias=False)
    step = capture(model, rows(16, 1 << 20), train=False)
    assert step.memory.parameter_bytes == 1 << 42


def test_inputs_may_be_one_tensor_a_tuple_or_a_mapping() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

    a, b = torch.zeros(4, 8), torch.zeros(8, 2)
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        assert products(capture(Two(), inputs, train=False)) == [(FORWARD, 4, 2, 8, "NN")]
    named = capture(Two(), {"a": a, "b": b}, train=False)
    assert named.inputs == ("a: float32[4,8]", "b: float32[8,2]")
    assert capture(nn.Linear(8, 2), a, train=False).inputs == ("0: float32[4,8]",)


def test_tensors_in_a_mapping_among_the_inputs_are_told() -> None:
    step = captured(lambda self, batch: batch["x"] * 2, {"x": rows(2, 3), "count": 3}, train=False)
    assert (step.inputs, step.batch) == (("0.x: float32[2,3]",), 2)


def test_an_input_that_wants_a_gradient_gets_one() -> None:
    step = capture(nn.Linear(8, 2), torch.zeros(4, 8, requires_grad=True), optimizer="none")
    assert "backward-data" in {phase for phase, *_ in products(step)}


# ---- where operations come from ----------------------------------------------------------------


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner["a"](x)  # line a
        x = torch.tanh(x)  # line tanh
        return self.inner["b"](x)  # line b


def _line(word: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        number = next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# line {word}"))
    return f"test_run.py:{number}"


def test_every_product_names_its_module_its_line_and_its_parameter() -> None:
    step = capture(_Named(), rows(4, 8, requires_grad=True), optimizer="none")
    seen = {(e.phase, e.site.module, e.site.source.rsplit("/", 1)[-1]) for e in entries(step, Gemm)}
    assert seen == {
        (phase, f"inner.{name}", _line(name))
        for name in ("a", "b")
        for phase in (FORWARD, "backward-data", "backward-weight")
    }
    (tanh,) = entries(step, "tanh")
    (gradient,) = entries(step, "tanh_backward")
    assert tanh.site == gradient.site
    assert (tanh.site.module, tanh.site.source.rsplit("/", 1)[-1]) == ("", _line("tanh"))
    assert step.modules["inner.a"] == "Linear"
    assert step.modules[""] == "_Named"


# ---- losses ------------------------------------------------------------------------------------


def test_without_a_loss_the_mean_stands_for_it_and_the_step_says_so() -> None:
    step = capture(nn.Linear(8, 2), rows(4, 8), optimizer="none")
    assert "mean" in names(step)
    assert any("mean" in note for note in step.notes)


def test_a_loss_given_or_returned_is_used() -> None:
    given = capture(nn.Linear(8, 2), rows(4, 8), optimizer="none", loss=lambda y: y.square().sum())
    returned = captured(
        lambda self, x: {"loss": self.l(x).square().sum()}, rows(4, 8), parts={"l": nn.Linear(8, 2)}
    )
    for step in (given, returned):
        assert "mean" not in names(step)
        assert step.notes == ()


@pytest.mark.parametrize("is_loss", [True, False])
def test_one_number_beside_the_output_is_the_loss_if_it_is_made_of_it(is_loss: bool) -> None:
    def forward(self, x):
        scores = self.scores(x)
        return scores, (scores if is_loss else self.side(x)).square().sum()

    step = captured(
        forward,
        rows(4, 8),
        parts={"scores": nn.Linear(8, 2), "side": nn.Linear(8, 3)},
        optimizer="none",
    )
    assert ("mean" not in names(step)) == is_loss
    assert (not step.notes) == is_loss


def test_fp16_scales_the_loss_and_unscales_the_gradients() -> None:
    step = capture(nn.Linear(8, 2), rows(4, 8), amp="fp16")
    assert entries(step, "_amp_foreach_non_finite_check_and_unscale_", "optimizer")
    assert not entries(
        capture(nn.Linear(8, 2), rows(4, 8), amp="bf16"), "_amp_foreach_non_finite_check_and_unscale_"
    )


def test_an_output_that_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(CaptureError, match="nothing to train on") as caught:
        captured(lambda self, x: x.argmax(-1), rows(4, 8))
    assert "--infer" in caught.value.hint


# ---- what CUDA would say -----------------------------------------------------------------------


def test_code_that_moves_tensors_to_cuda_runs() -> None:
    def moves(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        assert x.device == torch.device("cuda", 0)
        y = x.cuda().to("cuda").to(0).to(x.device, torch.float16).cpu().to("cpu")
        z = torch.zeros(4, 8, device="cuda") + torch.ones(8, device=x.device)
        assert torch.cuda.get_device_capability() >= (8, 0)
        return y + z

    step = captured(moves, rows(4, 8), train=False)
    assert names(step) == ["_to_copy", "zeros", "ones", "add", "add"]


def test_compiled_code_runs_as_python() -> None:
    step = captured(torch.compile(lambda self, x: x.exp()), rows(4, 8), train=False)
    assert names(step) == ["exp"]


def test_what_is_compiled_in_a_capture_and_kept_is_compiled_after_it() -> None:
    kept: dict[str, Any] = {}

    def compiled_once(self: nn.Module, x: torch.Tensor) -> Any:
        if not kept:
            kept["call"] = torch.compile(F.silu, backend="eager")
            kept["decorated"] = torch.compile(backend="eager")(lambda x: x.exp().sin())
        return kept["decorated"](kept["call"](x))

    for _ in range(2):
        assert names(captured(compiled_once, rows(4, 8), train=False)) == ["silu", "exp", "sin"]
    counters.clear()
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled_once(nn.Module(), x), F.silu(x).exp().sin())
    assert counters["stats"]["unique_graphs"] == 2
    whole = torch.compile(lambda x: kept["call"](x), backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(x), F.silu(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_that_is_looked_at_eagerly_is_noted(in_place: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8))
    if in_place:
        model[0].compile()
    else:
        model = torch.compile(model)
    x = torch.empty(4, 8)

    def step() -> None:
        model(torch.empty(4, 8)).sum().backward()

    assert any("--compile" in note for note in capture(model, x).notes)
    assert any("--compile" in note for note in capture(step, on_cpu=True).notes)
    assert not any("--compile" in note for note in capture(model, x, compile=True).notes)


def test_a_model_that_asks_is_told_that_it_is_compiled() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp() if torch.compiler.is_compiling() else x.sin()

    for compiled, name in ((True, "exp"), (False, "sin")):
        assert names(capture(Asking(), rows(4, 8), train=False, compile=compiled)) == [name]
    assert not torch.compiler.is_compiling()


def test_values_that_split_a_compiled_model_are_noted() -> None:
    class Dropping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand([], device="cpu") < 0.0 else x.exp()

    compiled, eager = (capture(Dropping(), rows(4, 8), train=False, compile=c) for c in (True, False))
    (note,) = set(compiled.notes) - set(eager.notes)
    assert "reads 1 tensor value: there torch.compile splits the model" in note


class _Attention(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_empty(0, 8), super().forward(x)])


class _Caching(nn.Module):
    """Two layers whose attention fills a cache that is empty; each layer may be dropped by chance."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": _Attention(8, 8)}) for _ in range(2))
        self.drops = drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.drops or torch.rand([], device="cpu") >= 0.0:
                x = layer["attention"](x)
        return x


@pytest.mark.parametrize(
    ("drops", "compiled", "layers"), [(True, True, 2), (False, True, 0), (True, False, 0)]
)
def test_layers_are_compiled_one_by_one_where_a_split_model_fills_a_cache(
    drops: bool, compiled: bool, layers: int
) -> None:
    step = capture(_Caching(drops), rows(4, 8), compile=compiled)
    assert step.settings.recompiled == layers
    assert step.settings.split == (layers > 0)
    assert any("compiles 2 layers that fill a KV cache one by one" in note for note in step.notes) == (
        layers > 0
    )


def test_the_settings_say_how_it_ran() -> None:
    step = capture(_model(), rows(2, 3, 8, 8), channels_last=True, compile=True, amp="bf16", name="mine")
    settings = step.settings
    assert (settings.channels_last, settings.compiled, settings.amp, settings.optimizer) == (
        True, True, "bf16", "adamw",
    )  # fmt: skip
    assert step.model == "mine"
    assert all(entry.op.channels_last for entry in entries(step, Conv) if isinstance(entry.op, Conv))


def test_real_data_gives_the_same_products_as_shapes() -> None:
    image = torch.randn(2, 3, 8, 8)
    shapes, real = (capture(_model(), image, amp="bf16", on_cpu=on_cpu) for on_cpu in (False, True))
    assert products(shapes) == products(real)
    assert [e.op for e in entries(shapes, Conv)] == [e.op for e in entries(real, Conv)]


# ---- errors ------------------------------------------------------------------------------------


def _branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.exp() if x.sum() > 0 else x


@pytest.mark.parametrize(
    "function",
    [
        _branches,
        lambda self, x: x[x[:, 0] > 0],
        lambda self, x: x[torch.nonzero(x[:, 0])],
        lambda self, x: x * float(x.mean()),
        lambda self, x: x * int(x.argmax()),
        lambda self, x: torch.from_numpy(x.detach().cpu().numpy()).exp(),
        lambda self, x: x.unique(),
        lambda self, x: x.masked_select(x > 0),
        lambda self, x: torch.repeat_interleave(x, (x[:, 0] > 0).long(), dim=0),
    ],
)
def test_what_depends_on_values_names_the_line_and_the_way_out(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(function, rows(4, 8), train=False)
    assert "value" in caught.value.what
    assert "test_run.py:" in caught.value.where
    assert "--on-cpu" in caught.value.hint
    step = captured(function, torch.randn(4, 8), train=False, on_cpu=True)
    assert step.ops


def test_a_model_that_raises_is_quoted_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"raised RuntimeError: .*dim") as caught:
        captured(lambda self, x: self.l(x.t()), rows(4, 8), parts={"l": nn.Linear(8, 2)})
    assert "test_run.py:" in caught.value.where
    assert "shapes" in caught.value.hint


def test_a_wrong_argument_is_quoted() -> None:
    with pytest.raises(CaptureError, match="unexpected keyword argument 'y'"):
        capture(nn.Linear(8, 2), {"y": rows(4, 8)})


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Lines(lambda self, x: x)
    model.lock = threading.Lock()
    with pytest.raises(CaptureError, match="cannot be copied"):
        capture(model, rows(4, 8))


def test_a_step_on_real_tensors_is_refused_rather_than_seen_as_empty() -> None:
    weight = torch.randn(8, 8)

    def on_the_host() -> torch.Tensor:
        return weight @ weight

    with pytest.raises(CaptureError, match="did nothing"):
        capture(on_the_host)
    with pytest.raises(CaptureError, match="different devices") as caught:
        capture(nn.Linear(8, 8).forward, rows(4, 8))
    assert "factory" in caught.value.hint


def test_a_scripted_model_is_not_trained() -> None:
    with pytest.raises(UsageError, match="scripted or traced"):
        capture(torch.jit.script(nn.Sequential(nn.Linear(8, 8))), torch.empty(4, 8))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_was_set_on_the_model_runs_on_the_copy(compiled: bool) -> None:
    """``model.forward = torch.compile(model.forward)``, and a wrapper that closes over the old one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    forward = model.forward
    model.forward = torch.compile(forward) if compiled else lambda x: forward(x).relu()  # type: ignore
    step = capture(model, torch.empty(4, 8), train=False)
    assert step.parameter_count == 8 * 16 + 16 + 16 * 4 + 4
    assert [entry.parameter for entry in step.ops if isinstance(entry.op, Gemm)] == ["0.weight", "1.weight"]
    assert step.memory.peak_bytes < 2 * step.memory.parameter_bytes
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (nn.Linear(8, 8).half(), (torch.empty(4, 8),), "a matrix product of float32 and float16"),
        (nn.Linear(8, 8, bias=False), (torch.empty(4, 8, dtype=torch.int64),), "int64 and float32"),
    ],
)
def test_element_types_that_cuda_does_not_multiply(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], said: str
) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        capture(model, inputs, train=False)
    assert "--amp" in caught.value.hint
    floating = tuple(x.float() for x in inputs)
    assert len(products(capture(model, floating, train=False, amp="bf16"))) == 1


def test_attention_and_products_of_integers_are_checked_too() -> None:
    x = torch.empty(2, 4, 16, 64)
    with pytest.raises(CaptureError, match="an attention of float32 and bfloat16"):
        captured(lambda self, q, k: F.scaled_dot_product_attention(q, k, k), x, x.bfloat16(), train=False)
    with pytest.raises(CaptureError, match="a matrix product of int64 cannot run"):
        captured(lambda self, x: x @ x, torch.empty(4, 4, dtype=torch.int64), train=False)


def test_samples_of_different_lengths_in_a_list() -> None:
    samples = [torch.empty(n, 8) for n in (3, 17, 99, 5)]
    step = captured(lambda self, xs: [x.exp() for x in xs], samples, train=False)
    assert step.inputs == ("0: 4 x float32[3..99,8]",)
    assert step.batch == 4


def test_an_interrupt_passes_through() -> None:
    def interrupted(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(interrupted, rows(4, 8))
    assert torch.overrides._get_current_function_mode() is None


def test_the_batch_of_a_time_first_recurrent_model_is_not_its_length() -> None:
    class TimeFirst(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=batch_first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    assert capture(TimeFirst(batch_first=False), torch.empty(35, 20, 8)).batch == 20
    assert capture(TimeFirst(batch_first=True), torch.empty(20, 35, 8)).batch == 20


def test_as_many_features_as_samples_make_no_graph() -> None:
    """What a weight multiplies are features; what multiplies them without one says which nodes are joined."""

    class Gated(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.layer = nn.Linear(features, 8)

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * gate

    class Graph(Gated):
        def forward(self, x: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
            return joined @ self.layer(x)

    square = torch.empty(64, 64)
    assert capture(Gated(64), (square, torch.empty(64, 8))).batch == 64
    assert capture(Graph(48), (torch.empty(64, 48), square)).batch == 0


def test_what_the_loss_leaves_out_is_known() -> None:
    parts = {name: nn.Linear(8, 8) for name in ("trunk", "head", "other", "unused")}

    def forward(self: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.trunk(x)
        return {"head": self.head(x), "other": self.other(x)}

    def left_out(loss: Callable[[Any], torch.Tensor] | None) -> tuple[str, ...]:
        step = captured(forward, rows(4, 8), parts=parts, loss=loss)
        assert Step.from_json(step.to_json()) == step
        return step.left_out

    assert left_out(None) == ()
    assert left_out(lambda output: output["head"].sum()) == ("other.weight", "other.bias")


@pytest.mark.parametrize("sizes", [(0, 16), (4, 0, 16), (0,)])
def test_empty_inputs_have_no_batch(sizes: tuple[int, ...]) -> None:
    assert captured(lambda self, x: 2 * x, torch.empty(sizes, requires_grad=True)).batch == 0


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_batch_of_a_time_first_transformer_is_not_its_length(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=batch_first)
    x = torch.empty(6, 50, 32) if batch_first else torch.empty(50, 6, 32)
    assert capture(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), x).batch == 6


def _over_steps(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    state = x.new_zeros(x.shape[1], 32)
    for step in x:
        state = self.layers[0](step, state)
    return state


def _by_hand(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Attention of 4 heads over the first dimension."""
    q, k, v = self.layers[0](x).unflatten(-1, (3, 4, 8)).permute(2, 1, 3, 0, 4).flatten(1, 2)
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)


def _images(*channels: int) -> list[torch.Tensor]:
    return [torch.empty(c, 32 + 8 * c, 32) for c in channels]


@pytest.mark.parametrize(
    ("call", "layers", "inputs", "batch"),
    [
        pytest.param(_over_steps, [nn.GRUCell(32, 32)], torch.empty(50, 6, 32), 6, id="a cell over time"),
        pytest.param(_by_hand, [nn.Linear(32, 96)], torch.empty(50, 6, 32), 6, id="attention over time"),
        pytest.param(
            lambda self, sizes, x: _over_steps(self, x) * sizes[:, None],
            [nn.GRUCell(32, 32)],
            {"sizes": torch.empty(6), "x": torch.empty(50, 6, 32)},
            6,
            id="lengths first",
        ),
        pytest.param(
            lambda self, packed: self.layers[0](packed)[1],
            [nn.GRU(32, 32)],
            (nn.utils.rnn.pack_sequence([torch.randn(n, 32) for n in (9, 4, 4)]),),
            3,
            id="a packed sequence",
        ),
        pytest.param(
            lambda self, mask, x: self.layers[0](x + mask),
            [nn.Linear(32, 8)],
            {"mask": torch.empty(1, 40, 32), "x": torch.empty(8, 40, 32)},
            8,
            id="a mask of all samples first",
        ),
        pytest.param(
            lambda self, places, x: self.layers[0](x + self.layers[1](places)),
            [nn.Linear(32, 8), nn.Embedding(40, 32)],
            (torch.zeros(40, dtype=torch.long), torch.empty(8, 40, 32)),
            8,
            id="positions first",
        ),
        pytest.param(
            lambda self, ids, places: self.layers[0](self.layers[1](ids) + self.layers[1](places)),
            [nn.Linear(32, 8), nn.Embedding(40, 32)],
            (torch.zeros(1, 40, dtype=torch.long), torch.zeros(40, dtype=torch.long)),
            1,
            id="one sample",
        ),
        pytest.param(
            lambda self, edges, x: self.layers[0](x)[edges[0]],
            [nn.Linear(32, 8)],
            (torch.zeros(2, 500, dtype=torch.long), torch.empty(101, 32)),
            0,
            id="edges of a graph, whose nodes are no samples",
        ),
        pytest.param(
            lambda self, x, joined: joined @ self.layers[0](x),
            [nn.Linear(8, 16)],
            (torch.empty(40, 8), torch.empty(40, 40)),
            0,
            id="a matrix of a graph, whose nodes are no samples",
        ),
        pytest.param(
            lambda self, x, scale: scale[:, None] * self.layers[0](x),
            [nn.Linear(40, 16)],
            (torch.empty(40, 40), torch.empty(40)),
            40,
            id="as many features as samples",
        ),
        pytest.param(
            lambda self, xs: [self.layers[0](x[None]) for x in xs],
            [nn.Conv2d(4, 8, 3)],
            (_images(4, 4, 4),),
            3,
            id="images with transparency",
        ),
        pytest.param(
            lambda self, tables, x: self.layers[0](torch.cat([x, *map(self.layers[1], tables)], 1)),
            [nn.Linear(24, 8), nn.Embedding(9, 8)],
            ([torch.zeros(128, dtype=torch.long)] * 2, torch.empty(128, 8)),
            128,
            id="a list of columns",
        ),
        pytest.param(
            lambda self, x: self.layers[0](x) + self.layers[1](x[0, :15, :2]).sum(),
            [nn.Linear(64, 64), nn.Linear(2, 1)],
            torch.empty(64, 3, 64),
            64,
            id="a small table beside the samples",
        ),
    ],
)
def test_the_batch_is_what_the_samples_are_counted_by(
    call: Any, layers: list, inputs: Any, batch: int
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return call(self, *args, **kwargs)

    assert capture(Model(), inputs, train=False).batch == batch


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(UsageError, match="of type int, which cannot be called"):
        capture(3, torch.empty(2))


def test_a_wrapped_model_is_refused_before_its_communication_fails() -> None:
    with alone(), pytest.raises(UsageError, match="DistributedDataParallel") as caught:
        capture(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), torch.empty(2, 8))
    assert "model.module" in caught.value.hint


# ---- settings without effect -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"amp": "bf16"}, "--amp bf16 has no effect: step is a function"),
        ({"optimizer": "sgd"}, "--optimizer sgd has no effect"),
        ({"fused_optimizer": True}, "--fused-optimizer has no effect"),
        ({"channels_last": True}, "--channels-last has no effect"),
        ({"train": False}, "--infer .* has no effect"),
    ],
)
def test_a_function_that_does_the_whole_step_is_not_told_how(settings: dict[str, Any], what: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)

    def step() -> None:
        model(torch.zeros(4, 8)).sum().backward()

    assert not capture(step).settings.amp
    with pytest.raises(UsageError, match=what):
        capture(step, **settings)


def test_a_function_that_trains_nothing_may_be_called_inference() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    step = capture(lambda: model(torch.zeros(4, 8)), train=False)
    assert (step.settings.training, names(step)) == (False, ["zeros", "addmm"])


def test_nhwc_is_refused_where_nothing_has_four_dimensions() -> None:
    with pytest.raises(UsageError, match="--channels-last has no effect"):
        capture(nn.Linear(8, 8), rows(4, 8), channels_last=True)
    pooled = capture(nn.AvgPool2d(2), rows(2, 8, 4, 4), train=False, channels_last=True)
    assert pooled.settings.channels_last


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_weight_that_is_computed_of_parameters_does_not_stand_in_the_way(on_cpu: bool) -> None:
    """``weight_norm``, as it was, keeps it as an attribute that is no leaf."""
    model = torch.nn.utils.weight_norm(nn.Linear(8, 2))
    step = capture(model, torch.randn(4, 8), on_cpu=on_cpu)
    assert step.flop > 0
    assert model.weight.grad_fn is not None
