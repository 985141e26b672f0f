"""How long a newcomer waits for the first report: a fresh clone, installed by the README's command.

    python benchmarks/first_report.py [--rows benchmarks/results/first_report.json]

Each command is a process of its own, timed; how long it installs depends on the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "tilefit"
        commands = [(["git", "clone", "--quiet", str(ROOT), str(clone)], ROOT), (["make", "demo"], clone)]
        again = ([f"{clone}/.venv/bin/tilefit", "check", "examples/train.py:build", "--gpu", "h200"], clone)
        rows = [_timed(command, at) for command, at in (*commands, again)]
    about = {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commands": len(commands),
        "first_report_s": round(sum(row["s"] for row in rows[: len(commands)]), 1),
        "rows": rows,
    }
    print(json.dumps(about, indent=1))
    if options.rows:
        options.rows.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _timed(command: list[str], at: Path) -> dict[str, object]:
    began = time.monotonic()
    ran = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - began
    if ran.returncode > 1:  # 1 is findings
        raise SystemExit(f"{command}: {ran.stderr}")
    return {"command": f"{Path(command[0]).name} {command[1]}", "s": round(took_s, 1)}


if __name__ == "__main__":
    main()
