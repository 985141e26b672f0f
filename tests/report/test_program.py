"""What reports say of a program, in every format."""

from __future__ import annotations

import re
from dataclasses import replace

from inline_snapshot import snapshot

from report.conftest import HOSTILE
from tilefit.ops import Assumption
from tilefit.report import Report, loads, render


def test_a_program_on_a_terminal(of_program: Report) -> None:
    assert render(of_program) == snapshot("""\
gpt2 · training step on Big GPU 100GB
input_ids: int64[16,1024] · bf16 autocast · AdamW · 38.6 M parameters

Program  train.py --batch-size 16, stopped after 3 steps
Step     4 micro-batches of 4, AdamW, bf16 autocast
Waits    3 times a step; 2 copies of 2.00 MB
Time     50.0 ms (32.0 to 50.0 ms)  GPU 40.0 ms, host 5.00 ms
Rate     94.4 TFLOP/s  23.1 % of the bf16 peak, 410 TFLOP/s
Bound    █████████▒╌╌  █ math 74 %  ▒ memory 6 %  ╌ waits 20 %
Memory   9.31 GiB of 93.1 GiB (10.0 %)  largest batch that fits 4 x 46

GRD002  not priced  lm_head  modeling_gpt2.py:712
        The vocabulary of 50257 is odd, so the three products of the head cannot
        use TMA.
      · 50257 = 29 x 1733; 50304 = 64 x 786
      → Pad the embedding and the head to 50304 rows. (safe)

GPU time  gemm 92.5 %, optimizer 6.0 %, pointwise 1.2 %, other 0.2 %
Covers    99.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by
          bytes alone: mylib.scan (1, 4.00 MB)
Times     from a model fitted to measurements of this GPU
Note      The loss is the mean of the output.
Loader    train.py:12: batches of 4, 2 workers, pinned; 400 samples/s a process
          where it was timed
Loader    train.py:13: batches of 4, no workers, not pinned; not timed
Assumed   7 values, such as item of fp32[] at train.py:41: 2.31 (6 times)
Made up   torchvision.datasets.MNIST: 60000 random images
Next      tilefit gemm 16384 50257 768 --gpu big
          tilefit rule GRD002
""")


def test_all_of_a_program(of_program: Report) -> None:
    shown = render(of_program, show_all=True)
    assert shown[shown.index("Loader") :] == snapshot("""\
Loader      train.py:12: batches of 4, 2 workers, pinned; 400 samples/s a
            process where it was timed
Loader      train.py:13: batches of 4, no workers, not pinned; not timed
Assumed     7 values, such as item of fp32[] at train.py:41: 2.31 (6 times)
Made up     torchvision.datasets.MNIST: 60000 random images
            Where host and GPU meet:
            train.py:20 to: the host waits, 2.00 MB to the GPU
            train.py:41 item (2 times): the host waits
            train.py:20 cpu: the host goes on, 64.0 B to the host
            Values that were assumed:
            item of fp32[] at train.py:41: 2.31 (6 times)
            isnan of fp32[] at train.py:42: False
Next        tilefit gemm 16384 50257 768 --gpu big
            tilefit rule GRD002
""")


def test_a_program_in_markdown(of_program: Report) -> None:
    shown = render(of_program, "markdown")
    assert shown[shown.index("## The program") : shown.index("Covers")] == snapshot("""\
## The program

- Program: train.py --batch-size 16, stopped after 3 steps
- Step: 4 micro-batches of 4, AdamW, bf16 autocast
- Waits: 3 times a step; 2 copies of 2.00 MB
- Loader: train.py:12: batches of 4, 2 workers, pinned; 400 samples/s a process where it was timed
- Loader: train.py:13: batches of 4, no workers, not pinned; not timed
- Assumed: 7 values, such as item of fp32\\[\\] at train.py:41: 2.31 (6 times)
- Made up: torchvision.datasets.MNIST: 60000 random images

### Where host and GPU meet

- train.py:20 to: the host waits, 2.00 MB to the GPU
- train.py:41 item (2 times): the host waits
- train.py:20 cpu: the host goes on, 64.0 B to the host

### Values that were assumed

- item of fp32\\[\\] at train.py:41: 2.31 (6 times)
- isnan of fp32\\[\\] at train.py:42: False

""")


def test_a_program_on_a_page_and_in_a_notebook(of_program: Report) -> None:
    for page in (of_program.to_html(), render(of_program, "notebook")):
        for said in (
            "train.py --batch-size 16, stopped after 3 steps",
            "4 micro-batches of 4, AdamW, bf16 autocast",
            "7 values, such as item of fp32[] at train.py:41: 2.31 (6 times)",
            "torchvision.datasets.MNIST: 60000 random images",
            "train.py:20 to: the host waits, 2.00 MB to the GPU",
            "isnan of fp32[] at train.py:42: False",
            "not priced",
        ):
            assert said in page, said
    assert re.search(r"c-waits[^>]*></i>waits <b>10.0 ms", of_program.to_html())


def test_a_program_is_written_and_read_again_and_is_left_out_where_there_is_none(
    of_program: Report, report: Report
) -> None:
    assert loads(of_program.to_json()) == of_program
    assert of_program.to_dict()["program"]["meetings"][1] == {
        "kind": "wait",
        "name": "item",
        "source": "train.py:41",
        "blocks": True,
        "count": 2,
        "bytes": 0,
    }
    assert "program" not in report.to_dict()
    for format in ("text", "markdown", "notebook", "html"):
        assert "rogram</h2>" not in render(report, format)
        assert "Assumed" not in render(report, format)


def test_a_hostile_program_is_shown_as_text(of_program: Report) -> None:
    assert of_program.program is not None
    assumed = Assumption(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    around = replace(
        of_program.program, command=HOSTILE, step=HOSTILE, fake=(HOSTILE,), assumptions=(assumed,)
    )
    hostile = replace(of_program, program=around)
    for format in ("html", "notebook"):
        assert "<script>alert" not in render(hostile, format)
    for format in ("text", "markdown"):
        assert "\x1b" not in render(hostile, format, show_all=True)
