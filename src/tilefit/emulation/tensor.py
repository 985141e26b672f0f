"""The tensors of the emulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar

import torch

from tilefit.emulation.value import Value

META = torch.device("meta")
CUDA = torch.device("cuda", 0)
#: Bytes to whose multiples CUDA's allocator rounds.
_ALIGNED = 512
_CONTENTS = count(1)

_TAKE_THEMSELVES_APART = frozenset(("DTensor", "AsyncCollectiveTensor", "NestedTensor"))


def takes_itself_apart(types: Iterable[type]) -> bool:
    """Whether there is a tensor among these that runs what is asked of it on its parts."""
    return any(kind.__name__ in _TAKE_THEMSELVES_APART for kind in types)


class CudaTensor(torch.Tensor):
    """A tensor on ``cuda:0`` as far as PyTorch knows: shapes and strides, and what is known of its values.

    Attributes:
        on_meta: The same tensor on ``meta``: views of one memory share theirs.
        value: What is known of its values, or None.
        entries: How many elements a sparse tensor (COO) has; None for a dense one. Its matrix on ``meta`` has
            the memory of a single element.
        compressed, coalesced, turned: It is in CSR; its elements (COO) are in order, and each there once, or
            were before it was transposed.
        rows: Numbers and values of the rows that it has, if it is sparse by rows; ``on_meta`` is the values'.
        parts: Numbers and values of the elements that the program has made it of.
    """

    __module__ = "torch"  # by which opt_einsum and autoray choose their functions

    on_meta: torch.Tensor
    value: Value | None
    entries: int | None = None
    compressed: bool = False
    coalesced: bool = True
    turned: bool = False
    rows: tuple[torch.Tensor, torch.Tensor] | None = None
    parts: tuple[torch.Tensor, torch.Tensor] | None = None

    #: Where no memory has an address yet.
    _free: ClassVar[int] = 0x7F00_0000_0000
    #: Runs an operation that has such a tensor among its arguments: ``(function, arguments, keywords)``.
    launched: ClassVar[Callable[[Any, Any, Any], Any]]
    #: Reads the values: ``(tensor, what asks)`` to a tensor on the CPU.
    read: ClassVar[Callable[[CudaTensor, str], torch.Tensor]]

    @staticmethod
    def __new__(
        cls, inner: torch.Tensor, value: Value | None = None, *, requires_grad: bool | None = None
    ) -> CudaTensor:
        """A tensor around one on ``meta``; with ``requires_grad`` a parameter of any, as who asks a parameter
        for its class makes another."""
        if requires_grad is not None:
            return torch.nn.Parameter(inner, requires_grad)  # type: ignore[return-value]
        made: CudaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            storage_offset=inner.storage_offset(),
            device=CUDA,
        )
        if inner.is_conj():
            torch._C._set_conj(made, True)
        if inner.is_neg():
            torch._C._set_neg(made, True)
        return made

    def __init__(
        self, inner: torch.Tensor, value: Value | None = None, *, requires_grad: bool | None = None
    ) -> None:
        if requires_grad is None and "on_meta" not in vars(self):  # torch.Tensor(…) may have made it
            self.on_meta, self.value = inner, value

    @classmethod
    def of_entries(
        cls, shape: torch.Size, dtype: torch.dtype, entries: int, *, compressed: bool, coalesced: bool = True
    ) -> CudaTensor:
        """A sparse tensor of a shape: in CSR, or in COO."""
        made = cls(torch.empty((), dtype=dtype, device=META).expand(shape))
        made.entries, made.compressed, made.coalesced = entries, compressed, compressed or coalesced
        return made

    @classmethod
    def of_rows(cls, shape: torch.Size, numbers: torch.Tensor, values: torch.Tensor) -> CudaTensor:
        """A tensor of a shape that is sparse by rows: int64[1, entries] and [entries, …]."""
        strides = torch.empty(shape, device=META).stride()
        made: CudaTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=values.dtype, device=CUDA
        )
        made.value = None
        made.take_rows(numbers, values)
        return made

    def take_rows(self, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Have these rows."""
        assert isinstance(values, CudaTensor)
        self.on_meta, self.entries, self.rows = values.on_meta, len(values), (numbers, values)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if takes_itself_apart(types):
            return NotImplemented  # of which this one may be a part
        return CudaTensor.launched(func, args, kwargs or {})

    # ---- sparse tensors, which PyTorch takes for dense ----------------------------------------------

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """As of any tensor."""
        return self.entries is not None

    def is_coalesced(self) -> bool:
        """As of any tensor."""
        if self.entries is None:
            return super().is_coalesced()
        return self.compressed or (self.rows is None and self.coalesced and not self.turned)

    def _nnz(self) -> int:
        return super()._nnz() if self.entries is None else self.entries

    def _indices(self) -> torch.Tensor:
        own = self.rows or self.parts
        return (own[0].flip(0) if self.turned else own[0]) if own else super()._indices()

    def _values(self) -> torch.Tensor:
        own = self.rows or self.parts
        return own[1] if own else super()._values()

    def coalesce(self) -> torch.Tensor:
        """Each row or element once: they are sorted, counted, for which the host waits, and summed."""
        if self.entries is None:
            return super().coalesce()
        if self.rows is None:
            return self if self.is_coalesced() else torch.ops.tilefit.coalesce(self)
        numbers, values = self.rows
        known, where = torch.unique(numbers[0], return_inverse=True)
        summed = values.new_empty(len(known), *values.shape[1:]).index_add_(0, where, values)
        return CudaTensor.of_rows(self.shape, known[None], summed)

    def new(self, *given: Any) -> torch.Tensor:  # type: ignore[override]
        """Of a tensor that is sparse by rows, one of other rows."""
        if self.rows is None or len(given) != 3:
            return super().new(*given)
        return CudaTensor.of_rows(torch.Size(given[2]), *given[:2])

    def sparse_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The rows that another tensor has."""
        if not isinstance(mask, CudaTensor) or mask.rows is None:
            return super().sparse_mask(mask)
        return CudaTensor.of_rows(self.shape, mask.rows[0], self.index_select(0, mask.rows[0][0]))

    # ---- what reads memory past the dispatcher ---------------------------------------------------

    def tolist(self) -> Any:
        """As of any tensor."""
        return CudaTensor.read(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor on CUDA: refused, unless forced."""
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self.detach().cpu().numpy()

    def data_ptr(self) -> int:
        """An address within memory that is no other tensor's."""
        storage: Any = self.on_meta.untyped_storage()
        if not hasattr(storage, "address"):
            storage.address = CudaTensor._free
            CudaTensor._free += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        return int(storage.address + self.on_meta.storage_offset() * self.on_meta.element_size())

    def share_memory_(self) -> CudaTensor:
        """As of any tensor on CUDA, which processes share anyway: itself."""
        return self

    def is_shared(self) -> bool:
        """As of any tensor on CUDA."""
        return True

    def known(self) -> torch.Tensor | None:
        """Its values, on the CPU; None where they are not known, or assumed."""
        value = self.value
        return None if value is None or value.state.assumed else value.tensor()

    @property
    def content(self) -> int:
        """A number for what its memory holds, another after each write; 0 for zeros."""
        storage: Any = self.on_meta.untyped_storage()
        if not hasattr(storage, "content"):
            self.wrote()
        return int(storage.content)

    def wrote(self, zeros: bool = False) -> None:
        """Its elements were written, with nothing but zeros or with what nobody knows."""
        storage: Any = self.on_meta.untyped_storage()
        if not zeros:
            storage.content = next(_CONTENTS)
        elif storage.nbytes() <= self.numel() * self.element_size():
            storage.content = 0
        elif getattr(storage, "content", -1):  # the rest of it is what it was
            storage.content = next(_CONTENTS)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage, which has a size and no memory."""
        return self.on_meta.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = CudaTensor.read(self, "print")
        return f"{value!r}".rstrip(")") + ", device='cuda:0')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        made = self.detach().clone().requires_grad_(self.requires_grad)
        others = {k: v for k, v in vars(self).items() if k not in ("on_meta", "value")}
        made.__dict__.update(others)
        if self.grad is not None:
            made.grad = self.grad.detach().clone()
        memo[id(self)] = made
        return made

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; assigning to it takes the other's place in memory."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        replace_memory(self, other)


def replace_memory(tensor: CudaTensor, other: torch.Tensor) -> None:
    """Make ``tensor`` lie where ``other`` does, with its shape.

    Raises:
        RuntimeError: the other is not on the GPU.
    """
    if not isinstance(other, CudaTensor):
        raise RuntimeError(  # noqa: TRY004 - what PyTorch raises
            "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible "
            "tensor type."
        )
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.on_meta, tensor.value = other.on_meta, other.value
