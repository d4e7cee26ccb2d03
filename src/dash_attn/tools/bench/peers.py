"""Other attention kernels: those PyTorch brings, FlexAttention, and FlashAttention packages where installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .candidates import Candidate
from .flex import flex
from .packages import package_peers
from .pytorch_peers import pytorch_peers
from .shape import Shape


def peers(with_flex: bool = False) -> tuple[list[Candidate], dict[str, str]]:
    """Candidates, and why the others are missing."""
    packages, missing = package_peers()
    return [*pytorch_peers(), *([flex()] if with_flex else []), *packages], missing


def who_runs(shape: Shape, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Which candidates can compute a case at all, and why the others cannot."""
    refusals = {candidate.name: candidate.refuses(shape) for candidate in candidates}
    return {
        "case": str(shape),
        "runs": [name for name, reason in refusals.items() if reason is None],
        "cannot": {name: reason for name, reason in refusals.items() if reason is not None},
    }
