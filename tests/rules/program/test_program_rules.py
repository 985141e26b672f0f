"""What the rules say of programs, on hand-made steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import StepBuilder
from tilefit.cost import estimate_step
from tilefit.cost.estimate import LAUNCH
from tilefit.cost.launch import FORWARD_S, PROGRAM_HOST
from tilefit.cost.priced import priced
from tilefit.gpus import Gpu
from tilefit.ops import (
    BACKWARD_DATA,
    FORWARD,
    OPTIMIZER,
    Exchange,
    Fallback,
    Habit,
    HostEvent,
    Loader,
    Program,
    Settings,
    Site,
    Step,
    StepOp,
    Streaming,
    TensorRef,
)
from tilefit.ops.collective import ALL_REDUCE
from tilefit.ops.program import EXCHANGE, TO_GPU, TO_HOST, WAIT, Ordered
from tilefit.rules import Change, Finding, run
from tilefit.rules.engine import changed
from tilefit.rules.program import parameter_loops
from tilefit.rules.program.events import with_events

ADAMW = Settings(optimizer="adamw")


def train(rows: int = 65536, *, fusible: bool = True, **parts: object) -> Step:
    """A training step that the GPU bounds with many rows and the host with few, of a program."""
    builder = StepBuilder(batch=64, settings=ADAMW)
    x = builder.tensor(rows, 512)
    for index in range(16):
        x = builder.pointwise(f"{index}.act", builder.linear(f"{index}.fc", rows, 512, 512, x=x))
    builder.optimizer()
    step = builder.step()
    *ops, update = step.ops
    if fusible:
        update = replace(update, site=Site(fallback=Fallback(1, update.op, "adamw")))
    return replace(step, ops=(*ops, update), program=Program("train.py", "a step", **parts))


def event(name: str, index: int, *, line: int = 20, kind: str = WAIT, **facts: object) -> HostEvent:
    return HostEvent(index, kind, name, Site("", f"train.py:{line}"), **facts)


def findings(step: Step, gpu: Gpu, code: str) -> list[Finding]:
    return run(step, gpu, select=[code])


END = len(train().ops)


class TestHostWaits:
    def test_its_price_is_the_step_without_the_waits(self, h200: Gpu) -> None:
        step = train(events=(event("item", END),))
        (found,) = findings(step, h200, "SYN001")
        free = estimate_step(replace(step, program=Program()), h200)
        before = estimate_step(step, h200)
        assert found.gain_s == pytest.approx(before.time_s - free.time_s)
        assert 0 < found.gain_low_s < found.gain_s < found.gain_high_s
        assert found.source == "train.py:20"
        assert found.message == "the host waits for the GPU 1 time a step: train.py:20 item"
        assert "detach" in found.fix

    def test_waits_are_taken_out_together(self, h200: Gpu) -> None:
        """Of two in a row one alone gains nothing."""
        step = train(events=(event("item", END), event("isnan", END, line=21), event("tolist", END, line=22)))
        (found,) = findings(step, h200, "SYN001")
        assert "3 times a step: train.py:20 item, train.py:21 isnan, train.py:22 tolist" in found.message
        alone = changed(
            step, with_events(step, [each for each in step.program.events if each.name != "item"])
        )
        before_s = estimate_step(step, h200).time_s
        assert found.gain_s > 5 * (before_s - estimate_step(alone, h200).time_s)

    def test_many_of_one_line_are_counted(self, h200: Gpu) -> None:
        (found,) = findings(train(events=(event("item", END),) * 4), h200, "SYN001")
        assert "train.py:20 item (4 times)" in found.message

    def test_a_shape_that_depends_on_values_has_a_cure_of_its_own(self, h200: Gpu) -> None:
        (found,) = findings(train(events=(event("nonzero", END),)), h200, "SYN001")
        assert "torch.where" in found.fix
        assert "detach" not in found.fix

    def test_a_blocking_copy_to_the_host_is_a_wait(self, h200: Gpu) -> None:
        copied = event("cpu", END, kind=TO_HOST, bytes=4096)
        assert len(findings(train(events=(copied,)), h200, "SYN001")) == 1
        free = replace(copied, pinned=True, non_blocking=True)
        assert not findings(train(events=(free,)), h200, "SYN001")

    def test_copies_that_block_would_hide_what_is_gained(self, h200: Gpu) -> None:
        """Each alone leaves the other's wait; together they are worth a finding."""
        small = event("to", 0, kind=TO_GPU, bytes=64)
        (found,) = findings(train(events=(small, event("item", END))), h200, "SYN001")
        (alone,) = findings(train(events=(event("item", END),)), h200, "SYN001")
        assert found.gain_s == pytest.approx(alone.gain_s, rel=0.1)
        assert "SYN002" in found.fix
        assert "SYN002" not in alone.fix
        assert "1 time a step" in found.message

    def test_the_scaler_is_told_apart_and_fused_optimizers_do_without(self, h200: Gpu) -> None:
        scaler = event("found_inf", END - 1, line=30)
        (found,) = findings(train(events=(scaler,)), h200, "SYN001")
        assert found.fix.startswith("Pass fused=True")
        assert found.source == "train.py:30"
        assert not findings(train(fusible=False, events=(scaler,)), h200, "SYN001")
        (found,) = findings(train(fusible=False, events=(scaler, event("item", END))), h200, "SYN001")
        assert "1 time a step" in found.message
        assert "GradScaler's own read stays" in found.arithmetic
        assert "fused" not in found.fix
        (found,) = findings(train(events=(scaler, event("item", END))), h200, "SYN001")
        assert "2 times a step" in found.message
        assert "fused" in found.fix

    def test_it_is_silent_where_nothing_is_gained(self, h200: Gpu) -> None:
        assert not findings(train(events=()), h200, "SYN001")
        assert not findings(replace(train(), program=Program()), h200, "SYN001")
        # At a wait of a step that launches bound the queue is nearly empty: the call is what is left.
        (found,) = findings(train(rows=64, events=(event("item", 1),)), h200, "SYN001")
        assert found.gain_s == pytest.approx(FORWARD_S * priced(h200).launch_scale)
        assert found.gain_low_s == pytest.approx(found.gain_s / (PROGRAM_HOST * priced(h200).launch_spread))


class TestCopies:
    def test_blocking_ones_are_priced_as_free_ones(self, h200: Gpu) -> None:
        step = train(events=(event("to", 0, kind=TO_GPU, bytes=64 << 20),))
        (found,) = findings(step, h200, "SYN002")
        free = event("to", 0, kind=TO_GPU, bytes=64 << 20, pinned=True, non_blocking=True)
        after = train(events=(free,))
        assert found.gain_s == pytest.approx(
            estimate_step(step, h200).time_s - estimate_step(after, h200).time_s
        )
        assert "pin_memory" in found.fix
        assert found.arithmetic[0].startswith("67.1 MB in ")
        assert not findings(after, h200, "SYN002")

    def test_one_from_pinned_memory_is_only_to_be_asked_for_otherwise(self, h200: Gpu) -> None:
        (found,) = findings(
            train(events=(event("cuda", 0, kind=TO_GPU, bytes=1 << 20, pinned=True),)), h200, "SYN002"
        )
        assert "pin_memory" not in found.fix
        assert "non_blocking" in found.fix

    def test_many_small_ones_are_one(self, h200: Gpu) -> None:
        small = event("tensor", 0, kind=TO_GPU, bytes=64, pinned=True, non_blocking=True)
        step = train(rows=64, events=(small,) * 100)
        (found,) = findings(step, h200, "SYN002")
        assert found.message == "100 small copies to the GPU: train.py:20 tensor (100 times)"
        one = train(rows=64, events=(replace(small, bytes=6400),))
        assert found.gain_s == pytest.approx(
            estimate_step(step, h200).time_s - estimate_step(one, h200).time_s, rel=1e-3
        )
        assert not findings(train(rows=64, events=(small,) * 7), h200, "SYN002")

    def test_one_without_a_line_is_said_to_have_none(self, h200: Gpu) -> None:
        known = event("to", 0, kind=TO_GPU, bytes=32 << 20)
        places = (Site("", ""), Site("layers.0", ""))
        events = (*(replace(known, name="copy_", site=site) for site in places), known)
        (found,) = findings(train(events=events), h200, "SYN002")
        assert found.message.endswith("copy_ in a library, copy_ in layers.0, train.py:20 to")
        assert found.source == "train.py:20"


class TestLoader:
    def loader(self, batch_s: float, **facts: object) -> Loader:
        return Loader("train.py:5", facts.pop("batch", 64), facts.pop("workers", 0), True, batch_s, 5)  # type: ignore[arg-type]

    def test_workers_are_counted_by_the_step(self, h200: Gpu) -> None:
        step_s = estimate_step(train(), h200).time_s
        (found,) = findings(train(loaders=(self.loader(10 * step_s, workers=2),)), h200, "DAT001")
        assert "num_workers=12" in found.fix  # ten, and a fifth more
        assert f"{round(64 / step_s):,} samples/s" in found.message
        assert f"{round(64 / step_s / 5):,} samples/s with 2 workers" in found.message
        assert (found.severity, found.gain_s, found.safety) == ("warning", 0.0, "advice")
        assert not findings(train(loaders=(self.loader(10 * step_s, workers=12),)), h200, "DAT001")

    def test_without_workers_loading_is_the_hosts_work(self, h200: Gpu) -> None:
        estimate = estimate_step(train(), h200)
        idle_s = estimate.gpu_time_s - estimate.host_time_s
        assert not findings(train(loaders=(self.loader(0.9 * idle_s),)), h200, "DAT001")
        assert findings(train(loaders=(self.loader(1.5 * idle_s + 0.1 * estimate.time_s),)), h200, "DAT001")

    def test_a_step_of_micro_batches_takes_several_batches(self, h200: Gpu) -> None:
        step_s = estimate_step(train(), h200).time_s
        one = self.loader(0.5 * step_s, workers=1)
        assert not findings(train(loaders=(one,)), h200, "DAT001")
        assert findings(train(loaders=(replace(one, batch=8),)), h200, "DAT001")

    def test_batches_are_counted_where_a_sample_is_a_batch(self, h200: Gpu) -> None:
        """A data set that makes whole batches has loaders of batches of one."""
        step_s = estimate_step(train(), h200).time_s
        whole = replace(self.loader(10 * step_s, batch=1, workers=2), drawn=1)
        (found,) = findings(train(loaders=(whole,)), h200, "DAT001")
        assert "num_workers=12" in found.fix
        assert f"{round(64 / step_s / 5):,} samples/s with 2 workers" in found.message
        (found,) = findings(train(loaders=(replace(whole, batch_s=1000 * step_s),)), h200, "DAT001")
        assert "num_workers" not in found.fix  # 1,200 are on no machine

    def test_it_says_nothing_of_what_was_not_timed(self, h200: Gpu) -> None:
        assert not findings(train(loaders=(self.loader(0.0), self.loader(1.0, batch=0))), h200, "DAT001")


def made(step: Step, *ops: StepOp, at: int) -> Step:
    """With operations put in."""
    return replace(step, ops=(*step.ops[:at], *ops, *step.ops[at:]))


def stream(megabytes: int, phase: str, name: str, source: str = "train.py:40") -> StepOp:
    op = Streaming("pointwise", megabytes << 18, megabytes << 20, megabytes << 20)
    return StepOp(op, phase, Site("", source), name)


class TestHabits:
    def habit(self, name: str, first: int = 0, last: int = 0, detail: str = "") -> Habit:
        return Habit(name, Site("", "train.py:40"), first, last, detail)

    def test_reductions_of_micro_batches_go(self, h200: Gpu) -> None:
        one = train()
        step = replace(one, ops=one.ops + one.ops)
        habit = self.habit("synchronizes_micro_batches", detail="2 micro-batches")
        places = (len(one.ops), len(step.ops))
        sums = tuple(
            Exchange(place, ALL_REDUCE, ALL_REDUCE, 400 << 20, 8, 8, Site("", "train.py:40"))
            for place in places
        )

        def shared(count: int) -> Step:
            kept = sums[-count:]
            order = tuple(Ordered(each.index, EXCHANGE, 0, number) for number, each in enumerate(kept))
            program = Program("train.py", "a step", habits=(habit,), exchanges=kept, order=order)
            return replace(step, program=replace(program, ranks=8, per_machine=8))

        (found,) = findings(shared(2), h200, "GRD003")
        assert "2 micro-batches" in found.message
        both, last = (estimate_step(shared(count), h200).time_s for count in (2, 1))
        assert found.gain_s == pytest.approx(both - last)
        assert both - last > 1e-3

    @pytest.mark.parametrize(
        ("name", "code", "severity"),
        [
            ("synchronizes_micro_batches", "GRD003", "warning"),
            ("evaluates_with_gradients", "GRD002", "note"),
            ("detect_anomaly", "ANO001", "warning"),
            ("deterministic", "ANO001", "note"),
        ],
    )
    def test_what_left_no_mark_has_no_price(self, h200: Gpu, name: str, code: str, severity: str) -> None:
        (found,) = findings(train(habits=(self.habit(name),)), h200, code)
        assert (found.severity, found.gain_s, found.source) == (severity, 0.0, "train.py:40")

    def test_anomaly_mode_is_priced_by_its_checks_and_waits(self, h200: Gpu) -> None:
        checks = [stream(8, BACKWARD_DATA, "aten.isnan") for _ in range(10)]
        step = made(train(), *checks, at=40)
        program = Program(
            "train.py",
            "a step",
            events=(*(event("detect_anomaly", at, line=40) for at in range(41, 51)), event("item", 80)),
            habits=(self.habit("detect_anomaly", 40, 50),),
        )
        step = replace(step, program=program)
        (found,) = findings(step, h200, "ANO001")
        assert "waits for the GPU 10 times a step" in found.message
        after = train(events=(event("item", 70),))
        assert found.gain_s == pytest.approx(
            estimate_step(step, h200).time_s - estimate_step(after, h200).time_s
        )
        # Its own waits are not SYN001's.
        (waits,) = findings(step, h200, "SYN001")
        assert "1 time a step" in waits.message

    def test_blocking_launches_are_priced(self, h200: Gpu) -> None:
        (found,) = findings(train(habits=(self.habit("launch_blocking"),)), h200, "ANO001")
        free = estimate_step(train(), h200)
        busy_s = free.time_s - free.bound_time_s[LAUNCH]
        assert found.gain_s == pytest.approx(min(free.host_time_s, busy_s))


class TestZeroedGradients:
    def gradient(self, number: int, name: str, phase: str) -> StepOp:
        ref = TensorRef(9000 + number, (512, 512), "fp32")
        read = 0 if "zero" in name else 4 << 19
        op = Streaming("pointwise", 1 << 18, read, 4 << 18, function=name.removeprefix("aten.").rstrip("_"))
        inputs = (ref, TensorRef(100 + number, (512, 512), "fp32")) if read else (ref,)
        return StepOp(op, phase, Site("", "train.py:40"), name, inputs, (ref,))

    def zeroed(self, *zeros: StepOp, passes: int = 1) -> Step:
        added = [self.gradient(number, "aten.add_", BACKWARD_DATA) for number in range(16)]
        step = made(train(rows=4096), *added * passes, at=50)
        step = made(step, *zeros, at=0)
        waits = (event("item", 60 + 16 * passes),)
        return replace(step, program=Program("train.py", "a step", events=waits))

    def test_it_is_priced_by_the_step_without(self, h200: Gpu) -> None:
        zeros = [self.gradient(number, "aten.zero_", FORWARD) for number in range(16)]
        step = self.zeroed(*zeros)
        (found,) = findings(step, h200, "GRD001")
        after = train(rows=4096, events=(event("item", 44),))
        assert found.gain_s == pytest.approx(
            estimate_step(step, h200).time_s - estimate_step(after, h200).time_s
        )
        assert found.source == "train.py:40"
        assert found.arithmetic[0].startswith("32 operations, ")

    def test_all_at_once_and_only_the_first_micro_batch(self, h200: Gpu) -> None:
        op = Streaming("pointwise", 16 << 18, 0, 16 << 20, function="_foreach_zero")
        (found,) = findings(
            self.zeroed(StepOp(op, FORWARD, Site("", "train.py:40"), "aten._foreach_zero_"), passes=3),
            h200,
            "GRD001",
        )
        assert found.arithmetic[0].startswith("17 operations, ")

    def test_adding_to_what_is_there_and_new_zeros_are_right(self, h200: Gpu) -> None:
        assert not findings(self.zeroed(passes=2), h200, "GRD001")
        assert not findings(self.zeroed(self.gradient(0, "aten.zeros", FORWARD)), h200, "GRD001")
        other = replace(self.gradient(0, "aten.zero_", FORWARD), outputs=(TensorRef(1, (7,), "fp32"),))
        assert not findings(self.zeroed(other), h200, "GRD001")

    def test_a_buffer_that_is_cleared_is_no_gradient(self, h200: Gpu) -> None:
        buffer = (TensorRef(70_000, (512, 512), "fp32"),)
        cleared = replace(self.gradient(0, "aten.zero_", FORWARD), outputs=buffer)
        assert not findings(self.zeroed(cleared), h200, "GRD001")
        op = Streaming("pointwise", 16 << 18, 0, 16 << 20, function="_foreach_zero")
        every = StepOp(op, FORWARD, Site("", "train.py:40"), "aten._foreach_zero_")
        assert not findings(made(train(rows=64), every, at=0), h200, "GRD001")


class TestParameterLoop:
    def loop(self, step: Step, *names: str, shape: tuple[int, ...] = (512, 512), times: int = 16) -> Step:
        def op(name: str, parameter: int) -> StepOp:
            refs = tuple(TensorRef(9000 + 2 * parameter + index, shape, "fp32") for index in range(2))
            op = Streaming("pointwise", 512 * 512, 8 << 18, 4 << 18)
            return StepOp(op, OPTIMIZER, Site("", "ema.py:3"), name, refs, refs[:1])

        ops = (op(name, parameter) for parameter in range(times) for name in names)
        return made(step, *ops, at=len(step.ops))

    def test_a_loop_is_one_operation_for_all(self, h200: Gpu) -> None:
        step = self.loop(train(rows=64), "aten.mul", "aten.add")
        (found,) = findings(step, h200, "FOR001")
        assert found.message == "a loop over 16 tensors of the parameters' shapes: mul, add"
        assert found.source == "ema.py:3"
        assert found.gain_s > 0.1e-3  # of 32 launches two are left
        (whole,) = findings(self.loop(train(rows=64), "aten.lerp"), h200, "FOR001")
        assert whole.gain_s == pytest.approx(found.gain_s / 2, rel=0.1)

    def test_only_what_pytorch_has_for_many_tensors_is_named(self, h200: Gpu) -> None:
        (found,) = findings(self.loop(train(rows=64), "aten.gt", "aten.where", "aten.copy_"), h200, "FOR001")
        assert found.message.endswith(": copy_")
        assert found.fix.startswith("Do it to all of them at once: torch._foreach_copy_; or")
        for none in ("aten.gt", "aten.where", "aten.nan_to_num_", "aten.masked_fill_", "aten.randn_like"):
            assert not findings(self.loop(train(rows=64), none), h200, "FOR001")
        (clamped,) = findings(self.loop(train(rows=64), "aten.clamp_"), h200, "FOR001")
        assert "torch._foreach_clamp_min_, torch._foreach_clamp_max_" in clamped.fix
        assert clamped.arithmetic[0].endswith("at once 2 kernels")

    def test_the_functions_that_are_named_exist(self) -> None:
        names = ["aten._to_copy", *(f"aten.{name}" for name in parameter_loops._FORMS)]
        names += [f"{name}_" for name in names]
        for name in names:
            forms = parameter_loops._forms(StepOp(Streaming("other", 1, 1, 1), OPTIMIZER, Site(), name))
            assert forms
            assert all(hasattr(torch, f"_foreach_{form}") for form in forms)

    def test_what_autograd_adds_and_zeroing_are_no_loops_of_the_program(self, h200: Gpu) -> None:
        step = self.loop(train(rows=64), "aten.add_")
        backward = tuple(
            replace(entry, phase=BACKWARD_DATA) if entry.name == "aten.add_" else entry for entry in step.ops
        )
        assert not findings(replace(step, ops=backward), h200, "FOR001")
        zeroed = tuple(
            replace(entry, op=replace(entry.op, read_bytes=0)) if entry.name == "aten.add_" else entry
            for entry in step.ops
        )
        assert not findings(replace(step, ops=zeroed), h200, "FOR001")

    def test_an_iteration_is_no_loop_over_parameters(self, h200: Gpu) -> None:
        """Of 16 parameters, each multiplied 3 times over, 16 can be at once; of one, 48 times over, none."""
        step = self.loop(self.loop(self.loop(train(rows=64), "aten.mul"), "aten.mul"), "aten.mul")
        (found,) = findings(step, h200, "FOR001")
        assert found.message.startswith("a loop over 16 tensors")
        assert found.arithmetic[0].startswith("48 launches")
        assert found.arithmetic[0].endswith("at once 3 kernels")
        alone = train(rows=64)
        for _ in range(48):
            alone = self.loop(alone, "aten.mul", times=1)
        assert not findings(alone, h200, "FOR001")

    def test_a_small_model_has_its_loops_too(self, h200: Gpu) -> None:
        """Six parameters, two products for each, as of a target network that follows."""
        step = self.loop(train(rows=64), "aten.mul", "aten.add", "aten.copy_", times=6)
        (found,) = findings(step, h200, "FOR001")
        assert found.message == "a loop over 6 tensors of the parameters' shapes: mul, add, copy_"

    def test_an_optimizer_of_pytorchs_that_always_loops_is_left_alone(self, h200: Gpu) -> None:
        step = self.loop(train(rows=64), "aten.add")
        assert findings(step, h200, "FOR001")
        settings = replace(step.settings, optimizer="lbfgs")
        assert not findings(replace(step, settings=settings), h200, "FOR001")

    def test_few_operations_others_shapes_and_modules_are_no_loop(self, h200: Gpu) -> None:
        assert not findings(self.loop(train(rows=64), "aten.mul", times=7), h200, "FOR001")
        assert not findings(self.loop(train(rows=64), "aten.mul", shape=(7, 512)), h200, "FOR001")
        assert not findings(replace(self.loop(train(rows=64), "aten.mul"), program=Program()), h200, "FOR001")
        assert not findings(train(rows=64), h200, "FOR001")


def test_a_change_of_operations_takes_the_events_along(h200: Gpu) -> None:
    step = train(
        events=(event("item", 10), event("item", 0), event("item", END)),
        habits=(Habit("keeps_gradients", Site(), 8, 12),),
    )
    after = changed(step, Change({2: (), 9: (step.ops[9],) * 3}))
    assert after.program is not None
    assert [each.index for each in after.program.events] == [11, 0, END + 1]
    assert (after.program.habits[0].first, after.program.habits[0].last) == (7, 13)


def test_a_finding_without_a_price_comes_first_as_a_warning_and_last_as_a_note(h200: Gpu) -> None:
    habits = tuple(Habit(name, Site("", "a.py:1")) for name in ("deterministic", "detect_anomaly"))
    found = run(train(habits=habits, events=(event("item", END),)), h200, select=["ANO001", "SYN001"])
    assert [(each.code, each.severity) for each in found] == [
        ("ANO001", "warning"),
        ("SYN001", found[1].severity),
        ("ANO001", "note"),
    ]


def test_the_interval_of_a_gain_is_that_of_the_waits(h200: Gpu) -> None:
    step = train(events=(event("item", END),))
    (found,) = findings(step, h200, "SYN001")
    share = PROGRAM_HOST * priced(h200).launch_spread - 1
    assert found.gain_high_s - found.gain_s == pytest.approx(share * found.gain_s, rel=0.15)
    assert priced(h200).launch_scale > 0
