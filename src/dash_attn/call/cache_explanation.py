"""What a call with a cache would do, and what decides its bits: asked for without running it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..masks import Window
from ..scheduling.order import ALL_GUARANTEES
from .explanation import HASH_DIGITS, size_in_words
from .kv_cache import DECODE_EQUALS_TRAINING, CachePlaces, CacheTensors
from .options import AttentionOptions

CACHE_GUARANTEES = (*ALL_GUARANTEES, DECODE_EQUALS_TRAINING)


@dataclass(frozen=True)
class CacheExplanation:
    """`kv_rows` and `kernels` together name the bits: equal on two machines, equal bits for equal inputs.

    `print(explanation)` shows it as a table; `dataclasses.asdict` gives it to a log.
    """

    call: str = field(compare=False)  # shapes, dtype and mask, in words
    backend: str
    guarantees: tuple[str, ...]
    kv_rows: int  # of a KV tile: sums are cut there, counted from the first key of the sequence
    units: int  # pieces of work that run side by side
    served_by: str  # what runs a unit, in words
    new_keys: int  # per sequence, appended in place before anything is attended
    read_bytes: int  # keys and values that the call reads at most, each once
    kernels: dict[str, str] = field(default_factory=dict)  # name -> sha256 of the machine code; empty where none was compiled

    def __str__(self) -> str:
        rows = {
            "call": self.call,
            "backend": self.backend,
            "guarantees": ", ".join(self.guarantees),
            "tiles": f"{self.kv_rows} keys each, counted from the first key of the sequence",
            "units": f"{self.units}, {self.served_by}",
            "appended": f"{self.new_keys} keys per sequence" if self.new_keys else "nothing",
            "read": f"at most {size_in_words(self.read_bytes)} of keys and values, each once",
            "kernels": ", ".join(f"{name} {digest[:HASH_DIGITS]}" for name, digest in self.kernels.items()) or "none compiled",
        }
        return "\n".join(f"{name:<13} {text}" for name, text in rows.items())


def call_in_words(tensors: CacheTensors, places: CachePlaces, options: AttentionOptions) -> str:
    q, k_cache, v_cache = tensors.q, tensors.k_cache, tensors.v_cache
    where = "rows" if places.block_table is None else f"pages of {k_cache.shape[1]}"
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
    cap = f", softcap {options.softcap:g}" if options.softcap else ""
    return f"{shapes}, {where}, {str(q.dtype).removeprefix('torch.')}, {options.mask}{cap}"


def bytes_at_most(tensors: CacheTensors, places: CachePlaces, options: AttentionOptions) -> int:
    """Of every slot that a sequence may use, or of what its window can reach."""
    cache, queries, mask = tensors.k_cache, tensors.q.shape[1], options.mask
    keys = places.capacity(cache)
    if isinstance(places.cache_seqlens, int):
        keys = min(keys, places.cache_seqlens + places.new)
    if isinstance(mask, Window) and mask.left >= 0:
        keys = min(keys, mask.left + queries + max(mask.right, 0))
    widths = cache.shape[3] + tensors.v_cache.shape[3]
    return len(tensors.q) * keys * cache.shape[2] * widths * cache.element_size()
