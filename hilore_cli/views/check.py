"""Checks of committed plans: a table for people, JUnit XML for CI systems."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from rich.console import Group, RenderableType
from rich.text import Text

from hilore_cli.views.layout import lines, make_table, stack

if TYPE_CHECKING:
    from hilore_cli.check_records import CheckReport, FileChecks

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def check_view(report: CheckReport) -> RenderableType:
    """One table a file, then the sum."""
    return stack(*(_file_view(file) for file in report.files), lines(summary_words(report)))


def _file_view(file: FileChecks) -> RenderableType:
    table = make_table("check", "", "")
    for check in file.checks:
        table.add_row(check.name, Text(check.status, style=STYLES[check.status]), check.detail)
    of = f" of profile {file.profile}" if file.profile else ""
    return Group(Text(f"{file.path}: {file.kind}{of}{', estimated' if file.estimated else ''}", style="bold"), table)


def summary_words(report: CheckReport) -> str:
    """`2 of 14 checks failed: plans/a.json: digest; plans/b.plan.json: solve`."""
    total = report.passed + report.failed + report.skipped
    failures = [f"{file.path}: {check.name}" for file in report.files for check in file.checks if check.status == "failed"]
    if failures:
        return f"{report.failed} of {total} checks failed: {'; '.join(failures)}"
    return f"{report.passed} of {total} checks passed, {report.skipped} skipped"


def junit_xml(report: CheckReport) -> bytes:
    """A test suite for each file, a test case for each check. The standard library writes it: the format is four kinds of element."""
    count = {"tests": report.passed + report.failed + report.skipped, "failures": report.failed, "errors": 0, "skipped": report.skipped}
    root = ElementTree.Element("testsuites", name="hilore check", **{key: str(value) for key, value in count.items()})
    for file in report.files:
        status = [check.status for check in file.checks]
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(file.path), timestamp=f"{report.date}T00:00:00", tests=str(len(status)), failures=str(status.count("failed")), errors="0", skipped=str(status.count("skipped")))
        if file.estimated:
            ElementTree.SubElement(ElementTree.SubElement(suite, "properties"), "property", name="estimated", value="true")
        for check in file.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=_clean(file.path), name=check.name)
            if check.status == "passed":
                ElementTree.SubElement(case, "system-out").text = _clean(check.detail)
            else:
                ElementTree.SubElement(case, {"failed": "failure", "skipped": "skipped"}[check.status], message=_clean(check.detail))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _clean(text: str) -> str:
    """Without what XML 1.0 cannot hold, such as control characters in a file's name."""
    return NOT_IN_XML.sub("?", text)
