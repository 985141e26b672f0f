# ruff: noqa: E501
"""Many functions, each forward and backward in several sizes, types and layouts: how many kernels each launches is
what ``benchmarks/program_ops.py`` asks."""

import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
half = torch.bfloat16


def x(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=grad)


def ids(high, *shape):
    return torch.randint(high, shape, device=device)


def run(y):
    parts = [part for part in (y if isinstance(y, tuple) else (y,)) if part.requires_grad]
    torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])


def functions():
    for dtype in (torch.float32, half):
        a, image = x(64, 512, dtype=dtype), x(16, 32, 28, 28, dtype=dtype)
        last = x(16, 32, 28, 28, dtype=dtype).detach().to(memory_format=torch.channels_last).requires_grad_()
        wide = x(2048, 768, dtype=dtype)
        for each in (a, wide):
            width = each.shape[1]
            run(F.layer_norm(each, (width,), x(width, dtype=dtype), x(width, dtype=dtype)))
            run(F.layer_norm(each, (width,)))
            run(F.rms_norm(each, (width,), x(width, dtype=dtype)))
            for name in """gelu silu relu mish softplus elu hardswish hardsigmoid hardtanh leaky_relu selu
                logsigmoid softsign tanhshrink""".split():
                run(getattr(F, name)(each))
            for name in "exp tanh sigmoid sin sqrt abs sign square erf log1p rsqrt neg reciprocal".split():
                run(getattr(torch, name)(each))
            run(F.softmax(each, -1))
            run(F.log_softmax(each, 0))
            run(F.dropout(each, 0.1, True))
            run(F.glu(each))
            run(F.normalize(each, dim=-1))
            run(torch.logsumexp(each, -1))
            for dims in (None, 0, 1):
                for name in ("sum", "mean", "amax", "prod", "var", "std", "norm", "max", "argmax", "any"):
                    made = getattr(torch, name)(
                        each if name != "any" else each > 0, *([] if dims is None else [dims])
                    )
                    made = made[0] if isinstance(made, tuple) else made
                    if made.requires_grad:
                        run(made)
            run(each.cumsum(1))
            run(each[:, :32])
            run(each[:, 3])
            run(each.t().contiguous())
            run(torch.cat([each, each], 1))
            run(torch.stack([each, each]))
            run(torch.where(each > 0, each, 0.0))
            run(each.masked_fill(each > 0, 0.0))
            run(F.pad(each, (1, 1)))
            run(each.roll(1, 0))
            run(each.topk(5)[0])
            run(each.sort(-1)[0])
            run(each[ids(each.shape[0], 128)])
            run(each.index_select(0, ids(each.shape[0], 128)))
            run(each.gather(1, ids(width, each.shape[0], 4)))
            run(torch.zeros_like(each).index_add(0, ids(each.shape[0], 128), x(128, width, dtype=dtype)))
            run(
                torch.zeros_like(each).scatter_add(
                    0, ids(each.shape[0], 64, width), x(64, width, dtype=dtype)
                )
            )
            run(torch.addcmul(each, each, each))
            run(each**3)
            run(each.clamp(-1, 1))
            run(torch.maximum(each, each.detach()))
            run(torch.lerp(each, each.detach(), 0.1))
            run(F.mse_loss(each, each.detach()))
            run(F.l1_loss(each, torch.zeros_like(each)))
            run(F.smooth_l1_loss(each, torch.zeros_like(each)))
            run(F.huber_loss(each, torch.zeros_like(each)))
            run(F.binary_cross_entropy_with_logits(each, torch.zeros_like(each)))
            run(F.binary_cross_entropy(each.sigmoid(), torch.zeros_like(each)))
            run(F.kl_div(each.log_softmax(-1), each.detach().softmax(-1), reduction="batchmean"))
            run(F.cross_entropy(each, ids(width, each.shape[0])))
            run(F.cross_entropy(each, ids(width, each.shape[0]), label_smoothing=0.1))
            run(F.cosine_similarity(each, torch.ones_like(each)))
            run(F.triplet_margin_loss(each, torch.ones_like(each), torch.zeros_like(each)))
            torch.nonzero(each > 0), each[each > 0], each.isnan().any(), torch.unique(ids(50, 999))
            torch.bincount(ids(50, 999)), torch.multinomial(each.detach().softmax(-1)[:8].float(), 1)
            torch.tril(each), torch.eye(64, device=device), torch.randperm(64, device=device)
            (
                torch.arange(64, device=device),
                torch.linspace(0, 1, 64, device=device),
                torch.rand(64, device=device),
            )
            F.one_hot(ids(64, 99), 64), torch.histc(each.detach().float(), 10), each.detach().bernoulli_(0.5)
        for each in (image, last):
            run(F.batch_norm(each, x(32).detach(), x(32).detach().abs(), x(32), x(32), True))
            run(F.batch_norm(each, x(32).detach(), x(32).detach().abs(), x(32), x(32), False))
            run(F.group_norm(each, 8, x(32, dtype=dtype), x(32, dtype=dtype)))
            run(F.instance_norm(each))
            run(F.max_pool2d(each, 3, 2, 1))
            run(F.avg_pool2d(each, 2))
            run(F.adaptive_avg_pool2d(each, 1))
            run(F.adaptive_avg_pool2d(each, 7))
            run(F.adaptive_max_pool2d(each, 1))
            run(each.mean((2, 3)))
            for mode in ("nearest", "bilinear", "bicubic"):
                run(F.interpolate(each, scale_factor=2, mode=mode))
            run(F.pixel_shuffle(each, 2))
            run(F.pad(each, (1, 1, 1, 1), "reflect"))
            run(F.grid_sample(each, x(16, 28, 28, 2, dtype=dtype)))
            run(F.unfold(each, 3))
            run(F.prelu(each, x(1, dtype=dtype)))
            run(F.cross_entropy(each, ids(32, 16, 28, 28)))
        for rows in (100, 3000, 4000, 40000):
            run(F.embedding(ids(1000, rows), x(1000, 64, dtype=dtype)))
            run(
                F.embedding_bag(
                    ids(1000, rows),
                    x(1000, 64, dtype=dtype),
                    torch.arange(0, rows, 10, device=device),
                    mode="sum",
                )
            )
            run(x(1000, 64, dtype=dtype)[ids(1000, rows)])
        for batch, heads, length, dim in ((2, 8, 128, 64), (2, 4, 200, 32), (4, 8, 512, 128), (8, 6, 64, 80)):
            q, k, v = (x(batch, heads, length, dim, dtype=dtype) for _ in range(3))
            run(F.scaled_dot_product_attention(q, k, v))
            run(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            run(F.scaled_dot_product_attention(q, k, v, attn_mask=ids(2, batch, 1, length, length).bool()))
            run(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=x(1, 1, length, length, dtype=dtype, grad=False)
                )
            )
            run(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
        products(dtype)
        convolutions(dtype)
        recurrent(dtype)
        optimizers()
    log_probs = x(100, 8, 29)
    run(F.ctc_loss(log_probs.log_softmax(-1), ids(28, 8, 20) + 1, ids(50, 8) + 50, ids(10, 8) + 10))
    run(
        torch.stft(
            x(4, 4000), 400, 160, window=torch.hann_window(400, device=device), return_complex=True
        ).abs()
    )
    run(torch.fft.rfft(x(64, 512)).abs())
    run(torch.linalg.inv(x(8, 32, 32)))
    run(torch.einsum("bij,bjk->bik", x(4, 32, 64), x(4, 64, 16)))
    run(torch.cdist(x(64, 32), x(128, 32)))


def products(dtype):
    for m, n, k in (
        (64, 64, 64), (128, 1000, 512), (512, 512, 512), (2048, 768, 768), (2048, 768, 3072), (2048, 2304, 768),
        (4096, 4096, 1024), (16, 4096, 4096), (8192, 320, 320), (8192, 64, 64), (256, 10, 2048), (64, 1, 512),
        (10000, 129, 257), (1024, 50257, 768), (16384, 384, 1536), (512, 8192, 1024), (1000, 3, 100),
        (32768, 128, 256), (6400, 512, 80), (77, 768, 768), (3136, 96, 384), (12544, 256, 64),
    ):  # fmt: skip
        run(F.linear(x(m, k, dtype=dtype), x(n, k, dtype=dtype), x(n, dtype=dtype)))
        run(F.linear(x(m, k, dtype=dtype), x(n, k, dtype=dtype)))
    for batch, m, n, k in (
        (8, 64, 64, 64),
        (96, 128, 128, 64),
        (12, 512, 64, 512),
        (4, 27, 27, 128),
        (64, 20, 50, 30),
    ):
        run(torch.bmm(x(batch, m, k, dtype=dtype), x(batch, k, n, dtype=dtype)))
    run(x(512, 256, dtype=dtype) @ x(256, dtype=dtype))


def convolutions(dtype):
    for batch, width, out, size, kernel, stride, padding, groups in (
        (32, 3, 64, 64, 7, 2, 3, 1), (32, 3, 32, 32, 3, 1, 1, 1), (32, 64, 64, 28, 3, 1, 1, 1), (32, 64, 128, 28, 3, 2, 1, 1),
        (32, 64, 256, 28, 1, 1, 0, 1), (32, 256, 512, 14, 1, 2, 0, 1), (32, 256, 256, 14, 3, 1, 1, 1),
        (32, 512, 512, 7, 3, 1, 1, 1), (32, 96, 96, 28, 3, 1, 1, 96), (32, 96, 96, 28, 7, 1, 3, 96),
        (32, 128, 128, 28, 3, 1, 1, 4), (32, 128, 128, 28, 3, 1, 1, 32), (32, 30, 50, 28, 3, 1, 1, 1),
        (32, 6, 16, 14, 5, 1, 0, 1), (32, 64, 3, 32, 3, 1, 1, 1), (32, 64, 1, 32, 1, 1, 0, 1), (64, 1, 10, 28, 5, 1, 0, 1),
        (32, 768, 768, 14, 1, 1, 0, 1), (32, 3, 384, 64, 16, 16, 0, 1), (8, 128, 128, 56, 5, 1, 2, 1),
        (4, 320, 320, 32, 3, 1, 1, 1), (16, 512, 512, 8, 3, 1, 1, 1), (128, 128, 256, 8, 4, 2, 1, 1), (2, 16, 16, 128, 3, 1, 1, 1),
    ):  # fmt: skip
        for layout in (torch.contiguous_format, torch.channels_last):
            data = x(batch, width, size, size, dtype=dtype).detach().to(memory_format=layout).requires_grad_()
            weight = (
                x(out, width // groups, kernel, kernel, dtype=dtype)
                .detach()
                .to(memory_format=layout)
                .requires_grad_()
            )
            bias = x(out, dtype=dtype) if width % 3 else None
            run(F.conv2d(data, weight, bias, stride, padding, groups=groups))
    for batch, width, out, size, stride in (
        (32, 100, 128, 1, 1),
        (32, 128, 64, 8, 2),
        (16, 64, 3, 32, 2),
        (4, 256, 128, 28, 2),
    ):
        run(
            F.conv_transpose2d(
                x(batch, width, size, size, dtype=dtype),
                x(width, out, 4, 4, dtype=dtype),
                None,
                stride,
                stride - 1,
            )
        )
    for batch, width, out, size, kernel, stride in (
        (32, 80, 512, 400, 3, 2),
        (8, 1, 64, 4000, 10, 5),
        (16, 128, 128, 200, 1, 1),
        (8, 512, 512, 100, 3, 1),
    ):
        run(
            F.conv1d(
                x(batch, width, size, dtype=dtype),
                x(out, width, kernel, dtype=dtype),
                x(out, dtype=dtype),
                stride,
            )
        )
    for batch, width, out, size in ((2, 3, 32, 16), (2, 32, 64, 16), (4, 64, 64, 8)):
        run(
            F.conv3d(
                x(batch, width, size, size, size, dtype=dtype),
                x(out, width, 3, 3, 3, dtype=dtype),
                None,
                1,
                1,
            )
        )


def recurrent(dtype):
    for kind, layers, both in (
        ("LSTM", 1, False),
        ("LSTM", 2, True),
        ("GRU", 2, False),
        ("GRU", 1, True),
        ("RNN", 1, False),
        ("LSTM", 3, True),
    ):
        for width, hidden, batch, steps in ((128, 256, 32, 20), (80, 100, 7, 15)):
            layer = getattr(nn, kind)(width, hidden, layers, bidirectional=both).to(device, dtype)
            run(layer(x(steps, batch, width, dtype=dtype))[0])
            lengths = torch.arange(steps, steps - batch, -1).clamp(min=1)
            packed = nn.utils.rnn.pack_padded_sequence(x(steps, batch, width, dtype=dtype), lengths)
            run(nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0])


def optimizers():
    sizes = [(512, 512), (512,)] * 40 + [(4096, 1024)] * 4 + [(50257, 64)]
    parameters = [nn.Parameter(x(*size, grad=False)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for make in (
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta,
    ):  # fmt: skip
        made = make(parameters, lr=1e-3)
        made.step(), made.step()
    for options in (
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
        {"fused": True, "momentum": 0.9},
    ):
        made = torch.optim.SGD(parameters, lr=1e-3, **options)
        made.step(), made.step()
    for options in ({"fused": True}, {"foreach": False}, {"amsgrad": True}, {"capturable": True}):
        made = torch.optim.AdamW(parameters, lr=1e-3, **options)
        made.step(), made.step()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    nn.utils.clip_grad_value_(parameters, 1.0)
    made.zero_grad(set_to_none=False)


last = nn.Parameter(torch.ones(8, device=device))
optimizer = torch.optim.SGD([last], lr=0.1)
for _ in range(100):
    last.grad = torch.ones_like(last)
    functions()
    optimizer.step()
