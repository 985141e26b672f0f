"""Compare what is captured on shapes with what a real AMP training step executes on a CUDA GPU.

For each model the products, convolutions, attentions and recurrent layers of one training step are listed
twice: as ``tilefit.capture`` records them on ``meta``, and as a real step on the GPU dispatches them under
real autocast. Shapes, element types, layouts and counts must be equal.

    PYTHONPATH=src python benchmarks/capture_vs_cuda.py --out benchmarks/results/capture_vs_cuda.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tilefit.capture import capture
from tilefit.capture.targets import load
from tilefit.ops import Attention, Conv, Gemm, Recurrent, Step
from tilefit.options import TargetOptions

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "models.py"

#: Target, configuration overrides for transformers' models, input options.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "gpt2": ("gpt2", {"n_layer": 2}, {"batch": 4, "seq": 256}),
    "bert": ("bert", {"num_hidden_layers": 2}, {"batch": 4, "seq": 128}),
    "roberta": ("roberta", {"num_hidden_layers": 2}, {"batch": 4, "seq": 128}),
    "t5": ("t5", {"num_layers": 2}, {"batch": 4, "seq": 128}),
    "bart": ("bart", {"encoder_layers": 2, "decoder_layers": 2}, {"batch": 4, "seq": 128}),
    "whisper": ("whisper", {"encoder_layers": 2, "decoder_layers": 2}, {"batch": 2, "seq": 64}),
    "llama-odd": (
        "llama",
        {
            "num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 5461, "vocab_size": 32001,
            "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        {"batch": 2, "seq": 256},
    ),
    "vit": ("vit", {"num_hidden_layers": 2}, {"batch": 4}),
    "swin": ("swin", {}, {"batch": 4}),
    "resnet50": ("torchvision:resnet50", {}, {"batch": 4}),
    "mobilenet_v3": ("torchvision:mobilenet_v3_large", {}, {"batch": 4}),
    "convnext": ("timm:convnext_tiny", {}, {"batch": 4}),
    "unet": (f"{EXAMPLES}:unet", {}, {}),
    "lstm_lm": (f"{EXAMPLES}:lstm_lm", {}, {}),
    "speech": (f"{EXAMPLES}:speech", {}, {}),
    "recommender": (f"{EXAMPLES}:recommender", {}, {}),
    "odd_cnn": (f"{EXAMPLES}:odd_cnn", {}, {}),
    "attention": (f"{EXAMPLES}:attention", {}, {}),
}  # fmt: skip

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def loaded(name: str, device: str) -> Any:
    """A model and its inputs on a device."""
    target, overrides, sizes = MODELS[name]
    if ":" not in target:
        folder = Path(tempfile.mkdtemp())
        path = folder / "config.json"
        path.write_text(json.dumps({"model_type": target, **overrides}))
        target = f"hf:{path}"
    return load(target, TargetOptions(on_cpu=device == "cpu", **sizes))


class Witness(TorchDispatchMode):
    """Lists the matrix products, convolutions, attentions and recurrent layers that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in ("mm", "bmm"):
            self._product(args[0], args[1])
        elif name in ("addmm", "baddbmm", "_addmm_activation"):
            self._product(args[1], args[2])
        elif name == "convolution":
            self._convolution("forward", args[0], args[1], out, args[6])
        elif name == "convolution_backward":
            grad, x, weight = args[:3]
            for wanted, kind in zip(args[10], ("backward-data", "backward-weight"), strict=False):
                if wanted:
                    self._convolution(kind, x, weight, grad, args[7])
        elif name.startswith("_scaled_dot_product_") and not name.endswith("_math"):
            backward = name.endswith("_backward")
            q, k, v = args[1:4] if backward else args[:3]
            position = [a.name for a in func._schema.arguments].index("is_causal")
            is_causal = args[position] if len(args) > position else (kwargs or {}).get("is_causal", False)
            sizes = f"{tuple(q.shape)} {tuple(k.shape)} {tuple(v.shape)}"
            self.seen[
                f"attention {'backward' if backward else 'forward'} {_DTYPES[q.dtype]} {sizes} {is_causal}"
            ] += 1
        elif name == "_cudnn_rnn":
            x, mode, hidden = args[0], args[6], args[7]
            steps = args[14]  # samples at each time step of packed sequences
            if steps:
                sizes = (len(steps), steps[0], x.shape[-1], x.shape[0])
            else:
                sizes = tuple(x.transpose(0, 1).shape if args[10] else x.shape)  # batch_first
            cell = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")[mode]
            self.seen[f"recurrent {cell} {_DTYPES[x.dtype]} {sizes} {hidden} {args[9]} {args[13]}"] += 1
        return out

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.layout != torch.strided or b.layout != torch.strided:  # cuSPARSE's
            return
        batch = a.shape[0] if a.dim() == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        letters = _letter(b) + _letter(a)
        self.seen[f"gemm {_DTYPES[a.dtype]} {letters} {batch} x {m} {n} {k}"] += 1

    def _convolution(
        self, kind: str, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, transposed: bool
    ) -> None:
        layout = _nhwc(x, weight)
        if transposed:  # the data gradient of the convolution from its output to its input
            x, y = y, x
            kind = {"forward": "backward-data", "backward-data": "forward"}.get(kind, kind)
        sizes = f"{tuple(x.shape)} {tuple(weight.shape)} {tuple(y.shape)}"
        self.seen[f"conv {kind} {_DTYPES[x.dtype]} {sizes} {layout}"] += 1


def _letter(matrix: torch.Tensor) -> str:
    if matrix.stride(-1) == 1 or matrix.shape[-1] == 1:
        return "N"
    return "T" if matrix.stride(-2) == 1 or matrix.shape[-2] == 1 else "N"


def _nhwc(*tensors: torch.Tensor) -> str:
    last = any(
        t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
        for t in tensors
    )
    return "NHWC" if last else "NCHW"


def captured(step: Step) -> Counter[str]:
    """The same list from a captured step."""
    seen: Counter[str] = Counter()
    for entry in step.ops:
        op = entry.op
        if isinstance(op, Gemm):
            dtype = "fp32" if op.dtype == "tf32" else op.dtype
            seen[f"gemm {dtype} {op.layout} {op.batch} x {op.m} {op.n} {op.k}"] += 1
        elif isinstance(op, Conv):
            dtype = "fp32" if op.dtype == "tf32" else op.dtype
            x = (op.batch, op.in_channels, *op.input_size)
            weight = (op.out_channels, op.in_channels // op.groups, *op.kernel_size)
            y = (op.batch, op.out_channels, *op.output_size)
            layout = "NHWC" if op.channels_last else "NCHW"
            seen[f"conv {op.direction} {dtype} {x} {weight} {y} {layout}"] += 1
        elif isinstance(op, Attention):
            direction = "forward" if op.direction == "forward" else "backward"
            q = (op.batch, op.num_heads, op.seq_len, op.head_dim)
            k = (op.batch, op.num_kv_heads, op.kv_len, op.head_dim)
            v = (op.batch, op.num_kv_heads, op.kv_len, op.value_dim)
            seen[f"attention {direction} {op.dtype} {q} {k} {v} {op.is_causal}"] += 1
        elif isinstance(op, Recurrent) and op.direction == "forward":
            # cuDNN is handed the input as it lies in memory; both orders name the same work.
            sizes = (op.seq_len, op.batch, op.input_size, *([op.rows] if op.packed else []))
            dtype = "fp32" if op.dtype == "tf32" else op.dtype
            seen[
                f"recurrent {op.mode} {dtype} {sizes} {op.hidden_size} {op.num_layers} {op.bidirectional}"
            ] += 1
    return seen


def loss_of(target: Any, output: Any) -> torch.Tensor:
    """The loss as the capture makes it."""
    if target.loss is not None:
        return target.loss(output)
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    return output if output.dim() == 0 else output.mean()


def real_step(target: Any, device: str) -> Counter[str]:
    """What one real training step under bf16 autocast dispatches."""
    model = target.model.to(device).train()
    inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, target.inputs)
    witness = Witness()
    with witness:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            loss = loss_of(target, output)
        loss.backward()
    return witness.seen


def compare(name: str, device: str = "cuda") -> dict[str, Any]:
    """Both lists of one model and where they differ."""
    shapes = loaded(name, "meta")
    step = capture(shapes.model, shapes.inputs, amp="bf16", optimizer="none", loss=shapes.loss)
    ours = captured(step)
    theirs = real_step(loaded(name, "cpu"), device)
    return {
        "model": name,
        "operations": sum(theirs.values()),
        "distinct": len(theirs),
        "equal": ours == theirs,
        "only_captured": dict(ours - theirs),
        "only_executed": dict(theirs - ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This compares with a real GPU, and PyTorch finds none here.")
    rows = []
    for name in options.models or list(MODELS):
        try:
            row = compare(name, options.device)
        except Exception as error:  # noqa: BLE001 - one model's failure is a row of the result
            row = {"model": name, "equal": False, "error": f"{type(error).__name__}: {error}"[:500]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "equal": sum(bool(row["equal"]) for row in rows),
        "models": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['equal']} of {len(rows)} equal")


if __name__ == "__main__":
    main()
