"""Training steps on many GPUs: bounds that hold for every split, and what can be told by hand."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from tilefit.capture.child import capture_target
from tilefit.cost.launch import COLLECTIVE_S, fsdp_s
from tilefit.cost.links import NETWORKS, TAKEN, Fabric, Network
from tilefit.cost.priced import priced
from tilefit.errors import UsageError
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.parallel.blocks import Block, Blocks, Framework, Model
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.launchers import lacks, settings
from tilefit.parallel.planning import SLOW_HOST, Job, Planner, precision_of, tokens_of
from tilefit.parallel.schedule import GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, ZERO_BUBBLE_V
from tilefit.parallel.training import CHECKPOINT_S, Training

H100 = priced("h100-sxm")
CLUSTER = Fabric(H100, 8, NETWORKS["infiniband"])
LAYER = Block(
    forward_s=1e-3, backward_s=2e-3, parameters=10**7, saved_bytes=10**8, products_bytes=4 * 10**7,
    products_s=6e-4, input_bytes=10**6,
)  # fmt: skip
BLOCKS = Blocks(Block(parameters=10**6), (LAYER,) * 8, Block(parameters=10**6), optimizer_s=1e-12)


def training(split: TrainingSplit, fabric: Fabric = CLUSTER, **framework: object) -> Training:
    return Training(BLOCKS, split, fabric, Precision(), Framework(**framework))  # type: ignore[arg-type]


SPLITS = [
    TrainingSplit(),
    TrainingSplit(data=16, micro_batches=4),
    TrainingSplit(data=16, micro_batches=40, zero=1),
    TrainingSplit(data=16, micro_batches=2, zero=3),
    TrainingSplit(data=4, pipeline=4, micro_batches=8, zero=1),
    TrainingSplit(data=2, pipeline=4, micro_batches=60, chunks=2),
    TrainingSplit(pipeline=8, micro_batches=4, checkpoint="full"),
    TrainingSplit(data=8, context=2, micro_batches=2, checkpoint="selective"),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_never_below_its_parts_and_no_slower_on_a_faster_network(split: TrainingSplit) -> None:
    made = training(split)
    time = made.time()
    assert time.time_s >= time.compute_s + time.recompute_s + time.tensor_s + time.optimizer_s - 1e-12
    assert time.time_s >= made.least_s() - 1e-12
    total = time.compute_s + time.recompute_s + time.exposed_s + time.bubble_s + time.optimizer_s
    assert total + time.launch_s == pytest.approx(time.time_s)
    fast = replace(CLUSTER, network=replace(NETWORKS["infiniband"], card_bytes_per_s=500e9))
    assert training(split, fast).time().time_s <= time.time_s


@pytest.mark.parametrize(
    "split", [replace(each, micro_batches=parts) for each in SPLITS[3:6] for parts in (24, 40)], ids=str
)
def test_many_micro_batches_are_extrapolated_to_what_all_of_them_take(split: TrainingSplit) -> None:
    made = training(split)
    assert made.step_s() == pytest.approx(made._run_s(split.parts, False), rel=0.01)


def test_the_bubble_by_hand() -> None:
    # Four stages of two layers, 6 ms each way: (8 + 3) times that; with two chunks half of the filling.
    one = training(TrainingSplit(pipeline=4, micro_batches=8), replace(CLUSTER, per_machine=8)).time()
    two = training(TrainingSplit(pipeline=4, micro_batches=8, chunks=2)).time()
    assert one.bubble_s == pytest.approx(3 * 6e-3, rel=0.02)
    assert two.bubble_s == pytest.approx(1.5 * 6e-3, rel=0.02)


def test_what_is_summed_up_hides_behind_the_backward_pass_and_shows_where_it_is_slow() -> None:
    split = TrainingSplit(data=16)
    slow = Fabric(H100, 8, Network("slow", 1, 1e9))
    hidden, shown = training(split).time(), training(split, slow).time()
    assert hidden.data_s < 0.2 * hidden.compute_s
    assert shown.data_s > shown.compute_s
    assert training(split, overlap=False).time().data_s > 2 * hidden.data_s


def test_checkpointing_trades_time_for_memory() -> None:
    made = [training(TrainingSplit(checkpoint=each)) for each in ("none", "selective", "full")]
    times = [each.time().recompute_s for each in made]
    assert times == pytest.approx([0, 8 * 4e-4, 8 * 1e-3])
    kept = [each.memory().activations for each in made]
    # With little kept, the fullest moment is the last one, when all gradients are there.
    assert kept == [8 * 10**8, 8 * (4 * 10**7 + 10**6), 10**6]


def test_gradients_come_as_activations_go() -> None:
    # 40 MB of gradients for 100 MB of activations of each layer: the beginning of the first backward pass
    # is fullest, and of two micro-batches that of the second, which has the gradients of the first.
    once, twice = (training(TrainingSplit(micro_batches=parts)).memory() for parts in (1, 2))
    assert (once.gradients, once.activations) == (4 * 11 * 10**6, 8 * 10**8)
    assert (twice.gradients, twice.activations) == (4 * 82 * 10**6, 8 * 10**8)
    # Where they have memory from the beginning on, one micro-batch holds as much as two.
    staying = training(TrainingSplit(), gradients_stay=True).memory()
    assert (staying.gradients, staying.activations) == (4 * 82 * 10**6, 8 * 10**8)


def test_a_chunk_whose_passes_are_over_gives_its_whole_gradients_and_parameters_back() -> None:
    # With as many micro-batches as stages chunks run backward one after the other, with more in turn.
    held = {
        (chunks, parts): training(
            TrainingSplit(
                data=4,
                pipeline=2,
                zero=3,
                micro_batches=parts,
                chunks=chunks,
                reshard=False,
                checkpoint="full",
            )
        ).stage_memory(0)
        for chunks in (1, 2)
        for parts in (2, 8)
    }
    whole = 4 * 41 * 10**6
    message = 6 * 10**7
    assert held[1, 2].gradients == held[2, 8].gradients == whole + message
    # Before the first chunk's gradients come, those of the second have been scattered.
    assert held[2, 2].gradients == 4 * 2 * 10**7 + message
    assert held[2, 2].total < held[1, 2].total < held[2, 8].total


def test_ddp_has_buckets_and_copies_that_its_memory_and_time_show() -> None:
    one, two = training(TrainingSplit()), training(TrainingSplit(data=2), bucket_copies=2)
    assert two.memory().gradients == one.memory().gradients + 4 * 82 * 10**6
    more_s = two.time().time_s - one.time().time_s
    moved_s = 82e6 * 16 / H100.memory_bandwidth_bytes_per_s
    assert moved_s < more_s < 3 * moved_s
    without = training(TrainingSplit(data=2), bucket_copies=0)
    assert without.memory().gradients == one.memory().gradients
    assert without.time().time_s < two.time().time_s


def test_the_host_launches_again_what_is_computed_again() -> None:
    layer = replace(LAYER, forward_s=1e-6, backward_s=1e-6, forward_host_s=1e-3, backward_host_s=2e-3)
    blocks = replace(BLOCKS, layers=(layer,) * 8)
    for zero in (0, 3):
        splits = [TrainingSplit(data=8, zero=zero, checkpoint=each) for each in ("none", "full")]
        none, full = (replace(training(split), blocks=blocks).step_s() for split in splits)
        assert full - none == pytest.approx(8 * (1e-3 + CHECKPOINT_S * priced(H100).launch_scale), rel=0.2)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_what_waits_for_the_host_is_no_communication(split: TrainingSplit) -> None:
    host = {"forward_host_s": 5e-3, "backward_host_s": 9e-3}
    layer = replace(LAYER, tensors=10)
    blocks = replace(BLOCKS, layers=(layer,) * 8, optimizer_host_s=1e-5)
    slow = replace(blocks, layers=(replace(layer, **host),) * 8)
    free = replace(blocks, optimizer_host_s=0.0)
    slow_time, free_time = (replace(training(split), blocks=each).time() for each in (slow, free))
    told = [name for name in asdict(free_time) if name not in ("time_s", "launch_s")]
    assert all(getattr(slow_time, name) == getattr(free_time, name) for name in told)
    # A stage's passes take no less than their launches.
    least_s = split.parts * (8 // split.pipeline) * sum(host.values())
    assert slow_time.launch_s >= least_s - free_time.time_s > 0
    assert slow_time.time_s >= least_s


def test_a_slow_host_shows_where_the_host_limits(models: dict[int, Model]) -> None:
    planner = Planner(models[2], Fabric(H100, 8), Job(1024, precision_of(models[2].step)))
    few, many = TrainingSplit(data=8, zero=3), TrainingSplit(data=8, zero=3, samples=4096)
    few_s, many_s = (
        planner.step_s(split, Framework(host=SLOW_HOST)) / planner.training(split).step_s()
        for split in (few, many)
    )
    assert 1.3 < few_s < 1.5
    assert 1.0 <= many_s < few_s


def test_selective_checkpointing_may_compute_every_second_product_again_but_no_attention(
    models: dict[int, Model],
) -> None:
    every, half = (models[2].blocks(CLUSTER, 1, 1, Framework(again=each)).layers[0] for each in (0, 2))
    # Of the seven products of a layer of a Llama those are left that are counted oddly.
    assert half.forward_s == every.forward_s
    assert 0.4 < half.products_s / every.products_s < 0.9
    keys, out, gate = 128, 256, 1024
    assert every.products_bytes - half.products_bytes == 2 * 128 * (keys + out + gate)


def test_with_the_sequence_split_each_sum_is_two_messages_for_the_host(models: dict[int, Model]) -> None:
    split, whole = (
        models[2].blocks(Fabric(H100, 8), 64, 2, Framework(sequence=sequence)) for sequence in (True, False)
    )
    more_s = split.layers[0].forward_host_s - whole.layers[0].forward_host_s
    assert more_s == pytest.approx(2 * (COLLECTIVE_S + Framework().tensor_host_s) * H100.launch_scale)


def test_gradients_summed_up_once_take_fewer_messages_and_with_fsdp_more_memory() -> None:
    slow = Fabric(H100, 8, Network("slow", 1, 10e9))
    for zero in (0, 3):
        split = TrainingSplit(data=16, micro_batches=4, zero=zero)
        each, once = (training(replace(split, sums_each=sums), slow) for sums in (True, False))
        assert once.time().data_s < each.time().data_s
        more = once.memory().gradients - each.memory().gradients
        # All of the 82 M gradients in fp32, instead of a sixteenth of them.
        assert more == pytest.approx(4 * 82e6 * 15 / 16 if zero else 0)


def test_gradients_that_are_views_of_buckets_are_copied_once_and_held_once() -> None:
    split = TrainingSplit(data=2, micro_batches=2)
    views, apart = (training(split, bucket_copies=copies) for copies in (1, 2))
    assert views.time().time_s < apart.time().time_s
    assert views.memory().gradients == 4 * 82 * 10**6
    assert apart.memory().gradients == 2 * views.memory().gradients


def test_fsdp_that_keeps_parameters_gathers_once_and_waits_for_its_host() -> None:
    slow = Fabric(H100, 8, Network("slow", 1, 10e9))
    freed, kept = (
        training(TrainingSplit(data=16, zero=3, reshard=each), slow).time() for each in (True, False)
    )
    assert kept.data_s < 0.8 * freed.data_s
    # Three messages of each layer, two where it keeps them; the ends have theirs.
    small = replace(LAYER, forward_s=1e-5, backward_s=2e-5, tensors=16)
    end = Block(parameters=1, tensors=1)
    blocks = Blocks(end, (small,) * 8, end)
    times = [
        Training(
            blocks, TrainingSplit(data=2, zero=3, reshard=reshard), CLUSTER, Precision(), Framework()
        ).step_s()
        for reshard in (True, False)
    ]
    # The more parameters a layer has, the longer each takes.
    layer_s, end_s = fsdp_s(16), fsdp_s(1)
    assert layer_s > 1.5 * end_s
    assert times == pytest.approx([24 * layer_s + 5 * end_s, 16 * layer_s + 4 * end_s], rel=0.05)


def test_pipelines_of_pytorch_have_room_for_every_message() -> None:
    made = [
        training(TrainingSplit(pipeline=4, micro_batches=8), receives_apart=each) for each in (True, False)
    ]
    messages = [one.stage_memory(i).other - made[1].stage_memory(i).other for one in made[:1] for i in (0, 1)]
    assert messages == [8 * 10**6, 2 * 8 * 10**6]
    # Of two chunks the first stage is sent three; what it sends is held to the end of the step, too.
    many, none = (
        training(TrainingSplit(pipeline=4, micro_batches=8, chunks=2), receives_apart=each)
        for each in (True, False)
    )
    assert many.stage_memory(0).other - none.stage_memory(0).other == 2 * 3 * 8 * 10**6


def test_gpipe_holds_every_micro_batch_and_takes_as_long() -> None:
    split = TrainingSplit(pipeline=4, micro_batches=8)
    made = [training(each) for each in (split, replace(split, schedule=GPIPE))]
    held = [each.memory().activations for each in made]
    assert held == [4 * 2 * 10**8, 8 * 2 * 10**8]
    assert made[1].time().time_s == pytest.approx(made[0].time().time_s, rel=0.02)


def test_zero_bubble_by_hand() -> None:
    # Four stages of two layers: 2 ms forward, 4 ms backward, of which 2 ms are gradients of weights.
    layers = (replace(LAYER, weights_s=1e-3, late_bytes=3 * 10**7),) * 8
    made = {}
    for schedule, chunks in ((ONE_F_ONE_B, 1), (ZERO_BUBBLE, 1), (ZERO_BUBBLE, 2), (ZERO_BUBBLE_V, 2)):
        split = TrainingSplit(pipeline=4, micro_batches=8, chunks=chunks, schedule=schedule)
        made[schedule, chunks] = Training(
            replace(BLOCKS, layers=layers), split, Fabric(H100, 8), Precision(), Framework()
        )
    bubbles = [each.time().bubble_s for each in made.values()]
    # (p - 1) (F + B + W) without, (p - 1) (F + B - W) with zero-bubble, half of it with two chunks. With V
    # the last stage waits for the first chunk's forward pass on all others, and for nothing after that.
    assert bubbles == pytest.approx([3 * 6e-3, 3 * 2e-3, 3 * 1e-3, 3 * 1e-3], rel=0.03)
    assert all(each.least_s() <= each.step_s() for each in made.values())
    # Every stage holds four micro-batches; the last has three that wait for the gradients of their weights.
    held = [made[ZERO_BUBBLE, 1].stage_memory(stage) for stage in (0, 3)]
    assert [each.activations for each in held] == [4 * 2 * 10**8] * 2
    # At the fullest moment the last stage is in its first layer, whose own are not there yet.
    assert held[1].temporary - held[0].temporary == pytest.approx((3 * 2 - 1) * 3 * 10**7)


def test_messages_that_are_asked_for_ahead_take_their_part_of_the_gpu_while_they_wait() -> None:
    # Two stages that always have a message under way: at most a fifth of what they compute.
    split = TrainingSplit(pipeline=2, micro_batches=32)
    once, ahead = (training(replace(split, chunks=chunks), Fabric(H100, 8)).time() for chunks in (1, 2))
    assert once.data_s < 0.01 * once.compute_s
    assert 0.25 * TAKEN * ahead.compute_s < ahead.data_s < TAKEN * ahead.compute_s + 0.01 * ahead.compute_s


def test_fsdp_in_a_pipeline_gathers_once_or_again_and_holds_what_it_gathered() -> None:
    split = TrainingSplit(data=8, pipeline=2, micro_batches=4, zero=3)
    fabric = Fabric(H100, 8, Network("slow", 1, 10e9))
    again, once = (training(replace(split, reshard=each), fabric) for each in (True, False))

    def gathers(made: Training) -> int:
        return sum(1 for task in made.tasks(4) if task.name[0] == "G")  # type: ignore[index]

    # Both ends and eight layers. Freed behind forward passes alone, a layer is there in a pass that follows a
    # backward one: stages run F F B F B F B B and F B F B F B F B.
    assert (gathers(once), gathers(again)) == (10, 5 * (1 + 1 + 1 + 1 + 1) + 5 * (1 + 4))
    assert once.step_s() < again.step_s()
    # Gradients are whole until the last micro-batch in both; every parameter of the stage is there, or all
    # from the layer ahead on.
    own = 10**6 + 4 * 10**7
    assert once.stage_memory(0).gradients == 4 * own + 6 * 10**7
    assert once.stage_memory(0).parameters == 2 * own / 8 + 2 * own
    assert again.stage_memory(0).parameters < once.stage_memory(0).parameters
    whole = training(replace(split, zero=1), fabric).stage_memory(0)
    assert once.stage_memory(0).optimizer == whole.optimizer


def test_tied_parameters_are_held_once_by_a_stage_that_has_both_ends_and_else_by_both() -> None:
    blocks = replace(BLOCKS, tied=10**6)
    held = [
        [
            Training(blocks, TrainingSplit(pipeline=stages), CLUSTER, Precision(), Framework())
            .stage_memory(stage)
            .optimizer
            for stage in range(stages)
        ]
        for stages in (1, 2)
    ]
    assert held == [[12 * 82 * 10**6], [12 * 41 * 10**6, 12 * 42 * 10**6]]


def test_a_frameworks_own_stages_may_have_no_layer() -> None:
    split = TrainingSplit(data=2, pipeline=4, micro_batches=8)
    made = training(split, bounds=lambda stages: (0, 5, 8, 8, 8))
    assert [made.stage_memory(stage).optimizer for stage in range(4)] == [
        12 * each for each in (51 * 10**6, 30 * 10**6, 0, 10**6)
    ]
    # The first has five layers of eight where two would be fair.
    assert made.time().compute_s == pytest.approx(8 * 5 * 3e-3, rel=0.02)  # and sums of gradients
    assert made.time().time_s > 1.7 * training(split).time().time_s


def test_sums_that_every_rank_is_sent_take_longer_and_so_do_many_pieces_that_the_host_cuts() -> None:
    split = TrainingSplit(data=16, zero=1)
    slow = Fabric(H100, 8, Network("slow", 1, 10e9))
    scattered = training(split, slow).time().time_s
    assert training(split, slow, scatters=False).time().time_s > 1.2 * scattered
    layers = tuple(replace(LAYER, tensors=9) for _ in range(8))
    framework = Framework(gather_host_s=1e-3)
    cut = Training(replace(BLOCKS, layers=layers), split, slow, Precision(), framework)
    assert cut.time().time_s == pytest.approx(scattered + 8 * 9 * 16 * 1e-3)


def test_a_head_of_its_own_belongs_to_the_last_stage(llama: Step) -> None:
    blocks = Model(llama).blocks(CLUSTER, 1)
    norm = 1024
    assert blocks.before.parameters == 32000 * 1024
    assert blocks.after.parameters == 32000 * 1024 + norm
    assert blocks.tied == 0


def test_a_tied_head_is_the_embeddings(gpt2: Step) -> None:
    blocks = Model(gpt2).blocks(CLUSTER, 1)
    assert blocks.tied == 50257 * 768
    assert blocks.before.parameters == 50257 * 768 + 1024 * 768
    assert blocks.after.parameters == 2 * 768


def test_the_optimizer_takes_as_long_as_its_state() -> None:
    # An fp32 copy and two moments, each read and written, beside a state in the weight's type.
    plain = replace(training(TrainingSplit()), precision=Precision(2, 2, 2, 4))
    assert plain.time().optimizer_s == pytest.approx(82e6 * 1e-12)
    assert training(TrainingSplit()).time().optimizer_s == pytest.approx(82e6 * 1e-12 * 32 / 14)


def test_memory_of_a_rank_by_hand_and_adds_up() -> None:
    own = sum(block.parameters for block in (BLOCKS.before, *BLOCKS.layers, BLOCKS.after))
    whole = training(TrainingSplit(data=8)).memory()
    # Buckets, of which gradients are views.
    assert (whole.parameters, whole.optimizer, whole.gradients) == (2 * own, 12 * own, 4 * own)
    assert training(TrainingSplit(data=8, zero=1)).memory().optimizer == pytest.approx(12 * own / 8)
    sharded = training(TrainingSplit(data=8, zero=3)).memory()
    # The ends, and two layers.
    gathered = 2 * (2 * 10**6 + 2 * 10**7)
    assert sharded.parameters == pytest.approx(2 * own / 8 + gathered)
    copied = replace(training(TrainingSplit(data=8, zero=3)), precision=Precision(master=4))
    assert copied.memory().parameters == gathered  # the shards are the optimizer's fp32 copy
    assert copied.time().optimizer_s < training(TrainingSplit(data=8, zero=3)).time().optimizer_s
    parts = [whole.parameters, whole.gradients, whole.optimizer, whole.activations, whole.temporary]
    assert whole.total == sum(parts) + whole.other
    # 1F1B: the first stage holds as many micro-batches as there are stages.
    staged = training(TrainingSplit(pipeline=4, micro_batches=8)).memory()
    assert staged.activations == 4 * 2 * 10**8


def test_stages_are_balanced_by_time_and_too_many_are_refused() -> None:
    heavy = replace(BLOCKS, after=replace(LAYER, forward_s=2e-3, backward_s=4e-3))
    made = Training(heavy, TrainingSplit(pipeline=2, micro_batches=2), CLUSTER, Precision(), Framework())
    assert made.bounds == (0, 5, 8)
    with pytest.raises(UsageError, match="8 layers do not fill 9 pipeline stages"):
        training(TrainingSplit(pipeline=9, micro_batches=9)).memory()


def test_a_step_without_layers_cannot_be_planned() -> None:
    with pytest.raises(UsageError, match="no list of layers"):
        Model(Step(()))


# --- of a captured model ---------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[int, Model]:
    """A small Llama with two and with four layers."""
    made = {}
    for layers in (2, 4):
        options = TargetOptions(
            batch=2,
            seq=128,
            fused_optimizer=True,
            weights="bf16",
            arguments={**_SIZES, "num_hidden_layers": layers},
        )
        made[layers] = Model(capture_target("hf:llama", options), 4)
    return made


def test_few_layers_stand_for_all(models: dict[int, Model]) -> None:
    few, whole = models[2], models[4]
    assert few.parameters == whole.parameters
    assert few.flop == pytest.approx(whole.flop)
    one, other = few.blocks(CLUSTER, 4, 2), whole.blocks(CLUSTER, 4, 2)
    assert len(one.layers) == len(other.layers) == 4
    for name in ("forward_s", "backward_s", "saved_bytes", "parameters"):
        sums = [sum(getattr(layer, name) for layer in each.layers) for each in (one, other)]
        assert sums[0] == pytest.approx(sums[1], rel=0.02)


def test_ranks_share_a_layer(models: dict[int, Model]) -> None:
    whole, part = models[2].blocks(CLUSTER, 4), models[2].blocks(CLUSTER, 4, 4)
    assert part.layers[0].forward_link_s > 0 == whole.layers[0].forward_link_s
    assert part.layers[0].flop * 4 == whole.layers[0].flop
    # With the sequence split a rank keeps a quarter of everything, and what it has gathered for the products
    # behind two norms where it does not gather it again.
    again = models[2].blocks(CLUSTER, 4, 4, Framework(gathers_again=True)).layers[0].saved_bytes
    assert again == pytest.approx(whole.layers[0].saved_bytes / 4, rel=0.05)
    gathered_bytes = 2 * 4 * 128 * _SIZES["hidden_size"]
    assert part.layers[0].saved_bytes == again + 2 * gathered_bytes * 3 // 4
    apart = models[2].blocks(CLUSTER, 4, 4, Framework(sequence=False))
    assert apart.layers[0].saved_bytes > part.layers[0].saved_bytes
    slow = Training(part, TrainingSplit(tensor=4), CLUSTER, Precision(), Framework(layer_host_s=1.0))
    assert slow.time().launch_s == pytest.approx(len(part.layers), rel=0.01)


def test_every_split_keeps_the_batch_and_the_best_is_the_fastest_that_fits(models: dict[int, Model]) -> None:
    planner = Planner(models[2], CLUSTER, Job(64, precision_of(models[2].step)))
    splits = list(planner.splits(16))
    assert {split.gpus for split in splits} == {16}
    assert {split.batch for split in splits} == {64}
    assert len(splits) == len(set(splits))
    best = planner.best(16)
    assert all(each.fits for each in best)
    times = [each.time.time_s for each in best]
    assert times == sorted(times)
    assert times[0] == pytest.approx(
        min(planner.training(split).step_s() for split in [*splits[::7], best[0].split])
    )
    assert planner.counts(16) == [1, 2, 4, 8, 16]


def test_samples_without_tokens_are_not_cut_into_small_micro_batches() -> None:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    model = Model(capture(nn.Sequential(*layers), torch.empty(1024, 256)))
    planner = Planner(model, CLUSTER, Job(1024, precision_of(model.step)))
    assert planner.best(1)[0].split.samples == 1024
    assert {split.samples for split in planner.splits(8)} >= {1, 64, 128, 1024}


def test_weights_in_bf16_have_a_copy_and_tokens_are_counted(models: dict[int, Model]) -> None:
    step = models[2].step
    assert precision_of(step) == Precision(2, 2, 4, 12, master=4)
    assert tokens_of(step) == 128
    assert {parameter.dtype for parameter in step.parameters.values()} == {"bf16"}


def titan_of(text: str) -> dict[str, Any]:
    """What a configuration of torchtitan sets, below the command: it is Python."""
    found = [node for node in ast.walk(ast.parse(text.split("\n", 1)[1])) if isinstance(node, ast.Assign)]
    return {
        target.attr: ast.literal_eval(node.value)
        for node in found
        if isinstance(target := node.targets[0], ast.Attribute) and not isinstance(node.value, ast.Call)
    }


def test_settings_of_frameworks() -> None:
    split = TrainingSplit(data=16, zero=3, samples=2, micro_batches=4)
    sharded = settings([(split, (32,))], 8, 4096)
    assert {*sharded} == {"torchrun + PyTorch", "torchtitan", "Accelerate", "DeepSpeed"}
    assert "--nnodes 2 --rdzv-backend" in sharded["torchrun + PyTorch"][1]
    for reshard in (True, False):  # the script is Python, and says what FSDP keeps
        made = settings([(replace(split, reshard=reshard), (32,))], 8, 4096)
        script = made["torchrun + PyTorch"][1].split("\n", 1)[1]
        compile(script, "train.py", "exec")
        assert ("reshard_after_forward=False" in script) == (not reshard)
    config = json.loads(sharded["DeepSpeed"][1])
    sizes = (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"])
    assert (config["train_batch_size"], *sizes) == (128, 2, 4)
    titan = titan_of(sharded["torchtitan"][1])
    assert (titan["data_parallel_shard_degree"], titan["local_batch_size"]) == (16, 2)
    alone = settings([(TrainingSplit(data=4), (32,))], 8, 4096)
    assert alone["torchrun + PyTorch"][1].startswith("torchrun --standalone --nproc-per-node 4 train.py")
    staged = TrainingSplit(data=2, tensor=4, pipeline=4, micro_batches=8, chunks=2, zero=1)
    # What the best cannot be run with is told for the best that can be.
    both = settings([(staged, (4,) * 8), (split, (32,))], 8, 4096)
    assert both["Megatron-LM"][0] == staged
    assert "--num-virtual-stages-per-pipeline-rank 2" in both["Megatron-LM"][1]
    assert both["DeepSpeed"] == sharded["DeepSpeed"]


def test_settings_of_experts_schedules_and_sharded_pipelines_or_what_is_missing() -> None:
    mixture = TrainingSplit(data=8, tensor=2, experts=4, zero=3)
    titan = titan_of(settings([(mixture, (4,))], 8, 512)["torchtitan"][1])
    assert titan["expert_parallel_degree"] == 4
    assert titan["fsdp_reshard_after_forward"] == "always"
    assert lacks("DeepSpeed", mixture, 512) == ["tensor parallelism", "ZeRO-3 of experts"]
    assert lacks("Megatron-LM", mixture, 512) == ["FSDP, in this program"]
    plain = settings([(TrainingSplit(data=8, experts=4, zero=1), (4,))], 8, 512)
    assert {*plain} == {"DeepSpeed", "Megatron-LM"}
    assert "--expert-model-parallel-size 4" in plain["Megatron-LM"][1]
    comment, config = plain["DeepSpeed"][1].split("\n", 1)
    assert "ep_size=4" in comment
    assert json.loads(config)["zero_optimization"]["stage"] == 1
    for schedule, theirs in ((ZERO_BUBBLE, "InterleavedZeroBubble"), (ZERO_BUBBLE_V, "ZBVZeroBubble")):
        split = TrainingSplit(
            data=4, pipeline=2, zero=3, reshard=False, chunks=2, schedule=schedule, micro_batches=4
        )
        made = settings([(split, (2,) * 4)], 8, 512)
        assert {*made} == {"torchtitan"}
        titan = titan_of(made["torchtitan"][1])
        assert titan["pipeline_parallel_schedule"] == theirs
        assert titan["fsdp_reshard_after_forward"] == "never"


def test_no_stage_has_much_more_than_another_for_the_sake_of_a_slow_one() -> None:
    # The head is as slow as two and a half layers, so that a stage may have three.
    blocks = Blocks(Block(), (LAYER,) * 32, replace(LAYER, forward_s=2.5e-3, backward_s=5e-3))
    split = TrainingSplit(pipeline=16, micro_batches=32)
    parts = Training(blocks, split, CLUSTER, Precision(), Framework()).parts
    assert sum(parts) == 32
    assert parts[-1] == 1
    assert max(parts) == 3
    assert parts.count(2) >= 12


def test_settings_share_layers_as_the_plan_does() -> None:
    staged = TrainingSplit(pipeline=2, micro_batches=8, chunks=2)
    made = settings([(staged, (2, 3, 3, 1))], 8, 4096)
    megatron = made["Megatron-LM"][1]
    assert '--pipeline-model-parallel-layout "Et*2|t*3|t*3|t*1L"' in megatron
    assert "--num-virtual-stages" not in megatron  # Megatron-LM refuses both
    parts = titan_of(made["torchtitan"][1])["module_fqns_per_model_part"]
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1"]
    assert parts[3] == ["layers.8", "norm", "lm_head"]
    assert [len(part) for part in parts] == [3, 3, 3, 3]


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("zero", [0, 3])
def test_settings_compute_again_what_the_split_does_or_are_not_told(checkpoint: str, zero: int) -> None:
    made = settings([(TrainingSplit(data=4, zero=zero, checkpoint=checkpoint), (4,))], 8, 512)
    assert "DeepSpeed" not in made
    assert ("Accelerate" in made) == (zero == 3 and checkpoint == "full")
    assert ("Megatron-LM" in made) == (zero == 0 and checkpoint == "full")
    assert ("torchtitan" in made) == (checkpoint == "full")
    if "torchtitan" in made:
        assert "config.activation_checkpoint = FullAC.Config()" in made["torchtitan"][1]
    command, *script = made["torchrun + PyTorch"][1].splitlines()
    assert command.startswith("torchrun ")
    compile("\n".join(script), "train.py", "exec")
