"""What in a process breaks reproducibility. `dash_attn.doctor()` is the way in."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from ...call.tensor_checks import check_flags
from ...formats import DIAGNOSES
from ..machine import Snapshot, installed_versions
from .checks import CHECKS, SEVERITIES, Finding, backend_of, look

__all__ = ["CHECKS", "Finding", "Snapshot", "doctor", "examine", "print_findings", "to_json"]


def doctor(show: bool = False) -> list[Finding]:
    """What in this process, as it is now, breaks bitwise reproducibility; errors first. `show` also prints it.

    Call it after all switches are set and before the first step. It changes nothing and does not initialise CUDA.
    """
    check_flags(show=show)
    findings = examine(Snapshot())
    if show:
        print_findings(findings)
    return findings


def examine(process: Snapshot) -> list[Finding]:
    """What is wrong, errors first."""
    found = [finding for check in CHECKS.values() if (finding := look(check, process)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def to_json(process: Snapshot, findings: Sequence[Finding]) -> str:
    """What a report of a fault needs."""
    gpu = None if process.gpu is None else process.gpu.name
    about = {"versions": installed_versions(), "gpu": gpu, "backend": backend_of(process)}
    return json.dumps({**DIAGNOSES.mark, **about, "findings": [asdict(finding) for finding in findings]}, indent=2)


def print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.severity}  {finding.id}: {finding.found}")
        print(f"    why: {finding.why}\n    fix: {finding.fix}\n    see: {finding.reference}")
    print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    if not counts["error"] and not counts["warning"]:
        return f"No error, no warning, {counts['info']} info"
    return "Found: " + ", ".join(f"{counts[severity]} {severity}" for severity in SEVERITIES)
