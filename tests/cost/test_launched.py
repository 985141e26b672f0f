"""How many kernels an operation launches: as an H200 ran them (``program_ops_h200.jsonl.gz`` and
``launch_counts_h200.jsonl.gz`` of ``benchmarks/results``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit import gpus
from tilefit.cost.launch import launched
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    Attention,
    Conv2d,
    Gemm,
    Op,
    Recurrent,
    Site,
    StepOp,
    Streaming,
    TensorRef,
)

H200 = gpus.get("h200")


def _stream(function: str, role: str = "normalization", dtype: str = "fp32", kernels: int = 1) -> Streaming:
    return Streaming(role, 1 << 16, 1 << 18, 1 << 18, dtype, kernels=kernels, function=function)


def _conv(direction: str, channels: int = 64, **fields: bool) -> Op:
    return Conv2d(
        32, channels, 128, (28, 28), (3, 3), (1, 1), (1, 1), dtype="bf16", direction=direction, **fields
    )


@pytest.mark.parametrize(
    ("op", "kernels"),
    [
        (_stream("native_layer_norm_backward"), 2),
        (_stream("native_group_norm_backward"), 5),
        (_stream("native_batch_norm", dtype="bf16"), 3),
        (_stream("native_batch_norm"), 1),
        (_stream("embedding_dense_backward", "embedding", kernels=30), 21),
        (_stream("add", "pointwise"), 1),
        (_stream("_softmax_backward_data", "softmax"), 2),
        # A weight's gradient over many rows is split; over few it is not.
        (Gemm(768, 768, 12288, "bf16", "NT"), 2),
        (Gemm(768, 768, 1216, "bf16", "NT"), 1),
        # A bias is copied where there is one column; in fp32 few features are added up and biased apart.
        (Gemm(128, 1, 256, "fp32", "TN", bias=True), 2),
        (Gemm(256, 256, 8, "fp32", "TN", bias=True), 3),
        (Gemm(128, 400, 784, "fp32", "TN", bias=True), 3),
        (Gemm(2048, 64, 256, "fp32", "TN", bias=True), 1),
        (Gemm(256, 256, 4, "fp32", "NN"), 2),
        (_conv(FORWARD), 4),
        (_conv(FORWARD, channels_last=True), 1),
        (_conv(BACKWARD_WEIGHT), 5),
        # An image of one pixel is the same in NCHW and NHWC, and so are its filters.
        (Conv2d(128, 512, 512, (1, 1), (3, 3), (1, 1), (1, 1)), 2),
        (Conv2d(128, 256, 512, (2, 2), (3, 3), (2, 2), (1, 1)), 3),
        (Conv2d(128, 32, 48, (14, 14), (3, 3), (1, 1), (1, 1), direction=BACKWARD_WEIGHT), 5),
        (Conv2d(1, 96, 128, (8, 8), (3, 3), (1, 1), (0, 0), direction=BACKWARD_WEIGHT), 4),
        # In TF32 a gradient of the input begins with zeros, one of a filter on few channels is a kernel.
        (Conv2d(2, 48, 48, (7, 7), (3, 3), (1, 1), (0, 0), dtype="tf32"), 3),
        (Conv2d(2, 48, 48, (7, 7), (3, 3), (1, 1), (0, 0), dtype="tf32", direction=BACKWARD_DATA), 2),
        (Conv2d(128, 3, 64, (32, 32), (4, 4), (2, 2), (1, 1), dtype="tf32", direction=BACKWARD_WEIGHT), 1),
        # In NHWC channels are padded that make no whole accesses, but for those of a first layer.
        (Conv2d(2, 20, 128, (56, 56), (3, 3), (1, 1), (0, 0), channels_last=True), 3),
        (Conv2d(64, 3, 16, (112, 112), (7, 7), (1, 1), (0, 0), channels_last=True), 1),
        (Conv2d(64, 64, 3, (8, 8), (3, 3), (2, 2), (0, 0), channels_last=True), 3),
        (Conv2d(8, 512, 128, (8, 8), (3, 3), (1, 1), (1, 1), dtype="fp32", channels_last=True), 4),
        # Pixels that make whole accesses are multiplied as they lie; the weights' gradients of the images are
        # summed.
        (Conv2d(64, 256, 1024, (14, 14), (1, 1), (1, 1), (0, 0), dtype="fp16"), 1),
        (Conv2d(64, 96, 24, (28, 28), (1, 1), (1, 1), (0, 0), dtype="fp16", direction=BACKWARD_WEIGHT), 2),
        (Conv2d(64, 576, 144, (1, 1), (1, 1), (1, 1), (0, 0), dtype="fp16", direction=BACKWARD_WEIGHT), 1),
        # Three channels are converted where the image is large.
        (Conv2d(64, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3), dtype="fp16"), 4),
        (Conv2d(128, 3, 64, (32, 32), (4, 4), (2, 2), (1, 1), dtype="tf32"), 1),
        (Attention(8, 12, 128, 64), 1),
    ],
)
def test_an_operation_launches_as_many_kernels_as_on_a_gpu(op: Op, kernels: int) -> None:
    assert launched(StepOp(op, FORWARD, Site("", "")), H200) == kernels


def test_operands_say_of_more_kernels() -> None:
    def refs(*dtypes: str) -> tuple[TensorRef, ...]:
        return tuple(TensorRef(i, (64, 128), dtype) for i, dtype in enumerate(dtypes))

    masked = StepOp(Attention(8, 12, 128, 64, mask_bytes=99, dropout_p=0.1), FORWARD, Site("", ""))
    assert launched(masked, H200) == 2  # the state of dropout's random numbers
    bools = StepOp(masked.op, FORWARD, masked.site, inputs=refs("bf16", "bf16", "bf16", "bool"))
    assert launched(bools, H200) == 5  # and the mask as numbers
    biased = StepOp(_conv(FORWARD), FORWARD, masked.site, inputs=refs("bf16", "bf16", "bf16"))
    assert launched(biased, H200) == 5
    added = _stream("index_put", "indexing", kernels=16)
    by_two = StepOp(added, FORWARD, masked.site, inputs=refs("fp32", "int64", "int64", "fp32"))
    assert launched(by_two, H200) == 24


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        # Words: two layers with dropout, over some of the 35 steps at once, and one.
        (Recurrent("LSTM", 512, 512, 35, 40, 2, dtype="tf32", dropout=True), 156, 179),
        (Recurrent("GRU", 512, 512, 35, 40, dtype="tf32"), 71, 77),
        (Recurrent("LSTM", 64, 200, 28, 1, bidirectional=True, dtype="bf16"), 115, 126),
        (Recurrent("LSTM", 28, 256, 50, 1, 3, bidirectional=True, dtype="tf32", dropout=True), 614, 644),
        # The small-hidden algorithm does all steps in one kernel.
        (Recurrent("LSTM", 64, 51, 1, 4, 3, bidirectional=True, dtype="fp16"), 12, 42),
        (Recurrent("GRU", 400, 64, 16, 16, dtype="fp16"), 3, 9),
        # Packed: as many products for the weights' gradients as there are sizes of the mini-batch.
        (Recurrent("LSTM", 512, 400, 50, 64, 2, packed=True, rows=2413, dtype="tf32"), 214, 285),
    ],
)
def test_a_recurrent_layer_launches_as_many_kernels_as_on_a_gpu(
    layer: Recurrent, forward: int, backward: int
) -> None:
    def kernels(direction: str) -> int:
        return launched(StepOp(replace(layer, direction=direction), FORWARD, Site("", "")), H200)

    assert kernels(FORWARD) == pytest.approx(forward, rel=0.02)
    assert kernels(BACKWARD_DATA) + kernels(BACKWARD_WEIGHT) == pytest.approx(backward, rel=0.02)


def test_statistics_of_rows_are_not_cudnn_s() -> None:
    of_rows = TensorRef(0, (64, 64), "fp32")
    for function, kernels in (("native_batch_norm", 3), ("native_batch_norm_backward", 2)):
        assert launched(StepOp(_stream(function), FORWARD, Site("", ""), inputs=(of_rows,)), H200) == kernels
