"""The loss of a Hugging Face language model, compiled alone. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import copy
import pickle
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilefit
from tilefit.capture.torchvision_import import tolerated
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds import fused_loss
from tilefit.fixes.kinds.fused_loss import FUSED_CROSS_ENTROPY, FUSED_LOSS, CompiledLoss
from tilefit.options import StepOptions

with tolerated():
    transformers = pytest.importorskip("transformers")
    GPT2 = transformers.GPT2LMHeadModel


PLAIN = F.cross_entropy


def model(layers: int = 1, **options: Any) -> Any:
    config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=2, n_positions=32, **options)
    torch.manual_seed(0)
    return GPT2(config).eval()


def tokens(batch: int = 2, length: int = 16, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * length, device=device).view(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def test_on_the_cpu_the_loss_is_what_it_was() -> None:
    original = model(vocab_size=100)
    changed = copy.deepcopy(original)
    edits = FUSED_LOSS.apply(Run(changed))
    for which in (changed, copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert isinstance(which.loss_function, CompiledLoss)
        assert torch.equal(which(**tokens()).loss, original(**tokens()).loss)
    assert changed.state_dict().keys() == original.state_dict().keys()
    edits.undo()
    assert changed.loss_function is original.loss_function
    assert "_loss_function" not in vars(changed)


def test_what_is_compiled_is_the_loss() -> None:
    loss = model().loss_function
    logits, labels = torch.randn(2, 5, 50), torch.randint(0, 50, (2, 5))
    labels[0, 2] = -100
    compiled = torch.compile(CompiledLoss(loss).loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, labels, vocab_size=50), loss(logits, labels, vocab_size=50))


def own_loss(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return logits.sum()


def test_other_losses_are_refused() -> None:
    changed = model(vocab_size=100)
    changed.loss_function = own_loss
    with pytest.raises(RefusedError, match="own_loss"):
        FUSED_LOSS.apply(Run(changed))
    assert changed.loss_function is own_loss


class Head(nn.Module):
    """A model with a loss of its own."""

    def __init__(self, vocabulary: int = 50000) -> None:
        super().__init__()
        self.head = nn.Linear(16, vocabulary)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.CrossEntropyLoss(label_smoothing=0.1)(self.head(x), labels)


def test_a_capture_on_the_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says of its tensors that they are on a GPU."""
    monkeypatch.setattr(fused_loss, "compiled", lambda loss: pytest.fail("compiled"))
    run = Run(Head(), (torch.randn(4, 16), torch.tensor([1, 2, 0, 3])), StepOptions(on_cpu=True))
    FUSED_CROSS_ENTROPY.apply(run)
    assert any("softmax" in entry.name for entry in run.capture().ops)


def test_a_cross_entropy_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that reach the compiled function, which here is the function itself."""
    calls = []
    monkeypatch.setattr(CompiledLoss, "__call__", lambda self, *a, **k: calls.append(1) or self.loss(*a, **k))
    original, x, labels = Head(), torch.randn(4, 16), torch.tensor([1, 2, -100, 3])
    changed = copy.deepcopy(original)
    edits = FUSED_CROSS_ENTROPY.apply(Run(changed))
    for number, which in enumerate((changed, pickle.loads(pickle.dumps(changed))), 1):
        assert torch.equal(which(x, labels), original(x, labels))
        assert len(calls) == number
    small = Head(100)
    FUSED_CROSS_ENTROPY.apply(Run(small))
    small(x, labels)
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, labels), original(x, labels))
    edits.undo()
    changed(x, labels)
    assert len(calls) == 2


def test_what_the_compiler_traced_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled here too, where on the CPU it would run as it is."""
    compiled = torch.compile(fused_loss._compiled_cross_entropy.loss, backend="aot_eager")
    monkeypatch.setattr(CompiledLoss, "__call__", lambda self, *a, **k: compiled(*a, **k))
    original, x, labels = Head(), torch.randn(4, 16), torch.tensor([1, 2, -100, 3])
    changed = copy.deepcopy(original)
    FUSED_CROSS_ENTROPY.apply(Run(changed))
    for which in (changed, original):
        which(x, labels).backward()
    torch.testing.assert_close(changed.head.weight.grad, original.head.weight.grad)


class Failing(Head):
    """Looks at what its cross-entropy is, then fails."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert F.cross_entropy is not PLAIN
        thread = Thread(target=lambda: found.append(F.cross_entropy(x, labels)))
        found: list[torch.Tensor] = []
        thread.start()
        thread.join()
        assert torch.equal(found[0], PLAIN(x, labels))
        raise ValueError("on purpose")


def test_nobody_else_meets_what_the_model_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does another thread, nor anyone after a failure; and a function of somebody else's stays."""
    monkeypatch.setattr(CompiledLoss, "__call__", lambda *args, **options: pytest.fail("compiled"))
    changed = Failing(8)
    FUSED_CROSS_ENTROPY.apply(Run(changed))
    x, labels = torch.randn(4, 50000), torch.tensor([1, 2, 3, 4])
    with pytest.raises(ValueError, match="on purpose"):
        changed(x, labels)
    assert F.cross_entropy is PLAIN
    other = Head()
    FUSED_CROSS_ENTROPY.apply(Run(other))
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **options: x.sum())
    assert other(torch.randn(4, 16), labels) == x.sum()


def test_a_small_loss_beside_it_is_captured_as_ever() -> None:
    original = Head(100)
    changed = copy.deepcopy(original)
    FUSED_CROSS_ENTROPY.apply(Run(changed))
    inputs = torch.empty(4, 16, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    steps = [Run(which, inputs, StepOptions(amp="bf16")).capture() for which in (original, changed)]
    assert [op.name for op in steps[0].ops] == [op.name for op in steps[1].ops]


def test_the_plan_finds_a_cross_entropy_in_the_model() -> None:
    x = torch.empty(1 << 14, 16, device="meta")
    labels = torch.zeros(1 << 14, dtype=torch.int64, device="meta")
    found = plan(Head(), (x, labels))
    assert found.candidates == (FUSED_CROSS_ENTROPY,)
    assert found.speedup > 1.2


def plan(which: nn.Module, inputs: Any, **options: Any) -> tilefit.Plan:
    return tilefit.optimize(which, inputs, gpu="h200", amp="bf16", select=["fuse-loss"], **options)


def test_the_plan_saves_time_and_memory() -> None:
    found = plan(model(), tokens(1024, 32, "meta"))
    (fix,) = found.fixes
    assert fix.gain_s > 0
    assert found.after_bytes < 0.7 * found.before_bytes
    assert found.candidates == (FUSED_LOSS,)
    assert isinstance(found.model.loss_function, CompiledLoss)


@pytest.mark.parametrize("options", [{"train": False}, {"compile": True}])
def test_nothing_to_do(options: dict[str, Any]) -> None:
    assert not plan(model(), tokens(1024, 32, "meta"), **options).fixes


def test_a_small_vocabulary_is_left_alone() -> None:
    assert not plan(model(vocab_size=1000), tokens(16, 32)).fixes
