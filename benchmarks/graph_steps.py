"""Steps compiled with ``mode="reduce-overhead"``, predicted and measured: rows of ``benchmarks/fix_gain.py``.

    PYTHONPATH=src python benchmarks/graph_steps.py

The plans of these rows have the fix ``compile`` in that mode. Their prices are those of the day of the
measurement, with the speed of that host.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    errors, kept = [], []
    for gpu in ("h200", "h100"):
        rows = json.loads((_RESULTS / f"fix_gain_compiled_{gpu}.json").read_text())["rows"]
        for row in rows:
            graphs = [fix["predicted_ms"] for fix in row["fixes"] if fix["name"] == "compile"]
            if not graphs:
                continue
            after = row["predicted_before_ms"] - sum(fix["predicted_ms"] for fix in row["fixes"])
            compiled, replayed = row["wall_ms"]
            errors.append(abs(after / replayed - 1))
            kept.append((compiled - replayed) / (row["predicted_before_ms"] - after))
            print(
                f"{gpu}  {row['model']:20} compiled {row['predicted_before_ms']:6.2f} ms (measured "
                f"{compiled:6.2f}), replayed {after:6.2f} ({replayed:6.2f}), by graphs {graphs[0]:6.2f}"
            )
    far = sum(error > 0.3 for error in errors)
    print(f"{len(errors)} steps: {median(errors):.1%} off, {max(errors):.0%} at most, {far} over 30 %")
    tenth, *_, last = quantiles(kept, n=10)
    print(
        f"They saved {median(kept):.2f} times what was said (eight of ten {tenth:.2f} to {last:.2f}, all "
        f"{min(kept):.2f} to {max(kept):.2f})"
    )


if __name__ == "__main__":
    main()
