"""Pictures of the page that a report makes, in both schemes, for the documentation; needs a Chromium.

PYTHONPATH=src:tests python benchmarks/page_pictures.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tilefit
from report import browser

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    executable = browser.find()
    if executable is None:
        raise SystemExit(f"no browser on this machine: looked for {', '.join(browser.NAMES)}")
    report = tilefit.check("hf:gpt2", batch=16, seq=1024, gpu="h200", amp="bf16")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(report.to_html(price=3.5), encoding="utf-8")
        with browser.running(executable, Path(folder) / "profile") as running:
            for scheme in ("light", "dark"):
                running.open(page, width=1100, height=800, scheme=scheme)
                running.screenshot(DOCS / f"page-{scheme}.webp", whole=False)


if __name__ == "__main__":
    main()
