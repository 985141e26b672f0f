"""A split as the settings of the frameworks that train with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tilefit.parallel.choices import TrainingSplit
from tilefit.parallel.schedule import GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, ZERO_BUBBLE_V

#: How many layers each part of a pipeline has, in the order in which they run.
Layers = Sequence[int]
#: Makes settings from a split, its layers, the GPUs of a machine and the tokens of a sample.
Settings = Callable[[TrainingSplit, Layers, int, int], str]
#: Something that a split may need, and whether it does.
Lack = tuple[str, Callable[[TrainingSplit], bool]]


def settings(
    splits: Iterable[tuple[TrainingSplit, Layers]], per_machine: int, tokens: int
) -> dict[str, tuple[TrainingSplit, str]]:
    """Of each framework the first split that it can do, and the settings for it.

    Args:
        splits: How GPUs may share the step, with the layers of each part, best first.
        per_machine: GPUs of a machine.
        tokens: Of a sample; 0 where there are none.
    """
    made: dict[str, tuple[TrainingSplit, str]] = {}
    for split, layers in splits:
        for name, make in _FRAMEWORKS.items():
            if name not in made and not lacks(name, split, tokens):
                made[name] = split, make(split, layers, per_machine, tokens)
    return {name: made[name] for name in _FRAMEWORKS if name in made}


def lacks(name: str, split: TrainingSplit, tokens: int) -> list[str]:
    """What a framework would need for a split and does not have."""
    needs_tokens = ["what has no tokens"] * (name == "torchtitan" and not tokens)
    return needs_tokens + [what for what, needed in _LACKS[name] if needed(split)]


def _torchrun(split: TrainingSplit, per_machine: int, script: str) -> str:
    machines = -(-split.gpus // per_machine)
    apart = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    here = apart if machines > 1 else "--standalone"
    return f"torchrun {here} --nproc-per-node {min(split.gpus, per_machine)} {script}"


def _fsdp2(split: TrainingSplit, layers: Layers, per_machine: int, tokens: int) -> str:
    lines = [_torchrun(split, per_machine, "train.py"), "# in train.py:"]
    if split.tensor > 1:
        lines.append(
            f'mesh = init_device_mesh("cuda", ({split.data}, {split.tensor}), '
            'mesh_dim_names=("data", "tensor"))'
        )
        lines.append('for layer in model.layers: parallelize_module(layer, mesh["tensor"], plan)')
        data = 'mesh["data"]'
    else:
        lines.append(f'mesh = init_device_mesh("cuda", ({split.data},))')
        data = "mesh"
    lines += _recompute(split)
    if split.zero == 3:
        kept = "" if split.reshard else ", reshard_after_forward=False"
        lines += [
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            f"for part in (*model.layers, model): fully_shard(part, mesh={data}, mp_policy=policy{kept})",
        ]
    elif split.data > 1:
        group = f"process_group={data}.get_group(), gradient_as_bucket_view=True"
        lines.append(f"model = DistributedDataParallel(model, {group})")
    lines.append("optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # or your own")
    lines.append(f"# micro-batches of a step: {split.parts}; samples of each: {split.samples}")
    if split.parts > 1 and split.data > 1 and split.zero < 3:  # FSDP would hold whole gradients
        lines.append("# all but the last under model.no_sync()")
    return "\n".join(lines)


def _recompute(split: TrainingSplit) -> list[str]:
    if split.checkpoint == "none":
        return []
    if split.checkpoint == "full":
        return ["apply_activation_checkpointing(model, check_fn=lambda m: m in set(model.layers))"]
    return [
        "aten = torch.ops.aten  # products and attention are kept",
        "kept = [aten.mm.default, aten.addmm.default, aten.bmm.default,",
        "    aten._scaled_dot_product_flash_attention.default, "
        "aten._scaled_dot_product_efficient_attention.default,",
        "    aten._scaled_dot_product_cudnn_attention.default]",
        "keep = functools.partial(create_selective_checkpoint_contexts, kept)",
        "# each layer: checkpoint(layer, x, use_reentrant=False, context_fn=keep)",
    ]


def _torchtitan(split: TrainingSplit, layers: Layers, per_machine: int, tokens: int) -> str:
    """A configuration of torchtitan 0.3, which reads no TOML any more."""
    shard = split.data if split.zero == 3 else 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": split.data // shard,
        "data_parallel_shard_degree": shard,
        "tensor_parallel_degree": split.tensor,
        "pipeline_parallel_degree": split.pipeline,
        "context_parallel_degree": split.context,
        "expert_parallel_degree": split.experts,
        "fsdp_reshard_after_forward": "always" if split.reshard else "never",
    }
    if split.pipeline > 1:
        kind = _TITAN_SCHEDULES.get(split.schedule, "Interleaved1F1B" if split.chunks > 1 else "1F1B")
        parallelism["pipeline_parallel_schedule"] = kind
        parallelism["pipeline_parallel_microbatch_size"] = split.samples
        # By itself it counts embedding and output as a layer each.
        parallelism["module_fqns_per_model_part"] = [*_parts(layers)]
    again = "None" if split.checkpoint == "none" else "FullAC.Config()"
    parts = split.parts if split.pipeline > 1 else 1
    lines = [
        _torchrun(split, per_machine, "-m torchtitan.train --module planned --config planned"),
        "# planned.py, for torchtitan 0.3:",
        "from torchtitan.distributed.activation_checkpoint import FullAC",
        "from torchtitan.models.llama3.config_registry import llama3_8b as usual  # or your model's",
        "def planned():\n    config = usual()",
        f"    config.training.local_batch_size = {split.samples * parts}",
        f"    config.training.global_batch_size = {split.batch}",
        f"    config.training.seq_len = {tokens}",
        *(f"    config.parallelism.{name} = {json.dumps(value)}" for name, value in parallelism.items()),
        f"    config.activation_checkpoint = {again}\n    return config",
    ]
    return "\n".join(lines)


def _parts(layers: Layers) -> Iterator[list[str]]:
    """The modules of each part, as torchtitan's models name them."""
    first = 0
    for place, count in enumerate(layers):
        names = [f"layers.{index}" for index in range(first, first + count)]
        yield ["tok_embeddings"] * (place == 0) + names + ["norm", "lm_head"] * (place == len(layers) - 1)
        first += count


def _accelerate(split: TrainingSplit, layers: Layers, per_machine: int, tokens: int) -> str:
    machines = -(-split.gpus // per_machine)
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if split.zero else 'MULTI_GPU' if split.data > 1 else 'NO'}",
        "mixed_precision: bf16",
        f"num_machines: {machines}",
        f"num_processes: {split.gpus}",
    ]
    if machines > 1:
        address = "main_process_ip: HEAD  # the first machine's address", "main_process_port: 29500"
        lines += ["machine_rank: 0  # another on each machine", *address]
    if split.zero:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(split.reshard).lower()}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(split.checkpoint != 'none').lower()}",
        ]
    lines.append(f"# Accelerator(gradient_accumulation_steps={split.parts}); samples each: {split.samples}")
    return "\n".join(lines)


def _deepspeed(split: TrainingSplit, layers: Layers, per_machine: int, tokens: int) -> str:
    config: dict[str, Any] = {
        "train_batch_size": split.batch,
        "train_micro_batch_size_per_gpu": split.samples,
        "gradient_accumulation_steps": split.parts,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": split.zero, "overlap_comm": True},
    }
    text = json.dumps(config, indent=2)
    if split.experts > 1:
        layer = f"deepspeed.moe.layer.MoE(hidden_size, expert, num_experts, ep_size={split.experts})"
        text = f"# in the model, for each mixture of experts: {layer}\n{text}"
    return text


def _megatron(split: TrainingSplit, layers: Layers, per_machine: int, tokens: int) -> str:
    flags = [
        f"--tensor-model-parallel-size {split.tensor}",
        *(["--sequence-parallel"] if split.tensor > 1 else []),
        f"--pipeline-model-parallel-size {split.pipeline}",
        *_stages(split, layers),
        *([f"--context-parallel-size {split.context}"] if split.context > 1 else []),
        *(_MEGATRON_EXPERTS if split.experts > 1 else []),
        *([f"--expert-model-parallel-size {split.experts}"] if split.experts > 1 else []),
        f"--micro-batch-size {split.samples}",
        f"--global-batch-size {split.batch}",
        *(["--use-distributed-optimizer"] if split.zero else []),
        "--overlap-grad-reduce",
        "--bf16",
        *([f"--seq-length {tokens}"] if tokens else []),
    ]
    if split.checkpoint == "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return " \\\n  ".join([_torchrun(split, per_machine, "pretrain_gpt.py"), *flags])


def _stages(split: TrainingSplit, layers: Layers) -> list[str]:
    """Flags for the parts of a pipeline: E and L stand for embedding and loss, t for a layer."""
    if len(set(layers)) > 1:
        parts = "|".join(f"t*{count}" for count in layers)
        return [f'--pipeline-model-parallel-layout "E{parts}L"']
    return [f"--num-virtual-stages-per-pipeline-rank {split.chunks}"] if split.chunks > 1 else []


#: Tensor-parallel ranks have different experts, whose products are grouped.
_MEGATRON_EXPERTS = [
    "--expert-tensor-parallel-size 1",
    "--moe-grouped-gemm",
    "--moe-token-dispatcher-type alltoall",
]
_TITAN_SCHEDULES = {
    GPIPE: "GPipe",
    ZERO_BUBBLE: "InterleavedZeroBubble",
    ZERO_BUBBLE_V: "ZBVZeroBubble",
}
_FRAMEWORKS: dict[str, Settings] = {
    "torchrun + PyTorch": _fsdp2,
    "torchtitan": _torchtitan,
    "Accelerate": _accelerate,
    "DeepSpeed": _deepspeed,
    "Megatron-LM": _megatron,
}
_TENSOR: Lack = "tensor parallelism", lambda split: split.tensor > 1
_PIPELINE: Lack = "pipelines whose layers are shared out as here", lambda split: split.pipeline > 1
_CONTEXT: Lack = "context parallelism", lambda split: split.context > 1
_EXPERTS: Lack = "expert parallelism", lambda split: split.experts > 1
_OWN_ZERO: Lack = "ZeRO-1 and ZeRO-2 that send each rank its sums alone", lambda split: split.zero in (1, 2)
_SELECTIVE: Lack = "recomputation of all between products", lambda split: split.checkpoint == "selective"
_LACKS: dict[str, list[Lack]] = {
    "torchrun + PyTorch": [_PIPELINE, _CONTEXT, _EXPERTS, _OWN_ZERO],
    "torchtitan": [
        _OWN_ZERO,
        _SELECTIVE,  # its own mode computes every second product again
        (
            "experts over other ranks than those of FSDP",
            lambda split: (
                split.experts > 1 and (split.zero < 3 or split.experts % (split.tensor * split.context) > 0)
            ),
        ),
    ],
    "Accelerate": [
        _PIPELINE,
        _TENSOR,
        _CONTEXT,
        _EXPERTS,
        _OWN_ZERO,
        _SELECTIVE,
        ("recomputation without FSDP", lambda split: split.checkpoint == "full" and not split.zero),
    ],
    "DeepSpeed": [
        _PIPELINE,
        _TENSOR,
        _CONTEXT,
        ("settings for recomputation", lambda split: split.checkpoint != "none"),
        ("ZeRO-3 of experts", lambda split: split.experts > 1 and split.zero == 3),
        ("a setting to keep what ZeRO-3 gathers", lambda split: split.zero == 3 and not split.reshard),
    ],
    "Megatron-LM": [
        ("FSDP, in this program", lambda split: split.zero > 1),
        _SELECTIVE,
        ("GPipe and zero-bubble schedules", lambda split: split.schedule != ONE_F_ONE_B),
    ],
}
