"""What a watch promises: it changes nothing, leaves nothing behind, and says what it cannot see."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from precision.loops.parts import BF16, FP16, autocast, batch, lstm, mse, net, scaler
from tilefit.capture.torchvision_import import import_transformers, tolerated
from tilefit.errors import UsageError
from tilefit.precision import Watch, watch

Step = Callable[[], Tensor]


def _convolutions() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 4)
    )
    return model, lambda: model(torch.randn(4, 3, 8, 8)).float().pow(2).mean()


def _recurrent() -> tuple[nn.Module, Step]:
    model = nn.LSTM(8, 16, num_layers=2, dropout=0.1)
    return model, lambda: lstm(model, torch.randn(5, 4, 8))[0].float().pow(2).mean()


def _transformer() -> tuple[nn.Module, Step]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(32, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 32))
    loss = nn.CrossEntropyLoss()

    def step() -> Tensor:
        tokens = torch.randint(0, 32, (2, 8))
        return loss(model(tokens).flatten(0, 1), tokens.flatten())

    return model, step


def _gpt2() -> tuple[nn.Module, Step]:
    transformers = import_transformers()
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    with tolerated():
        model = transformers.GPT2LMHeadModel(config)

    def step() -> Tensor:
        tokens = torch.randint(0, 64, (2, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        assert isinstance(loss, Tensor)
        return loss

    return model, step


MODELS = {"conv": _convolutions, "lstm": _recurrent, "transformer": _transformer, "gpt2": _gpt2}


def _train(
    make: Callable[[], tuple[nn.Module, Step]], dtype: torch.dtype, watched: bool, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses and final weights of a few steps of AMP with clipping and accumulation."""
    torch.manual_seed(0)
    torch.set_default_device(device)
    torch.use_deterministic_algorithms(device != "cpu", warn_only=True)
    try:
        model, step = make()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        s = torch.amp.GradScaler(device, enabled=dtype == FP16, growth_interval=3)
        w = Watch(model, optimizer=optimizer, scaler=s, every=1)
        if watched:
            w.start()
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast(device, dtype=dtype):
                    loss = step()
                s.scale(loss / 2).backward()
                losses.append(loss.detach().clone())
            s.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()
        w.stop()
        return losses, [p.detach().clone() for p in model.state_dict().values()], w
    finally:
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


def _assert_bit_identical(name: str, dtype: torch.dtype, device: str) -> None:
    losses, weights, _ = _train(MODELS[name], dtype, watched=False, device=device)
    again, weights_again, _ = _train(MODELS[name], dtype, watched=False, device=device)
    assert all(map(torch.equal, losses + weights, again + weights_again))  # or else a watch could not show
    watched_losses, watched_weights, w = _train(MODELS[name], dtype, watched=True, device=device)
    assert w.steps == 6
    assert w.report().tables  # it did look closely
    for before, after in zip(losses + weights, watched_losses + watched_weights, strict=True):
        assert torch.equal(before, after)
    # Under autocast to bf16 PyTorch casts what cuDNN's recurrent layers read to fp16 all the same.
    half = (name, dtype, device) == ("lstm", BF16, "cuda")
    assert [alarm.code for alarm in w.alarms if alarm.severity != "note"] == ["AMP007"] * half


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_identical_under_a_watch(name: str, dtype: torch.dtype) -> None:
    _assert_bit_identical(name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_identical_under_a_watch_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    _assert_bit_identical(name, dtype, "cuda")


def _surroundings() -> dict[str, Any]:
    """Everything a watch touches."""
    classes: list[Any] = [
        torch,
        torch.autograd,
        torch.autograd.function.BackwardCFunction,
        torch.amp.GradScaler,
        torch.amp.autocast_mode.autocast,
        torch.nn.utils.clip_grad,
        nn.Module,
        Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ]
    found = {f"{owner}.{name}": value for owner in classes for name, value in vars(owner).items()}
    found["hooks"] = tuple(
        len(hooks)
        for hooks in (
            nn_module._global_forward_hooks,
            nn_module._global_forward_pre_hooks,
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )
    )
    found["modes"] = len(_get_current_dispatch_mode_stack())
    return found


def _amp_step(model: nn.Module, optimizer: Optimizer, s: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    s.scale(mse(model, *batch())).backward()
    s.step(optimizer)
    s.update()


def test_everything_is_removed_on_exit() -> None:
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    _amp_step(model, optimizer, s)  # whatever PyTorch sets up lazily
    before, attributes = _surroundings(), [set(vars(m)) for m in (model, optimizer, s)]
    with watch(model, optimizer=optimizer, scaler=s):
        for _ in range(3):
            _amp_step(model, optimizer, s)
        model.eval()
        assert _surroundings() != before
    assert _surroundings() == before
    assert attributes == [set(vars(m)) for m in (model, optimizer, s)]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_everything_is_removed_when_the_loop_raises() -> None:
    before = _surroundings()
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())

    def loop() -> None:
        with watch(model, optimizer=optimizer):
            _amp_step(model, optimizer, s)
            _amp_step(model, optimizer, s)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert _surroundings() == before


@pytest.mark.parametrize("scaled", [False, True])
def test_it_stops_by_itself_after_some_steps(scaled: bool) -> None:
    before = _surroundings()
    model, s = net(), scaler(enabled=scaled)
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer, steps=2) as w:
        for _ in range(3):
            _amp_step(model, optimizer, s)
        assert _surroundings() == before
        _amp_step(model, optimizer, s)
    assert w.steps == 2


def test_what_others_patched_in_the_meantime_stays() -> None:
    seen = []
    with watch():
        ours = torch.amp.GradScaler.scale

        def theirs(self: Any, outputs: Any) -> Any:
            seen.append(outputs)
            return ours(self, outputs)

        torch.amp.GradScaler.scale = theirs  # type: ignore[method-assign,assignment]
    try:
        assert torch.amp.GradScaler.scale is theirs
        assert scaler(init_scale=2.0).scale(torch.ones(())) == 2
        assert len(seen) == 1
    finally:
        torch.amp.GradScaler.scale = ours.__wrapped__  # type: ignore[method-assign,attr-defined]


def test_one_watch_at_a_time_and_each_once() -> None:
    with watch() as w, pytest.raises(UsageError, match="another watch is running"):
        Watch().start()
    with pytest.raises(UsageError, match="has ended"):
        w.start()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, "every=0"), ({"steps": 0}, "steps=0"), ({"select": ["AMP9"]}, "'AMP9'")],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Watch(**options)


def test_rules_can_be_selected_and_ignored() -> None:
    def alarms(**options: Any) -> list[str]:
        model, s = net(), scaler()
        optimizer = Adam(model.parameters())
        with watch(model, optimizer=optimizer, **options) as w:
            for _ in range(2):
                optimizer.zero_grad()
                s.scale(mse(model, *batch(), dtype=BF16)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                s.step(optimizer)
                s.update()
        return [alarm.code for alarm in w.alarms]

    assert alarms() == ["AMP001", "AMP008"]
    assert alarms(ignore=["AMP001"]) == ["AMP008"]
    assert alarms(select=["AMP001"]) == ["AMP001"]


def test_a_repeated_mistake_is_one_alarm_with_a_count() -> None:
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer) as w:
        for step in range(10):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            if step >= 4:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()
    (alarm,) = w.alarms
    # A step that nobody looks at closely is only suspected.
    assert (alarm.first_step, alarm.steps) == (5, 5)


@pytest.mark.parametrize("scaled", [False, True])
def test_used_gradients_beside_new_ones_are_named_as_what_they_are(scaled: bool) -> None:
    branches = nn.ModuleList([net(), net()])
    optimizer, s = SGD(branches.parameters(), lr=0.01), scaler(enabled=scaled)
    with watch(branches, optimizer=optimizer) as w:
        for step in range(6):
            branch = branches[step % 2]
            branch.zero_grad()  # the other one's gradients stay
            s.scale(mse(branch, *batch(), dtype=FP16 if scaled else BF16)).backward()
            s.step(optimizer)
            s.update()
    (alarm,) = w.alarms
    assert (alarm.code, alarm.severity) == ("AMP004", "warning")
    assert "some that it has used already" in alarm.message
    assert any("second time" in line for line in alarm.arithmetic) == scaled


def test_an_evaluation_in_fp16_of_a_model_trained_in_bf16_is_one_in_another_precision() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer=optimizer) as w:
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad(), autocast(BF16):
            model(batch()[0])
        assert w.alarms == ()
        with torch.no_grad(), autocast(FP16):
            model(batch()[0])
    (alarm,) = w.alarms
    assert alarm.code == "AMP025"
    assert "bfloat16 and evaluated in float16" in alarm.message


def test_a_late_mistake_without_a_watched_function_is_looked_at_in_the_next_step() -> None:
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer) as w:
        for step in range(12):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            if step >= 8:
                for p in model.parameters():
                    p.grad.clamp_(-1, 1)
            s.step(optimizer)
            s.update()
    (alarm,) = w.alarms
    assert (alarm.code, alarm.first_step) == ("AMP002", 9)


def test_gradients_on_their_way_are_not_kept_alive() -> None:
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer):
        for _ in range(3):
            _amp_step(model, optimizer, s)
        gradient = weakref.ref(model[0].weight.grad)
        optimizer.zero_grad()
        assert gradient() is None


def test_a_disabled_scaler_is_said_to_be_unchecked() -> None:
    with watch(scaler=scaler(enabled=False)) as w:
        pass
    assert w.report().unchecked == ("the gradient scaler: it is switched off",)


def test_a_dispatch_mode_of_the_user_s_is_left_alone() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    with Mode() as mode, watch(model, optimizer=optimizer) as w:
        for _ in range(3):
            _amp_step(model, optimizer, s)
        assert _get_current_dispatch_mode_stack() == [mode]
    assert "a dispatch mode of your own is active" in w.report().unchecked[0]


def test_a_dispatch_mode_opened_during_a_close_look_survives() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer, every=1):
        _amp_step(model, optimizer, s)
        with Mode() as mode:
            for _ in range(3):
                _amp_step(model, optimizer, s)
            assert _get_current_dispatch_mode_stack()[-1] is mode
        _amp_step(model, optimizer, s)
    assert _get_current_dispatch_mode_stack() == []


class _Own(nn.Module):
    """A module with a forward of its own: those of torch.nn are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        return h * 2


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_trains_alike_and_is_said_to_be_unchecked(in_place: bool) -> None:
    def train(watched: bool) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        # Which forgets nothing of what was found, earlier in this process, to be no code to compile.
        torch._C._dynamo.eval_frame.reset_code(nn.Module._call_impl.__code__)
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        plain = _Own()
        model: Any = plain
        if in_place:
            plain.compile(backend="aot_eager")
        else:
            model = torch.compile(plain, backend="aot_eager")
        s = scaler()
        optimizer = SGD(plain.parameters(), lr=0.1)
        w = Watch(None if in_place else model, optimizer=optimizer)
        if watched:
            w.start()
        for _ in range(5):
            _amp_step(model, optimizer, s)
        w.stop()
        return [p.detach().clone() for p in plain.parameters()], w

    alone, _ = train(watched=False)
    watched, w = train(watched=True)
    for before, after in zip(alone, watched, strict=True):
        assert torch.equal(before, after)
    assert w.alarms == ()
    assert torch._dynamo.utils.counters["frames"]
    assert any("compiled graph" in what for what in w.report().unchecked)


def test_what_is_compiled_within_a_close_look_is_not_the_look_itself() -> None:
    frames = torch._dynamo.utils.counters["frames"]
    model = net()
    optimizer = Adam(model.parameters())
    function = torch.compile(lambda x: x.sin() + 2 * x.cos(), backend="eager")
    with watch(model, optimizer=optimizer, find_non_finite=True) as w:
        before = sum(frames.values())
        for step in range(4):
            x, y = batch()
            optimizer.zero_grad()
            mse(model, function(x) if step > 1 else x, y, dtype=BF16).backward()
            optimizer.step()
        # Under a mode the compiler lets everything run as it is.
        assert sum(frames.values()) == before
    assert w.report().tables


def test_a_mistake_around_a_compiled_model_is_found() -> None:
    torch._dynamo.reset()
    plain, s = net(), scaler()
    model = torch.compile(plain, backend="aot_eager")
    optimizer = Adam(plain.parameters())
    with watch(model, optimizer=optimizer) as w:
        for _ in range(3):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
    assert [alarm.code for alarm in w.alarms] == ["AMP001", "AMP003"]


def test_the_scale_is_read_once_not_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Reading the scale waits for the device: outside of close looks, only a new mistake may.
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    reads = []
    original = torch.amp.GradScaler.get_scale
    monkeypatch.setattr(
        torch.amp.GradScaler, "get_scale", lambda self: reads.append(w.steps) or original(self)
    )
    with watch(model, optimizer=optimizer, numerics=False) as w:
        for _ in range(20):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()
    assert max(reads) < 4


def test_an_optimizer_and_a_model_made_later_are_found() -> None:
    with watch() as w:
        model, s = copy.deepcopy(net()), scaler()
        optimizer = Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            optimizer.step()
    assert [alarm.code for alarm in w.alarms] == ["AMP003"]


def test_autocast_entered_before_the_watch_is_no_trouble() -> None:
    model = net()
    optimizer = Adam(model.parameters())
    with autocast(BF16):
        w = Watch(model, optimizer=optimizer).start()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()
    w.stop()
    assert w.alarms == ()


def test_a_step_that_raises_does_not_blind_the_watch() -> None:
    class Failing(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError

    model, s = net(), scaler()
    failing, optimizer = Failing(model.parameters(), lr=0.1), Adam(model.parameters())
    with watch(model) as w:
        mse(model, *batch(), dtype=BF16).backward()
        with pytest.raises(ZeroDivisionError):
            failing.step()
        for _ in range(3):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            for p in model.parameters():
                p.grad.clamp_(-1, 1)  # type: ignore[union-attr]
            optimizer.step()
    assert {alarm.code for alarm in w.alarms} == {"AMP002", "AMP003"}


def test_what_commutes_with_the_scale_is_followed_to_the_step() -> None:
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=1e-6)
    with watch(model, optimizer=optimizer) as w:
        for _ in range(3):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            for p in model.parameters():
                p.grad.div_(2)  # type: ignore[union-attr]
                p.grad.data.mul_(3.0)  # type: ignore[union-attr]
                p.grad.neg_()  # type: ignore[union-attr]
            optimizer.step()
    (alarm,) = w.alarms
    assert (alarm.code, alarm.first_step) == ("AMP003", 1)


class _Spy:
    """Tells whether the close look's dispatch mode is on where a gradient passes by."""

    def __init__(self) -> None:
        self.on: list[bool] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor.register_hook(lambda _: self.on.append(bool(_get_current_dispatch_mode_stack())))  # type: ignore[no-untyped-call]
        return tensor


@pytest.mark.parametrize("find_non_finite", [False, True])
def test_a_backward_pass_runs_without_the_dispatch_mode_unless_its_origins_are_sought(
    find_non_finite: bool,
) -> None:
    model, spy = net(), _Spy()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer, find_non_finite=find_non_finite, every=1):
        for _ in range(3):
            optimizer.zero_grad()
            x, y = batch()
            nn.functional.mse_loss(spy(model(x)), y).backward()
            optimizer.step()
            assert _get_current_dispatch_mode_stack()
    assert spy.on[1:] == [find_non_finite] * 2


def _rows(w: Watch) -> dict[tuple[str, str], tuple[str, ...]]:
    """The table of operations: what was counted, by name and phase."""
    table = next(t for t in w.report().tables if t.title.startswith("Operations"))
    assert table.header[:2] == ("operation", "phase")
    return {(row[0], row[1]): row[2:] for row in table.rows}


@pytest.mark.parametrize("some", [False, True])
def test_of_a_whole_backward_pass_the_nodes_are_counted(some: bool) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 4)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = SGD(parameters, lr=0.0)
    with watch(optimizer=optimizer) as w:
        for _ in range(2):  # a close look begins when a step has ended
            loss = second(first(torch.randn(2, 8)).relu()).sum()
            wanted = [second.weight, second.bias]
            if some:
                for p, g in zip(wanted, torch.autograd.grad(loss, wanted), strict=True):
                    p.grad = g
            else:
                loss.backward()
            optimizer.step()
    counted = {name: counts for (name, phase), counts in _rows(w).items() if phase == "backward"}
    # Of a pass to some weights alone nobody knows without hooks which nodes it runs.
    assert counted.get("AddmmBackward0") == (None if some else ("2",))
    assert ("ReluBackward0" in counted) is not some
    assert counted.get("AccumulateGrad") == (None if some else ("4",))


def _checkpointed(reentrant: bool, device: str = "cpu") -> tuple[Watch, nn.Module]:
    inner = net().to(device)
    optimizer = Adam(inner.parameters())
    with watch(inner, optimizer=optimizer, every=1) as w:
        for _ in range(3):
            x, y = (t.to(device) for t in batch())
            optimizer.zero_grad()
            with torch.autocast(device, dtype=BF16):
                out = checkpoint(inner, x.requires_grad_(), use_reentrant=reentrant)
            nn.functional.mse_loss(out.float(), y).backward()
            optimizer.step()
    assert _get_current_dispatch_mode_stack() == []
    return w, inner


def _assert_recomputation_is_seen(reentrant: bool, device: str) -> None:
    w, inner = _checkpointed(reentrant, device)
    rows = _rows(w)
    layers = sum(isinstance(module, nn.Linear) for module in inner)  # type: ignore[arg-type]
    forward = rows["addmm", "forward"]
    assert str(2 * layers) in forward  # in each of the two steps after the first
    assert rows["AddmmBackward0", "backward"] == forward
    # What is not reentrant stops as soon as it has what the last layer saved, its input.
    assert str(2 * (layers if reentrant else layers - 1)) in rows["addmm", "recomputed"]
    assert w._exponents.histograms[BF16].total > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_seen_as_operations(reentrant: bool) -> None:
    _assert_recomputation_is_seen(reentrant, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_seen_on_autograd_s_threads(reentrant: bool) -> None:
    _assert_recomputation_is_seen(reentrant, "cuda")


def test_a_backward_pass_that_raises_leaves_the_close_look_on_and_nothing_else() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            inner(gradient)  # a module runs, and the mode is on
            raise ZeroDivisionError

    inner, model = nn.Linear(4, 4), net()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer, every=1) as w:
        for _ in range(2):
            _amp_step(model, optimizer, scaler())
        x, _ = batch()
        with pytest.raises(ZeroDivisionError):
            Failing.apply(model(x)).sum().backward()  # type: ignore[no-untyped-call]
        assert _get_current_dispatch_mode_stack() == [w._look]
        _amp_step(model, optimizer, scaler())
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("find_non_finite", [False, True])
def test_an_optimizer_that_steps_within_the_backward_pass_does_not_blind_the_watch(
    find_non_finite: bool,
) -> None:
    model = net()
    optimizers = {p: SGD([p], lr=0.01) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with watch(model, optimizer=optimizers.values(), every=1, find_non_finite=find_non_finite) as w:
        for _ in range(4):
            mse(model, *batch(), dtype=BF16).backward()
    assert _get_current_dispatch_mode_stack() == []
    assert w.steps == 4
    # The first look begins with the first step, so three forward passes of two layers are seen; where origins
    # are sought, it begins with the watch.
    assert _rows(w)["addmm", "forward"][0] == ("8" if find_non_finite else "6")


class _Nothing(TorchDispatchMode):
    """A mode of the user's that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("find_non_finite", [False, True])
def test_a_mode_around_a_backward_pass_that_steps_leaves_nothing_behind(find_non_finite: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with watch(model, optimizer=optimizer, every=1, find_non_finite=find_non_finite):
        for step in range(5):
            loss = mse(model, *batch())
            if step % 2:
                with _Nothing():
                    loss.backward()
            else:
                loss.backward()
    assert _get_current_dispatch_mode_stack() == []


def test_another_thread_that_trains_meanwhile_is_left_alone() -> None:
    model, other = net(), net()
    optimizer = SGD(model.parameters(), lr=0.01)
    modes: list[list[Any]] = []
    within, stepped = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> None:
        within.set()
        assert stepped.wait(20)

    def train() -> None:
        for hook in (None, wait):
            loss = mse(other, *batch())
            if hook is not None:
                loss.register_hook(hook)  # type: ignore[no-untyped-call]
            loss.backward()
            modes.append(_get_current_dispatch_mode_stack())

    with watch(model, optimizer=optimizer, every=1) as w:
        mse(model, *batch()).backward()
        optimizer.step()
        thread = threading.Thread(target=train)
        thread.start()
        assert within.wait(20)
        model(batch()[0])  # while the other thread's backward pass runs
        optimizer.step()
        assert _get_current_dispatch_mode_stack() == [w._look]
        stepped.set()
        thread.join()
    assert modes == [[], []]
    assert _get_current_dispatch_mode_stack() == []
    rows = _rows(w)
    assert "2" in rows["addmm", "forward"]
    assert ("addmm", "recomputed") not in rows


@pytest.mark.parametrize("find_non_finite", [False, True])
def test_transforms_of_functions_are_no_trouble(find_non_finite: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    with watch(model, optimizer=optimizer, every=1, find_non_finite=find_non_finite) as w:
        for _ in range(3):
            x, _ = batch()
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
            curvature = torch.func.hessian(partial(loss, parameters))(x[0])
            assert curvature.isfinite().all()
            for name, p in model.named_parameters():
                p.grad = each[name].mean(0)
            optimizer.step()
    assert w.steps == 3
    assert [alarm for alarm in w.alarms if alarm.severity != "note"] == []


def test_a_graph_deeper_than_the_stack_is_gone_through_in_part() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1)
    with watch(optimizer=optimizer) as w:
        for depth in (1, 50_000):
            optimizer.zero_grad()
            h: Tensor = weight
            for _ in range(depth):
                h = h * 1.0
            loss = h.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            del h
            del loss  # PyTorch frees the graph
            assert weight.grad is not None
            assert weight.grad.tolist() == [1.0, 1.0]
            optimizer.step()
    assert any("nodes of its graph" in what for what in w.report().unchecked)


def test_a_backward_pass_to_chosen_inputs_is_not_followed_beyond_them() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1)
    with watch(optimizer=optimizer) as w:
        for _ in range(2):
            h: Tensor = weight
            for _ in range(5):  # the graph grows, and only its last part is gone through
                before = h * 2
                h = before.exp().sin()
                (slope,) = torch.autograd.grad(h.sum(), before, retain_graph=True)
                assert w._ledger.here.scan.nodes.total() < 5 or w.steps == 0
                torch.testing.assert_close(slope, before.exp().cos() * before.exp())
            h.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    rows = _rows(w)
    assert rows["ExpBackward0", "backward"] == rows["MulBackward0", "backward"] == ("5",)  # of the whole pass


def test_a_loss_may_have_attributes_of_the_user_s() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer=optimizer) as w:
        for _ in range(2):
            loss = mse(model, *batch())
            loss.node = "a name"  # type: ignore[attr-defined]
            loss.backward()
            optimizer.step()
    assert "2" in _rows(w)["AddmmBackward0", "backward"]


def test_hooks_on_the_graph_keep_nothing_alive() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * gradient * x

    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.0)
    gc.collect()
    gc.disable()
    try:
        with watch(model, optimizer=optimizer, every=1) as w:
            for _ in range(3):
                for _ in range(2):  # the second pass adds to the gradients
                    h = model(batch()[0].bfloat16())
                    out = Product.apply(h)  # type: ignore[no-untyped-call]
                    nodes = [weakref.ref(out.grad_fn), weakref.ref(h)]
                    out.float().sum().backward()
                    del h, out
                    assert [node() for node in nodes] == [None, None]
                optimizer.step()
            assert w._exponents.histograms
    finally:
        gc.enable()


def test_gradients_of_gradients_and_batches_of_them_are_no_trouble() -> None:
    weight = torch.randn(4, 4, dtype=BF16, requires_grad=True)
    optimizer = SGD([weight], lr=0.0)
    with watch(optimizer=optimizer, every=1) as w:
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 4, dtype=BF16, requires_grad=True)
            (slope,) = torch.autograd.grad((x @ weight).tanh().sum(), x, create_graph=True)
            torch.autograd.functional.jacobian(lambda v: v @ weight, x, vectorize=True)
            slope.float().square().sum().backward()
            optimizer.step()
    assert [alarm for alarm in w.alarms if alarm.severity != "note"] == []
    assert w._exponents.histograms[BF16].total > 0


def test_a_dispatch_mode_of_the_user_s_sees_the_same_backward_pass() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            passes[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    def train(watched: bool) -> list[list[str]]:
        passes.clear()
        model = net().bfloat16()
        optimizer = SGD(model.parameters(), lr=0.1)
        w = Watch(model, optimizer=optimizer, every=1)
        if watched:
            w.start()
        for _ in range(2):
            for _ in range(2):  # the second pass adds to the gradients
                out = model(batch()[0].bfloat16()).float().sum()
                passes.append([])
                with Mode():
                    out.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        w.stop()
        assert not watched or w._exponents.histograms
        return list(passes)

    passes: list[list[str]] = []
    for alone, watched in zip(train(False), train(True), strict=True):
        # After the gradient of the loss is made, and the loss looked at, the engine's own operations alone.
        engine = alone[1:]
        assert engine
        assert watched[-len(engine) :] == engine


def test_what_follows_from_bookkeeping_alone_is_an_error_only_where_all_of_it_was_seen() -> None:
    def severities(**options: Any) -> dict[str, str]:
        model, s = net(), scaler()
        optimizer = Adam(model.parameters())
        s.scale(torch.ones(()))
        with watch(model, optimizer=optimizer, **options) as w:
            for _ in range(3):
                optimizer.zero_grad()
                mse(model, *batch()).backward()
                s.step(optimizer)
                s.update()
        return {alarm.code: alarm.severity for alarm in w.alarms}

    assert severities() == {"AMP006": "error"}
    # That no operation brought a scale along, only a close look sees.
    assert severities(numerics=False) == {"AMP006": "warning"}


def test_a_write_that_no_version_counts_is_told_from_a_mistake_by_the_values() -> None:
    def codes(by_hand: Callable[[Tensor], object]) -> list[str]:
        model, s = net(), scaler()
        optimizer = SGD(model.parameters(), lr=1e-6)
        with watch(model, optimizer=optimizer, numerics=False) as w:
            for _ in range(4):
                optimizer.zero_grad()
                s.scale(mse(model, *batch())).backward()
                for p in model.parameters():
                    assert p.grad is not None
                    by_hand(p.grad.data)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return [alarm.code for alarm in w.alarms]

    assert codes(lambda g: g.div_(65536.0)) == []
    assert codes(lambda g: g.sum()) == ["AMP001", "AMP003"]


def test_events_of_a_forked_child_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with watch() as w:
        w._recorder._process += 1  # as a child sees it
        model, s = net(), scaler()
        optimizer = Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            optimizer.step()
    assert [alarm.code for alarm in w.alarms] == ["AMP003"]
    assert caplog.records == []
