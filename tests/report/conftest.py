"""A synthetic report: every number is round, so that a reader can check the rendering by eye."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit.cost import Estimate, StepEstimate
from tilefit.cost.estimate import Span, Streams
from tilefit.gpus import Gpu
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Assumption,
    Exchange,
    Gemm,
    HostEvent,
    Loader,
    Memory,
    Parameter,
    Program,
    Settings,
    Site,
    Step,
    StepOp,
    Streaming,
)
from tilefit.ops.program import TO_GPU, TO_HOST, WAIT
from tilefit.report import Comparison, Report, Table, Watched, build
from tilefit.report.program import Serving
from tilefit.report.ranks import Ranks, Stage
from tilefit.rules import Finding
from tilefit.rules.finding import Alarm

HOSTILE = "[red]<script>alert(1)</script>|`*_x_*`[/red]\x1b[31m\n# y"

GPU = Gpu(
    name="big",
    title="Big GPU 100GB",
    architecture="hopper",
    compute_capability=(9, 0),
    sms=100,
    boost_clock_hz=1e9,
    flop_per_clock_per_sm={"fp32": 256, "tf32": 2048, "bf16": 4096},
    memory_bytes=100_000_000_000,
    memory_bandwidth_bytes_per_s=4e12,
    l2_bytes=50_000_000,
    shared_memory_bytes_per_sm=228 * 1024,
)
SMALL_GPU = replace(GPU, name="small", title="Small GPU 10GB", sms=20, memory_bytes=10_000_000_000)

_HEAD = Site("lm_head", "transformers/models/gpt2/modeling_gpt2.py:712")
_OPS = (
    *(
        StepOp(
            Gemm(16384, 3072, 768), FORWARD, Site(f"transformer.h.{layer}.mlp.c_fc", "model.py:41"), "aten.mm"
        )
        for layer in range(12)
    ),
    StepOp(
        Streaming("pointwise", 50_331_648, 100_663_296, 100_663_296, "bf16"),
        FORWARD,
        Site("transformer.h.0.mlp.act", "model.py:42"),
        "aten.gelu",
    ),
    StepOp(Gemm(16384, 50257, 768), FORWARD, _HEAD, "aten.mm"),
    StepOp(Gemm(16384, 768, 50257, layout="NN"), BACKWARD_DATA, _HEAD, "aten.mm"),
    StepOp(Gemm(50257, 768, 16384, layout="NT"), BACKWARD_WEIGHT, _HEAD, "aten.mm"),
    StepOp(Streaming("other", 1000, 2_000_000, 2_000_000, "bf16"), FORWARD, _HEAD, "mylib.scan"),
    StepOp(
        Streaming("optimizer", 124_000_000, 2_000_000_000, 1_500_000_000, "fp32"), OPTIMIZER, Site(), "adamw"
    ),
)

STEP = Step(
    ops=_OPS,
    memory=Memory(
        parameter_bytes=500_000_000,
        gradient_bytes=500_000_000,
        optimizer_bytes=1_000_000_000,
        saved_bytes=7_000_000_000,
        peak_bytes=10_000_000_000,
    ),
    settings=Settings(amp="bf16", optimizer="adamw"),
    inputs=("input_ids: int64[16,1024]",),
    batch=16,
    parameters={"transformer.wte.weight": Parameter((50257, 768), "fp32")},
    model="gpt2",
    notes=("The loss is the mean of the output.",),
)

FINDINGS = (
    Finding(
        code="ALN002",
        severity="warning",
        module="lm_head",
        source="transformers/models/gpt2/modeling_gpt2.py:712",
        message="The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.",
        fix="Pad the embedding and the head to 50304 rows.",
        safety="safe",
        gain_s=8.0e-3,
        gain_low_s=6.0e-3,
        gain_high_s=10.0e-3,
        gain_fraction=0.2,
        arithmetic=("50257 = 29 x 1733; 50304 = 64 x 786", "sm80 at 10.0 ms against sm90 at 2.00 ms"),
        next_command="tilefit gemm 16384 50257 768 --gpu big",
    ),
    Finding(
        code="NTC003",
        severity="note",
        module="transformer.h.*.mlp.act",
        source="model.py:42",
        message="A chain of 3 pointwise operations reads and writes its activation 3 times.",
        fix="Compile the block, or call the fused form.",
        safety="advice",
        gain_s=1.2e-3,
        gain_low_s=1.0e-3,
        gain_high_s=1.4e-3,
        gain_fraction=0.03,
        arithmetic=("3 x 201 MB at 4 TB/s",),
        sites=12,
    ),
)


def estimate(scale: float = 1.0) -> StepEstimate:
    """Round estimates for :data:`STEP`, ``scale`` times as slow."""
    times = [1e-3] * 12 + [0.5e-3, 10e-3, 8e-3, 7e-3, 0.1e-3, 2.4e-3]
    bounds = ["math"] * 12 + ["memory", "math", "math", "math", "latency", "memory"]
    ops = tuple(
        Estimate(
            time_s * scale,
            0.8 * time_s * scale,
            1.25 * time_s * scale,
            bound,
            kernel_family="sm90",
            provenance="estimated",
        )
        for time_s, bound in zip(times, bounds, strict=True)
    )
    return StepEstimate(
        ops=ops,
        time_s=40e-3 * scale,
        low_s=32e-3 * scale,
        high_s=50e-3 * scale,
        gpu_time_s=sum(times) * scale,
        host_time_s=5e-3,
        flop=STEP.flop,
        bound_time_s={
            "math": 37e-3 * scale,
            "memory": 2.9e-3 * scale,
            "latency": 0.1e-3 * scale,
            "launch": 0.0,
        },
    )


@pytest.fixture
def report() -> Report:
    return build(STEP, GPU, estimate(), FINDINGS)


@pytest.fixture
def healthy() -> Report:
    """A step with nothing worth changing."""
    return build(STEP, GPU, estimate(), ())


@pytest.fixture
def comparison(report: Report) -> Comparison:
    """The step on a GPU it fits and on one it does not."""
    error = Finding(
        code="BAT002",
        severity="error",
        module="",
        source="",
        message="The step needs 12 GiB, the GPU has 10 GiB.",
        fix="Use a batch of 12.",
        safety="unsafe",
        gain_s=0.0,
        gain_low_s=0.0,
        gain_high_s=0.0,
        gain_fraction=0.0,
    )
    small = build(STEP, SMALL_GPU, estimate(5.0), (error, replace(FINDINGS[0], gain_fraction=0.25)))
    return Comparison((report, small))


@pytest.fixture
def hostile() -> Report:
    """Names that try to be markup in every format."""
    name = HOSTILE
    finding = replace(
        FINDINGS[0],
        module=name,
        source=f"{name}.py:1",
        message=name,
        fix=name,
        arithmetic=(name,),
        next_command=name,
    )
    ops = tuple(
        replace(op, site=Site(name, name), name=name if isinstance(op.op, Streaming) else op.name)
        for op in STEP.ops
    )
    step = replace(STEP, ops=ops, model=name, inputs=(name,), notes=(name,))
    return build(step, replace(GPU, title=name), estimate(), (finding,))


@pytest.fixture
def watched() -> Watched:
    from tilefit.report.watched import Check

    return Watched(
        title="train.py",
        setup=("autocast float16", "loss scale 65536", "AdamW"),
        steps=20,
        findings=(
            Alarm(
                code="AMP001",
                severity="error",
                source="project/train.py:14",
                message="clipped at 1 while the gradients carry a loss scale of 65536",
                fix="Call scaler.unscale_(optimizer) first.",
                arithmetic=("effective limit 1 / 65536 = 1.5e-05",),
                steps=20,
            ),
            Alarm(
                code="AMP018",
                severity="note",
                source="project/train.py:12",
                message="4 losses are not averaged",
                fix="Divide each loss by 4.",
                module="AdamW",
                first_step=2,
            ),
        ),
        tables=(Table("Operations", ("operation", "float16"), (("mm", "12"),)),),
        unchecked=("a compiled graph",),
        checks=(Check("AMP002", "could not be checked", "a compiled graph"),),
        version="1.0",
    )


@pytest.fixture
def of_ranks(of_program: Report) -> Report:
    """A step of one of sixteen ranks, half of whose communication is hidden."""
    line = Site("layers.0", "train.py:30")
    exchanges = tuple(
        Exchange(0, "all-reduce", "all-reduce", 50 << 20, 16, 8, line, phase="backward-data")
        for _ in range(2)
    )
    program = Program("", "", exchanges=exchanges, ranks=16, per_machine=8)
    streams = Streams(
        40e-3,
        (4e-3, 6e-3),
        [0.0, 5e-3],
        spans=[Span(0, 0.0, 35e-3, 0), Span(1, 20e-3, 24e-3, 0, True), Span(1, 34e-3, 40e-3, 1, True)],
    )
    assert of_program.program is not None
    around = replace(of_program.program, ranks=Ranks.of(program, streams))
    return replace(of_program, program=around)


@pytest.fixture
def of_stages(of_ranks: Report) -> Report:
    """The same of a pipeline's first stage, of two, where a language model serves."""
    assert of_ranks.program is not None
    assert of_ranks.program.ranks is not None
    stages = (Stage(0, 35e-3, 4 << 30), Stage(1, 39e-3, 6 << 30))
    ranks = replace(of_ranks.program.ranks, late_s=4e-3, stages=stages, unmet=1)
    serving = Serving(50e-3, 4, 1, 512, 20e-3)
    return replace(of_ranks, program=replace(of_ranks.program, ranks=ranks, serving=serving))


@pytest.fixture
def of_program() -> Report:
    """A step of a program, with all that a report says of one."""
    line, other = Site("", "train.py:41"), Site("", "train.py:20")
    program = Program(
        "train.py --batch-size 16",
        "4 micro-batches of 4, AdamW, bf16 autocast",
        3,
        events=(
            HostEvent(0, TO_GPU, "to", other, 2_000_000),
            HostEvent(9, WAIT, "item", line),
            HostEvent(18, WAIT, "item", line),
            HostEvent(18, TO_HOST, "cpu", other, 64, True, True),
        ),
        micro_batches=4,
        assumptions=(
            Assumption("item", "fp32[]", "2.31", "train.py:41", 6),
            Assumption("isnan", "fp32[]", "False", "train.py:42"),
        ),
        loaders=(
            Loader("train.py:12", 4, 2, True, 0.01, 5),
            Loader("train.py:13", 4, 0, False),
        ),
        fake=("torchvision.datasets.MNIST: 60000 random images",),
    )
    priced = estimate()
    bounds = {**priced.bound_time_s, "waits": 10e-3}
    unpriced = replace(
        FINDINGS[0], code="GRD002", gain_s=0.0, gain_low_s=0.0, gain_high_s=0.0, gain_fraction=0.0
    )
    return build(
        replace(STEP, program=program), GPU, replace(priced, time_s=50e-3, bound_time_s=bounds), (unpriced,)
    )
