"""What each operation costs: layouts, sizes, bytes, roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from capturing import captured, entries, names, products, rows
from tilefit.capture import capture
from tilefit.cost import fuse
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Conv, Gemm, Step, StepOp, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.streaming import multi_tensor_launches


def _gemms(step: Step, phase: str = "") -> list[Any]:
    return [entry.op for entry in entries(step, Gemm, phase)]


def _convs(step: Step) -> list[Any]:
    return [entry.op for entry in entries(step, Conv)]


# ---- matrix products ---------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_runs_tn_forward_nn_and_nt_backward(bias: bool) -> None:
    linear = nn.Linear(48, 80, bias=bias)
    step = captured(
        lambda self, x: self.linear(x), rows(4, 8, 48, requires_grad=True), parts={"linear": linear}
    )
    assert sorted(products(step)) == [
        (BACKWARD_DATA, 32, 48, 80, "NN"),
        (BACKWARD_WEIGHT, 80, 48, 32, "NT"),
        (FORWARD, 32, 80, 48, "TN"),
    ]
    assert _gemms(step, FORWARD)[0].bias is bias


def test_the_first_layer_has_no_data_gradient() -> None:
    step = captured(lambda self, x: self.linear(x), rows(32, 48), parts={"linear": nn.Linear(48, 80)})
    assert [phase for phase, *_ in products(step)] == [FORWARD, BACKWARD_WEIGHT]


def test_weights_that_lie_the_other_way_run_nn_forward_and_tn_backward() -> None:
    # As in Conv1D of GPT-2: weights [in, out].
    step = captured(
        lambda self, x: torch.addmm(x.new_zeros(80), x, self.weight),
        rows(32, 48, requires_grad=True),
        parts={"weight": nn.Parameter(rows(48, 80))},
    )
    assert sorted(products(step)) == [
        (BACKWARD_DATA, 32, 48, 80, "TN"),
        (BACKWARD_WEIGHT, 48, 80, 32, "NT"),
        (FORWARD, 32, 80, 48, "NN"),
    ]


def test_products_of_activations_have_two_data_gradients() -> None:
    def attention(self: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.transpose(-2, -1)

    step = captured(attention, rows(2, 3, 10, 16, requires_grad=True), rows(2, 3, 12, 16, requires_grad=True))
    forward, *backward = _gemms(step)
    assert (forward.batch, forward.m, forward.n, forward.k, forward.layout) == (6, 10, 12, 16, "TN")
    assert [phase for phase, *_ in products(step)] == [FORWARD, BACKWARD_DATA, BACKWARD_DATA]
    assert all(op.flop == forward.flop for op in backward)


def test_a_slice_of_a_wider_matrix_keeps_its_leading_dimension() -> None:
    def sliced(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x[:, :16] @ x[:, 16:48].t()[:16]

    (op,) = _gemms(captured(sliced, rows(20, 48), train=False))
    assert (op.m, op.n, op.k, op.layout, op.ld_a, op.ld_b) == (20, 20, 16, "TN", 48, 48)


def test_vectors_are_thin_matrices() -> None:
    def vectors(self: Any, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = torch.addmv(x.new_zeros(20), x, v) + x @ v
        return torch.dot(y, y)

    step = captured(vectors, rows(20, 48), rows(48), train=False)
    assert [(op.m, op.n, op.k) for op in _gemms(step)] == [(20, 1, 48), (20, 1, 48), (1, 1, 20)]


def test_tf32_only_where_it_is_allowed() -> None:
    linear = {"linear": nn.Linear(16, 16)}
    for tf32, dtype in ((True, "tf32"), (False, "fp32")):
        step = captured(lambda self, x: self.linear(x), rows(4, 16), parts=linear, tf32=tf32)
        assert {op.dtype for op in _gemms(step)} == {dtype}
        assert step.settings.tf32 is tf32


def test_a_learned_input_is_not_taken_for_the_weight() -> None:
    step = captured(
        lambda self: self.linear(self.query),
        parts={"linear": nn.Linear(16, 24), "query": nn.Parameter(rows(8, 16))},
    )
    assert [phase for phase, *_ in products(step)] == [FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT]


def test_tied_weights_are_one_parameter_with_two_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    step = captured(
        lambda self, t: self.model(t), torch.zeros(4, 8, dtype=torch.int64), parts={"model": Tied()}
    )
    assert step.parameters["model.embedding.weight"].aliases == ("model.head.weight",)
    assert step.memory.parameter_bytes == 4 * 100 * 16
    # Of both uses: the product's and the lookup's gradients are added.
    assert [phase for phase, *_ in products(step)] == [FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA]
    assert {"embedding_dense_backward", "add"} <= {*names(step, BACKWARD_WEIGHT), *names(step, BACKWARD_DATA)}


def test_a_custom_function_has_its_gradients_told_apart() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    step = captured(
        lambda self, x: Product.apply(x, self.weight).exp(),
        rows(16, 64, requires_grad=True),
        parts={"weight": nn.Parameter(rows(48, 64))},
    )
    assert products(step) == [
        (FORWARD, 16, 48, 64, "TN"),
        (BACKWARD_DATA, 16, 64, 48, "NN"),
        (BACKWARD_WEIGHT, 48, 64, 16, "NT"),
    ]


def test_views_and_allocations_cost_nothing() -> None:
    def views(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 6).t().unsqueeze(0).expand(3, 6, 4)[1:, ::2].detach()
        torch.empty_like(x)
        return y.unflatten(1, (3, 1)).squeeze().movedim(0, 1)

    assert captured(views, rows(24), train=False).ops == ()


# ---- convolutions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "image", "flop"),
    [
        (nn.Conv1d(16, 32, 5, stride=2, padding=2), (16, 40), 2 * 2 * 20 * 32 * 16 * 5),
        (nn.Conv2d(16, 32, 3, padding=1), (16, 10, 12), 2 * 2 * 120 * 32 * 16 * 9),
        (nn.Conv3d(4, 8, 3), (4, 5, 6, 7), 2 * 2 * 60 * 8 * 4 * 27),
        (nn.Conv2d(16, 32, 3, groups=4), (16, 12, 12), 2 * 2 * 100 * 32 * 4 * 9),
        (nn.Conv2d(16, 16, 3, groups=16, padding=1), (16, 8, 8), 2 * 2 * 64 * 16 * 9),
        (nn.Conv2d(16, 32, 3, dilation=2, padding="same"), (16, 8, 8), 2 * 2 * 64 * 32 * 16 * 9),
        # Each input pixel meets every tap.
        (nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1), (16, 8, 8), 2 * 2 * 64 * 32 * 16 * 16),
        (
            nn.ConvTranspose2d(16, 32, 3, stride=2, output_padding=1, groups=2),
            (16, 8, 8),
            2 * 2 * 64 * 32 * 8 * 9,
        ),
    ],
    ids=str,
)
def test_convolutions_forward_and_both_gradients(layer: nn.Module, image: tuple[int, ...], flop: int) -> None:
    step = captured(
        lambda self, x: self.layer(x), rows(2, *image, requires_grad=True), parts={"layer": layer}
    )
    assert {entry.phase for entry in entries(step, Conv)} == {FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT}
    assert [op.flop for op in _convs(step)] == [flop] * 3
    assert entries(step, Conv, FORWARD)[0].parameter == "layer.weight"
    transposed = isinstance(layer, nn.ConvTranspose2d)
    assert _convs(step)[0].direction == (BACKWARD_DATA if transposed else FORWARD)
    # The bias's gradient is a sum of its own.
    assert "convolution_backward" in [
        e.name.removeprefix("aten.") for e in entries(step, Streaming, BACKWARD_WEIGHT)
    ]


def test_depthwise_convolutions_say_so() -> None:
    step = captured(
        lambda self, x: self.c(x),
        rows(2, 16, 8, 8),
        parts={"c": nn.Conv2d(16, 16, 3, groups=16)},
        train=False,
    )
    assert _convs(step)[0].is_depthwise


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + x)


@pytest.mark.parametrize("amp", ["", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_residual_block_keeps_its_memory_format(channels_last: bool, amp: str) -> None:
    step = captured(
        lambda self, x: F.max_pool2d(self.second(self.first(x)), 2),
        rows(2, 16, 8, 8, requires_grad=True),
        parts={"first": _Block(), "second": _Block()},
        channels_last=channels_last,
        amp=amp,
    )
    assert len(_convs(step)) == 12
    assert {op.channels_last for op in _convs(step)} == {channels_last}
    assert step.settings.channels_last is channels_last
    assert not {"copy_", "clone", "contiguous"} & {*names(step), *names(step, BACKWARD_DATA)}


def test_one_image_without_a_batch_dimension() -> None:
    step = captured(lambda self, x: self.c(x), rows(3, 8, 8), parts={"c": nn.Conv2d(3, 4, 3)}, train=False)
    assert (_convs(step)[0].batch, _convs(step)[0].in_channels) == (1, 3)


# ---- what streams memory -----------------------------------------------------------------------


def _one(step: Step, name: str, phase: str = FORWARD) -> Streaming:
    (entry,) = entries(step, name, phase)
    assert isinstance(entry.op, Streaming)
    return entry.op


def test_pointwise_operations_read_and_write_every_byte_once() -> None:
    step = captured(lambda self, x: x * x + x.sum(0, keepdim=True), rows(64, 32), train=False)
    multiply, add = _one(step, "mul"), _one(step, "add")
    assert (multiply.read_bytes, multiply.write_bytes) == (64 * 32 * 4, 64 * 32 * 4)
    assert add.read_bytes == 64 * 32 * 4 + 32 * 4


def test_an_expanded_operand_is_read_once() -> None:
    step = captured(lambda self, x: x.expand(64, 32).exp(), rows(1, 32), train=False)
    assert (_one(step, "exp").read_bytes, _one(step, "exp").write_bytes) == (32 * 4, 64 * 32 * 4)


def test_a_transposing_copy_is_strided_and_a_plain_one_is_not() -> None:
    step = captured(lambda self, x: (x.t().contiguous(), x.clone()), rows(64, 32), train=False)
    assert [entry.op.strided for entry in entries(step, Streaming) if isinstance(entry.op, Streaming)] == [
        True,
        False,
    ]


def test_embedding_reads_rows_and_its_gradient_writes_the_table() -> None:
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    step = captured(lambda self, t: self.e(t), tokens, parts={"e": nn.Embedding(1000, 16)})
    lookup = _one(step, "embedding")
    assert (lookup.role, lookup.read_bytes) == ("embedding", 32 * 16 * 4 + 32 * 8)
    gradient = _one(step, "embedding_dense_backward", BACKWARD_WEIGHT)
    assert gradient.write_bytes >= 1000 * 16 * 4


@pytest.mark.parametrize("function", [lambda x: (x * 2).abs_(), lambda x: F.hardtanh(x * 2, 0, 6, True)])
def test_functions_of_each_element_are_priced_in_place_too(function: Any) -> None:
    step = captured(lambda self, x: function(x).sum(), rows(64, 64).requires_grad_())
    assert "other" not in {
        entry.op.role for entry in entries(step, Streaming) if isinstance(entry.op, Streaming)
    }


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_that_is_given_its_statistics_applies_them_in_two_kernels(training: bool) -> None:
    def normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(training)
        return self.norm(x).sum()

    step = captured(normalised, rows(4, 8, 16, 16), parts={"norm": nn.BatchNorm2d(8)})
    norm = next(entry for entry in entries(step, Streaming) if entry.name == "aten.native_batch_norm")
    assert isinstance(norm.op, Streaming)
    assert norm.op.role == "normalization"
    # In training, the statistics of the 4 * 16 * 16 elements of each channel.
    assert (norm.op.function, norm.op.inner, norm.op.kernels) == (
        ("native_batch_norm", 1024, 1) if training else ("batch_norm_elemt", 0, 2)
    )


def test_normalisation_softmax_loss_and_pooling_have_their_roles() -> None:
    def roles(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(self.norm(x), 2).flatten(1)
        return F.cross_entropy(F.layer_norm(x, (64,)).softmax(-1), x.argmax(-1))

    step = captured(roles, rows(4, 4, 8, 8), parts={"norm": nn.BatchNorm2d(4)})
    by_name = {
        entry.name.removeprefix("aten."): entry.op.role
        for entry in step.ops
        if isinstance(entry.op, Streaming)
    }
    assert by_name["native_batch_norm"] == by_name["native_batch_norm_backward"] == "normalization"
    assert by_name["native_layer_norm"] == "normalization"
    assert by_name["avg_pool2d"] == "pooling"
    assert by_name["_softmax"] == by_name["_log_softmax"] == "softmax"
    assert by_name["nll_loss_forward"] == by_name["nll_loss_backward"] == "loss"
    assert by_name["argmax"] == "reduction"
    assert _one(step, "native_layer_norm").inner == _one(step, "_softmax").inner == 64


def test_an_operation_nobody_knows_is_listed_with_its_bytes() -> None:
    step = captured(lambda self, x: torch.linalg.qr(x)[1], rows(32, 16), train=False)
    (op,) = [entry.op for entry in entries(step, Streaming) if isinstance(entry.op, Streaming)]
    assert op.role == "other"
    assert op.read_bytes == 32 * 16 * 4


@pytest.mark.parametrize(
    ("sizes", "lists", "launches"),
    # Chunks of 65536 elements, 320 to a launch; 110 tensors to a launch of one list, 30 of five.
    [
        ([10], 1, 1),
        ([1000] * 111, 1, 2),
        ([1000] * 31, 5, 2),
        ([320 * 65536 + 1], 1, 2),
        ([300 * 65536, *[1] * 36], 4, 2),  # the blocks that are full leave one tensor for the next launch
        ([0, 10], 1, 1),
    ],
)
def test_multi_tensor_kernels_are_launched_as_often_as_their_tables_overflow(
    sizes: list[int], lists: int, launches: int
) -> None:
    assert multi_tensor_launches(sizes, lists) == launches


# ---- what kernels ask of the layout ------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [lambda x: F.layer_norm(x, (48,)), lambda x: torch.softmax(x, -1)], ids=["norm", "softmax"]
)
def test_a_kernel_that_takes_packed_rows_has_others_copied_first(function: Any) -> None:
    def copies(x: torch.Tensor) -> list[StepOp]:
        step = captured(lambda self, x: function(x), x.detach().requires_grad_())
        assert not [op for op in fuse(step).ops if op.op.category == "copy"], "compiled code reads any layout"
        return [entry for entry in entries(step, Streaming, FORWARD) if entry.op.category == "copy"]

    assert not copies(rows(32, 48))
    (copy,) = copies(rows(48, 32).t())
    assert (copy.op.read_bytes, copy.op.write_bytes) == (4 * 32 * 48, 4 * 32 * 48)
    assert copy.op.strided


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint64, torch.complex32, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
)
def test_rare_element_types_are_called_what_they_are(dtype: torch.dtype) -> None:
    step = captured(lambda self, x: x.to(torch.int64), torch.empty(64, 64, dtype=dtype), train=False)
    (copy,) = step.ops
    (read,) = copy.inputs
    assert size_bytes(read.dtype) == dtype.itemsize
    assert read.dtype != "fp32"
    assert copy.op.moved_bytes == 64 * 64 * (dtype.itemsize + 8)


def test_a_product_that_makes_nothing_takes_no_time() -> None:
    idle = {"expert": nn.Linear(8, 16)}
    step = captured(lambda self, x: self.expert(x[:0]), rows(4, 8), parts=idle, train=False)
    assert not step.ops


def test_derivatives_forward_launch_what_they_compute_alone() -> None:
    layer = {"layer": nn.Linear(8, 8)}
    step = captured(
        lambda self, x: torch.func.jvp(self.layer, (x,), (x,))[1], rows(4, 8), parts=layer, train=False
    )
    assert not {"aten._has_same_storage_numel", "aten._efficientzerotensor"} & set(names(step))


def test_what_a_call_is_told_to_write_to_is_not_read() -> None:
    def kept(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2.0, out=torch.empty_like(x))

    (entry,) = entries(captured(kept, rows(512, 512), train=False), Streaming)
    assert (entry.op.read_bytes, entry.op.write_bytes) == (4 << 18, 4 << 18)


def test_the_gradient_of_a_weight_that_is_computed_is_a_weights() -> None:
    layers = (weight_norm(nn.Linear(48, 80)), nn.ReLU(), spectral_norm(nn.Linear(80, 32)))
    step = capture(nn.Sequential(*layers), torch.empty(64, 48, device="meta"))
    matrices = [entry for entry in step.ops if entry.name == "aten.mm"]
    assert [entry.phase for entry in matrices] == [BACKWARD_DATA, BACKWARD_WEIGHT, BACKWARD_WEIGHT]
