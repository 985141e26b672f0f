"""The tensors of the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tilefit.emulation.values import Value

META = torch.device("meta")
CUDA = torch.device("cuda", 0)


class CudaTensor(torch.Tensor):
    """A tensor on ``cuda:0`` as far as PyTorch knows: shapes and strides, and what is known of its values.

    Attributes:
        inner: The same tensor on ``meta``: views of one memory share theirs.
        value: What is known of its values, or None.
    """

    inner: torch.Tensor
    value: Value | None

    #: Runs an operation that has such a tensor among its arguments: ``(function, arguments, keywords)``.
    dispatch: Callable[[Any, Any, Any], Any]
    #: Reads the values: ``(tensor, what asks)`` to a tensor on the CPU.
    read: Callable[[CudaTensor, str], torch.Tensor]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, value: Value | None = None) -> CudaTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            storage_offset=inner.storage_offset(),
            device=CUDA,
        )

    def __init__(self, inner: torch.Tensor, value: Value | None = None) -> None:
        self.inner, self.value = inner, value

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return CudaTensor.dispatch(func, args, kwargs or {})

    # ---- what reads memory past the dispatcher ---------------------------------------------------

    def tolist(self) -> Any:
        """As of any tensor."""
        return CudaTensor.read(self, "tolist").tolist()

    def data_ptr(self) -> int:
        """An address of its own for each memory."""
        storage = self.inner.untyped_storage()
        return int(storage._cdata) + self.inner.storage_offset() * self.inner.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage, which has a size and no memory."""
        return self.inner.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
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
        others = {k: v for k, v in vars(self).items() if k not in ("inner", "value")}
        made.__dict__.update(others)
        if self.grad is not None:
            made.grad = self.grad.detach().clone()
        memo[id(self)] = made
        return made

    @property  # type: ignore[misc]
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
    tensor.inner, tensor.value = other.inner, other.value
