"""What `hilore doctor` found: a table for each subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hilore_cli.views.layout import lines, make_table, stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilore_cli.findings import Finding

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


def doctor_view(findings: Sequence[Finding]) -> RenderableType:
    subjects = dict.fromkeys(finding.subject for finding in findings)
    return stack(*(_subject_view(subject, [f for f in findings if f.subject == subject]) for subject in subjects), lines(doctor_words(findings)))


def _subject_view(subject: str, findings: Sequence[Finding]) -> RenderableType:
    table = make_table("looked at", "", "")
    for finding in findings:
        table.add_row(finding.name, Text(finding.status, style=STYLES[finding.status]), finding.detail)
    return Group(Text(subject, style="bold"), table)


def doctor_words(findings: Sequence[Finding]) -> str:
    """`1 problem: settings grpo.yaml: gradient_checkpointing; 2 warnings`."""
    count = {status: [f for f in findings if f.status == status] for status in STYLES}
    parts = [f"{len(count[status])} {status}{'s' if len(count[status]) != 1 else ''}" for status in ("problem", "warning")]
    if count["problem"]:
        parts[0] += ": " + "; ".join(f"{f.subject}: {f.name}" for f in count["problem"])
    else:
        parts[0] = "nothing blocks"
    return "; ".join(part for part in parts if not part.startswith("0 "))
