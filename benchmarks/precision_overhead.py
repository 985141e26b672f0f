"""What the mixed-precision debugger costs a training step: GPT-2 and ResNet-50, fp16 with a gradient scaler.

Four states are interleaved, round by round, on the same model: *off*; *ended*, after a watch has stopped by
itself; *books*, a watch that keeps the books alone, as it does on most steps; *close*, a close look at every
step. A step's time is the wall time between two synchronisations, divided by the steps in between, and the
lower quartile of that over the rounds: what else runs on the host can only make a step slower. How often a
step waits for the device is counted by PyTorch's sync debug mode; the gradient scaler's own waits are in all
states alike.

Run it with: python benchmarks/precision_overhead.py It writes
benchmarks/results/precision_overhead_DEVICE.json. Without a GPU it runs tiny models and writes nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilefit import gpus
from tilefit.capture.torchvision_import import import_transformers, tolerated
from tilefit.precision import Watch
from tilefit.precision.watching import FIRST_STEPS

RESULTS = Path(__file__).parent / "results"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROUNDS = 9 if CUDA else 2
STEPS = 10 if CUDA else 2
#: Steps between the start of a state and its measurement.
SETTLE = FIRST_STEPS + 1
#: What was asked for: the step's time over that without a watch.
BARS = {"ended": 1.01, "books": 1.03, "close": 2.0}

Step = Callable[[], None]


def gpt2() -> tuple[nn.Module, Step]:
    """124 M parameters, 8 sequences of 1024 tokens."""
    transformers = import_transformers()
    small = {} if CUDA else {"n_layer": 2, "n_embd": 64, "n_head": 2}
    batch, length = (8, 1024) if CUDA else (2, 64)
    config = transformers.GPT2Config(**small)
    with tolerated():
        model = transformers.GPT2LMHeadModel(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (batch, length), device=DEVICE)
    return model, trainer(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def resnet50() -> tuple[nn.Module, Step]:
    """25.6 M parameters, 128 images of 224 x 224, channels last."""
    with tolerated():
        import torchvision
    batch, size = (128, 224) if CUDA else (2, 64)
    model = torchvision.models.resnet50().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=DEVICE)
    return model, trainer(model, optimizer, lambda: nn.functional.cross_entropy(model(images), labels))


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    """One step of AMP with clipping."""
    scaler = torch.amp.GradScaler(DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def started(state: str, model: nn.Module) -> Watch | None:
    """The watch of a state, or None."""
    if state == "off":
        return None
    options: dict[str, Any] = {"books": {"numerics": False}, "close": {"every": 1}, "ended": {"steps": 1}}[
        state
    ]
    return Watch(model, **options).start()


def timed(state: str, model: nn.Module, step: Step) -> float:
    """Seconds per step in a state."""
    watch = started(state, model)
    for _ in range(SETTLE):
        step()
    synchronize()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize()
    time_s = (time.perf_counter() - start_s) / STEPS
    if watch is not None:
        watch.stop()
        assert watch.alarms == (), watch.alarms
    return time_s


def waits(state: str, model: nn.Module, step: Step) -> int:
    """How often a step waits for the device, over some steps."""
    watch = started(state, model)
    for _ in range(SETTLE):
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(STEPS):
            step()
        torch.cuda.set_sync_debug_mode("default")
    if watch is not None:
        watch.stop()
    return sum("synchroniz" in str(warning.message) for warning in caught)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measure(build: Callable[[], tuple[nn.Module, Step]]) -> dict[str, Any]:
    """A model in all states."""
    torch.manual_seed(0)
    model, step = build()
    for _ in range(SETTLE):
        step()
    states = ("off", *BARS)
    times: dict[str, list[float]] = {state: [] for state in states}
    for _ in range(ROUNDS):
        for state in states:
            times[state].append(timed(state, model, step))
    steps_s = {state: statistics.quantiles(times[state], n=4, method="inclusive")[0] for state in states}
    rows: dict[str, Any] = {}
    for state in states:
        rows[state] = {
            "step_s": steps_s[state],
            "ratio": steps_s[state] / steps_s["off"],
            "rounds_s": times[state],
        }
        if state in BARS:
            rows[state]["bar"] = BARS[state]
            rows[state]["holds"] = rows[state]["ratio"] <= BARS[state]
        if CUDA and state != "close":
            rows[state]["waits"] = waits(state, model, step)
    return {
        "what": build.__doc__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "off_step_s": steps_s["off"],
        "states": rows,
    }


def main() -> None:
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rounds": ROUNDS,
        "steps": STEPS,
    }
    for build in (gpt2, resnet50):
        result[build.__name__] = row = measure(build)
        for state, figures in row["states"].items():
            print(
                f"{build.__name__:9} {state:6} {1e3 * figures['step_s']:8.2f} ms  x {figures['ratio']:.3f}"
                f"  {figures.get('holds', '')} waits {figures.get('waits', '-')}"
            )
        if CUDA:
            torch.cuda.empty_cache()
    if CUDA:
        name = gpus.get(result["device"]).name.partition("-")[0]
        path = RESULTS / f"precision_overhead_{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)


main()
