"""Scaled dot-product attention as one fused kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tilefit.errors import UsageError
from tilefit.ops.base import BACKWARD_DATA, FORWARD, Growth, Op
from tilefit.ops.dtypes import size_bytes


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """``softmax(Q K^T * scale + mask) V`` without the score matrix in memory.

    Attributes:
        batch: Samples.
        num_heads: Query heads.
        seq_len: Query positions.
        head_dim: Width of a query and key head.
        kv_len: Key positions; ``seq_len`` when 0.
        num_kv_heads: Key/value heads; ``num_heads`` when 0 (grouped-query attention otherwise).
        value_dim: Width of a value head; ``head_dim`` when 0.
        is_causal: Only keys up to the query's position count, so half of the square is computed.
        mask_bytes: Size of an explicit additive or boolean mask; 0 without one.
        dropout_p: Dropout probability on the attention weights.
        dtype: Element type of Q, K, V.
        direction: ``forward`` or ``backward-data``.
    """

    kind: ClassVar[str] = "attention"
    passes: ClassVar[tuple[str, ...]] = (FORWARD, BACKWARD_DATA)

    batch: int
    num_heads: int
    seq_len: int
    head_dim: int
    kv_len: int = 0
    num_kv_heads: int = 0
    value_dim: int = 0
    is_causal: bool = False
    mask_bytes: int = 0
    dropout_p: float = 0.0
    dtype: str = "bf16"
    direction: str = FORWARD

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_len", self.kv_len or self.seq_len)
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(f"{self.num_heads} query heads do not share {self.num_kv_heads} key heads")
        Op.__post_init__(self)

    @property
    def scores(self) -> int:
        """Score-matrix elements that must be computed, over all heads and samples."""
        full = self.seq_len * self.kv_len
        if self.is_causal:
            # Row i sees keys 0..i; columns beyond the last query are never seen.
            short = min(self.seq_len, self.kv_len)
            full = short * (short + 1) // 2 + (self.seq_len - short) * self.kv_len
        return self.batch * self.num_heads * full

    @property
    def flop(self) -> int:
        # Forward: Q K^T and P V. Backward: both gradients of each of the two, plus Q K^T again,
        # because the fused kernel does not keep the scores (Dao et al., FlashAttention, 2022).
        forward = 2 * self.scores * (self.head_dim + self.value_dim)
        if self.direction == FORWARD:
            return forward
        return 2 * forward + 2 * self.scores * self.head_dim

    @property
    def _qkvo_elements(self) -> tuple[int, int, int, int]:
        queries = self.batch * self.num_heads * self.seq_len
        keys = self.batch * self.num_kv_heads * self.kv_len
        return (
            queries * self.head_dim,
            keys * self.head_dim,
            keys * self.value_dim,
            queries * self.value_dim,
        )

    @property
    def read_bytes(self) -> int:
        q, k, v, o = self._qkvo_elements
        size = size_bytes(self.dtype)
        if self.direction == FORWARD:
            return size * (q + k + v) + self.mask_bytes
        return size * (q + k + v + 2 * o) + self.mask_bytes

    @property
    def write_bytes(self) -> int:
        q, k, v, o = self._qkvo_elements
        size = size_bytes(self.dtype)
        return size * o if self.direction == FORWARD else size * (q + k + v)

    @property
    def kernels(self) -> int:
        return 1 if self.direction == FORWARD else 3

    def on_batch(self, growth: Growth) -> Attention:
        per_sample = self.mask_bytes >= self.batch * self.seq_len * self.kv_len > 0 and self.batch > 1
        mask_bytes = round(self.mask_bytes * growth.factor) if per_sample else self.mask_bytes
        return replace(self, batch=growth.of(self.batch), mask_bytes=mask_bytes)

    @property
    def shape(self) -> str:
        length = str(self.seq_len) if self.seq_len == self.kv_len else f"{self.seq_len}/{self.kv_len}"
        heads = str(self.num_heads)
        if self.num_kv_heads != self.num_heads:
            heads += f"/{self.num_kv_heads}"
        text = f"{self.batch}x{heads}x{length}x{self.head_dim}"
        return f"{text} causal" if self.is_causal else text
