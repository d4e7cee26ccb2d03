"""What a call would do, and what decides its bits: asked for without running it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    kernel_origins: dict[str, str] = field(default_factory=dict, compare=False)  # name -> packed or compiled here, by which compiler
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
            "tiles": f"{_tiles(self.backward_tiles)} in the backward, {_tiles(self.forward_tiles)} in the forward (queries x keys)",
            "workers": f"{self.workers}" + (f", {self.gang} resident together" if self.gang > 1 else ""),
            "plan": size_in_words(self.plan_bytes),
            "workspace": "none" if self.workspace_bytes is None else size_in_words(self.workspace_bytes),
            "predicted": self._prediction(),
            "kernels": self._kernels(),
        }
        if self.passes:
            rows["passes"] = "; ".join(f"{name}: {tiles}" for name, tiles in self.passes.items())
        return "\n".join(f"{name:<13} {text}" for name, text in rows.items())

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


def _tiles(rows: tuple[int, int]) -> str:
    return f"{rows[0]} x {rows[1]}"


def size_in_words(count: int) -> str:
    for unit, limit in (("bytes", 2**10), ("KiB", 2**20), ("MiB", 2**30)):
        if count < limit:
            return f"{count * 2**10 / limit:.4g} {unit}"
    return f"{count / 2**30:.4g} GiB"
