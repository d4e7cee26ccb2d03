"""Tile sizes, warps and stages of the kernels. They decide bits, so they are a table in tiles.json, chosen offline: nothing is tuned
on the machine. What decides is the GPU's architecture, the width of a number and the head dims; never a length or the batch.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).parent / "tiles.json"
DIMS = (64, 128, 256)  # of the table: head dims in between take the next larger
PASSES = ("forward", "key_gradients", "query_gradients")


@dataclass(frozen=True)
class Tile:
    """Rows of a Q tile and of a KV tile; warps of the kernel that works on them, and how many tiles it has on the way in: stages of
    the loop over full tiles and of that over partial ones. Rows and warps decide bits, stages only the time."""

    q_rows: int
    kv_rows: int
    warps: int
    stages: int
    partial_stages: int = 1

    def __str__(self) -> str:
        return f"{self.q_rows} x {self.kv_rows}, {self.warps} warps, {self.stages} and {self.partial_stages} stages"


@dataclass(frozen=True)
class Tiles:
    """Of every pass."""

    architecture: str  # that the table has; a GPU that it does not list takes another's
    forward: Tile
    key_gradients: Tile
    query_gradients: Tile
    together: bool = False  # whether one launch runs both passes of the backward, which changes no bit: they have equal warps and stages

    def __post_init__(self) -> None:
        keys, queries = self.key_gradients, self.query_gradients
        if self.together and (keys.warps, keys.stages) != (queries.warps, queries.stages):
            raise ValueError(f"one launch has one number of warps and of stages; got {keys} and {queries}")

    def in_words(self) -> dict[str, str]:
        return {name.replace("_", " "): str(getattr(self, name)) for name in PASSES}


@cache
def read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def listed(architecture: str) -> str:
    """The entry of the table that an architecture takes: its own, that of a relative, or the one for all others."""
    table = read_table()
    others = table["other_amd" if architecture.startswith("gfx") else "others"]
    return architecture if architecture in table["16 bits"] else str(table["same_as"].get(architecture, others))


@cache
def tiles_for(architecture: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> Tiles:
    entry = listed(architecture)
    dim = next(dim for dim in DIMS if dim >= max(head_dim, value_dim))
    table = read_table()
    rows = (table["32 bits"] if dtype.itemsize == 4 else table["16 bits"][entry])[str(dim)]
    return Tiles(entry, **{name: Tile(*rows[name]) for name in PASSES}, together=rows.get("together", False))
