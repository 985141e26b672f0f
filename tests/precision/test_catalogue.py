"""Every wrong loop is found, at its line; no healthy one is accused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from precision import loops
from precision.loops import computation, fresh, parts, protocol, shapes, storage, trials, values
from tilefit.precision import watch
from tilefit.precision.rules import all_rules
from tilefit.rules.finding import NOTE

_FILLED_BY = (computation, fresh, protocol, shapes, storage, trials, values)


#: What needs a history, such as updates lost over many steps, takes as long as its definition says.
SLOW = {13, 15, 24, 21, 26, 29}


@pytest.mark.parametrize("case", loops.WRONG, ids=lambda case: f"{case.code}-{case.name}")
def test_a_wrong_loop_is_found_at_its_line(case: loops.Wrong) -> None:
    torch.manual_seed(0)
    with watch() as w:
        case.run()
    found = [
        (alarm.source.rpartition("/")[2].partition(":")[0], int(alarm.source.rpartition(":")[2]))
        for alarm in w.alarms
        if alarm.code == case.code
    ]
    module = case.run.__module__.rpartition(".")[2]
    assert found, f"only {[alarm.code for alarm in w.alarms]}"
    assert all(file == f"{module}.py" and line in case.lines for file, line in found)
    if case.number not in SLOW:
        assert min(alarm.first_step for alarm in w.alarms if alarm.code == case.code) < 3


@pytest.mark.parametrize("case", loops.RIGHT, ids=lambda case: case.name)
def test_a_healthy_loop_is_not_accused(case: loops.Right) -> None:
    torch.manual_seed(0)
    with watch() as w:
        case.run()
    assert [alarm for alarm in w.alarms if alarm.severity != NOTE] == []
    assert not [alarm for alarm in w.alarms if alarm.code == f"AMP{case.number:03}"]


#: Loops that are wrong only where autocast is the CPU's, which leaves more in half precision than CUDA's, or
#: whose own casts name the CPU.
OF_THE_CPU = {
    "squares_overflow_in_a_norm_by_hand",
    "logarithm_of_probabilities",
    "sum_of_large_differences",
    "recomputation_in_another_type",
    "function_with_decorators",
    "model_that_enters_its_own_region",
    "variance_by_hand",
    "exponential_by_hand",
    "norm_of_activations_in_fp16",
    "logarithm_of_what_a_sigmoid_leaves",  # on a GPU it is taken in fp32, and inf: AMP026, at the same line
    "variance_as_a_difference_of_squares",  # on a GPU in fp32, of a mean in bf16
    "a_mask_of_the_smallest_number_added_twice",
    "a_loss_by_hand_in_bf16",  # on a GPU autocast sums in fp32
    "a_training_in_a_thread_that_forgets_the_scaler",  # the default device is the main thread's
}


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "DEVICE", "cuda")
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    "case", [case for case in loops.WRONG if case.name not in OF_THE_CPU], ids=lambda case: case.name
)
def test_a_wrong_loop_is_found_on_a_gpu(case: loops.Wrong) -> None:
    torch.manual_seed(0)
    with watch() as w:
        case.run()
    lines = {int(alarm.source.rpartition(":")[2]) for alarm in w.alarms if alarm.code == case.code}
    assert lines & case.lines, [(alarm.code, alarm.source) for alarm in w.alarms]


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    "case", [case for case in loops.RIGHT if case.name not in OF_THE_CPU], ids=lambda case: case.name
)
def test_a_healthy_loop_is_not_accused_on_a_gpu(case: loops.Right) -> None:
    torch.manual_seed(0)
    with watch() as w:
        case.run()
    assert [alarm for alarm in w.alarms if alarm.severity != NOTE] == []


def test_every_class_has_a_wrong_loop_and_a_twin() -> None:
    elsewhere = {23, 27, 28}  # ranks, compare and divergence have tests of their own
    numbers = {int(rule.code[3:]) for rule in all_rules()} - elsewhere
    assert {case.number for case in loops.WRONG} == numbers
    assert {case.number for case in loops.RIGHT} >= numbers - {26}
