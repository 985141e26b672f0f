"""Ways to replay a model's kernels from CUDA graphs: are they the same model, and what do they gain?

    PYTHONPATH=src python benchmarks/graph_ways.py --out DIR --budget-s 290

The ways are the fix ``cuda-graph`` (today); ``torch.compile(backend="cudagraphs")``, as it is and with
buffers that are written in the graph (stock); and ``mode="reduce-overhead"``. Compiled ones return copies,
of outputs and gradients, as the fix ``compile`` does (but for ``-bare``). First each way has a process that
tries it in many situations against the plain model: ``DIR/situations.jsonl``. Then, model by model, steps
run eagerly and in some of these ways in turn, with the other fixes of the plan: ``DIR/rows.jsonl``. What
was expected before anything was measured: ``results/graph_ways_predicted.json``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import pickle
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compiled_steps import ROW, WORK, Session, lock_benchmarks, patiently, session_arguments, when_called
from fix_gain import MODELS, Variant, load_model, planned, synchronize, timed
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.cuda_graph import GRAPH
from tilefit.fixes.kinds.settings import REDUCE_OVERHEAD, _called, _with_copies
from tilefit.measure.launch import launch_scale

WAYS = ("today", "stock", "stock-in-place", "reduce-overhead", "reduce-overhead-bare")
TIMED = ("mobilenet-v3-nchw", "odd-mlp", "odd-cnn", "resnext", "efficientnet-nhwc")
#: Largest relative error that counts as rounding.
CLOSE, CLOSE_IN_HALF = 2e-3, 5e-2


# ---- the ways ------------------------------------------------------------------------------------


def prepare(way: str) -> None:
    """What a way changes in the whole process."""
    if way == "stock-in-place":
        torch._dynamo.config.cudagraph_backend_keep_input_mutation = True
        torch._dynamo.config.cudagraph_backend_support_input_mutation = True


def replay(model: nn.Module, way: str) -> None:
    """Let a model run in that way."""
    if way == "today":
        GRAPH.apply(Run(model))
        return
    on_cpu = next(model.parameters()).device.type == "cpu"
    how = {"backend": "cudagraphs"} if way.startswith("stock") else {"mode": REDUCE_OVERHEAD}
    compiled = torch.compile(_called(model), **({"backend": "aot_eager"} if on_cpu else how))
    model._compiled_call_impl = compiled if way.endswith("bare") else _with_copies(compiled)


# ---- the situations --------------------------------------------------------------------------------


See = Callable[[str, Any], None]
Make = Callable[..., nn.Module]
Situation = Callable[[Make, See, str], None]
SITUATIONS: dict[str, Situation] = {}


def situation(function: Situation) -> Situation:
    SITUATIONS[function.__name__.replace("_", " ").strip()] = function
    return function


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)
    )


def plain() -> nn.Sequential:
    """Without buffers: no call changes another."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))


def images() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.Hardswish(inplace=True)),
        *(nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


class Own(nn.Module):
    """Python of its own: a number that counts, a dictionary of outputs, one of which is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        y = self.layer(x) * scale
        return {"y": y, "half": y[:, :32], "x": x, "number": self.calls, "none": None}


def batches(device: str, number: int, rows: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, rows, 64, generator=torch.Generator().manual_seed(seed)).to(device)


def gradients(model: nn.Module) -> list[Any]:
    return ["none" if p.grad is None else p.grad.clone() for p in model.parameters()]


def trained(
    model: nn.Module, xs: Any, see: See, *, amp: str = "", micro: int = 1, to_none: bool = True
) -> None:
    device = next(model.parameters()).device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=amp == "fp16", init_scale=1024.0)
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    for number, x in enumerate(xs):
        with torch.autocast(device, dtype, enabled=bool(amp)):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        see(f"loss {number}", loss)
        if number % micro == micro - 1:
            scaler.unscale_(optimizer)
            see(f"norm {number}", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=to_none)
    see("state", model.state_dict())


@situation
def training(make: Make, see: See, device: str) -> None:
    trained(make(network), batches(device, 8), see)


@situation
def training_of_images(make: Make, see: See, device: str) -> None:
    xs = torch.randn(6, 4, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)
    trained(make(images), [x.to(memory_format=torch.channels_last) for x in xs], see)


@situation
def training_in_bf16(make: Make, see: See, device: str) -> None:
    trained(make(network), batches(device, 8), see, amp="bf16")


@situation
def training_in_fp16(make: Make, see: See, device: str) -> None:
    trained(make(network), batches(device, 8), see, amp="fp16")


@situation
def three_passes_a_step(make: Make, see: See, device: str) -> None:
    trained(make(network), batches(device, 9), see, micro=3)


@situation
def three_passes_and_zeros(make: Make, see: See, device: str) -> None:
    trained(make(network), batches(device, 9), see, micro=3, to_none=False)


@situation
def never_zeroed(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for number, x in enumerate(batches(device, 6)):
        model(x).square().mean().backward()
        see(f"gradients {number}", gradients(model))


@situation
def gradients_kept_by_the_user(make: Make, see: See, device: str) -> None:
    model, held = make(plain), []
    for x in batches(device, 6):
        model(x).square().mean().backward()
        held.append([p.grad for p in model.parameters()])
        model.zero_grad()
    see("all gradients", held)


@situation
def outputs_kept(make: Make, see: See, device: str) -> None:
    model = make(network)
    held = [model(x) for x in batches(device, 5)]
    model.eval()
    with torch.no_grad():
        held += [model(x) for x in batches(device, 5)]
    see("all outputs", held)


@situation
def two_calls_before_a_backward_pass(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for a, b in zip(batches(device, 5), batches(device, 5, seed=2), strict=True):
        model.zero_grad()
        (model(a) * model(b)).sum().backward()
        see("gradients", gradients(model))


@situation
def backward_passes_that_cross(make: Make, see: See, device: str) -> None:
    model, xs = make(plain), batches(device, 12)
    for number in range(0, 12, 3):
        first, second = model(xs[number]).square().sum(), model(xs[number + 1]).square().sum()
        first.backward()
        third = model(xs[number + 2]).square().sum()
        second.backward()
        third.backward()
        see(f"gradients {number}", gradients(model))


@situation
def twice_through_one_call(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x in batches(device, 5):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        see("gradients", gradients(model))


@situation
def an_old_backward_pass(make: Make, see: See, device: str) -> None:
    model, xs = make(plain), batches(device, 6)
    for x in xs[:4]:
        model(x).square().sum().backward()
    loss = model(xs[4]).square().sum()
    loss.backward(retain_graph=True)
    model(xs[5]).square().sum().backward()
    model.zero_grad()
    loss.backward()
    see("gradients", gradients(model))


@situation
def evaluated_between_forward_and_backward(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x, y in zip(batches(device, 6), batches(device, 6, seed=2), strict=True):
        loss = model(x).square().sum()
        with torch.no_grad():
            see("evaluated", model(y))
        loss.backward()
        see("gradients", gradients(model))


@situation
def training_and_evaluation_in_turn(make: Make, see: See, device: str) -> None:
    model = make(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, x in enumerate(batches(device, 12)):
        model.train(number % 3 != 2)
        if model.training:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.inference_mode():
                see("evaluated", model(x))
    see("state", model.state_dict())


@situation
def calls_without_a_backward_pass(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x in batches(device, 10):
        see("output", model(x))
    if device == "cuda":
        before = torch.cuda.memory_reserved()
        started = time.perf_counter()
        for x in batches(device, 30, seed=3):
            see("output", model(x))
        grown = (torch.cuda.memory_reserved() - before) / 2**20
        print(f"{grown:.0f} MiB, {1e3 * (time.perf_counter() - started) / 30:.2f} ms a call", file=sys.stderr)
    model(x).sum().backward()
    see("gradients", gradients(model))


@situation
def other_batch_sizes(make: Make, see: See, device: str) -> None:
    model = make(network)
    for rows in (32, 32, 32, 7, 32, 7, 7, 19, 5, 32, 2, 11, 32, 32):
        model.zero_grad()
        out = model(batches(device, 1, rows)[0])
        out.square().mean().backward()
        see(f"of {rows}", (out, gradients(model)))


@situation
def other_weights_loaded(make: Make, see: See, device: str) -> None:
    model, xs = make(network), batches(device, 8)
    trained(model, xs, see)
    torch.manual_seed(5)
    model.load_state_dict(
        {name: torch.rand_like(t.float()).to(t.dtype) for name, t in network().state_dict().items()}
    )
    trained(model, xs, see)
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data * 2
        model[3].bias = nn.Parameter(torch.ones(128, device=device))
    trained(model, xs, see)


@situation
def frozen_later(make: Make, see: See, device: str) -> None:
    model, xs = make(plain), batches(device, 8)
    for number, x in enumerate(xs):
        model[0].weight.requires_grad_(number < 4)
        model.zero_grad()
        model(x).square().mean().backward()
        see(f"gradients {number}", gradients(model))


@situation
def hooks_set_later(make: Make, see: See, device: str) -> None:
    model, xs = make(plain), batches(device, 12)
    for number, x in enumerate(xs):
        if number == 4:
            model[1].register_forward_hook(lambda module, args, output: output * 2)
        if number == 8:
            model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.zero_grad()
        model(x).square().mean().backward()
        see(f"gradients {number}", gradients(model))


@situation
def attributes_and_layers_changed_later(make: Make, see: See, device: str) -> None:
    model, xs = make(network), batches(device, 12)
    for number, x in enumerate(xs):
        if number == 3:
            model[1].eps = 0.5
        if number == 6:
            model[2] = nn.SiLU()
        if number == 9:
            model.append(nn.Tanh())
        see(f"output {number}", model(x))


@situation
def a_function_exchanged(make: Make, see: See, device: str) -> None:
    model, relu = make(network).eval(), F.relu
    try:
        for number, x in enumerate(batches(device, 8)):
            if number == 4:
                F.relu = lambda x, inplace=False: relu(x) * 2
            with torch.no_grad():
                see(f"output {number}", model(x))
    finally:
        F.relu = relu


@situation
def a_copy_beside_it(make: Make, see: See, device: str) -> None:
    model, xs = make(network), batches(device, 8)
    trained(model, xs, see)
    other = copy.deepcopy(model)
    trained(other, xs, see)
    trained(model, xs, see)


@situation
def one_after_the_other(make: Make, see: See, device: str) -> None:
    first, second = make(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU())), make(plain)
    for x in batches(device, 6):
        out = second(first(x)).square().mean() + second(x).mean()
        out.backward()
        see("gradients", (gradients(first), gradients(second)))
        first.zero_grad()


@situation
def dropout(make: Make, see: See, device: str) -> None:
    model = make(lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64))
        model[0].bias.zero_()
    outputs = []
    for x in batches(device, 6):
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        out.sum().backward()
        outputs.append(out)
        # The same elements are dropped in both directions, and half of them.
        see("is consistent", torch.allclose(out, leaf * leaf.grad, atol=1e-5))
        see("is a half", bool(((out == 0).float().mean() - 0.5).abs() < 0.06))
    see("differs", not torch.equal(outputs[-1] == 0, outputs[-2] == 0))


@situation
def gradients_of_inputs(make: Make, see: See, device: str) -> None:
    model, leaves = make(plain), []
    for x in batches(device, 6):
        leaves.append(x.clone().requires_grad_())
        y = leaves[-1] * 2
        model(y).square().sum().backward()
    see("gradients", [leaf.grad for leaf in leaves])
    see("by autograd.grad", torch.autograd.grad(model(leaves[0]).sum(), leaves[0]))


@situation
def second_derivatives(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x in batches(device, 4):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        see("second", torch.autograd.grad(first.square().sum(), leaf))


@situation
def python_of_ones_own(make: Make, see: See, device: str) -> None:
    model, held = make(Own), []
    for number, x in enumerate(batches(device, 6)):
        model.zero_grad()
        out = model(x, scale=1.0 + number)
        held.append(out)
        (out["y"].sum() + out["half"].square().sum()).backward()
        see("gradients", gradients(model))
        see("the input itself", out["x"] is x)
    see("outputs", [{**each, "none": 0} for each in held])


@situation
def results_written_to(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x in batches(device, 5):
        given = x.clone()
        out = model(given)
        given.zero_()
        out.relu_().add_(1)
        out.square().sum().backward()
        see("outputs and gradients", (out, gradients(model)))


@situation
def one_of_two_outputs(make: Make, see: See, device: str) -> None:
    model = make(lambda: nn.MultiheadAttention(64, 4))
    for x in batches(device, 6):
        model.zero_grad()
        model(x[None], x[None], x[None])[1].square().sum().backward()
        see("gradients, and where there are none", gradients(model))


@situation
def an_input_written_to(make: Make, see: See, device: str) -> None:
    model = make(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)))
    for x in batches(device, 6):
        given = x.clone()
        model(given).square().sum().backward()
        see("the input, and gradients", (given, gradients(model)))


@situation
def checkpointed(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x in batches(device, 5):
        model.zero_grad()
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).square().sum().backward()
        see("gradients", gradients(model))


@situation
def line_search(make: Make, see: See, device: str) -> None:
    model, (x,) = make(plain), batches(device, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        see("loss", optimizer.step(closure))


@situation
def threads(make: Make, see: See, device: str) -> None:
    model = make(plain)
    for x in batches(device, 4):
        model.zero_grad()
        model(x).square().sum().backward()
    found: dict[str, Any] = {}

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                found[f"of thread {number}"] = [model(x) for x in batches(device, 20, seed=number)]
        except Exception as error:  # noqa: BLE001
            found[f"of thread {number}"] = repr(error)[:200]

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    synchronize(device)
    for name in sorted(found):
        see(name, found[name])


@situation
def another_stream(make: Make, see: See, device: str) -> None:
    model, xs = make(plain), batches(device, 10)
    for number, x in enumerate(xs):
        other = torch.cuda.Stream() if device == "cuda" and number % 2 else None
        if other is not None:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            model.zero_grad()
            model(x).square().sum().backward()
            found = gradients(model)
        synchronize(device)
        see("gradients", found)


@situation
def weights_written_within_autocast(make: Make, see: See, device: str) -> None:
    model = make(plain)
    with torch.autocast(device, torch.bfloat16):
        for x in batches(device, 6):
            model.zero_grad()
            model(x).float().square().sum().backward()
            see("gradients", gradients(model))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            torch.clear_autocast_cache()


def observed(make: Make, run: Situation, device: str) -> tuple[list[tuple[str, Any]], str]:
    """What is seen of a situation, and what it raises."""
    found: list[tuple[str, Any]] = []

    def see(name: str, value: Any) -> None:
        for number, leaf in enumerate(tree_leaves(value)):
            leaf = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            found.append((f"{name}.{number}", leaf))

    torch.manual_seed(0)
    try:
        run(make, see, device)
        synchronize(device)
    except Exception as error:  # noqa: BLE001 - that it raises is what is seen
        traceback.print_exc()
        text = (str(error).strip() or "?").splitlines()[0]
        return found, f"{type(error).__name__}: {text[:220]}"
    return found, ""


def verdict(expected: Any, found: Any, limit: float) -> tuple[str, float]:
    """In a word what became of it, and the largest error."""
    (first, raised), (second, raises) = expected, found
    worst, where = 0.0, ""
    for (name, a), (_, b) in zip(first, second, strict=False):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            error = float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-6))
            error = float("inf") if error != error else error
        else:
            error = 0.0 if a == b or a is b else float("inf")
            name = f"{name} ({b[:200]})" if isinstance(b, str) else name
        if error > limit and not where:
            where = name
        worst = max(worst, error)
    if where:
        return f"DIFFERS first at {where}" + (f", then {raises}" if raises else ""), worst
    if raises and not raised:
        return f"raises {raises}", worst
    return "same" if len(first) == len(second) else "DIFFERS in number", worst


def try_out(way: str, device: str, out: Path, only: str) -> None:
    """Write a row for each situation."""
    prepare(way)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def make(kind: Callable[[], nn.Module], by: str = "") -> nn.Module:
        torch.manual_seed(0)
        model = kind().to(device)
        if by:
            replay(model, by)
        return model

    for name, run in SITUATIONS.items():
        if only not in name:
            continue
        start = time.perf_counter()
        expected = observed(make, run, device)
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = observed(partial(make, by=way), run, device)
        said, error = verdict(expected, found, CLOSE_IN_HALF if "16" in name or "auto" in name else CLOSE)
        row = {"way": way, "situation": name, "verdict": said, "error": error}
        row |= {"warned": sorted({str(w.message)[:160] for w in warned})[:3]}
        row["took_s"] = round(time.perf_counter() - start, 1)
        with (out / "situations.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        del expected, found
        gc.collect()


# ---- what they gain --------------------------------------------------------------------------------


def work(name: str, ways: list[str], options: argparse.Namespace) -> None:
    """Compile, wait for the turn, time eager steps and those of the ways in turn, and print the row."""
    torch.set_num_threads(1)
    lock_benchmarks()
    plan = pickle.loads((WORK / f"plan_{name}").read_bytes())
    others = [
        part
        for change in plan.first(len(plan.fixes))
        for part in change.changes or (change,)
        if ("cuda_graph", True) not in part.options
    ]
    loaded = load_model(MODELS[name], "cpu", options.device == "cpu")
    found: list[tuple[list[Variant], list[float]]] = []

    def compiled() -> None:
        torch._dynamo.reset()
        variants = [Variant(each, loaded, MODELS[name], others, options.device) for each in ("eager", *ways)]
        first_s = []
        for way, variant in zip(ways, variants[1:], strict=True):
            replay(variant.run.model, way)
            start = time.perf_counter()
            variant.step()
            synchronize(options.device)
            first_s.append(round(time.perf_counter() - start, 1))
        for variant in variants:
            with variant.flags():
                for _ in range(4):
                    variant.step()
        found.append((variants, first_s))

    patiently(compiled)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    ((variants, first_s),) = found
    row = {
        "model": name,
        "ways": ["eager", *ways],
        "first_step_s": first_s,
        "fixes": [f["name"] for f in plan.row["fixes"]],
    }
    with when_called():
        timed(row, variants, options)
        if options.device == "cuda":
            row |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(ROW + json.dumps(row), flush=True)


def try_and_wait(way: str, options: argparse.Namespace) -> None:
    """The situations of a way; the row says how many there were."""
    lock_benchmarks()
    try_out(way, options.device, options.out, options.only)
    with when_called():
        print(ROW + json.dumps({"model": f"situations/{way}", "number": len(SITUATIONS)}), flush=True)


def shown(row: dict[str, Any]) -> str:
    if "wall_ms" not in row:
        return f"{row['number']} situations"
    of_ways = zip(row["ways"], row["wall_ms"], row.get("gpu_ms", row["wall_ms"]), strict=True)
    walls = ", ".join(f"{way} {wall_ms:.2f} (GPU {gpu_ms:.2f})" for way, wall_ms, gpu_ms in of_ways)
    return f"{walls} ms; first steps {row['first_step_s']} s"


def table(out: Path) -> Iterator[str]:
    path = out / "situations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for name in SITUATIONS:
        yield name
        for row in rows:
            if row["situation"] == name:
                yield f"    {row['way']:22} {row['error']:8.1e}  {row['verdict']}  {row['took_s']} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    session_arguments(parser, Path("graph_ways"))
    parser.add_argument("--gpu", default="h200", help="the GPU to plan for")
    parser.add_argument("--models", default=",".join(TIMED), help="names, with commas between; none if empty")
    parser.add_argument("--ways", default=",".join(WAYS), help="likewise")
    parser.add_argument("--only", default="", help="what the names of situations contain; - for none")
    parser.add_argument("--rounds", type=int, default=6, help="at least")
    parser.add_argument("--model-s", type=float, default=1.5, help="a model's rounds take at least so long")
    parser.add_argument("--round-s", type=float, default=0.12, help="about how long one variant's turn is")
    parser.add_argument("--situations-s", type=float, default=120.0, help="what these may take of the budget")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.worker:
        kind, _, way = options.worker.partition("/")
        try_and_wait(way, options) if kind == "situations" else work(kind, way.split("+"), options)
        return
    WORK.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    names, ways = options.models.split(",") if options.models else [], options.ways.split(",")
    scale = launch_scale(torch.device(options.device))
    print(f"launch scale {scale:.2f}", flush=True)
    with ProcessPoolExecutor(max(1, min(5, (os.cpu_count() or 1) // 2)), get_context("spawn")) as pool:
        plans = [pool.submit(planned, n, options.gpu, "safe", False, scale) for n in names]
        for name, plan in zip(names, plans, strict=True):
            (WORK / f"plan_{name}").write_bytes(pickle.dumps(plan.result()))
    command = [__file__, "--device", options.device, "--gpu", options.gpu, "--out", str(options.out)]
    command += ["--only", options.only]
    for name in ("rounds", "model_s", "round_s"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    of_all, options.budget_s = options.budget_s, options.situations_s
    Session([f"situations/{way}" for way in ways if options.only != "-"], options, command, shown).finish()
    options.budget_s = of_all - (time.perf_counter() - began)
    together = "+".join(way for way in ways if not way.endswith("in-place"))
    Session([f"{name}/{together}" for name in names], options, command, shown).finish()
    for line in table(options.out):
        print(line)


if __name__ == "__main__":
    main()
