"""ALN001: features of linear layers."""

from __future__ import annotations

from tilefit.rules.alignment.features import Group, designed
from tilefit.rules.alignment.padding import (
    arithmetic,
    gemm_command,
    is_misaligned,
    misfit,
    run_on,
    with_zeros,
)
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.sites import pattern


class LinearFeatures(Rule):
    """The features of a linear layer are not a multiple of 16 bytes.

    What it sees: linear layers with an ``in_features`` or ``out_features`` whose rows do not all start at
    a multiple of 16 bytes: 8 elements in fp16 and bf16, 4 in TF32, 16 in fp8 and int8. Layers that share
    the size (the output of one is the input of the next) are one finding, because they change together.

    Why it costs time: the fast kernels load operands in 16-byte pieces (on Hopper by TMA, which refuses
    anything else). A matrix whose rows are not such a multiple falls to an older kernel that loads element
    by element. Only the dimension that is contiguous in memory counts, and which one that is depends on
    the layout: in PyTorch's ``F.linear`` (BLAS letters) the forward product ``TN`` needs ``in_features``
    (A, B) and ``out_features`` (C), its data gradient ``NN`` needs both again, its weight gradient ``NT``
    too. The number of rows (batch x sequence) is contiguous nowhere.

    Arithmetic: 4096 x 4096 x 4096 in bf16 on an H200 takes 202 µs; with 4090 or 4092 in place of one 4096
    about 500 µs (2.4 to 2.7 times), with 4089 it takes 1.0 to 1.5 ms (4.9 to 7.3 times). Padding 5461 to
    5504 adds 0.8 % to the arithmetic.

    Example: a SwiGLU layer of ``int(8 / 3 * 2048) = 5461`` features. Use 5504.

    Fix: choose the padded size when you design or train the model. In a trained one, pad the weights with
    zeros: the added outputs are zero, and after an activation that maps zero to zero they meet zero
    columns of the next weight, so outputs and gradients stay the same. Not so where a normalization, a
    softmax or a loss takes all of them together: then the size is to be chosen before training, or the
    products alone are padded (``tilefit fix``).

    Sources: NVIDIA, "Matrix Multiplication Background User's Guide", Tensor Core requirements, and
    "Linear/Fully-Connected Layers User's Guide"; the times are measurements on an H200 with cuBLAS 13.
    """

    code = "ALN001"
    title = "linear features not a multiple of 16 bytes"
    wrong = Case(
        "nn.Sequential(nn.Linear(2048, 5461), nn.SiLU(), nn.Linear(5461, 2048))",
        "torch.empty(16384, 2048)",
        "--amp bf16",
    )
    right = wrong.but("5461", "5504")

    def check(self, context: Context) -> Proposals:
        for group in designed(context.step):
            # A vocabulary is ALN002's, a recurrent size ALN007's.
            if not group.vocabularies and not group.recurrent:
                yield self._proposal(context, group)

    def _proposal(self, context: Context, group: Group) -> Proposal:
        products = group.products()
        sizes, resized, streams = group.padded(context)
        how, safety = with_zeros(context.step, sizes)
        if safety != SAFE:
            how += "; tilefit fix pads the products alone"
        changes = []
        for old, new in sizes.items():
            for name in ("out_features", "in_features"):
                modules = [layer.module for layer in group.layers if getattr(layer, name) == old]
                if modules:
                    of = f" of {pattern(modules)}" if any(modules) else ""  # the model itself has no path
                    changes.append(f"{name}{of} {old} -> {new}")
        heads = {part: size for size, part in group.parts.items() if part not in sizes}
        changes += [f"heads of {part} -> {sizes[size] * part // size}" for part, size in heads.items()]
        how += "".join(f", and keep the scale of 1/sqrt({part})" for part in heads if safety == SAFE)
        odd = [str(size) for size in sizes if is_misaligned(size, group.dtype)]
        return Proposal(
            place=Place.of(group.layers, sites=len(group.layers)),
            message=f"{' and '.join(odd)} features are {misfit(group.dtype)}: {run_on(context, products)}",
            fix=f"Change {', '.join(changes)} ({how}).",
            safety=SAFE,
            change=Change({**streams, **resized}),
            arithmetic=arithmetic(context, resized, products),
            next_command=gemm_command(context, products[0]),
        )
