"""PAR001: a size that the tensor-parallel ranks do not divide."""

from __future__ import annotations

from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ERROR, UNSAFE


class UnevenShards(Rule):
    """Heads or features do not divide over the tensor-parallel ranks.

    What it sees: the query heads, key and value heads and MLP features of a step that ``--tensor-parallel``
    splits, where the number of ranks does not divide them; of key and value heads that are fewer than the
    ranks, where they do not divide the number of ranks. A vocabulary is filled up instead: ALN002 looks at
    its shard.

    Why it matters: Megatron-LM, and what is built like it, refuse to start. Were the ranks given uneven
    parts, all would wait at every all-reduce for the one with the most.

    Arithmetic: 25 heads over 2 ranks are 13 and 12: the ranks are busy 96 % of the attention's time. 12 heads
    over 8 ranks are 2 on some and 1 on others: busy 75 % of it.

    Example: GPT-2 XL has 25 heads, which only 5 and 25 ranks divide.

    Fix: take a number of ranks that divides the size, or change the size before training.

    Source: Shoeybi and others, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism" (2019), section 3.
    """

    code = "PAR001"
    title = "a size that the tensor-parallel ranks do not divide"
    wrong = Case(
        "SelfAttention()",
        "torch.empty(8, 1024, 1600)",
        "--amp bf16 --tensor-parallel 2",
        """
        class SelfAttention(nn.Module):
            def __init__(self, width=1600, heads=25):
                super().__init__()
                self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(q, k, v)
                return self.out(y.transpose(1, 2).flatten(-2))
        """,
    )
    right = wrong.under("--amp bf16 --tensor-parallel 5")

    def check(self, context: Context) -> Proposals:
        shards = context.step.shards
        ranks = max((shard.ranks for shard in shards), default=1)
        for shard in shards:
            if shard.what == "vocabulary" or (shard.is_even and ranks % shard.ranks == 0):
                continue
            dividing = [n for n in range(2, ranks) if shard.size % n == 0]
            fewer = f"Take {dividing[-1]} ranks, or " if dividing else ""
            yield Proposal(
                place=Place(),
                message=f"{shard.size} {shard.what} do not divide over {ranks} tensor-parallel ranks",
                fix=f"{fewer}{'c' if fewer else 'C'}hoose a number of {shard.what} that {ranks} divides.",
                safety=UNSAFE,
                change=None,
                arithmetic=(
                    f"the rank with the most has {shard.per_rank} of {shard.size}; an even share is "
                    f"{shard.size / ranks:.4g}",
                ),
                severity=ERROR,
            )
