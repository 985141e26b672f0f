"""How many kernels an operation launches: as an H200 ran them (``benchmarks/results/program_ops.jsonl``)."""

from __future__ import annotations

import pytest

from tilefit import gpus
from tilefit.cost.launch import launched
from tilefit.ops import (
    BACKWARD_WEIGHT,
    FORWARD,
    Attention,
    Conv2d,
    Gemm,
    Op,
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
        # A weight's gradient over many rows is split; over few it is not.
        (Gemm(768, 768, 12288, "bf16", "NT"), 2),
        (Gemm(768, 768, 1216, "bf16", "NT"), 1),
        (_conv(FORWARD), 4),
        (_conv(FORWARD, channels_last=True), 1),
        (_conv(BACKWARD_WEIGHT), 5),
        # An image of one pixel is the same in NCHW and NHWC, and so are its filters.
        (Conv2d(128, 512, 512, (1, 1), (3, 3), (1, 1), (1, 1)), 2),
        (Conv2d(128, 256, 512, (2, 2), (3, 3), (2, 2), (1, 1)), 3),
        (Conv2d(128, 256, 512, (2, 2), (1, 1), (2, 2), (0, 0), direction=BACKWARD_WEIGHT), 3),
        (Conv2d(128, 256, 256, (2, 2), (3, 3), (1, 1), (1, 1), direction=BACKWARD_WEIGHT), 5),
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
