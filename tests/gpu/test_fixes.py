"""On a GPU: fixes whose kernels only a GPU has do what the model did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import tilefit
from fixable import WrittenGelu, WrittenNorm
from tilefit.fixes.changes.fix import ChangeSet
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.attention.attention import fusing
from tilefit.fixes.kinds.cuda_graph import GRAPH
from tilefit.fixes.kinds.fused_loss import FUSED_CROSS_ENTROPY, FUSED_LOSS
from tilefit.fixes.kinds.parts import CompiledAlone
from tilefit.fixes.kinds.settings import REDUCE_OVERHEAD, compilation, fused

pytestmark = pytest.mark.gpu


# ---- attention ---------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of 4 heads, masked as ``masked`` says."""

    def __init__(self, masked: Callable[[torch.Tensor, Any], torch.Tensor], dropout: float) -> None:
        super().__init__()
        self.masked, self.dropout = masked, dropout
        self.qkv = nn.Linear(256, 768)
        self.bias = nn.Parameter(torch.randn(4, 128, 128))
        self.register_buffer("causal", torch.ones(128, 128, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        weights = self.masked(q @ k.mT / 8, (self, mask)).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)


def causal(scores: torch.Tensor, given: Any) -> torch.Tensor:
    return scores.masked_fill(~given[0].causal, float("-inf"))


def padding(scores: torch.Tensor, given: Any) -> torch.Tensor:
    return scores.masked_fill(~given[1][:, None, None], max(-1e9, torch.finfo(scores.dtype).min))


def additive(scores: torch.Tensor, given: Any) -> torch.Tensor:
    return scores + (1.0 - given[1][:, None, None].to(scores.dtype)) * torch.finfo(scores.dtype).min


def learned(scores: torch.Tensor, given: Any) -> torch.Tensor:
    return scores + given[0].bias


@pytest.mark.parametrize("masked", [causal, padding, additive, learned])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "autocast"])
def test_attention(masked: Callable[..., torch.Tensor], dtype: Any) -> None:
    torch.manual_seed(0)
    amp, dtype = ("bf16", torch.float32) if dtype == "autocast" else ("", dtype)
    original = Attention(masked, 0.0)
    fused = copy.deepcopy(original)
    fusing(("",)).apply(Run(fused))
    mask = torch.ones(3, 128, dtype=torch.bool)
    mask[1, 100:] = False
    mask[2] = masked is not padding  # no key at all: equal weights
    result = tilefit.verify(
        original, fused, {"x": torch.randn(3, 128, 256), "mask": mask}, amp=amp, dtype=dtype, device="cuda"
    )
    assert result.ok, result


def test_dropout_drops_as_many() -> None:
    torch.manual_seed(0)
    fused = Attention(causal, 0.3).cuda()
    fusing(("",)).apply(Run(fused))
    x, mask = torch.randn(8, 128, 256, device="cuda"), torch.ones(8, 128, dtype=torch.bool, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        drawn = torch.stack([fused(x, mask).float() for _ in range(200)])
        expected = fused.eval()(x, mask).float()
    assert drawn.std(0).mean() > 0.01
    torch.testing.assert_close(drawn.mean(0), expected, rtol=0.1, atol=0.15)


# ---- CUDA graphs -------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)
    ).cuda()


def graphed(model: nn.Module) -> nn.Module:
    GRAPH.apply(Run(model))
    return model


def batches(number: int, rows: int = 32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(number, rows, 64, device="cuda", generator=generator)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each graph that was launched."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: found.append(1) or replay(self))
    return found


def train(model: nn.Module, xs: torch.Tensor, amp: bool, micro: int = 1) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for number, x in enumerate(xs):
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if number % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_graphed_training_is_training(replays: list[int], amp: bool, micro: int) -> None:
    original = network()
    model = graphed(copy.deepcopy(original))
    xs = batches(12)
    expected = train(original, xs, amp, micro)
    assert not replays
    found = train(model, xs, amp, micro)
    assert len(replays) == 2 * (12 - 2)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=1e-3, atol=1e-4)


def test_a_model_of_a_library_with_random_depth(replays: list[int]) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    original = models.efficientnet_b0(stochastic_depth_prob=0.0, dropout=0.0).cuda()
    model = graphed(copy.deepcopy(original))
    for x in torch.randn(6, 4, 3, 64, 64, device="cuda"):
        for which in (original, model):
            which.zero_grad()
            which(x).square().mean().backward()
    assert len(replays) == 2 * 4
    torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=1e-2, atol=1e-3)
    for p, q in zip(original.parameters(), model.parameters(), strict=True):
        assert (q.grad - p.grad).norm() <= 0.02 * p.grad.norm() + 1e-5
    deep = graphed(models.efficientnet_b0().cuda())
    losses = [deep(x).square().mean() for _ in range(6)]
    assert losses[-1] != losses[-2]


def test_what_was_returned_stays(replays: list[int]) -> None:
    original = network().eval()
    model = graphed(copy.deepcopy(original))
    with torch.no_grad():
        xs = batches(6)
        kept = [model(x) for x in xs]
        torch.testing.assert_close(kept, [original(x) for x in xs])
    assert len(replays) == 4


def test_two_calls_before_a_backward_pass(replays: list[int]) -> None:
    original = network().eval()
    model = graphed(copy.deepcopy(original))
    for a, b in zip(batches(6), batches(12)[6:], strict=True):
        for which in (original, model):
            which.zero_grad()
            (which(a) * which(b)).sum().backward()
        for p, q in zip(original.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert replays


def test_gradients_of_inputs_and_frozen_layers(replays: list[int]) -> None:
    original = network().eval()
    original[0].requires_grad_(False)
    model = graphed(copy.deepcopy(original))
    for x in batches(5):
        grads = []
        for which in (original, model):
            leaf = x.clone().requires_grad_()
            which(leaf).sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
    assert model[0].weight.grad is None
    assert replays


def test_changes_between_calls(replays: list[int]) -> None:
    original = network()
    model = graphed(copy.deepcopy(original))
    for rows in (32, 32, 32, 32, 7, 32):
        for x in batches(2, rows):
            torch.testing.assert_close(model(x), original(x))
    for which in (original, model):
        which.eval()
        which[1].eps = 1e-2
    for x in batches(5):
        torch.testing.assert_close(model(x), original(x))
    model.load_state_dict(network().state_dict())
    original.load_state_dict(network().state_dict())
    torch.testing.assert_close(model(x), original(x))
    assert replays


def test_an_old_backward_pass_is_an_error() -> None:
    model = graphed(network().eval())
    for x in batches(4):
        model(x).sum().backward()
    out = model(x).sum()
    out.backward(retain_graph=True)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="cuda-graph"):
        out.backward()


def test_a_second_backward_pass_through_one_call_is_an_error(replays: list[int]) -> None:
    model = graphed(network().eval())
    for x in batches(4):
        model(x).sum().backward()
    assert replays
    out = model(x).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda-graph"):
        out.backward()


def test_what_no_loss_is_made_of_gets_no_gradient() -> None:
    original = nn.MultiheadAttention(64, 4).cuda()
    model = graphed(copy.deepcopy(original))
    for x in batches(5):
        for which in (original, model):
            which.zero_grad()
            which(x[None], x[None], x[None])[1].square().sum().backward()
        for p, q in zip(original.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            torch.testing.assert_close(p.grad, q.grad)


def test_a_model_that_writes_to_what_it_is_given_does() -> None:
    model = graphed(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)).cuda())
    for x in batches(5):
        given = x.clone()
        model(given)
        torch.testing.assert_close(given, x.relu())


def test_a_capture_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    end = torch.cuda.CUDAGraph.capture_end

    def broken(graph: Any) -> None:
        end(graph)
        raise RuntimeError("of no use")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", broken)
    original = network().eval()
    model = graphed(copy.deepcopy(original))
    xs = batches(5)
    with torch.no_grad(), pytest.warns(UserWarning, match="of no use"):
        found = [model(x) for x in xs]
    with torch.no_grad():
        torch.testing.assert_close(found, [original(x) for x in xs])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_threads_capture_one_after_the_other(replays: list[int]) -> None:
    original = network().eval()
    model = graphed(copy.deepcopy(original))
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        with torch.no_grad():
            found[number] = [model(x) for x in batches(20)]

    threads = [Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replays
    with torch.no_grad():
        expected = [original(x) for x in batches(20)]
    for number in range(3):
        torch.testing.assert_close(found[number], expected)


def test_training_and_evaluation_stay_captured_side_by_side(replays: list[int]) -> None:
    original = network()
    model = graphed(copy.deepcopy(original))
    with torch.no_grad():
        for x in batches(6):
            for mode in (True, False):
                torch.testing.assert_close(model.train(mode)(x), original.train(mode)(x))
    assert len(replays) == 2 * (6 - 2)


def test_hooks_that_a_part_gets_later_are_called_every_time(replays: list[int]) -> None:
    model = graphed(network().eval())
    for x in batches(4):
        model(x).sum().backward()
    before = len(replays)
    assert before
    seen: list[int] = []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="2 has hooks"):
        losses = [model(x).sum() for x in batches(8)]
    losses[-1].backward()
    assert len(seen) == 8
    assert len(replays) == before


def test_what_was_captured_goes_with_the_fix(replays: list[int]) -> None:
    model = network().eval()
    edits = GRAPH.apply(Run(model))
    with torch.no_grad():
        for x in batches(4):
            model(x)
    assert replays
    before = torch.cuda.memory_reserved()
    known = len(replays)
    edits.undo()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
    with torch.no_grad():
        model(x)
    assert len(replays) == known


def test_random_numbers_differ_between_replays(replays: list[int]) -> None:
    model = graphed(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda())
    (x,) = batches(1)
    outputs = [model(x).detach() for _ in range(6)]
    assert replays
    assert not torch.equal(outputs[-1], outputs[-2])


# ---- the rest ----------------------------------------------------------------------------------


def test_the_fused_optimizer_goes_on_from_a_half_trained_one() -> None:
    models = [network() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for number, x in enumerate(batches(8)):
        if number == 4:
            fused("adamw").apply(Run(models[1], live_optimizer=optimizers[1]))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # A step that starts anew differs by the learning rate.
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-3, atol=1e-5)
    assert next(iter(optimizers[1].state.values()))["step"].is_cuda


@pytest.mark.parametrize("micro", [1, 3])
def test_a_compiled_model_trains_as_before(micro: int) -> None:
    original = network()
    model = copy.deepcopy(original)
    compilation(REDUCE_OVERHEAD).apply(Run(model))
    xs = batches(9)
    expected, found = train(original, xs, False, micro), train(model, xs, False, micro)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-3, atol=1e-5)


def test_the_compiled_loss_is_the_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=64)
    torch.manual_seed(0)
    original = transformers.GPT2LMHeadModel(config).cuda().eval()
    changed = copy.deepcopy(original)
    FUSED_LOSS.apply(Run(changed))
    ids = torch.randint(0, config.vocab_size, (8, 64), device="cuda")
    labels = ids.clone()
    labels[:, 40:] = -100
    peaks = []
    for model in (original, changed, original, changed):  # the first time compiles
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=labels).loss
        model.zero_grad()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        model.last_loss = loss.detach()
    torch.testing.assert_close(changed.last_loss, original.last_loss, rtol=1e-5, atol=1e-5)
    for p, q in zip(original.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0.02, atol=1e-4)
    assert peaks[3] < peaks[2]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 20000)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), labels, ignore_index=7, label_smoothing=0.1)


@pytest.mark.parametrize("amp", ["", "bf16"])
def test_a_compiled_cross_entropy_is_a_cross_entropy(amp: str) -> None:
    torch.manual_seed(0)
    original = Head()
    changed = copy.deepcopy(original)
    FUSED_CROSS_ENTROPY.apply(Run(changed))
    inputs = (torch.randn(96, 64), torch.randint(0, 20000, (96,)))
    result = tilefit.verify(original, changed, inputs, amp=amp, dtype=torch.float32, device="cuda")
    assert result.ok, result


# ---- parts that are compiled alone -------------------------------------------------------------


@pytest.mark.parametrize("amp", ["", "bf16"])
def test_parts_that_are_compiled(amp: str) -> None:
    torch.manual_seed(0)
    layer = [nn.Linear(64, 64), WrittenNorm(), nn.Linear(64, 64), WrittenGelu()]
    original = nn.Sequential(*(copy.deepcopy(each) for _ in range(6) for each in layer))
    changed = copy.deepcopy(original)
    written = [str(number) for number in range(1, 24, 2)]
    ChangeSet.giving(written, CompiledAlone(), "").apply(Run(changed))
    before = counters["stats"]["unique_graphs"]
    x = torch.randn(96, 64)
    result = tilefit.verify(original, changed, x, amp=amp, dtype=torch.float32, device="cuda")
    assert result.ok, result
    exact = tilefit.verify(original, changed, x, dtype=torch.float64, device="cuda")
    assert exact.ok, exact
    assert before < counters["stats"]["unique_graphs"]


def test_a_compiled_part_that_is_written_to_is_the_same_or_an_error() -> None:
    part = WrittenNorm().cuda()
    ChangeSet.giving([""], CompiledAlone(), "").apply(Run(part))
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    (part(x).mul_(2).square()).sum().backward()
    gradient, x.grad = x.grad, None
    tilefit.strip(part)
    (part(x).mul_(2).square()).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
