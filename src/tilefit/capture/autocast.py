"""CUDA's autocast, simulated: which operations cast their inputs, and to what.

On a machine without CUDA ``torch.autocast("cuda")`` silently does nothing, and ``autocast("meta")`` is
refused, so a captured step would show fp32 products that a GPU never runs. Here autocast is a state of our
own, entered by ``--amp`` or by the code's own ``torch.autocast("cuda")``, applied by the cast lists of
PyTorch's ``ATen/autocast_mode.h`` (checked against the installed header by the tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.amp import autocast_mode
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import DefaultDeviceType

from tilefit.ops.operations import NAMED

_LISTS = NAMED["autocast"]
#: Operations whose inputs are cast: to autocast's element type, to fp32, to fp32 by way of their ``dtype``,
#: and to the widest of them.
LOWER_PRECISION, FP32_BY_DTYPE, PROMOTE = (
    _LISTS[name] for name in ("lower_precision", "fp32_by_dtype", "promote")
)
FP32 = _LISTS["fp32"] | {
    name
    for name in _LISTS["fp32_later"]
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
}

#: Composite functions of C++ that hold an operation of the lists above; Python sees only the outer name.
_COMPOSITES = {"nll_loss_nd": "fp32", "__matmul__": "lower", "__pow__": "fp32"}

#: The numbers of a loss's reductions in PyTorch's functions.
_NONE, _MEAN = 0, 1


class AutocastState:
    """The autocast regions that are open, and the weights cast within the outermost of them."""

    def __init__(self) -> None:
        self._regions: list[tuple[bool, torch.dtype, bool]] = []
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Element type of the last region that was enabled; None if there was none.
        self.seen: torch.dtype | None = None

    @property
    def enabled(self) -> bool:
        """Whether the innermost region casts."""
        return bool(self._regions) and self._regions[-1][0]

    @property
    def dtype(self) -> torch.dtype:
        """What the innermost region casts to."""
        return self._regions[-1][1] if self._regions else torch.float16

    @property
    def cache_enabled(self) -> bool:
        """Whether the innermost region keeps what it cast."""
        return self._regions[-1][2] if self._regions else True

    def restart(self) -> None:
        """Forget what was seen; a region that is open is seen."""
        self.seen = next((dtype for enabled, dtype, _ in self._regions[::-1] if enabled), None)

    def enter(self, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
        """A region begins."""
        self._regions.append((enabled, dtype, cache))
        if enabled:
            self.seen = dtype

    def leave(self) -> None:
        """The innermost region ends, and with the outermost one what was cast."""
        self._regions.pop()
        if not self._regions:
            self._casts.clear()

    def cast_arguments(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of ``name`` as autocast would pass them on."""
        policy = _COMPOSITES.get(name)
        if policy == "lower" or name in LOWER_PRECISION:
            return self.cast(args, self.dtype), self.cast(kwargs, self.dtype)
        if policy == "fp32" or name in FP32:
            return self.cast(args, torch.float32), self.cast(kwargs, torch.float32)
        if name in FP32_BY_DTYPE and kwargs.get("dtype") is None:
            first = args[0] if args else next(iter(kwargs.values()), None)
            given = any(isinstance(arg, torch.dtype) for arg in args)
            if _eligible(first) and not given:
                return args, {**kwargs, "dtype": torch.float32}
        if name in PROMOTE:
            tensors = [a for a in (*args, *kwargs.values()) if _eligible(a)]
            if any(t.dtype == torch.float32 for t in tensors):
                return self.cast(args, torch.float32), self.cast(kwargs, torch.float32)
        return args, kwargs

    def cast(self, tree: Any, dtype: torch.dtype) -> Any:
        """Every eligible floating-point tensor of a tree in another element type."""
        return tree_map(lambda leaf: self._cast_tensor(leaf, dtype) if _eligible(leaf) else leaf, tree)

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == dtype:
            return tensor
        # The cache holds lower-precision copies of fp32 leaves (weights) for the outermost region.
        cacheable = (
            self.cache_enabled
            and dtype == self.dtype
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not cacheable:
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` by the functions that it is made of, which autocast treats one by one.

    It asks for the logarithm of the softmax in the element type of the logits, so autocast leaves that in
    half precision, and casts what comes of it to fp32 for the likelihoods alone: kernels recorded on an H100
    and an H200 show it (``cunn_SoftMaxForward<8, BFloat16, float, BFloat16>``).

    Args:
        logits, target, weight, ignore_index, label_smoothing: As in ``F.cross_entropy``.
        reduction: None, the mean or the sum, by PyTorch's numbers 0 to 2.
    """
    dim = 0 if logits.dim() == 1 else 1
    classes = logits.shape[dim]
    scores = functional.log_softmax(logits, dim, dtype=logits.dtype)
    if target.shape == logits.shape:
        likely = target * (1 - label_smoothing) + label_smoothing / classes if label_smoothing else target
        return _reduced(-(_weighted(scores, weight, dim) * likely).sum(dim), reduction)
    # Its signature says that the reduction is a string.
    loss = torch._C._nn.nll_loss_nd(scores, target, weight, reduction, ignore_index)  # type: ignore[arg-type]
    if not label_smoothing:
        return loss
    counts = target != ignore_index
    smooth = -_weighted(scores, weight, dim).sum(dim) * counts
    if reduction == _MEAN:
        labels = counts if weight is None else weight[target * counts] * counts
        smooth = smooth.sum() / labels.sum()
    else:
        smooth = _reduced(smooth, reduction)
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / classes)


def _weighted(scores: torch.Tensor, weight: torch.Tensor | None, dim: int) -> torch.Tensor:
    return scores if weight is None else (scores.movedim(dim, -1) * weight).movedim(-1, dim)


def _reduced(losses: torch.Tensor, reduction: int) -> torch.Tensor:
    return losses if reduction == _NONE else losses.mean() if reduction == _MEAN else losses.sum()


_DEVICES = ("cuda", "meta")


@contextmanager
def constructible() -> Iterator[None]:
    """Within the block, autocast regions and gradient scalers are made as where there is CUDA.

    PyTorch turns off those that are made where there is none, and a decorator or a training loop makes them
    long before the step runs.
    """
    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
    ):
        yield


def _regions(state: AutocastState) -> dict[str, Any]:
    """The methods of ``torch.autocast``, for CUDA on a state of our own."""
    kept = {name: getattr(autocast_mode.autocast, name) for name in ("__init__", "__enter__", "__exit__")}

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type not in _DEVICES:
            kept["__init__"](self, device_type, dtype, enabled, cache_enabled)
            return
        self.device = device_type
        self.fast_dtype = dtype or state.dtype
        self._enabled = enabled
        self._cache_enabled = state.cache_enabled if cache_enabled is None else cache_enabled

    def enter(self: Any) -> Any:
        if self.device not in _DEVICES:
            return kept["__enter__"](self)
        state.enter(self._enabled, self.fast_dtype, self._cache_enabled)
        return self

    def leave(self: Any, *exc: Any) -> Any:
        if self.device not in _DEVICES:
            return kept["__exit__"](self, *exc)
        state.leave()
        return False

    return {"__init__": init, "__enter__": enter, "__exit__": leave}


@contextmanager
def simulated(state: AutocastState) -> Iterator[None]:
    """Within the block, ``torch.autocast("cuda")`` and the questions about it answer from ``state``."""
    # A capture imports the compiler sooner or later, and it keeps the functions it finds: not ours.
    import torch._dynamo

    kept_cast = autocast_mode._cast
    any_enabled = torch._C._is_any_autocast_enabled
    available = torch.amp.is_autocast_available

    def simulate(question: Callable[..., Any], answer: Callable[[], Any]) -> Callable[..., Any]:
        def ask(device_type: str = "cuda") -> Any:
            return answer() if device_type in _DEVICES else question(device_type)

        return ask

    def cast_inputs(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return state.cast(value, dtype) if device_type in _DEVICES else kept_cast(value, device_type, dtype)

    with (
        constructible(),
        patch.multiple(autocast_mode.autocast, **_regions(state)),
        patch.multiple(
            torch,
            is_autocast_enabled=simulate(torch.is_autocast_enabled, lambda: state.enabled),
            get_autocast_dtype=simulate(torch.get_autocast_dtype, lambda: state.dtype),
            get_autocast_gpu_dtype=lambda: state.dtype,
            is_autocast_cache_enabled=lambda: state.cache_enabled,
        ),
        # Checkpointing asks before it opens the region of the forward pass again.
        patch.object(
            torch.amp, "is_autocast_available", lambda device: device in _DEVICES or available(device)
        ),
        # It takes this for the device where no positional argument tells.
        patch.object(DefaultDeviceType, "_default_device_type", "cuda"),
        patch.object(torch._C, "_is_any_autocast_enabled", lambda: state.enabled or any_enabled()),
        patch.multiple(autocast_mode, _cast=cast_inputs),
    ):
        yield
