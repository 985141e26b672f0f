"""Running a user's script under a watch."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

from tilefit.capture.packages import imports_relatively, package_of
from tilefit.capture.sites import user_frames, user_line
from tilefit.errors import TargetError, TilefitError

#: So often a script is asked to end that catches everything, before the process is ended for it.
_REQUESTS = 3


class _Enough(BaseException):
    """The watch has seen its steps. Few scripts catch what is no Exception."""


class Watching(Protocol):
    """What looks on while a script runs, and ends it through ``on_end``."""

    on_end: Callable[[], None]

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def run_script(
    script: Path,
    arguments: list[str],
    watch: Watching,
    stuck: Callable[[], NoReturn] | None = None,
    explained: Callable[[BaseException], TilefitError | None] = lambda error: None,
) -> TilefitError | None:
    """Run a script as ``python script arguments`` does, under a watch, until it ends or the watch has.

    A script that imports from the package it is in runs as ``python -m package.script arguments`` does. What
    the script prints goes to stderr.

    Args:
        script: The script.
        arguments: Its arguments.
        watch: The watch, not started yet.
        stuck: Ends the process, where the script goes on whatever it is told, by a bare ``except:``.
        explained: What to say of an error that what stands around the script is the cause of.

    Returns:
        What went wrong in the script, caused by what it raised; None where it ended well or was ended.
    """
    argv, path = sys.argv[:], sys.path[:]
    requests, stdout = count(1), sys.stdout

    def end() -> None:
        if next(requests) > _REQUESTS and stuck is not None:
            with redirect_stdout(stdout):
                stuck()
        raise _Enough

    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    watch.on_end = end
    try:
        with redirect_stdout(sys.stderr), watch:
            run_as_main(script)
    except _Enough:
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's script may raise
        hint = "The script failed; what was found until then is reported."
        failed = explained(error) or failure(error, str(script), hint)
        if failed is not None:
            failed.__cause__ = error
        return failed
    finally:
        sys.argv, sys.path = argv, path
    return None


#: With what argparse leaves, and most that are called wrongly.
_WRONGLY_CALLED = 2


def failure(error: Exception | SystemExit, script: str, hint: str) -> TargetError | None:
    """What a script's end means to its user; None where it left well.

    Args:
        error: As the script let it out.
        script: Its name.
        hint: What to say of an exception.
    """
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) and error.code:
            asked = "Its own arguments stand behind --." if error.code == _WRONGLY_CALLED else ""
            return TargetError(f"the script left with exit code {error.code}", where=script, hint=asked)
        return TargetError(f"the script left, saying: {error.code}", where=script) if error.code else None
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return TargetError(f"{type(error).__name__}: {error.msg}", where=user_line(error))
    said = str(error).strip().partition("\n\n")[0] or next((f.line for f in user_frames(error)[-1:]), "")
    return TargetError(f"{type(error).__name__}: {said}", where=user_line(error) or script, hint=hint)


def run_as_main(script: Path) -> None:
    """Run a script in this process as Python runs one that it is started with."""
    package, root = package_of(script)
    if package and imports_relatively(script):
        sys.path.insert(0, str(root))
        runpy.run_module(f"{package}.{script.stem}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(script), run_name="__main__")
