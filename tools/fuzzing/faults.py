"""Faults to plant into the CPU backend, and within how many calls the tool must find each: what a defect would have looked like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dash_attn.attention import known
from dash_attn.backends.cpu import kv_cache, passes, tiles
from dash_attn.call import planning
from dash_attn.call.call import Call, Saved
from dash_attn.masks import rules

Fault = Callable[[Any], Any]  # of what is there, something else


def dropped_tile(healthy: Any) -> Any:
    """The second Q tile's contribution of the first KV tile is lost in the backward."""

    def gradients(self: Any, place: Any, k: Tensor, v: Tensor, at: Any, partial: bool) -> tuple[Tensor, Tensor]:
        weights, dscores = healthy(self, place, k, v, at, partial)
        lost = at.q_tile == 1 and at.kv_tile == 0
        return (weights, torch.zeros_like(dscores)) if lost else (weights, dscores)

    return gradients


def swapped_turns(healthy: Any) -> Any:
    """Every second backward adds to dQ in order of arrival, not in turn."""
    count = iter(range(2**62))

    def run_plan(plan: Any, arithmetic: Any, ordered: bool = True, chosen: Any = None) -> None:
        if next(count) % 2 == 0:
            return healthy(plan, arithmetic, ordered, chosen)
        from dash_attn.execution.interleaving import Interleaving

        return healthy(plan, arithmetic, False, Interleaving(seed=1))

    return run_plan


def narrow_window(healthy: Any) -> Any:
    """A window lacks its first key."""

    def row_bounds(self: Any, rows: Any, q_len: int, kv_len: int) -> Any:
        first, end = healthy(self, rows, q_len, kv_len)
        return (first + 1 if self.sides[0] > 0 else first), end

    return row_bounds


def stale_row(healthy: Any) -> Any:
    """The last sequence's new keys never reach the cache."""
    return lambda call, sequences: healthy(call, sequences[:-1])


def lost_lse_gradient(healthy: Any) -> Any:
    def init(self: Any, plan: Any, options: Any, rows: Any, of_rows: Any, share: Any, modifiers: Any = None) -> None:
        healthy(self, plan, options, rows, (of_rows[0], None), share, modifiers)

    return init


def batch_in_the_bits(healthy: Any) -> Any:
    """In a batch, the last bit of each output is another one."""

    def forward_of_share(call: Call, problem: Any, share: Any) -> Saved:
        out, lse = healthy(call, problem, share)
        return Saved(torch.nextafter(out, torch.full_like(out, torch.inf)) if len(call.q) > 1 else out, lse)

    return forward_of_share


def other_pairs_backward(healthy: Any) -> Any:
    """Dropout of the second KV tile repeats that of the first."""

    def kept(self: Any, at: Any) -> Any:
        return healthy(self, at._replace(kv_tile=0))

    return kept


# What is replaced, by what, and within how many calls of seed 0 it must be found.
FAULTS: dict[str, tuple[Any, str, Fault, int]] = {
    "a dropped tile": (tiles.BackwardTiles, "_gradients", dropped_tile, 40),
    "swapped turns": (passes, "run_plan", swapped_turns, 400),
    "a window that lacks a key": (rules.Band, "row_bounds", narrow_window, 60),
    "a stale row of the cache": (kv_cache, "_append", stale_row, 60),
    "a lost gradient of the LSE": (tiles.BackwardTiles, "__init__", lost_lse_gradient, 40),
    "bits that depend on the batch": (passes, "forward_of_share", batch_in_the_bits, 60),
    "dropout by the place in a tile": (tiles.Scores, "kept", other_pairs_backward, 400),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Nothing that was made before or inside is kept across the border."""
    where, attribute, fault, _ = FAULTS[name]
    forget()
    with patch.object(where, attribute, fault(getattr(where, attribute))):
        yield
    forget()


def forget() -> None:
    for kept in (tiles._dropped_by_rule, planning.plan_for, planning.plan_on_any, known._known):
        kept.cache_clear()
