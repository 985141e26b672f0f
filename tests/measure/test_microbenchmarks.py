"""Every kind of operation builds and runs, and computes what it says: on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefit.errors import TilefitError, UsageError
from tilefit.measure import streaming
from tilefit.measure.microbenchmarks import instance
from tilefit.measure.pool import Pool
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    Attention,
    Conv,
    Conv2d,
    Gemm,
    Op,
    Recurrent,
    Streaming,
)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(torch.device("cpu"), 64 << 20)


def blas_letters(a: torch.Tensor, b: torch.Tensor) -> str:
    """The letters cuBLAS sees: row-major is N, a transposed view T; the second operand comes first."""
    return "".join("N" if operand.stride(-1) == 1 else "T" for operand in (b, a))


@pytest.mark.parametrize("layout", ["TN", "NN", "NT", "TT"])
@pytest.mark.parametrize("batch", [1, 3])
def test_products_have_the_shapes_and_layout_asked_for(
    pool: Pool, layout: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, lambda a, b, out: seen.append((a, b, out)))
    instance(Gemm(5, 7, 11, layout=layout, batch=batch), pool)()
    a, b, out = seen[0]
    assert (a.shape[-2:], b.shape[-2:], out.shape[-2:]) == ((5, 11), (11, 7), (5, 7))
    assert blas_letters(a, b) == layout
    assert a.dtype is torch.bfloat16


def test_a_slice_of_a_wider_matrix_keeps_its_leading_dimension(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append((a, b)))
    instance(Gemm(5, 7, 11, layout="TN", ld_a=33, ld_b=40), pool)()
    a, b = seen[0]
    assert a.stride() == (33, 1)
    assert b.stride() == (1, 40)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32", "fp8", "int8"])
def test_every_type_of_product_runs(pool: Pool, dtype: str) -> None:
    # Not every CPU has oneDNN's products of fp8.
    with torch.backends.mkldnn.flags(enabled=False):
        out = instance(Gemm(32, 16, 16, dtype=dtype), pool)()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (32, 16)
    assert out.float().std() > 1, "sums of 16 products of random numbers"


def test_a_bias_is_added(pool: Pool) -> None:
    out = instance(Gemm(32, 16, 16, bias=True), pool)()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (32, 16)


@pytest.mark.parametrize("op", [Gemm(32, 16, 16, "fp8", "NN"), Gemm(32, 16, 16, "fp8", batch=2)])
def test_products_that_pytorch_lacks_say_so(pool: Pool, op: Gemm) -> None:
    with pytest.raises(UsageError, match="layout TN"):
        instance(op, pool)


@pytest.mark.parametrize("dtype", ["tf32", "fp32"])
def test_tf32_is_set_as_asked(pool: Pool, dtype: str) -> None:
    instance(Gemm(4, 4, 4, dtype), pool)
    assert torch.backends.cuda.matmul.allow_tf32 is (dtype == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (dtype == "tf32")


CONVS = [
    Conv2d(2, 8, 16, 9, 3, 2, 1, dtype="fp32"),
    Conv2d(2, 8, 8, 9, 3, 1, 1, groups=8, dtype="fp32", channels_last=True),
    Conv2d(2, 8, 16, 9, 3, 1, 2, 2, groups=4, dtype="fp32"),
    Conv(2, 4, 8, (20,), (5,), (2,), (0,), (1,), dtype="fp32"),
    Conv(2, 4, 8, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), dtype="fp32"),
]


@pytest.mark.parametrize("op", CONVS, ids=lambda op: op.shape)
def test_convolution_passes_return_what_they_compute(pool: Pool, op: Conv) -> None:
    out = instance(op, pool)()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (op.batch, op.out_channels, *op.output_size)
    data, weight, bias = instance(replace(op, direction=BACKWARD_DATA), pool)()  # type: ignore[misc]
    assert data.shape == (op.batch, op.in_channels, *op.input_size)
    assert weight is None
    assert bias is None
    data, weight, _ = instance(replace(op, direction=BACKWARD_WEIGHT), pool)()  # type: ignore[misc]
    assert data is None
    assert weight.numel() == op.weight_elements


ATTENTIONS = [
    Attention(2, 4, 16, 8, dtype="fp32"),
    Attention(2, 4, 16, 8, num_kv_heads=2, is_causal=True, dtype="fp32"),
    Attention(2, 4, 5, 8, kv_len=16, value_dim=12, dtype="fp32"),
    Attention(2, 4, 16, 8, mask_bytes=16 * 16 * 4, dtype="fp32"),
    Attention(2, 4, 16, 8, mask_bytes=2 * 16 * 16, dtype="fp32"),
    Attention(2, 4, 16, 8, dropout_p=0.1, dtype="fp32"),
]


@pytest.mark.parametrize("op", ATTENTIONS, ids=str)
def test_attention_runs_forward_and_backward(pool: Pool, op: Attention) -> None:
    out = instance(op, pool)()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (op.batch, op.num_heads, op.seq_len, op.value_dim)
    backward = instance(replace(op, direction=BACKWARD_DATA), pool)
    for _ in range(2):  # it is repeated
        q, k, v = backward()  # type: ignore[misc]
        assert q.shape[-1] == k.shape[-1] == op.head_dim
        assert v.shape[1] == op.num_kv_heads


def test_a_mask_of_impossible_size_is_refused(pool: Pool) -> None:
    with pytest.raises(UsageError, match="no mask of 7 bytes"):
        instance(Attention(2, 4, 16, 8, mask_bytes=7), pool)


@pytest.mark.parametrize("mode", ["LSTM", "GRU", "RNN_TANH", "RNN_RELU"])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_run_their_passes(pool: Pool, mode: str, packed: bool) -> None:
    op = Recurrent(
        mode, 6, 8, 5, 3, num_layers=2, bidirectional=True, packed=packed, dtype="fp32", direction=FORWARD
    )
    instance(op, pool)()
    data = instance(replace(op, direction=BACKWARD_DATA), pool)()
    assert [g.shape for g in data] == [(5, 3, 6)]  # type: ignore[attr-defined]
    both = instance(replace(op, direction=BACKWARD_WEIGHT), pool)()
    assert len(both) == 1 + 16  # type: ignore[arg-type]  # 2 layers x 2 directions x 4 weights


def test_layers_of_tilefit_are_measured_as_what_they_are(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Recurrent("GRU", 6, 8, 5, 3, dtype="fp32", persistent="training")
    inference = replace(training, persistent="inference")
    assert instance(training, pool)()[0].requires_grad  # type: ignore[index]
    assert not instance(inference, pool)()[0].requires_grad  # type: ignore[index]
    monkeypatch.setenv("TILEFIT_RNN", "persistent")
    instance(replace(training, persistent=""), pool)()
    with pytest.raises(TilefitError, match="not on a CUDA device"):
        instance(training, pool)()


def test_a_projected_lstm_runs(pool: Pool) -> None:
    out, _ = instance(Recurrent("LSTM", 6, 8, 5, 3, proj_size=4, dtype="fp32"), pool)()  # type: ignore[misc]
    assert out.shape == (5, 3, 4)


@pytest.mark.parametrize("name", list(streaming.RECIPES))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_streaming_microbenchmark_runs_again_and_again(
    pool: Pool, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "VOCABULARY", 100)
    call = streaming.build(name, 64, 96, dtype, pool)
    call()
    call()
    op = streaming.operation(name, 64, 96, dtype)
    assert op.moved_bytes > 0
    instance(op, pool)()


def test_names_stand_for_the_work_they_say(pool: Pool) -> None:
    run = {name: streaming.build(name, 8, 6, "fp32", pool) for name in streaming.RECIPES}
    assert run["sum_last"]().shape == (8,)  # type: ignore[attr-defined]
    assert run["sum_first"]().shape == (6,)  # type: ignore[attr-defined]
    assert run["transpose"]().shape == (6, 8)  # type: ignore[attr-defined]
    assert run["cast_to_fp32"]().dtype is torch.float32  # type: ignore[attr-defined]
    assert run["cast_from_fp32"]().dtype is torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (Streaming("pointwise", 100, 0, 400), "fill"),
        (Streaming("pointwise", 100, 400, 400), "mul_scalar"),
        (Streaming("pointwise", 100, 400, 400, flop_per_element=10), "gelu"),
        (Streaming("pointwise", 100, 800, 400), "add"),
        (Streaming("pointwise", 100, 1200, 400), "addcmul"),
        (Streaming("normalization", 100, 400, 400, inner=10), "layer_norm"),
        (Streaming("normalization", 100, 800, 400, inner=10), "layer_norm_backward"),
        (Streaming("softmax", 100, 400, 400, inner=10), "softmax"),
        (Streaming("copy", 100, 400, 400), "clone"),
        (Streaming("copy", 100, 400, 200), "cast_from_fp32"),
        (Streaming("copy", 100, 400, 400, strided=True), "transpose"),
        (Streaming("optimizer", 100, 1600, 1200), "adamw_fused"),
    ],
)
def test_an_operation_is_represented_by_one_with_its_traffic(op: Streaming, name: str) -> None:
    assert streaming.representative(op) == name


@pytest.mark.parametrize("role", ["collective", "other"])
def test_what_nothing_stands_for_is_refused(role: str) -> None:
    with pytest.raises(UsageError, match="no microbenchmark"):
        streaming.representative(Streaming(role, 100, 400, 400))


def test_an_unknown_microbenchmark_lists_the_known() -> None:
    with pytest.raises(UsageError) as error:
        streaming.operation("layernorm", 8, 8, "bf16")
    assert "layer_norm" in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op",
    [Gemm(64, 64, 64), Gemm(64, 64, 64, "fp8"), CONVS[0], ATTENTIONS[1], Recurrent("LSTM", 64, 64, 8, 8)],
    ids=lambda op: op.kind,
)
def test_operations_run_and_are_timed_on_the_gpu(op: Op) -> None:
    from tilefit.measure import timer

    device = timer.CudaDevice()
    gpu_pool = Pool(device.device, 256 << 20)
    timing = timer.measure(lambda: instance(op, gpu_pool), device)
    assert 1e-6 < timing.median_s < 1e-2


@pytest.mark.gpu
def test_a_call_that_launches_nothing_is_not_timed() -> None:
    from tilefit.measure import timer

    x = torch.randn(8, 8, device="cuda")
    with pytest.raises(TilefitError, match="launches no kernel"):
        timer.measure(lambda: x.contiguous, timer.CudaDevice())
