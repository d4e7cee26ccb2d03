"""dash-attn: bitwise reproducible attention training.

The scheduling core (masks, problems, schedules, simulation, plans) needs numpy alone; names that need torch are
imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .masks import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window, parse_mask
from .scheduling.generators import GENERATORS, generate
from .scheduling.plan import Plan, lower
from .scheduling.problem import Problem, Task
from .scheduling.schedule import Placement, Schedule
from .scheduling.validate import ScheduleError
from .simulation.simulate import Machine, Timeline, simulate

if TYPE_CHECKING:
    from .attention.explain import explain
    from .attention.functions import flash_attn_func
    from .attention.kv_cache import flash_attn_with_kvcache
    from .attention.side_by_side import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
    from .attention.varlen import flash_attn_varlen_func
    from .ledgers import ledger
    from .tools.doctor import doctor

__version__ = "0.1.0"

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
    "GENERATORS",
    "BooleanMask",
    "Causal",
    "Documents",
    "Full",
    "Machine",
    "Mask",
    "Placement",
    "Plan",
    "Prefix",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Task",
    "TileMap",
    "Timeline",
    "Window",
    "doctor",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "generate",
    "ledger",
    "lower",
    "parse_mask",
    "simulate",
]
