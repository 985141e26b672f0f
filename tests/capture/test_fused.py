"""What CUDA runs as one kernel is one operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capturing import captured, entries, names, products, rows
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Attention, Gemm, Recurrent, Step, Streaming


def _attention(*sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Step:
    q, k, v = (torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in sizes)
    return captured(lambda self, *qkv: F.scaled_dot_product_attention(*qkv, **options), q, k, v)


def _ops(step: Step, kind: type, phase: str = "") -> list[Any]:
    return [entry.op for entry in entries(step, kind, phase)]


def test_attention_is_one_kernel_forward_and_one_backward() -> None:
    step = _attention((2, 4, 32, 16), (2, 4, 48, 16), (2, 4, 48, 16))
    forward, backward = _ops(step, Attention)
    assert (forward.batch, forward.num_heads, forward.seq_len, forward.kv_len) == (2, 4, 32, 48)
    assert (forward.head_dim, forward.dtype, forward.is_causal, forward.mask_bytes) == (16, "bf16", False, 0)
    assert backward.direction == BACKWARD_DATA
    assert not _ops(step, Gemm)


def test_attention_with_shared_keys_a_causal_mask_and_dropout() -> None:
    step = _attention(
        (2, 8, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16), is_causal=True, enable_gqa=True, dropout_p=0.1
    )
    (op, _) = _ops(step, Attention)
    assert (op.num_heads, op.num_kv_heads, op.is_causal, op.dropout_p) == (8, 2, True, 0.1)


def test_a_mask_costs_the_bytes_behind_it() -> None:
    mask = torch.empty(1, 1, 32, 32, dtype=torch.bool, device="meta").expand(2, 4, 32, 32)
    (op, _) = _ops(_attention(*[(2, 4, 32, 16)] * 3, attn_mask=mask), Attention)
    assert op.mask_bytes == 32 * 32


def test_the_saved_statistics_of_attention_are_kept_not_the_scores() -> None:
    memory = _attention(*[(1, 1, 1024, 16)] * 3).memory
    assert memory.peak_bytes < 2 * 1024 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_dropout_in_unfused_attention_is_one_kernel(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """Its mask repeats one column, which no fused kernel takes."""
    mask = torch.empty(32, 1, dtype=mask_dtype, device="meta").expand(32, 32)
    sizes = [(2, 8, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16)]
    kept, dropped = (
        _attention(*sizes, dtype=dtype, attn_mask=mask, enable_gqa=True, dropout_p=p) for p in (0.0, 0.1)
    )
    assert not _ops(dropped, Attention)
    assert products(dropped) == products(kept)
    assert "bernoulli_" not in names(dropped)
    (drop,) = (op for op in _ops(dropped, Streaming, FORWARD) if op.function == "native_dropout")
    (softmax,) = (op for op in _ops(dropped, Streaming, FORWARD) if op.function == "_safe_softmax")
    size = 8 if dtype == torch.float64 else 4
    assert drop.write_bytes == 2 * 8 * 32 * 32 * (size + 1)
    assert softmax.write_bytes == 2 * 8 * 32 * 32 * size


@pytest.mark.parametrize("sizes", [(2, 4, 32, 16), (4, 32, 16)])
def test_fp64_falls_to_separate_products(sizes: tuple[int, ...]) -> None:
    step = _attention(*[sizes] * 3, dtype=torch.float64)
    assert not _ops(step, Attention)
    assert len(_ops(step, Gemm, FORWARD)) == 2
    assert len(_ops(step, Gemm, BACKWARD_DATA)) == 4


def test_multi_head_attention_uses_the_fused_kernel() -> None:
    layer = nn.MultiheadAttention(64, 4, batch_first=True)
    step = captured(
        lambda self, x: self.layer(x, x, x, need_weights=False)[0], rows(2, 16, 64), parts={"layer": layer}
    )
    assert [op.direction for op in _ops(step, Attention)] == [FORWARD, BACKWARD_DATA]
    assert len(_ops(step, Gemm, FORWARD)) == 2


@pytest.mark.parametrize("train", [True, False])
def test_a_transformer_layer_is_seen_whole_in_training_and_inference(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    step = captured(lambda self, x: self.layer(x), rows(2, 16, 64), parts={"layer": layer}, train=train)
    assert [(n, k) for _, _, n, k, _ in products(step, FORWARD)] == [
        (192, 64),
        (64, 64),
        (128, 64),
        (64, 128),
    ]
    assert len(_ops(step, Attention)) == (2 if train else 1)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_transformer_encoder_with_padding_is_captured_in_inference(on_cpu: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    step = captured(
        lambda self, x, padding: self.encoder(x, src_key_padding_mask=padding),
        torch.zeros(2, 16, 64),
        torch.zeros(2, 16, dtype=torch.bool),
        parts={"encoder": nn.TransformerEncoder(layer, 2)},
        train=False,
        on_cpu=on_cpu,
    )
    assert [op.m for op in _ops(step, Gemm)] == [32] * 8
    assert len(_ops(step, Attention)) == 2
    assert step.notes == (
        "nn.TransformerEncoder computes padded tokens here; on a GPU it may leave them out.",
    )


RECURRENT: list[tuple[type[nn.Module], str, dict[str, Any]]] = [
    (nn.LSTM, "LSTM", {}),
    (nn.LSTM, "LSTM", {"bidirectional": True, "num_layers": 2}),
    (nn.LSTM, "LSTM", {"proj_size": 8}),
    (nn.LSTM, "LSTM", {"bias": False, "batch_first": True}),
    (nn.GRU, "GRU", {"num_layers": 3, "dropout": 0.5}),
    (nn.RNN, "RNN_TANH", {}),
    (nn.RNN, "RNN_RELU", {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("layer", "mode", "options"), RECURRENT)
def test_a_recurrent_layer_is_one_operation_in_each_pass(
    layer: type[nn.Module], mode: str, options: dict[str, Any]
) -> None:
    made: Any = layer(24, 32, **options)
    sizes = (4, 10, 24) if options.get("batch_first") else (10, 4, 24)
    step = captured(lambda self, x: self.layer(x)[0], rows(*sizes), parts={"layer": made}, amp="fp16")
    ops = _ops(step, Recurrent)
    assert [op.direction for op in ops] == [FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT]
    assert [entry.phase for entry in entries(step, Recurrent)] == [op.direction for op in ops]
    op = ops[0]
    assert (op.mode, op.dtype, op.seq_len, op.batch) == (mode, "fp16", 10, 4)
    assert (op.input_size, op.hidden_size, op.proj_size) == (24, 32, options.get("proj_size", 0))
    assert (op.num_layers, op.bidirectional) == (
        options.get("num_layers", 1),
        options.get("bidirectional", False),
    )
    assert not _ops(step, Gemm)


def test_the_shapes_a_recurrent_layer_returns_are_its_own() -> None:
    seen: list[tuple[int, ...]] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.layer(x)
        seen.extend(tuple(t.shape) for t in (y, h, c))
        return y

    layer = nn.LSTM(24, 32, 2, bidirectional=True, proj_size=8, batch_first=True)
    captured(run, rows(4, 10, 24), parts={"layer": layer})
    real = nn.LSTM(24, 32, 2, bidirectional=True, proj_size=8, batch_first=True)(torch.zeros(4, 10, 24))
    assert seen == [tuple(t.shape) for t in (real[0], *real[1])]


def test_a_packed_sequence_runs_to_the_longest() -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2])
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]

    step = captured(run, rows(7, 3, 24), parts={"layer": nn.GRU(24, 32)})
    op = _ops(step, Recurrent)[0]
    assert (op.seq_len, op.batch, op.input_size, op.hidden_size) == (7, 3, 24, 32)
    # Samples that have ended are not multiplied.
    assert op.flop == (7 + 5 + 2) * 2 * (3 * 32) * (24 + 32)


def test_a_loop_over_cells_runs_two_products_and_one_kernel_a_step() -> None:
    def loop(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(4, 32)
        for row in x:
            h, c = self.cell(row, (h, c))
        return h

    step = captured(loop, rows(5, 4, 24), parts={"cell": nn.LSTMCell(24, 32)}, amp="bf16")
    assert products(step, FORWARD) == [(FORWARD, 4, 128, 24, "TN"), (FORWARD, 4, 128, 32, "TN")] * 5
    assert len(entries(step, "_thnn_fused_cell", FORWARD)) == 5
    assert len(entries(step, "_thnn_fused_cell_backward", BACKWARD_DATA)) == 5


def test_dropout_is_one_kernel_that_keeps_its_mask() -> None:
    step = captured(lambda self, x: F.dropout(x, 0.5), rows(64, 32, requires_grad=True))
    (op,) = [entry.op for entry in entries(step, "native_dropout", FORWARD)]
    assert isinstance(op, Streaming)
    assert (op.read_bytes, op.write_bytes) == (64 * 32 * 4, 64 * 32 * (4 + 1))
    assert names(step, BACKWARD_DATA).count("native_dropout_backward") == 1


def test_dropout_does_nothing_in_inference() -> None:
    step = captured(lambda self, x: self.d(x).exp(), rows(4, 4), parts={"d": nn.Dropout(0.5)}, train=False)
    assert names(step) == ["exp"]


def test_rms_norm_is_one_kernel_each_way() -> None:
    step = captured(
        lambda self, x: self.norm(x), rows(64, 32, requires_grad=True), parts={"norm": nn.RMSNorm(32)}
    )
    assert [(e.phase, e.op.inner) for e in step.ops if getattr(e.op, "role", "") == "normalization"] == [
        (FORWARD, 32), (BACKWARD_DATA, 32),
    ]  # fmt: skip


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
def test_experts_are_one_grouped_product_with_its_gradients() -> None:
    def experts(self: Any, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(16, 80, 16, dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.weight, offs=offsets)

    step = captured(
        experts,
        torch.empty(64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True),
        parts={"weight": nn.Parameter(torch.empty(4, 32, 48, dtype=torch.bfloat16, device="meta"))},
    )
    assert [(op.batch, op.m, op.n, op.k, op.layout) for op in _ops(step, Gemm)] == [
        (4, 16, 48, 32, "NN"), (4, 16, 32, 48, "TN"), (4, 32, 48, 16, "NT"),
    ]  # fmt: skip
    assert [entry.phase for entry in entries(step, Gemm)] == [FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT]
