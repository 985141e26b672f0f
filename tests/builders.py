"""Hand-made steps, as a capture of a real model would give them, for tests without torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Attention,
    Conv2d,
    Gemm,
    Memory,
    Op,
    Parameter,
    Recurrent,
    Settings,
    Site,
    Step,
    StepOp,
    Streaming,
    TensorRef,
)
from tilefit.ops.dtypes import size_bytes


class StepBuilder:
    """Collects layers; backward operations come out in reverse order, the optimizer last.

    Every layer method returns the tensor it made, to be given to the next one as ``x``.
    """

    def __init__(
        self,
        batch: int = 16,
        dtype: str = "bf16",
        *,
        training: bool = True,
        settings: Settings | None = None,
    ) -> None:
        self.batch = batch
        self.dtype = dtype
        self.training = training
        self.settings = settings or Settings(
            training=training, amp=dtype if dtype in ("bf16", "fp16") else ""
        )
        self.forward: list[StepOp] = []
        self.backward: list[StepOp] = []
        self.parameters: dict[str, Parameter] = {}
        self.modules: dict[str, str] = {}
        self._ids = 0

    def tensor(self, *shape: int, dtype: str = "", parameter: str = "") -> TensorRef:
        self._ids += 1
        return TensorRef(self._ids, shape, dtype or self.dtype, parameter)

    def parameter(self, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> TensorRef:
        self.parameters.setdefault(name, Parameter(shape, "fp32", aliases))
        return self.tensor(*shape, parameter=name)

    def add(
        self,
        op: Op,
        module: str,
        phase: str = FORWARD,
        inputs: Sequence[TensorRef] = (),
        outputs: Sequence[TensorRef] = (),
        name: str = "",
        class_name: str = "Module",
    ) -> None:
        """One operation at the end of the forward pass, or at the start of the backward pass."""
        self.modules.setdefault(module, class_name)
        entry = StepOp(op, phase, Site(module, "model.py:1"), name, tuple(inputs), tuple(outputs))
        if phase == FORWARD:
            self.forward.append(entry)
        elif self.training:
            self.backward.insert(0, entry)

    def linear(
        self,
        module: str,
        rows: int,
        in_features: int,
        out_features: int,
        *,
        x: TensorRef | None = None,
        conv1d: bool = False,
        weight: str = "",
    ) -> TensorRef:
        """``F.linear``, or GPT-2's Conv1D (weight stored [in, out]), with both gradients."""
        x = x or self.tensor(rows, in_features)
        name = weight or f"{module}.weight"
        stored = (in_features, out_features) if conv1d else (out_features, in_features)
        if name not in self.parameters:
            self.parameters[name] = Parameter(stored, "fp32")
        w = self.tensor(*stored, parameter=name)
        y, dy = self.tensor(rows, out_features), self.tensor(rows, out_features)
        dx, dw = self.tensor(rows, in_features), self.tensor(*stored)
        forward, data = ("NN", "TN") if conv1d else ("TN", "NN")
        m, n = stored
        gemm = Gemm(rows, out_features, in_features, self.dtype, forward)
        self.add(gemm, module, FORWARD, (x, w), (y,), "aten.addmm", "Conv1D" if conv1d else "Linear")
        gemm = Gemm(rows, in_features, out_features, self.dtype, data)
        self.add(gemm, module, BACKWARD_DATA, (dy, w), (dx,), "aten.mm")
        gemm = Gemm(m, n, rows, self.dtype, "NT")
        reads = (x, dy) if conv1d else (dy, x)
        self.add(gemm, module, BACKWARD_WEIGHT, reads, (dw,), "aten.mm")
        return y

    def stream(
        self,
        module: str,
        role: str,
        inputs: Sequence[TensorRef],
        outputs: Sequence[TensorRef],
        *,
        phase: str = FORWARD,
        name: str = "",
        read_bytes: int | None = None,
        inner: int = 0,
        strided: bool = False,
        class_name: str = "Module",
    ) -> None:
        """A streaming operation that reads its inputs and writes its outputs once."""

        def held(tensors: Sequence[TensorRef]) -> int:
            return sum(prod(t.shape) * size_bytes(t.dtype) for t in tensors)

        largest = max((*inputs, *outputs), key=lambda t: prod(t.shape))
        op = Streaming(
            role,
            prod(largest.shape),
            held(inputs) if read_bytes is None else read_bytes,
            held(outputs),
            largest.dtype,
            inner=inner,
            strided=strided,
        )
        self.add(op, module, phase, inputs, outputs, name, class_name)

    def pointwise(self, module: str, x: TensorRef, name: str = "aten.gelu") -> TensorRef:
        """An activation function and its gradient."""
        y = self.tensor(*x.shape, dtype=x.dtype)
        dy, dx = self.tensor(*x.shape, dtype=x.dtype), self.tensor(*x.shape, dtype=x.dtype)
        self.stream(module, "pointwise", (x,), (y,), name=name)
        self.stream(module, "pointwise", (x, dy), (dx,), phase=BACKWARD_DATA, name=f"{name}_backward")
        return y

    def embedding(self, module: str, tokens: int, vocabulary: int, features: int) -> TensorRef:
        """A table and its dense gradient."""
        table = self.parameter(f"{module}.weight", vocabulary, features)
        index = self.tensor(tokens, dtype="int64")
        y, dy = self.tensor(tokens, features, dtype="fp32"), self.tensor(tokens, features, dtype="fp32")
        picked = tokens * (features * 4 + 8)
        table = TensorRef(table.id, table.shape, "fp32", table.parameter)
        self.stream(
            module,
            "embedding",
            (table, index),
            (y,),
            read_bytes=picked,
            name="aten.embedding",
            class_name="Embedding",
        )
        gradient = self.tensor(vocabulary, features, dtype="fp32")
        self.stream(
            module,
            "embedding",
            (dy, index),
            (gradient,),
            phase=BACKWARD_WEIGHT,
            name="aten.embedding_dense_backward",
        )
        return y

    def head(
        self, module: str, rows: int, features: int, vocabulary: int, *, weight: str = "", loss: str = "fp32"
    ) -> TensorRef:
        """A language-model head and its cross-entropy in fp32."""
        logits = self.linear(module, rows, features, vocabulary, weight=weight)
        if weight:
            old = self.parameters[weight]
            self.parameters[weight] = Parameter(old.shape, old.dtype, (f"{module}.weight",))
        wide = self.tensor(rows, vocabulary, dtype=loss)
        self.stream("", "copy", (logits,), (wide,), name="aten._to_copy")
        probabilities = self.tensor(rows, vocabulary, dtype=loss)
        self.stream("", "softmax", (wide,), (probabilities,), name="aten._log_softmax", inner=vocabulary)
        out = self.tensor(dtype=loss)
        self.stream("", "loss", (probabilities,), (out,), name="aten.nll_loss_forward", read_bytes=rows * 12)
        gradient = self.tensor(rows, vocabulary, dtype=loss)
        self.stream(
            "",
            "softmax",
            (probabilities,),
            (gradient,),
            phase=BACKWARD_DATA,
            name="aten._log_softmax_backward_data",
            inner=vocabulary,
        )
        return out

    def conv(
        self,
        module: str,
        in_channels: int,
        out_channels: int,
        size: int,
        kernel: int = 3,
        stride: int = 1,
        *,
        groups: int = 1,
        channels_last: bool = True,
        x: TensorRef | None = None,
    ) -> TensorRef:
        """A square convolution with "same" padding and both gradients (no data gradient without ``x``)."""
        given = x is not None
        x = x or self.tensor(self.batch, in_channels, size, size)
        w = self.parameter(f"{module}.weight", out_channels, in_channels // groups, kernel, kernel)
        out = None
        for phase in (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT):
            op = Conv2d(
                self.batch,
                in_channels,
                out_channels,
                size,
                kernel,
                stride,
                kernel // 2,
                groups=groups,
                dtype=self.dtype,
                channels_last=channels_last,
                direction=phase,
            )
            if out is None:
                out = self.tensor(self.batch, out_channels, *op.output_size)
                dy = self.tensor(*out.shape)
            tensors = {
                FORWARD: ((x, w), (out,)),
                BACKWARD_DATA: ((dy, w), (self.tensor(*x.shape),)),
                BACKWARD_WEIGHT: ((dy, x), (self.tensor(*w.shape),)),
            }[phase]
            if phase != BACKWARD_DATA or given:
                self.add(op, module, phase, *tensors, name="aten.convolution", class_name="Conv2d")
        assert out is not None
        return out

    def attention(
        self, module: str, heads: int, seq: int, head_dim: int, *, causal: bool = True
    ) -> TensorRef:
        """Fused attention and its gradient."""
        q = [self.tensor(self.batch, heads, seq, head_dim) for _ in range(5)]
        for phase in (FORWARD, BACKWARD_DATA):
            op = Attention(
                self.batch, heads, seq, head_dim, is_causal=causal, dtype=self.dtype, direction=phase
            )
            self.add(op, module, phase, q[:3], q[3:4], "aten.scaled_dot_product_attention")
        return q[3]

    def recurrent(
        self, module: str, mode: str, input_size: int, hidden_size: int, seq: int, layers: int = 1
    ) -> TensorRef:
        """A recurrent layer and both gradients."""
        x = self.tensor(seq, self.batch, input_size)
        y = self.tensor(seq, self.batch, hidden_size)
        for phase in (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT):
            op = Recurrent(
                mode,
                input_size,
                hidden_size,
                seq,
                self.batch,
                num_layers=layers,
                dtype=self.dtype,
                direction=phase,
            )
            self.add(op, module, phase, (x,), (y,), "aten._cudnn_rnn", mode)
        return y

    def optimizer(self) -> None:
        """Fused AdamW over all parameters: reads p, g, m, v and writes p, m, v in fp32."""
        refs = [self.tensor(*p.shape, dtype="fp32", parameter=name) for name, p in self.parameters.items()]
        count = sum(prod(ref.shape) for ref in refs)
        op = Streaming("optimizer", count, 16 * count, 12 * count, "fp32", 12.0)
        self.backward.append(
            StepOp(op, OPTIMIZER, Site("", "train.py:9"), "aten._fused_adamw_", tuple(refs), tuple(refs))
        )

    def step(self, *, memory: Memory | None = None, inputs: tuple[str, ...] = ()) -> Step:
        return Step(
            ops=tuple(self.forward + (self.backward if self.training else [])),
            memory=memory or Memory(),
            settings=self.settings,
            inputs=inputs,
            batch=self.batch,
            parameters=dict(self.parameters),
            modules=dict(self.modules),
            model="hand-made",
        )


def gpt2(
    vocabulary: int = 50304, layers: int = 2, batch: int = 16, seq: int = 1024, features: int = 768
) -> Step:
    """A GPT-2-shaped training step: the real layer shapes, fewer layers."""
    b = StepBuilder(batch)
    rows = batch * seq
    b.embedding("transformer.wte", rows, vocabulary, features)
    for layer in range(layers):
        path = f"transformer.h.{layer}"
        b.linear(f"{path}.attn.c_attn", rows, features, 3 * features, conv1d=True)
        b.attention(f"{path}.attn", features // 64, seq, 64)
        b.linear(f"{path}.attn.c_proj", rows, features, features, conv1d=True)
        h = b.linear(f"{path}.mlp.c_fc", rows, features, 4 * features, conv1d=True)
        h = b.pointwise(f"{path}.mlp.act", h)
        b.linear(f"{path}.mlp.c_proj", rows, 4 * features, features, x=h, conv1d=True)
    b.head("lm_head", rows, features, vocabulary, weight="transformer.wte.weight")
    b.optimizer()
    return b.step(inputs=(f"input_ids: int64[{batch},{seq}]",))


def llama(
    vocabulary: int = 32000,
    features: int = 4096,
    intermediate: int = 11008,
    layers: int = 2,
    rows: int = 8192,
) -> Step:
    """A Llama-shaped training step with an untied head."""
    b = StepBuilder(batch=4)
    b.embedding("model.embed_tokens", rows, vocabulary, features)
    for layer in range(layers):
        path = f"model.layers.{layer}"
        x = b.tensor(rows, features)
        for name in ("q_proj", "k_proj", "v_proj"):
            b.linear(f"{path}.self_attn.{name}", rows, features, features, x=x)
        b.attention(f"{path}.self_attn", features // 128, rows // 4, 128)
        b.linear(f"{path}.self_attn.o_proj", rows, features, features)
        x = b.tensor(rows, features)
        gate = b.linear(f"{path}.mlp.gate_proj", rows, features, intermediate, x=x)
        gate = b.pointwise(f"{path}.mlp.act_fn", gate, "aten.silu")
        b.linear(f"{path}.mlp.up_proj", rows, features, intermediate, x=x)
        b.linear(f"{path}.mlp.down_proj", rows, intermediate, features, x=gate)
    b.head("lm_head", rows, features, vocabulary)
    b.optimizer()
    return b.step(inputs=(f"input_ids: int64[4,{rows // 4}]",))


def resnet(*, channels_last: bool = True, width: int = 64, batch: int = 256) -> Step:
    """The first convolution and a few bottlenecks of a ResNet-50-shaped training step."""
    b = StepBuilder(batch)
    x = b.conv("conv1", 3, width, 224, 7, 2, channels_last=channels_last)
    x = b.pointwise("relu", x, "aten.relu")
    channels, size = width, 56
    for stage in range(4):
        inner = width << stage
        path = f"layer{stage + 1}.0"
        x = b.tensor(batch, channels, size, size)
        x = b.conv(f"{path}.conv1", channels, inner, size, 1, channels_last=channels_last, x=x)
        x = b.conv(f"{path}.conv2", inner, inner, size, 3, channels_last=channels_last, x=x)
        x = b.conv(f"{path}.conv3", inner, 4 * inner, size, 1, channels_last=channels_last, x=x)
        x = b.pointwise(f"{path}.relu", x, "aten.relu")
        channels, size = 4 * inner, size // 2
    b.linear("fc", batch, channels, 1000)
    b.optimizer()
    return b.step(inputs=(f"x: float32[{batch},3,224,224]",))
