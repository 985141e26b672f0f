"""Reports: plain data, built once and rendered in any format."""

from tilefit.report.build import build
from tilefit.report.formats import FORMATS, render
from tilefit.report.json_reader import load, loads
from tilefit.report.report import REPORT_SCHEMA, Comparison, Document, Report
from tilefit.report.watched import Table, Watched

__all__ = [
    "FORMATS",
    "REPORT_SCHEMA",
    "Comparison",
    "Document",
    "Report",
    "Table",
    "Watched",
    "build",
    "load",
    "loads",
    "render",
]
