"""Reports: plain data, built once and rendered in any format."""

from importlib import import_module
from pkgutil import iter_modules

from tilefit.formats import FORMATS, render
from tilefit.report.build import build
from tilefit.report.json_reader import load, loads
from tilefit.report.lesson import Lesson, explain
from tilefit.report.report import REPORT_SCHEMA, Comparison, Document, Report
from tilefit.report.watched import Table, Watched

__all__ = [
    "FORMATS",
    "REPORT_SCHEMA",
    "Comparison",
    "Document",
    "Lesson",
    "Report",
    "Table",
    "Watched",
    "build",
    "explain",
    "load",
    "loads",
    "render",
]

# Renderers register themselves.
for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
