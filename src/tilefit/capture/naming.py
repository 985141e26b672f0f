"""How targets are written. Nothing here imports PyTorch: a slip is told at once, by every command."""

from __future__ import annotations

from pathlib import Path

from tilefit.errors import TargetError, UsageError, near

#: What a target begins with that is not the user's own code, and how it goes on; the name of the module in
#: :mod:`tilefit.capture.targets.kinds` that loads it.
LIBRARIES = {"hf": "<type or config.json>", "torchvision": "<name>", "timm": "<name>"}


def is_script(target: str) -> bool:
    """Whether a target is a program, by its file."""
    return target.endswith(".py")


def has_source(target: str) -> bool:
    """Whether a target names code of the user's, not a library's model."""
    return target.partition(":")[0] not in LIBRARIES


def require_readable(target: str) -> None:
    """Check a target as far as can be without loading it.

    Raises:
        UsageError: the text is not understood.
        TargetError: the file it names is not there.
    """
    _, colon, name = target.partition(":")
    if not colon or not name or target.startswith(":"):
        *usages, last = (f"{prefix}:{rest}" for prefix, rest in LIBRARIES.items())
        if target.endswith(".ipynb"):
            raise UsageError(
                f"{target} is a notebook, and no program",
                hint="Check what it has made in the notebook itself, by %load_ext tilefit and %tilefit model "
                "inputs; or make a program of it: jupyter nbconvert --to script.",
            )
        if is_script(target) or (target and Path(target).is_dir()):
            _require_file(Path(target))
            raise UsageError(
                f"{target} is a program, and this takes a model",
                hint=f"Name the function in it that makes the model: {target}:build_model.",
            )
        raise UsageError(
            f"cannot read the target {target!r}",
            hint=f"Write file.py:factory, package.module:factory, {', '.join(usages)} or {last}.",
        )
    path = Path(target.rpartition(":")[0])
    if has_source(target) and path.suffix == ".py":
        _require_file(path)


def require_program(program: str, is_module: bool) -> None:
    """Check that a program is there; a module is looked for when it is run.

    Raises:
        TargetError: it is not.
    """
    if not is_module:
        _require_file(Path(program))


def program_file(program: str, is_module: bool) -> Path:
    """The file that a program begins in, links resolved."""
    if not is_module:
        return Path(program).resolve()
    path = Path(*program.split("."))
    return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).resolve()


def _require_file(path: Path) -> None:
    if path.is_file():
        return
    if path.is_dir():
        raise TargetError(f"{path} is a folder", hint="Name a file in it.")
    folder = path.parent if path.parent.is_dir() else Path()
    files = [str(file) for file in folder.glob("*.py") if file.is_file()]
    raise TargetError(f"there is no file {path}", hint=near(str(path), files))
