"""What in a process breaks reproducibility. `dash_attn.doctor()` is the way in."""

from __future__ import annotations

from .check import Finding
from .checks import CHECKS, examine
from .show import print_findings
from .snapshot import Snapshot, take_snapshot

__all__ = ["CHECKS", "Finding", "Snapshot", "doctor", "examine", "print_findings", "take_snapshot"]


def doctor(show: bool = False) -> list[Finding]:
    """What in this process, as it is now, breaks bitwise reproducibility; errors first. `show` also prints it.

    Call it after all switches are set and before the first step. It changes nothing and does not initialise CUDA.
    """
    findings = examine(take_snapshot())
    if show:
        print_findings(findings)
    return findings
