"""What a report says of a program of several ranks."""

from __future__ import annotations

from tilefit.cost.estimate import Streams
from tilefit.ops import Program
from tilefit.report import Report, render
from tilefit.report.json_reader import loads
from tilefit.report.ranks import CELLS, Ranks


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_head_says_what_is_exchanged_and_waited_for(of_ranks: Report) -> None:
    said = (
        "16 GPUs in 2 machines of 8; 2 collectives a step, 105 MB: 10.0 ms, of which 5.00 ms are waited for"
    )
    for name in ("text", "markdown", "notebook"):
        assert said in words(str(render(of_ranks, name)).replace("\n", " "))
    assert said in words(of_ranks.to_html())


def test_rows_and_lines_tell_which_and_when(of_ranks: Report) -> None:
    shown = words(str(render(of_ranks, show_all=True)))
    row = "all-reduce, backward, train.py:30, layers.0: 2 times, 105 MB over 16 GPUs of several machines, 10.0 ms"
    assert f"{row}, 5.00 ms waited for" in shown
    assert of_ranks.program is not None
    assert of_ranks.program.ranks is not None
    lanes = {lane.name: lane.busy for lane in of_ranks.program.ranks.lanes}
    assert lanes.keys() == {"computation", "communication"}
    assert sum(lanes["computation"]) / CELLS * 40 == 35
    assert abs(sum(lanes["communication"]) / CELLS * 40 - 10) < 0.05
    assert lanes["communication"][0] == lanes["computation"][-1] == 0
    blocks = "█" * (35 * CELLS // 40)
    assert f"computation {blocks}" in shown


def test_bubbles_of_a_pipeline_are_named_with_its_stages(of_stages: Report) -> None:
    shown = words(str(render(of_stages, show_all=True)))
    assert "0 of 16 GPUs in 2 machines of 8; 2 messages a step, 105 MB: 10.0 ms; 5.00 ms are waited," in shown
    assert "4.00 ms of it for other ranks (bubbles)" in shown
    assert "rank 0: GPU 35.0 ms, 4.00 GiB" in shown
    assert "rank 1: GPU 39.0 ms, 6.00 GiB" in shown
    assert "1 begin without who is missing" in shown


def test_it_is_kept_as_json(of_ranks: Report, of_stages: Report) -> None:
    assert loads(of_ranks.to_json()) == of_ranks
    assert loads(of_stages.to_json()) == of_stages


def test_one_process_has_no_ranks() -> None:
    assert Ranks.of(Program("train.py", "a step"), Streams(1.0)) is None
    assert Ranks.of(Program("train.py", "a step", ranks=4), None) is None
