"""Autocast is simulated as CUDA does it, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import autocast_mode

from capturing import captured, entries, names, products, rows
from tilefit.capture import autocast
from tilefit.errors import CaptureError
from tilefit.ops import BACKWARD_DATA, FORWARD, Gemm

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def _linear(features: int = 16) -> dict[str, nn.Module | nn.Parameter]:
    return {"linear": nn.Linear(features, features, bias=False)}


def _dtypes(step: Any, kind: type | str) -> list[str]:
    return [entry.op.dtype for entry in entries(step, kind, FORWARD)]


@pytest.mark.skipif(not HEADER.exists(), reason="this PyTorch came without its C++ headers")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("AT_FORALL_FP32", autocast.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FP32_BY_DTYPE),
        ("AT_FORALL_PROMOTE", autocast.PROMOTE),
    ],
)
def test_the_cast_lists_are_those_of_the_installed_pytorch(macro: str, ours: frozenset[str]) -> None:
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)\n", HEADER.read_text(encoding="utf-8"))
    assert body is not None
    assert set(re.findall(r"_\((\w+)", body[1])) == ours


def test_a_weight_is_cast_once_in_a_region_and_again_in_the_next() -> None:
    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.linear(self.linear(x))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.linear(x.float())

    step = captured(twice, rows(4, 16), parts=_linear())
    casts = [entry for entry in entries(step, "_to_copy", FORWARD) if entry.parameter == "linear.weight"]
    assert len(casts) == 2
    assert _dtypes(step, Gemm) == ["bf16"] * 3
    # The weight's copies are known as the weight.
    assert [entry.parameter for entry in entries(step, Gemm, FORWARD)] == ["linear.weight"] * 3


def test_a_region_without_a_cache_casts_every_time() -> None:
    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            return self.linear(self.linear(x))

    step = captured(twice, rows(4, 16), parts=_linear())
    assert sum(entry.parameter == "linear.weight" for entry in entries(step, "_to_copy", FORWARD)) == 2


def test_the_fp32_list_runs_in_fp32() -> None:
    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(self.linear(x), (16,)).exp()

    step = captured(norm, rows(4, 16), parts=_linear(), amp="bf16")
    assert _dtypes(step, Gemm) == ["bf16"]
    assert _dtypes(step, "native_layer_norm") == ["fp32"]
    assert _dtypes(step, "exp") == ["fp32"]


def test_sum_and_softmax_take_the_lower_precision_and_give_fp32() -> None:
    def reduce(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).softmax(-1).sum(0)

    step = captured(reduce, rows(4, 16), parts=_linear(), amp="bf16")
    (softmax,) = entries(step, "_softmax", FORWARD)
    assert [ref.dtype for ref in (*softmax.inputs, *softmax.outputs)][-1] == "fp32"
    (total,) = entries(step, "sum", FORWARD)
    assert total.outputs[0].dtype == "fp32"


def test_a_dtype_the_caller_gave_stands() -> None:
    step = captured(
        lambda self, x: self.linear(x).sum(0, dtype=torch.bfloat16), rows(4, 16), parts=_linear(), amp="bf16"
    )
    assert entries(step, "sum", FORWARD)[0].outputs[0].dtype == "bf16"


def test_mixed_operands_are_widened_where_cuda_widens_them() -> None:
    def promote(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x, self.linear(x), x)

    step = captured(promote, rows(4, 16), parts=_linear(), amp="fp16")
    assert {ref.dtype for ref in entries(step, "addcmul", FORWARD)[0].inputs} == {"fp32"}


def test_a_disabled_region_within_keeps_the_operands() -> None:
    def nested(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        with torch.autocast("cuda", enabled=False):
            x = self.linear(x.float())
        return self.linear(x)

    step = captured(nested, rows(4, 16), parts=_linear(), amp="bf16")
    assert _dtypes(step, Gemm) == ["bf16", "fp32", "bf16"]


def test_fp64_is_never_cast() -> None:
    step = captured(lambda self, x: x @ x.t(), rows(4, 16).double(), train=False, amp="bf16")
    assert _dtypes(step, Gemm) == ["fp64"]


def test_code_is_told_what_cuda_would_tell_it() -> None:
    told: list[Any] = []

    def ask(self: Any, x: torch.Tensor) -> torch.Tensor:
        told.append(
            (torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
        )
        told.append((torch.get_autocast_dtype("cuda"), torch.get_autocast_gpu_dtype()))
        with torch.autocast("cuda", enabled=False):
            told.append(torch.is_autocast_enabled())
        with torch.autocast(x.device.type, dtype=torch.float16):
            told.append(torch.get_autocast_dtype("cuda"))
        return self.linear(x)

    captured(ask, rows(4, 16), parts=_linear(), amp="bf16")
    assert told == [(True, True, False), (torch.bfloat16, torch.bfloat16), False, torch.float16]


def test_the_step_says_which_autocast_the_code_itself_entered() -> None:
    def own(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            return self.linear(x)

    step = captured(own, rows(4, 16), parts=_linear())
    assert step.settings.amp == "fp16"
    assert _dtypes(step, Gemm) == ["fp16"]


def test_a_decorator_from_where_there_is_no_cuda_works() -> None:
    with autocast.constructible():

        @torch.autocast("cuda", dtype=torch.bfloat16)
        def decorated(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    assert _dtypes(captured(decorated, rows(4, 16), parts=_linear()), Gemm) == ["bf16"]


class _Fp32Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class _AmpProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (grad @ weight).to(x.dtype), (grad.t() @ x).to(weight.dtype)


@pytest.mark.parametrize(("function", "dtype"), [(_Fp32Product, "fp32"), (_AmpProduct, "bf16")])
def test_custom_functions_run_both_ways_as_they_ask(function: Any, dtype: str) -> None:
    step = captured(
        lambda self, x: function.apply(x, self.linear.weight),
        rows(4, 16, requires_grad=True),
        parts=_linear(),
        amp="bf16",
    )
    assert [entry.op.dtype for entry in entries(step, Gemm)] == [dtype] * 3
    assert [phase for phase, *_ in products(step)] == ["forward", "backward-data", "backward-weight"]


def test_gradients_arrive_in_the_parameter_s_type() -> None:
    step = captured(lambda self, x: self.linear(x), rows(4, 16), parts=_linear(), amp="bf16")
    last = [entry for entry in step.ops if entry.phase == BACKWARD_DATA][-1]
    assert last.name == "aten._to_copy"
    assert last.outputs[0].dtype == "fp32"


def test_without_autocast_nothing_is_cast() -> None:
    assert "_to_copy" not in names(captured(lambda self, x: self.linear(x), rows(4, 16), parts=_linear()))


PATCHED = [
    *((autocast_mode.autocast, name) for name in ("__init__", "__enter__", "__exit__")),
    *((torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype")),
    *((torch, name) for name in ("is_autocast_cache_enabled", "compile")),
    (torch._C, "_is_any_autocast_enabled"),
    (torch.amp, "is_autocast_available"),
    (torch.cuda.amp.common, "amp_definitely_not_available"),
    (autocast_mode, "_cast"),
    (torch.cuda, "get_device_capability"),
    (torch.autograd, "_engine_run_backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "step"),
]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_replaced_is_put_back(fails: bool) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            if fails:
                raise ValueError("on purpose")
            return self.linear(x)

    kept = [getattr(owner, name) for owner, name in PATCHED]
    if fails:
        with pytest.raises(CaptureError, match="on purpose"):
            captured(run, rows(4, 16), parts=_linear(), optimizer="adamw")
    else:
        captured(run, rows(4, 16), parts=_linear(), optimizer="adamw")
    assert all(getattr(owner, name) is was for (owner, name), was in zip(PATCHED, kept, strict=True))
    assert not torch.is_autocast_enabled("cuda")
    assert torch.overrides._get_current_function_mode() is None


def test_cross_entropy_stays_in_half_precision_up_to_the_likelihoods() -> None:
    """As recorded on GPUs: the softmax of half-precision logits is written in half precision."""
    labels = torch.zeros(8, dtype=torch.long)
    step = captured(
        lambda self, x: F.cross_entropy(self.linear(x), labels.to(x.device)),
        rows(8, 16),
        parts={"linear": nn.Linear(16, 32)},
        amp="bf16",
    )
    losses = [(op.name, op.outputs[0].dtype) for op in step.ops if "softmax" in op.name or "nll" in op.name]
    assert losses == [
        ("aten._log_softmax", "bf16"),
        ("aten.nll_loss_forward", "fp32"),
        ("aten.nll_loss_backward", "fp32"),
        ("aten._log_softmax_backward_data", "bf16"),
    ]


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (5,)], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_by_its_parts_is_pytorch_s(
    shape: tuple[int, ...], label_smoothing: float, weighted: bool, reduction: str
) -> None:
    dim = 0 if len(shape) == 1 else 1
    logits = torch.randn(shape, dtype=torch.float64)
    labels = torch.randint(0, 5, shape[:dim] + shape[dim + 1 :])
    if labels.dim():
        labels.view(-1)[1] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    for target in (labels, torch.softmax(torch.randn_like(logits), dim)):
        expected = F.cross_entropy(
            logits, target, weight, reduction=reduction, label_smoothing=label_smoothing
        )
        number = ["none", "mean", "sum"].index(reduction)
        found = autocast.cross_entropy(logits, target, weight, number, -100, label_smoothing)
        torch.testing.assert_close(found, expected)
