"""Ways to hold less: by hand what each frees and costs, by real optimizers what their state takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tilefit.capture import capture
from tilefit.cost.footprint import USABLE_SHARE
from tilefit.cost.links import Fabric
from tilefit.cost.priced import priced
from tilefit.errors import UsageError
from tilefit.ops import Step
from tilefit.options import StepOptions
from tilefit.parallel.blocks import Block, Blocks, Framework, Model
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.memory_choices import CHOICES, Thrifty, require_choices
from tilefit.parallel.offers import Offer, offers
from tilefit.parallel.planning import Job, Planner, precision_of
from tilefit.parallel.training import Training

H100 = priced("h100-sxm")
ALONE = Fabric(H100, 1)
#: What the link to the host delivers in one direction, and in each of both at once.
LINK, BOTH = 55.4e9, 0.915 * 55.4e9
LAYER = Block(
    forward_s=1e-3, backward_s=4e-3, parameters=10**7, tensors=10, saved_bytes=10**8, surplus_bytes=10**6,
    products_bytes=4 * 10**7, products_s=6e-4, input_bytes=10**6,
)  # fmt: skip
HEAD = Block(
    forward_s=1e-3, backward_s=2e-3, parameters=10**6, tensors=1, saved_bytes=9 * 10**8, products_s=5e-4,
    surplus_bytes=5 * 10**8, logits_bytes=12 * 10**8, logits_surplus_bytes=4 * 10**8,
)  # fmt: skip
BLOCKS = Blocks(Block(parameters=10**6, tensors=1), (LAYER,) * 8, HEAD, optimizer_s=1e-12)


def training(*names: str, split: TrainingSplit | None = None, fabric: Fabric = ALONE) -> Training:
    made = Training(BLOCKS, split or TrainingSplit(), fabric, Precision(master=4), Framework())
    return Thrifty.of(made, names)


def test_nothing_is_made_that_was_not_asked_for() -> None:
    assert type(training()) is Training


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_moments_take_what_those_of_a_real_optimizer_take(weights: torch.dtype) -> None:
    model = nn.Linear(64, 32).to(weights)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64, dtype=weights)).sum().backward()
    optimizer.step()
    state = [t for each in optimizer.state.values() for t in each.values() if t.dim()]
    each = sum(t.numel() * t.element_size() for t in state) / sum(p.numel() for p in model.parameters())
    moments = training("optimizer-bf16").precision if weights == torch.bfloat16 else training().precision
    assert moments.optimizer - moments.master == each


def test_eight_bits_take_a_byte_and_a_scale_for_256_values() -> None:
    # Two moments. AdamW8bit of torchao 0.18 takes 2.034 bytes, tables and short vectors included.
    plain, short = training().memory(), training("optimizer-8bit").memory()
    assert short.optimizer == pytest.approx(plain.optimizer * (4 + 2 * (1 + 4 / 256)) / 12)
    assert replace(short, optimizer=plain.optimizer) == plain
    # Less is read and written: of 2 times the state, 4 bytes of gradient and 2 times the weight's 2.
    own = 82 * 10**6 * 1e-12 / (7 * 2)
    assert training().time().optimizer_s == pytest.approx(own * (2 * 12 + 4 + 4))
    assert training("optimizer-8bit").time().optimizer_s == pytest.approx(own * (2 * 6.03125 + 4 + 4))


def test_activations_go_and_come_beside_the_computation() -> None:
    plain, away = training(), training("activations-on-host")
    moved_s = 1e8 / LINK  # 1.8 ms: longer than the forward pass of a layer, shorter than the backward pass
    assert 1e-3 < moved_s < 4e-3
    time = away.time()
    assert time.host_s == pytest.approx(8 * (moved_s - 1e-3))
    assert time.time_s == pytest.approx(plain.time().time_s + time.host_s)
    assert replace(time, time_s=plain.time().time_s, host_s=0.0) == pytest.approx(plain.time())
    # When the backward pass begins nothing is there of the layers, all of what comes after them.
    held = away.memory()
    assert replace(held, activations=held.activations + 8 * 10**8) == plain.memory()
    assert isinstance(away, Thrifty)
    assert away.host_bytes() == 8 * 10**8


def test_of_layers_that_are_computed_again_only_their_inputs_move() -> None:
    again = training("activations-on-host", split=TrainingSplit(checkpoint="full"))
    assert isinstance(again, Thrifty)
    assert again.host_bytes() == 8 * 10**6
    assert again.time().host_s == 0


def test_gpus_of_a_machine_share_its_memory() -> None:
    alone, eight = (
        training("optimizer-on-host", split=TrainingSplit(data=count), fabric=Fabric(H100, count)).time()
        for count in (1, 8)
    )
    state, largest = 82 * 10**6 * 12, 10**6 * 12  # a tenth of a layer, as large as the table and the head
    assert alone.host_s == pytest.approx(state / BOTH + 2 * largest / LINK - alone.optimizer_s)
    assert eight.host_s == pytest.approx(state / (614e9 / 16) + 2 * largest / LINK - eight.optimizer_s)


def test_state_is_on_the_gpu_only_while_it_updates() -> None:
    plain, away = training().memory(), training("optimizer-on-host").memory()
    assert plain.total - away.total == 82 * 10**6 * 12
    # FSDP gathers from the fp32 copy: it stays.
    sharded = TrainingSplit(data=4, zero=3)
    plain, away = (training(*each, split=sharded).memory() for each in ((), ("optimizer-on-host",)))
    assert plain.total - away.total == 82 * 10**6 * 8 / 4


def test_a_loss_in_chunks_holds_an_eighth_of_the_logits() -> None:
    plain = training().memory()
    for name, again_s in (("loss-in-chunks", HEAD.forward_s), ("fused-loss", 0.0)):
        made = training(name)
        assert made.blocks.after.saved_bytes == 10**8  # what are no logits
        assert made.blocks.after.surplus_bytes == 10**8 + 12 * 10**8 // 8
        assert made.memory().total < plain.total
        more_s = made.blocks.after.backward_s - HEAD.backward_s - again_s
        # 42 or 48 bytes of each of the head's elements.
        assert 0 < more_s < 10**6 * 60 / (0.8 * H100.memory_bandwidth_bytes_per_s)


class Net(nn.Module):
    """Layers, a head over many words, and its loss, perhaps in chunks of rows."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.table = nn.Embedding(8192, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in "ab"
        )
        self.head = nn.Linear(64, 8192, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        parts = zip(x.flatten(0, 1).chunk(self.chunks), labels.flatten().chunk(self.chunks), strict=True)
        if self.chunks == 1:
            return self._loss(*next(parts)) / labels.numel()
        sums = [checkpoint(self._loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(sums).sum() / labels.numel()

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), labels, reduction="sum")


def _step(chunks: int = 1) -> Step:
    ids = torch.zeros(16, 512, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        return capture(Net(chunks), (ids, ids), options=StepOptions(amp="bf16"))


@pytest.fixture(scope="module")
def step() -> Step:
    return _step()


def _planner(step: Step, *choices: str, fabric: Fabric = ALONE) -> Planner:
    return Planner(Model(step), fabric, Job(16, precision_of(step), choices=choices))


def test_logits_are_those_of_a_program_that_computes_its_loss_so(step: Step) -> None:
    split = TrainingSplit(micro_batches=1, samples=16)
    whole, parts = (_planner(step, *each).priced(split).memory.total for each in ((), ("loss-in-chunks",)))
    peaks = [each.memory.peak_bytes for each in (step, _step(8))]
    assert peaks[0] > 3 * peaks[1]
    assert whole - parts == pytest.approx(peaks[0] - peaks[1], rel=0.05)


def _named(found: tuple[Offer, ...]) -> dict[str, Offer]:
    return {" ".join(choice.name for choice in each.choices): each for each in found}


def test_what_is_offered_says_what_it_changes_and_is_not_made(step: Step) -> None:
    small = Fabric(replace(H100, memory_bytes=2 * _planner(step).best(1, 1)[0].memory.total), 1)
    planner = _planner(step, fabric=small)
    (best,) = planner.best(1, 1)
    found = _named(offers(planner, 1, best))
    assert planner.best(1, 1) == [best]
    assert {name: each.level for name, each in found.items()}.items() <= {
        each.name: each.level for each in CHOICES
    }.items()
    assert found["fused-loss"].priced.memory.total < best.memory.total
    assert found["loss-in-chunks"].level == "safe"
    made = _named(offers(_planner(step, "fused-loss", fabric=small), 1, best))
    assert not {"fused-loss", "loss-in-chunks"} & made.keys()
    roomy = Fabric(replace(H100, memory_bytes=1 << 50), 1)  # where nobody is short of memory
    assert not offers(_planner(step, fabric=roomy), 1, best)


def test_where_nothing_fits_it_says_what_would(step: Step) -> None:
    least = {}
    for names in ((), ("fused-loss",)):
        planner = _planner(step, *names)
        least[names] = min(planner.training(split).memory().total for split in planner.splits(1))
    between = sum(least.values()) / 2
    tight = Fabric(replace(H100, memory_bytes=int(between / USABLE_SHARE)), 1)
    planner = _planner(step, fabric=tight)
    assert not planner.best(1)
    found = _named(offers(planner, 1, None))
    assert found["fused-loss"].priced.memory.total <= between
    assert "activations-on-host" not in found  # which alone is not enough


def test_names_are_checked() -> None:
    with pytest.raises(UsageError, match="by the name of zip"):
        require_choices(["zip"], "--memory")
    with pytest.raises(UsageError, match="two ways to do one thing"):
        require_choices(["optimizer-bf16", "optimizer-8bit"], "--memory")
    require_choices(
        [each.name for each in CHOICES if each.name not in ("loss-in-chunks", "optimizer-bf16")], ""
    )
