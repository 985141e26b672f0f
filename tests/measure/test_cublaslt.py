"""The binding to cuBLASLt, against a stand-in that multiplies column-major matrices as the library would."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_void_p
from typing import Any

import pytest
import torch

from tilefit.errors import TilefitError, UsageError
from tilefit.measure import cublaslt
from tilefit.ops import Gemm

DATA_TYPES = {14: torch.bfloat16, 2: torch.float16, 0: torch.float32}


class Library:
    """What the binding needs of libcublasLt, on the CPU; remembers what is alive."""

    def __init__(self, proposals: int = 3) -> None:
        self.proposals = proposals
        self.objects: dict[int, dict[Any, Any]] = {}
        self.status = 0

    def _create(self, pointer: Any, **facts: Any) -> int:
        number = len(self.objects) + 1
        self.objects[number] = facts
        pointer._obj.value = number
        return 0

    def _of(self, handle: c_void_p) -> dict[Any, Any]:
        assert handle.value is not None
        return self.objects[handle.value]

    def cublasLtCreate(self, handle: Any) -> int:  # noqa: N802 - the library's names
        return self._create(handle)

    def cublasLtMatmulDescCreate(self, pointer: Any, compute: int, scale: int) -> int:  # noqa: N802
        return self._create(pointer, compute=compute, scale=scale)

    def cublasLtMatmulDescSetAttribute(  # noqa: N802
        self, descriptor: c_void_p, name: int, value: Any, size: Any
    ) -> int:
        assert (size.value, type(value._obj)) == (4, c_int32)
        self._of(descriptor)[name] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(  # noqa: N802
        self, pointer: Any, data_type: int, rows: Any, columns: Any, leading: Any
    ) -> int:
        facts = {"type": data_type, "rows": rows.value, "columns": columns.value, "leading": leading.value}
        return self._create(pointer, **facts)

    def cublasLtMatmulPreferenceCreate(self, pointer: Any) -> int:  # noqa: N802
        return self._create(pointer)

    def cublasLtMatmulPreferenceSetAttribute(  # noqa: N802
        self, preference: c_void_p, name: int, value: Any, size: Any
    ) -> int:
        self._of(preference)[name] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(  # noqa: N802
        self, handle: Any, descriptor: Any, a: Any, b: Any, c: Any, d: Any, preference: c_void_p,
        wanted: int, results: Any, count: Any,
    ) -> int:  # fmt: skip
        assert self._of(preference)[1] == 1024
        if self.status:
            return self.status
        count._obj.value = min(self.proposals, wanted)
        for index in range(count._obj.value):
            results[index].algorithm.data[0] = 100 + index
            results[index].state = 15 if index == 1 else 0
        return 0

    def cublasLtMatmul(  # noqa: N802
        self, handle: Any, descriptor: c_void_p, alpha: Any, a: c_void_p, a_layout: c_void_p, b: c_void_p,
        b_layout: c_void_p, beta: Any, c: c_void_p, c_layout: c_void_p, d: c_void_p, d_layout: c_void_p,
        algorithm: Any, workspace: c_void_p, size: Any, stream: c_void_p,
    ) -> int:  # fmt: skip
        assert (c.value, c_layout.value, stream.value) == (d.value, d_layout.value, 7)
        self.used = algorithm._obj.data[0]
        left = self._read(a, a_layout, transposed=self._of(descriptor)[3])
        right = self._read(b, b_layout, transposed=self._of(descriptor)[4])
        product = (left.float() @ right.float()) * alpha._obj.value
        out = self._read(d, d_layout)
        out.copy_(product + beta._obj.value * out if beta._obj.value else product)
        return 0

    def _read(self, pointer: c_void_p, layout: c_void_p, *, transposed: int = 0) -> torch.Tensor:
        """A view of column-major memory."""
        facts = self._of(layout)
        dtype = DATA_TYPES[facts["type"]]
        size = facts["leading"] * facts["columns"]
        memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer.value or 0)
        matrix = torch.frombuffer(memory, dtype=dtype).view(facts["columns"], facts["leading"])
        matrix = matrix[:, : facts["rows"]].t()
        return matrix.t() if transposed else matrix

    def __getattr__(self, name: str) -> Any:
        assert name.endswith("Destroy"), name

        def destroy(handle: c_void_p) -> int:
            del self.objects[handle.value or 0]
            return 0

        return destroy


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda: c_void_p(1))
    monkeypatch.setattr(cublaslt, "_stream", lambda device: c_void_p(7))
    return library


def workspace() -> torch.Tensor:
    return torch.empty(1024, dtype=torch.uint8)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT", "TT"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "tf32"])
def test_row_major_products_are_handed_over_in_the_library_s_order(
    library: Library, layout: str, dtype: str
) -> None:
    gemm = Gemm(3, 5, 7, dtype, layout)
    storage = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    a, b = torch.randn(3, 7).to(storage), torch.randn(7, 5).to(storage)
    stored_a = a.t().contiguous().t() if layout[1] == "T" else a
    stored_b = b.t().contiguous().t() if layout[0] == "T" else b
    out = torch.full((3, 5), float("nan"), dtype=storage)
    matmul = cublaslt.Matmul(gemm, 8, workspace())
    matmul.call(1, stored_a, stored_b, out)()
    assert (out.float() - a.float() @ b.float()).norm() < 0.02 * out.float().norm()
    assert library.used == 102, "the second of the proposals that are usable"
    assert library.objects[1]["compute"] == (77 if dtype == "tf32" else 68)


def test_proposals_that_cannot_run_are_dropped(library: Library) -> None:
    assert cublaslt.Matmul(Gemm(3, 5, 7), 8, workspace()).algorithms == 2
    assert cublaslt.Matmul(Gemm(3, 5, 7), 1, workspace()).algorithms == 1


def test_no_proposal_is_none_and_another_failure_is_told(library: Library) -> None:
    library.status = 15
    assert cublaslt.Matmul(Gemm(3, 5, 7), 8, workspace()).algorithms == 0
    library.status = 7
    with pytest.raises(TilefitError, match="failed with status 7"):
        cublaslt.Matmul(Gemm(3, 5, 7), 8, workspace())


def test_descriptions_are_freed(library: Library) -> None:
    matmul = cublaslt.Matmul(Gemm(3, 5, 7), 8, workspace())
    call = matmul.call(
        0, torch.zeros(3, 7).bfloat16(), torch.zeros(5, 7).bfloat16().t(), torch.zeros(3, 5).bfloat16()
    )
    del matmul
    call()  # what is still to be called keeps them
    del call
    assert library.objects == {}


@pytest.mark.parametrize(
    "gemm",
    [Gemm(8, 8, 8, batch=2), Gemm(16, 16, 16, "fp8"), Gemm(8, 8, 8, ld_a=16), Gemm(8, 8, 8, bias=True)],
)
def test_other_products_are_refused(gemm: Gemm) -> None:
    with pytest.raises(UsageError, match="no cuBLASLt call"):
        cublaslt.Matmul(gemm, 8, workspace())


def test_structures_are_as_large_as_the_header_says() -> None:
    assert ctypes.sizeof(cublaslt._Algorithm) == 64
    assert ctypes.sizeof(cublaslt._Heuristic) == 64 + 8 + 4 + 4 + 16
    assert (ctypes.sizeof(c_int), ctypes.sizeof(c_float)) == (4, 4)


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    cublaslt._library.cache_clear()
    with pytest.raises(TilefitError, match="cuBLASLt cannot be loaded"):
        cublaslt.Matmul(Gemm(8, 8, 8), 8, workspace())
    cublaslt._library.cache_clear()
