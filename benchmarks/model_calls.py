"""Every distinct memory-bound call (and convolution) of real models, to be measured one by one on a GPU.

    PYTHONPATH=src python benchmarks/model_calls.py --out calls.jsonl.gz

needs no GPU: it captures steps of many models and writes down each call's function and the layouts of its
arguments. ``collect_h200.py --part calls --calls calls.jsonl.gz`` then measures them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from whole_steps import EXAMPLES, MODELS

from tilefit.capture import capture, recorder
from tilefit.capture.aten import Call, Described, describe, function_of
from tilefit.capture.targets import load
from tilefit.errors import TilefitError
from tilefit.measure.pool import Pool
from tilefit.ops import Conv, Streaming
from tilefit.options import TargetOptions

#: Target, sizes.
MORE: list[tuple[str, dict[str, int]]] = [
    ("hf:gpt2", {"batch": 4, "seq": 512}),
    ("hf:gpt_neox", {"batch": 2, "seq": 512}),
    ("hf:llama", {"batch": 1, "seq": 1024}),
    ("hf:qwen2", {"batch": 2, "seq": 512}),
    ("hf:gemma", {"batch": 1, "seq": 512}),
    ("hf:mistral", {"batch": 1, "seq": 512}),
    ("hf:bert", {"batch": 8, "seq": 128}),
    ("hf:bert", {"batch": 128, "seq": 128}),
    ("hf:albert", {"batch": 16, "seq": 384}),
    ("hf:electra", {"batch": 32, "seq": 256}),
    ("hf:deberta-v2", {"batch": 8, "seq": 256}),
    ("hf:distilbert", {"batch": 16, "seq": 256}),
    ("hf:xlm-roberta", {"batch": 8, "seq": 256}),
    ("hf:t5", {"batch": 4, "seq": 256}),
    ("hf:bart", {"batch": 4, "seq": 1024}),
    ("hf:pegasus", {"batch": 4, "seq": 256}),
    ("hf:whisper", {"batch": 4, "seq": 128}),
    ("hf:wav2vec2", {}),
    ("hf:vit", {"batch": 16}),
    ("hf:deit", {"batch": 128}),
    ("hf:beit", {"batch": 32}),
    ("hf:swin", {"batch": 16}),
    ("hf:convnext", {"batch": 32}),
    ("hf:segformer", {"batch": 8}),
    ("hf:clip_vision_model", {"batch": 32}),
    ("hf:mamba", {"batch": 2, "seq": 256}),
    *(
        (f"torchvision:{name}", {"batch": batch})
        for name, batches in {
            "resnet18": (32, 256),
            "resnet50": (32, 64),
            "resnext50_32x4d": (64,),
            "wide_resnet50_2": (64,),
            "densenet121": (32, 96),
            "vgg16_bn": (32,),
            "alexnet": (128,),
            "squeezenet1_1": (64,),
            "googlenet": (64,),
            "mobilenet_v2": (64, 192),
            "mobilenet_v3_large": (32,),
            "mobilenet_v3_small": (128,),
            "mnasnet1_0": (64,),
            "shufflenet_v2_x1_0": (128,),
            "efficientnet_b0": (48,),
            "efficientnet_b3": (32,),
            "efficientnet_v2_s": (32,),
            "regnet_y_400mf": (128,),
            "regnet_x_3_2gf": (64,),
            "convnext_tiny": (32,),
            "swin_t": (32,),
            "vit_b_16": (32,),
            "maxvit_t": (16,),
        }.items()
        for batch in batches
    ),
    (f"{EXAMPLES}:speech", {}),
    (f"{EXAMPLES}:odd_mlp", {}),
]

#: Functions whose values decide what they do, or that only the host runs.
_SKIPPED = {"nonzero", "masked_select", "_local_scalar_dense", "unique_dim", "_unique2", "repeat_interleave"}


# --- writing down ----------------------------------------------------------------------------------


def _spec(value: Any) -> Any:
    """An argument as JSON."""
    if isinstance(value, torch.Tensor):
        # Where a slice starts decides whether its accesses are aligned.
        offset = int(value.storage_offset()) % 256
        dtype = str(value.dtype).removeprefix("torch.")
        return {"t": [list(value.shape), list(value.stride()), dtype, offset]}
    if isinstance(value, (list, tuple)):
        return {"l": [_spec(item) for item in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"format": str(value).removeprefix("torch.")}
    if isinstance(value, (torch.device, torch.layout)):
        return {"skip": True}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"cannot write down {type(value).__name__}")


@dataclass
class Collection:
    """The distinct calls seen so far."""

    seen: set[str]
    file: Any
    source: str = ""
    written: int = 0

    def add(self, call: Call, described: list[Described]) -> None:
        op = described[0][0]
        if isinstance(op, Conv):
            for each, *_ in described:
                if isinstance(each, Conv):
                    self._write({"op": asdict(each)})
            return
        if not isinstance(op, Streaming) or len(described) > 1 or call.packet in _SKIPPED:
            return
        try:
            arguments = {"args": _spec(call.args), "kwargs": {k: _spec(v) for k, v in call.kwargs.items()}}
        except ValueError:
            return
        function = f"{call.func.namespace}.{call.func._overloadpacket.__name__}.{call.func._overloadname}"
        described_op = asdict(op) | {"function": function_of(call.name)}
        self._write({"function": function, **arguments, "op": described_op})

    def _write(self, entry: dict[str, Any]) -> None:
        key = json.dumps(entry, sort_keys=True)
        if key not in self.seen:
            self.seen.add(key)
            self.file.write(json.dumps(entry | {"source": self.source}) + "\n")
            self.written += 1


def configurations() -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    for target, sizes, channels_last in MODELS:
        yield target, sizes, {"amp": "bf16", "channels_last": channels_last}
    for target, sizes in MORE:
        image = target.startswith(("torchvision", "timm"))
        yield target, sizes, {"amp": "bf16", "channels_last": image and "vit" not in target}
        if image:
            yield target, sizes, {"amp": "fp16" if sum(sizes.values()) % 64 else "", "channels_last": False}
        else:
            yield target, sizes, {"amp": "", "train": False}
    for target, sizes, _ in MODELS[:3] + MODELS[10:14]:
        yield target, sizes, {"amp": "bf16", "fused_optimizer": True}
        yield target, sizes, {"amp": "fp16", "optimizer": "sgd"}


def record(path: Path) -> None:
    with gzip.open(path, "wt") as file:
        collection = Collection(set(), file)

        def noted(call: Call, running: recorder.Recorder) -> list[Described]:
            described = describe(call, running)
            if not running.muted:
                collection.add(call, described)
            return described

        recorder.describe = noted
        try:
            for target, sizes, settings in configurations():
                collection.source = target.rpartition("/")[2]
                before, began = collection.written, time.monotonic()
                try:
                    loaded = load(target, TargetOptions(**sizes, train=settings.get("train", True)))
                    capture(loaded.model, loaded.inputs, loss=loaded.loss, **settings)
                except TilefitError as error:
                    print(f"{target}: {error}", file=sys.stderr)
                print(
                    f"{target} {sizes} {settings}: {collection.written - before} new calls, "
                    f"{time.monotonic() - began:.1f} s",
                    flush=True,
                )
        finally:
            recorder.describe = describe


# --- building again ----------------------------------------------------------------------------------


def _high(function: str, args: list[Any], position: int, within: int) -> int:
    """Least upper bound of the indices an integer argument may hold."""

    def shape(index: int) -> list[int]:
        return list(args[index]["t"][0]) if isinstance(args[index], dict) and "t" in args[index] else []

    match function:
        case "embedding":
            return shape(0)[0]
        case "embedding_dense_backward":
            return int(args[2])
        case "index" | "index_put" | "_unsafe_index" | "_unsafe_index_put":
            return shape(0)[within]
        case "index_select" | "index_add" | "index_copy" | "gather" | "scatter" | "scatter_add":
            return shape(0)[args[1]]
        case "nll_loss_forward" | "nll_loss2d_forward":
            return shape(0)[1 if len(shape(0)) > 1 else 0]
        case "nll_loss_backward" | "nll_loss2d_backward":
            return shape(1)[1 if len(shape(1)) > 1 else 0]
        case "max_pool2d_with_indices_backward":
            return shape(1)[-1] * shape(1)[-2]
    return 2


def build(entry: dict[str, Any], pool: Pool) -> Callable[[], object]:
    """The call on random data of the same layouts."""
    namespace, packet, overload = entry["function"].split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    specs = entry["args"]["l"]
    plain = packet.rstrip("_")

    def made(spec: Any, position: int, within: int = 0) -> Any:
        if not isinstance(spec, dict):
            return spec
        if "t" in spec:
            size, stride, dtype_name, offset = spec["t"]
            dtype = getattr(torch, dtype_name)
            length = 1 + offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
            if dtype in (torch.int64, torch.int32):
                flat = pool.indices((length,), max(1, _high(plain, specs, position, within))).to(dtype)
            else:
                flat = pool.take((length,), dtype)
            return flat.as_strided(size, stride, flat.storage_offset() + offset)
        if "l" in spec:
            return [made(item, position, i) for i, item in enumerate(spec["l"])]
        if "dtype" in spec:
            return getattr(torch, spec["dtype"])
        if "format" in spec:
            return getattr(torch, spec["format"])
        return pool.device

    args = [made(spec, i) for i, spec in enumerate(specs)]
    kwargs = {k: made(spec, -1) for k, spec in entry["kwargs"].items() if k not in ("layout", "pin_memory")}
    if "device" in kwargs:
        kwargs["device"] = pool.device
    if packet == "native_batch_norm":
        x, weight, bias, mean, variance, training, momentum, eps = args
        return lambda: torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, True)
    if packet == "native_batch_norm_backward":
        grad, x, weight, mean, variance, _, _, training, eps, _ = args
        inputs = (x.requires_grad_(), weight.requires_grad_(), weight.detach().clone().requires_grad_())
        out = torch.batch_norm(x, weight, inputs[2], mean, variance, training, 0.1, eps, True)
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
    return lambda: function(*args, **kwargs)


def read(path: Path, seed: int) -> list[dict[str, Any]]:
    """The calls in a random order."""
    with gzip.open(path, "rt") as file:
        entries = [json.loads(line) for line in file]
    random.Random(seed).shuffle(entries)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    record(parser.parse_args().out)


if __name__ == "__main__":
    main()
