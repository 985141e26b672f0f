"""ALN002: the vocabulary."""

from __future__ import annotations

from tilefit.rules.alignment.features import Group, designed
from tilefit.rules.alignment.padding import arithmetic, gemm_command, misfit, pairs, run_on
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.units import size as bytes_text


class Vocabulary(Rule):
    """The vocabulary is not a multiple of 16 bytes.

    What it sees: the layer that scores every token (the head of a language model, often tied to the
    embedding table), with a number of tokens that is no multiple of 8 in fp16 and bf16 or 4 in TF32.
    Tokenizers hardly ever have such a number: 50257 (GPT-2), 50265 (RoBERTa), 30522 (BERT), 51865
    (Whisper), 32001 (Llama with one token added).

    Why it costs time: the head is the largest matrix product of many models, and the vocabulary is a
    contiguous dimension in all three of its passes (C of the forward product, A of the data gradient, A
    of the weight gradient; of B too where the weight is stored [in, out]), so that none of them gets the
    fast kernels. See ALN001.

    Arithmetic: 16384 tokens x 768 features, bf16, H200, three passes: 30.7 ms with 50257 tokens, 5.8 ms
    with 50264 and 5.6 ms with 50304. The whole GPT-2 step fell from 109.4 to 83.6 ms in eager mode, and
    from 46.8 to 44.7 ms compiled, because the compiler pads by itself. Price of it: the embedding, its
    gradient, the logits and the loss grow by 0.09 %.

    Example: ``GPT2Config(vocab_size=50257)`` -> ``vocab_size=50304``.

    Fix: pad the table and the head to a multiple of 64, where a full memory line begins. The added tokens
    never occur in the data. In a trained model mask their logits with minus infinity if outputs must stay
    the same to the last bit; without the mask they add to the softmax's denominator until training has
    pushed them down.

    Sources: NVIDIA, "Linear/Fully-Connected Layers User's Guide" (vocabulary 33708 -> 33712); the times are
    measurements on an H200 with cuBLAS 13.
    """

    code = "ALN002"
    title = "vocabulary not a multiple of 16 bytes"
    wrong = Case(
        "LanguageModel()",
        "torch.zeros(16, 1024, dtype=torch.long)",
        "--amp bf16",
        """
        class LanguageModel(nn.Module):
            def __init__(self, vocabulary=50257, features=768):
                super().__init__()
                self.embedding = nn.Embedding(vocabulary, features)
                self.head = nn.Linear(features, vocabulary, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, tokens):
                logits = self.head(self.embedding(tokens))
                return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        """,
    )
    right = wrong.but("50257", "50304")

    def check(self, context: Context) -> Proposals:
        for group in designed(context.step):
            if group.vocabularies:
                yield self._proposal(context, group)

    def _proposal(self, context: Context, group: Group) -> Proposal:
        step = context.step
        products = group.products()
        sizes, resized, streams = group.padded(context)
        old = max(group.vocabularies)
        new = sizes.pop(old)
        # Of a tensor-parallel step the rank has a part of it.
        ranks, whole = next(
            ((s.ranks, s.size) for s in step.shards if s.what == "vocabulary" and s.per_rank == old), (1, old)
        )
        shard = f"a rank's {old} tokens of the vocabulary" if ranks > 1 else f"a vocabulary of {old}"
        shard += "".join(f" and {size} features" for size in sizes) + (
            " are" if ranks > 1 or sizes else " is"
        )
        heads = [layer for layer in group.layers if layer.out_features == old]
        names = dict.fromkeys(layer.parameter for layer in heads)
        tied = [alias for name in names if name in step.parameters for alias in step.parameters[name].aliases]
        grown = sum(
            entry.op.moved_bytes - step.ops[index].op.moved_bytes for index, (entry,) in streams.items()
        )
        return Proposal(
            place=Place.of(heads, sites=len(heads)),
            message=f"{shard} {misfit(group.dtype)}: {run_on(context, products)}",
            fix=(
                f"Pad the vocabulary to {new * ranks}: vocab_size={new * ranks} in the configuration, or "
                f"model.resize_token_embeddings({new * ranks}); mask the {new * ranks - whole} added logits "
                "where outputs must not change."
            )
            + (f" It pays together with {pairs(sizes)}, which the same layers have." if sizes else ""),
            safety=SAFE,
            change=Change({**streams, **resized}),
            arithmetic=(
                *arithmetic(context, resized, products),
                f"{', '.join([*names, *tied])}: {new - old} more rows; embedding, softmax, loss and "
                f"optimizer move {bytes_text(grown)} more",
            ),
            next_command=gemm_command(context, heads[0].indices[0]),
        )
