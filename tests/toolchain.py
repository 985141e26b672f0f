"""What PyTorch's tools make of changed models: :data:`TOOLS` times :data:`fixable.KINDS`.

``python tests/toolchain.py`` runs all of it and prints the table of docs/fix.md.
"""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from alone import stay_alone
from fixable import KINDS, Kind
from in_use import difference, gradients, outcome, planned

#: A tool: what it makes of a model on some input, as something that can be compared.
Tool = Callable[[nn.Module, torch.Tensor], Any]
TOOLS: dict[str, Tool] = {}

WORKS, STRIPPED = "works", "`tilefit.strip` first"
#: Where a changed model tells that it has to be stripped first: fixes by tool. Elsewhere the tool works.
STRIP_FIRST: dict[str, set[str]] = {
    "`torch.fx.symbolic_trace`": {"persistent-kernels"},
    "`quantize_dynamic`": {"persistent-kernels"},
}
#: Tools that leave alone what they do not know: nothing is wrong, nor is it done, and nobody can tell.
SILENT = {"`quantize_dynamic`"}
#: What an error says where a model has to be stripped.
ADVICE = ("tilefit.strip", "plan.undo()")


def tool(name: str) -> Callable[[Tool], Tool]:
    """Enter a tool by what users call it."""

    def enter(function: Tool) -> Tool:
        TOOLS[name] = function
        return function

    return enter


def learned(model: Any, x: torch.Tensor, of: nn.Module | None = None) -> Any:
    """Output and gradients of a model (of the module within it)."""
    of = of or model
    y = _whole(model(x))
    loss = sum(part.square().sum() for part in y) if isinstance(y, tuple) else y.square().sum()
    loss.backward()
    found = {name.replace("_orig_mod.", ""): _whole(grad) for name, grad in gradients(of).items()}
    return y, {name: None if grad is None else grad.clone() for name, grad in found.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters as ``torch.func`` takes them."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def total(model: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A number of a model, as a function of its parameters."""
    y = torch.func.functional_call(model, parameters, (x,))
    return sum(part.square().sum() for part in y) if isinstance(y, tuple) else y.square().sum()


def linears(model: nn.Module) -> list[str]:
    """Paths of the linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


# ---- copies and checkpoints --------------------------------------------------------------------


@tool("`copy.deepcopy`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return learned(copy.deepcopy(model), x)


@tool("pickle")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return learned(torch.load(file, weights_only=False), x)


@tool("`state_dict`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    plain: Any = model.plain
    saved = {
        name: value + 0.1 if value.is_floating_point() else value
        for name, value in plain.state_dict().items()
    }
    loaded = model.load_state_dict(saved, strict=True)
    back = plain.load_state_dict(model.state_dict(), strict=True)
    return list(loaded), list(back), learned(model, x), dict(plain.state_dict())


@tool("EMA (`AveragedModel`)")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    learned(model, x)
    torch.optim.SGD(model.parameters(), 0.1).step()
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    return averaged(x), dict(averaged.named_parameters())


# ---- several GPUs ------------------------------------------------------------------------------


def mesh() -> Any:
    """A mesh of this process alone."""
    stay_alone()
    return dist.device_mesh.init_device_mesh("cpu", (1,))


@tool("DDP")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    stay_alone()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return learned(wrapped, x, model)


@tool("FSDP2, whole")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return learned(dist.fsdp.fully_shard(model, mesh=mesh()), x)


@tool("FSDP2, each layer")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    ranks = mesh()
    for module in list(model.modules())[1:]:
        if list(module.parameters(recurse=False)):
            dist.fsdp.fully_shard(module, mesh=ranks)
    return learned(dist.fsdp.fully_shard(model, mesh=ranks), x)


@tool("TP")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = torch.distributed.tensor.Replicate()
    styles = ColwiseParallel(output_layouts=whole), RowwiseParallel(input_layouts=whole)
    # In turn, as the two layers of a perceptron.
    plan: Any = {name: styles[number % 2] for number, name in enumerate(linears(model))}
    return learned(parallelize_module(model, mesh(), plan) if plan else model, x)


# ---- compilers and tracers ---------------------------------------------------------------------


@tool("`torch.compile(fullgraph=True)`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    torch.compiler.reset()
    return learned(torch.compile(model, fullgraph=True, backend="aot_eager"), x, model)


@tool("`torch.export`, any batch")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    batch = torch.export.Dim("batch", min=2, max=4096)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch},)).module()
    return exported(x), exported(x[:-1])


@tool("`torch.jit.trace`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model.eval(), x, check_trace=False), file)
    file.seek(0)
    return torch.jit.load(file)(x)


@tool("`torch.fx.symbolic_trace`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return learned(torch.fx.symbolic_trace(model), x)


# ---- torch.func --------------------------------------------------------------------------------


@tool("`torch.func.grad`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda p: total(model.eval(), p, x))(values(model))


@tool("`torch.func.jvp`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.jvp(lambda p: total(model.eval(), p, x), (values(model),), (values(model),))


@tool("`torch.func.vmap`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    gradient = torch.func.grad(lambda p, sample: total(model.eval(), p, sample[None]))
    return torch.func.vmap(gradient, in_dims=(None, 0))(values(model), x)


# ---- training ----------------------------------------------------------------------------------


@tool("`GradScaler`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x)
        scaler.scale(sum(part.square().mean() for part in (y if isinstance(y, tuple) else (y,)))).backward()
        scaler.step(optimizer)
        scaler.update()
    return dict(model.named_parameters())


@tool("LBFGS")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    optimizer = torch.optim.LBFGS(model.eval().parameters(), 0.01, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        y = model(x)
        loss = sum(part.square().mean() for part in (y if isinstance(y, tuple) else (y,)))
        loss.backward()
        return loss

    return optimizer.step(closure), dict(model.named_parameters())


@tool("`parameters_to_vector`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    model(x)
    return vector, [parameter.view(-1) for parameter in model.parameters()], learned(model, x)


@tool("gradient checkpointing")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return learned(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), x, model)


# ---- changes of the model ----------------------------------------------------------------------


@tool("`half()`, `bfloat16()`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return [_in_half(model, x, dtype) for dtype in (torch.float16, torch.bfloat16)]


def _in_half(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Any:
    """What a model in half precision gives, and whether it is as near to fp64 as the plain one is: kernels
    round at other places."""

    def found(of: nn.Module, wide: torch.dtype = dtype) -> list[torch.Tensor]:
        # fp64 begins with the numbers that half precision has.
        made, given = copy.deepcopy(of).to(dtype).to(wide), x
        if x.is_floating_point():
            given = x.to(dtype).to(wide)
        return [leaf for leaf in tree_leaves(learned(made.eval(), given)) if leaf is not None]

    plain: Any = model.plain
    half, own, exact = found(model), found(plain), found(plain, torch.float64)
    limits = [
        1.1 * (each - right).norm() + torch.finfo(dtype).eps * right.norm()
        for each, right in zip(own, exact, strict=True)
    ]
    errors = [(each - right).norm() for each, right in zip(half, exact, strict=True)]
    near = [bool(error <= limit) for error, limit in zip(errors, limits, strict=True)]
    return [(each.shape, each.dtype) for each in half], near


@tool("SyncBN conversion")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    return learned(nn.SyncBatchNorm.convert_sync_batchnorm(model).eval(), x)


@tool("`quantize_dynamic`")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    quantized = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear, nn.LSTM})
    kinds = {
        name: type(module).__module__
        for name, module in quantized.named_modules()
        if "quant" in type(module).__module__
    }
    return kinds, quantized(x)


class LowRank(nn.Module):
    """A layer with something learned added to it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        for parameter in (*self.down.parameters(), *self.up.parameters()):
            nn.init.constant_(parameter, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@tool("LoRA (layers wrapped)")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    for name in linears(model):
        model.set_submodule(name, LowRank(model.get_submodule(name)))
    return learned(model, x)


@tool("parametrizations")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.utils.parametrizations.weight_norm(module)
    # The gradient of a size that is normalized away is rounding alone.
    return learned(model.double(), x.double())


@tool("classes exchanged (`module.__class__ = …`)")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
        def other(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            y = forward(self, *args, **kwargs)
            return y / 2 if isinstance(y, torch.Tensor) else y

        return other

    for module in model.modules():
        kind = type(module)
        if kind.forward is not nn.Module.forward:
            module.__class__ = type(f"Half{kind.__name__}", (kind,), {"forward": halved(kind.forward)})
    return learned(model, x)


@tool("hooks")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    seen: list[Any] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, given, y, name=name: seen.append((name, given, y)))
        module.register_full_backward_hook(lambda _, i, o, name=name: seen.append((name, o)))
    return learned(model, x), seen


@tool("hooks on all modules")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    seen: list[Any] = []
    hook = nn.modules.module.register_module_forward_hook(lambda _, given, y: seen.append((given, y)))
    try:
        return learned(model, x), seen
    finally:
        hook.remove()


@tool("results written to")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    y = model(x)
    parts = y if isinstance(y, tuple) else (y,)
    for part in parts:
        part.mul_(2).add_(1)
    sum(part.square().sum() for part in parts).backward()
    return y, gradients(model)


@tool("threads")
def _(model: nn.Module, x: torch.Tensor) -> Any:
    results: list[Any] = [None] * 3

    def work(number: int) -> None:
        with torch.no_grad():
            results[number] = [model(x) for _ in range(5)][-1]

    model.eval()
    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(results))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


# ---- outcomes ----------------------------------------------------------------------------------


def changed(kind: Kind) -> tuple[nn.Module, nn.Module, Any]:
    """A plain model, the same one changed, and the plan."""
    torch.manual_seed(0)
    plain = kind.make()
    model = copy.deepcopy(plain)
    plan = planned(model, kind.planned_on, kind.fix, verify=False, **kind.options)
    assert kind.fix in {fix.name for fix in plan.fixes}
    return plain, model, plan


def used(use: Tool, model: nn.Module, kind: Kind) -> Any:
    """What a tool makes of a model, which knows a plain one beside it."""
    torch.manual_seed(0)
    object.__setattr__(model, "plain", kind.make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(lambda m: use(m, kind.input()), model)


def verdict(tool: str, name: str) -> str:
    """:data:`WORKS`, :data:`STRIPPED`, or what is wrong."""
    kind = KINDS[name]
    plain, model, _ = changed(kind)
    expected, found = used(TOOLS[tool], plain, kind), used(TOOLS[tool], model, kind)
    if isinstance(expected, Exception) and not isinstance(found, Exception):
        return WORKS  # where the plain model does not
    if isinstance(found, Exception) and any(words in str(found) for words in ADVICE):
        return STRIPPED
    text = difference(expected, found)
    if text and tool in SILENT and name in STRIP_FIRST[tool]:
        return STRIPPED
    return text or WORKS


def markdown() -> str:
    """Tools by fixes."""
    lines = ["| tool | works with | `tilefit.strip` first |", "| --- | --- | --- |"]
    for name in TOOLS:
        strip = STRIP_FIRST.get(name, set())
        works = "every other fix" if strip else "every fix"
        lines.append(f"| {name} | {works} | {', '.join(sorted(strip))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
