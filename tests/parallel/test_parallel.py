"""One GPU's part of real models: sizes by hand, arithmetic that adds up, communication, time."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from builders import gpt2 as hand_made
from builders import resnet
from tilefit import gpus
from tilefit.cost import estimate_step, fuse
from tilefit.errors import UsageError
from tilefit.ops import FORWARD, OPTIMIZER, Attention, Collective, Gemm, Step, Streaming
from tilefit.options import Split
from tilefit.parallel import estimate_split, rank_step, split_step
from tilefit.rules import run

ROWS = 8 * 128


def products(step: Step, module: str) -> list[tuple[str, int, int, int]]:
    """(phase, m, n, k) of a module's products."""
    return [
        (entry.phase, entry.op.m, entry.op.n, entry.op.k)
        for entry in step.ops
        if isinstance(entry.op, Gemm) and entry.site.module == module
    ]


def forward(step: Step, module: str) -> tuple[int, int, int]:
    return next(sizes for phase, *sizes in products(step, module) if phase == FORWARD)  # type: ignore[return-value]


def collectives(step: Step, module: str) -> list[tuple[str, str, int, int]]:
    return [
        (entry.phase, entry.op.function, entry.op.elements, entry.op.ranks)
        for entry in step.ops
        if isinstance(entry.op, Collective) and entry.site.module == module
    ]


def rank(step: Step, tensor: int) -> Step:
    (stage,) = split_step(step, Split(tensor=tensor)).stages
    return stage


# --- tensor parallelism ----------------------------------------------------------------------------


def test_gpt2_over_two_ranks_by_hand(gpt2: Step) -> None:
    """768 features in 12 heads: each rank has 6 heads, 384 of each of q, k and v, half of 3072 features."""
    part = rank(gpt2, 2)
    h = "transformer.h.1"
    assert products(part, f"{h}.attn.c_attn") == [
        ("forward", ROWS, 1152, 768),
        ("backward-data", ROWS, 768, 1152),
        ("backward-weight", 768, 1152, ROWS),
    ]
    assert forward(part, f"{h}.attn.c_proj") == [ROWS, 768, 384]
    assert forward(part, f"{h}.mlp.c_fc") == [ROWS, 1536, 768]
    assert forward(part, f"{h}.mlp.c_proj") == [ROWS, 768, 1536]
    assert forward(part, "lm_head") == [ROWS, 25129, 768]
    assert {e.op.num_heads for e in part.ops if isinstance(e.op, Attention)} == {6}
    assert part.parameters[f"{h}.attn.c_attn.weight"].shape == (768, 1152)
    assert part.parameters[f"{h}.attn.c_attn.bias"].shape == (1152,)
    assert part.parameters[f"{h}.attn.c_proj.weight"].shape == (384, 768)
    assert part.parameters[f"{h}.attn.c_proj.bias"].shape == (768,)
    assert part.parameters[f"{h}.ln_1.weight"].shape == (768,)
    assert part.parameters["transformer.wte.weight"].shape == (25129, 768)
    assert part.parameters["transformer.wpe.weight"].shape == (1024, 768)


def test_llama_over_four_ranks_by_hand(llama: Step) -> None:
    part = rank(llama, 4)
    layer = "model.layers.2"
    assert forward(part, f"{layer}.self_attn.q_proj") == [ROWS, 256, 1024]
    assert forward(part, f"{layer}.self_attn.k_proj") == [ROWS, 64, 1024]
    assert forward(part, f"{layer}.self_attn.v_proj") == [ROWS, 64, 1024]
    assert forward(part, f"{layer}.self_attn.o_proj") == [ROWS, 1024, 256]
    assert forward(part, f"{layer}.mlp.gate_proj") == [ROWS, 688, 1024]
    assert forward(part, f"{layer}.mlp.up_proj") == [ROWS, 688, 1024]
    assert forward(part, f"{layer}.mlp.down_proj") == [ROWS, 1024, 688]
    assert forward(part, "lm_head") == [ROWS, 8000, 1024]
    heads = {(e.op.num_heads, e.op.num_kv_heads) for e in part.ops if isinstance(e.op, Attention)}
    assert heads == {(4, 1)}


def test_attention_written_out_is_split_by_heads(bert_written_out: Step) -> None:
    part = rank(bert_written_out, 3)
    layer = "bert.encoder.layer.0"
    assert forward(part, f"{layer}.attention.self.query") == [ROWS, 256, 768]
    assert forward(part, f"{layer}.attention.output.dense") == [ROWS, 768, 256]
    assert forward(part, f"{layer}.intermediate.dense") == [ROWS, 1024, 768]
    batches = {e.op.batch for e in part.ops if isinstance(e.op, Gemm) and e.op.batch > 1}
    assert batches == {8 * 4}
    softmax = next(e.op for e in part.ops if isinstance(e.op, Streaming) and e.op.role == "softmax")
    assert softmax.elements == 8 * 4 * 128 * 128


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_arithmetic_of_all_ranks_is_that_of_the_step(llama: Step, ranks: int) -> None:
    assert ranks * rank(llama, ranks).tensor_flop == llama.tensor_flop


def test_what_is_repeated_or_filled_up_is_all_that_is_added(gpt2: Step, llama: Step) -> None:
    # 8 ranks share 4 key/value heads: each holds one, so that they are computed twice.
    keys_and_values = sum(
        entry.op.flop
        for entry in llama.ops
        if isinstance(entry.op, Gemm) and entry.site.module.endswith(("k_proj", "v_proj"))
    )
    assert 8 * rank(llama, 8).tensor_flop == llama.tensor_flop + keys_and_values
    # The vocabulary of 50257 over 2 ranks has one token more.
    head = sum(e.op.flop for e in gpt2.ops if isinstance(e.op, Gemm) and e.site.module == "lm_head")
    added = 2 * rank(gpt2, 2).tensor_flop - gpt2.tensor_flop
    assert added == head // 50257


def test_streaming_between_split_layers_shrinks_and_norms_do_not(llama: Step) -> None:
    part = rank(llama, 4)

    def moved(step: Step, module: str) -> int:
        return sum(
            entry.op.moved_bytes
            for entry in step.ops
            if isinstance(entry.op, Streaming) and entry.site.module == module
        )

    for module in ("model.layers.0.mlp.act_fn", "model.layers.0.mlp"):
        assert 4 * moved(part, module) == moved(llama, module) > 0
    for module in ("model.norm", "model.layers.0.input_layernorm"):
        assert moved(part, module) == moved(llama, module) > 0
    loss = [e for e in part.ops if isinstance(e.op, Streaming) and e.op.role == "softmax"]
    assert loss
    assert {(entry.op.elements, entry.op.inner) for entry in loss if isinstance(entry.op, Streaming)} == {
        (ROWS * 8000, 8000)
    }


def test_collectives_of_a_layer(gpt2: Step, llama: Step) -> None:
    """Megatron's: a sum behind each row-parallel layer, and one behind each block in the backward pass."""
    part = rank(gpt2, 2)
    h, size = "transformer.h.0", ROWS * 768
    assert collectives(part, f"{h}.attn.c_proj") == [("forward", "all-reduce", size, 2)]
    assert collectives(part, f"{h}.mlp.c_proj") == [("forward", "all-reduce", size, 2)]
    assert collectives(part, f"{h}.attn.c_attn") == [("backward-data", "all-reduce", size, 2)]
    assert collectives(part, f"{h}.mlp.c_fc") == [("backward-data", "all-reduce", size, 2)]
    assert collectives(part, "lm_head") == [("backward-data", "all-reduce", size, 2)]
    assert collectives(part, "transformer.wte") == [("forward", "all-reduce", size, 2)]
    assert collectives(part, "") == [("forward", "all-reduce", ROWS, 2)] * 3  # the loss
    layer = [
        c
        for name in ("q_proj", "k_proj", "v_proj")
        for c in collectives(rank(llama, 2), f"model.layers.0.self_attn.{name}")
    ]
    assert layer == [("backward-data", "all-reduce", ROWS * 1024, 2)]  # once for the three of them


def test_inference_gathers_the_logits(gpt2_inference: Step) -> None:
    part = rank(gpt2_inference, 2)
    assert collectives(part, "lm_head") == [("forward", "all-gather", ROWS * 50257, 2)]


def test_memory_and_optimizer_go_with_the_parameters(llama: Step) -> None:
    part = rank(llama, 4)
    held = sum(prod(p.shape) for p in part.parameters.values()) / sum(
        prod(p.shape) for p in llama.parameters.values()
    )
    assert 0.25 < held < 0.26  # the norms are whole
    assert part.memory.parameter_bytes == pytest.approx(held * llama.memory.parameter_bytes, rel=1e-6)
    assert part.memory.peak_bytes < 0.5 * llama.memory.peak_bytes
    moved = [sum(e.op.moved_bytes for e in s.ops if e.phase == OPTIMIZER) for s in (part, llama)]
    assert moved[0] == pytest.approx(held * moved[1], rel=1e-6)


def test_a_convolution_has_nothing_to_split() -> None:
    whole = resnet(batch=8)
    planned = split_step(whole, Split(tensor=2))
    assert planned.stages[0].ops == whole.ops
    assert "Inferred from the step: nothing." in planned.notes[0]
    assert any("ranks share nothing" in each for each in planned.problems)


def test_a_rank_survives_json_and_fusion(gpt2: Step) -> None:
    part = rank(gpt2, 2)
    assert Step.from_json(part.to_json()) == part
    fused = fuse(replace(part, settings=replace(part.settings, compiled=True)))
    count = sum(isinstance(entry.op, Collective) for entry in part.ops)
    assert sum(isinstance(entry.op, Collective) for entry in fused.ops) == count > 0


# --- what does not divide --------------------------------------------------------------------------


def test_uneven_heads_are_an_error_with_the_ranks_that_would_do(gpt2_of_25_heads: Step) -> None:
    part = rank(gpt2_of_25_heads, 8)
    (finding,) = run(part, gpus.get("h200"), select=["PAR"])
    assert (finding.code, finding.severity) == ("PAR001", "error")
    assert finding.message == "25 query heads do not divide over 8 tensor-parallel ranks"
    assert finding.fix.startswith("Take 5 ranks")
    assert {e.op.num_heads for e in part.ops if isinstance(e.op, Attention)} == {4}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_shards_and_repeated_key_heads_are_no_error(llama: Step, ranks: int) -> None:
    assert run(rank(llama, ranks), gpus.get("h200"), select=["PAR"]) == []
    problems = split_step(llama, Split(tensor=ranks)).problems
    assert problems == (("4 key/value heads for 8 ranks: each is held 2 times",) if ranks == 8 else ())


def test_a_whole_step_has_no_shards(gpt2: Step) -> None:
    assert run(gpt2, gpus.get("h200"), select=["PAR"]) == []


def test_the_vocabulary_is_filled_up_as_megatron_does() -> None:
    planned = split_step(hand_made(vocabulary=50257), Split(tensor=4))
    assert any("50257 does not divide over 4 ranks: fill it up to 50688" in each for each in planned.problems)
    (finding,) = run(planned.stages[0], gpus.get("h200"), select=["ALN002"])
    assert "a rank's 12565 tokens of the vocabulary are no multiple of 8" in finding.message
    assert "vocab_size=50432" in finding.fix  # 4 ranks of 12608, a multiple of 64


def test_batches_and_layers_that_do_not_divide_are_refused(llama: Step) -> None:
    with pytest.raises(UsageError, match="a batch of 8 does not split into 3 replicas of 1"):
        split_step(llama, Split(data=3))
    with pytest.raises(UsageError, match="3 layers do not fill 4 pipeline stages"):
        split_step(llama, Split(pipeline=4, micro_batches=1))
    with pytest.raises(UsageError, match="unknown"):
        split_step(replace(llama, batch=0), Split(data=2))


# --- pipeline and data parallelism -----------------------------------------------------------------


def test_stages_are_the_whole_step(llama: Step) -> None:
    parts = split_step(llama, Split(pipeline=3, micro_batches=1)).stages
    ops = [e for part in parts for e in part.ops if e.phase != OPTIMIZER and not isinstance(e.op, Collective)]
    assert sorted(map(repr, ops)) == sorted(repr(e) for e in llama.ops if e.phase != OPTIMIZER)
    modules = [
        {e.site.module.split(".")[2] for e in part.ops if "layers." in e.site.module} for part in parts
    ]
    assert modules == [{"0"}, {"1"}, {"2"}]
    assert "model.embed_tokens.weight" in parts[0].parameters
    assert "lm_head.weight" in parts[2].parameters
    assert not parts[1].parameters.keys() & {"lm_head.weight", "model.embed_tokens.weight"}


def test_stages_send_activations_and_gradients(llama: Step) -> None:
    first, middle, last = split_step(llama, Split(pipeline=3, micro_batches=1)).stages
    sent = [
        [(e.phase, e.op.elements) for e in s.ops if isinstance(e.op, Collective)]
        for s in (first, middle, last)
    ]
    size = ROWS * 1024
    assert sent == [
        [("forward", size)],
        [("forward", size), ("backward-data", size)],
        [("backward-data", size)],
    ]


def most_activations(stage: Step) -> int:
    """The most bytes at once that depend on the batch."""
    return stage.memory.moments[-1][1]


def test_a_stage_holds_the_micro_batches_in_flight(llama: Step) -> None:
    four = split_step(llama, Split(pipeline=2, micro_batches=4)).stages
    eight = split_step(llama, Split(pipeline=2, micro_batches=8)).stages
    # Twice the micro-batches of half the size: two of them on the first stage, one on the last.
    for before, after in zip(four, eight, strict=True):
        assert most_activations(after) == pytest.approx(most_activations(before) / 2, rel=0.01)


def test_the_head_makes_the_last_stage_the_slowest(llama: Step) -> None:
    planned = split_step(llama, Split(pipeline=3, micro_batches=2))
    assert any(text.startswith("stage 3 of 3 does") for text in planned.problems)
    assert estimate_split(planned, gpus.get("h200")).slowest == 2


def test_the_bubble(llama: Step) -> None:
    gpu = gpus.get("h200")
    for parts in (1, 2, 8):
        planned = split_step(llama, Split(pipeline=2, micro_batches=parts))
        priced = estimate_split(planned, gpu)
        stages = [replace(s, ops=tuple(e for e in s.ops if e.phase != OPTIMIZER)) for s in planned.stages]
        own = sorted(estimate_step(stage, gpu).time_s for stage in stages)
        # At worst the slower stage waits for the other's whole pass, and with one micro-batch it does.
        most = own[0] / (own[0] + parts * own[1])
        assert most / 2 < priced.bubble <= most * (1 + 1e-9)
        assert parts > 1 or priced.bubble == pytest.approx(most)


def test_replicas_share_the_batch_and_sum_up_gradients(gpt2: Step) -> None:
    planned = split_step(gpt2, Split(data=4))
    (part,) = planned.stages
    assert part.batch == 2
    assert planned.tensor_flop * 4 == gpt2.tensor_flop
    assert part.program is not None
    sums = part.program.exchanges
    assert sum(each.bytes for each in sums) == 4 * gpt2.parameter_count
    assert all(each.bytes >= 25 << 20 for each in sums[:-1])
    phases = [part.ops[each.index - 1].phase for each in sums]
    assert len(phases) > 2
    assert all(phase.startswith("backward") for phase in phases)
    gpu = gpus.get("h100-sxm")
    hidden = estimate_split(planned, gpu)
    alone = sum(estimate_step(part, gpu).streams.exchange_s)  # type: ignore[union-attr]
    assert hidden.communication_s < 0.6 * alone  # the host may hide all of it


def test_all_ways_at_once_add_up(llama: Step) -> None:
    split = Split(tensor=2, pipeline=3, data=2, micro_batches=2)
    planned = split_step(llama, split)
    assert split.gpus == 12
    assert planned.tensor_flop * 12 == pytest.approx(llama.tensor_flop, rel=1e-6)


# --- time ------------------------------------------------------------------------------------------


def test_more_ranks_than_a_machine_holds_are_not_priced_and_the_plan_says_so() -> None:
    step = hand_made(batch=16)
    planned = split_step(step, Split(data=16))
    priced = estimate_split(planned, gpus.get("h200"))
    assert priced.unpriced > 0
    assert priced.communication_s == 0
    assert any("not priced" in note for note in rank_step(planned, [gpus.get("h200")]).notes)


def test_one_gpu_is_the_step_itself(gpt2: Step) -> None:
    gpu = gpus.get("h200")
    priced = estimate_split(split_step(gpt2, Split()), gpu)
    assert priced.time_s == estimate_step(gpt2, gpu).time_s
    assert priced.memory_bytes == gpt2.memory.peak_bytes


def test_splitting_pays_where_the_gpu_is_busy_and_the_link_is_fast() -> None:
    step = hand_made(layers=4)
    whole = estimate_step(step, "h200").time_s
    fast = estimate_split(split_step(step, Split(tensor=4)), gpus.get("h200"))
    slow = estimate_split(split_step(step, Split(tensor=4)), gpus.get("h200-nvl"))
    assert whole / 4 < fast.time_s < whole
    assert slow.communication_s > 5 * fast.communication_s


def test_the_step_of_one_rank_is_checked_like_any_other(llama: Step) -> None:
    step = rank_step(split_step(llama, Split(tensor=2, pipeline=3, micro_batches=4)), [gpus.get("h200")])
    notes = " ".join(step.notes)
    assert "tensor 2, pipeline 3, 4 micro-batches; 6 GPUs" in notes
    assert "stage 3 of 3" in notes
    assert "3 attention blocks by heads, 3 MLPs by features, the vocabulary by tokens" in notes
    findings = run(step, gpus.get("h200"))
    assert {finding.code for finding in findings} >= {"BAT001"}


@pytest.mark.parametrize("name", ["tensor", "pipeline", "data"])
def test_a_split_needs_at_least_one_gpu(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Split(**{name: 0})
