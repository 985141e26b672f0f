"""For continuous integration: JUnit's XML, a failed test for every finding.

There is no standard; the elements are those that the readers of Jenkins, GitLab and GitHub's actions have in
common: ``testsuites``, ``testsuite``, ``properties``, ``testcase``, ``failure``, ``error``.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from tilefit.formats import renders
from tilefit.report.remarks import Remark, Subject, subjects
from tilefit.report.report import Document
from tilefit.rules.finding import ERROR

#: What XML 1.0 cannot hold, besides the control characters that are gone by now.
_FORBIDDEN = re.compile("[\ud800-\udfff\ufffe\uffff]")


@renders(Document, "junit")
def render(document: Document) -> str:
    """A suite for every GPU: a test that passes for the check itself, one that fails for every finding."""
    root = Element("testsuites", name="tilefit")
    for subject in subjects(document):
        root.append(_suite(subject))
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.attrib[name]) for suite in root)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _suite(subject: Subject) -> Element:
    errors = sum(remark.severity == ERROR for remark in subject.remarks)
    suite = Element(
        "testsuite",
        name=_text(subject.title),
        tests=str(1 + len(subject.remarks)),
        failures=str(len(subject.remarks) - errors),
        errors=str(errors),
    )
    properties = SubElement(suite, "properties")
    for name, value in {"tilefit": subject.version, "gpu": subject.gpu}.items():
        if value:
            SubElement(properties, "property", name=name, value=_text(value))
    group = _text(".".join(filter(None, ("tilefit", subject.target, subject.gpu))))
    check = SubElement(suite, "testcase", classname=group, name="check")
    if not subject.remarks:
        SubElement(check, "system-out").text = subject.nothing
    for remark in subject.remarks:
        _case(suite, group, remark)
    return suite


def _case(suite: Element, group: str, remark: Remark) -> None:
    case = SubElement(
        suite, "testcase", classname=group, name=_text(f"{remark.code} {remark.module}".strip())
    )
    if remark.path:
        case.set("file", _text(remark.path))
    if remark.line is not None:
        case.set("line", str(remark.line))
    kind = "error" if remark.severity == ERROR else "failure"
    why = SubElement(case, kind, type=remark.code, message=_text(f"{remark.price}: {remark.message}"))
    why.text = _text("\n".join((remark.message, *remark.details)))


def _text(value: str) -> str:
    return _FORBIDDEN.sub("\ufffd", value)
