"""dash-attn: bitwise reproducible attention training.

Names that need torch are imported on first use. Schedules are in `dash_attn.scheduling`, the simulator is in `dash_attn.simulation`; both
need numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CompileError, DashAttnError, ExecutionError, LedgerError, LostRank, RecordError, ScheduleError, Unsupported
from .masks import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window, from_block_mask, parse_mask

if TYPE_CHECKING:
    from .attention.explain import explain
    from .attention.functions import flash_attn_func
    from .attention.kv_cache import flash_attn_with_kvcache
    from .attention.side_by_side import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
    from .attention.varlen import flash_attn_varlen_func
    from .ledgers import ledger
    from .tools.doctor import doctor

__version__ = "1.0.0rc1"

_NEEDS_TORCH = {
    "doctor": ".tools.doctor",
    "explain": ".attention.explain",
    "flash_attn_func": ".attention.functions",
    "flash_attn_kvpacked_func": ".attention.side_by_side",
    "flash_attn_qkvpacked_func": ".attention.side_by_side",
    "flash_attn_varlen_func": ".attention.varlen",
    "flash_attn_with_kvcache": ".attention.kv_cache",
    "ledger": ".ledgers",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the names that are imported on first use."""
    return sorted({*globals(), *__all__})


__all__ = [
    "BooleanMask",
    "Causal",
    "CompileError",
    "DashAttnError",
    "Documents",
    "ExecutionError",
    "Full",
    "LedgerError",
    "LostRank",
    "Mask",
    "Prefix",
    "RecordError",
    "ScheduleError",
    "TileMap",
    "Unsupported",
    "Window",
    "doctor",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "from_block_mask",
    "ledger",
    "parse_mask",
]
