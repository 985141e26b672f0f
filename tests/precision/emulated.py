"""Watches loops of the catalogue on an emulated GPU, each in a fork of this process, which is spent.

Run as ``python -m precision.emulated [MODULE ...]`` with names of modules of ``precision.loops``; prints a
line of JSON for each loop.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from precision import loops
from precision.loops import computation, fresh, parts, protocol, shapes, storage, trials, values
from precision.test_catalogue import OF_THE_CPU
from tilefit import gpus
from tilefit.capture.program.run import on_emulated_gpu
from tilefit.precision import watch
from tilefit.report.watched import CANNOT

_MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (computation, fresh, protocol, shapes, storage, trials, values)
}


def _row(case: loops.Wrong | loops.Right) -> dict[str, object]:
    torch.manual_seed(0)
    try:
        with watch() as w:
            case.run()
    except Exception as error:  # noqa: BLE001 - what the emulated GPU cannot do is a row as well
        return {"raised": f"{type(error).__name__}: {str(error)[:200]}"}
    cannot = [check.code for check in w.report().checks if check.status == CANNOT]
    alarms = [[a.code, a.severity, int(a.source.rpartition(":")[2] or 0)] for a in w.alarms]
    return {"alarms": alarms, "cannot": cannot}


def main(names: list[str]) -> None:
    """Watch the loops of these modules; of all where none is named."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    wanted = {_MODULES[name].__name__ for name in names or _MODULES}
    parts.DEVICE = "cuda"
    with (
        tempfile.TemporaryDirectory() as folder,
        on_emulated_gpu(gpus.get("h100-sxm"), Path(folder)),
        torch.device("cuda"),
    ):
        gc.freeze()
        for case in [*loops.WRONG, *loops.RIGHT]:
            if case.name in OF_THE_CPU or case.run.__module__ not in wanted:
                continue
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                continue
            row = {"loop": case.name, "class": case.number, **_row(case)}
            if isinstance(case, loops.Wrong):
                row |= {"code": case.code, "lines": sorted(case.lines)}
            print(json.dumps(row), flush=True)
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
