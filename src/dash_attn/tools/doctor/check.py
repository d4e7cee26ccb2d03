"""One check: how to look, and what to say about what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .snapshot import Snapshot

Severity = Literal["error", "warning", "info"]
Scope = Literal["flag", "environment"]  # a flag is set inside the training script; the rest is there before it starts
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
AUTOTUNE = "torch.compile picks kernels by measured time, so two processes may run kernels with different tiles and different sums."


@dataclass(frozen=True)
class Finding:
    """Something that breaks reproducibility (error), may break it (warning), or is good to know (info)."""

    id: str
    severity: Severity
    scope: Scope
    found: str
    why: str
    fix: str
    reference: str


@dataclass(frozen=True)
class Check:
    """`look` says what is wrong with a snapshot, None if nothing is."""

    id: str
    severity: Severity
    scope: Scope
    look: Callable[[Snapshot], str | None]
    why: str
    fix: str
    reference: str

    def finding(self, snapshot: Snapshot) -> Finding | None:
        found = self.look(snapshot)
        return None if found is None else Finding(self.id, self.severity, self.scope, found, self.why, self.fix, self.reference)
