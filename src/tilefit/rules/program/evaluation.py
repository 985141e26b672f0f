"""GRD002: evaluation with gradients on."""

from __future__ import annotations

from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, NOTE
from tilefit.rules.program.habits import habits


class Evaluation(Rule):
    """A model is evaluated as if a backward pass would follow.

    What it sees: A forward pass of a module in `eval()` mode with gradients on, of which no backward pass
    came.

    Why it costs time: Every operation keeps what its gradient would need, so that the memory of a training
    step is taken, and smaller batches fit; the host makes the graph besides.

    Arithmetic: None. No kernel goes away, so the finding has no price: what is gained is memory.

    Example: `with torch.no_grad():`, or `@torch.inference_mode()` on the function.

    Source: PyTorch, "Autograd mechanics", locally disabling gradient computation.
    """

    code = "GRD002"
    title = "evaluation with gradients on"
    wrong = Case.training(
        """
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to("cuda")


        def evaluate():
            net.eval()
            loss = F.mse_loss(net(x), x)
            net.train()
            return loss


        """,
        4096,
        1024,
    ).but("    optimizer.zero_grad()", "    evaluate()\n    optimizer.zero_grad()")
    right = wrong.but("def evaluate", "@torch.no_grad()\ndef evaluate")

    def check(self, context: Context) -> Proposals:
        for first, *_ in habits(context.step, "evaluates_with_gradients"):
            yield Proposal(
                place=Place(source=first.site.source),
                message="a model is evaluated with gradients on"
                + (f": {first.detail}" if first.detail else ""),
                fix="Evaluate under torch.no_grad() or torch.inference_mode().",
                safety=ADVICE,
                change=None,
                severity=NOTE,
            )
