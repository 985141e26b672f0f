"""What runs in which element type: forward, backward, in evaluation, and the loss."""

from __future__ import annotations

from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm
from tilefit.units import count, share


class UnscaledFp16(PrecisionRule, code="AMP007", needs=("fp16",)):
    """Gradients go through fp16, and no scale keeps small ones from becoming zero.

    What it sees: The forward pass ran in fp16 autocast, the gradients of the loss flow through fp16
    operations, and the optimizer steps on gradients no scaler has seen. A constant factor on the loss counts
    as a scale. The shares of gradient values that are zero or subnormal in fp16 are measured on the watched
    steps.

    Why nobody notices: fp16 has full precision down to 6.1e-5 and becomes zero below 3e-8. Small gradients
    vanish, large ones do not, and the loss settles a little early.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        loss.backward()
        optimizer.step()

    Right:

        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Source: Micikevicius et al., "Mixed Precision Training" (2018), loss scaling.
    """

    title = "fp16 gradients without a loss scale"
    fix = "Use torch.amp.GradScaler, or bf16, which has fp32's range."

    #: Gradient values looked at, and the shares that are too small for full precision, and exactly zero.
    number: int
    subnormal: float
    zero: float

    def judge(self) -> Alarm:
        shares = (
            f"{share(self.zero)} are zero and {share(self.subnormal)} below 6.1e-5, where fp16 loses bits"
        )
        measured = [f"of {count(self.number)} fp16 gradient values {shares}"] if self.number else []
        return self.alarm("gradients go through fp16 without a loss scale", *measured)


class StaleWeightCache(PrecisionRule, code="AMP009", severity=ERROR, needs=("autocast",)):
    """One autocast region surrounds the whole loop, so every forward pass uses the first weights.

    What it sees: Weights are stepped inside an outermost autocast region with its cache on, and a later
    forward pass of the same region computes gradients for them in half precision. A region per iteration that
    contains the backward pass and the step is harmless.

    Why nobody notices: Autocast keeps the half-precision copy of a weight until the outermost region ends.
    The optimizer changes the weights; the forward pass does not see it. The loss stays the same for the same
    batch, and wanders with the data otherwise.

    Wrong:

        with torch.autocast("cuda", dtype=torch.bfloat16):
            for x in data:
                loss = model(x)
                loss.backward()
                optimizer.step()

    Right:

        for x in data:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
            optimizer.step()

    Source: PyTorch, `torch.autocast`, cache_enabled; regions should hold the forward pass and the loss alone.
    """

    title = "autocast keeps using old weights"
    fix = "Enter the region in each iteration, around the forward pass and the loss alone."

    #: Weights that were changed inside an autocast region that goes on using their old copies.
    parameters: int

    def judge(self) -> Alarm:
        copies = f"the half-precision copies of {self.parameters} weights from before they were stepped"
        return self.alarm(f"this autocast region goes on with {copies}", "stepped inside the region")


class CacheDropsGradients(
    PrecisionRule, code="AMP010", severity=ERROR, needs=("autocast",), by_module=True, closely=True
):
    """A forward pass without gradients makes a later one in the same autocast region lose them.

    What it sees: A weight took part in a forward pass with gradients, the module's output received a
    gradient, the weight received none, and the module had run without gradients before in the same region.

    Why nobody notices: The copy of the weight that autocast made under `no_grad` has no history, and older
    versions of PyTorch used it again. The layer's input still gets a gradient, so everything before it
    learns.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                teacher = model(x)
            loss = criterion(model(x), teacher)

    Right:

        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            teacher = model(x)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), teacher)

    Source: PyTorch pull request 165068, which mended it at the end of 2025.
    """

    title = "weights lose their gradient to autocast's cache"
    fix = "Give the forward pass without gradients a region of its own, or pass cache_enabled=False."

    def judge(self) -> Alarm:
        why = "a forward pass without gradients came first in this autocast region"
        return self.alarm(f"{self.module} gets no gradient although its output does: {why}")


class LossInHalfPrecision(PrecisionRule, code="AMP011"):
    """The loss is computed in fp16 or bf16, and rounded to it.

    What it sees: The number that ``backward()`` starts from, or one that it was computed from, is fp16 or
    bf16. Casting the finished loss to fp32 comes too late, its digits are gone: cast the model's output,
    before the loss. In a model that is bf16 throughout, without autocast, it is a note.

    Why nobody notices: bf16 rounds the loss to 3 digits, fp16 to 4, which no log shows. And with a loss scale
    of 65536 the gradient of an fp16 loss is inf at once, because fp16 ends at 65504: the scaler lowers the
    scale, and gets the blame for the skipped steps.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = ((out - y.half()) ** 2).mean()

    Right:

        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = ((out.float() - y) ** 2).mean()

    Source: PyTorch, "Autocast Op Reference": losses are in its fp32 list, arithmetic by hand is not.
    """

    title = "the loss is computed in half precision"
    fix = (
        "Compute the loss in float32: cast the model's output before it, out.float(); or call a loss of "
        "torch.nn.functional inside the autocast block, which casts by itself."
    )

    #: The operation that made the scalar, and its type.
    operation: str
    dtype: str
    #: An autocast region was active in the step.
    autocast: bool
    #: What the scaler multiplied it by, or None without one.
    scale: float | None

    def judge(self) -> Alarm:
        dtype, limit = self.dtype, LARGEST[self.dtype]
        severity = ERROR if dtype == "float16" else WARNING if self.autocast else NOTE
        bits, rounding = ("8", "0.4 %") if dtype == "bfloat16" else ("11", "0.05 %")
        arithmetic = [f"{dtype} keeps {bits} bits: the loss is rounded by up to {rounding}"]
        if self.scale is not None and self.scale > limit:
            start = f"backward() starts from the loss scale, {figure(self.scale)}"
            arithmetic.append(f"{start}, which is inf in {dtype}: the largest number is {limit:g}")
        message = f"the loss is computed in {dtype}, not in float32 (by {self.operation})"
        return self.alarm(message, *arithmetic, severity=severity)


class BackwardInOtherDtype(PrecisionRule, code="AMP017", needs=("half precision",), closely=True):
    """The backward pass computes in another precision than the forward pass.

    What it sees: A custom autograd Function whose matrix products have different element types forward and
    backward; a module that activation checkpointing recomputes in another type; an autocast region entered
    during the backward pass with a type the forward pass never used.

    Why nobody notices: Autocast is on in a Function's `forward` and off in its `backward` unless both are
    decorated. A recomputation under a bare `torch.autocast("cuda")` is fp16 even where the forward pass ran
    in bf16. The gradient then belongs to a slightly different function.

    Wrong:

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w): ...

    Right:

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x, w): ...

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, g): ...

    Source: PyTorch, "Automatic Mixed Precision examples", autocast and custom autograd functions.
    """

    title = "the backward pass runs in another precision"
    fix = (
        "Recompute under the forward pass's own autocast: torch.utils.checkpoint does so; by hand, pass "
        "device and dtype."
    )

    #: ``function`` (a custom autograd Function), ``region`` (an autocast region entered while going backward)
    #: or ``recompute`` (a module's second forward pass); and the class or the module.
    kind: str
    name: str
    #: Element types.
    forward: str
    backward: str

    def judge(self) -> Alarm:
        types = f"{self.forward} forward and {self.backward} backward"
        if self.kind == "function":
            fix = "Decorate forward with torch.amp.custom_fwd(device_type=...) and backward with custom_bwd."
            why = "autocast is off inside backward unless it is decorated"
            return self.alarm(f"{self.name} multiplies in {types}", why, fix=fix)
        what = self.name if self.kind == "recompute" else "what this region recomputes"
        return self.alarm(f"{what} runs in {types}", severity=ERROR)


class EvalTrainMismatch(PrecisionRule, code="AMP025", needs=("autocast", "evaluation"), by_module=True):
    """The model is evaluated in another precision than it is trained in.

    What it sees: The autocast state of the forward passes after `model.eval()`, and of those with gradients.

    Why nobody notices: Metrics are a little lower or less stable than they could be, or better than what will
    be deployed.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            train(model)
        model.eval()
        metric(model(x))

    Right:

        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            metric(model(x))

    Source: PyTorch, "Automatic Mixed Precision examples": inference belongs under autocast as well.
    """

    title = "evaluation runs in another precision"
    fix = "Evaluate under the autocast of training, or compare metrics once and mute this rule."

    #: Element types; ``float32`` means no autocast.
    training: str
    evaluation: str

    def judge(self) -> Alarm:
        return self.alarm(f"{self.module} is trained in {self.training} and evaluated in {self.evaluation}")
