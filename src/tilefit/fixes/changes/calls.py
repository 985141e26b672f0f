"""How a call of a changed module runs now: in which element type, and who follows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

PLAIN = frozenset((torch.Tensor, nn.Parameter))
#: Asked once: PyTorch 2.11's compiler, asked within a call, breaks its graph there.
_WITH_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")))


#: Where hooks are kept: a module's own, and those of all modules.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: list[dict[Any, Any]] = [getattr(nn_module, f"_global{name}") for name in _HOOKS]
#: Whose modes see functions and exchange none: those of this package, and ``with torch.device(...)``.
_OUR_MODES = ("tilefit.", "torch.utils._device")
#: Looked up once: it is asked in every call.
_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU in truth: a capture answers ``is_cuda`` so for those that are on the CPU,
    or have shapes alone. What is kept from one call to the next must not come from one."""
    return tensor.is_cuda and not (tensor.is_meta or tensor.is_cpu)


def is_transformed() -> bool:
    """Whether what runs is exported, traced, batched or differentiated by what wants plain modules."""
    if torch.compiler.is_compiling():
        # What is_exporting() reads. In code that it compiles, PyTorch before 2.13 takes that call for true.
        return torch.compiler._is_exporting_flag
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or _mode(_PROXY) is not None
    )


def are_exchanged() -> bool:
    """Whether somebody follows the calls of PyTorch's functions, and may put others in their place."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return not all(type(mode).__module__.startswith(_OUR_MODES) for mode in modes)


#: Functions by where they are found, and their names there.
Offered = Mapping[tuple[Any, str], Any]


def offered(names: Iterable[str]) -> Offered:
    """What PyTorch offers under these names: functions and methods."""
    places = ((place, name) for name in names for place in (torch, torch.Tensor, F))
    return {place: found for place in places if callable(found := getattr(*place, None))}


def still(known: Offered) -> Callable[[], bool]:
    """What tells whether nobody has put others in place of these functions."""
    names: dict[Any, list[str]] = defaultdict(list)
    for place, name in known:
        names[place].append(name)
    getters = [(place, attrgetter(*names[place])) for place in names]
    kept = [(place, get, get(place)) for place, get in getters]
    return lambda: all(get(place) == found for place, get, found in kept)


def is_followed() -> bool:
    """Whether what runs is compiled, or :func:`is_transformed`."""
    return torch.compiler.is_compiling() or is_transformed()


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody else sees, and may change, what goes in or out."""
    return any(vars(module)[name] for name in _HOOKS)


def are_all_watched() -> bool:
    """Whether somebody else has set hooks on all modules; those of this package change nothing."""
    hooks = chain.from_iterable(each.values() for each in _GLOBAL_HOOKS)
    return not all(getattr(hook, "__module__", "").startswith("tilefit.") for hook in hooks)


def is_watched_within(module: nn.Module) -> bool:
    """Whether somebody else sees what passes between a module's parts: hooks, or the compiler."""
    parts = (part for part in module.modules() if part is not module)
    return are_all_watched() or any(has_hooks(part) or part._compiled_call_impl is not None for part in parts)


def packing() -> Any:
    """What packs the tensors that autograd saves now (activation checkpointing), if anything does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast casts products of ``x`` to now, if it does."""
    kind = x.device.type
    if x.dtype == torch.float64:
        return None
    if kind not in _WITH_AUTOCAST and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def product_dtype(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype | None:
    """The element type of a layer's product; None where PyTorch is to compute it, or to say what is wrong.

    That is where tensors are of other classes or element types than a plain layer multiplies.
    """
    if type(x) not in PLAIN or not x.is_floating_point():
        return None
    cast = autocast_dtype(x)
    for parameter in parameters:
        if parameter is None:
            continue
        if type(parameter) not in PLAIN:
            return None
        if parameter.dtype != x.dtype and (cast is None or parameter.dtype == torch.float64):
            return None
    return cast or x.dtype
