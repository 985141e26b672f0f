"""A Llama of transformers, its parameters sharded or its layers split: torchrun --nproc-per-node 2 …"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--samples", type=int, default=4)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--split", action="store_true", help="the layers are split, not sharded")
options = parser.parse_args()

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=options.width // 64,
    num_key_value_heads=options.width // 256,
    vocab_size=32000,
    use_cache=False,
)
with device:
    model = LlamaForCausalLM(config)
if options.split:
    model = model.to(torch.bfloat16)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
else:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
kinds = {}  # a kernel of the optimizer takes either distributed tensors or plain ones
for parameter in model.parameters():
    kinds.setdefault(type(parameter.data), []).append(parameter)
optimizer = torch.optim.AdamW([{"params": each} for each in kinds.values()], lr=1e-4, fused=True)
for _ in range(options.steps):
    tokens = torch.randint(0, 32000, (options.samples, options.length), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
