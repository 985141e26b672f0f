"""What a check that would end a program is taken to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilefit.emulation import checks

#: As if the emulated GPU's: a tensor's own ``__bool__`` is no frame of Python's.
_TENSOR = """
class Asked:
    def __bool__(self):
        found.append(expected())
        return bool(found[-1])

    def all(self):
        return self
"""
_PROGRAM = """
assert x and not y.all(), "both"
if not x.all() or (
    y
):
    raise ValueError
if x.all():
    found.append("either way")
assert all(each for each in (x, y))
if x.all() == 3:
    raise ValueError
"""


def test_a_check_that_would_end_the_program_finds_nothing_wrong(tmp_path: Path) -> None:
    names: dict[str, Any] = {"found": (found := []), "expected": checks.expected}
    exec(compile(_TENSOR, checks.__file__, "exec"), names)
    names["x"] = names["y"] = names["Asked"]()
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM)
    exec(compile(_PROGRAM, str(file), "exec"), names)
    assert found == [True, False, True, False, None, True, True]
