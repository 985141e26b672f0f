"""What takes less memory beside checkpointing: losses in chunks, short optimizer state, the host's memory.

    PYTHONPATH=src python benchmarks/memory_choices.py --out memory_choices_h100.jsonl
    PYTHONPATH=src python benchmarks/memory_choices.py --out memory_choices_h100.jsonl --compare

Steps of a Llama-like model on one GPU (``--device cpu`` tries it at tiny sizes): medians of five steps behind
three, the allocator's peak of those, and bytes of the optimizer's state. A row's ``losses`` tell that it is
the same training.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WARM, TIMED, CHUNKS = 3, 5, 8
#: Width, of the feed-forward part, heads, layers, vocabulary, samples, tokens: GPU and CPU.
SIZES = {
    "wide vocabulary": (2048, 8192, 16, 4, 128256, 3, 2048),
    "narrow vocabulary": (2048, 8192, 16, 12, 32000, 6, 2048),
    "small batch": (2048, 8192, 16, 16, 32000, 1, 1024),
}
TINY = (256, 512, 4, 3, 1000, 2, 64)
#: A block of values that share a scale (Dettmers and others, 2022).
BLOCK = 256


class Layer(nn.Module):
    """A layer of Llama's kind, without rotations."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, width: int, inner: int, heads: int, layers: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, inner, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.around: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda layer, x: layer(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = self.around(layer, x)
        return self.norm(x)


# ---- losses ------------------------------------------------------------------------------------


def whole(net: Net, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net.head(x).flatten(0, -2).float(), labels.flatten())


def _part(head: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x).float(), labels, reduction="sum")


def in_chunks(net: Net, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each chunk's logits are computed again in its backward pass."""
    parts = zip(x.flatten(0, -2).chunk(CHUNKS), labels.flatten().chunk(CHUNKS), strict=True)
    sums = [checkpoint(_part, net.head, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / labels.numel()


class AtOnce(torch.autograd.Function):
    """Each chunk's gradients are made in the forward pass, right behind its logits (Liger kernels' way)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        short = weight.to(x.dtype)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), device=x.device)
        for rows, own, out in zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), of_x.chunk(CHUNKS), strict=True):
            logits = (rows @ short.T).float().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(logits, own, reduction="sum") / labels.numel()
            (gradient,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            gradient = gradient.to(x.dtype)
            out.copy_(gradient @ short)
            of_weight += gradient.T @ rows
        ctx.save_for_backward(of_x, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x * scale.to(of_x.dtype), of_weight * scale, None


def at_once(net: Net, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    short = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
    with torch.autocast(x.device.type, enabled=False):
        return AtOnce.apply(x.flatten(0, -2).to(short), net.head.weight, labels.flatten())


# ---- activations on the host -------------------------------------------------------------------


class Offloading:
    """What autograd keeps, but for weights, goes to page-locked memory on a stream of its own, and comes back
    ahead of its turn. A few copies are on their way at once, so that memory is given back in the order of the
    computation."""

    def __init__(self, net: nn.Module, ahead: int = 8, least: int = 2**20) -> None:
        self.ahead, self.least = ahead, least
        self.weights = {shape for p in net.parameters() for shape in (p.shape, p.shape[::-1])}
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.free: dict[Any, list[torch.Tensor]] = {}
        self.kept: list[list[Any]] = []
        self.leaving: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self.moved_bytes = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if size < self.least or tensor.shape in self.weights:
            return tensor
        self.moved_bytes += size
        pool = self.free.setdefault((tensor.shape, tensor.dtype), [])
        host = pool.pop() if pool else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        own = torch.cuda.current_stream()
        self.out.wait_stream(own)
        with torch.cuda.stream(self.out):
            host.copy_(tensor, non_blocking=True)
        self.leaving.append((self.out.record_event(), tensor))
        if len(self.leaving) > self.ahead:
            own.wait_event(self.leaving.pop(0)[0])
        self.kept.append([host, None, None, pool])
        return len(self.kept) - 1

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, int):
            return packed
        self.leaving.clear()
        for number in range(packed, max(-1, packed - self.ahead), -1):
            self._fetch(number)
        host, tensor, event, pool = self.kept[packed]
        torch.cuda.current_stream().wait_event(event)
        self.kept[packed] = [None, None, None, pool]
        pool.append(host)
        return tensor

    def _fetch(self, number: int) -> None:
        entry = self.kept[number]
        if entry[0] is None or entry[1] is not None:
            return
        entry[1] = torch.empty(entry[0].shape, dtype=entry[0].dtype, device="cuda")
        self.back.wait_stream(torch.cuda.current_stream())  # whose memory this was
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            entry[1].copy_(entry[0], non_blocking=True)
            entry[2] = self.back.record_event()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.kept.clear()
        self.moved_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        torch.cuda.current_stream().wait_stream(self.out)
        self.leaving.clear()


# ---- optimizers --------------------------------------------------------------------------------


def _short(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    if bits == 16:
        return (values.bfloat16(),)
    if bits == 32:
        return (values,)
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
    return (blocks / scale * 127).round().to(torch.int8).view(-1), scale.view(-1)


def _long(state: tuple[torch.Tensor, ...], bits: int) -> torch.Tensor:
    if bits > 8:
        return state[0].float()
    return (state[0].view(-1, BLOCK).float() / 127 * state[1].view(-1, 1)).view(-1)


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    first: tuple[torch.Tensor, ...],
    second: tuple[torch.Tensor, ...],
    bits: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    m = torch.lerp(_long(first, bits), g, 0.1)
    root = _long(second, bits)  # of the second moment: its range is half of the exponents
    v = root * root * 0.999 + g * g * 0.001
    p.mul_(1 - 1e-6).sub_(1e-4 * m / (v.sqrt() + 1e-8))
    return _short(m, bits), _short(v.sqrt(), bits)


class Adam:
    """AdamW whose moments take so many bits, on the GPU or in the host's memory."""

    def __init__(self, net: nn.Module, bits: int, host: str = "", compiled: bool = True) -> None:
        self.bits, self.host = bits, host
        self.parameters = list(net.parameters())
        self.update = torch.compile(_update, dynamic=False) if compiled else _update
        self.state = []
        for p in self.parameters:
            zeros = torch.zeros(p.numel(), device=p.device)
            self.state.append([tuple(map(self._place, _short(zeros, bits))) for _ in range(2)])

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().pin_memory() if self.host and tensor.is_cuda else tensor

    @property
    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self.state for each in pair for t in each)

    @torch.no_grad()
    def step(self) -> None:
        if self.host:
            self._step_from_host()
        else:
            for number, p in enumerate(self.parameters):
                self.state[number] = list(
                    self.update(p.view(-1), p.grad.view(-1), *self.state[number], self.bits)
                )
        for p in self.parameters:
            p.grad = None

    def _step_from_host(self) -> None:
        """``waited``: in, update, out, parameter by parameter; else the three run beside each other."""
        own = torch.cuda.current_stream()
        into, out = (own, own) if self.host == "waited" else (torch.cuda.Stream(), torch.cuda.Stream())
        into.wait_stream(own)
        there: list[Any] = []
        freed: list[torch.cuda.Event] = []

        def fetch(number: int) -> None:
            if number < len(self.parameters):
                if number >= 4:
                    freed[number - 4].synchronize()  # so many are there at once
                with torch.cuda.stream(into):
                    pair = [
                        tuple(t.to("cuda", non_blocking=True) for t in each) for each in self.state[number]
                    ]
                    there.append((pair, into.record_event()))

        for number in range(3):
            fetch(number)
        for number, p in enumerate(self.parameters):
            pair, event = there[number]
            there[number] = None
            own.wait_event(event)
            made = self.update(p.view(-1), p.grad.view(-1), *pair, self.bits)
            done = own.record_event()
            with torch.cuda.stream(out):
                out.wait_event(done)
                for host, new in zip(self.state[number], made, strict=True):
                    for to, tensor in zip(host, new, strict=True):
                        to.copy_(tensor, non_blocking=True)
                        tensor.record_stream(out)
            for tensor in (*pair[0], *pair[1]):
                tensor.record_stream(own)
            freed.append(out.record_event())
            del pair, made
            fetch(number + 3)
        own.wait_stream(out)


class Torch:
    """PyTorch's own, fused."""

    def __init__(self, net: nn.Module) -> None:
        self.own = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    @property
    def state_bytes(self) -> int:
        states = self.own.state.values()
        return sum(t.numel() * t.element_size() for each in states for t in each.values() if t.dim())

    def step(self) -> None:
        self.own.step()
        self.own.zero_grad()


# ---- rows --------------------------------------------------------------------------------------

Make = Callable[[Net], Any]
#: Loss, what is around the layers, optimizer.
WAYS: dict[str, tuple[Any, str, Make]] = {
    "plain": (whole, "", Torch),
    "loss in chunks": (in_chunks, "", Torch),
    "loss in chunks, gradients at once": (at_once, "", Torch),
    "layers computed again": (whole, "again", Torch),
    "save_on_cpu": (whole, "save_on_cpu", Torch),
    "activations on the host, overlapped": (whole, "offload", Torch),
    "inputs of layers computed again on the host": (whole, "again on host", Torch),
    "own Adam, fp32": (whole, "", lambda net: Adam(net, 32)),
    "own Adam, bf16": (whole, "", lambda net: Adam(net, 16)),
    "own Adam, 8 bits": (whole, "", lambda net: Adam(net, 8)),
    "state on the host, waited": (whole, "", lambda net: Adam(net, 32, "waited")),
    "state on the host, overlapped": (whole, "", lambda net: Adam(net, 32, "beside")),
}


def measure(sizes: tuple[int, ...], way: str, device: str) -> dict[str, Any]:
    *model, samples, tokens = sizes
    loss_of, around, make = WAYS[way]
    torch.manual_seed(0)
    with torch.device(device):
        net = Net(*model)
        ids = torch.randint(model[-1], (samples, tokens + 1))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.02 / p.std() if p.dim() > 1 else 1)
    optimizer = make(net)
    offloading = Offloading(net) if around == "offload" else None
    if around == "again":
        net.around = lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    elif around == "again on host":

        def on_host(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
                return checkpoint(layer, x, use_reentrant=False)

        net.around = on_host
    elif around == "save_on_cpu":

        def saved(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
                return layer(x)

        net.around = saved

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            with offloading.step() if offloading else contextlib.nullcontext():
                x = net(ids[:, :-1])
            loss = loss_of(net, x, ids[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, losses = [], []
    for number in range(WARM + TIMED):
        if number == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        started = time.perf_counter()
        losses.append(step())
        wait()
        times.append(time.perf_counter() - started)
    return {
        "way": way,
        "step_s": statistics.median(times[WARM:]),
        "steps_s": times[WARM:],
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "state_bytes": optimizer.state_bytes,
        "moved_bytes": offloading.moved_bytes if offloading else 0,
        "parameters": sum(p.numel() for p in net.parameters()),
        "losses": [float(each) for each in losses],
    }


def link() -> dict[str, float]:
    """Bytes a second between GPU and page-locked memory: in, out, and each of the two at once."""
    size = 2**30
    here, there = (
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.empty(size, dtype=torch.uint8).pin_memory(),
    )
    here2, there2 = torch.empty_like(here), torch.empty_like(there).pin_memory()
    other = torch.cuda.Stream()

    def timed(run: Callable[[], None]) -> float:
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - started)
        return size / statistics.median(found)

    def both() -> None:
        here.copy_(there, non_blocking=True)
        with torch.cuda.stream(other):
            there2.copy_(here2, non_blocking=True)

    return {
        "way": "link",
        "in_bytes_per_s": timed(lambda: here.copy_(there, non_blocking=True)),
        "out_bytes_per_s": timed(lambda: there.copy_(here, non_blocking=True)),
        "each_of_both_bytes_per_s": timed(both),
    }


# ---- predicted ---------------------------------------------------------------------------------

#: What is measured and what `tilefit plan` calls it, with the measured row that it is compared to.
PREDICTED = {
    "plain": ("", "plain"),
    "loss in chunks": ("loss-in-chunks", "plain"),
    "loss in chunks, gradients at once": ("fused-loss", "plain"),
    "activations on the host, overlapped": ("activations-on-host", "plain"),
    "own Adam, bf16": ("optimizer-bf16", "own Adam, fp32"),
    "own Adam, 8 bits": ("optimizer-8bit", "own Adam, fp32"),
    "state on the host, overlapped": ("optimizer-on-host", "own Adam, fp32"),
}


class Trained(nn.Module):
    """The network with its loss."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return whole(self.net, self.net(ids), labels)


def compare(rows: list[dict[str, Any]]) -> None:
    """Every choice's step and peak as planned, beside what was measured; and the differences it makes."""
    from tilefit.capture import capture
    from tilefit.cost.links import Fabric
    from tilefit.cost.priced import priced
    from tilefit.options import StepOptions
    from tilefit.parallel.blocks import Framework, Model
    from tilefit.parallel.choices import TrainingSplit
    from tilefit.parallel.planning import Job, Planner, precision_of
    from tilefit.parallel.training import CONTEXT_BYTES

    measured = {(row["model"], row["way"]): row for row in rows if "model" in row}
    for name, (*model, samples, tokens) in SIZES.items():
        with torch.device("meta"):
            net = Trained(Net(*model))
            ids = torch.zeros(samples, tokens, dtype=torch.int64)
        step = capture(net, (ids, ids), options=StepOptions(amp="bf16", fused_optimizer=True))
        whole_model, fabric = Model(step), Fabric(priced("h100-sxm"), 1, None)
        split = TrainingSplit(micro_batches=1, samples=samples)
        made: dict[str, tuple[float, float]] = {}
        for way, (choice, base) in PREDICTED.items():
            job = Job(samples, precision_of(step), Framework(), (choice,) if choice else ())
            one = Planner(whole_model, fabric, job).priced(split)
            made[way] = one.time.time_s, one.memory.total - CONTEXT_BYTES
            row, plain = measured[name, way], measured[name, base]
            found = row["step_s"], row["peak_bytes"]
            differences = [
                (now - before, then - first)
                for now, before, then, first in zip(
                    made[way], made["plain"], found, (plain["step_s"], plain["peak_bytes"]), strict=True
                )
            ]
            (took, held), (took_more, held_more) = zip(made[way], found, strict=True), differences
            print(
                f"{name:18} {way:36} {1e3 * took[0]:6.0f} of {1e3 * took[1]:6.0f} ms "
                f"({1e3 * took_more[0]:+5.0f} of {1e3 * took_more[1]:+5.0f}), "
                f"{held[0] / 2**30:5.1f} of {held[1] / 2**30:5.1f} GiB "
                f"({held_more[0] / 2**30:+5.1f} of {held_more[1] / 2**30:+5.1f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--compare", action="store_true", help="what is planned, beside rows that are there")
    arguments = parser.parse_args()
    if arguments.compare:
        compare([json.loads(line) for line in arguments.out.read_text().splitlines()])
        return
    torch._dynamo.config.recompile_limit = 32  # a shape each
    until = time.monotonic() + arguments.seconds
    about = {
        "gpu": torch.cuda.get_device_name() if arguments.device == "cuda" else "",
        "torch": torch.__version__,
    }

    def keep(row: dict[str, Any]) -> None:
        with arguments.out.open("a") as file:
            file.write(json.dumps({**about, **row}) + "\n")
        print({name: value for name, value in row.items() if name not in ("losses", "steps_s")}, flush=True)

    if arguments.device == "cuda":
        keep(link())
    for name, sizes in SIZES.items():
        for way in WAYS:
            if time.monotonic() > until or (
                arguments.device == "cpu" and ("overlapped" in way or "state on" in way)
            ):
                continue
            try:
                row = measure(sizes if arguments.device == "cuda" else TINY, way, arguments.device)
            except torch.OutOfMemoryError as error:
                row = {"way": way, "error": str(error)[:200]}
            keep({"model": name, "sizes": sizes, **row})
            gc.collect()
            torch._dynamo.reset()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
