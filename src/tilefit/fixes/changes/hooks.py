"""Who else sees what goes into modules and what comes out of them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

#: Where a module keeps its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody else sees, and may change, what goes in or out."""
    return any(vars(module)[name] for name in HOOKS)


def are_all_watched() -> bool:
    """Whether somebody else has set hooks on all modules."""
    return any(_GLOBAL_HOOKS) and any(map(_is_foreign, _GLOBAL_HOOKS))


def is_watched_within(module: nn.Module) -> bool:
    """Whether somebody else sees what passes between a module's parts: hooks, or the compiler."""
    parts = (part for part in module.modules() if part is not module)
    return are_all_watched() or any(has_hooks(part) or part._compiled_call_impl is not None for part in parts)


def _is_foreign(hooks: dict[Any, Any]) -> bool:
    """Whether there are hooks on all modules that are not those of this package, which change nothing."""
    return any(not getattr(hook, "__module__", "").startswith("tilefit.") for hook in hooks.values())
