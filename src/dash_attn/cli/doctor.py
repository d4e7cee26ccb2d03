"""`dash-attn doctor`: what in this environment breaks reproducibility."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tools.doctor import Finding

HELP = "find settings that break reproducibility in this environment"
TEXT = "Looks for settings that make training runs differ. Exit code 0: nothing found; 1: an error or a warning."
OWN_PROCESS = (
    "This command runs in its own process: it sees variables, versions and hardware. Switches of PyTorch that a training script sets\n"
    "can be seen only from inside it: call dash_attn.doctor(show=True) there. Here they have PyTorch's defaults, and are listed as info."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = OWN_PROCESS
    parser.add_argument("--json", action="store_true", help="print versions, backend and findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..invariance.record import in_words
    from ..tools.doctor import examine, print_findings, to_json
    from ..tools.doctor.checks import backend_in_words
    from ..tools.machine import Snapshot, current_gpu

    process = Snapshot(gpu=current_gpu())
    findings = remarks_for_flags(examine(process))
    if arguments.json:
        print(to_json(process, findings))
        print(OWN_PROCESS, file=sys.stderr)
    else:
        print_findings(findings)
        print(f"{backend_in_words(process)}\n{in_words()}\n\n{OWN_PROCESS}")
    return 1 if is_bad(findings) else 0


def is_bad(findings: list[Finding]) -> bool:
    return any(finding.severity != "info" for finding in findings)


def remarks_for_flags(findings: list[Finding]) -> list[Finding]:
    """Flags of this process say nothing about a training script, so they must not decide the exit code."""
    shown = [replace(finding, severity="info") if finding.scope == "flag" else finding for finding in findings]
    return sorted(shown, key=lambda finding: finding.severity == "info")
