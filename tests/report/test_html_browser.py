"""The HTML page in a real browser: it is quiet, loads nothing, and can be worked with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import pytest

from report import browser
from report.conftest import HOSTILE
from tilefit.report import Comparison, Report, Table, Watched
from tilefit.report.report import BatchPoint, Combination, MemoryMoment
from tilefit.rules.finding import Alarm

_ROWS = "[...document.querySelectorAll('tbody tr[data-row]')].filter(row => row.offsetParent)"
_LABELS = f"{_ROWS}.map(row => row.querySelector('button').textContent)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    executable = browser.find()
    if executable is None:
        pytest.skip(f"no browser on this machine: looked for {', '.join(browser.NAMES)}")
    with browser.running(executable, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(chromium: browser.Browser, report: Report, tmp_path: Path) -> browser.Browser:
    """The report, every product with a tile; the page must have been quiet at the end of the test."""
    ops = tuple(replace(op, tile=(128, 256), waves=92.16) if op.product else op for op in report.ops)
    _open(chromium, replace(report, ops=ops), tmp_path)
    return chromium


def _open(chromium: browser.Browser, report: Report | Comparison | Watched, at: Path, **how: object) -> None:
    file = at / "page.html"
    file.write_text(report.to_html(), encoding="utf-8")
    chromium.open(file, **how)  # type: ignore[arg-type]
    assert chromium.errors == []
    assert chromium.requests == [file.as_uri()]


def test_a_head_sorts_by_its_column_and_again_the_other_way(page: browser.Browser) -> None:
    column = "[...document.querySelectorAll('th button')].find(b => b.textContent === 'times')"
    counts = f"{_ROWS}.map(row => Number(row.cells[3].textContent))"
    page.evaluate(f"{column}.id = 'times'")
    page.click("#times")
    assert page.evaluate(counts) == [12, 1, 1, 1, 1, 1, 1]
    assert page.evaluate("document.querySelector('[aria-sort]').textContent") == "times"
    page.click("#times")
    assert page.evaluate(counts) == [1, 1, 1, 1, 1, 1, 12]
    page.evaluate("document.querySelectorAll('th button')[5].id = 'bound'")
    page.click("#bound")
    assert page.evaluate(f"{_ROWS}.map(row => row.cells[5].textContent)") == [
        *["latency"],
        *["math"] * 4,
        *["memory"] * 2,
    ]


def test_words_find_operations_by_what_they_are_and_where(page: browser.Browser) -> None:
    page.click("input[type=search]")
    page.type("lm_head NN")
    assert page.evaluate(_LABELS) == ["gemm 16384x768x50257 NN bf16"]
    assert page.evaluate("document.querySelector('output').textContent") == (
        "1 operation of 18 in 1 row, 20.0 % of the GPU time"
    )


def test_a_row_counts_what_was_found_of_it(page: browser.Browser) -> None:
    page.click("input[type=search]")
    page.type("h.3.mlp")
    assert page.evaluate(f"{_ROWS}.map(row => [...row.cells].slice(1, 4).map(c => c.textContent))") == [
        ["1.000", "2.5 %", "1"]
    ]
    page.evaluate("document.querySelector('input').value = ''")
    page.type("h.*.mlp.act")
    assert page.evaluate(_LABELS) == ["gelu 50331648 bf16"]


def test_a_choice_filters_and_the_points_that_are_left_out_fade(page: browser.Browser) -> None:
    page.evaluate(
        "document.querySelector('[name=bound]').value = 'memory';"
        "document.querySelector('[name=bound]').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert page.evaluate(f"{_ROWS}.map(row => row.cells[5].textContent)") == ["memory", "memory"]
    assert page.evaluate("document.querySelectorAll('.dots circle:not(.out)').length") == 2


def test_selecting_a_row_highlights_its_point_and_draws_its_tiles(page: browser.Browser) -> None:
    page.click("tr[data-row='1'] button")
    point = "document.querySelector('.dots [data-row=\"1\"]')"
    ring = "document.querySelector('.ring')"
    assert page.evaluate(f"{ring}.getAttribute('cx') === {point}.getAttribute('cx')")
    assert page.evaluate(f"{ring}.getAttribute('visibility')") == "visible"
    assert page.evaluate("document.querySelector('tr.selected').dataset.row") == "1"
    drawn = page.evaluate("document.querySelector('.picture').textContent")
    # 50257 columns are 196.3 tiles of 256; 128 x 197 tiles on 100 SMs would be 252.2 waves, the report says 92.16.
    assert "gemm 16384x50257x768 TN bf16" in drawn
    assert "n = 50,257: 197 tiles of 256" in drawn
    assert "9,216 blocks on 100 SMs: 93 waves" in drawn
    assert "The last wave (yellow) keeps 16 of 100 SMs busy." in drawn
    facts = page.evaluate("document.querySelector('.facts').textContent")
    assert "modeling_gpt2.py:712" in facts


def test_an_operation_without_tiles_shows_its_limits(page: browser.Browser) -> None:
    page.click("tr[data-row='5'] button")
    assert "the bytes, at the memory's rate: 50.3 µs" in page.evaluate(
        "document.querySelector('.picture').textContent"
    )


def test_a_point_selects_its_row(page: browser.Browser) -> None:
    page.click(".dots [data-row='4']")
    assert page.evaluate("document.querySelector('tr.selected button').textContent") == "adamw 124000000 fp32"


def test_the_arrow_keys_move_through_the_table(page: browser.Browser) -> None:
    page.evaluate("document.querySelector('tr.selected button').focus()")
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert page.evaluate("document.querySelector('tr.selected').dataset.row") == "2"
    page.press("End")
    assert page.evaluate("document.activeElement.closest('tr').dataset.row") == "6"
    page.press("Home")
    assert page.evaluate("document.querySelector('tr.selected').dataset.row") == "0"
    assert page.evaluate("document.querySelectorAll('tbody button[tabindex=\"0\"]').length") == 1


def test_many_rows_are_shown_when_asked_for(
    chromium: browser.Browser, report: Report, tmp_path: Path
) -> None:
    ops = tuple(replace(report.ops[0], shape=f"{size}x8x8", time_s=1 / size) for size in range(1, 101))
    _open(chromium, replace(report, ops=ops), tmp_path)
    assert chromium.evaluate(f"{_ROWS}.length") == 40
    chromium.click(".more")
    assert chromium.evaluate(f"{_ROWS}.length") == 100
    assert chromium.evaluate("document.querySelector('.more').hidden")


def _chosen_from(report: Report) -> Report:
    """The report with what its two findings save together: less than both alone."""
    times = (((0,), 32e-3), ((1,), 38.8e-3), ((0, 1), 31e-3))
    return replace(report, tokens=1024, combinations=tuple(Combination(*each) for each in times))


def test_changes_are_tried_without_a_network(
    chromium: browser.Browser, report: Report, tmp_path: Path
) -> None:
    _open(chromium, _chosen_from(report), tmp_path)
    said = "document.querySelector('.whatif output').textContent"
    assert chromium.evaluate(said) == (
        "32 ms a step · 1.25 times as fast as 40 ms · 512,000 tokens per second"
    )
    chromium.click(".whatif label:last-of-type input")
    assert chromium.evaluate(said).startswith("31 ms a step · 1.29 times as fast")
    chromium.click(".whatif .price input")
    chromium.type("3.6")
    # 3.6 an hour is a thousandth a second: 1e9 tokens of 16,384 in 31 ms.
    assert chromium.evaluate(said).endswith("1.89 per billion tokens instead of 2.44")
    for box in (1, 2):
        chromium.click(f".whatif label:nth-of-type({box}) input")
    assert chromium.evaluate(said).startswith("40 ms a step · 410,000 tokens per second")
    assert chromium.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_anyone_from_reading_it(
    chromium: browser.Browser, report: Report, comparison: Comparison, tmp_path: Path, scheme: str
) -> None:
    axe = files(pytest.importorskip("axe_core_python")).joinpath("axe.min.js").read_text(encoding="utf-8")
    for document in (_chosen_from(report), comparison):
        _open(chromium, document, tmp_path, scheme=scheme)
        chromium.evaluate(f"{axe};0")
        told = "found.violations.map(each => `${each.impact} ${each.id}: ${each.nodes[0].html}`)"
        assert chromium.evaluate(f"axe.run().then(found => {told})") == []


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_width_in_both_schemes(
    chromium: browser.Browser, report: Report, tmp_path: Path, width: int, scheme: str
) -> None:
    name = "a_very_long_name_" * 40
    ops = tuple(replace(op, module=f"{op.module}.{name}") for op in report.ops)
    findings = tuple(replace(found, module=name, source=name, message=name) for found in report.findings)
    _open(
        chromium,
        replace(report, ops=ops, findings=findings, model=name),
        tmp_path,
        width=width,
        scheme=scheme,
    )
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    red, green, blue = chromium.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (red + green + blue > 600) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_it_is_dark_on_white_and_says_what_was_chosen(
    chromium: browser.Browser, report: Report, tmp_path: Path, scheme: str
) -> None:
    _open(chromium, _chosen_from(report), tmp_path, scheme=scheme, media="print")
    assert sum(chromium.evaluate("getComputedStyle(document.body).color.match(/\\d+/g).map(Number)")) < 200
    boxes = "[...document.querySelectorAll('.whatif input[type=checkbox]')]"
    assert chromium.evaluate(f"{boxes}.every(box => box.offsetParent)")


@pytest.mark.parametrize("width", [390, 1280])
def test_names_in_figures_are_whole_and_beside_each_other(
    chromium: browser.Browser, report: Report, tmp_path: Path, width: int
) -> None:
    moments = tuple(MemoryMoment(op, {"activations": (op + 1) << 34}) for op in range(3))
    memory = replace(report.step.memory, timeline=moments)
    curve = tuple(BatchPoint(1 << n, 0.1, 0.09, 0.11, 1 << 30) for n in range(20))
    device = replace(report.device, peaks_flop_per_s={"bf16": 410e12, "tf32": 205e12, "fp32": 150e12})
    ops = (*report.ops, replace(report.ops[0], dtype="tf32"))
    step = replace(report.step, memory=memory)
    drawn = replace(report, step=step, batch_curve=curve, batch=16, device=device, ops=ops)
    _open(chromium, drawn, tmp_path, width=width)
    names = chromium.evaluate("""[...document.querySelectorAll('svg.plot')].map(svg =>
        [...svg.querySelectorAll('text:not([transform])')].map(name => {
            const box = name.getBoundingClientRect();
            return [name.textContent, box.left, box.right, box.top + 2, box.bottom - 2];
        }))""")
    assert len(names) == 4
    for figure in names:
        assert all(left >= 0 and right <= width for _, left, right, *_ in figure)
        for (one, left, right, top, bottom), (other, *box) in combinations(figure, 2):
            apart = left >= box[1] or right <= box[0] or top >= box[3] or bottom <= box[2]
            assert apart, f"{one} lies over {other}"


def test_on_a_phone_what_is_selected_unfolds_below_its_row(
    chromium: browser.Browser, report: Report, tmp_path: Path
) -> None:
    _open(chromium, report, tmp_path, width=390)
    chromium.click("tr[data-row='3'] button")
    assert chromium.evaluate("document.querySelector('tr[data-row=\"3\"]').nextSibling.className") == "inline"
    assert "wgrad" in chromium.evaluate("document.querySelector('tr.selected').textContent")
    assert chromium.errors == []


def test_one_gpu_of_several_is_shown_at_a_time(
    chromium: browser.Browser, comparison: Comparison, tmp_path: Path
) -> None:
    _open(chromium, comparison, tmp_path)
    shown = "[...document.querySelectorAll('div.report')].map(each => !each.hidden)"
    assert chromium.evaluate(shown) == [True, False]
    chromium.click("#tab-1")
    assert chromium.evaluate(shown) == [False, True]
    assert chromium.evaluate("document.querySelectorAll('#gpu-1 tr.selected').length") == 1


def test_hostile_names_run_nothing(chromium: browser.Browser, hostile: Report, tmp_path: Path) -> None:
    name = f"</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>{HOSTILE}"
    ops = tuple(replace(op, module=name, source=name, reason=name) for op in hostile.ops)
    _open(chromium, replace(hostile, ops=ops, model=name), tmp_path)
    chromium.click("tr[data-row='2'] button")
    assert "<img src=x onerror=" in chromium.evaluate("document.querySelector('.facts').textContent")
    assert chromium.evaluate("typeof window.pwned") == "undefined"
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    assert chromium.errors == []
    assert len(chromium.requests) == 1


def test_the_policy_stops_a_script_and_a_picture_that_were_put_in(
    chromium: browser.Browser, report: Report, tmp_path: Path
) -> None:
    """So that an error in this very test would be seen by the others."""
    _open(chromium, report, tmp_path)
    chromium.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://192.0.2.1/x.png\" onerror=\"window.ran = 1\">')"
    )
    assert (
        chromium.evaluate("new Promise(done => setTimeout(() => done(typeof window.ran), 100))")
        == "undefined"
    )
    assert any("Content Security Policy" in error for error in chromium.errors)


def test_the_page_of_a_watched_run(chromium: browser.Browser, tmp_path: Path) -> None:
    alarm = Alarm(
        code="AMP001",
        severity="error",
        source="train.py:14",
        message=HOSTILE,
        fix="Unscale the gradients first.",
    )
    table = Table(HOSTILE, ("operation", "float16"), (("mm", "12"),))
    _open(
        chromium,
        Watched("train.py", ("fp16",), 20, (alarm,), (table,), (HOSTILE,), "1.0"),
        tmp_path,
        width=390,
    )
    assert "alert(1)" in chromium.evaluate("document.querySelector('.finding.error').textContent")
    assert (
        chromium.evaluate("getComputedStyle(document.querySelector('tbody td:nth-child(2)')).textAlign")
        == "right"
    )
