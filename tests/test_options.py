"""What is asked for, as values: one declaration for the command line and for Python."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import pytest
import typer

import tilefit
from tilefit.capture.optimizer import OPTIMIZERS
from tilefit.cli.main import command
from tilefit.cli.option_groups import Group, grouped
from tilefit.errors import UsageError
from tilefit.options import (
    Selection,
    SelectionKeywords,
    Split,
    StepKeywords,
    StepOptions,
    TargetOptions,
    taken,
)

WITH_A_STEP = ["check", "fix", "sweep", "profile"]


def flags(verb: str) -> set[str]:
    """The options of a command."""
    return {flag for parameter in command(verb).commands[verb].params for flag in parameter.opts}


@pytest.mark.parametrize(("kind", "keywords"), [(StepOptions, StepKeywords), (Selection, SelectionKeywords)])
def test_keywords_are_the_fields(kind: type, keywords: Any) -> None:
    assert [each.name for each in fields(kind)] == list(get_type_hints(keywords))


@pytest.mark.parametrize("verb", WITH_A_STEP)
def test_every_field_is_an_option_of_every_command(verb: str) -> None:
    named = {each.name for each in fields(TargetOptions) if "help" in each.metadata}
    named -= {"on_cpu"} if verb == "profile" else set()
    expected = {
        f"--{name.replace('_', '-')}" for name in named - ({"on_cpu"} if verb == "profile" else set())
    }
    assert expected <= flags(verb)


def test_a_new_field_is_an_option_without_more() -> None:
    from dataclasses import dataclass

    from tilefit.options import option

    @dataclass(frozen=True)
    class Wider(TargetOptions):
        wide: bool = option(False, "Wider.")

    asked: list[Wider] = []
    one = typer.Typer(add_completion=False)

    def command(context: typer.Context, *, options: Any) -> None:
        asked.append(options)

    command.__annotations__["options"] = Annotated[Wider, Group("The step")]
    command.__annotations__["context"] = typer.Context
    one.command()(grouped(command))
    one(["--wide", "--amp", "bf16", "--input", "x: fp32[2]", "--batch", "4"], standalone_mode=False)
    assert asked == [Wider(wide=True, amp="bf16", input=("x: fp32[2]",), batch=4)]


def test_no_autocast_has_one_spelling_inside() -> None:
    assert {StepOptions(amp=word).amp for word in ("off", "", None)} == {"off"}  # type: ignore[arg-type]
    assert (StepOptions().autocast, StepOptions(amp="bf16").autocast) == ("", "bf16")


@pytest.mark.parametrize("wrong", [{"amp": "fp8"}, {"optimizer": "adam"}])
def test_what_is_not_known_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="unknown"):
        StepOptions(**wrong)


def test_the_optimizers_that_can_be_named_can_be_made() -> None:
    for name in OPTIMIZERS:
        assert StepOptions(optimizer=name).optimizer == name  # type: ignore[arg-type]


def test_an_optimizer_that_does_not_run_has_no_options() -> None:
    with pytest.raises(UsageError, match="--fused-optimizer has no effect"):
        StepOptions(train=False, fused_optimizer=True).refuse_idle(["fused_optimizer"])
    with pytest.raises(UsageError, match="--fused-optimizer has no effect"):
        StepOptions(optimizer="none", fused_optimizer=True).refuse_idle(["fused_optimizer"])
    with pytest.raises(UsageError, match="--clip has no effect"):
        StepOptions(train=False, clip=1.0).refuse_idle(["clip"])
    with pytest.raises(UsageError, match="--clip is -1"):
        StepOptions(clip=-1)
    StepOptions(optimizer="none", train=False).refuse_idle(["optimizer"])


def test_keywords_go_to_what_they_belong_to() -> None:
    options, selection = taken("check", {"amp": "fp16", "select": "ALN"}, StepOptions, Selection)
    assert (options, selection) == (StepOptions(amp="fp16"), Selection(select=("ALN",)))
    with pytest.raises(TypeError, match=r"check\(\) got an unexpected keyword argument 'apm'"):
        tilefit.check(lambda: None, gpu="h200", apm="bf16")  # type: ignore[call-arg]


def test_a_split_counts_its_gpus() -> None:
    assert Split(tensor=4, data=2).gpus == 8
    assert Split().is_trivial
    assert not Split(micro_batches=4).is_trivial
    with pytest.raises(UsageError, match="tensor parallelism over 0 GPUs"):
        Split(tensor=0)
