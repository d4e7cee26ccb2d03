"""What a run computed, step by step: recorded, read and compared. `dash_attn.ledger` records, `dash-attn diff` compares."""

from __future__ import annotations

from .comparing import Comparison, compare_runs
from .framing import LedgerError
from .reading import read_run
from .recorder import Ledger, ledger

__all__ = ["Comparison", "Ledger", "LedgerError", "compare_runs", "ledger", "read_run"]
