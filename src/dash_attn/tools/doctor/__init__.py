"""What in a process breaks reproducibility. `dash_attn.doctor()` is the way in."""

from __future__ import annotations

from ..machine import Snapshot
from .checks import CHECKS, SEVERITIES, Finding
from .show import print_findings

__all__ = ["CHECKS", "Finding", "Snapshot", "doctor", "examine", "print_findings"]


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
    found = [finding for check in CHECKS if (finding := check.finding(process)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
