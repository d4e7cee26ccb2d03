"""All checks, and what they find in a snapshot."""

from __future__ import annotations

from .check import SEVERITIES, Check, Finding
from .flags import FLAG_CHECKS
from .snapshot import Snapshot
from .surroundings import SURROUNDING_CHECKS

CHECKS: tuple[Check, ...] = (*FLAG_CHECKS, *SURROUNDING_CHECKS)


def examine(snapshot: Snapshot) -> list[Finding]:
    """What is wrong, errors first."""
    found = [finding for check in CHECKS if (finding := check.finding(snapshot)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def is_bad(findings: list[Finding]) -> bool:
    return any(finding.severity != "info" for finding in findings)
