"""LAY003: a weight stored the slower way round."""

from __future__ import annotations

from dataclasses import replace

from tilefit.ops import BACKWARD_WEIGHT, Gemm, StepOp
from tilefit.rules.alignment.padding import gemm_command
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.rules.layers import Linear, gemm, linears
from tilefit.units import seconds

_TWINS = {"TN": "NN", "NN": "TN"}


class OperandLayout(Rule):
    """A weight stored transposed would make the layer's products faster.

    What it sees: linear layers whose forward product and gradients the model predicts to be faster, taken
    together, with the weight stored the other way round: [in, out] instead of [out, in] or back.

    Why it costs time: the letters of a product (cuBLAS's, column-major) follow from how the weight is
    stored. ``nn.Linear``, [out, in], runs ``TN`` forward and ``NN`` for the data gradient; a weight stored
    [in, out], such as GPT-2's ``Conv1D``, the reverse; the weight gradient is ``NT`` either way, with its
    two sizes exchanged. Large 16-bit products on recent GPUs do not care. Skinny ones, misaligned ones and
    those of older GPUs do.

    Arithmetic: bf16 on an H200, 4096^3 with one size made odd: ``NN`` 1049 µs, ``TN`` 1472 µs. On a V100
    the better of the two was worth 1.1 to 2.5 times on 21 of the 73 shapes that DeepBench lists for both.

    Example: replace ``Conv1D(3 * d, d)`` by ``nn.Linear(d, 3 * d)`` and load its weight transposed.

    Sources: DeepBench's published GEMM times; measurements on an H200 with cuBLAS 13.
    """

    code = "LAY003"
    title = "weight stored the slower way round"
    wrong = Case(
        "Stored().bfloat16()",
        "torch.empty(4096, 4096, dtype=torch.bfloat16)",
        "--infer",
        """
        class Stored(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.empty(4089, 4096))

            def forward(self, x):
                return x @ self.weight.T
        """,
    )
    right = wrong.but("4089, 4096", "4096, 4089").but("weight.T", "weight")

    def check(self, context: Context) -> Proposals:
        step = context.step
        groups: dict[tuple[int, int, str, str], list[Linear]] = {}
        for layer in linears(step):
            op = step.ops[layer.indices[0]].op
            # A tied weight is also a table, whose rows are looked up.
            parameter = step.parameters.get(layer.parameter)
            if isinstance(op, Gemm) and op.layout in _TWINS and not (parameter and parameter.aliases):
                key = (layer.in_features, layer.out_features, layer.dtype, op.layout)
                groups.setdefault(key, []).append(layer)
        for (in_features, out_features, _, layout), members in groups.items():
            indices = sorted(index for layer in members for index in layer.indices)
            turned = {index: (_turned(step.ops[index]),) for index in indices}
            if context.replaced_s(turned) >= context.time_s(indices):
                continue
            ways = ("[out, in]", "[in, out]")
            stored, other = ways if gemm(step, indices[0]).layout == "TN" else ways[::-1]
            yield Proposal(
                place=Place.of(members, sites=len(members)),
                message=(
                    f"{in_features} -> {out_features} features are slower with the weight stored {stored} "
                    f"({layout}) than {other} ({_TWINS[layout]})"
                ),
                fix=f"Store the weight {other} (transpose it once, when it is loaded).",
                safety=ADVICE,
                change=Change(turned),
                arithmetic=(
                    f"{len(indices)} products: {context.saving(turned)}",
                    *(_line(context, index, turned[index][0]) for index in members[0].indices),
                ),
                next_command=gemm_command(context, indices[0]),
            )


def _turned(entry: StepOp) -> StepOp:
    op = entry.op
    assert isinstance(op, Gemm)
    if entry.phase == BACKWARD_WEIGHT:
        return replace(entry, op=replace(op, m=op.n, n=op.m, ld_a=op.ld_b, ld_b=op.ld_a))
    return replace(entry, op=replace(op, layout=_TWINS.get(op.layout, op.layout), ld_b=0))


def _line(context: Context, index: int, after: StepOp) -> str:
    phase, op = context.step.ops[index].phase, gemm(context.step, index)
    assert isinstance(after.op, Gemm)
    before_s, after_s = context.time_s([index]), context.replaced_s({index: (after,)})
    return f"{phase} {op.layout} {op.shape}: {seconds(before_s)} -> {after.op.layout} {seconds(after_s)}"
