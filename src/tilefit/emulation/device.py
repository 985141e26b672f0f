"""The emulated device: runs on shapes what a program runs on CUDA, and answers what it reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilefit.emulation.checks import expected
from tilefit.emulation.tensor import META, CudaTensor, replace_memory, takes_itself_apart
from tilefit.emulation.value import State, Value
from tilefit.emulation.values import (
    MOST_KEPT,
    Schema,
    Values,
    is_choice,
    is_tensor,
    leaves,
    mapped,
    of_host,
)
from tilefit.errors import CaptureError
from tilefit.ops.operations import NAMED
from tilefit.ops.program import TO_GPU, Exchange

aten = torch.ops.aten


class Watch(Protocol):
    """Who looks on while the device works."""

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on ``meta`` tensors, as the GPU is told to."""

    def ran_on_host(self, func: Any, out: Any) -> None:
        """An operation on tensors of the host's alone, and what it made."""

    def waited(self, name: str, event: int = 0) -> None:
        """The host reads a value, or asks to be told when the GPU is done: with all, or with what was before
        an event."""

    def copied(self, kind: str, tensor: torch.Tensor, pinned: bool, non_blocking: bool) -> None:
        """A copy between host and GPU, of ``tensor``'s size; ``kind`` as of :mod:`tilefit.ops.program`."""

    def took(self, tensor: torch.Tensor) -> None:
        """What came from the host takes memory of the GPU's, as this tensor on ``meta``."""

    def memory(self) -> tuple[int, int, int]:
        """Bytes that tensors take now, at most since :meth:`forget_most`, and at most ever."""

    def forget_most(self) -> None:
        """What tensors take at most is looked for from now on."""

    def assumed(self, name: str, tensor: torch.Tensor, value: str) -> None:
        """A value was asked for that is not known, and answered."""

    def ordered(self, kind: str, stream: int, number: int) -> None:
        """A stream is asked for something; as of :class:`tilefit.ops.program.Ordered`."""

    def exchanged(self, exchange: Exchange, stream: int, written: list[CudaTensor]) -> None:
        """A collective on a stream writes; where and when is the watch's to know."""

    def captured(self) -> AbstractContextManager[object]:
        """Within the block a CUDA graph is captured, instead of anything running."""

    def graphed(self, callables: Any) -> Any:
        """The callables, whose calls replay CUDA graphs."""

    def replayed(self, captured: Any) -> None:
        """What :meth:`captured` returned runs."""


_ON_EITHER = frozenset(("pin_memory", "_pin_memory", "is_pinned", "_nested_tensor_from_tensor_list"))
#: Random numbers that large parameters would have taken of the CPU's generator and that are thrown away, so
#: that shuffling and splits of data are those of a real run: 0.9 s of a slow core.
MOST_DRAWN = 1 << 29
_DRAWN_AT_ONCE = 1 << 20
#: What CUDA has kernels for, though it could be run by its parts.
WHOLE = frozenset(("silu_backward", "mish_backward"))
#: Arguments that are taken as they are, found without asking for each class that others are.
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))
#: What an operation of this name does instead of being launched.
Rule = Callable[["Device", Any, Any, Any], Any]


class _Marks:
    """Memory of the host's of which something is known, until it is freed."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def add(self, tensor: torch.Tensor) -> None:
        """It is known of this tensor's memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            weakref.finalize(storage, self._storages.discard, storage._cdata).atexit = False


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which the device ``cuda`` is there.

    Args:
        watch: Told of everything that happens.
        rules: By the operation's name, what runs it where launching it on shapes is not all.
    """

    def __init__(self, watch: Watch, rules: dict[str, Rule]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.rules = rules
        self.values = Values()
        self._losses_read = 0
        self._pinned, self._unfilled = _Marks(), _Marks()
        self._drawn = 0
        CudaTensor.launched = self.run
        CudaTensor.read = self.read

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What keeps torch.compile out costs more than most operations, and nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and takes_itself_apart(types):
            return NotImplemented
        name = func._overloadpacket.__name__
        if CudaTensor in types or name in _ON_EITHER or _names_cuda(kwargs.get("device")):
            return self.run(func, args, kwargs)
        if self._leaves_unfilled(name, args, kwargs.get("generator")):
            return args[0]
        pinned = bool(kwargs.get("pin_memory"))
        out = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        self.watch.ran_on_host(func, out)
        return self.pinned(out) if pinned else out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that has tensors of the GPU's among its arguments, or makes some."""
        with torch._C.DisableTorchFunction():
            rule = self.rules.get(func._overloadpacket.__name__)
            if rule is not None and (out := rule(self, func, args, kwargs)) is not NotImplemented:
                return out
            if _is_composite(func):  # in inference mode nothing has taken it apart
                with self:
                    return func.decompose(*args, **kwargs)
            return self.launch(func, args, kwargs)

    def launch(self, func: Any, args: Any, kwargs: Any, *, from_host: bool = False) -> Any:
        """Run an operation on shapes, and carry the values that are known.

        Args:
            func, args, kwargs: The operation.
            from_host: It may read tensors of the host's, as copies do.

        Raises:
            RuntimeError: it mixes tensors of host and GPU, which CUDA refuses.
        """
        inputs: list[Any] = []

        def inner(leaf: Any) -> Any:
            if type(leaf) in _PLAIN:
                return leaf
            if not isinstance(leaf, torch.Tensor):
                return _of_meta(leaf)
            inputs.append(leaf)
            if isinstance(leaf, CudaTensor):
                if leaf.entries is not None:
                    raise not_dense(f"{func.name().partition('::')[2]} of a sparse tensor")
                return leaf.on_meta
            if leaf.dim() and not from_host:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and cpu! (in {func})"
                )
            return leaf.to(META)

        shapes, keywords = mapped((args, kwargs), inner)
        keywords.pop("pin_memory", None)
        out = self.watch.launch(func, shapes, keywords)
        made = [leaf for leaf in leaves(out) if is_tensor(leaf)]
        values = iter(self.values.through(func, args, kwargs, inputs, made))
        outer = {id(each.on_meta): each for each in inputs if isinstance(each, CudaTensor)}

        def wrap(leaf: Any) -> Any:
            if not is_tensor(leaf):
                return leaf
            value = next(values)
            same = outer.get(id(leaf), leaf if leaf.device != META else None)
            return CudaTensor(leaf, value) if same is None else same

        wrapped = mapped(out, wrap)
        clears, schema = _clears(func, args), Schema.of(func)
        made_anew = () if schema.writes or not clears else (wrapped,)
        for written in (*schema.written(args, kwargs), *made_anew):
            if isinstance(written, CudaTensor):
                written.wrote(zeros=clears)
                _follow(written)
        return wrapped

    # ---- the host's memory -----------------------------------------------------------------------

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, whose memory is taken for page-locked from now on."""
        self._pinned.add(tensor)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host's is page-locked."""
        return not isinstance(tensor, CudaTensor) and tensor in self._pinned

    def _leaves_unfilled(self, name: str, args: Any, generator: torch.Generator | None) -> bool:
        """Whether a large parameter is given random numbers: nobody looks, and its memory is not touched."""
        if name not in NAMED["known"]["initialises"] or not isinstance(args[0], torch.nn.Parameter):
            return False
        if name in ("normal_", "uniform_") and args[0].numel() > MOST_KEPT:
            self._unfilled.add(args[0])
            self._draw(args[0], generator, in_sixteens=name == "normal_")
        return args[0] in self._unfilled

    def _draw(self, tensor: torch.Tensor, generator: torch.Generator | None, in_sixteens: bool) -> None:
        """The generator goes on as if the tensor had been filled: a word a number, two for fp64; normal
        numbers are made sixteen at a time, the last sixteen again (``normal_fill`` of PyTorch's kernels)."""
        count = tensor.numel() + 16 * (in_sixteens and tensor.numel() % 16 > 0)
        count *= 1 + (tensor.dtype == torch.float64)
        if self._drawn + count > MOST_DRAWN or tensor.device.type != "cpu":
            return
        self._drawn += count
        words = torch.empty(_DRAWN_AT_ONCE, dtype=torch.int32)
        for start in range(0, count, _DRAWN_AT_ONCE):
            words[: count - start].random_(generator=generator)

    def copied(self, kind: str, tensor: torch.Tensor, non_blocking: bool) -> None:
        """A copy is made; one to the host that is not to block goes into pinned memory of its own."""
        pinned = self.is_pinned(tensor) if kind == TO_GPU else non_blocking
        if tensor.numel():
            self.watch.copied(kind, tensor, pinned, non_blocking)

    # ---- values ----------------------------------------------------------------------------------

    def read(self, tensor: CudaTensor, name: str) -> torch.Tensor:
        """What a tensor holds, as the host is told: it waits, and where nobody knows it is an assumption."""
        self.watch.waited(name)
        return self.told(tensor, name)

    def told(self, tensor: CudaTensor, name: str) -> torch.Tensor:
        """What a tensor holds, or what is assumed of it."""
        value = tensor.value
        known = value.tensor() if value is not None else None
        if known is None:
            known = self._assumed(tensor)
            if is_choice(tensor.dtype):  # the same answer next time
                tensor.value = Value(known)
                tensor.value.state.assumed = True
        if value is None or value.state.assumed or value.state.lost:
            if tensor.dtype == torch.bool and not tensor.dim() and (wanted := expected()) is not None:
                known = torch.tensor(wanted)
                tensor.value = Value(known, State(assumed=True))
            self.watch.assumed(name, tensor, _described(known))
        return known.clone()

    def _assumed(self, tensor: CudaTensor) -> torch.Tensor:
        if not tensor.dim() and tensor.dtype.is_floating_point:
            # A loss, most likely: it falls.
            self._losses_read += 1
            return torch.tensor(0.999**self._losses_read, dtype=tensor.dtype)
        if tensor.dtype == torch.bool and not tensor.dim():
            return torch.tensor(False)
        return self.values.stand_in(tensor.shape, tensor.dtype, torch.rand).contiguous()

    def sparse_to_gpu(self, tensor: torch.Tensor, dtype: torch.dtype, non_blocking: bool) -> CudaTensor:
        """A sparse matrix of the host's on the GPU.

        Raises:
            CaptureError: it is of another layout than COO and CSR.
        """
        parts = _PARTS.get(tensor.layout)
        if parts is None:
            raise not_dense(f"a tensor of layout {tensor.layout}")
        for part in parts:
            self.copied(TO_GPU, getattr(tensor, part)(), non_blocking)
        compressed = tensor.layout != torch.sparse_coo
        coalesced = compressed or tensor.is_coalesced()
        entries = tensor._nnz()
        return CudaTensor.of_entries(tensor.shape, dtype, entries, compressed=compressed, coalesced=coalesced)

    def to_gpu(self, tensor: torch.Tensor, like: torch.Tensor) -> CudaTensor:
        """A tensor of the host's on the GPU, laid out as ``like`` on ``meta``."""
        self.watch.took(like)
        return CudaTensor(like, of_host(tensor))


#: What a sparse matrix is made of.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}


def not_dense(what: str) -> CaptureError:
    """What of sparse tensors is not known."""
    return CaptureError(
        f"{what} is not known of the emulated GPU, which only multiplies sparse matrices (COO, CSR)",
        hint="Run the program on a GPU: tilefit profile.",
    )


def nested(layout: torch.layout) -> CaptureError:
    """What of nested tensors is not known."""
    what = "padding a nested tensor" if layout == torch.jagged else "a nested tensor"
    return CaptureError(
        f"{what} of layout {layout} is not known of the emulated GPU",
        hint="Pad it, with a mask, or run the program on a GPU: tilefit profile.",
    )


def _names_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _of_meta(leaf: Any) -> Any:
    """What an argument that is no tensor is on ``meta``."""
    if isinstance(leaf, torch.device):
        return META if leaf.type == "cuda" else leaf
    return None if isinstance(leaf, torch.Generator) else leaf


@cache
def _is_composite(func: Any) -> bool:
    has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return has_parts and func._overloadpacket.__name__ not in WHOLE


def _clears(func: Any, args: Any) -> bool:
    """Whether an operation leaves nothing but zeros."""
    name = func._overloadpacket.__name__
    if name in NAMED["known"]["clears"]:
        return True
    if name not in NAMED["known"]["clears_by_zero"] or len(args) < 2:
        return False
    by = args[1]
    if isinstance(by, torch.Tensor):
        return not isinstance(by, CudaTensor) and not by.dim() and not by.item()
    return isinstance(by, int | float) and not by


def _follow(tensor: CudaTensor) -> None:
    """Give a tensor that was changed in place the shape that it has on ``meta``."""
    inner = tensor.on_meta
    if (
        tensor.shape != inner.shape
        or tensor.stride() != inner.stride()
        or tensor.storage_offset() != inner.storage_offset()
    ):
        replace_memory(tensor, CudaTensor(inner, None))


def _described(value: torch.Tensor) -> str:
    if value.numel() == 1:
        return f"{value.item():.4g}" if value.dtype.is_floating_point else str(value.item())
    if value.dtype == torch.bool:
        return f"{int(value.sum())} of {value.numel()} true"
    if is_choice(value.dtype):
        return f"{value.min()} to {value.max()}" if value.numel() else "none"
    return "random numbers"
