"""What in a process breaks reproducibility. `dash_attn.doctor()` is the way in."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from ..machine import Snapshot
from .checks import CHECKS, SEVERITIES, Finding, look

__all__ = ["CHECKS", "Finding", "Snapshot", "doctor", "examine", "print_findings", "to_json"]
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
COLUMNS = ("severity", "check", "found", "why it matters", "fix")
PIPE_WIDTH = 200  # a pipe or file has no width of its own


def doctor(show: bool = False) -> list[Finding]:
    """What in this process, as it is now, breaks bitwise reproducibility; errors first. `show` also prints it.

    Call it after all switches are set and before the first step. It changes nothing and does not initialise CUDA.
    """
    findings = examine(Snapshot())
    if show:
        print_findings(findings)
    return findings


def examine(process: Snapshot) -> list[Finding]:
    """What is wrong, errors first."""
    found = [finding for check in CHECKS.values() if (finding := look(check, process)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def to_json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def print_findings(findings: Sequence[Finding]) -> None:
    """As a table: rich where it is installed, text elsewhere."""
    if findings:
        try:
            _print_rich(findings)
        except ModuleNotFoundError:
            _print_plain(findings)
    print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    if not counts["error"] and not counts["warning"]:
        return f"No error, no warning, {counts['info']} info"
    return "Found: " + ", ".join(f"{counts[severity]} {severity}" for severity in SEVERITIES)


def _print_rich(findings: Sequence[Finding]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    table = Table(*COLUMNS, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 1, 0))
    for finding in findings:
        cells = (finding.severity, finding.id, finding.found, finding.why, finding.fix)
        table.add_row(Text(cells[0], style=STYLES[finding.severity]), *map(Text, cells[1:]))
    console.print(table)


def _print_plain(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.severity}  {finding.id}: {finding.found}")
        print(f"    why: {finding.why}\n    fix: {finding.fix}\n    see: {finding.reference}")
