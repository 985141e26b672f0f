"""Does a first convolution gain from more input channels? Times 3, 4 and 8 channels and the padding copy.

Run on the GPU in question: ``python benchmarks/first_convolution.py results/first_convolution.json``. Random
data, NHWC, ``cudnn.benchmark`` on, CUDA-graph replays interleaved over the variants, medians in microseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

#: batch, image, filters, kernel, stride, padding: ResNet, the same small, VGG, MobileNet, ConvNeXt, ViT.
LAYERS = {
    "resnet": (256, 224, 64, 7, 2, 3),
    "resnet, batch 32": (32, 224, 64, 7, 2, 3),
    "vgg": (64, 224, 64, 3, 1, 1),
    "mobilenet": (256, 224, 32, 3, 2, 1),
    "convnext": (128, 224, 96, 4, 4, 0),
    "vit": (256, 224, 768, 16, 16, 0),
}
CHANNELS = (3, 4, 8)
REPEATS = 20
ROUNDS = 7


def graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call, several times over, ready to be replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(REPEATS):
            call()
    return captured


def replay_us(captured: torch.cuda.CUDAGraph) -> float:
    """Time of one call within a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    captured.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS


def calls(batch: int, size: int, filters: int, kernel: int, stride: int, padding: int) -> dict[str, Callable]:
    """The passes of a layer on each number of channels, and the copy that pads its images."""
    found: dict[str, Callable] = {}
    options = {"device": "cuda", "dtype": torch.bfloat16}
    last = torch.channels_last
    for channels in CHANNELS:
        x = torch.randn(batch, channels, size, size, **options).to(memory_format=last)
        w = torch.randn(filters, channels, kernel, kernel, **options).to(memory_format=last)
        y = F.conv2d(x, w, stride=stride, padding=padding)
        dy = torch.randn_like(y)

        def gradient(x=x, w=w, dy=dy):
            return torch.ops.aten.convolution_backward(
                dy, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [False, True, False]
            )

        found[f"forward {channels}"] = lambda x=x, w=w: F.conv2d(x, w, stride=stride, padding=padding)
        found[f"backward-weight {channels}"] = gradient
        if channels == CHANNELS[0]:
            for wider in CHANNELS[1:]:
                found[f"pad {wider}"] = lambda x=x, more=wider - channels: F.pad(x, (0, 0, 0, 0, 0, more))
    return found


def main(path: str) -> None:
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    rows = []
    for name, layer in LAYERS.items():
        graphs = {label: graph(call) for label, call in calls(*layer).items()}
        samples: dict[str, list[float]] = {label: [] for label in graphs}
        for _ in range(ROUNDS):
            for label, captured in graphs.items():
                samples[label].append(replay_us(captured))
        times = {label: round(statistics.median(values), 1) for label, values in samples.items()}
        rows.append({"layer": name, "shape": layer, "us": times})
        print(name, times, flush=True)
        del graphs
        torch.cuda.empty_cache()
    versions = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    Path(path).write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
