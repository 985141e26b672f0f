"""The algorithms that cuBLASLt's heuristics propose for a product, and a way to run each of them.

A binding to the few functions needed of the library that PyTorch has loaded, by ctypes. Numbers and layouts
of structures are those of ``cublasLt.h`` (CUDA 12 and 13).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import torch

from tilefit.errors import TilefitError, UsageError
from tilefit.ops import Gemm

#: cudaDataType and cublasComputeType_t by element type; sums are in fp32.
_TYPES = {"bf16": (14, 68), "fp16": (2, 68), "fp32": (0, 68), "tf32": (0, 77)}
_R_32F = 0
#: cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t.
_TRANSA, _TRANSB = 3, 4
_MAX_WORKSPACE_BYTES = 1
#: cublasStatus_t.
_SUCCESS, _NOT_SUPPORTED = 0, 15
#: What NVIDIA recommends for Hopper; PyTorch's own is of this size there.
WORKSPACE_BYTES = 32 << 20


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@lru_cache(maxsize=1)
def _library() -> Any:
    """The library that this PyTorch has loaded.

    Raises:
        TilefitError: there is none: a build without CUDA.
    """
    name = f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise TilefitError(
            f"cuBLASLt cannot be loaded: {error}", hint="It comes with CUDA builds of PyTorch."
        ) from error


@lru_cache(maxsize=1)
def _handle() -> c_void_p:
    handle = c_void_p()
    _call("cublasLtCreate", byref(handle))
    return handle


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status != _SUCCESS:
        raise TilefitError(f"{function} failed with status {status}")


class Matmul:
    """A product as cuBLASLt describes it, with the algorithms proposed for it, best first.

    ``C[m, n] = A[m, k] @ B[k, n]``, all row-major, is for the column-major library the product of B by A:
    its first operand is our B, with the first letter of the layout.

    Args:
        gemm: One product (no batch), packed, of bf16, fp16, tf32 or fp32, without bias.
        most: Algorithms asked for.
        workspace: Memory that algorithms may use; those that run at once must not share it.

    Attributes:
        algorithms: How many there are.

    Raises:
        UsageError: the product is of another kind.
        TilefitError: the library refuses.
    """

    def __init__(self, gemm: Gemm, most: int, workspace: torch.Tensor) -> None:
        if gemm.batch > 1 or gemm.bias or gemm.ld_a or gemm.ld_b or gemm.dtype not in _TYPES:
            raise UsageError(f"no cuBLASLt call for {gemm.shape} {gemm.dtype}: one packed product is meant")
        self._workspace = workspace
        data_type, compute_type = _TYPES[gemm.dtype]
        self._descriptor = c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self._descriptor), compute_type, _R_32F)
        for attribute, letter in ((_TRANSA, gemm.layout[0]), (_TRANSB, gemm.layout[1])):
            value = c_int32(letter == "T")
            _call("cublasLtMatmulDescSetAttribute", self._descriptor, attribute, byref(value), c_size_t(4))
        stored = [
            (gemm.n, gemm.k) if gemm.layout[0] == "N" else (gemm.k, gemm.n),
            (gemm.k, gemm.m) if gemm.layout[1] == "N" else (gemm.m, gemm.k),
            (gemm.n, gemm.m),
        ]
        self._layouts = [_layout(data_type, rows, columns) for rows, columns in stored]
        weakref.finalize(self, _destroy, self._descriptor, self._layouts)
        self._found = self._ask(most)
        self.algorithms = len(self._found)

    def _ask(self, most: int) -> list[_Heuristic]:
        preference = c_void_p()
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        allowed = byref(c_uint64(self._workspace.nbytes)), c_size_t(8)
        _call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE_BYTES, *allowed)
        results, count = (_Heuristic * most)(), c_int()
        b, a, c = self._layouts
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            _handle(), self._descriptor, b, a, c, c, preference, most, results, byref(count)
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        if status == _NOT_SUPPORTED:
            return []
        if status != _SUCCESS:
            raise TilefitError(f"cublasLtMatmulAlgoGetHeuristic failed with status {status}")
        return [result for result in results[: count.value] if result.state == _SUCCESS]

    def call(self, index: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """A call that writes ``a @ b`` to ``out`` by one of the algorithms, on the current stream.

        The tensors are stored as the layout says; ``out`` is row-major.
        """
        one, zero = c_float(1.0), c_float(0.0)
        algorithm = self._found[index].algorithm
        layout_b, layout_a, layout_c = self._layouts

        def run() -> None:
            operands = c_void_p(b.data_ptr()), layout_b, c_void_p(a.data_ptr()), layout_a
            result = c_void_p(out.data_ptr()), layout_c
            space = c_void_p(self._workspace.data_ptr()), c_size_t(self._workspace.nbytes)
            product = byref(one), *operands, byref(zero), *result, *result, byref(algorithm)
            _call("cublasLtMatmul", _handle(), self._descriptor, *product, *space, _stream(out.device))

        return run


def _stream(device: torch.device) -> c_void_p:
    return c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _destroy(descriptor: c_void_p, layouts: list[c_void_p]) -> None:
    for layout in layouts:
        _call("cublasLtMatrixLayoutDestroy", layout)
    _call("cublasLtMatmulDescDestroy", descriptor)


def _layout(data_type: int, rows: int, columns: int) -> c_void_p:
    """A packed column-major matrix as it is stored."""
    layout = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", byref(layout), data_type, *sizes)
    return layout
