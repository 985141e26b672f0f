"""How many one-line mistakes the mixed-precision debugger finds in programs that were healthy.

Each statement about the scale of twenty healthy programs (``tests/precision/mutations.py``) is dropped,
doubled, swapped with its neighbour and moved. Whether that changes what is learnt is decided by training
without a watch: other weights, or an exception. Those that change it should be found, by any alarm; those
that do not must not be accused, by an error or a warning.

Run it with: python benchmarks/precision_mutations.py
It writes benchmarks/results/precision_mutations.json.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

# The programs are the tests'.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from precision.mutations import PROGRAMS, judge, mutations

RESULT = Path(__file__).parent / "results" / "precision_mutations.json"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("tilefit.precision").setLevel(logging.CRITICAL)
    start_s = time.perf_counter()
    verdicts = [(mutation, judge(mutation)) for name in sorted(PROGRAMS) for mutation in mutations(name)]
    kinds = Counter(mutation.kind for mutation, verdict in verdicts if verdict)
    outcomes = Counter(verdict for _, verdict in verdicts if verdict)
    changed = outcomes["found"] + outcomes["explained"] + outcomes["missed"] + outcomes["unexplained"]
    result = {
        "torch": torch.__version__,
        "programs": len(PROGRAMS),
        "mutations": sum(outcomes.values()),
        "kinds": dict(sorted(kinds.items())),
        "change_training": changed,
        "of_these_by_an_exception": outcomes["explained"] + outcomes["unexplained"],
        "found": outcomes["found"] + outcomes["explained"],
        "found_share": round((outcomes["found"] + outcomes["explained"]) / changed, 4),
        "found_share_without_exceptions": round(
            outcomes["found"] / (outcomes["found"] + outcomes["missed"]), 4
        ),
        "change_nothing": outcomes["silent"] + outcomes["accused"],
        "of_these_accused": outcomes["accused"],
        "missed": [str(m) for m, verdict in verdicts if verdict in ("missed", "unexplained")],
        "accused": [str(m) for m, verdict in verdicts if verdict == "accused"],
        "time_s": round(time.perf_counter() - start_s, 1),
    }
    for name, value in result.items():
        print(f"{name}: {value}")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


main()
