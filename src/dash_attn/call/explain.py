"""What a call would do, and what decides its bits: asked for without running it."""

from dataclasses import dataclass, field
from typing import Any

from ..masks import Window
from ..scheduling.order import ALL_GUARANTEES
from .kv_cache import DECODE_EQUALS_TRAINING, CacheCall

HASH_DIGITS = 12  # of a sha256, enough to tell two apart


@dataclass(frozen=True)
class Explanation:
    """`order_hash` and `kernels` together name the bits: equal on two machines, equal bits for equal inputs.

    `print(explanation)` shows it as a table; `dataclasses.asdict` gives it to a log.
    """

    call: str = field(compare=False)  # shapes, dtype and mask, in words
    backend: str
    schedule: str
    accumulation: str
    guarantees: tuple[str, ...]  # none when sums are unordered
    order_hash: str
    backward_tiles: tuple[int, int]  # rows of a Q tile and of a KV tile
    forward_tiles: tuple[int, int]
    gang: int  # chains that must be resident together; 1 means none must
    workers: int
    plan_bytes: int
    workspace_bytes: int | None = None  # of the backward, beyond its gradients; None where the backend keeps no workspace
    predicted_backward_us: float | None = None  # simulated device time of the backward kernel
    prediction_note: str = ""  # what the prediction is of, or why there is none
    kernels: dict[str, str] = field(default_factory=dict)  # name -> sha256 of the machine code; empty where none was compiled
    kernel_origins: dict[str, str] = field(default_factory=dict, compare=False)  # name -> shipped or compiled here, by which compiler
    parts: int = 1  # of a group of query heads; with documents, those of the longest
    passes: dict[str, str] = field(default_factory=dict)  # tiles of each kernel, where they come from a table

    def __str__(self) -> str:
        groups = f", groups of query heads in {self.parts} parts" if self.parts > 1 else ""
        rows = {
            "call": self.call,
            "backend": self.backend,
            "schedule": f"{self.schedule}{groups}, order {self.order_hash}",
            "accumulation": self.accumulation,
            "guarantees": ", ".join(self.guarantees) or "none",
            "tiles": "{} x {} in the backward, {} x {} in the forward (queries x keys)".format(*self.backward_tiles, *self.forward_tiles),
            "workers": f"{self.workers}" + (f", {self.gang} resident together" if self.gang > 1 else ""),
            "plan": size_in_words(self.plan_bytes),
            "workspace": "none" if self.workspace_bytes is None else size_in_words(self.workspace_bytes),
            "predicted": self._prediction(),
            "kernels": self._kernels(),
        }
        if self.passes:
            rows["passes"] = "; ".join(f"{name}: {tiles}" for name, tiles in self.passes.items())
        return in_a_table(rows)

    def _kernels(self) -> str:
        """Those of one origin together."""
        hashes = {name: f"{name} {digest[:HASH_DIGITS]}" for name, digest in self.kernels.items()}
        origins = {name: self.kernel_origins.get(name, "") for name in hashes}
        groups = {origin: ", ".join(hashes[name] for name in hashes if origins[name] == origin) for origin in origins.values()}
        return "; ".join(f"{text} ({origin})" if origin else text for origin, text in groups.items()) or "none compiled"

    def _prediction(self) -> str:
        if self.predicted_backward_us is None:
            return f"none: {self.prediction_note}"
        return f"{self.predicted_backward_us:.1f} us, {self.prediction_note}"


def in_a_table(rows: dict[str, str]) -> str:
    return "\n".join(f"{name:<13} {text}" for name, text in rows.items())


def size_in_words(count: int) -> str:
    for unit, limit in (("bytes", 2**10), ("KiB", 2**20), ("MiB", 2**30)):
        if count < limit:
            return f"{count * 2**10 / limit:.4g} {unit}"
    return f"{count / 2**30:.4g} GiB"


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
        return in_a_table(rows)


def explanation_of_cache(call: CacheCall, backend: str, **rest: Any) -> CacheExplanation:
    """What every backend says of a call; the backend adds its own."""
    guarantees, read_bytes = (*ALL_GUARANTEES, DECODE_EQUALS_TRAINING), _bytes_at_most(call)
    return CacheExplanation(call_in_words(call), backend, guarantees, new_keys=call.new, read_bytes=read_bytes, **rest)


def call_in_words(call: CacheCall) -> str:
    q, k_cache, v_cache, options = call[:4]
    where = "rows" if call.block_table is None else f"pages of {k_cache.shape[1]}"
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
    cap = f", softcap {options.softcap:g}" if options.softcap else ""
    return f"{shapes}, {where}, {str(q.dtype).removeprefix('torch.')}, {options.mask}{cap}"


def _bytes_at_most(call: CacheCall) -> int:
    """Of every slot that a sequence may use, or of what its window can reach."""
    cache, queries, mask, keys = call.k_cache, call.q.shape[1], call.options.mask, call.capacity
    if isinstance(call.cache_seqlens, int):
        keys = min(keys, call.cache_seqlens + call.new)
    if isinstance(mask, Window) and mask.left >= 0:
        keys = min(keys, mask.left + queries + max(mask.right, 0))
    widths = cache.shape[3] + call.v_cache.shape[3]
    return len(call.q) * keys * cache.shape[2] * widths * cache.element_size()
