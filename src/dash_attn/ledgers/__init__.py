"""What a run computed, step by step: recorded, read and compared. `dash_attn.ledger` records, `dash-attn diff` compares.

Recording needs PyTorch, which is imported on first use; comparing does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LedgerError
from .comparing import Comparison, compare_runs
from .reading import read_run

if TYPE_CHECKING:
    from .recorder import Ledger, ledger

__all__ = ["Comparison", "Ledger", "LedgerError", "compare_runs", "ledger", "read_run"]


def __getattr__(name: str) -> Any:
    if name not in ("Ledger", "ledger"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import recorder

    return getattr(recorder, name)
