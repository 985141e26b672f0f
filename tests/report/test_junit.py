"""JUnit's XML."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from inline_snapshot import snapshot

from tilefit.report import Comparison, Document, Report, Watched, render


def _parsed(document: Document) -> Element:
    return ElementTree.fromstring(render(document, "junit"))


def test_a_report(report: Report) -> None:
    assert render(replace(report, version="1.0"), "junit") == snapshot("""\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="tilefit" tests="3" failures="2" errors="0">
  <testsuite name="gpt2 · training step on Big GPU 100GB" tests="3" failures="2" errors="0">
    <properties>
      <property name="tilefit" value="1.0" />
      <property name="gpu" value="big" />
    </properties>
    <testcase classname="tilefit.gpt2.big" name="check" />
    <testcase classname="tilefit.gpt2.big" name="ALN002 lm_head" file="transformers/models/gpt2/modeling_gpt2.py" line="712">
      <failure type="ALN002" message="saves 8.00 ms (20.0 %): The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.">The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
50257 = 29 x 1733; 50304 = 64 x 786
sm80 at 10.0 ms against sm90 at 2.00 ms
Fix (safe): Pad the embedding and the head to 50304 rows.</failure>
    </testcase>
    <testcase classname="tilefit.gpt2.big" name="NTC003 transformer.h.*.mlp.act" file="model.py" line="42">
      <failure type="NTC003" message="saves 1.20 ms (3.0 %): A chain of 3 pointwise operations reads and writes its activation 3 times.">A chain of 3 pointwise operations reads and writes its activation 3 times.
3 x 201 MB at 4 TB/s
Fix (advice): Compile the block, or call the fused form.</failure>
    </testcase>
  </testsuite>
</testsuites>
""")


def test_a_watched_run(watched: Watched) -> None:
    assert render(watched, "junit") == snapshot("""\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="tilefit" tests="3" failures="1" errors="1">
  <testsuite name="train.py · 20 steps watched" tests="3" failures="1" errors="1">
    <properties>
      <property name="tilefit" value="1.0" />
    </properties>
    <testcase classname="tilefit.train.py" name="check" />
    <testcase classname="tilefit.train.py" name="AMP001" file="project/train.py" line="14">
      <error type="AMP001" message="error, 20 times from step 0 on: clipped at 1 while the gradients carry a loss scale of 65536">clipped at 1 while the gradients carry a loss scale of 65536
effective limit 1 / 65536 = 1.5e-05
Fix: Call scaler.unscale_(optimizer) first.</error>
    </testcase>
    <testcase classname="tilefit.train.py" name="AMP018 AdamW" file="project/train.py" line="12">
      <failure type="AMP018" message="note, in step 2: 4 losses are not averaged">4 losses are not averaged
Fix: Divide each loss by 4.</failure>
    </testcase>
  </testsuite>
</testsuites>
""")


def test_the_counts_are_those_of_the_cases(
    report: Report, healthy: Report, comparison: Comparison, watched: Watched
) -> None:
    for document in (report, healthy, comparison, watched):
        root = _parsed(document)
        for element in (root, *root.iter("testsuite")):
            assert int(element.attrib["tests"]) == len(list(element.iter("testcase")))
            assert int(element.attrib["failures"]) == len(list(element.iter("failure")))
            assert int(element.attrib["errors"]) == len(list(element.iter("error")))


def test_nothing_found_is_a_test_that_passes(healthy: Report) -> None:
    (case,) = _parsed(healthy).iter("testcase")
    assert case.attrib["name"] == "check"
    assert case.findtext("system-out") == "Nothing worth changing."


def test_what_cannot_run_is_an_error_and_gpus_are_suites(comparison: Comparison) -> None:
    first, second = _parsed(comparison)
    assert (first.attrib["failures"], first.attrib["errors"]) == ("2", "0")
    assert (second.attrib["failures"], second.attrib["errors"]) == ("1", "1")
    (error,) = second.iter("error")
    assert error.attrib["message"] == "cannot run: The step needs 12 GiB, the GPU has 10 GiB."
    names = {case.attrib["classname"] for case in second.iter("testcase")}
    assert names == {"tilefit.gpt2.small"}


def test_names_cannot_become_markup_and_stay_xml(hostile: Report) -> None:
    (failure,) = _parsed(hostile).iter("failure")
    assert "<script>alert(1)</script>" in failure.attrib["message"]
    odd = replace(hostile.findings[0], module="a\ud800b\uffffc")
    (_, case) = _parsed(replace(hostile, findings=(odd,))).iter("testcase")
    assert case.attrib["name"] == "ALN002 a\ufffdb\ufffdc"
