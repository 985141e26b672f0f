"""The entry point: verbs, and what happens when one fails."""

from __future__ import annotations

import atexit
import codecs
import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from tilefit.cli.commands import Verbs
from tilefit.errors import TilefitError
from tilefit.version import __version__

#: Exit codes beside the 0 and 1 of a check that found nothing or something.
COULD_NOT_RUN = 2
INTERRUPTED = 130
#: Characters of ASCII for those of reports.
_LIKE = dict(zip("µ·→…±×≈█▒░╌─│", "u->.~x~#+.~-|", strict=True))

#: In the order of the help. Each is the function of its name in the module of its name, or a group there.
VERBS = tuple(
    """check fix explain report rules rule gpu gemm sweep plan compare calibrate doctor tour precision profile
    bench curve""".split()
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tilefit {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What stands before the verb."""


@cache
def command(*verbs: str) -> Any:
    """The command line, with some of its verbs: to load all of them takes a while."""
    app = Verbs(
        name="tilefit",
        help="Find where a PyTorch model wastes a GPU, and what each fix is worth. No GPU needed.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for verb in verbs:
        module = import_module(f"tilefit.cli.{verb}")
        if hasattr(module, "app"):
            app.add_typer(module.app)
        else:
            app.command(**getattr(module, "SETTINGS", {}))(getattr(module, verb))
    made = typer.main.get_command(app)
    _unwrap(made)
    return made


def _unwrap(command: Any) -> None:
    """Make each paragraph of the help one line: it is broken where the terminal ends, not where code is."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for each in getattr(command, "commands", {}).values():
        _unwrap(each)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; no failure ends in a traceback.

    Exit codes: 0 nothing found, 1 findings, 2 could not run, 130 interrupted. ``TILEFIT_DEBUG=1`` lets an
    unexpected exception through, for the traceback.
    """
    codecs.register_error("likened", _likened)
    _keep_to_quota()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets one that is like it, not a crash.
        stream.reconfigure(errors="likened")  # type: ignore[union-attr]
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    if code == INTERRUPTED:  # once more ends what is left at once, and without a word
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _keep_to_quota(file: str = "/sys/fs/cgroup/cpu.max") -> None:
    """OpenBLAS starts a thread for each core of the machine, also in a container that may use a few: they
    would wait for each other. NumPy loads it later."""
    with suppress(OSError, ValueError):  # no container, or one without a quota ("max 100000")
        quota, period = map(int, Path(file).read_text().split())
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, quota // period)))


def _likened(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that cannot be shown: microseconds are not to read as any seconds."""
    assert isinstance(error, UnicodeEncodeError)
    shown = error.object[error.start : error.end]
    return "".join(_LIKE.get(character, "?") for character in shown), error.end


def _run(arguments: list[str]) -> int:
    try:
        named = [verb for verb in VERBS if verb in arguments[:1]]
        code = command(*named or VERBS)(arguments, prog_name="tilefit", standalone_mode=False)
        sys.stdout.flush()
    except TilefitError as error:
        _say(str(error))
        return COULD_NOT_RUN
    except typer.TyperException as error:
        # Without a verb the help was printed, and there is nothing to add.
        if message := error.format_message():
            # The checker of values (pydantic) puts its name for the kind of error before the sentence.
            message = message.replace("Value error, ", "")
            _say(f"{message}\n  Try: {_help_command(arguments)}")
        return COULD_NOT_RUN
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (``tilefit check … | head``). Python would complain again when it
        # flushes the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _say(f"no space is left to write to{f': {error.filename}' if error.filename else ''}")
            return COULD_NOT_RUN
        if os.environ.get("TILEFIT_DEBUG"):
            raise
        bug = "This is a bug in tilefit. Set TILEFIT_DEBUG=1 to see where it happened, and please report it."
        _say(f"{type(error).__name__}: {error}\n{bug}")
        return COULD_NOT_RUN
    return code if isinstance(code, int) else 0


def _help_command(arguments: Sequence[str]) -> str:
    verb = arguments[0] if arguments else ""
    if verb not in VERBS:
        return "tilefit --help"
    kinds = getattr(command(verb).commands[verb], "commands", {})
    return " ".join(["tilefit", verb, *(kind for kind in arguments[1:2] if kind in kinds), "--help"])


def _say(message: str) -> None:
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    start = "\x1b[1;31merror:\x1b[0m " if color else "error: "
    print(f"{start}{message}", file=sys.stderr)
